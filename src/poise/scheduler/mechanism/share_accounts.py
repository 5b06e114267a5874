"""How far everybody has come with their shares: what the mechanism of rounds remembers."""

from dataclasses import dataclass, replace
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from poise.scheduler.model.arithmetic import Floats, Ints
from poise.scheduler.model.job_table import Snapshot
from poise.scheduler.model.workload import Allocation, Leftover, Pairs, Workload

MOST_AHEAD, MOST_BEHIND = 4.0, 100.0
"""Rounds that a job is remembered to be ahead or behind."""
LEAST_CREDIT = 0.1
"""Part of the credit that a patient runner counts for at least."""


@dataclass(frozen=True, slots=True)
class RoundParameters:
    """Seconds: the length of a round, the credit, and how far a running job may get ahead before it has to make way."""

    round: float
    credit: float
    patience: float


@dataclass(frozen=True)
class ShareAccounts:
    """Arrays are by job, in the order of `rows`, and by column; shares are 0 for jobs that came later.

    covered    jobs that the shares were computed for
    received   seconds since the shares were computed, with the credit
    begun      what `received` was when the shares were computed
    owed       seconds behind the share when shares last changed
    pairs      shares of pairs, with time received of their own; a pair owes nothing, for new shares pair jobs anew
    order      GPU types, that on which jobs are fastest first
    since      moment up to which `received` is counted;  due: end of the round after which to choose anew
    computed   moment at which shares were computed;  gpus: GPUs alive then;  is_stale: something has changed since
    pinned     jobs that kept their GPUs whoever waited, when shares were computed; None: nobody did
    """

    rows: Ints
    covered: NDArray[np.bool_]
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
    pinned: NDArray[np.bool_] | None = None

    @property
    def is_urgent(self) -> bool:
        """The allocation itself says who runs: it is to be looked at, at every change."""
        return self.allocation.leftover is Leftover.IDLE

    @staticmethod
    def blank(workload: Workload, origin: float, memory: object) -> "ShareAccounts":
        """Nobody has a share yet."""
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

    def renewed(self, workload: Workload, allocation: Allocation, memory: object, terms: RoundParameters) -> "ShareAccounts":
        """With new shares: what was not received before is owed, and everybody has a credit.

        Where debts are carried along, who is owed time has less of a credit and comes first, who is ahead has more: or
        else shares that change in every round would never be made up for.
        """
        elapsed = workload.now - self.computed if self.computed > -inf else 0.0
        owed = self.owed + self.share * elapsed - (self.received - self.begun)
        owed = np.where(self.covered[:, None], owed, 0.0)
        begun = np.full_like(allocation.share, terms.credit)
        if terms.patience > 0:
            owed = np.clip(owed, -MOST_AHEAD * terms.round, MOST_BEHIND * terms.round)
            # Priority grows with the debt without end, so that the smallest share has its turn.
            begun = np.where(owed > 0, begun / (1.0 + np.maximum(owed, 0.0) / terms.credit), begun - owed)
        pairs = allocation.pairs
        return replace(
            self,
            covered=np.ones(workload.jobs, dtype=bool),
            share=allocation.share,
            received=begun,
            begun=begun,
            owed=owed,
            pairs=pairs,
            pairs_received=np.full(len(pairs.share), terms.credit),
            order=_fastest_first(workload),
            allocation=allocation,
            computed=workload.now,
            gpus=workload.gpus,
            is_stale=False,
            policy=memory,
            pinned=workload.pinned,
        )

    def counted(self, workload: Workload, terms: RoundParameters) -> Floats:
        """What everybody has received, as far as it counts: a job that runs may get ahead by as much as patience allows."""
        if not terms.patience:
            return self.received
        counted = self.received.copy()
        runs = np.flatnonzero((workload.held >= 0) & (workload.partner < 0))
        columns = workload.held[runs]
        counted[runs, columns] = np.maximum(counted[runs, columns] - terms.patience, LEAST_CREDIT * terms.credit)
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


