"""Gandiva_fair (`gandiva-fair`; Chaudhary et al., EuroSys'20): fair GPU time for tenants, gangs whole, GPU types traded.

    tickets        t_u of tenant u, water-filled over demand into GPUs of each type, divided over its jobs
    trade          tenants exchange fast GPUs for slow ones at a second price, by speed-ups seen in their own jobs
                   (both `entitlements.py`)
    homes          each job lives on one node, or a few if its gang spans them, by ticket load; few moves
                   (`load_balance.py`)
    split stride   every quantum each pool of GPUs of one type decides who runs, whole gangs at home, the furthest behind
                   first within the budgets of their tenants (`accounts.py`, `split_stride.py`); where that leaves tenants
                   uneven or GPUs idle, the gangs that do so least

While no job waits there are no quanta: a job that fits goes to the tightest free place, and may move to a faster type that
stands idle (`upgrades.py`). Inside a quantum free GPUs go to waiting jobs and none is stopped. A quantum costs O(J log J)
for J jobs, and more where gangs are chosen. docs/algorithms/gandiva-fair.md states it all.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from types import MappingProxyType

from poise.scheduler.model.cluster import Site, site_of
from poise.scheduler.model.job_table import Snapshot
from poise.scheduler.model.plan import Claim, Plan, PreemptionRule, StopMode, Unfitting
from poise.scheduler.model.units import next_round_end
from poise.scheduler.policies import papers
from poise.scheduler.policies.gandiva_fair.accounts import Place, TenantAccounts, credited, seconds_run, settled
from poise.scheduler.policies.gandiva_fair.entitlements import (
    NOBODY_ENTITLED,
    Entitlements,
    Profiling,
    TenantJobs,
    TicketDivision,
    Trading,
    divided,
    entitle,
    notes,
    water_filled,
    with_running,
)
from poise.scheduler.policies.gandiva_fair.load_balance import Homes, Lodger, retyped, type_for
from poise.scheduler.policies.gandiva_fair.split_stride import Contender, Quantum, decide
from poise.scheduler.policies.listing import (
    Capability,
    Family,
    Listing,
    Parameter,
    PolicyProperty,
    Traits,
    choice,
    equal_or_per_tenant,
    number,
    positive,
)
from poise.scheduler.policies.placement_draft import PlacementDraft
from poise.scheduler.policies.promises import AmongTenants
from poise.scheduler.policies.upgrades import Seen, upgrades


@dataclass(frozen=True, slots=True)
class SlicingRules:
    """The parameters.

    tickets   of tenants (1 if not named), for each 1 of their weights;  quantum: seconds
    rest      seconds between two moves of a job;  cost: seconds of its running time that a move is taken to cost
    """

    tickets: tuple[tuple[str, float], ...] = ()
    quantum: float = 60.0
    division: TicketDivision = TicketDivision.GANG
    trade: Trading = Trading.ON
    profile: Profiling = Profiling.RUNNING
    rest: float = 300.0
    cost: float = 60.0


@dataclass(frozen=True, slots=True)
class SlicingMemory:
    """What the policy remembers.

    ends      when the quantum ends;  accounts: who is behind, None while no job waits
    homes     where jobs lived at the last plan;  moved: when they were last given another home
    seen      which kinds of jobs have run on which GPU types;  told: entitlements as last written to the journal
    """

    ends: float = -inf
    accounts: TenantAccounts | None = None
    homes: Mapping[int, Site] = field(default_factory=lambda: MappingProxyType({}))
    moved: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    seen: Seen = frozenset()
    told: Entitlements = NOBODY_ENTITLED


@dataclass(frozen=True, slots=True)
class GandivaFair(SlicingRules):
    """Time slices in proportion to tenants' tickets, by GPU type as traded."""

    def start(self) -> SlicingMemory:
        """The memory before the first plan."""
        return SlicingMemory()

    def plan(self, snapshot: Snapshot, memory: SlicingMemory) -> tuple[Plan, SlicingMemory]:
        """No change while no job waits; free places at once; time slices where there are not enough."""
        if not snapshot.is_contended:
            return self._calm(snapshot, memory)
        # Where there is one type and no account is open, free places need no entitlements.
        if memory.accounts is None and len(snapshot.idle) == 1:
            claims = _at_once(snapshot)
            if claims is not None:
                return Plan.changing(claims), memory
        return Slicing(self, snapshot, memory).plan()

    def _calm(self, snapshot: Snapshot, memory: SlicingMemory) -> tuple[Plan, SlicingMemory]:
        """No job waits, so none is behind. Where there are several types, jobs may move to faster ones that stand idle."""
        if memory.accounts is not None:
            memory = SlicingMemory(moved=memory.moved, seen=memory.seen, told=memory.told)
        if len(snapshot.idle) == 1 or not any(snapshot.idle):
            return Plan.changing(), memory
        seen = with_running(snapshot, memory.seen)
        known = seen if self.profile is Profiling.RUNNING else None
        claims, later = upgrades(snapshot, rest=self.rest, cost=self.cost, seen=known, moved=memory.moved)
        moved = {row: time for row, time in memory.moved.items() if row in snapshot.placement.holdings}
        moved |= {claim.row: snapshot.now for claim in claims}
        return Plan.changing(claims, wake=later), replace(memory, seen=seen, moved=MappingProxyType(moved))


