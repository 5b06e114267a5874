"""Re-driving the core from a journal: the same facts must lead to the same wishes."""

from collections.abc import Iterable
from dataclasses import dataclass

from poise.core.scheduler import Scheduler
from poise.model.errors import ReplayError
from poise.model.journal import Entry


@dataclass(frozen=True, slots=True)
class Replayed:
    """How much was reproduced."""

    instants: int
    events: int
    actions: int


def replay(scheduler: Scheduler, entries: Iterable[Entry]) -> Replayed:
    """Hand every fact to the core again; raises ReplayError at the first wish that differs."""
    instants = events = actions = 0
    for entry in entries:
        got = scheduler.handle(entry.now, entry.events)
        if got != entry.actions:
            raise ReplayError(_difference(entry, got))
        instants += 1
        events += len(entry.events)
        actions += len(got)
    return Replayed(instants, events, actions)


def _difference(entry: Entry, got: tuple[object, ...]) -> str:
    for place, want in enumerate(entry.actions):
        if place >= len(got):
            return f"at {entry.now}: the journal has {want}, the core answers with nothing"
        if got[place] != want:
            return f"at {entry.now}: the journal has {want}, the core answers {got[place]}"
    return f"at {entry.now}: the core answers {got[len(entry.actions)]}, the journal has nothing"