def accounted(standing: ShareAccounts, workload: Workload, snapshot: Snapshot, length: float) -> ShareAccounts:
    """With the time received since the last choice, counted round by round in whole steps where at least one was done.

    What a run has done of a step it loses when it is stopped; and times that differ a little tell apart jobs that are
    equally far behind, which would else be served in the same order for ever.
    """
    runs = np.flatnonzero(workload.held >= 0)
    columns = workload.held[runs]
    started = snapshot.floats(snapshot.columns.started)[runs]
    seconds = workload.now - np.maximum(started, standing.since)
    speed = workload.speed[runs, columns]
    rounds = np.floor(seconds / length * (1.0 + 1e-12))
    counted = rounds * _whole_steps(speed, np.full_like(speed, length)) + _whole_steps(speed, seconds - rounds * length)
    if workload.part is not None:
        counted *= workload.part[runs]  # a part of the gang is a part of the time
    is_alone = workload.partner[runs] < 0
    received = standing.received.copy()
    received[runs[is_alone], columns[is_alone]] += counted[is_alone]
    standing = replace(standing, received=received, since=workload.now)
    return (
        standing if is_alone.all() else _pairs_accounted(standing, workload, dict(zip(runs.tolist(), seconds, strict=True)))
    )


def _whole_steps(speed: Floats, seconds: Floats) -> Floats:
    steps = np.floor(speed * seconds * (1.0 + 1e-12))
    counted: Floats = np.where(steps >= 1.0, steps / np.where(speed > 0, speed, 1.0), np.maximum(seconds, 0.0))
    return counted


def _pairs_accounted(standing: ShareAccounts, workload: Workload, seconds: dict[int, float]) -> ShareAccounts:
    of = standing.pairs
    is_on = (workload.partner[of.first] == of.second) & (workload.held[of.first] == of.column)
    received = standing.pairs_received.copy()
    for pair in np.flatnonzero(is_on).tolist():
        received[pair] += min(seconds[int(of.first[pair])], seconds[int(of.second[pair])])
    return replace(standing, pairs_received=received)


def aligned(standing: ShareAccounts, workload: Workload) -> ShareAccounts:
    """For the jobs that are there now: those gone are forgotten, new ones have nothing yet. Columns may have appeared."""
    columns = workload.speed.shape[1]
    is_same = len(standing.rows) == workload.jobs and bool((standing.rows == workload.rows).all())
    if is_same and columns == standing.share.shape[1]:
        is_stale = (standing.gpus != workload.gpus).any() or not _same(standing.pinned, workload.pinned)
        return replace(standing, is_stale=True) if is_stale else standing
    place = np.searchsorted(standing.rows, workload.rows)
    place[place == len(standing.rows)] = 0
    known = standing.rows[place] == workload.rows if len(standing.rows) else np.zeros(workload.jobs, dtype=bool)

    def carried(of: Floats, new: float) -> Floats:
        result = np.full((workload.jobs, columns), new)
        result[known, : of.shape[1]] = of[place[known]]
        return result

    return replace(
        _pairs_aligned(standing, workload),
        rows=workload.rows,
        covered=known & standing.covered[place] if len(standing.rows) else known,
        share=carried(standing.share, 0.0),
        received=carried(standing.received, 1.0),
        begun=carried(standing.begun, 1.0),
        owed=carried(standing.owed, 0.0),
        is_stale=True,
        pinned=None,
    )


def _same(before: NDArray[np.bool_] | None, now: NDArray[np.bool_] | None) -> bool:
    """The same jobs keep their GPUs."""
    return before is now or (before is not None and now is not None and bool((before == now).all()))


def _pairs_aligned(standing: ShareAccounts, workload: Workload) -> ShareAccounts:
    """Pairs of which both are still there."""
    of = standing.pairs
    if not len(of.share):
        return standing
    moved = np.searchsorted(workload.rows, standing.rows)
    inside = np.minimum(moved, max(workload.jobs - 1, 0))
    is_there = workload.rows[inside] == standing.rows if workload.jobs else np.zeros(len(standing.rows), dtype=bool)
    kept = is_there[of.first] & is_there[of.second]
    return replace(
        standing,
        pairs=Pairs(moved[of.first[kept]], moved[of.second[kept]], of.column[kept], of.share[kept]),
        pairs_received=standing.pairs_received[kept],
    )


def _fastest_first(workload: Workload) -> tuple[int, ...]:
    """Types by the mean of how fast jobs are on them, relative to where they are fastest."""
    packed = workload.speed[:, : workload.types]
    fastest = packed.max(axis=1, initial=0.0)
    able = fastest > 0
    mean = (packed[able] / fastest[able, None]).mean(axis=0) if able.any() else np.zeros(workload.types)
    return tuple(np.argsort(-mean, kind="stable").tolist())
