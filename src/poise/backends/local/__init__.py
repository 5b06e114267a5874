"""Real processes on one machine.

What is named here is imported when it is asked for: a runner imports modules below this one, and has to start in no time.
"""

TYPE_CHECKING = False  # as in records.py
if TYPE_CHECKING:
    from poise.backends.local.checking import checked
    from poise.backends.local.orders import LocalSettings
    from poise.backends.local.world import LocalWorld

__all__ = ["LocalSettings", "LocalWorld", "checked"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from poise.backends.local import checking, orders, world

    return {"checked": checking.checked, "LocalSettings": orders.LocalSettings, "LocalWorld": world.LocalWorld}[name]
