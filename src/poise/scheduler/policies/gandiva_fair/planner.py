"""Gandiva_fair (Chaudhary et al., EuroSys'20): fair GPU time for tenants, gangs whole, and trade between GPU types.

    tickets        t_u of tenant u, water-filled over demand into GPUs of each type, divided over its jobs (`tickets.py`)
    trade          tenants exchange fast GPUs for slow ones at a second price, by speed-ups seen in their own jobs
                   (`entitling.py`, `trading.py`)
    homes          each job lives on one node, or a few if its gang spans them, by ticket load; few moves (`balancing.py`)
    split stride   every quantum each pool of GPUs of one type decides who runs, whole gangs at home, the furthest behind
                   first within the budgets of their tenants (`split_stride.py`, `accounts.py`); where that leaves tenants
                   uneven or GPUs idle, the gangs that do so least (`choosing.py`)

While nobody waits there are no quanta: a job that fits goes to the tightest free place, and may move to a faster type that
stands idle (`upgrading.py`). Inside a quantum free GPUs go to those who wait and nobody is stopped. A quantum costs
O(J log J) for J jobs (`slicing.py`), and more where gangs are chosen.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from types import MappingProxyType
from typing import Any

from poise.scheduler.model.cluster import Site, site_of
from poise.scheduler.model.job_table import Snapshot
from poise.scheduler.model.plan import Claim, Plan, PreemptionRule, StopMode, Unfitting
from poise.scheduler.model.units import next_round_end
from poise.scheduler.policies.gandiva_fair.accounts import (
    Place,
    TenantAccounts,
    credited,
    opened,
    seconds_run,
    settled,
)
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
    Family,
    Listing,
    Parameter,
    PolicyClaim,
    Traits,
    choice,
    equal_or_per_tenant,
    number,
    positive,
)
from poise.scheduler.policies.placement_draft import PlacementDraft
from poise.scheduler.policies.promises import AmongTenants, Promise
from poise.scheduler.policies.upgrades import Seen, upgrades

# One decision of Gandiva_fair in the making: entitlements, homes, accounts, and who runs in each pool.
#
# The order of things: who is entitled to what · which type each job lives on · what that gives each tenant of each type and
# each of its jobs in GPUs (its tickets) · nodes for those without a home · lags · at the end of a quantum other homes where
# that pays, and split stride; inside a quantum free GPUs for those who wait.

STIFFNESS = 10.0
"""How much more the lag of a tenant counts than that of one of its jobs."""


@dataclass(frozen=True, slots=True)
class SlicingRules:
    """The parameters: tickets of tenants (1 if not named) for each 1 of their weights, seconds of a quantum, and so on.

    rest   seconds between two moves of a job;  cost: seconds of its running time that a move is taken to cost
    """

    tickets: tuple[tuple[str, float], ...]
    quantum: float
    division: TicketDivision
    trade: Trading
    profile: Profiling
    rest: float
    cost: float


@dataclass(frozen=True, slots=True)
class SlicingMemory:
    """What the policy remembers.

    ends      when the quantum ends;  accounts: who is behind, None while nobody waits
    homes     where jobs lived at the last plan;  moved: when they were last given another home
    seen      which kinds of jobs have run on which GPU types;  told: what the journal says of entitlements
    """

    ends: float = -inf
    accounts: TenantAccounts | None = None
    homes: Mapping[int, Site] = field(default_factory=lambda: MappingProxyType({}))
    moved: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    seen: Seen = frozenset()
    told: Entitlements = NOBODY_ENTITLED


class Slicing:
    """Everything that one decision looks at. Rows are those of active jobs, ascending."""

    def __init__(self, rules: SlicingRules, snapshot: Snapshot, memory: SlicingMemory) -> None:
        self._rules = rules
        self._snapshot = snapshot
        self._memory = memory
        self._now = snapshot.now
        columns = snapshot.columns
        self._gang = columns.gang
        self._tenant = columns.tenant
        self._holdings = snapshot.placement.holdings
        self._rows = snapshot.rows.tolist()
        self._waiting = [row for row in self._rows if row not in self._holdings]
        self._is_due = self._now >= memory.ends  # otherwise the quantum goes on
        self._moved = {row: memory.moved[row] for row in self._rows if row in memory.moved}
        topology = snapshot.placement.topology
        self._pinned = snapshot.pinned
        sizes = self._usable()
        self._homes = Homes(sizes, topology.type_of, topology.rack_of)
        self._shared = self._live(sizes)
        self._type_of: dict[int, int] = {}
        self._seen = with_running(snapshot, memory.seen)
        kept = map(topology.mix, snapshot.kept().values())
        self._crowd = TenantJobs.of(snapshot, [sum(gpus) for gpus in zip(self._shared, *kept, strict=True)])

    def _usable(self) -> list[int]:
        """GPUs of each node that can be shared: not those of lost nodes, nor those set aside or held by pinned jobs."""
        sizes = self._snapshot.placement.free()
        for row, holding in self._holdings.items():
            for node, mask in holding if row not in self._pinned else ():
                sizes[node] += mask.bit_count()
        return sizes

    def _live(self, sizes: list[int]) -> list[int]:
        topology = self._snapshot.placement.topology
        live = [0] * len(topology.types)
        for gpu_type, size in zip(topology.type_of, sizes, strict=True):
            live[gpu_type] += size
        return live

    @cached_property
    def _names(self) -> dict[int, str]:
        tenants = self._snapshot.columns.tenants
        return {self._tenant[row]: tenants[row] for row in self._rows}

    @cached_property
    def _entitled(self) -> Entitlements:
        stated, weights = dict(self._rules.tickets), self._snapshot.columns.tenant_weights
        tickets = {tenant: stated.get(name, 1.0) * weights[tenant] for tenant, name in self._names.items()}
        seen = self._seen if self._rules.profile is Profiling.RUNNING else None
        return entitle(self._crowd, tickets, self._rules.trade, seen)

    def plan(self) -> tuple[Plan, SlicingMemory]:
        """The plan for this moment, and what to remember."""
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
        """A type for every job; returns the jobs that need a node. Who runs lives where it runs."""
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
        asked = self._asked()
        for row in settling:
            self._assign(row, asked)
        return [*settling, *self._retype(asked)] if self._is_due else settling

    def _asked(self) -> dict[int, list[float]]:
        """GPUs that each tenant's jobs ask for, by type on which they live."""
        asked = {tenant: [0.0] * len(self._crowd.live) for tenant in self._names}
        for row, gpu_type in self._type_of.items():
            asked[self._tenant[row]][gpu_type] += self._gang[row]
        return asked

    def _able(self, row: int) -> list[int]:
        """Types on which a job can run, if only all made way who can."""
        speeds = self._crowd.speeds[self._snapshot.columns.kind[row]]
        return [each for each, speed in enumerate(speeds) if speed > 0 and self._gang[row] <= self._shared[each]]

    def _assign(self, row: int, asked: dict[int, list[float]]) -> None:
        tenant, gang = self._tenant[row], self._gang[row]
        speeds = self._crowd.speeds[self._snapshot.columns.kind[row]]
        chosen = type_for(gang, self._able(row), self._entitled.gpus[tenant], asked[tenant], speeds)
        if chosen is not None:
            self._type_of[row] = chosen
            asked[tenant][chosen] += gang

    def _retype(self, asked: dict[int, list[float]]) -> list[int]:
        """Waiting jobs of tenants that ask for too much of a type get another type; returns those."""
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
            for tenant, share in water_filled(asked, entitled, self._crowd.live[gpu_type]).items():
                shares[tenant, gpu_type] = share
        return shares

    def _lodgers(self, shares: Mapping[Place, float]) -> dict[int, Lodger]:
        """Every job with a type, and its tickets."""
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
        """Nodes for those without: with free GPUs if there are any, else of lowest load."""
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
        columns, now = self._snapshot.columns, self._now
        accounts = self._memory.accounts
        if accounts is None:
            accounts = opened(now, {row: seconds_run(columns, row, now) for row in self._rows}, len(columns.ids))
        accounts = credited(accounts, now, shares)
        if not self._is_due:
            return accounts
        topology = self._snapshot.placement.topology
        types = {row: topology.type_of[site[0].node] for row, site in self._memory.homes.items()} | self._type_of
        tickets = {row: lodger.tickets for row, lodger in lodgers.items()}
        return settled(accounts, now, columns, types=types, tickets=tickets, quantum=self._rules.quantum)

    def _rehome(self, lodgers: Mapping[int, Lodger], accounts: TenantAccounts) -> None:
        """Waiting jobs on loaded nodes move to less loaded ones while that pays, the furthest behind first."""
        homes = self._homes
        small = [row for row in self._waiting if row in homes.of and len(homes.of[row]) == 1 and self._may_move(row)]
        for row in sorted(small, key=lambda row: (-accounts.behind.get(row, 0.0), row)):
            site = homes.better(lodgers[row], cost=self._rules.cost, rest=self._rules.rest)
            if site is not None:
                homes.leave(lodgers[row])
                homes.settle(lodgers[row], site)
                self._moved[row] = self._now

    def _contenders(self, lodgers: Mapping[int, Lodger], accounts: TenantAccounts) -> dict[int, list[Contender]]:
        """By pool, without those who go on whoever waits; inside a quantum only those who wait."""
        pools: dict[int, list[Contender]] = {}
        waiting_since = self._snapshot.columns.waiting_since
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
            home = self._homes.of.get(row)
            since = -inf if runs else waiting_since[row]
            each = Contender(row, place[0], lodger.gang, lodger.tickets, lag, home, since, self._may_move(row))
            pools.setdefault(place[1], []).append(each)
        return pools

    def _decided(
        self, pools: Mapping[int, list[Contender]], accounts: TenantAccounts, shares: Mapping[Place, float]
    ) -> dict[int, Quantum]:
        """Who runs where in the pools in which somebody waits; then idle GPUs of any pool for those who still wait."""
        contended = {self._type_of[row] for row in self._waiting if row in self._type_of}
        quanta: dict[int, Quantum] = {}
        for gpu_type in range(len(self._crowd.live)):
            share = {tenant: each for (tenant, kind), each in shares.items() if kind == gpu_type}
            lags = ((tenant, accounts.lags.get((tenant, gpu_type), 0.0)) for tenant in share)
            kept = self._kept(gpu_type)
            budgets = {tenant: share[tenant] + lag / self._rules.quantum - kept.get(tenant, 0) for tenant, lag in lags}
            sizes = self._whole_room(gpu_type)
            if self._is_due and gpu_type in contended:
                quantum = decide(sizes, pools.get(gpu_type, ()), shares=share, budgets=budgets)
            else:
                quantum = Quantum(sizes, self._free_room(gpu_type), shares=share, budgets=budgets)
                quantum.fill(each for each in pools.get(gpu_type, ()) if each.row not in self._holdings)
            quanta[gpu_type] = quantum
        if len(quanta) > 1:
            self._over_pools(pools, quanta)
        return quanta

    def _kept(self, gpu_type: int) -> dict[int, int]:
        """GPUs of a pool that pinned jobs hold, by tenant, who have so much less to spend on others."""
        kept: dict[int, int] = {}
        for row in self._snapshot.kept():
            if self._type_of[row] == gpu_type:
                kept[self._tenant[row]] = kept.get(self._tenant[row], 0) + self._gang[row]
        return kept

    def _whole_room(self, gpu_type: int) -> dict[int, int]:
        """All GPUs of a pool that can be given to others."""
        size = self._homes.size
        return {node: int(size[node]) for node in self._homes.nodes(gpu_type)}

    def _free_room(self, gpu_type: int) -> dict[int, int]:
        """The free GPUs of a pool."""
        masks = self._snapshot.placement.masks
        return {node: masks[node].bit_count() for node in self._homes.nodes(gpu_type)}

    def _over_pools(self, pools: Mapping[int, list[Contender]], quanta: Mapping[int, Quantum]) -> None:
        """Jobs that wait in one pool take idle GPUs of another, of the fastest type first."""
        waiting = [each for here, pool in pools.items() for each in pool if each.row not in quanta[here].chosen]
        for each in sorted(waiting, key=lambda each: each.order):
            speeds = self._crowd.speeds[self._snapshot.columns.kind[each.row]]
            for gpu_type in sorted(self._able(each.row), key=lambda able: (-speeds[able], able)):
                if each.may_move and quanta[gpu_type].move(each):
                    break

    def _written(self, quanta: Mapping[int, Quantum], accounts: TenantAccounts) -> tuple[Plan, SlicingMemory]:
        """What changes, as claims and stops."""
        chosen = {row: site for quantum in quanta.values() for row, site in quantum.chosen.items()}
        claims = []
        homes = self._homes.of
        for row, site in chosen.items():
            if row not in self._holdings or site != site_of(self._holdings[row]):
                claims.append(Claim(row, site=site))
            if homes.get(row, site) != site:
                self._moved[row] = self._now
            homes[row] = site
        memory, rules = self._memory, self._rules
        ends = next_round_end(self._snapshot.origin, self._now, rules.quantum) if self._is_due else memory.ends
        told = self._entitled if self._is_due else memory.told
        plan = Plan(
            tuple(claims),
            Unfitting.SKIPPED,
            PreemptionRule.NEVER,
            wake=ends,
            stops=self._stopped(chosen),
            stopping=StopMode.FOR_OTHERS,
            notes=notes(memory.told, told, self._names, self._snapshot.placement.topology.types),
        )
        frozen = MappingProxyType(homes), MappingProxyType(self._moved)
        return plan, SlicingMemory(ends, accounts, *frozen, self._seen, told)

    def _stopped(self, chosen: Mapping[int, Site]) -> tuple[int, ...]:
        """Running jobs that have had their turn: only in pools in which somebody waits."""
        if not self._is_due:
            return ()
        contended = {self._type_of[row] for row in self._waiting if row in self._type_of}
        rows = (row for row in sorted(self._holdings) if row not in chosen and row not in self._pinned)
        return tuple(row for row in rows if self._type_of[row] in contended)


