"""Shares into rounds (Gavel, OSDI'20 §5; ALGORITHMS §2.7): who runs now, given what everybody should have in the long run.

    unit        a job alone, or two jobs that share GPUs
    x_kc        share of unit k on column c;  received_kc: seconds it has had there since the shares were computed
    priority    x_kc / received_kc: how far behind its share a unit is

At the end of a round the GPU types are served one after the other: units by falling priority, then by what they were owed
when shares last changed, take their gang if it still fits and none of their jobs has been served. When that is done on all
types, jobs that got nothing take what is left, so that no GPU idles while a job that fits waits, unless the allocation wants
it to; Gavel fills up each type in its turn (`Filling.BY_TYPE`). A job that is served where it runs already just goes on.
Inside a round no job is stopped: GPUs that come free go to the job furthest behind its share of them, then to others.

A job that runs may get ahead by `patience` before it has to make way, so that jobs are not moved in every round for little;
debts are then carried along when shares change. Without patience (Gavel) debts only break ties.

New shares are computed at the end of a round if jobs came or went, but not before `recompute` seconds have passed. Everybody
starts with a credit of received time, so that the first rounds follow the shares and not the order of arrival.
"""

from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial
from math import inf

import numpy as np
from numpy.typing import NDArray

from poise.scheduler.mechanism.pinned_jobs import WHOLE, PinnedShares, Unit, shared_out
from poise.scheduler.mechanism.share_accounts import RoundParameters, ShareAccounts, accounted, aligned
from poise.scheduler.model.action import Remark
from poise.scheduler.model.arithmetic import Floats, Ints
from poise.scheduler.model.errors import SolveError
from poise.scheduler.model.job_table import Snapshot
from poise.scheduler.model.plan import Claim, Plan, PreemptionRule, StopMode, Unfitting
from poise.scheduler.model.speed import Locality
from poise.scheduler.model.units import is_round_end, next_round_end
from poise.scheduler.model.workload import Allocator, Awareness, Filling, Leftover, Workload
from poise.scheduler.solve import pseudo_random

TIED = 1e-6
"""Relative difference of priorities that may be one of rounding."""

DUST = 1e-6
"""Part of a job's largest share below which another one of it may be one of rounding: solvers are no more exact."""


class LateArrivals(Enum):
    """What a job may do that came after shares were computed: take GPUs that are left over, or wait for the next shares."""

    FILL = auto()
    WAIT = auto()


class HopelessClaims(Enum):
    """What becomes of the claims of jobs for which nothing can be left when it is their turn.

    Where jobs insist on being close together for a while, nobody knows before who gets what; then all of them are made.
    """

    LEAVE_OUT = auto()
    CLAIM = auto()


