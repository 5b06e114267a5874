"""The only loop: facts from a back end into the core, wishes from the core to the back end, both into a journal."""

from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import Protocol

from poise.core.scheduler import Scheduler
from poise.model.action import Action
from poise.model.event import Event
from poise.model.journal import Entry


class Backend(Protocol):
    """A world: it tells what happened, instant by instant, and does what it is asked."""

    def instants(self) -> Iterable[tuple[float, tuple[Event, ...]]]:
        """The facts of each instant, moments ascending; ends when nothing can happen any more."""

    def apply(self, now: float, actions: Sequence[Action]) -> None:
        """Carry out wishes in order."""


def always() -> bool:
    """Go on to the end."""
    return True


def run(
    scheduler: Scheduler, backend: Backend, record: Callable[[Entry], None], go_on: Callable[[], bool] = always
) -> tuple[bool, float]:
    """Run until nothing can happen any more, or until `go_on` says no between two instants.

    `record` gets every instant once it has been carried out. Returns whether the end was reached, and the seconds that the
    scheduler took of it.
    """
    deciding = 0.0
    for now, events in backend.instants():
        if not go_on():
            return False, deciding
        began = perf_counter()
        actions = scheduler.handle(now, events)
        deciding += perf_counter() - began
        backend.apply(now, actions)
        record(Entry(now, events, actions))
    return True, deciding