def gandiva_fair(
    tickets: tuple[tuple[str, float], ...] = (),
    quantum: float = 60.0,
    division: TicketDivision = TicketDivision.GANG,
    trade: Trading = Trading.ON,
    profile: Profiling = Profiling.RUNNING,
    rest: float = 300.0,
    cost: float = 60.0,
) -> "GandivaFair":
    """The policy with these parameters; `SlicingRules` says what they mean."""
    return GandivaFair(SlicingRules(tickets, quantum, division, trade, profile, rest, cost))


def _by_tickets(tickets: tuple[tuple[str, float], ...] = (), **_parameters: Any) -> Promise:  # noqa: ANN401
    return AmongTenants(named=dict(tickets))


LISTING = Listing(
    "gandiva-fair",
    Family.MARKET,
    "tenants' tickets into GPU time: split stride, load balance, trade of fast GPUs for slow ones",
    "Chaudhary et al., Gandiva_fair, EuroSys'20",
    (PolicyClaim.NO_DURATIONS, PolicyClaim.NO_INFLATION),
    gandiva_fair,
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
    promise=_by_tickets,
    traits=Traits(
        optimises="GPU time of tenants in proportion to tickets",
        fairness="between tenants, over any hour; jobs of a tenant alike",
        heterogeneity="tickets of every type; fast traded for slow at a second price",
        gang="gang-aware stride, large gangs by the centre, bounded lag",
        elasticity="none; time slices and migration",
        verified="the published tables and trades; every hour within 3 % of the tickets' share of the GPU time used "
        "with gangs of 1 to 16, and mostly of all GPU time; two of four tenants gain about 30 % by trade and "
        "nobody loses",
    ),
)