def _at_once(snapshot: Snapshot) -> tuple[Claim, ...] | None:
    """Each waiting job on the tightest free node, or nodes if none could ever hold the gang; None if not all fit."""
    waiting = snapshot.rows[~snapshot.running].tolist()
    if sum(snapshot.columns.gang[row] for row in waiting) > snapshot.idle[0]:
        return None
    draft = PlacementDraft(snapshot.placement)
    largest = draft.topology.largest_node(0)
    claims = []
    for row in waiting:
        gang = snapshot.columns.gang[row]
        site = draft.tightest(0, gang)
        if site is None or (len(site) > 1 and gang <= largest):
            return None
        draft.take(site)
        claims.append(Claim(row, site=site))
    return tuple(claims)


LISTING = Listing(
    "gandiva-fair",
    Family.MARKET,
    "tenants' tickets into GPU time: split stride, load balance, trade of fast GPUs for slow ones",
    "Chaudhary et al., Gandiva_fair, EuroSys'20",
    (PolicyProperty.NO_DURATIONS, PolicyProperty.NO_INFLATION),
    GandivaFair,
    (
        Parameter("tickets", "equal", "tickets of tenants, alice:2/bob:1; 1 for those not named", equal_or_per_tenant),
        Parameter("quantum", "60", "length of a time slice in seconds", positive),
        Parameter("division", "gang", "tickets of a tenant's jobs: by gang, or equal", choice(TicketDivision)),
        Parameter("trade", "on", "whether tenants trade GPU types: on or off", choice(Trading)),
        Parameter(
            "profile",
            "running",
            "speed-ups that count for trades: those of types that jobs have run on (running), or all believed (known)",
            choice(Profiling),
        ),
        Parameter("rest", "300", "seconds between two moves of a job from node to node", number),
        Parameter("cost", "60", "seconds of running that a move is taken to cost; it must gain more", number),
    ),
    can=frozenset({Capability.TENANTS, Capability.TRADES}),
    promise=lambda tickets=(), **_others: AmongTenants(named=dict(tickets)),
    traits=Traits(
        optimises="GPU time of tenants in proportion to tickets",
        fairness="between tenants, over any hour; jobs of a tenant alike",
        heterogeneity="tickets of every type; fast traded for slow at a second price",
        gang="gang-aware stride, large gangs by the centre, bounded lag",
        elasticity="none; time slices and migration",
        verified="the published tables and trades; every hour within 3 % of the tickets' share of the GPU time used "
        "with gangs of 1 to 16, and mostly of all GPU time; two of four tenants gain about 30 % by trade and "
        "none loses",
    ),
    url=papers.GANDIVA_FAIR,
)


STIFFNESS = 10.0
"""How much more the lag of a tenant counts than that of one of its jobs."""


