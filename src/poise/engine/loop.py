"""Driving a core: `run` puts it in a loop with a back end; `replay` feeds it a journal and compares what it answers.

This is the only loop there is: the simulator runs in it, and a live service follows the same three steps per batch.
"""

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from time import perf_counter
from typing import Protocol

from poise.engine.journal import action_text
from poise.scheduler.core.scheduler import Scheduler
from poise.scheduler.model.action import Action, JournalEntry
from poise.scheduler.model.errors import ReplayError
from poise.scheduler.model.event import Event


class Backend(Protocol):
    """A world for the scheduler to act on: it reports what happened, batch by batch, and does what it is asked."""

    def batches(self) -> Iterable[tuple[float, tuple[Event, ...]]]:
        """Timestamps, never descending, each with its events; ends when nothing can happen any more."""

    def apply(self, now: float, actions: Sequence[Action]) -> None:
        """Carry out actions in order."""


def run(
    scheduler: Scheduler, backend: Backend, record: Callable[[JournalEntry], None], go_on: Callable[[], bool] = lambda: True
) -> tuple[bool, float]:
    """Run until nothing can happen any more, or until `go_on` returns False between two batches.

    `record` gets each entry after its actions have been applied. Returns whether the end was reached, and the seconds
    that the scheduler took.
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


@dataclass(frozen=True, slots=True)
class Replayed:
    """How much was reproduced: entries (`instants`), and their events and actions."""

    instants: int
    events: int
    actions: int


def replay(scheduler: Scheduler, entries: Iterable[JournalEntry]) -> Replayed:
    """Pass every event of a journal to a core again.

    Raises ReplayError at the first action that differs from the journal's, or event that the core cannot take.
    """
    instants = events = actions = 0
    for entry in entries:
        try:
            got = scheduler.handle(entry.now, entry.events)
        except Exception as error:  # events that were tampered with may break the core in any way
            problem = " ".join(f"{type(error).__name__}: {error}".split())
            raise ReplayError(f"at {entry.now}: the core cannot take in what the journal says: {problem}") from error
        for want, answer in zip_longest(entry.actions, got):
            if want != answer:
                journal, core = ("nothing" if each is None else action_text(each) for each in (want, answer))
                raise ReplayError(f"at {entry.now}: the journal has {journal}, the core answers {core}")
        instants += 1
        events += len(entry.events)
        actions += len(got)
    return Replayed(instants, events, actions)


# Python's garbage collector looks for reference cycles by walking all objects. The scheduler keeps many objects and makes no
# cycles, so that is wasted time.


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector, for a run of limited length."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def freeze_heap() -> None:
    """Exempt all present objects from garbage collection, for a process that runs for long."""
    gc.collect()
    gc.freeze()
