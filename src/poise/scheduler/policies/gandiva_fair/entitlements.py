"""What each tenant is entitled to by GPU type: tickets, water-filled over demand, then traded at profiled speed-ups.

Profiling is transparent: how much faster a tenant's jobs are on a fast type counts once a job of that kind has run on both
types, as all jobs do anyway (`running`); or whatever is believed counts from the start (`known`).

Three parts: tickets into GPUs (`water_filled`, `entitlements`, `divided`), trade (`trade`, `trade_all`), and both together
for the active jobs (`entitle`), with what the journal says of it (`notes`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from math import isfinite, nan
from typing import TypeVar

from poise.scheduler.model.action import Entitled, Note, Traded
from poise.scheduler.model.job_table import Snapshot
from poise.scheduler.model.speed import Locality
from poise.scheduler.policies.upgrades import Seen

Tenant = TypeVar("Tenant")

LEAST = 1e-9
"""GPUs below which nothing is left."""


class TicketDivision(StrEnum):
    """How a tenant's tickets are divided over its jobs: in proportion to their gangs, or equally."""

    GANG = "gang"
    EQUAL = "equal"


def water_filled(demand: Mapping[Tenant, float], tickets: Mapping[Tenant, float], gpus: float) -> dict[Tenant, float]:
    """GPUs of each tenant in the long run: in proportion to tickets, but no tenant gets more than it asks for (§3.1).

        share_u = min(d_u, t_u / Σ t_active · what is left)        repeated to a fixed point: unused share goes to others

    8 GPUs, equal tickets, demands 4, 4 and 2: shares 3, 3 and 2. Σ shares = min(gpus, Σ demand). Tenants without tickets
    share what those with tickets leave, equally.
    """
    shares = dict.fromkeys(demand, 0.0)
    paying = {tenant: weight for tenant in demand if (weight := tickets.get(tenant, 0.0)) > 0}
    for weights in (paying, {tenant: 1.0 for tenant in demand if tenant not in paying}):
        if weights is not paying and gpus <= LEAST:
            break
        total = sum(weights.values())
        for tenant in sorted(weights, key=lambda tenant: demand[tenant] / weights[tenant]):  # who is full first, first
            shares[tenant] = min(demand[tenant], gpus * weights[tenant] / total)
            gpus -= shares[tenant]
            total -= weights[tenant]
    return shares


def entitlements(
    demand: Mapping[Tenant, Sequence[float]],
    tickets: Mapping[Tenant, float],
    gpus: Sequence[float],
    fastest_first: Sequence[int],
) -> dict[Tenant, list[float]]:
    """GPUs of each type that each tenant is entitled to before any trade, in the cluster's order of types.

    demand   GPUs of the jobs that can run on each type; the last entry: of all the tenant's jobs
    A tenant's part of every type is that of its tickets. One that asks for less than all its parts is taken to mean the
    fastest types; what it leaves goes to the others.
    """
    given = {tenant: [0.0] * len(gpus) for tenant in demand}
    left = {tenant: each[-1] for tenant, each in demand.items()}
    for gpu_type in fastest_first:
        wanted = {tenant: min(left[tenant], demand[tenant][gpu_type]) for tenant in demand}
        for tenant, share in water_filled(wanted, tickets, gpus[gpu_type]).items():
            given[tenant][gpu_type] = share
            left[tenant] -= share
    return given


def divided(tickets: float, gangs: Sequence[int], division: TicketDivision) -> list[float]:
    """The tickets of each of a tenant's jobs: t_u · g_j / Σ g, or t_u / number of jobs."""
    if division is TicketDivision.EQUAL:
        return [tickets / len(gangs)] * len(gangs)
    total = sum(gangs)
    return [tickets * gang / total for gang in gangs]


@dataclass(frozen=True, slots=True)
class Trade:
    """`gpus` fast GPUs of the seller for the buyer, at a price in slow GPUs each. Types are indices."""

    buyer: int
    seller: int
    fast: int
    slow: int
    gpus: float
    price: float


def both_gain(price: float, buyer: float, seller: float) -> bool:
    """Whether a fast GPU for `price` slow ones leaves both better off, given their speed-ups."""
    return seller < price < buyer


