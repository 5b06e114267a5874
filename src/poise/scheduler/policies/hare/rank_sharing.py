"""GPUs dealt out by rank, of any mix: what `hare` and `hlas` have in common (ALGORITHMS §5).

    value_m   the rank of job m, smaller first, then the earlier one: what the two differ in
    lease     s; at its end all GPUs that are held under leases are dealt out anew

Going through the jobs by rank, each takes the best of what is left: a gang its GPUs of one type; a job whose rounds divide
the fewest GPUs, of whatever types, on which its round is shortest. That is the grain of leases, for tasks that are short
beside a lease. Tasks that take `long` seconds or more on the job's fastest type are dealt with one by one: each ready task
takes the free GPU that computes it fastest, keeps it until it is done, and is never stopped. Between the ends of leases only
free GPUs are dealt out; but a newcomer is not made to wait for them. What pinned jobs hold is never dealt out.
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
from poise.scheduler.model.speed import Estimate, Locality
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
        """Tasks of so many seconds are long."""
        rates = [row[Locality.PACKED] for row in estimate.rates]
        types = sorted((kind for kind, rate in enumerate(rates) if rate > 0), key=lambda kind: -rates[kind])
        tasks = estimate.tasks
        return JobClassSpeeds(tuple(types), tuple(rates), tasks, tasks is not None and tasks.best >= long)

    def types_for(self, has: Mix | None) -> tuple[int, ...]:
        """By falling speed; of types that are equally fast, the one that a gang has comes first."""
        if has is None or self.tasks is not None:
            return self.types
        held = has.index(max(has))
        return tuple(sorted(self.types, key=lambda kind: (-self.rates[kind], kind != held)))


@dataclass(frozen=True, slots=True)
class RankPlanner:
    """Memory: that of the ranking, the youngest job seen, and when GPUs that compute single tasks are free, by type.

    kinds   what is known of kinds of jobs
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
    """The planner. Seconds."""

    ranking: HareRanking
    lease: float = 360.0
    long: float = 30.0
    guard: StarvationGuard = StarvationGuard.OFF

    def start(self) -> RankPlanner:
        """Nothing is known before the first plan."""
        return RankPlanner(self.ranking.start())

    def plan(self, snapshot: Snapshot, memory: RankPlanner) -> tuple[Plan, RankPlanner]:
        """At the end of a lease, and for a newcomer, everything is dealt out; otherwise what is free."""
        newest = snapshot.active[-1]
        is_anew = newest > memory.newest or is_round_end(snapshot.origin, snapshot.now, self.lease)
        if not is_anew and not any(snapshot.idle):
            return Plan.changing(wake=self.next_end(snapshot)), memory
        values, ranking = self.ranking.values(snapshot, memory.ranking)
        table = _RateTable(self, snapshot, memory, Ownership.LENT if is_anew else Ownership.OWN)
        order = snapshot.rows[np.lexsort((snapshot.rows, values))].tolist()
        plan = table.dealt(order)
        is_change = plan.stops or any(claim.grain is Grain.LEASE for claim in plan.claims)
        if table.is_settled and not is_change:  # what was asked for may turn out otherwise: not everybody can be stopped
            plan = replace(plan, wake=inf)
        memory = RankPlanner(ranking, max(newest, memory.newest), table.busy, MappingProxyType(table.kinds))
        return plan, memory

    def next_end(self, snapshot: Snapshot) -> float:
        """When the leases of now end."""
        return next_round_end(snapshot.origin, snapshot.now, self.lease)


