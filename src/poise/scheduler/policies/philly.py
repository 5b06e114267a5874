"""Virtual clusters that lend each other idle GPUs, and locality that relaxes with time (`philly`; Jeon et al., ATC'19).

VC v (a tenant) has a quota of q_v GPUs and uses u_v. Whenever something happens, and when a back-off ends:

    within      jobs with u_v + g <= q_v, by arrival: start at their locality, u_v grows
    preempting  one of them finds no place, and cluster use >= `busy`: jobs over quota make way, the latest first
    borrowing   all other jobs, by arrival, on whatever is idle then

A job that does not fit holds up no job behind it. A try lasts `window` seconds; then the job backs off for `backoff` seconds
and is not looked at. Until `rack` tries have failed it insists on the fewest nodes, until `any` have on one rack, and then
on nothing. Tries count from when it first might have started: within its quota, or with enough GPUs idle. A
job that comes within its quota is tried at once.

A job over its quota waits for its share (fair-share delay); one within its quota for GPUs that are close enough together
(fragmentation). Which node is the placement's choice: with `consolidate` small jobs go to the tightest node, large ones to
empty nodes. A decision costs O(waiting jobs), and nothing while no job waits.

`Philly` is the policy. Below it stand its parts: quotas and their use, tries, a plan in the making, the queue.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf, isnan, nan
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from poise.scheduler.model.arithmetic import Bools, Ints
from poise.scheduler.model.cluster import Site, site_of
from poise.scheduler.model.job_table import JobTable, Snapshot
from poise.scheduler.model.plan import Claim, Plan
from poise.scheduler.model.speed import Locality
from poise.scheduler.policies import papers
from poise.scheduler.policies.listing import (
    Capability,
    Family,
    Listing,
    Parameter,
    PolicyProperty,
    Traits,
    equal_or_per_tenant,
    fraction,
    number,
    positive,
    whole_number,
)
from poise.scheduler.policies.placement_draft import PlacementDraft
from poise.scheduler.policies.promises import Quotas

SLACK = 1e-9
"""GPUs by which a quota may be exceeded: quotas are quotients, and rounded."""


@dataclass(frozen=True, slots=True)
class Philly:
    """Quotas, borrowing, and tries that relax.

    quotas    GPUs of some tenants; all others, as many as were met so far, share by weight what these leave of the live ones
    busy      cluster use from which on jobs over quota make way, from 0 to 1
    window    how long a try lasts, and backoff how long none follows, s
    rack      failed tries after which a rack is close enough;  any: after which anything is
    """

    quotas: tuple[tuple[str, float], ...] = ()
    busy: float = 0.9
    window: float = 150.0
    backoff: float = 120.0
    rack: int = 3
    any: int = 6

    def start(self) -> "Memory":
        """The memory before the first plan."""
        return Memory(VirtualClusterUsage())

    def plan(self, snapshot: Snapshot, memory: "Memory") -> tuple[Plan, "Memory"]:
        """Start what fits; running jobs go on unless they are over quota and in the way."""
        if not snapshot.is_contended:
            return Plan.changing(), Memory(memory.tenants) if memory.since or memory.held else memory
        tenants = memory.tenants.called(snapshot.columns, self.quotas)
        listed = sum(quota for _, quota in self.quotas)
        clusters = VirtualClusters(snapshot, tenants.quotas(snapshot.gpus, listed, snapshot.columns.tenant_weights))
        is_busy = sum(snapshot.idle) <= (1 - self.busy) * snapshot.gpus + SLACK
        draft = QuotaDraft(snapshot, clusters, clusters.over() if is_busy else [])
        queue = ClusterQueue(snapshot, clusters, memory)
        wake = self._fill(draft, queue.might_start(by_preemption=bool(draft.over)), clusters, snapshot.now)
        held = queue.held(draft.sites)
        looks_again = bool(draft.stops) and memory.looked < snapshot.now
        plan = Plan.changing(draft.claims(), tuple(sorted(draft.stops)), snapshot.now if looks_again else wake)
        return replace(plan, over_share=held), Memory(
            tenants, queue.since, frozenset(held), snapshot.now if looks_again else memory.looked
        )

    def _fill(self, draft: "QuotaDraft", waiters: "Sequence[Waiter]", clusters: "VirtualClusters", now: float) -> float:
        """Claim for jobs within their quota, then for the others; returns when the next try of any of them begins."""
        tries = Tries(self.window, self.backoff, self.rack, self.any)
        borrowing: list[tuple[Waiter, Locality]] = []
        for each in waiters:
            failed = tries.failed(each.since, now)
            level = tries.level(failed)
            if tries.begins(each.since, failed) > now and not each.is_freed:
                continue
            if not clusters.within(each.tenant, each.gang):
                borrowing.append((each, level))
            elif not draft.ask(each, level):
                draft.make_room(each, level)
        for each, level in borrowing:
            draft.offer(each, level)
        return min((tries.next(each.since, now) for each in waiters if not draft.is_sure(each.row)), default=inf)


LISTING = Listing(
    "philly",
    Family.MARKET,
    "virtual clusters with quotas that lend idle GPUs; locality that relaxes after failed tries",
    "Jeon et al., Philly, ATC'19 §2.3",
    (PolicyProperty.NO_DURATIONS,),
    Philly,
    (
        Parameter(
            "quotas",
            "equal",
            "GPUs of tenants, e.g. prod:64/dev:16; tenants not named share the rest by weight, as many as came so far",
            equal_or_per_tenant,
        ),
        Parameter("busy", "0.9", "part of the GPUs in use from which on jobs over quota are preempted", fraction),
        Parameter("window", "150", "seconds that a try for a place lasts", positive),
        Parameter("backoff", "120", "seconds without a try after one that failed", number),
        Parameter("rack", "3", "failed tries after which any nodes of one rack will do", whole_number),
        Parameter("any", "6", "failed tries after which any nodes will do", whole_number),
    ),
    can=frozenset({Capability.TENANTS}),
    promise=lambda quotas=(), **_others: Quotas(stated=dict(quotas)),
    traits=Traits(
        optimises="locality first, then use of idle GPUs",
        fairness="a quota of GPUs a tenant; idle ones are lent and taken back when 90 % are in use",
        heterogeneity="blind: quotas count GPUs of any type",
        gang="whole, on the fewest nodes; after failed tries in one rack, then anywhere",
        verified="no job within quota is preempted; tries relax at the published moments; "
        "on the Philly trace delay shifts from fair share to fragmentation as gangs grow",
    ),
    url=papers.PHILLY,
)


@dataclass(frozen=True, slots=True)
class VirtualClusterUsage:
    """Tenants met so far, by index: the stated quota of each, nan for those that have none.

    rows   jobs whose tenants have been looked at
    """

    given: tuple[float, ...] = ()
    rows: int = 0

    def called(self, columns: JobTable, quotas: Sequence[tuple[str, float]]) -> "VirtualClusterUsage":
        """With the tenants of jobs that have come since."""
        if self.rows == len(columns.ids):
            return self
        given, known = list(self.given), dict(quotas)
        for row in range(self.rows, len(columns.ids)):
            if columns.tenant[row] == len(given):  # indices go by first submission
                given.append(known.get(columns.tenants[row], nan))
        return VirtualClusterUsage(tuple(given), len(columns.ids))

    def quotas(self, gpus: int, listed: float, weights: Sequence[float]) -> list[float]:
        """The quota of each tenant. Those without a stated one share by weight what the stated ones, `listed`, leave."""
        sharing = sum(weight for weight, each in zip(weights, self.given, strict=True) if isnan(each))
        rest = max(gpus - listed, 0.0) / (sharing or 1.0)
        return [rest * weight if isnan(each) else each for weight, each in zip(weights, self.given, strict=True)]


class VirtualClusters:
    """GPUs that each tenant uses; `used` follows the jobs that the plan in the making starts and stops."""

    def __init__(self, snapshot: Snapshot, quotas: Sequence[float]) -> None:
        self._snapshot, self.quotas, running = snapshot, quotas, snapshot.running
        self._running = snapshot.rows[running]
        self._tenants = snapshot.ints(snapshot.columns.tenant)[running]
        gpus = snapshot.ints(snapshot.columns.gpus)[running]
        self.used: list[float] = np.bincount(self._tenants, gpus, len(quotas)).tolist()

    def within(self, tenant: int, gang: int) -> bool:
        """Whether one more such gang leaves the tenant within its quota."""
        return gang <= self.quotas[tenant] - self.used[tenant] + SLACK

    def all_within(self, tenants: Ints, gangs: Ints) -> Bools:
        """`within` for each of many gangs, alone."""
        room = np.array(self.quotas) - np.array(self.used) + SLACK
        fits: Bools = gangs <= room[tenants]
        return fits

    def over(self) -> list[int]:
        """Running jobs that took their tenant over its quota, the latest first.

        Of each tenant the jobs that started last, until the rest is within the quota; but none that may not be stopped.
        """
        columns = self._snapshot.columns
        over: list[int] = []
        for tenant, (used, quota) in enumerate(zip(self.used, self.quotas, strict=True)):
            excess = used - quota
            if excess <= SLACK:
                continue
            own = set(self._running[self._tenants == tenant].tolist()) - self._snapshot.pinned
            rows = sorted(own, key=lambda row: (columns.started[row], row))
            while excess > SLACK and rows:
                over.append(rows.pop())
                excess -= columns.gpus[over[-1]]
        return sorted(over, key=lambda row: (columns.started[row], row), reverse=True)


ROOM_FOR_OLD = 256
"""Entries of jobs that no longer wait that may pile up before they are looked for."""


@dataclass(frozen=True, slots=True)
class Tries:
    """When a job is tried, and at which locality: the k-th try, from 0, begins k · (window + backoff) after the first."""

    window: float
    backoff: float
    rack: int
    any: int

    def begins(self, since: float, count: int) -> float:
        """When a try begins."""
        return since + count * (self.window + self.backoff)

    def ends(self, since: float, count: int) -> float:
        """When a try ends; however that is rounded, not after the next one begins."""
        return self.begins(since, count + 1) - self.backoff

    def failed(self, since: float, now: float) -> int:
        """Tries that have ended by now. The end of each try decides, not a quotient, which may be rounded."""
        count = int((now - since + self.backoff) / (self.window + self.backoff))
        while count and self.ends(since, count - 1) > now:
            count -= 1
        while self.ends(since, count) <= now:
            count += 1
        return count

    def next(self, since: float, now: float) -> float:
        """When the next try begins."""
        count = self.failed(since, now)
        begins = self.begins(since, count)
        return begins if begins > now else self.begins(since, count + 1)

    def level(self, failed: int) -> Locality:
        """The locality that a job insists on after `failed` tries."""
        if failed < self.rack:
            return Locality.PACKED
        return Locality.RACK if failed < self.any else Locality.CLUSTER


class Waiter(NamedTuple):
    """A waiting job that might start now.

    since      when its tries began
    is_freed   it has come within its quota since the last plan, and is tried at once
    """

    row: int
    tenant: int
    gang: int
    since: float
    is_freed: bool


@dataclass(frozen=True, slots=True)
class Memory:
    """What is remembered: tenants; by row, since when jobs have been tried; and the jobs that the last plan held back.

    looked   when the policy last looked again at once because jobs were stopped: they may find another place
    """

    tenants: VirtualClusterUsage
    since: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    held: frozenset[int] = frozenset()
    looked: float = -inf


Shape = tuple[int, tuple[int, ...], Locality]
"""Gang, GPU types and locality: jobs of one shape fit where any of them does."""


class QuotaDraft:
    """A plan in the making: what is claimed, where that would go, and who makes way for it.

    The core chooses GPUs itself, so where a claim goes here only tells whether it will fit. But where running jobs make
    way the plan names the nodes: what they leave is for the job that they were stopped for.

    over   jobs over quota that may be stopped, the latest first
    """

    def __init__(self, snapshot: Snapshot, clusters: VirtualClusters, over: list[int]) -> None:
        self._snapshot, self._clusters, self.over = snapshot, clusters, over
        self._unplaced, self._hopeless = set[Shape](), set[Shape]()
        self._claims: list[tuple[int, Locality]] = []
        self.sites: dict[int, Site] = {}
        self.stops: list[int] = []

    @cached_property
    def _gpus(self) -> PlacementDraft:
        """Free GPUs as planned so far. Made only if a job might start."""
        return PlacementDraft(self._snapshot.placement)

    def ask(self, waiter: Waiter, level: Locality) -> bool:
        """Claim for a job, and say whether that fits in what is free."""
        self._claims.append((waiter.row, level))
        return self._find(waiter, level)

    def offer(self, waiter: Waiter, level: Locality) -> None:
        """Claim for a job if that fits in what is free."""
        if self._find(waiter, level):
            self._claims.append((waiter.row, level))

    def _find(self, waiter: Waiter, level: Locality) -> bool:
        types = self._types(waiter.row)
        shape = (waiter.gang, types, level)
        if shape in self._unplaced:  # less is free now than when another such job found no place
            return False
        for gpu_type in types:
            site = self._gpus.at(gpu_type, waiter.gang, level)
            if site is not None:
                self._seat(waiter, site)
                return True
        self._unplaced.add(shape)
        return False

    def make_room(self, waiter: Waiter, level: Locality) -> bool:
        """Stop jobs over quota, the latest first and no more than needed, so that a job that was claimed for fits."""
        types = self._types(waiter.row)
        shape = (waiter.gang, types, level)
        if not self.over or shape in self._hopeless:
            return False
        for gpu_type in types:
            victims = self._victims(gpu_type, waiter.gang, level)
            if victims:
                site = self._gpus.at(gpu_type, waiter.gang, level)
                assert site is not None, "it fitted a moment ago"
                self._seat(waiter, site)
                self._stop(victims)
                return True
        self._hopeless.add(shape)
        return False

    def claims(self) -> tuple[Claim, ...]:
        """All claims, in order."""
        sites = self.sites if self.stops else {}
        return tuple(Claim(row, level, site=sites.get(row)) for row, level in self._claims)

    def is_sure(self, row: int) -> bool:
        """Whether the job will start: its claim is the first, and fits. Others depend on which GPUs the core gives to it."""
        return bool(self._claims) and self._claims[0][0] == row and row in self.sites

    def _seat(self, waiter: Waiter, site: Site) -> None:
        self._gpus.take(site)
        self.sites[waiter.row] = site
        self._clusters.used[waiter.tenant] += waiter.gang

    def _victims(self, gpu_type: int, gang: int, level: Locality) -> list[int]:
        """Jobs over quota, whose GPUs are then counted as free, that make the gang fit; none if all of them do not do."""
        gpus_left = self._gpus
        type_of, holdings = gpus_left.topology.type_of, self._snapshot.placement.holdings
        rows = [row for row in self.over if type_of[holdings[row][0].node] == gpu_type]
        sites = [site_of(holdings[row]) for row in rows]
        for site in sites:
            gpus_left.give(site)
        fits = gpus_left.at(gpu_type, gang, level) is not None
        for site in sites:
            gpus_left.take(site)
        for count, site in enumerate(sites if fits else (), start=1):
            gpus_left.give(site)
            if gpus_left.at(gpu_type, gang, level) is not None:
                return rows[:count]
        return []

    def _stop(self, victims: Sequence[int]) -> None:
        """Stop these jobs, but for those whose GPUs are all still free; the one that has run longest is spared first."""
        columns, gpus_left = self._snapshot.columns, self._gpus
        for row in reversed(victims):
            site = site_of(self._snapshot.placement.holdings[row])
            if all(gpus_left.free[node] >= gpus for node, gpus in site):
                gpus_left.take(site)
            else:
                self.stops.append(row)
                self.over.remove(row)
                self._clusters.used[columns.tenant[row]] -= columns.gpus[row]
        self._unplaced.clear()  # a victim may leave more than was taken

    def _types(self, row: int) -> tuple[int, ...]:
        """Types that a job can run on, its fastest first."""
        if len(self._snapshot.idle) == 1:
            return (0,)
        rates = self._snapshot.estimate(row).packed
        return tuple(sorted((kind for kind, rate in enumerate(rates) if rate > 0), key=lambda kind: -rates[kind]))


class ClusterQueue:
    """The waiting jobs, by arrival.

    since   since when jobs have been tried, with those whose first try begins now
    """

    def __init__(self, snapshot: Snapshot, clusters: VirtualClusters, memory: Memory) -> None:
        waiting, self._clusters = ~snapshot.running, clusters
        self._rows, self._gangs = snapshot.rows[waiting], snapshot.gang[waiting]
        self._tenants = snapshot.ints(snapshot.columns.tenant)[waiting]
        self._within = clusters.all_within(self._tenants, self._gangs)
        self._has_room = self._gangs <= max(snapshot.idle)
        self._freed = set(self._rows[self._within].tolist()) & memory.held if memory.held else set()
        # A job that began to wait after it was last tried is new. Entries of jobs that have gone are kept for a while.
        tried, began = memory.since, snapshot.columns.waiting_since
        new = [row for row in self._rows[self._within | self._has_room].tolist() if tried.get(row, -inf) < began[row]]
        if new:
            kept = dict(tried)
            if len(kept) > ROOM_FOR_OLD + 2 * len(self._rows):
                kept = {row: kept[row] for row in self._rows.tolist() if row in kept}
            tried = MappingProxyType(kept | dict.fromkeys(new, snapshot.now))
        self.since = tried

    def might_start(self, *, by_preemption: bool) -> list[Waiter]:
        """Jobs that there may be room for, and those that have come within their quota since the last plan."""
        might = self._has_room | self._within if by_preemption else self._has_room
        if self._freed:
            might = might | np.isin(self._rows, list(self._freed))
        columns = (self._rows[might], self._tenants[might], self._gangs[might])
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return [Waiter(row, tenant, gang, self.since[row], row in self._freed) for row, tenant, gang in rows]

    def held(self, seated: Container[int]) -> tuple[int, ...]:
        """Jobs that wait on after the plan, and would take their tenant over its quota."""
        rows = self._rows[~self._clusters.all_within(self._tenants, self._gangs)]
        return tuple(row for row in rows.tolist() if row not in seated)
