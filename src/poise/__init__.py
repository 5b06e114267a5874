"""Poise shares a cluster of mixed GPUs among people who train deep-learning models.

One deterministic scheduler core (`poise.scheduler.core`) runs in several worlds (`poise.service.backends`); see
ARCHITECTURE.md.
"""

TYPE_CHECKING = False  # as in `typing`, which takes time to import: runners and training scripts import this package too
if TYPE_CHECKING:
    from poise.client import Client as Client

__version__ = "0.1.0"
__all__ = ["Client", "__version__"]


def __getattr__(name: str) -> object:
    """`poise.Client`, brought in only where it is wanted."""
    if name == "Client":
        from poise.client import Client

        return Client
    raise AttributeError(f"module 'poise' has no attribute {name!r}")


def __dir__() -> list[str]:
    """All that there is, also what is not brought in yet."""
    return sorted({*globals(), *__all__})
