"""Who holds what now: nodes, and tenants with what they are entitled to."""

from collections import Counter

from poise.server.situation import Books, Situation
from poise.wire.views import NodeRow, Nodes, Shares, TenantShare

SHARING = "+"
"""Between the names of jobs that share a GPU."""


def nodes(situation: Situation) -> Nodes:
    """All nodes and who holds them."""
    holders: dict[tuple[str, int], list[str]] = {}
    for name in situation.running:
        run = situation.records[name].current
        for node, slots in ({} if run is None else run.gpus).items():
            for slot in slots:
                holders.setdefault((node, slot), []).append(name)
    alive = situation.scheduler.state.free.alive
    rows = []
    for index, each in enumerate(situation.header.cluster.nodes):
        jobs = tuple(SHARING.join(holders.get((each.name, slot), ())) or None for slot in range(each.gpus))
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
    waiting = situation.tally.waiting
    unpaid: dict[str, float] = {}
    for name in situation.running:
        record = situation.records[name]
        tenant, run = record.job.tenant, record.current
        if run is not None:
            running[tenant] += 1
            unpaid[tenant] = unpaid.get(tenant, 0.0) + run.count * (now - run.started)
    names = sorted({*situation.books, *running, *waiting})
    present = {name for name in names if running[name] or waiting[name]}
    active = sum(situation.weight_of(name) for name in present)
    held = situation.tally.held
    rows = []
    for name in names:
        weight, books = situation.weight_of(name), situation.books.get(name, Books())
        rows.append(
            TenantShare(
                tenant=name, weight=weight, entitled=weight / active if name in present else 0.0,
                held=held.share(name) or 0.0, gpus=held.by_tenant[name], running=running[name], waiting=waiting[name],
                gpu_seconds=books.gpu_seconds + unpaid.get(name, 0.0), preemptions=books.preemptions,
            )
        )  # fmt: skip
    return Shares(tenants=tuple(rows))