@dataclass(frozen=True, slots=True)
class Rounds:
    """A planner made of an allocator. Seconds, but credit and patience in rounds; `stream` tells draws of orders apart."""

    allocator: Allocator
    round: float = 360.0
    recompute: float = 0.0
    credit: float = 0.5
    newcomers: LateArrivals = LateArrivals.FILL
    stream: int = 0
    patience: float = 1.0
    unlucky: HopelessClaims = HopelessClaims.LEAVE_OUT
    filling: Filling = Filling.LAST

    @property
    def terms(self) -> RoundParameters:
        """In seconds."""
        return RoundParameters(self.round, self.credit * self.round, self.patience * self.round)

    def start(self) -> ShareAccounts | None:
        """Nothing is known before the first plan."""
        return None

    def plan(self, snapshot: Snapshot, memory: ShareAccounts | None) -> tuple[Plan, ShareAccounts]:
        """At the end of a round by shares; inside one, only GPUs that are free are given out."""
        now, origin = snapshot.now, snapshot.origin
        rest = self.rest(now, origin, memory, may_fill=snapshot.is_contended and any(snapshot.idle))
        if rest is not None and memory is not None:
            return rest, memory
        at_end = is_round_end(origin, now, self.round)
        workload = snapshot.workload
        standing = self._first(workload, origin) if memory is None else aligned(memory, workload)
        remarks: tuple[str, ...] = ()
        if at_end or standing.is_urgent:
            standing = accounted(standing, workload, snapshot, self.round)
            if standing.is_stale and self._may_compute(standing, now):
                standing, remarks = self._computed(standing, workload)
        if at_end or standing.is_urgent:
            plan = self._selected(standing, workload)
            standing = replace(standing, due=plan.wake)
        else:
            plan = self._filled(standing, workload, snapshot.idle)
        return replace(plan, notes=tuple(map(Remark, remarks))), standing

    def _first(self, workload: Workload, origin: float) -> ShareAccounts:
        """Nobody has a share before the end of a round. What itself says who runs says so inside the first round too."""
        blank = ShareAccounts.blank(workload, origin, self.allocator.start())
        if is_round_end(origin, workload.now, self.round):
            return blank
        first, _ = self._computed(blank, workload)
        return replace(blank, allocation=first.allocation) if first.is_urgent else blank

    def rest(self, now: float, origin: float, memory: ShareAccounts | None, *, may_fill: bool) -> Plan | None:
        """A plan that changes nothing, where no other is possible: inside a round, if there is nothing to give out."""
        if memory is None or may_fill or memory.is_urgent or is_round_end(origin, now, self.round):
            return None
        return Plan((), Unfitting.SKIPPED, PreemptionRule.NEVER, next_round_end(origin, now, self.round), ())

    def _may_compute(self, standing: ShareAccounts, now: float) -> bool:
        """The first shares, computed when few jobs were known, may be replaced at once."""
        return standing.computed <= standing.origin or now >= standing.computed + self.recompute

    def _computed(self, standing: ShareAccounts, workload: Workload) -> tuple[ShareAccounts, tuple[str, ...]]:
        """New shares, and what there is to say of them. If there are none, the old ones stay until the next round."""
        try:
            allocation, memory = shared_out(self.allocator, workload, standing.policy)
        except SolveError as error:
            return standing, (f"no new shares: {error}; the old ones stay",)
        if self.filling is Filling.LAST:  # a share is served before GPUs that are left over, however small it is
            allocation = replace(allocation, share=_without_dust(allocation.share))
        return standing.renewed(workload, allocation, memory, self.terms), allocation.remarks

    def _selected(self, standing: ShareAccounts, workload: Workload) -> Plan:
        """The jobs of the next round: those that run elsewhere are moved, those that were not chosen are stopped."""
        counted = standing.counted(workload, self.terms)
        served = self._serve(standing, workload, counted)
        column, types = served.column, workload.types
        running = workload.held >= 0
        stays = running & (column >= 0) & (column % types == workload.held % types)
        stays &= (column >= types) | (workload.held < types)  # time that is to be packed is not spent spread
        if workload.part is not None:
            stays &= workload.part >= WHOLE  # with a part of its GPUs it is not where it is to be
        # A pair goes on as it is; of a pair that parts, only one can stay where it is.
        paired = served.partner >= 0
        stays &= ~paired | (served.partner == workload.partner)
        parts = (workload.partner >= 0) & (served.partner != workload.partner)
        if workload.pinned is None:
            stays &= ~(parts & stays[workload.partner] & (workload.partner < np.arange(workload.jobs)))
        else:
            stays |= workload.pinned
            is_behind = (workload.partner < np.arange(workload.jobs)) | workload.pinned[workload.partner]
            stays &= ~(parts & stays[workload.partner] & is_behind) | workload.pinned
        fresh = [job for job in served.order if not (stays[job] and stays[served.partner[job] if paired[job] else job])]
        stops = workload.rows[running & ~stays].tolist()
        if standing.allocation.leftover is Leftover.FILLED:
            fills = self._fills(standing, served)
            fresh.sort(key=lambda job: (column[job] >= types, fills[job], -workload.gang[job]))
        else:
            fresh.sort()
        return Plan(
            tuple(_claim(workload, job, served) for job in fresh),
            Unfitting.SKIPPED,
            PreemptionRule.NEVER,
            next_round_end(standing.origin, workload.now, self.round)
            if fresh
            else self._next_due(standing, workload, served, counted),
            tuple(stops),
            StopMode.FOR_OTHERS if standing.allocation.leftover is Leftover.FILLED else StopMode.FIRM,
            partial(self._claims_of_waiting, standing, workload, (column < 0) | ~stays),
        )

    def _serve(self, standing: ShareAccounts, workload: Workload, counted: Floats) -> PinnedShares:
        """Pinned jobs where they are; then type by type, units by priority, gangs whole; then who fills what is left."""
        left = (workload.gpus if workload.free is None else workload.free).astype(np.int64).tolist()
        gangs = workload.gang.astype(np.int64).tolist()
        served = PinnedShares.first(workload)
        order, able = self._types_in_order(standing, workload), self._may_fill(standing)
        by_type = able if self.filling is Filling.BY_TYPE else np.zeros_like(able)
        for gpu_type in order:
            units = _queue(standing, workload, counted, gpu_type, by_type)
            if served.hosts and len(standing.pairs.share):
                served.join(units, workload)
            left[gpu_type] = served.take(units, gangs, left[gpu_type])
        if self.filling is Filling.LAST and any(left) and able.any():
            able = able & ~np.array(served.is_served)
            for gpu_type in order:
                fits = able & (workload.gang <= left[gpu_type])
                if fits.any():
                    served.take(_fillers(standing, workload, gpu_type, fits), gangs, left[gpu_type])
        return served

    def _fills(self, standing: ShareAccounts, served: PinnedShares) -> NDArray[np.bool_]:
        """Jobs that are served where they have no share, once all shares are served."""
        if self.filling is Filling.BY_TYPE:
            return np.zeros_like(standing.covered)
        jobs = np.arange(len(served.column))
        fills: NDArray[np.bool_] = (served.column >= 0) & (served.partner < 0) & (standing.share[jobs, served.column] <= 0)
        return fills

    def _may_fill(self, standing: ShareAccounts) -> NDArray[np.bool_]:
        """Jobs that may take what is left over without a share in it."""
        if standing.allocation.leftover is Leftover.IDLE:
            return np.zeros_like(standing.covered)
        return standing.covered if self.newcomers is LateArrivals.WAIT else np.ones_like(standing.covered)

    def _types_in_order(self, standing: ShareAccounts, workload: Workload) -> tuple[int, ...]:
        """The fastest first; in an order drawn for each round, where the shares do not tell types apart."""
        if standing.allocation.awareness is Awareness.AWARE:
            return standing.order
        return shuffled(standing.order, self.stream, round((workload.now - standing.origin) / self.round))

    def _next_due(self, standing: ShareAccounts, workload: Workload, served: PinnedShares, counted: Floats) -> float:
        """The end of the first round after which another choice is possible, if nothing happens until then.

        Who runs falls in priority, who waits does not. Nothing changes before the first of those who run on a type has
        fallen as low as somebody who would like to run there.
        """
        if standing.is_stale and (served.column < 0).all():  # nobody has a share, and there are no new ones before then
            return next_round_end(
                standing.origin, max(workload.now, standing.computed + self.recompute - self.round), self.round
            )
        wait = 0.0
        if not (standing.is_stale or standing.allocation.awareness is Awareness.BLIND or len(standing.pairs.share)):
            ties = (self._first_tie(standing, workload, served, counted, place) for place in range(workload.types))
            wait = min(ties)
        if wait == inf or (not standing.is_stale and self._is_steady(standing, workload, served.column)):
            return inf
        return next_round_end(standing.origin, workload.now + max(wait - self.round, 0.0), self.round)

    def _first_tie(
        self, standing: ShareAccounts, workload: Workload, served: PinnedShares, counted: Floats, place: int
    ) -> float:
        """Seconds after which one who runs on the type at this place is first as low as one who may come instead.

        That is whoever is served after it: on a later type, as one who fills, or not at all.
        """
        rank = np.argsort(standing.order)[workload.column_type]
        later = (served.column < 0) | (rank[served.column] > place) | self._fills(standing, served)
        mine = np.flatnonzero(rank == place)
        wishes = np.sort((standing.share[later][:, mine] / counted[later][:, mine]).ravel())
        wishes = wishes[wishes > 0]
        runs = np.flatnonzero((served.column >= 0) & (rank[served.column] == place))
        if workload.pinned is not None:
            runs = runs[~workload.pinned[runs]]  # they go on however low they fall
        share, received = standing.share[runs, served.column[runs]], standing.received[runs, served.column[runs]]
        below = np.searchsorted(wishes, share / counted[runs, served.column[runs]] * (1.0 + TIED), side="right")
        falls = (below > 0) & (share > 0)
        if not falls.any():
            return inf
        patience = self.patience * self.round
        return float((share[falls] / wishes[below[falls] - 1] + patience - received[falls]).min())

    def _is_steady(self, standing: ShareAccounts, workload: Workload, column: Ints) -> bool:
        """Every job is where it is to be all the time, or where it stays anyhow."""
        if (column < 0).any():
            return False
        is_whole = standing.share[np.arange(workload.jobs), column] >= WHOLE
        return bool((is_whole if workload.pinned is None else is_whole | workload.pinned).all())

    def _filled(self, standing: ShareAccounts, workload: Workload, idle: tuple[int, ...]) -> Plan:
        """Inside a round: free GPUs go to those who wait, the furthest behind first."""
        waits = workload.held < 0
        is_due = standing.is_stale or standing.due <= workload.now
        wake = next_round_end(standing.origin, workload.now, self.round) if is_due else standing.due
        claims = self._claims_of_waiting(standing, workload, waits, idle)
        return Plan(claims, Unfitting.SKIPPED, PreemptionRule.NEVER, wake, ())

    def _claims_of_waiting(
        self, standing: ShareAccounts, workload: Workload, waits: NDArray[np.bool_], idle: tuple[int, ...]
    ) -> tuple[Claim, ...]:
        """Claims of those who wait on whatever they can use of what is free, where they have a share first."""
        free = np.array(idle)[workload.column_type]
        fits = ((workload.speed > 0) & (workload.gang[:, None] <= free)).any(axis=1)
        if workload.divides is not None:
            fits |= workload.divides  # any GPU may do, be it of a type that has too few for the gang
        able = waits & fits
        if not able.any():
            return ()
        priority = standing.share / standing.received
        jobs = np.flatnonzero(able & (self._may_fill(standing) | (priority > 0).any(axis=1)))
        if not len(jobs):
            return ()
        best = np.where(standing.covered[jobs], priority[jobs].max(axis=1), inf)
        order = jobs[np.lexsort((jobs, -best))]
        if self.filling is Filling.LAST and workload.types > 1 and len(order) > 1:  # else this is the order already
            order = _shares_first(standing, workload, order, priority[order], idle)
        if self.unlucky is HopelessClaims.LEAVE_OUT:
            order = order[_may_get(workload, order, idle)]
        return _claims_anywhere(workload, order, priority[order])


