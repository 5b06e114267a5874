"""Python's collector of cycles, out of the way of work that makes none."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collector() -> Iterator[None]:
    """A run makes many objects, keeps most of them, and no cycles: looking for cycles again and again is wasted."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def set_aside() -> None:
    """What there is now will stay: the collector of a process that runs for long need not look at it again and again."""
    gc.collect()
    gc.freeze()
