"""What the round mechanism remembers: each job's share, what it has received of it, and what it is owed.

`ShareAccounts` is frozen. `aligned` and `accounted` bring it up to date (steps 1 and 2 of `rounds.py`), `renewed` gives it
new shares (step 3), `counted` and the units say who is behind (step 4).
"""

from dataclasses import dataclass, replace
from math import inf
from typing import Any, Self

import numpy as np

from poise.scheduler.model.arithmetic import Bools, Floats, Ints
from poise.scheduler.model.job_table import Snapshot
from poise.scheduler.model.workload import Allocation, Leftover, Pairs, Workload

MOST_AHEAD, MOST_BEHIND = 4.0, 100.0
"""Rounds by which a job is remembered to be ahead or behind, at most."""
LEAST_CREDIT = 0.1
"""Least received time that patience leaves a running job, as a part of the credit: priority divides by it."""


@dataclass(frozen=True, slots=True)
class RoundParameters:
    """Seconds: the length of a round, the credit, and how far a running job may get ahead before it has to make way."""

    round: float
    credit: float
    patience: float


@dataclass(frozen=True)
class ShareAccounts:
    """Accounts of all active jobs. Arrays are by job, in the order of `rows`, and by column; late arrivals have no shares.

    covered    jobs that the shares were computed for
    received   seconds since the shares were computed, with the credit
    begun      what `received` was when the shares were computed
    owed       seconds behind the share when shares last changed
    pairs      shares of pairs, with time received of their own; a pair owes nothing, for new shares pair jobs anew
    order      GPU types, that on which jobs are fastest first
    since      time up to which `received` is counted;  due: end of the round after which to choose anew
    computed   time at which shares were computed;  gpus: GPUs alive then;  is_stale: something has changed since
    pinned     jobs that kept their GPUs whoever waited, when shares were computed; None: none did
    """

    rows: Ints
    covered: Bools
    share: Floats
    received: Floats
    begun: Floats
    owed: Floats
    pairs: Pairs
    pairs_received: Floats
    order: tuple[int, ...]
    allocation: Allocation
    since: float
    origin: float
    due: float
    computed: float
    gpus: Floats
    is_stale: bool
    policy: Any
    pinned: Bools | None = None

    @property
    def is_urgent(self) -> bool:
        """The allocation itself says who runs, so it is looked at, at every change."""
        return self.allocation.leftover is Leftover.IDLE

    @staticmethod
    def blank(workload: Workload, origin: float, memory: object) -> "ShareAccounts":
        """Accounts in which no job has a share yet."""
        nothing = np.zeros_like(workload.speed)
        return ShareAccounts(
            rows=workload.rows,
            covered=np.zeros(workload.jobs, dtype=bool),
            share=nothing,
            received=np.ones_like(nothing),
            begun=np.ones_like(nothing),
            owed=nothing,
            pairs=Pairs.none(),
            pairs_received=np.empty(0),
            order=tuple(range(workload.types)),
            allocation=Allocation(nothing),
            since=workload.now,
            origin=origin,
            due=workload.now,
            computed=-inf,
            gpus=workload.gpus,
            is_stale=True,
            policy=memory,
        )

    def renewed(self, workload: Workload, allocation: Allocation, memory: object, parameters: RoundParameters) -> Self:
        """The accounts with new shares: what was not received before is owed, and every job has a credit.

        With patience, debts are carried along: a job that is owed time has less of a credit and comes first, one that is
        ahead has more. Otherwise shares that change in every round would never be made up for.
        """
        elapsed = workload.now - self.computed if self.computed > -inf else 0.0
        owed = self.owed + self.share * elapsed - (self.received - self.begun)
        owed = np.where(self.covered[:, None], owed, 0.0)
        begun = np.full_like(allocation.share, parameters.credit)
        if parameters.patience > 0:
            owed = np.clip(owed, -MOST_AHEAD * parameters.round, MOST_BEHIND * parameters.round)
            # Priority grows with the debt without end, so that the smallest share has its turn.
            begun = np.where(owed > 0, begun / (1.0 + np.maximum(owed, 0.0) / parameters.credit), begun - owed)
        # Types by the mean of how fast jobs are on them, relative to where they are fastest.
        packed = workload.speed[:, : workload.types]
        fastest = packed.max(axis=1, initial=0.0)
        able = fastest > 0
        mean = (packed[able] / fastest[able, None]).mean(axis=0) if able.any() else np.zeros(workload.types)
        return replace(
            self,
            covered=np.ones(workload.jobs, dtype=bool),
            share=allocation.share,
            received=begun,
            begun=begun,
            owed=owed,
            pairs=allocation.pairs,
            pairs_received=np.full(len(allocation.pairs.share), parameters.credit),
            order=tuple(np.argsort(-mean, kind="stable").tolist()),
            allocation=allocation,
            computed=workload.now,
            gpus=workload.gpus,
            is_stale=False,
            policy=memory,
            pinned=workload.pinned,
        )

    def counted(self, workload: Workload, parameters: RoundParameters) -> Floats:
        """Received time as far as it counts for priority: a running job may get ahead by as much as patience allows."""
        if not parameters.patience:
            return self.received
        counted = self.received.copy()
        runs = np.flatnonzero((workload.held >= 0) & (workload.partner < 0))
        columns = workload.held[runs]
        counted[runs, columns] = np.maximum(counted[runs, columns] - parameters.patience, LEAST_CREDIT * parameters.credit)
        return counted

    def alone(self, column: int, jobs: Ints, counted: Floats) -> Floats:
        """Units of one job on a column, as (job, -1, column, share, received, owed) in six rows."""
        units = np.empty((6, len(jobs)))
        units[0], units[1], units[2] = jobs, -1, column
        units[3], units[4], units[5] = self.share[jobs, column], counted[jobs, column], self.owed[jobs, column]
        return units

    def together(self, pairs: Ints) -> Floats:
        """Units of two jobs, in the same form."""
        of = self.pairs
        columns = (of.first, of.second, of.column, of.share, self.pairs_received)
        return np.vstack([*(column[pairs] for column in columns), np.zeros(len(pairs))])