def _without_dust(share: Floats) -> Floats:
    """The shares without those that rounding may have made: they would be served as if they were meant."""
    return np.where(share < DUST * share.max(axis=1, initial=0.0, keepdims=True), 0.0, share)


def _shares_first(standing: ShareAccounts, workload: Workload, jobs: Ints, priority: Floats, idle: tuple[int, ...]) -> Ints:
    """The jobs in another order: newcomers, then those whose turn it is by shares of the free GPUs, then those who fill.

    As at the end of a round, its share of a type that is full does not bring a job before others on types that are not.
    """
    room = list(idle)
    gang = workload.gang[jobs].astype(np.int64).tolist()
    column_type = workload.column_type.tolist()
    taken = dict.fromkeys(np.flatnonzero(~standing.covered[jobs]).tolist())
    for index in taken:
        fastest = np.argsort(-workload.speed[jobs[index]], kind="stable").tolist()
        of = next((column_type[each] for each in fastest if gang[index] <= room[column_type[each]]), None)
        if of is not None:
            room[of] -= gang[index]
    fits = workload.gang[jobs, None] <= np.array(idle)[workload.column_type]
    wants = np.where(fits & (workload.speed[jobs] > 0), priority, 0.0)
    who, where = np.nonzero(wants)
    by_priority = np.lexsort((who, -wants[who, where]))
    for index, column in zip(who[by_priority].tolist(), where[by_priority].tolist(), strict=True):
        of = column_type[column]
        if index not in taken and gang[index] <= room[of]:
            room[of] -= gang[index]
            taken[index] = None
            if not any(room):
                break
    first = np.array([*taken], dtype=np.int64)
    rest = np.ones(len(jobs), dtype=bool)
    rest[first] = False
    return np.concatenate((jobs[first], jobs[rest]))