class Slicing:
    """One decision in the making: everything that it looks at, and `plan`, which tells its steps in order.

    Rows are those of active jobs, ascending. `_is_due`: a quantum has ended; otherwise it goes on.
    """

    def __init__(self, rules: SlicingRules, snapshot: Snapshot, memory: SlicingMemory) -> None:
        columns, topology = snapshot.columns, snapshot.placement.topology
        self._rules, self._snapshot, self._memory, self._now = rules, snapshot, memory, snapshot.now
        self._is_due = self._now >= memory.ends
        self._gang, self._tenant = columns.gang, columns.tenant
        self._holdings, self._pinned = snapshot.placement.holdings, snapshot.pinned
        self._rows = snapshot.rows.tolist()
        self._waiting = [row for row in self._rows if row not in self._holdings]
        self._moved = {row: memory.moved[row] for row in self._rows if row in memory.moved}
        self._names = {self._tenant[row]: columns.tenants[row] for row in self._rows}
        self._type_of: dict[int, int] = {}
        # GPUs that can be shared: not those of lost nodes, nor those set aside or held by pinned jobs.
        sizes = snapshot.placement.free()
        for row, holding in self._holdings.items():
            for node, mask in holding if row not in self._pinned else ():
                sizes[node] += mask.bit_count()
        self._homes = Homes(sizes, topology.type_of, topology.rack_of)
        self._shared = [0] * len(topology.types)
        for gpu_type, size in zip(topology.type_of, sizes, strict=True):
            self._shared[gpu_type] += size
        # Entitlements are of all GPUs, with what pinned jobs hold: it counts as theirs.
        kept = map(topology.mix, snapshot.kept().values())
        self._jobs = TenantJobs(snapshot, [sum(gpus) for gpus in zip(self._shared, *kept, strict=True)])
        self._seen = with_running(snapshot, memory.seen)

    @cached_property
    def _entitled(self) -> Entitlements:
        """What each tenant is entitled to after trades. Only computed where it is needed: trades cost."""
        stated, weights = dict(self._rules.tickets), self._snapshot.columns.tenant_weights
        tickets = {tenant: stated.get(name, 1.0) * weights[tenant] for tenant, name in self._names.items()}
        seen = self._seen if self._rules.profile is Profiling.RUNNING else None
        return entitle(self._jobs, tickets, self._rules.trade, seen)

    def plan(self) -> tuple[Plan, SlicingMemory]:
        """The plan for now, and what to remember."""
        settling = self._choose_types()
        shares = self._shares()
        lodgers = self._lodgers(shares)
        self._lodge(lodgers, settling)
        accounts = self._accounts(shares, lodgers)
        if self._is_due:
            self._rehome(lodgers, accounts)
        quanta = self._decided(self._contenders(lodgers, accounts), accounts, shares)
        return self._written(quanta, accounts)

    def _choose_types(self) -> list[int]:
        """A type for every job; returns the jobs that need a node. A running job lives where it runs."""
        topology = self._snapshot.placement.topology
        settling: list[int] = []
        for row in self._rows:
            site = site_of(self._holdings[row]) if row in self._holdings else self._memory.homes.get(row)
            if row in self._pinned and site is not None:
                self._type_of[row] = topology.type_of[site[0].node]
            elif site is None or any(self._homes.size[node] < gpus for node, gpus in site):
                settling.append(row)
            else:
                self._homes.of[row] = site
                self._type_of[row] = topology.type_of[site[0].node]
        if len(topology.types) == 1:
            self._type_of |= dict.fromkeys(settling, 0)
            return settling
        # GPUs that each tenant's jobs ask for, by the type on which they live.
        asked = {tenant: [0.0] * len(self._jobs.live) for tenant in self._names}
        for row, gpu_type in self._type_of.items():
            asked[self._tenant[row]][gpu_type] += self._gang[row]
        for row in settling:
            tenant, gang = self._tenant[row], self._gang[row]
            chosen = type_for(gang, self._able(row), self._entitled.gpus[tenant], asked[tenant], self._speeds(row))
            if chosen is not None:
                self._type_of[row] = chosen
                asked[tenant][chosen] += gang
        return [*settling, *self._retype(asked)] if self._is_due else settling

    def _retype(self, asked: dict[int, list[float]]) -> list[int]:
        """Give waiting jobs of tenants that ask for too much of a type another type; returns those jobs."""
        changed = []
        for row in self._waiting:
            if row in self._homes.of and self._may_move(row):
                tenant, gang, here = self._tenant[row], self._gang[row], self._type_of[row]
                there = retyped(gang, here, self._able(row), self._entitled.gpus[tenant], asked[tenant])
                if there is not None:
                    asked[tenant][here] -= gang
                    asked[tenant][there] += gang
                    self._type_of[row] = there
                    del self._homes.of[row]
                    self._moved[row] = self._now
                    changed.append(row)
        return changed

    def _speeds(self, row: int) -> Sequence[float]:
        """Believed speed of a job on each type."""
        return self._jobs.speeds[self._snapshot.columns.kind[row]]

    def _able(self, row: int) -> list[int]:
        """Types on which a job could run if all jobs that can be stopped made way."""
        speeds = enumerate(self._speeds(row))
        return [each for each, speed in speeds if speed > 0 and self._gang[row] <= self._shared[each]]

    def _may_move(self, row: int) -> bool:
        return self._now - self._moved.get(row, -inf) >= self._rules.rest

    def _shares(self) -> dict[Place, float]:
        """GPUs of each tenant in each pool: its entitlement there, and what others leave."""
        demand: dict[int, dict[int, float]] = {}
        for row, gpu_type in sorted(self._type_of.items()):
            asked = demand.setdefault(gpu_type, {})
            asked[self._tenant[row]] = asked.get(self._tenant[row], 0.0) + self._gang[row]
        shares: dict[Place, float] = {}
        for gpu_type, asked in sorted(demand.items()):
            entitled = {tenant: self._entitled.gpus[tenant][gpu_type] for tenant in asked}
            for tenant, share in water_filled(asked, entitled, self._jobs.live[gpu_type]).items():
                shares[tenant, gpu_type] = share
        return shares

    def _lodgers(self, shares: Mapping[Place, float]) -> dict[int, Lodger]:
        """Every job that has a type, with its tickets: its part of its tenant's share of the pool."""
        groups: dict[Place, list[int]] = {}
        for row in self._rows:
            if row in self._type_of:
                groups.setdefault((self._tenant[row], self._type_of[row]), []).append(row)
        found: dict[int, Lodger] = {}
        for place, rows in groups.items():
            gangs = [self._gang[row] for row in rows]
            tickets = divided(shares[place], gangs, self._rules.division)
            for row, gang, each in zip(rows, gangs, tickets, strict=True):
                found[row] = Lodger(row, gang, min(each, gang))
        return found

    def _lodge(self, lodgers: Mapping[int, Lodger], settling: Iterable[int]) -> None:
        """Nodes for jobs without a home: with free GPUs if there are any, else of lowest load."""
        homes = self._homes
        for row, site in homes.of.items():
            homes.settle(lodgers[row], site)
        free = self._snapshot.placement.free()
        for row in settling:
            if row not in lodgers:
                continue
            gang, gpu_type = lodgers[row].gang, self._type_of[row]
            place = homes.free_place(gang, gpu_type, free) or homes.lowest(gang, gpu_type)
            if place is not None:
                homes.settle(lodgers[row], place)
                for node, gpus in place:
                    free[node] -= gpus

    def _accounts(self, shares: Mapping[Place, float], lodgers: Mapping[int, Lodger]) -> TenantAccounts:
        """Accounts up to now; lags are worked out only at the end of a quantum."""
        columns, now, accounts = self._snapshot.columns, self._now, self._memory.accounts
        if accounts is None:
            attained = MappingProxyType({row: seconds_run(columns, row, now) for row in self._rows})
            accounts = TenantAccounts(now, now, attained, len(columns.ids))
        accounts = credited(accounts, now, shares)
        if not self._is_due:
            return accounts
        # Types of jobs that were there in the quantum too, be they gone by now: their time counts for their tenants.
        topology = self._snapshot.placement.topology
        types = {row: topology.type_of[site[0].node] for row, site in self._memory.homes.items()} | self._type_of
        tickets = {row: lodger.tickets for row, lodger in lodgers.items()}
        return settled(accounts, now, columns, types=types, tickets=tickets, quantum=self._rules.quantum)

    def _rehome(self, lodgers: Mapping[int, Lodger], accounts: TenantAccounts) -> None:
        """Move waiting jobs from loaded nodes to less loaded ones while that pays, the furthest behind first."""
        homes = self._homes
        small = [row for row in self._waiting if row in homes.of and len(homes.of[row]) == 1 and self._may_move(row)]
        for row in sorted(small, key=lambda row: (-accounts.behind.get(row, 0.0), row)):
            site = homes.better(lodgers[row], cost=self._rules.cost, rest=self._rules.rest)
            if site is not None:
                homes.leave(lodgers[row])
                homes.settle(lodgers[row], site)
                self._moved[row] = self._now

    def _contenders(self, lodgers: Mapping[int, Lodger], accounts: TenantAccounts) -> dict[int, list[Contender]]:
        """Jobs that compete for GPUs, by pool: not pinned ones, and inside a quantum only those that wait.

        The lag that orders them is the job's own plus its tenant's, which counts for more and is spread over all that the
        tenant asks for in the pool.
        """
        pools: dict[int, list[Contender]] = {}
        asked: dict[Place, float] = {}
        for row, lodger in lodgers.items():
            place = (self._tenant[row], self._type_of[row])
            asked[place] = asked.get(place, 0.0) + lodger.gang
        per_gpu = STIFFNESS / self._rules.quantum
        for row, lodger in lodgers.items():
            runs = row in self._holdings
            if runs and (row in self._pinned or not self._is_due):
                continue
            place = (self._tenant[row], self._type_of[row])
            lag = accounts.behind.get(row, 0.0) + per_gpu * accounts.lags.get(place, 0.0) / asked[place]
            since = -inf if runs else self._snapshot.columns.waiting_since[row]
            home, may_move = self._homes.of.get(row), self._may_move(row)
            each = Contender(row, place[0], lodger.gang, lodger.tickets, lag, home, since, may_move)
            pools.setdefault(place[1], []).append(each)
        return pools

    def _contended(self) -> set[int]:
        """Types for which a job waits."""
        return {self._type_of[row] for row in self._waiting if row in self._type_of}

    def _decided(
        self, pools: Mapping[int, list[Contender]], accounts: TenantAccounts, shares: Mapping[Place, float]
    ) -> dict[int, Quantum]:
        """Who runs where in the pools in which jobs wait; then idle GPUs of any pool for those that still wait."""
        contended, masks = self._contended(), self._snapshot.placement.masks
        kept: dict[Place, int] = {}  # GPUs that pinned jobs hold: their tenants have so much less to spend on others
        for row in self._snapshot.kept():
            place = (self._tenant[row], self._type_of[row])
            kept[place] = kept.get(place, 0) + self._gang[row]
        quanta: dict[int, Quantum] = {}
        for gpu_type in range(len(self._jobs.live)):
            share = {tenant: each for (tenant, kind), each in shares.items() if kind == gpu_type}
            lags = ((tenant, accounts.lags.get((tenant, gpu_type), 0.0)) for tenant in share)
            budgets = {
                tenant: share[tenant] + lag / self._rules.quantum - kept.get((tenant, gpu_type), 0) for tenant, lag in lags
            }
            sizes = {node: int(self._homes.size[node]) for node in self._homes.nodes(gpu_type)}
            if self._is_due and gpu_type in contended:
                quantum = decide(sizes, pools.get(gpu_type, ()), shares=share, budgets=budgets)
            else:
                free = {node: masks[node].bit_count() for node in sizes}
                quantum = Quantum(sizes, free, shares=share, budgets=budgets)
                quantum.fill(each for each in pools.get(gpu_type, ()) if each.row not in self._holdings)
            quanta[gpu_type] = quantum
        if len(quanta) > 1:
            # Jobs that wait in one pool take idle GPUs of another, of the fastest type first.
            waiting = [each for here, pool in pools.items() for each in pool if each.row not in quanta[here].chosen]
            for each in sorted(waiting, key=lambda each: each.order):
                speeds = self._speeds(each.row)
                for gpu_type in sorted(self._able(each.row), key=lambda able: (-speeds[able], able)):
                    if each.may_move and quanta[gpu_type].move(each):
                        break
        return quanta

    def _written(self, quanta: Mapping[int, Quantum], accounts: TenantAccounts) -> tuple[Plan, SlicingMemory]:
        """What changes, as claims and stops. Running jobs are stopped only at the end of a quantum, in contended pools."""
        chosen = {row: site for quantum in quanta.values() for row, site in quantum.chosen.items()}
        claims, homes = [], self._homes.of
        for row, site in chosen.items():
            if row not in self._holdings or site != site_of(self._holdings[row]):
                claims.append(Claim(row, site=site))
            if homes.get(row, site) != site:
                self._moved[row] = self._now
            homes[row] = site
        memory, ends, told, stops = self._memory, self._memory.ends, self._memory.told, list[int]()
        if self._is_due:
            ends = next_round_end(self._snapshot.origin, self._now, self._rules.quantum)
            told, contended = self._entitled, self._contended()
            rows = (row for row in sorted(self._holdings) if row not in chosen and row not in self._pinned)
            stops = [row for row in rows if self._type_of[row] in contended]
        plan = Plan(
            tuple(claims),
            Unfitting.SKIPPED,
            PreemptionRule.NEVER,
            wake=ends,
            stops=tuple(stops),
            stopping=StopMode.FOR_OTHERS,
            notes=notes(memory.told, told, self._names, self._snapshot.placement.topology.types),
        )
        frozen = MappingProxyType(homes), MappingProxyType(self._moved)
        return plan, SlicingMemory(ends, accounts, *frozen, self._seen, told)
