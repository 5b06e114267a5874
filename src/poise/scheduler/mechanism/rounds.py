"""Rounds: who runs now, given what every job should have in the long run (Gavel, OSDI'20 §5; docs/algorithms/rounds.md).

A share policy answers with an allocation x: fractions of time of each unit k (a job alone, or two jobs that share GPUs) on
each column c (a GPU type, with gangs packed or spread). `Rounds` makes a planner of such a policy. With received_kc, the
seconds that unit k has had on c since the shares were computed, its priority there is x_kc / received_kc: how far behind
its share it is. What is remembered from plan to plan is in `share_accounts.py`.

At the end of a round (`Rounds.plan`):

1. **Align** the accounts with the jobs that are there now: forget those that are gone, open accounts for new ones.
2. **Account**: add the time received since the last choice.
3. **Compute** new shares if jobs came or went, but not before `recompute` seconds have passed. Every job starts with a
   credit of received time, so that the first rounds follow the shares and not the order of arrival.
4. **Serve** the GPU types one after the other, the fastest first: units by falling priority, then by what they were owed
   when shares last changed, take their whole gang if it still fits and none of their jobs has been served yet.
5. **Fill**: when that is done on all types, jobs that got nothing take what is left, so that no GPU idles while a job that
   fits waits, unless the allocation wants it to. Gavel fills up each type in its turn instead (`Filling.BY_TYPE`).
6. **Plan** only the changes: a job that is served where it already runs goes on without a claim; one that runs elsewhere is
   moved; one that was not served is stopped.
7. **Sleep** until the end of the first round after which another choice is possible. Rounds in which nothing can change
   are skipped.

Inside a round no job is stopped: GPUs that come free go to the waiting job furthest behind its share of them, then to
others. The exception is an allocation that says itself who runs (`Leftover.IDLE`): it is looked at, at every change.

A running job may get ahead by `patience` before it has to make way: without it, jobs would be moved in every round for
little. Debts are then carried along when shares change; without patience (Gavel) they only break ties.
"""

from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial
from math import inf

import numpy as np

from poise.scheduler.mechanism.pinned_jobs import WHOLE, RoundSelection, Unit, shared_out
from poise.scheduler.mechanism.share_accounts import RoundParameters, ShareAccounts, accounted, aligned
from poise.scheduler.model.action import Remark
from poise.scheduler.model.arithmetic import Bools, Floats, Ints
from poise.scheduler.model.errors import SolveError
from poise.scheduler.model.job_table import Snapshot
from poise.scheduler.model.micro_batches import Mix
from poise.scheduler.model.plan import Claim, Plan, PreemptionRule, StopMode, Unfitting
from poise.scheduler.model.speed import Locality
from poise.scheduler.model.units import is_round_end, next_round_end
from poise.scheduler.model.workload import Allocator, Awareness, Filling, Leftover, Workload
from poise.scheduler.solve import pseudo_random

TIED = 1e-6
"""Relative difference of priorities below which they count as equal: it may be rounding."""

DUST = 1e-6
"""Part of a job's largest share below which another share of it counts as 0: solvers are no more exact than that."""


class LateArrivals(Enum):
    """What a job that came after shares were computed may do: take GPUs that are left over, or wait for the next shares."""

    FILL = auto()
    WAIT = auto()


class HopelessClaims(Enum):
    """Whether jobs for which nothing can be left when it is their turn make a claim at all.

    Leaving them out keeps plans short. Where jobs insist on locality for a while, who gets what is not known before
    placement, so all claims are made.
    """

    LEAVE_OUT = auto()
    CLAIM = auto()