class _RateTable:
    """One deal.

    is_settled   everybody has the best that there is, for as long as nothing happens
    """

    def __init__(self, dealer: Dealer, snapshot: Snapshot, memory: RankPlanner, title: Ownership) -> None:
        self._dealer = dealer
        self._snapshot = snapshot
        self._title = title
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
        if self._title is Ownership.OWN and self._failed and any(left):  # somebody may have given up what others can use
            self._failed.clear()
            self._share_out([row for row in order if row not in gets and self._is_passed_over(row)], left, gets)
        self._note_settled(order, gets)
        stops = [row for row in self._held if row not in gets and self._is_lent(row)]
        claims = tuple(self._claim(row, mix) for row, mix in gets.items() if self._is_change(row, mix))
        return Plan.changing(claims, tuple(stops), self._dealer.next_end(snapshot))

    def _is_lent(self, row: int) -> bool:
        """What the job holds, if it holds anything, is dealt out anew."""
        return self._title is Ownership.LENT and not self._kind(row).is_long and row not in self._snapshot.pinned

    def _is_passed_over(self, row: int) -> bool:
        """It could use a GPU, and got none, for want of one and not for waiting for a better one."""
        if self._kind(row).is_long:
            return self._dealer.guard is StarvationGuard.OFF
        return row not in self._held

    def _share_out(self, order: list[int], left: list[int], gets: dict[int, Mix]) -> None:
        """Of what is left, to these jobs by rank."""
        for wish, mix in share_out(self._wishes(order), left, GpuSupply.of(self._snapshot.placement.topology)):
            before = gets.get(wish.who)
            if mix is not None:
                gets[wish.who] = mix if before is None else _total(before, [mix])
            elif not self._is_guarded(wish):
                self._failed.add(self._snapshot.columns.kind[wish.who])
                self._reserve(wish, left)
            if self._is_guarded(wish):
                self._look_ahead(wish, mix)

    def _reserve(self, wish: ShareRequest, left: list[int]) -> None:
        """GPUs that single tasks give back come one by one, and a gang would never see enough of them at once.

        So a gang that has waited for a lease, and would fit if they did, keeps those behind it from its best such type.
        """
        waited = self._snapshot.now - self._snapshot.columns.waiting_since[wish.who]
        if wish.tasks is None and wish.has is None and waited >= self._dealer.lease:
            kind = next((kind for kind in wish.types if left[kind] + self._computing[kind] >= wish.gang), None)
            if kind is not None:
                left[kind] = 0

    def _wishes(self, order: list[int]) -> Iterator[ShareRequest]:
        """What everybody would like, by rank. Of a kind of which one got nothing, nobody behind it will get anything."""
        columns = self._snapshot.columns
        for row in order:
            if columns.kind[row] in self._failed:
                continue
            kind = self._kind(row)
            if row in self._snapshot.pinned:
                continue
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
        soonest, _ = self._soonest(kind)
        return tuple(
            [each for each in kind.types if kind.tasks and self._snapshot.now + kind.tasks.seconds[each] <= soonest]
        )

    def _soonest(self, kind: JobClassSpeeds) -> tuple[float, tuple[float, int] | None]:
        """When a task that waits for a GPU that computes another one would be done, and for which."""
        if kind.tasks is None:
            return inf, None
        able = [each for each in self._ahead if each[1] in kind.types]
        waits = [(until + kind.tasks.seconds[busy], (until, busy)) for until, busy in able]
        return min(waits, default=(inf, None))

    def _is_guarded(self, wish: ShareRequest) -> bool:
        return wish.single > 0 and self._dealer.guard is StarvationGuard.ON

    def _look_ahead(self, wish: ShareRequest, mix: Mix | None) -> None:
        """Take note of where a task is computed: on the GPU that it got, or behind what is on the one that it waits for."""
        kind = self._kind(wish.who)
        if mix is not None and kind.tasks is not None:
            self._ahead.append((self._snapshot.now + kind.tasks.seconds[mix.index(1)], mix.index(1)))
            return
        done, gpu = self._soonest(kind)
        if gpu is not None:
            self._ahead.remove(gpu)
            self._ahead.append((done, gpu[1]))

    def _is_change(self, row: int, mix: Mix) -> bool:
        return self._kind(row).is_long or self._held.get(row) != mix

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

    def _note_settled(self, order: list[int], gets: Mapping[int, Mix]) -> None:
        """Whether time alone could make another deal: somebody waits, or would be faster with what others have."""
        for row in order:
            kind = self._kind(row)
            mix = gets.get(row) if self._is_lent(row) else gets.get(row) or self._held.get(row)
            if mix is None or not self._is_best(row, kind, mix):
                self.is_settled = False
                return

    def _is_best(self, row: int, kind: JobClassSpeeds, mix: Mix) -> bool:
        """Nothing that others have would make it faster. Single tasks are dealt with whenever a GPU comes free."""
        if kind.is_long:
            return True
        if kind.tasks is not None:
            return computes_as_fast(kind.tasks, mix, self._gpus)
        gang = self._snapshot.columns.gang[row]
        best = max((kind.rates[each] for each in kind.types if self._gpus[each] >= gang), default=0.0)
        return kind.rates[mix.index(max(mix))] >= best
