"""What each tenant is entitled to by GPU type: tickets, water-filled over demand, then traded at profiled speed-ups.

Profiling is transparent: how much faster a tenant's jobs are on a fast type counts once a job of that kind has run on both
types, as all jobs do anyway (`running`); or whatever is believed counts from the start (`known`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from poise.model.action import Entitled, Note, Traded
from poise.model.columns import Snapshot
from poise.model.speed import Locality
from poise.policies.gandiva_fair.tickets import entitlements
from poise.policies.gandiva_fair.trading import Trade, trade_all
from poise.policies.upgrading import Seen

NOTICEABLE = 1e-6
"""GPUs; an entitlement that changes by less is the same."""


class Profiling(StrEnum):
    """Which speeds count for trades: those of types that the tenant's jobs have run on, or all that are believed."""

    RUNNING = "running"
    KNOWN = "known"


class Trading(StrEnum):
    """Whether tenants trade."""

    ON = "on"
    OFF = "off"


def with_running(snapshot: Snapshot, seen: Seen) -> Seen:
    """What has run where by now; of no use where there is one type only."""
    topology, columns = snapshot.floor.topology, snapshot.columns
    if len(topology.types) == 1:
        return seen
    now = {
        (columns.tenant[row], columns.kind[row], topology.type_of[holding[0].node])
        for row, holding in snapshot.floor.holdings.items()
        if columns.started[row] < snapshot.now
    }
    return seen if now <= seen else seen | now


@dataclass(frozen=True)
class Crowd:
    """The active jobs by tenant and kind.

    jobs, gpus   how many, and how many GPUs they ask for, by (tenant, kind)
    speeds       steps per second, packed, by kind and type; 0 where a kind cannot run
    live         GPUs that are there, by type
    """

    jobs: Mapping[tuple[int, int], int]
    gpus: Mapping[tuple[int, int], int]
    speeds: Mapping[int, Sequence[float]]
    live: Sequence[int]

    @staticmethod
    def of(snapshot: Snapshot, live: Sequence[int]) -> "Crowd":
        """Count them."""
        columns = snapshot.columns
        jobs: dict[tuple[int, int], int] = {}
        gpus: dict[tuple[int, int], int] = {}
        speeds: dict[int, Sequence[float]] = {}
        for row in snapshot.active:
            kind = columns.kind[row]
            key = (columns.tenant[row], kind)
            jobs[key] = jobs.get(key, 0) + 1
            gpus[key] = gpus.get(key, 0) + columns.gang[row]
            if kind not in speeds:
                speeds[kind] = [rates[Locality.PACKED] for rates in snapshot.estimate(row).rates]
        return Crowd(jobs, gpus, speeds, live)

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


def entitle(crowd: Crowd, tickets: Mapping[int, float], trading: Trading, seen: Seen | None) -> Entitlements:
    """Everybody's GPUs of every type in the long run."""
    order = crowd.slowest_first
    before = entitlements(crowd.demand, tickets, crowd.live, order[::-1])
    if trading is Trading.OFF or len(order) == 1:
        return Entitlements(before)
    pairs = {(slow, fast) for place, slow in enumerate(order) for fast in order[place + 1 :]}
    held, trades = trade_all(before, {pair: crowd.speedups(*pair, seen) for pair in sorted(pairs)}, order)
    return Entitlements(held, tuple(trades))


def notes(before: Entitlements, after: Entitlements, names: Mapping[int, str], types: Sequence[str]) -> tuple[Note, ...]:
    """What people should know: nothing if nothing changed, else all trades in force and the entitlements that changed."""
    changed = [tenant for tenant, gpus in after.gpus.items() if not _same(before.gpus.get(tenant, ()), gpus)]
    if not changed and _same_trades(before.trades, after.trades):
        return ()
    traded = (
        Traded(names[each.buyer], names[each.seller], types[each.fast], types[each.slow], each.gpus, each.price)
        for each in after.trades
    )
    return (*traded, *(Entitled(names[tenant], tuple(after.gpus[tenant])) for tenant in changed))


def _same_trades(before: Sequence[Trade], after: Sequence[Trade]) -> bool:
    return len(before) == len(after) and all(
        (one.buyer, one.seller, one.fast, one.slow) == (other.buyer, other.seller, other.fast, other.slow)
        and _same((one.gpus, one.price), (other.gpus, other.price))
        for one, other in zip(before, after, strict=True)
    )


def _same(before: Iterable[float], after: Iterable[float]) -> bool:
    one, other = tuple(before), tuple(after)
    return len(one) == len(other) and all(abs(a - b) <= NOTICEABLE for a, b in zip(one, other, strict=True))