def accounted(accounts: ShareAccounts, workload: Workload, snapshot: Snapshot, length: float) -> ShareAccounts:
    """The accounts with the time received since the last choice, counted round by round in whole steps where one was done.

    A run that is stopped loses what it has done of a step. And whole steps make times that differ a little, which tell
    apart jobs that are equally far behind: they would otherwise be served in the same order for ever.
    """
    runs = np.flatnonzero(workload.held >= 0)
    columns = workload.held[runs]
    started = snapshot.floats(snapshot.columns.started)[runs]
    seconds = workload.now - np.maximum(started, accounts.since)
    speed = workload.speed[runs, columns]
    rounds = np.floor(seconds / length * (1.0 + 1e-12))
    counted = rounds * _whole_steps(speed, np.full_like(speed, length)) + _whole_steps(speed, seconds - rounds * length)
    if workload.part is not None:
        counted *= workload.part[runs]  # a part of the gang is a part of the time
    is_alone = workload.partner[runs] < 0
    received = accounts.received.copy()
    received[runs[is_alone], columns[is_alone]] += counted[is_alone]
    accounts = replace(accounts, received=received, since=workload.now)
    if is_alone.all():
        return accounts
    # A pair has received the time for which both of its jobs were there.
    of, had = accounts.pairs, dict(zip(runs.tolist(), seconds, strict=True))
    is_on = (workload.partner[of.first] == of.second) & (workload.held[of.first] == of.column)
    pairs_received = accounts.pairs_received.copy()
    for pair in np.flatnonzero(is_on).tolist():
        pairs_received[pair] += min(had[int(of.first[pair])], had[int(of.second[pair])])
    return replace(accounts, pairs_received=pairs_received)


def _whole_steps(speed: Floats, seconds: Floats) -> Floats:
    steps = np.floor(speed * seconds * (1.0 + 1e-12))
    counted: Floats = np.where(steps >= 1.0, steps / np.where(speed > 0, speed, 1.0), np.maximum(seconds, 0.0))
    return counted


def aligned(accounts: ShareAccounts, workload: Workload) -> ShareAccounts:
    """The accounts of the jobs that are there now: those gone are forgotten, new ones have nothing. Columns may be new."""
    columns = workload.speed.shape[1]
    is_same = len(accounts.rows) == workload.jobs and bool((accounts.rows == workload.rows).all())
    if is_same and columns == accounts.share.shape[1]:
        before, now = accounts.pinned, workload.pinned
        same_pinned = before is now or (before is not None and now is not None and bool((before == now).all()))
        is_stale = (accounts.gpus != workload.gpus).any() or not same_pinned
        return replace(accounts, is_stale=True) if is_stale else accounts
    place = np.searchsorted(accounts.rows, workload.rows)
    place[place == len(accounts.rows)] = 0
    known = accounts.rows[place] == workload.rows if len(accounts.rows) else np.zeros(workload.jobs, dtype=bool)

    def carried(of: Floats, new: float) -> Floats:
        result = np.full((workload.jobs, columns), new)
        result[known, : of.shape[1]] = of[place[known]]
        return result

    pairs, pairs_received = accounts.pairs, accounts.pairs_received
    if len(pairs.share):  # those of which both jobs are still there
        moved = np.searchsorted(workload.rows, accounts.rows)
        inside = np.minimum(moved, max(workload.jobs - 1, 0))
        is_there = workload.rows[inside] == accounts.rows if workload.jobs else np.zeros(len(accounts.rows), dtype=bool)
        kept = is_there[pairs.first] & is_there[pairs.second]
        first, second = moved[pairs.first[kept]], moved[pairs.second[kept]]
        pairs, pairs_received = Pairs(first, second, pairs.column[kept], pairs.share[kept]), pairs_received[kept]
    return replace(
        accounts,
        rows=workload.rows,
        covered=known & accounts.covered[place] if len(accounts.rows) else known,
        share=carried(accounts.share, 0.0),
        received=carried(accounts.received, 1.0),
        begun=carried(accounts.begun, 1.0),
        owed=carried(accounts.owed, 0.0),
        pairs=pairs,
        pairs_received=pairs_received,
        is_stale=True,
        pinned=None,
    )
