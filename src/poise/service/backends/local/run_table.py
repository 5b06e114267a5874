"""Which runs there are, where they are, and which have to be gone before another may begin."""

import os
from collections.abc import Iterator
from enum import Enum, auto
from itertools import count
from typing import TypeVar

from poise.service.backends.api import DesiredState, RunOrder

Key = tuple[str, int]
Gpu = tuple[str, int]
Name = TypeVar("Name", str, tuple[str, int])


class Phase(Enum):
    """How far a run has come.

    WAITING   for others to be gone
    OPEN      to be looked at: nothing is known of it, or its runner has gone
    ALIVE     its runner is watched
    LEFT      its runner has gone, or is not to be found, and what it has left is being ended
    OVER      nothing of it is left
    """

    WAITING = auto()
    OPEN = auto()
    ALIVE = auto()
    LEFT = auto()
    OVER = auto()


class LocalRun:
    """One run. `order` is None for a run that nobody ordered: it is ended, and not spoken of.

    is_new      nothing can be left of it: it has just been ordered, and no runner was started
    looks       in a row at which somebody had the lock, and nobody knew who
    code        that its runner ended with; None: that is not known, or it has not ended
    has_left    something of it was there after its runner had gone
    turns       that its runner has had (processes.turns_of);  silence: seconds without one more
    fault       what went wrong in this service; it is ended for that
    """

    def __init__(self, key: Key, gpus: frozenset[Gpu], order: RunOrder | None, grip: DesiredState) -> None:
        self.key, self.gpus, self.order, self.grip = key, gpus, order, grip
        self.phase = Phase.OPEN
        self.number = 0
        self.waiters: list[LocalRun] = []
        self.awaited: set[Key] = set()
        self.is_new = True
        self.attempts = 0
        self.looks = 0
        self.port = 0
        self.pid = 0
        self.process = -1
        self.lock = -1
        self.died: float | None = None
        self.code: int | None = None
        self.has_left = False
        self.turns: int | None = None
        self.silence = 0.0
        self.fault: str | None = None
        self.ready = -1
        self.has_begun = False
        self.seen: tuple[int, int, int] | None = None

    @classmethod
    def of(cls, order: RunOrder, grip: DesiredState) -> "LocalRun":
        """A run that was ordered."""
        gpus = frozenset((part.node, slot) for part in order.gpus for slot in part.slots)
        return cls((order.job, order.epoch), gpus, order, grip)

    def listen(self, turns: int | None, seconds: float) -> float:
        """Its runner had so many turns of a processor, `seconds` after the last look; for how long it has had no more.

        In looks, not by the clock: where all is frozen for an hour, and thawed, nobody is to blame.
        """
        self.silence = self.silence + seconds if turns is not None and turns == self.turns else 0.0
        self.turns = turns
        return self.silence

    def give_back(self) -> None:
        """The lock, if this world has it."""
        if self.lock >= 0:
            os.close(self.lock)
        self.lock = -1

    @property
    def must_end(self) -> bool:
        """It has been asked to leave, or told to."""
        return self.grip is not DesiredState.RUN


class RunTable:
    """All runs that are not over."""

    def __init__(self) -> None:
        self._runs: dict[Key, LocalRun] = {}
        self._by_job: dict[str, set[Key]] = {}
        self._on: dict[Gpu, set[Key]] = {}
        self._numbers = count()

    def __contains__(self, key: Key) -> bool:
        return key in self._runs

    def __iter__(self) -> Iterator[LocalRun]:
        return iter([*self._runs.values()])

    def get(self, key: Key) -> LocalRun | None:
        """The run, unless it is over."""
        return self._runs.get(key)

    def enter(self, run: LocalRun) -> None:
        """Take a run up."""
        run.number = next(self._numbers)
        self._runs[run.key] = run
        self._by_job.setdefault(run.key[0], set()).add(run.key)
        for gpu in run.gpus:
            self._on.setdefault(gpu, set()).add(run.key)

    def remove(self, run: LocalRun) -> None:
        """It is over, and its GPUs are free."""
        del self._runs[run.key]
        _discard(self._by_job, run.key[0], run.key)
        for gpu in run.gpus:
            _discard(self._on, gpu, run.key)

    def blockers(self, run: LocalRun) -> list[LocalRun]:
        """Who has to be gone first: earlier runs of its job, and whoever was on its GPUs before it, but for whom it joins.

        Nobody waits for a run that came after it and may be waiting itself, so nobody waits for ever.
        """
        job, epoch = run.key
        earlier = {key for key in self._by_job.get(job, ()) if key[1] < epoch}
        beside = None if run.order is None else run.order.beside
        there = (self._runs[key] for gpu in run.gpus for key in self._on.get(gpu, ()) if key[0] not in (job, beside))
        before = {each.key for each in there if each.must_end or each.number < run.number}
        return [self._runs[key] for key in sorted(earlier | before)]


def _discard(sets: dict[Name, set[Key]], name: Name, key: Key) -> None:
    keys = sets[name]
    keys.discard(key)
    if not keys:
        del sets[name]
