"""Real processes on one machine.

What is named here is imported when it is asked for: a runner imports modules below this one, and has to start in no time.
"""

TYPE_CHECKING = False  # as in records.py
if TYPE_CHECKING:
    from poise.service.backends.local.backend import LocalBackend
    from poise.service.backends.local.orders import LocalSettings, checked

__all__ = ["LocalBackend", "LocalSettings", "checked"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from poise.service.backends.local import backend, orders

    return {"checked": orders.checked, "LocalSettings": orders.LocalSettings, "LocalBackend": backend.LocalBackend}[name]
