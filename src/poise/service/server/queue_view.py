"""Read-only views of the whole cluster: the queue a page at a time, the nodes, and the shares of tenants.

Functions of a `ServiceState`, called under the engine's lock: none may take more than some milliseconds.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, filterfalse, islice
from typing import NamedTuple

from poise.scheduler.policies.catalogue import promise_of
from poise.scheduler.policies.promises import Claimant
from poise.service.server.records import JobRecord, RunRecord, Slot
from poise.service.server.service_api import JobFilter
from poise.service.server.service_state import ServiceState, TenantTotals
from poise.service.wire.views import NodeList, NodeRow, Shares, TenantShare

IN_LINE = 2_000
"""Waiting jobs whose position is computed; those behind them are listed in order of submission.

To find the position of each of 50,000 takes 10 to 20 ms under an order, during which nothing is decided.
"""
SHARING = "+"  # between the ids of jobs that share a GPU


class QueueSlice(NamedTuple):
    """The jobs of a page, the positions of the first jobs in line, and the number of jobs on all pages by state."""

    jobs: list[str]
    positions: dict[str, int]
    counts: Counter[str]


def page_of(state: ServiceState, wanted: JobFilter, *, limit: int, offset: int) -> QueueSlice:
    """One page of the jobs in memory: those that hold GPUs, then those that wait, as they stand in line, then the rest."""
    is_everything = wanted == JobFilter()
    in_line = positions(state, min(limit + offset, IN_LINE) if is_everything else IN_LINE)
    rest = (job for job in state.records if job not in in_line and job not in state.running)
    jobs: Iterator[str] = chain(state.running, in_line, rest)
    if is_everything:
        counts = state.counts.states.copy()
    else:
        mine = state.records if wanted.tenant is None else state.counts.jobs.get(wanted.tenant, ())
        matching = [job for job in mine if _matches(state.records[job], wanted)]
        counts = state.counts.among(matching)
        chosen = set(matching)
        if len(matching) > IN_LINE:  # many are found on the way through all jobs; a few are put in order by themselves
            jobs = filter(chosen.__contains__, jobs)
        else:
            running = filter(chosen.__contains__, state.running)
            jobs = iter(dict.fromkeys((*running, *state.scheduler.lined_up(matching), *matching)))
    return QueueSlice(list(islice(jobs, offset, offset + limit)), in_line, counts)


def positions(state: ServiceState, most: int = IN_LINE) -> dict[str, int]:
    """The first jobs in line, each with its position from 1. While it plans, the core may know jobs that have no record."""
    waiting = (job for job in state.scheduler.in_line(most) if job in state.records)
    return {job: position for position, job in enumerate(filterfalse(state.running.__contains__, waiting), 1)}


def _matches(record: JobRecord, wanted: JobFilter) -> bool:
    """Whether a job of the tenant is wanted."""
    is_named = wanted.name in (None, record.name)
    return is_named and (not wanted.states or record.state in wanted.states) and wanted.app in (None, record.job.app)


def nodes(state: ServiceState) -> NodeList:
    """All nodes, the jobs that hold their GPUs, and those whose processes are still leaving them."""
    records = state.records
    current = ((job, records[job].current) for job in state.running)
    holders = _by_slot((job, run) for job, run in current if run is not None)
    leaving = _by_slot((job, run) for job in state.stopping for run in records[job].stopping_runs())
    rows = []
    for node, alive in zip(state.header.cluster.nodes, state.scheduler.state.free.alive, strict=True):
        held, left = (
            tuple(SHARING.join(jobs.get((node.name, slot), ())) or None for slot in range(node.gpus))
            for jobs in (holders, leaving)
        )
        rows.append(
            NodeRow(
                name=node.name, gpu_type=node.gpu_type, gpus=node.gpus, rack=node.rack, alive=alive,
                free=list(zip(held, left, strict=True)).count((None, None)), jobs=held, leaving=left,
            )
        )  # fmt: skip
    return NodeList(nodes=tuple(rows))


def _by_slot(runs: Iterable[tuple[str, RunRecord]]) -> dict[Slot, list[str]]:
    found: dict[Slot, list[str]] = {}
    for job, run in runs:
        for node, slots in run.gpus.items():
            for slot in slots:
                found.setdefault((node, slot), []).append(job)
    return found


def shares(state: ServiceState, now: float) -> Shares:
    """All tenants that have, or had, jobs or a weight of their own: what they hold, and what the policy promises them."""
    running: Counter[str] = Counter()
    uncharged: dict[str, float] = {}  # GPU-seconds of runs under way: they are charged when the GPUs are released
    for job in state.running:
        record = state.records[job]
        tenant, run = record.job.tenant, record.current
        if run is not None:
            running[tenant] += 1
            uncharged[tenant] = uncharged.get(tenant, 0.0) + run.count * (now - run.started)
    promise, counts = promise_of(state.header.policy), state.counts
    parts = promise.parts(_claimants(state), state.header.cluster.gpus)
    rows = []
    for tenant in sorted({*state.totals, *running, *counts.waiting}):
        totals = state.totals.get(tenant, TenantTotals())
        rows.append(
            TenantShare(
                tenant=tenant, weight=totals.weight, entitled=None if parts is None else parts.get(tenant, 0.0),
                held=counts.share(tenant) or 0.0, gpus=counts.held[tenant], running=running[tenant],
                waiting=counts.waiting[tenant], gpu_seconds=totals.gpu_seconds + uncharged.get(tenant, 0.0),
                preemptions=totals.preemptions,
            )
        )  # fmt: skip
    return Shares(tenants=tuple(rows), policy=state.header.policy, promise=promise.text)


def _claimants(state: ServiceState) -> dict[str, Claimant]:
    """All tenants that the core knows, in order of their first submission, with their jobs that run or may run."""
    counts: Counter[str] = Counter()
    weights: dict[str, float] = {}
    for record in state.records.values():
        if record.finished is None and not record.held:
            tenant = record.job.tenant
            counts[tenant] += 1
            weights[tenant] = weights.get(tenant, 0.0) + record.job.weight
    names = dict.fromkeys((*state.scheduler.state.columns.tenants, *counts))
    return {name: Claimant(state.weight_of(name), counts[name], weights.get(name, 0.0)) for name in names}
