"""Virtual clusters that lend each other idle GPUs, and locality that relaxes with time (`philly`; Jeon et al., ATC'19).

VC v (a tenant) has a quota of q_v GPUs and uses u_v. Whenever something happens, and when a back-off ends:

    within      jobs with u_v + g <= q_v, by arrival: start at their locality, u_v grows
    preempting  one of them finds no place, and cluster use >= `busy`: jobs over quota make way, the latest first
    borrowing   all other jobs, by arrival, on whatever is idle then

A job that does not fit holds up nobody behind it. A try lasts `window` seconds; then the job backs off for `backoff` seconds
and is not looked at. Until `rack` tries have failed it insists on the fewest nodes, until `any` have on one rack, and then
on nothing. Tries count from the first moment at which it might have started: within its quota, or with enough GPUs idle. A
job that comes within its quota is tried at once.

A job over its quota waits for its share (fair-share delay); one within its quota for GPUs that are close enough together
(fragmentation). Which node is the placement's choice: with `consolidate` small jobs go to the tightest node, large ones to
empty nodes. A decision costs O(waiting jobs), and nothing while nobody waits.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, isnan, nan
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from poise.scheduler.model.arithmetic import Bools, Ints
from poise.scheduler.model.cluster import Site, site_of
from poise.scheduler.model.job_table import JobTable, Snapshot
from poise.scheduler.model.plan import Claim, Plan
from poise.scheduler.model.speed import Locality
from poise.scheduler.policies.listing import (
    Family,
    Listing,
    Parameter,
    PolicyClaim,
    Traits,
    equal_or_per_tenant,
    fraction,
    number,
    positive,
    whole_number,
)
from poise.scheduler.policies.placement_draft import PlacementDraft
from poise.scheduler.policies.promises import Promise, Quotas

# Virtual clusters: tenants with a quota of GPUs, and who uses how much of it (Philly §2.3; ALGORITHMS §6.1).

SLACK = 1e-9
"""Of a GPU: quotas are quotients."""


@dataclass(frozen=True, slots=True)
class VirtualClusterUsage:
    """Tenants met so far, by index: the quota that each was given, nan for those that were given none.

    rows   jobs that have been looked at for it
    """

    given: tuple[float, ...] = ()
    rows: int = 0

    def called(self, columns: JobTable, quotas: Sequence[tuple[str, float]]) -> "VirtualClusterUsage":
        """The roll with the tenants of jobs that have come since."""
        if self.rows == len(columns.ids):
            return self
        given, known = list(self.given), dict(quotas)
        for row in range(self.rows, len(columns.ids)):
            if columns.tenant[row] == len(given):  # indices go by first submission
                given.append(known.get(columns.tenants[row], nan))
        return VirtualClusterUsage(tuple(given), len(columns.ids))

    def quotas(self, gpus: int, listed: float, weights: Sequence[float]) -> list[float]:
        """Everybody's quota: those without one share by weight what the listed ones, added up, leave of the GPUs."""
        sharing = sum(weight for weight, each in zip(weights, self.given, strict=True) if isnan(each))
        rest = max(gpus - listed, 0.0) / (sharing or 1.0)
        return [rest * weight if isnan(each) else each for weight, each in zip(weights, self.given, strict=True)]


class VirtualClusters:
    """Who uses what at one moment, in the making: `used` follows the jobs that a plan starts and stops."""

    def __init__(self, snapshot: Snapshot, quotas: Sequence[float]) -> None:
        self._snapshot = snapshot
        self.quotas = quotas
        running = snapshot.running
        self._running = snapshot.rows[running]
        self._tenants = snapshot.ints(snapshot.columns.tenant)[running]
        gpus = snapshot.ints(snapshot.columns.gpus)[running]
        self.used: list[float] = np.bincount(self._tenants, gpus, len(quotas)).tolist()

    def within(self, tenant: int, gang: int) -> bool:
        """One more such gang leaves the tenant within its quota."""
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
        over: list[int] = []
        for tenant, (used, quota) in enumerate(zip(self.used, self.quotas, strict=True)):
            if used > quota + SLACK:
                over += self._latest(tenant, used - quota)
        started = self._snapshot.columns.started
        return sorted(over, key=lambda row: (started[row], row), reverse=True)

    def _latest(self, tenant: int, excess: float) -> list[int]:
        started, gpus = self._snapshot.columns.started, self._snapshot.columns.gpus
        own = set(self._running[self._tenants == tenant].tolist()) - self._snapshot.pinned
        rows = sorted(own, key=lambda row: (started[row], row))
        found: list[int] = []
        while excess > SLACK and rows:
            found.append(rows.pop())
            excess -= gpus[found[-1]]
        return found


