"""Read-only views of the whole cluster: the queue a page at a time, the nodes, and the shares of tenants.

Functions of a `ServiceState`, called under the engine's lock: none may take more than some milliseconds.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, filterfalse, islice
from typing import NamedTuple

from poise.scheduler.model.cluster import Node
from poise.scheduler.model.job import Yields
from poise.scheduler.policies.catalogue import promise_of
from poise.scheduler.policies.promises import Claimant
from poise.service.backends.api import NodeState
from poise.service.server.node_records import NodeRecord
from poise.service.server.records import JobRecord, RunRecord
from poise.service.server.service_api import JobFilter
from poise.service.server.service_state import ServiceState, TenantTotals
from poise.service.wire.views import NodeList, NodeRow, NodeRun, Shares, TenantShare

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
        matching = jobs_of(state, wanted)
        counts = state.counts.among(matching)
        chosen = set(matching)
        if len(matching) > IN_LINE:  # many are found on the way through all jobs; a few are put in order by themselves
            jobs = filter(chosen.__contains__, jobs)
        else:
            running = filter(chosen.__contains__, state.running)
            jobs = iter(dict.fromkeys((*running, *state.scheduler.lined_up(matching), *matching)))
    return QueueSlice(list(islice(jobs, offset, offset + limit)), in_line, counts)


def jobs_of(state: ServiceState, wanted: JobFilter) -> list[str]:
    """The jobs in memory that are wanted, in order of submission."""
    mine = state.records if wanted.tenant is None else state.counts.jobs.get(wanted.tenant, ())
    return [job for job in mine if _matches(state.records[job], wanted)]


def positions(state: ServiceState, most: int = IN_LINE) -> dict[str, int]:
    """The first jobs in line, each with its position from 1. While it plans, the core may know jobs that have no record."""
    waiting = (job for job in state.scheduler.in_line(most) if job in state.records)
    return {job: position for position, job in enumerate(filterfalse(state.running.__contains__, waiting), 1)}


def _matches(record: JobRecord, wanted: JobFilter) -> bool:
    """Whether a job of the tenant is wanted."""
    is_named = wanted.name in (None, record.name)
    return is_named and (not wanted.states or record.state in wanted.states) and wanted.app in (None, record.job.app)


def nodes(state: ServiceState, now: float) -> NodeList:
    """All nodes, how they are, the jobs that hold their GPUs, and those whose processes are still leaving them."""
    runs = _runs_by_node(state)
    rows = (_node_row(state, node, runs.get(node.name, ()), now) for node in state.header.cluster.nodes)
    return NodeList(nodes=tuple(rows))


def node_row(state: ServiceState, name: str, now: float) -> NodeRow:
    """One node of the cluster."""
    return _node_row(state, state.places[name][1], _runs_by_node(state).get(name, ()), now)


Tenure = tuple[JobRecord, RunRecord]  # a run whose processes may be there, and its job


def _runs_by_node(state: ServiceState) -> dict[str, list[Tenure]]:
    """Runs that hold GPUs, or have not left them yet, by node: those that hold some come first."""
    found: dict[str, list[Tenure]] = {}
    jobs = chain(state.running, filterfalse(state.running.__contains__, state.stopping))
    for record in map(state.records.__getitem__, jobs):
        for run in record.open_runs():
            for name in run.gpus:
                found.setdefault(name, []).append((record, run))
    for each in found.values():
        each.sort(key=lambda pair: pair[1] is not pair[0].current)
    return found


def _node_row(state: ServiceState, node: Node, runs: Iterable[Tenure], now: float) -> NodeRow:
    known = state.nodes.get(node.name) or NodeRecord(node.name)
    holders: dict[int, list[str]] = {}
    leaving: dict[int, list[str]] = {}
    for record, run in runs:
        for slot in run.gpus[node.name]:
            (holders if run is record.current else leaving).setdefault(slot, []).append(record.job.id)
    held, left = (tuple(SHARING.join(by.get(slot, ())) or None for slot in range(node.gpus)) for by in (holders, leaving))
    empty = [slot for slot in range(node.gpus) if held[slot] is left[slot] is None]
    is_open = known.state is NodeState.UP and known.drained is None
    return NodeRow(
        name=node.name, gpu_type=node.gpu_type, gpus=node.gpus, rack=node.rack, alive=not known.is_lost,
        free=len(empty), jobs=held, leaving=left, state=known.condition,
        available=len(set(empty) - set(known.withheld)) if is_open else 0,
        since=known.since, evidence=known.evidence or None, withheld=known.withheld,
        drained=known.drained, drained_by=known.by, drain_reason=known.reason, emptied=known.emptied,
        runs=tuple(_node_run(state, node, known, record, run, now) for record, run in runs),
    )  # fmt: skip


def _node_run(state: ServiceState, node: Node, known: NodeRecord, record: JobRecord, run: RunRecord, now: float) -> NodeRun:
    is_leaving, stays = run is not record.current, None
    if not is_leaving and known.drained is not None:
        pinned = record.why_pinned(now, state.header.settings.round)
        until = "it ends" if record.job.yields is Yields.NEVER else "it can save its work, or ends"
        stays = "it leaves as soon as it may be preempted" if pinned is None else f"it stays until {until}: {pinned}"
    return NodeRun(
        job=record.job.id, name=record.name, tenant=record.job.tenant, epoch=run.epoch, slots=run.gpus[node.name],
        leaving=is_leaving, stays=stays,
    )  # fmt: skip


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
