"""Re-driving the core from a journal: the same facts must lead to the same wishes."""

from collections.abc import Iterable
from dataclasses import dataclass

from poise.scheduler.core.scheduler import Scheduler
from poise.scheduler.model.action import Action, JournalEntry
from poise.scheduler.model.errors import ReplayError


@dataclass(frozen=True, slots=True)
class Replayed:
    """How much was reproduced."""

    instants: int
    events: int
    actions: int


def replay(scheduler: Scheduler, entries: Iterable[JournalEntry]) -> Replayed:
    """Hand every fact to the core again; raises ReplayError at the first wish that differs, or fact that cannot be."""
    instants = events = actions = 0
    for entry in entries:
        got = _answer(scheduler, entry)
        if got != entry.actions:
            raise ReplayError(_difference(entry, got))
        instants += 1
        events += len(entry.events)
        actions += len(got)
    return Replayed(instants, events, actions)


def _answer(scheduler: Scheduler, entry: JournalEntry) -> tuple[Action, ...]:
    """What the core answers; facts that were tampered with may break it in any way, and that is news, not a crash."""
    try:
        return scheduler.handle(entry.now, entry.events)
    except Exception as error:
        problem = " ".join(f"{type(error).__name__}: {error}".split())
        raise ReplayError(f"at {entry.now}: the core cannot take in what the journal says: {problem}") from error


def _difference(entry: JournalEntry, got: tuple[object, ...]) -> str:
    for place, want in enumerate(entry.actions):
        if place >= len(got):
            return f"at {entry.now}: the journal has {want}, the core answers with nothing"
        if got[place] != want:
            return f"at {entry.now}: the journal has {want}, the core answers {got[place]}"
    return f"at {entry.now}: the core answers {got[len(entry.actions)]}, the journal has nothing"