def trade(
    holdings: Mapping[int, Sequence[float]], speedup: Mapping[int, float], *, slow: int, fast: int
) -> tuple[dict[int, tuple[float, ...]], list[Trade]]:
    """Trade fast GPUs for slow ones at a second price (§3.4): holdings by type afterwards, and the trades in order.

    Tenant u holds slow_u and fast_u GPUs and runs s_u = `speedup` times as fast on a fast one; tenants whose speed-up is
    not known do not trade.

        b = argmax s among tenants that hold slow;  q = argmin s among those that hold fast;  stop if b = q or s_b <= s_q
        p = the next speed-up below that of b                         Vickrey's price, in slow GPUs for a fast one
        a = min(slow_b / p, fast_q);   b gets a fast GPUs of q for a·p slow ones;   repeat

    Since s_q <= p <= s_b, no tenant's slow + s·fast falls, and totals by type stay as they are. A buyer's price depends on
    what others report and never on its own report, except that to report more may make it buy before others, at a higher
    price. Each trade empties one tenant's hands: at most 2n trades for n tenants. Of buyers with equal speed-ups the first
    in `holdings` comes first.
    """
    held = {tenant: list(gpus) for tenant, gpus in holdings.items()}
    known = [tenant for tenant in held if isfinite(speedup.get(tenant, nan)) and speedup[tenant] > 0]
    dearest = sorted(known, key=lambda tenant: -speedup[tenant])
    price = {buyer: speedup[below] for buyer, below in pairwise(dearest)}
    trades: list[Trade] = []
    while True:
        buyer = next((tenant for tenant in dearest if held[tenant][slow] > 0), None)
        seller = next((tenant for tenant in reversed(dearest) if held[tenant][fast] > 0), None)
        if buyer is None or seller is None or buyer == seller or speedup[buyer] <= speedup[seller]:
            return {tenant: tuple(gpus) for tenant, gpus in held.items()}, trades
        mine, theirs = held[buyer], held[seller]
        # Hands that a trade empties are exactly empty afterwards: otherwise crumbs would be traded for ever.
        affordable = mine[slow] / price[buyer]
        if affordable <= theirs[fast]:
            gpus, paid = affordable, mine[slow]
            mine[slow], theirs[fast] = 0.0, theirs[fast] - gpus
        else:
            gpus = theirs[fast]
            paid = gpus * price[buyer]
            mine[slow], theirs[fast] = mine[slow] - paid, 0.0
        mine[fast] += gpus
        theirs[slow] += paid
        trades.append(Trade(buyer, seller, fast, slow, gpus, price[buyer]))


def trade_all(
    holdings: Mapping[int, Sequence[float]],
    speedups: Mapping[tuple[int, int], Mapping[int, float]],
    slowest_first: Sequence[int],
) -> tuple[dict[int, tuple[float, ...]], list[Trade]]:
    """Trade between all pairs of types, slow ones ascending and fast ones descending.

    speedups   fast ÷ slow, by (slow, fast) and tenant
    """
    held = {tenant: tuple(gpus) for tenant, gpus in holdings.items()}
    trades: list[Trade] = []
    for place, slow in enumerate(slowest_first):
        for fast in reversed(slowest_first[place + 1 :]):
            held, more = trade(held, speedups.get((slow, fast), {}), slow=slow, fast=fast)
            trades += more
    return held, trades


NOTICEABLE = 1e-6
"""GPUs by which an entitlement must change to be worth a note."""


class Profiling(StrEnum):
    """Which speeds count for trades: those of types that the tenant's jobs have run on, or all that are believed."""

    RUNNING = "running"
    KNOWN = "known"


class Trading(StrEnum):
    """Whether tenants trade."""

    ON = "on"
    OFF = "off"


def with_running(snapshot: Snapshot, seen: Seen) -> Seen:
    """What has run where by now. Not kept where there is only one type."""
    topology, columns = snapshot.placement.topology, snapshot.columns
    if len(topology.types) == 1:
        return seen
    now = {
        (columns.tenant[row], columns.kind[row], topology.type_of[holding[0].node])
        for row, holding in snapshot.placement.holdings.items()
        if columns.started[row] < snapshot.now
    }
    return seen if now <= seen else seen | now