def _may_get(workload: Workload, jobs: Ints, idle: tuple[int, ...]) -> NDArray[np.bool_]:
    """Which of these jobs, in the order in which they are served, can get any of the free GPUs.

    Jobs with equal gangs and the same usable types are served alike: once one of them gets nothing, nothing is left for the
    others. So there are no more of them to look at than their gang goes into what is free.
    """
    can_use = workload.speed[jobs].reshape(len(jobs), -1, workload.types).max(axis=1) > 0
    gang = workload.gang[jobs].astype(np.int64)
    room = (np.array(idle) // gang[:, None] * can_use).sum(axis=1)
    kinds = np.column_stack((gang, np.packbits(can_use, axis=1)))
    together = np.lexsort(kinds.T)
    begins = np.flatnonzero(np.concatenate(([True], (np.diff(kinds[together], axis=0) != 0).any(axis=1))))
    before = np.empty(len(jobs), dtype=np.int64)
    before[together] = np.arange(len(jobs)) - np.repeat(begins, np.diff(begins, append=len(jobs)))
    reaches: NDArray[np.bool_] = before < room
    return reaches if workload.divides is None else reaches | workload.divides[jobs]


def _claim(workload: Workload, job: int, served: PinnedShares) -> Claim:
    """On this type; packed, if being split costs speed and this is a share of packed time."""
    types, column = workload.types, int(served.column[job])
    insists = column < types < workload.speed.shape[1]
    beside = int(workload.rows[served.partner[job]]) if served.partner[job] >= 0 else None
    locality = Locality.PACKED if insists else Locality.CLUSTER
    return Claim(int(workload.rows[job]), locality, (column % types,), beside)


def _claims_anywhere(workload: Workload, jobs: Ints, priority: Floats) -> tuple[Claim, ...]:
    """On any type where a job runs: where it is furthest behind its share, then where it is fastest."""
    shape = (len(jobs), -1, workload.types)
    speed = workload.speed[jobs].reshape(shape).max(axis=1)
    wanted = priority.reshape(shape).max(axis=1)
    fastest = np.argsort(-speed, axis=1, kind="stable")
    order = np.argsort(-np.take_along_axis(wanted, fastest, axis=1), axis=1, kind="stable")
    types = np.take_along_axis(fastest, order, axis=1).tolist()  # those where it does not run are the core's to leave out
    rows = workload.rows[jobs].tolist()
    return tuple([Claim(row, Locality.CLUSTER, tuple(each)) for row, each in zip(rows, types, strict=True)])


def _queue(
    standing: ShareAccounts, workload: Workload, counted: Floats, gpu_type: int, able: NDArray[np.bool_]
) -> list[Unit]:
    """Who is to be served on a type, in order: (job, partner or -1, column). Jobs without a share there come last."""
    parts = [
        standing.alone(
            column, np.flatnonzero((standing.share[:, column] > 0) | (able & (workload.speed[:, column] > 0))), counted
        )
        for column in np.flatnonzero(workload.column_type == gpu_type).tolist()
    ]
    if len(standing.pairs.share):
        parts.append(standing.together(np.flatnonzero(workload.column_type[standing.pairs.column] == gpu_type)))
    units = parts[0] if len(parts) == 1 else np.hstack(parts)
    job, share, received, owed = units[0], units[3], units[4], units[5]
    priority = (share / received).astype(np.float32)  # rounding must not tell apart what is equal
    order = np.lexsort((job, -share, -owed, -priority))
    chosen = units[:3, order].astype(np.int64)
    return list(zip(*chosen.tolist(), strict=True))


def _fillers(standing: ShareAccounts, workload: Workload, gpu_type: int, able: NDArray[np.bool_]) -> list[Unit]:
    """Who of these jobs fills up a type, in order: by what they are owed there, then by submission."""
    columns = np.flatnonzero(workload.column_type == gpu_type)
    job, place = np.nonzero(able[:, None] & (workload.speed[:, columns] > 0))
    where = columns[place]
    order = np.lexsort((where, job, -standing.owed[job, where]))
    return [(job, -1, column) for job, column in zip(job[order].tolist(), where[order].tolist(), strict=True)]


def shuffled(things: tuple[int, ...], stream: int, index: int) -> tuple[int, ...]:
    """The things in an order that is drawn, but always the same for a stream and an index."""
    start = (stream << 32) + index
    return tuple(
        pseudo_random.shuffled(things, lambda last: pseudo_random.mixed(start + pseudo_random.STEP * (len(things) - last)))
    )
