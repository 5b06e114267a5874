"""Who holds what now: nodes, and tenants with what they are entitled to."""

from collections import Counter
from collections.abc import Mapping

from poise.server.situation import Books, Situation
from poise.wire.views import NodeRow, Nodes, Shares, TenantShare


def held_by_tenant(situation: Situation) -> Counter[str]:
    """GPUs that are held now, by tenant."""
    held: Counter[str] = Counter()
    for name in situation.running:
        record = situation.records[name]
        run = record.current
        held[record.job.tenant] += 0 if run is None else run.count
    return held


def share_of(held: Mapping[str, int], tenant: str) -> float | None:
    """A tenant's part of all GPUs that are held; None if none are."""
    total = sum(held.values())
    return held.get(tenant, 0) / total if total else None


def nodes(situation: Situation) -> Nodes:
    """All nodes and who holds them."""
    holders: dict[tuple[str, int], str] = {}
    for name in situation.running:
        run = situation.records[name].current
        for node, slots in ({} if run is None else run.gpus).items():
            holders.update(((node, slot), name) for slot in slots)
    alive = situation.scheduler.state.free.alive
    rows = []
    for index, each in enumerate(situation.header.cluster.nodes):
        jobs = tuple(holders.get((each.name, slot)) for slot in range(each.gpus))
        rows.append(
            NodeRow(
                name=each.name, gpu_type=each.gpu_type, gpus=each.gpus, free=jobs.count(None), rack=each.rack,
                alive=alive[index], jobs=jobs,
            )
        )  # fmt: skip
    return Nodes(nodes=tuple(rows))


def shares(situation: Situation, now: float) -> Shares:
    """All tenants that have, or had, jobs or a weight of their own."""
    running: Counter[str] = Counter()
    waiting: Counter[str] = Counter()
    unpaid: dict[str, float] = {}
    for record in situation.records.values():
        tenant, run = record.job.tenant, record.current
        if run is None:
            waiting[tenant] += record.finished is None
        else:
            running[tenant] += 1
            unpaid[tenant] = unpaid.get(tenant, 0.0) + run.count * (now - run.started)
    names = sorted({*situation.books, *running, *waiting})
    present = {name for name in names if running[name] or waiting[name]}
    active = sum(situation.weight_of(name) for name in present)
    held = held_by_tenant(situation)
    rows = []
    for name in names:
        weight, books = situation.weight_of(name), situation.books.get(name, Books())
        rows.append(
            TenantShare(
                tenant=name, weight=weight, entitled=weight / active if name in present else 0.0,
                held=share_of(held, name) or 0.0, gpus=held[name], running=running[name], waiting=waiting[name],
                gpu_seconds=books.gpu_seconds + unpaid.get(name, 0.0), preemptions=books.preemptions,
            )
        )  # fmt: skip
    return Shares(tenants=tuple(rows))