@dataclass(frozen=True, slots=True)
class GandivaFair:
    """Time slices in proportion to tenants' tickets, by type of GPU as traded."""

    rules: SlicingRules

    def start(self) -> SlicingMemory:
        """Nobody has run."""
        return SlicingMemory()

    def plan(self, snapshot: Snapshot, memory: SlicingMemory) -> tuple[Plan, SlicingMemory]:
        """Nothing while nobody waits; free places at once; time slices where there are not enough."""
        if not snapshot.is_contended:
            return self._calm(snapshot, memory)
        if memory.accounts is None and len(snapshot.idle) == 1:
            claims = _at_once(snapshot)
            if claims is not None:
                return Plan.changing(claims), memory
        return Slicing(self.rules, snapshot, memory).plan()

    def _calm(self, snapshot: Snapshot, memory: SlicingMemory) -> tuple[Plan, SlicingMemory]:
        """Nobody waits: nobody is behind. Where there are several types, jobs may get onto faster ones that stand idle."""
        if memory.accounts is not None:
            memory = SlicingMemory(moved=memory.moved, seen=memory.seen, told=memory.told)
        if len(snapshot.idle) == 1 or not any(snapshot.idle):
            return Plan.changing(), memory
        seen = with_running(snapshot, memory.seen)
        known = seen if self.rules.profile is Profiling.RUNNING else None
        rules = self.rules
        claims, later = upgrades(snapshot, rest=rules.rest, cost=rules.cost, seen=known, moved=memory.moved)
        moved = {row: moment for row, moment in memory.moved.items() if row in snapshot.placement.holdings}
        moved |= {claim.row: snapshot.now for claim in claims}
        return Plan.changing(claims, wake=later), replace(memory, seen=seen, moved=MappingProxyType(moved))


def _at_once(snapshot: Snapshot) -> tuple[Claim, ...] | None:
    """Everybody who waits on the tightest free node, or nodes if none could ever hold the gang; None if they do not fit."""
    waiting = snapshot.rows[~snapshot.running].tolist()
    if sum(snapshot.columns.gang[row] for row in waiting) > snapshot.idle[0]:
        return None
    sketch = PlacementDraft(snapshot.placement)
    largest = sketch.topology.largest_node(0)
    claims = []
    for row in waiting:
        gang = snapshot.columns.gang[row]
        site = sketch.tightest(0, gang)
        if site is None or (len(site) > 1 and gang <= largest):
            return None
        sketch.take(site)
        claims.append(Claim(row, site=site))
    return tuple(claims)
