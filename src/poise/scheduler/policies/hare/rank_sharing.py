"""GPUs of any mix dealt out by rank: what `hare` and `hlas` have in common (docs/algorithms/hare.md).

    value_m   the rank of job m, smaller first, then the earlier one: this is what the two policies differ in
    lease     seconds; at its end all GPUs that are held under leases are dealt out anew

Going through the jobs by rank, each takes the best of what is left: a gang its GPUs of one type; a job whose rounds divide
the fewest GPUs, of whatever types, on which its round is shortest. That is the grain of leases, for tasks that are short
beside a lease. Tasks that take `long` seconds or more on the job's fastest type are dealt with one by one: each ready task
takes the free GPU that computes it fastest, keeps it until it is done, and is never stopped. Between the ends of leases only
free GPUs are dealt out; but a new job is not made to wait for them. What pinned jobs hold is never dealt out.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import inf
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from poise.scheduler.model.arithmetic import Floats
from poise.scheduler.model.job_table import Snapshot
from poise.scheduler.model.micro_batches import Mix, Tasks
from poise.scheduler.model.plan import Claim, Grain, Plan
from poise.scheduler.model.speed import Estimate
from poise.scheduler.model.units import is_round_end, next_round_end
from poise.scheduler.solve.rank_sharing import GpuSupply, Ownership, ShareRequest, computes_as_fast, share_out

LEASES_ONLY: Mapping[str, Any] = MappingProxyType({"long": inf})
"""Parameters in the live service: no process is started for a single task, so GPUs are always lent for a lease."""


class StarvationGuard(StrEnum):
    """Whether a task is kept from a slow GPU when waiting for a faster one, which is busy, would get it done sooner."""

    ON = "on"
    OFF = "off"


class HareRanking(Protocol):
    """Who comes first. Pure: what it remembers goes in and comes out."""

    def start(self) -> Any:  # noqa: ANN401 - each ranking has its own memory
        """The memory before the first plan."""

    def values(self, snapshot: Snapshot, memory: Any) -> tuple[Floats, Any]:  # noqa: ANN401
        """A value for each active job, the least first; and the memory to hand in next time."""


@dataclass(frozen=True, slots=True)
class JobClassSpeeds:
    """What there is to know of jobs that are equally fast: types by falling speed, and what their rounds divide into.

    rates   by type, of a whole gang
    """

    types: tuple[int, ...]
    rates: tuple[float, ...]
    tasks: Tasks | None
    is_long: bool

    @staticmethod
    def of(estimate: Estimate, long: float) -> "JobClassSpeeds":
        """From an estimate; tasks of at least `long` seconds are long."""
        rates, tasks = estimate.packed, estimate.tasks
        types = sorted((kind for kind, rate in enumerate(rates) if rate > 0), key=lambda kind: -rates[kind])
        return JobClassSpeeds(tuple(types), rates, tasks, tasks is not None and tasks.best >= long)

    def types_for(self, has: Mix | None) -> tuple[int, ...]:
        """By falling speed; of types that are equally fast, the one that a gang has comes first."""
        if has is None or self.tasks is not None:
            return self.types
        held = has.index(max(has))
        return tuple(sorted(self.types, key=lambda kind: (-self.rates[kind], kind != held)))


@dataclass(frozen=True, slots=True)
class DealerMemory:
    """What is remembered.

    ranking   the ranking's own memory;  newest: the youngest job seen;  kinds: what is known of kinds of jobs
    busy      GPUs that compute single tasks: when each is free again, and its type
    """

    ranking: Any
    newest: int = -1
    busy: tuple[tuple[float, int], ...] = ()
    kinds: Mapping[int, JobClassSpeeds] = field(default_factory=lambda: MappingProxyType({}))


def live_gpus(snapshot: Snapshot) -> Mix:
    """GPUs of each type that jobs can have."""
    return _total(snapshot.idle, map(snapshot.placement.topology.mix, snapshot.placement.holdings.values()))


def _total(one: Mix, others: Iterable[Mix]) -> Mix:
    return tuple(map(sum, zip(one, *others, strict=True)))


@dataclass(frozen=True, slots=True)
class Dealer:
    """The planner. `lease` and `long` are seconds."""

    ranking: HareRanking
    lease: float = 360.0
    long: float = 30.0
    guard: StarvationGuard = StarvationGuard.OFF

    def start(self) -> DealerMemory:
        """The memory before the first plan."""
        return DealerMemory(self.ranking.start())

    def plan(self, snapshot: Snapshot, memory: DealerMemory) -> tuple[Plan, DealerMemory]:
        """At the end of a lease, and when a job arrives, everything is dealt out; otherwise what is free."""
        newest = snapshot.active[-1]
        is_anew = newest > memory.newest or is_round_end(snapshot.origin, snapshot.now, self.lease)
        if not is_anew and not any(snapshot.idle):
            return Plan.changing(wake=self.next_end(snapshot)), memory
        values, ranking = self.ranking.values(snapshot, memory.ranking)
        deal = _Deal(self, snapshot, memory, Ownership.LENT if is_anew else Ownership.OWN)
        order = snapshot.rows[np.lexsort((snapshot.rows, values))].tolist()
        plan = deal.dealt(order)
        is_change = plan.stops or any(claim.grain is Grain.LEASE for claim in plan.claims)
        if deal.is_settled and not is_change:  # a change may turn out otherwise: not every job can be stopped
            plan = replace(plan, wake=inf)
        memory = DealerMemory(ranking, max(newest, memory.newest), deal.busy, MappingProxyType(deal.kinds))
        return plan, memory

    def next_end(self, snapshot: Snapshot) -> float:
        """When the leases of now end."""
        return next_round_end(snapshot.origin, snapshot.now, self.lease)


class _Deal:
    """One deal: what is left goes to the jobs by rank.

    is_settled   every job has the best that there is, for as long as nothing happens
    failed       kinds of which a job got nothing: no job of them behind it will get anything
    ahead        as `busy`, with tasks that are only planned so far (`guard`)
    """

    def __init__(self, dealer: Dealer, snapshot: Snapshot, memory: DealerMemory, title: Ownership) -> None:
        self._dealer, self._snapshot, self._title = dealer, snapshot, title
        self.is_settled = True
        self.kinds = dict(memory.kinds)
        topology = snapshot.placement.topology
        self._held = {row: topology.mix(holding) for row, holding in snapshot.placement.holdings.items()}
        tasks = [has for row, has in self._held.items() if self._kind(row).is_long]
        self._computing = _total((0,) * len(snapshot.idle), tasks)
        self._gpus = _total(snapshot.idle, self._held.values())
        self.busy = tuple(each for each in memory.busy if each[0] > snapshot.now)
        self._ahead = list(self.busy)
        self._failed: set[int] = set()

    def dealt(self, order: list[int]) -> Plan:
        """Deal out by rank, and say what that changes."""
        snapshot = self._snapshot
        left = list(snapshot.idle)
        for row, has in self._held.items():
            if self._is_lent(row):
                left = [most + gpus for most, gpus in zip(left, has, strict=True)]
        gets: dict[int, Mix] = {}
        self._share_out(order, left, gets)
        if self._title is Ownership.OWN and self._failed and any(left):
            # A job may have exchanged GPUs for better ones: what it gave up goes to those that got none for want of one,
            # not to those that wait for a better one.
            self._failed.clear()
            unguarded = self._dealer.guard is StarvationGuard.OFF
            missed = [row for row in order if row not in gets]
            missed = [row for row in missed if (unguarded if self._kind(row).is_long else row not in self._held)]
            self._share_out(missed, left, gets)
        # Time alone could make another deal if a job waits, or would be faster with what others have.
        mixes = ((row, gets.get(row) or (None if self._is_lent(row) else self._held.get(row))) for row in order)
        self.is_settled = all(mix is not None and self._is_best(row, self._kind(row), mix) for row, mix in mixes)
        stops = [row for row in self._held if row not in gets and self._is_lent(row)]
        changed = [(row, mix) for row, mix in gets.items() if self._kind(row).is_long or self._held.get(row) != mix]
        claims = tuple(self._claim(row, mix) for row, mix in changed)
        return Plan.changing(claims, tuple(stops), self._dealer.next_end(snapshot))

    def _is_lent(self, row: int) -> bool:
        """Whether what the job holds, if anything, is dealt out anew."""
        return self._title is Ownership.LENT and not self._kind(row).is_long and row not in self._snapshot.pinned

    def _share_out(self, order: list[int], left: list[int], gets: dict[int, Mix]) -> None:
        """Deal out what is left to these jobs by rank."""
        for request, mix in share_out(self._requests(order), left, GpuSupply.of(self._snapshot.placement.topology)):
            before = gets.get(request.who)
            if mix is not None:
                gets[request.who] = mix if before is None else _total(before, [mix])
            elif not self._is_guarded(request):
                self._failed.add(self._snapshot.columns.kind[request.who])
                self._reserve(request, left)
            if self._is_guarded(request):
                self._look_ahead(request, mix)

    def _reserve(self, request: ShareRequest, left: list[int]) -> None:
        """GPUs that single tasks give back come one by one, and a gang would never see enough of them at once.

        So a gang that has waited for a lease, and would fit if they did, keeps those behind it from its best such type.
        """
        waited = self._snapshot.now - self._snapshot.columns.waiting_since[request.who]
        if request.tasks is None and request.has is None and waited >= self._dealer.lease:
            kind = next((kind for kind in request.types if left[kind] + self._computing[kind] >= request.gang), None)
            if kind is not None:
                left[kind] = 0

    def _requests(self, order: list[int]) -> Iterator[ShareRequest]:
        """What each job asks for, by rank."""
        columns = self._snapshot.columns
        for row in order:
            if columns.kind[row] in self._failed or row in self._snapshot.pinned:
                continue
            kind = self._kind(row)
            if not kind.is_long:
                has = self._held.get(row)
                yield ShareRequest(row, columns.gang[row], kind.types_for(has), kind.tasks, 0, has, self._title)
            elif self._dealer.guard is StarvationGuard.ON:
                for _ in range(columns.ready[row]):
                    yield ShareRequest(row, 1, self._allowed(kind), kind.tasks, 1)
            elif columns.ready[row]:
                yield ShareRequest(row, 1, kind.types, kind.tasks, columns.ready[row])

    def _kind(self, row: int) -> JobClassSpeeds:
        index = self._snapshot.columns.kind[row]
        kind = self.kinds.get(index)
        if kind is None:
            kind = self.kinds[index] = JobClassSpeeds.of(self._snapshot.estimate(row), self._dealer.long)
        return kind

    def _allowed(self, kind: JobClassSpeeds) -> tuple[int, ...]:
        """Types for a single task, the fastest first, without those where it would be done later than if it waited."""
        (soonest, _), now = self._soonest(kind), self._snapshot.now
        return tuple([each for each in kind.types if kind.tasks and now + kind.tasks.seconds[each] <= soonest])

    def _soonest(self, kind: JobClassSpeeds) -> tuple[float, tuple[float, int] | None]:
        """When a task that waits for a GPU that computes another one would be done, and that GPU."""
        if kind.tasks is None:
            return inf, None
        able = [each for each in self._ahead if each[1] in kind.types]
        waits = [(until + kind.tasks.seconds[busy], (until, busy)) for until, busy in able]
        return min(waits, default=(inf, None))

    def _is_guarded(self, request: ShareRequest) -> bool:
        return request.single > 0 and self._dealer.guard is StarvationGuard.ON

    def _look_ahead(self, request: ShareRequest, mix: Mix | None) -> None:
        """Take note of where a task is computed: on the GPU that it got, or behind what is on the one that it waits for."""
        kind = self._kind(request.who)
        if mix is not None and kind.tasks is not None:
            self._ahead.append((self._snapshot.now + kind.tasks.seconds[mix.index(1)], mix.index(1)))
            return
        done, gpu = self._soonest(kind)
        if gpu is not None:
            self._ahead.remove(gpu)
            self._ahead.append((done, gpu[1]))

    def _claim(self, row: int, mix: Mix) -> Claim:
        kind = self._kind(row)
        if kind.tasks is None:
            return Claim(row, types=(mix.index(max(mix)),))
        if not kind.is_long:
            return Claim(row, mix=mix)
        now = self._snapshot.now
        ends = ((now + kind.tasks.seconds[each], each) for each, gpus in enumerate(mix) for _ in range(gpus))
        self.busy = (*self.busy, *ends)
        return Claim(row, mix=mix, grain=Grain.TASK)

    def _is_best(self, row: int, kind: JobClassSpeeds, mix: Mix) -> bool:
        """Whether nothing that others have would make it faster. Single tasks are dealt with whenever a GPU comes free."""
        if kind.is_long:
            return True
        if kind.tasks is not None:
            return computes_as_fast(kind.tasks, mix, self._gpus)
        gang = self._snapshot.columns.gang[row]
        best = max((kind.rates[each] for each in kind.types if self._gpus[each] >= gang), default=0.0)
        return kind.rates[mix.index(max(mix))] >= best