QUIET = Plan.changing()
"""Nobody waits."""

ROOM_FOR_OLD = 256
"""Entries of jobs that wait no more that are kept rather than looked for."""

NOBODY: Mapping[int, float] = MappingProxyType({})


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
        """Tries that have ended by now. The moments themselves decide, not a quotient that may be rounded."""
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
        """What a job insists on after so many failed tries."""
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
    """The tenants met so far, and of jobs, by row, since when they have been tried and whom the last plan held back.

    looked   last moment at which to look again at once, because jobs were stopped: they may find another place
    """

    roll: VirtualClusterUsage
    since: Mapping[int, float]
    held: frozenset[int]
    looked: float = -inf


Shape = tuple[int, tuple[int, ...], Locality]
"""Gang, GPU types and locality: jobs of one shape fit where any of them does."""


class QuotaDraft:
    """A plan in the making: what is claimed, where that would go, and who makes way for it.

    The core chooses GPUs itself, so where a claim goes here only tells whether it will fit. But where running jobs make
    way the plan names the nodes: what they leave is for the job that they were stopped for.
    """

    def __init__(self, snapshot: Snapshot, clusters: VirtualClusters, over: list[int]) -> None:
        self._snapshot = snapshot
        self._clusters = clusters
        self._over = over
        self._unplaced: set[Shape] = set()
        self._hopeless: set[Shape] = set()
        self._claims: list[tuple[int, Locality]] = []
        self.sites: dict[int, Site] = {}
        self.stops: list[int] = []

    @cached_property
    def _sketch(self) -> PlacementDraft:
        """Made only if anybody might start."""
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
            site = self._sketch.at(gpu_type, waiter.gang, level)
            if site is not None:
                self._seat(waiter, site)
                return True
        self._unplaced.add(shape)
        return False

    @property
    def can_make_room(self) -> bool:
        """There are jobs that may be stopped."""
        return bool(self._over)

    def make_room(self, waiter: Waiter, level: Locality) -> bool:
        """Stop jobs over quota, the latest first and no more than needed, so that a job that was claimed for fits."""
        types = self._types(waiter.row)
        shape = (waiter.gang, types, level)
        if not self._over or shape in self._hopeless:
            return False
        for gpu_type in types:
            victims = self._victims(gpu_type, waiter.gang, level)
            if victims:
                site = self._sketch.at(gpu_type, waiter.gang, level)
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
        """The job will start: its claim is the first, and fits. Others depend on which GPUs the core gives to the first."""
        return bool(self._claims) and self._claims[0][0] == row and row in self.sites

    def _seat(self, waiter: Waiter, site: Site) -> None:
        self._sketch.take(site)
        self.sites[waiter.row] = site
        self._clusters.used[waiter.tenant] += waiter.gang

    def _victims(self, gpu_type: int, gang: int, level: Locality) -> list[int]:
        """Jobs over quota, taken out of the sketch, after which the gang fits; none if it does not after all of them."""
        sketch = self._sketch
        rows = [row for row in self._over if self._type_of(row) == gpu_type]
        sites = [site_of(self._snapshot.placement.holdings[row]) for row in rows]
        for site in sites:
            sketch.give(site)
        fits = sketch.at(gpu_type, gang, level) is not None
        for site in sites:
            sketch.take(site)
        for count, site in enumerate(sites if fits else (), start=1):
            sketch.give(site)
            if sketch.at(gpu_type, gang, level) is not None:
                return rows[:count]
        return []

    def _stop(self, victims: Sequence[int]) -> None:
        """These make way, but for those whose GPUs are all still free; of those who has run longest is spared first."""
        columns, sketch = self._snapshot.columns, self._sketch
        for row in reversed(victims):
            site = site_of(self._snapshot.placement.holdings[row])
            if all(sketch.free[node] >= gpus for node, gpus in site):
                sketch.take(site)
            else:
                self.stops.append(row)
                self._over.remove(row)
                self._clusters.used[columns.tenant[row]] -= columns.gpus[row]
        self._unplaced.clear()  # a victim may leave more than was taken

    def _type_of(self, row: int) -> int:
        floor = self._snapshot.placement
        return floor.topology.type_of[floor.holdings[row][0].node]

    def _types(self, row: int) -> tuple[int, ...]:
        """Types that a job can run on, its fastest first."""
        if len(self._snapshot.idle) == 1:
            return (0,)
        rates = self._snapshot.estimate(row).rates
        usable = (kind for kind, row in enumerate(rates) if row[Locality.PACKED] > 0)
        return tuple(sorted(usable, key=lambda kind: -rates[kind][Locality.PACKED]))