@dataclass(frozen=True, slots=True)
class Rounds:
    """A planner made of an allocator.

    round, recompute    seconds;  credit, patience: rounds
    stream              number of the random stream that orders of GPU types are drawn from, where types are not told apart
    """

    allocator: Allocator
    round: float = 360.0
    recompute: float = 0.0
    credit: float = 0.5
    late_arrivals: LateArrivals = LateArrivals.FILL
    stream: int = 0
    patience: float = 1.0
    hopeless: HopelessClaims = HopelessClaims.LEAVE_OUT
    filling: Filling = Filling.LAST

    @property
    def parameters(self) -> RoundParameters:
        """Round, credit and patience in seconds."""
        return RoundParameters(self.round, self.credit * self.round, self.patience * self.round)

    def start(self) -> ShareAccounts | None:
        """Nothing is known before the first plan."""
        return None

    def plan(self, snapshot: Snapshot, memory: ShareAccounts | None) -> tuple[Plan, ShareAccounts]:
        """At the end of a round by shares; inside one, only GPUs that are free are given out."""
        now, origin = snapshot.now, snapshot.origin
        unchanged = self.unchanged_plan(now, origin, memory, may_fill=snapshot.is_contended and any(snapshot.idle))
        if unchanged is not None and memory is not None:
            return unchanged, memory
        at_end = is_round_end(origin, now, self.round)
        workload = snapshot.workload
        if memory is not None:
            accounts = aligned(memory, workload)
        else:
            # The first shares are computed at the end of a round. But an allocation that says itself who runs does so
            # inside the first round too, and only asking shows that it is one.
            accounts = ShareAccounts.blank(workload, origin, self.allocator.start())
            if not at_end and (first := self._computed(accounts, workload)[0]).is_urgent:
                accounts = replace(accounts, allocation=first.allocation)
        if not (at_end or accounts.is_urgent):
            return self._filled(accounts, workload, snapshot.idle), accounts
        accounts = accounted(accounts, workload, snapshot, self.round)
        remarks: tuple[str, ...] = ()
        # The first shares, computed when few jobs were known, may be replaced at once.
        may_compute = accounts.computed <= origin or now >= accounts.computed + self.recompute
        if accounts.is_stale and may_compute:
            accounts, remarks = self._computed(accounts, workload)
        # New shares may be of the other kind: those that are not urgent wait for the end of the round.
        if at_end or accounts.is_urgent:
            plan = self._selected(accounts, workload)
            accounts = replace(accounts, due=plan.wake)
        else:
            plan = self._filled(accounts, workload, snapshot.idle)
        return replace(plan, notes=tuple(map(Remark, remarks))), accounts

    def unchanged_plan(self, now: float, origin: float, memory: ShareAccounts | None, *, may_fill: bool) -> Plan | None:
        """A plan that changes nothing, where no other is possible: inside a round, if there is nothing to give out.

        The core asks this before it builds a snapshot, which costs far more than the answer.
        """
        if memory is None or may_fill or memory.is_urgent or is_round_end(origin, now, self.round):
            return None
        return Plan((), Unfitting.SKIPPED, PreemptionRule.NEVER, next_round_end(origin, now, self.round), ())

    def _computed(self, accounts: ShareAccounts, workload: Workload) -> tuple[ShareAccounts, tuple[str, ...]]:
        """The accounts with new shares, and remarks. If the solver gives up, the old shares stay until the next round."""
        try:
            allocation, memory = shared_out(self.allocator, workload, accounts.policy)
        except SolveError as error:
            return accounts, (f"no new shares: {error}; the old ones stay",)
        if self.filling is Filling.LAST:
            # A share is served before GPUs are filled up, however small it is: one that is only rounding must not be.
            share = allocation.share
            is_dust = share < DUST * share.max(axis=1, initial=0.0, keepdims=True)
            allocation = replace(allocation, share=np.where(is_dust, 0.0, share))
        return accounts.renewed(workload, allocation, memory, self.parameters), allocation.remarks

    def _selected(self, accounts: ShareAccounts, workload: Workload) -> Plan:
        """The plan for the next round: what has to change for every served job to be where it is served."""
        counted = accounts.counted(workload, self.parameters)
        served = self._serve(accounts, workload, counted)
        column, types = served.column, workload.types
        running = workload.held >= 0
        # A running job stays if it is served on the type that it holds, and whole; packed time is not spent spread.
        stays = running & (column >= 0) & (column % types == workload.held % types)
        stays &= (column >= types) | (workload.held < types)
        if workload.part is not None:
            stays &= workload.part >= WHOLE
        # A pair goes on as it is; of a pair that parts, only one can stay where it is: the earlier, or a pinned one.
        paired = served.partner >= 0
        stays &= ~paired | (served.partner == workload.partner)
        parts = (workload.partner >= 0) & (served.partner != workload.partner)
        if workload.pinned is None:
            stays &= ~(parts & stays[workload.partner] & (workload.partner < np.arange(workload.jobs)))
        else:
            stays |= workload.pinned
            is_behind = (workload.partner < np.arange(workload.jobs)) | workload.pinned[workload.partner]
            stays &= ~(parts & stays[workload.partner] & is_behind) | workload.pinned
        # Units that are not both where they are served need a claim. Packed ones first, then shares before fillers, then
        # large gangs, which are the hardest to place. An allocation that leaves GPUs idle is carried out in job order.
        fresh = [job for job in served.order if not (stays[job] and stays[served.partner[job] if paired[job] else job])]
        stops = workload.rows[running & ~stays].tolist()
        if accounts.allocation.leftover is Leftover.FILLED:
            fills = self._fills(accounts, served)
            fresh.sort(key=lambda job: (column[job] >= types, fills[job], -workload.gang[job]))
        else:
            fresh.sort()
        claims = []
        for job in fresh:
            # Packed, if splitting costs speed and this is a share of packed time.
            locality = Locality.PACKED if column[job] < types < workload.speed.shape[1] else Locality.CLUSTER
            beside = int(workload.rows[served.partner[job]]) if paired[job] else None
            claims.append(Claim(int(workload.rows[job]), locality, (int(column[job]) % types,), beside))
        return Plan(
            tuple(claims),
            Unfitting.SKIPPED,
            PreemptionRule.NEVER,
            # A claim may fail, so with claims the next round is looked at in any case.
            next_round_end(accounts.origin, workload.now, self.round)
            if fresh
            else self._next_due(accounts, workload, served, counted),
            tuple(stops),
            StopMode.FOR_OTHERS if accounts.allocation.leftover is Leftover.FILLED else StopMode.FIRM,
            partial(self._claims_of_waiting, accounts, workload, (column < 0) | ~stays),
        )

    def _serve(self, accounts: ShareAccounts, workload: Workload, counted: Floats) -> RoundSelection:
        """Steps 4 and 5: pinned jobs where they are, then units by priority type by type, then jobs that fill.

        `counted` is what each job has received as far as it counts for priority.
        """
        left = (workload.gpus if workload.free is None else workload.free).astype(np.int64).tolist()
        gangs = workload.gang.astype(np.int64).tolist()
        served = RoundSelection.first(workload)
        order, able = accounts.order, self._may_fill(accounts)
        if accounts.allocation.awareness is Awareness.BLIND:
            # Shares that do not tell types apart favour none: the order is drawn for each round.
            order = shuffled(order, self.stream, round((workload.now - accounts.origin) / self.round))
        by_type = able if self.filling is Filling.BY_TYPE else np.zeros_like(able)
        for gpu_type in order:
            units = _queue(accounts, workload, counted, gpu_type, by_type)
            if served.hosts and len(accounts.pairs.share):
                served.join(units, workload)
            left[gpu_type] = served.take(units, gangs, left[gpu_type])
        if self.filling is Filling.LAST and any(left) and able.any():
            able = able & ~np.array(served.is_served)
            for gpu_type in order:
                fits = able & (workload.gang <= left[gpu_type])
                if fits.any():  # by what they are owed there, then by submission
                    columns = np.flatnonzero(workload.column_type == gpu_type)
                    job, place = np.nonzero(fits[:, None] & (workload.speed[:, columns] > 0))
                    where = columns[place]
                    by_debt = np.lexsort((where, job, -accounts.owed[job, where]))
                    units = [(job, -1, at) for job, at in zip(job[by_debt].tolist(), where[by_debt].tolist(), strict=True)]
                    served.take(units, gangs, left[gpu_type])
        return served

    def _fills(self, accounts: ShareAccounts, served: RoundSelection) -> Bools:
        """Jobs that are served where they have no share, once all shares are served."""
        if self.filling is Filling.BY_TYPE:
            return np.zeros_like(accounts.covered)
        jobs = np.arange(len(served.column))
        fills: Bools = (served.column >= 0) & (served.partner < 0) & (accounts.share[jobs, served.column] <= 0)
        return fills

    def _may_fill(self, accounts: ShareAccounts) -> Bools:
        """Jobs that may take what is left over without having a share in it."""
        if accounts.allocation.leftover is Leftover.IDLE:
            return np.zeros_like(accounts.covered)
        return accounts.covered if self.late_arrivals is LateArrivals.WAIT else np.ones_like(accounts.covered)

    def _next_due(self, accounts: ShareAccounts, workload: Workload, served: RoundSelection, counted: Floats) -> float:
        """The end of the first round after which another choice is possible, if nothing happens until then.

        A running job falls in priority, a waiting one does not. Nothing changes before the first running job on a type has
        fallen as low as a job that would like to run there. Blind shares are drawn anew in every round, and pairs change
        partners: there every round is looked at. So it is while shares are stale, because new ones are due.
        """
        if accounts.is_stale and (served.column < 0).all():  # no job has a share, and there are no new ones before then
            due = max(workload.now, accounts.computed + self.recompute - self.round)
            return next_round_end(accounts.origin, due, self.round)
        wait = 0.0
        if not (accounts.is_stale or accounts.allocation.awareness is Awareness.BLIND or len(accounts.pairs.share)):
            wait = min(self._first_tie(accounts, workload, served, counted, place) for place in range(workload.types))
        is_steady = not accounts.is_stale and not (served.column < 0).any()
        if is_steady:
            is_whole = accounts.share[np.arange(workload.jobs), served.column] >= WHOLE
            is_steady = bool((is_whole if workload.pinned is None else is_whole | workload.pinned).all())
        if wait == inf or is_steady:  # steady: every job runs where it has its whole share, or where it is pinned
            return inf
        return next_round_end(accounts.origin, workload.now + max(wait - self.round, 0.0), self.round)

    def _first_tie(
        self, accounts: ShareAccounts, workload: Workload, served: RoundSelection, counted: Floats, place: int
    ) -> float:
        """Seconds until a running job on the type at this place of the order falls as low as one that may replace it.

        Those are the jobs that are served after it: on a later type, as fillers, or not at all.
        """
        rank = np.argsort(accounts.order)[workload.column_type]
        later = (served.column < 0) | (rank[served.column] > place) | self._fills(accounts, served)
        mine = np.flatnonzero(rank == place)
        rivals = np.sort((accounts.share[later][:, mine] / counted[later][:, mine]).ravel())
        rivals = rivals[rivals > 0]
        runs = np.flatnonzero((served.column >= 0) & (rank[served.column] == place))
        if workload.pinned is not None:
            runs = runs[~workload.pinned[runs]]  # they go on however low they fall
        share, received = accounts.share[runs, served.column[runs]], accounts.received[runs, served.column[runs]]
        below = np.searchsorted(rivals, share / counted[runs, served.column[runs]] * (1.0 + TIED), side="right")
        falls = (below > 0) & (share > 0)
        if not falls.any():
            return inf
        patience = self.patience * self.round
        return float((share[falls] / rivals[below[falls] - 1] + patience - received[falls]).min())

    def _filled(self, accounts: ShareAccounts, workload: Workload, idle: Mix) -> Plan:
        """Inside a round: free GPUs go to waiting jobs, the furthest behind first; nothing is stopped."""
        is_due = accounts.is_stale or accounts.due <= workload.now
        wake = next_round_end(accounts.origin, workload.now, self.round) if is_due else accounts.due
        claims = self._claims_of_waiting(accounts, workload, workload.held < 0, idle)
        return Plan(claims, Unfitting.SKIPPED, PreemptionRule.NEVER, wake, ())

    def _claims_of_waiting(self, accounts: ShareAccounts, workload: Workload, waits: Bools, idle: Mix) -> tuple[Claim, ...]:
        """Claims of waiting jobs on whatever they can use of what is free, where they have a share first."""
        free = np.array(idle)[workload.column_type]
        fits = ((workload.speed > 0) & (workload.gang[:, None] <= free)).any(axis=1)
        if workload.divides is not None:
            fits |= workload.divides  # any GPU may do, be it of a type that has too few for the gang
        able = waits & fits
        if not able.any():
            return ()
        priority = accounts.share / accounts.received
        jobs = np.flatnonzero(able & (self._may_fill(accounts) | (priority > 0).any(axis=1)))
        if not len(jobs):
            return ()
        best = np.where(accounts.covered[jobs], priority[jobs].max(axis=1), inf)
        order = jobs[np.lexsort((jobs, -best))]
        if self.filling is Filling.LAST and workload.types > 1 and len(order) > 1:  # else this is the order already
            order = _shares_first(accounts, workload, order, priority[order], idle)
        if self.hopeless is HopelessClaims.LEAVE_OUT:
            order = order[_may_get(workload, order, idle)]
        # On any type: first those where a job is furthest behind its share, then those where it is fastest.
        shape = (len(order), -1, workload.types)
        speed = workload.speed[order].reshape(shape).max(axis=1)
        wanted = priority[order].reshape(shape).max(axis=1)
        fastest = np.argsort(-speed, axis=1, kind="stable")
        by_want = np.argsort(-np.take_along_axis(wanted, fastest, axis=1), axis=1, kind="stable")
        types = np.take_along_axis(fastest, by_want, axis=1).tolist()  # the core leaves out those where it does not run
        rows = workload.rows[order].tolist()
        return tuple([Claim(row, Locality.CLUSTER, tuple(each)) for row, each in zip(rows, types, strict=True)])


