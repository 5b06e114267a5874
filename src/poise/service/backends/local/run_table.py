"""The runs that are not over, and which of them have to be gone before another may begin."""

import os
from collections import defaultdict
from collections.abc import Iterator
from enum import Enum, auto
from itertools import count

from poise.service.backends.api import DesiredState, RunOrder

Key = tuple[str, int]
"""Job and epoch."""
Gpu = tuple[str, int]
"""Node and slot."""


class Phase(Enum):
    """How far a run has come.

    WAITING   for other runs to be gone
    UNKNOWN   has to be looked at: it was just taken up, or its runner has gone
    ALIVE     its runner is watched
    CLEANUP   its runner has gone or cannot be found, and what it left is being killed
    OVER      nothing of it is left
    """

    WAITING = auto()
    UNKNOWN = auto()
    ALIVE = auto()
    CLEANUP = auto()
    OVER = auto()


class LocalRun:
    """One run. `order` is None for a run that the journal does not know: it is ended, and not reported.

    sequence         order in which runs were taken up
    waiters          runs that wait for this one;  awaited: runs that this one waits for
    is_new           just ordered: no runner was started, so nothing can be left of it
    attempts         runners that were started
    lock_checks      looks in a row at which an unknown process had the lock
    port             MASTER_PORT; 0: none
    pid, pidfd       its runner; pidfd -1: none is watched
    ready            pipe that ends once all replicas have started; -1: closed
    lock             the run's lock, held by this process; -1: not held
    died_at          when its runner was seen to have gone
    runner_code      exit code of its runner; None: not known, or it has not ended
    had_leftovers    processes of it lived on after its runner had gone
    fault            exception of this service; the run is ended because of it
    progress_stamp   version of progress.json that was read last
    """

    def __init__(self, key: Key, gpus: frozenset[Gpu], order: RunOrder | None, desired: DesiredState) -> None:
        self.key, self.gpus, self.order, self.desired = key, gpus, order, desired
        self.phase = Phase.UNKNOWN
        self.waiters: list[LocalRun] = []
        self.awaited: set[Key] = set()
        self.is_new, self.has_begun, self.had_leftovers = True, False, False
        self.sequence = self.attempts = self.lock_checks = self.port = self.pid = 0
        self.pidfd = self.ready = self.lock = -1
        self.died_at: float | None = None
        self.runner_code: int | None = None
        self.fault: str | None = None
        self.progress_stamp: tuple[int, int, int] | None = None
        self._switches: int | None = None
        self._silence = 0.0

    @classmethod
    def of(cls, order: RunOrder, desired: DesiredState) -> "LocalRun":
        """Make the run of an order."""
        gpus = frozenset((part.node, slot) for part in order.gpus for slot in part.slots)
        return cls((order.job, order.epoch), gpus, order, desired)

    @property
    def must_end(self) -> bool:
        """Whether it was asked or told to end."""
        return self.desired is not DesiredState.RUN

    def silent_for(self, switches: int | None, seconds: float) -> float:
        """Note the context switches of its runner, `seconds` after the last look; for how long there were no new ones.

        Counted in looks, not by the clock: when the whole machine was suspended for an hour, no runner is to blame.
        """
        self._silence = self._silence + seconds if switches is not None and switches == self._switches else 0.0
        self._switches = switches
        return self._silence

    def release_lock(self) -> None:
        """Release the lock, if this process holds it."""
        if self.lock >= 0:
            os.close(self.lock)
        self.lock = -1


class RunTable:
    """All runs that are not over, by job and by GPU."""

    def __init__(self) -> None:
        self._runs: dict[Key, LocalRun] = {}
        self._by_job: defaultdict[str, set[Key]] = defaultdict(set)
        self._on: defaultdict[Gpu, set[Key]] = defaultdict(set)
        self._sequence = count()

    def __contains__(self, key: Key) -> bool:
        return key in self._runs

    def __iter__(self) -> Iterator[LocalRun]:
        """Iterate over a copy: callbacks remove runs."""
        return iter([*self._runs.values()])

    def get(self, key: Key) -> LocalRun | None:
        """Return the run; None if it is over or unknown."""
        return self._runs.get(key)

    def enter(self, run: LocalRun) -> None:
        """Add a run; it comes after all others."""
        run.sequence = next(self._sequence)
        self._runs[run.key] = run
        self._by_job[run.key[0]].add(run.key)
        for gpu in run.gpus:
            self._on[gpu].add(run.key)

    def remove(self, run: LocalRun) -> None:
        """Remove a run that is over: its GPUs are free."""
        del self._runs[run.key]
        job = run.key[0]
        self._by_job[job].discard(run.key)
        if not self._by_job[job]:
            del self._by_job[job]  # a service sees jobs without end; GPUs are few
        for gpu in run.gpus:
            self._on[gpu].discard(run.key)

    def blockers(self, run: LocalRun) -> list[LocalRun]:
        """Return the runs that have to be gone first: earlier runs of its job, and other jobs' runs on its GPUs.

        Not the run of the job that it shares GPUs with. Not runs that came later and are to stay: they wait for this one,
        and waiting only for earlier or ending runs is what keeps two runs from waiting for each other.
        """
        job, epoch = run.key
        earlier = {key for key in self._by_job.get(job, ()) if key[1] < epoch}
        beside = None if run.order is None else run.order.beside
        there = (self._runs[key] for gpu in run.gpus for key in self._on.get(gpu, ()) if key[0] not in (job, beside))
        before = {each.key for each in there if each.must_end or each.sequence < run.sequence}
        return [self._runs[key] for key in sorted(earlier | before)]