class TenantJobs:
    """The active jobs by tenant and kind.

    jobs, gpus   how many, and how many GPUs they ask for, by (tenant, kind)
    speeds       steps per second, packed, by kind and type; 0 where a kind cannot run
    live         GPUs that are there, by type
    """

    def __init__(self, snapshot: Snapshot, live: Sequence[int]) -> None:
        columns, self.live = snapshot.columns, live
        self.jobs: dict[tuple[int, int], int] = {}
        self.gpus: dict[tuple[int, int], int] = {}
        self.speeds: dict[int, Sequence[float]] = {}
        for row in snapshot.active:
            kind = columns.kind[row]
            key = (columns.tenant[row], kind)
            self.jobs[key] = self.jobs.get(key, 0) + 1
            self.gpus[key] = self.gpus.get(key, 0) + columns.gang[row]
            if kind not in self.speeds:
                self.speeds[kind] = [rates[Locality.PACKED] for rates in snapshot.estimate(row).rates]

    @cached_property
    def demand(self) -> dict[int, list[float]]:
        """GPUs that each tenant asks for and could use, by type; and in all, last. By ascending tenant."""
        found: dict[int, list[float]] = {}
        for (tenant, kind), gpus in sorted(self.gpus.items()):
            wanted = found.setdefault(tenant, [0.0] * (len(self.live) + 1))
            wanted[-1] += gpus
            for gpu_type, speed in enumerate(self.speeds[kind]):
                if speed > 0:
                    wanted[gpu_type] += gpus
        return found

    @cached_property
    def slowest_first(self) -> list[int]:
        """GPU types by how fast the jobs are on them, as a part of their best speed, on average."""
        speed = [0.0] * len(self.live)
        for (_, kind), jobs in sorted(self.jobs.items()):
            best = max(self.speeds[kind])
            for gpu_type, each in enumerate(self.speeds[kind]):
                speed[gpu_type] += jobs * each / best
        return sorted(range(len(speed)), key=lambda gpu_type: (speed[gpu_type], -gpu_type))

    def speedups(self, slow: int, fast: int, seen: Seen | None) -> dict[int, float]:
        """Mean speed-up of each tenant's jobs that are known on both types; `seen` None: all are."""
        total: dict[int, float] = {}
        count: dict[int, int] = {}
        for (tenant, kind), jobs in sorted(self.jobs.items()):
            speeds = self.speeds[kind]
            known = seen is None or ((tenant, kind, slow) in seen and (tenant, kind, fast) in seen)
            if known and speeds[slow] > 0 and speeds[fast] > 0:
                total[tenant] = total.get(tenant, 0.0) + jobs * speeds[fast] / speeds[slow]
                count[tenant] = count.get(tenant, 0) + jobs
        return {tenant: total[tenant] / count[tenant] for tenant in total}


@dataclass(frozen=True, slots=True)
class Entitlements:
    """GPUs by tenant and type after trades, and the trades."""

    gpus: Mapping[int, Sequence[float]]
    trades: tuple[Trade, ...] = ()


NOBODY_ENTITLED = Entitlements({})


def entitle(jobs: TenantJobs, tickets: Mapping[int, float], trading: Trading, seen: Seen | None) -> Entitlements:
    """GPUs of every type that each tenant is entitled to in the long run, after trades."""
    order = jobs.slowest_first
    before = entitlements(jobs.demand, tickets, jobs.live, order[::-1])
    if trading is Trading.OFF or len(order) == 1:
        return Entitlements(before)
    pairs = {(slow, fast) for place, slow in enumerate(order) for fast in order[place + 1 :]}
    held, trades = trade_all(before, {pair: jobs.speedups(*pair, seen) for pair in sorted(pairs)}, order)
    return Entitlements(held, tuple(trades))


def notes(before: Entitlements, after: Entitlements, names: Mapping[int, str], types: Sequence[str]) -> tuple[Note, ...]:
    """What people should know: nothing if nothing changed, else all trades in force and the entitlements that changed."""
    changed = [tenant for tenant, gpus in after.gpus.items() if not _same(before.gpus.get(tenant, ()), gpus)]
    is_same = len(before.trades) == len(after.trades) and all(
        (one.buyer, one.seller, one.fast, one.slow) == (other.buyer, other.seller, other.fast, other.slow)
        and _same((one.gpus, one.price), (other.gpus, other.price))
        for one, other in zip(before.trades, after.trades, strict=True)
    )
    if is_same and not changed:
        return ()
    traded = (
        Traded(names[each.buyer], names[each.seller], types[each.fast], types[each.slow], each.gpus, each.price)
        for each in after.trades
    )
    return (*traded, *(Entitled(names[tenant], tuple(after.gpus[tenant])) for tenant in changed))


def _same(before: Sequence[float], after: Sequence[float]) -> bool:
    return len(before) == len(after) and all(abs(a - b) <= NOTICEABLE for a, b in zip(before, after, strict=True))
