"""Who holds what now: nodes, and tenants with what they are entitled to."""

from collections import Counter
from collections.abc import Iterable

from poise.policies.catalogue import promise_of
from poise.policies.promises import Claimant
from poise.server.records import Record, RunRecord
from poise.server.situation import Books, Situation
from poise.wire.views import NodeRow, Nodes, Shares, TenantShare

SHARING = "+"
"""Between the names of jobs that share a GPU."""


def nodes(situation: Situation) -> Nodes:
    """All nodes and who holds them."""
    records = situation.records
    current = ((name, records[name].current) for name in situation.running)
    holders = _by_slot((name, run) for name, run in current if run is not None)
    leaving = _by_slot((name, run) for name in situation.closing for run in left_behind(records[name]))
    alive = situation.scheduler.state.free.alive
    rows = []
    for index, each in enumerate(situation.header.cluster.nodes):
        jobs, gone = (
            tuple(SHARING.join(found.get((each.name, slot), ())) or None for slot in range(each.gpus))
            for found in (holders, leaving)
        )
        rows.append(
            NodeRow(
                name=each.name, gpu_type=each.gpu_type, gpus=each.gpus, rack=each.rack, alive=alive[index],
                free=list(zip(jobs, gone, strict=True)).count((None, None)), jobs=jobs, leaving=gone,
            )
        )  # fmt: skip
    return Nodes(nodes=tuple(rows))


def left_behind(record: Record) -> list[RunRecord]:
    """Runs of a job whose processes may be on GPUs that are no longer its own."""
    return [run for run in record.open_runs() if run.released is not None]


def _by_slot(runs: Iterable[tuple[str, RunRecord]]) -> dict[tuple[str, int], list[str]]:
    """Jobs by node and slot."""
    found: dict[tuple[str, int], list[str]] = {}
    for name, run in runs:
        for node, slots in run.gpus.items():
            for slot in slots:
                found.setdefault((node, slot), []).append(name)
    return found


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
    promise = promise_of(situation.header.policy)
    parts = promise.parts(_claimants(situation), situation.header.cluster.gpus)
    held = situation.tally.held
    rows = []
    for name in names:
        weight, books = situation.weight_of(name), situation.books.get(name, Books())
        rows.append(
            TenantShare(
                tenant=name, weight=weight, entitled=None if parts is None else parts.get(name, 0.0),
                held=held.share(name) or 0.0, gpus=held.by_tenant[name], running=running[name], waiting=waiting[name],
                gpu_seconds=books.gpu_seconds + unpaid.get(name, 0.0), preemptions=books.preemptions,
            )
        )  # fmt: skip
    return Shares(tenants=tuple(rows), policy=situation.header.policy, promise=promise.text)


def _claimants(situation: Situation) -> dict[str, Claimant]:
    """All tenants that the core knows, in the order of their first submission, with their jobs that run or may."""
    counts: Counter[str] = Counter()
    weights: dict[str, float] = {}
    for record in situation.records.values():
        if record.finished is None and not record.held:
            tenant = record.job.tenant
            counts[tenant] += 1
            weights[tenant] = weights.get(tenant, 0.0) + record.job.weight
    names = dict.fromkeys((*situation.scheduler.state.columns.tenants, *counts))
    return {name: Claimant(situation.weight_of(name), counts[name], weights.get(name, 0.0)) for name in names}