class ClusterQueue:
    """The waiting jobs at one moment, by arrival.

    since   since when jobs have been tried, with those whose first try begins now
    """

    def __init__(self, snapshot: Snapshot, clusters: VirtualClusters, memory: Memory) -> None:
        waiting = ~snapshot.running
        self._snapshot = snapshot
        self._clusters = clusters
        self._rows = snapshot.rows[waiting]
        self._gangs = snapshot.gang[waiting]
        self._tenants = snapshot.ints(snapshot.columns.tenant)[waiting]
        self._within = clusters.all_within(self._tenants, self._gangs)
        self._has_room = self._gangs <= max(snapshot.idle)
        self._freed = set(self._rows[self._within].tolist()) & memory.held if memory.held else set()
        self.since = self._tried(self._rows[self._within | self._has_room].tolist(), memory.since)

    def _tried(self, rows: list[int], since: Mapping[int, float]) -> Mapping[int, float]:
        """A job that began to wait after it was last tried is new. Entries of jobs that have gone are kept for a while."""
        began = self._snapshot.columns.waiting_since
        new = [row for row in rows if since.get(row, -inf) < began[row]]
        if not new:
            return since
        kept = dict(since)
        if len(kept) > ROOM_FOR_OLD + 2 * len(self._rows):
            kept = {row: kept[row] for row in self._rows.tolist() if row in kept}
        kept.update(dict.fromkeys(new, self._snapshot.now))
        return MappingProxyType(kept)

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

    def start(self) -> Memory:
        """Nobody has come yet."""
        return Memory(VirtualClusterUsage(), NOBODY, frozenset())

    def plan(self, snapshot: Snapshot, memory: Memory) -> tuple[Plan, Memory]:
        """Start what fits; running jobs go on unless they are over quota and in the way."""
        if not snapshot.is_contended:
            return QUIET, Memory(memory.roll, NOBODY, frozenset()) if memory.since or memory.held else memory
        roll = memory.roll.called(snapshot.columns, self.quotas)
        listed = sum(quota for _, quota in self.quotas)
        clusters = VirtualClusters(snapshot, roll.quotas(snapshot.gpus, listed, snapshot.columns.tenant_weights))
        is_busy = sum(snapshot.idle) <= (1 - self.busy) * snapshot.gpus + SLACK
        draft = QuotaDraft(snapshot, clusters, clusters.over() if is_busy else [])
        queue = ClusterQueue(snapshot, clusters, memory)
        wake = self._fill(draft, queue.might_start(by_preemption=draft.can_make_room), clusters, snapshot.now)
        held = queue.held(draft.sites)
        looks_again = bool(draft.stops) and memory.looked < snapshot.now
        plan = Plan.changing(draft.claims(), tuple(sorted(draft.stops)), snapshot.now if looks_again else wake)
        plan = replace(plan, held=held)
        return plan, Memory(roll, queue.since, frozenset(held), snapshot.now if looks_again else memory.looked)

    def _fill(self, draft: QuotaDraft, waiters: Sequence[Waiter], clusters: VirtualClusters, now: float) -> float:
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


def _by_quotas(quotas: tuple[tuple[str, float], ...] = (), **_parameters: Any) -> Promise:  # noqa: ANN401
    return Quotas(stated=dict(quotas))


LISTING = Listing(
    "philly",
    Family.MARKET,
    "virtual clusters with quotas that lend idle GPUs; locality that relaxes after failed tries",
    "Jeon et al., Philly, ATC'19 §2.3",
    (PolicyClaim.NO_DURATIONS,),
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
    promise=_by_quotas,
    traits=Traits(
        optimises="locality first, then use of idle GPUs",
        fairness="a quota of GPUs a tenant; idle ones are lent and taken back when 90 % are in use",
        heterogeneity="blind: quotas count GPUs of any type",
        gang="whole, on the fewest nodes; after failed tries in one rack, then anywhere",
        verified="nobody within quota is preempted; tries relax at the published moments; "
        "on the Philly trace delay shifts from fair share to fragmentation as gangs grow",
    ),
)