def _shares_first(accounts: ShareAccounts, workload: Workload, jobs: Ints, priority: Floats, idle: Mix) -> Ints:
    """The jobs in another order: late arrivals, then those whose turn it is by shares of the free GPUs, then fillers.

    As at the end of a round, a share of a type that is full must not bring a job before others on types that are not. So
    the free GPUs are dealt out here on paper, by priority.
    """
    room = list(idle)
    gang = workload.gang[jobs].astype(np.int64).tolist()
    column_type = workload.column_type.tolist()
    taken = dict.fromkeys(np.flatnonzero(~accounts.covered[jobs]).tolist())
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


def _may_get(workload: Workload, jobs: Ints, idle: Mix) -> Bools:
    """Which of these jobs, in the order in which they are served, can get any of the free GPUs.

    Jobs with equal gangs and the same usable types are served alike: once one of them gets nothing, nothing is left for the
    others. So of each such kind only as many can get GPUs as their gang goes into what is free.
    """
    can_use = workload.speed[jobs].reshape(len(jobs), -1, workload.types).max(axis=1) > 0
    gang = workload.gang[jobs].astype(np.int64)
    room = (np.array(idle) // gang[:, None] * can_use).sum(axis=1)
    kinds = np.column_stack((gang, np.packbits(can_use, axis=1)))
    together = np.lexsort(kinds.T)
    begins = np.flatnonzero(np.concatenate(([True], (np.diff(kinds[together], axis=0) != 0).any(axis=1))))
    before = np.empty(len(jobs), dtype=np.int64)
    before[together] = np.arange(len(jobs)) - np.repeat(begins, np.diff(begins, append=len(jobs)))
    reaches: Bools = before < room
    return reaches if workload.divides is None else reaches | workload.divides[jobs]


def _queue(accounts: ShareAccounts, workload: Workload, counted: Floats, gpu_type: int, able: Bools) -> list[Unit]:
    """Units to serve on a type, in order. Jobs of `able` without a share there come last, at priority 0."""
    parts = []
    for column in np.flatnonzero(workload.column_type == gpu_type).tolist():
        jobs = np.flatnonzero((accounts.share[:, column] > 0) | (able & (workload.speed[:, column] > 0)))
        parts.append(accounts.alone(column, jobs, counted))
    if len(accounts.pairs.share):
        parts.append(accounts.together(np.flatnonzero(workload.column_type[accounts.pairs.column] == gpu_type)))
    units = parts[0] if len(parts) == 1 else np.hstack(parts)
    job, share, received, owed = units[0], units[3], units[4], units[5]
    priority = (share / received).astype(np.float32)  # single precision: rounding must not tell apart what is equal
    order = np.lexsort((job, -share, -owed, -priority))
    chosen = units[:3, order].astype(np.int64)
    return list(zip(*chosen.tolist(), strict=True))


def shuffled(things: tuple[int, ...], stream: int, index: int) -> tuple[int, ...]:
    """The things in an order that is drawn, always the same for a stream and an index."""
    start, step = (stream << 32) + index, pseudo_random.STEP
    return tuple(pseudo_random.shuffled(things, lambda last: pseudo_random.mixed(start + step * (len(things) - last))))
