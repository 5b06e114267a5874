"""The only loop: facts from a back end into the core, wishes from the core to the back end, both into a journal."""

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Protocol

from poise.scheduler.core.scheduler import Scheduler
from poise.scheduler.model.action import Action, JournalEntry
from poise.scheduler.model.event import Event


class Backend(Protocol):
    """A world: it tells what happened, instant by instant, and does what it is asked."""

    def batches(self) -> Iterable[tuple[float, tuple[Event, ...]]]:
        """The facts of each instant, moments ascending; ends when nothing can happen any more."""

    def apply(self, now: float, actions: Sequence[Action]) -> None:
        """Carry out wishes in order."""


def go_on_forever() -> bool:
    """Go on to the end."""
    return True


def run(
    scheduler: Scheduler, backend: Backend, record: Callable[[JournalEntry], None], go_on: Callable[[], bool] = go_on_forever
) -> tuple[bool, float]:
    """Run until nothing can happen any more, or until `go_on` says no between two instants.

    `record` gets every instant once it has been carried out. Returns whether the end was reached, and the seconds that the
    scheduler took of it.
    """
    deciding = 0.0
    for now, events in backend.batches():
        if not go_on():
            return False, deciding
        began = perf_counter()
        actions = scheduler.handle(now, events)
        deciding += perf_counter() - began
        backend.apply(now, actions)
        record(JournalEntry(now, events, actions))
    return True, deciding


# Python's collector of cycles, out of the way of work that makes none.


@contextmanager
def collector_paused() -> Iterator[None]:
    """A run makes many objects, keeps most of them, and no cycles: looking for cycles again and again is wasted."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def freeze_heap() -> None:
    """What there is now will stay: the collector of a process that runs for long need not look at it again and again."""
    gc.collect()
    gc.freeze()
