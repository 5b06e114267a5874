"""What has to hold of a live service at any time, and of its books once all jobs have ended."""

import pytest
from tests.machine import Service

from poise.engine.journal import read_entry, read_header
from poise.engine.loop import replay
from poise.lab.analysis.history import History
from poise.scheduler.model.job import Status
from poise.service.backends.api import RunEnding
from poise.service.server.dependencies import core_of
from poise.service.server.records import JobRecord, StateCounts, slots_by_node
from poise.service.server.service_api import JobFilter
from poise.service.wire.views import JobRow, JobState


def check_standing(service: Service) -> None:
    """Core, records, tallies and processes say the same of every job."""
    live = service.loop.state
    for record in live.records.values():
        if record.finished is None:
            _check_core(service, record)
            _check_state(service, record)
    columns = live.scheduler.state.columns
    for job, status in zip(columns.ids, columns.status, strict=False):
        record_of = live.records.get(job)
        assert Status(status).is_final == (record_of is None or record_of.finished is not None), job
    _check_counts(service)
    check_free(service)


def _check_core(service: Service, record: JobRecord) -> None:
    live, job = service.loop.state, record.job.id
    state, run = live.scheduler.state, record.current
    if job in live.stranded:
        assert job not in state.rows
        assert run is None
        return
    row = state.rows[job]
    assert state.running(row) == (run is not None) == (job in live.running), job
    # A hold that would lose work is not the core's business before it loses none.
    is_barred = live.conditions.is_barred(job)
    assert not (is_barred and (record.held or run is not None)), job
    assert (row in state.on_hold) == ((record.held or is_barred) and run is None), job
    assert state.columns.failures[row] == record.failures, job
    assert state.columns.epoch[row] == (record.runs[-1].epoch if record.runs else 0), job
    if run is not None:
        assert slots_by_node(live.header.cluster, state.of(row)) == run.gpus, job


def _check_state(service: Service, record: JobRecord) -> None:
    now, job = service.loop.clock.now(), record.job.id
    assert record.waited + record.ran + now - record.since == pytest.approx(now - record.job.submitted), job
    is_alive = any(each == job for each, _ in service.machine.alive)
    match record.state:
        case JobState.RUNNING | JobState.CHECKPOINTING:
            assert is_alive, job
        case JobState.PENDING | JobState.PAUSED:
            assert not is_alive, job
            assert bool(record.runs) == (record.state is JobState.PAUSED), job
        case _:
            assert record.state is JobState.STARTING, job
    assert (record.current is not None) == (record.state in {JobState.STARTING, JobState.RUNNING}), job


def _check_counts(service: Service) -> None:
    live = service.loop.state
    anew = StateCounts()
    for record in live.records.values():
        anew.count(record)
    kept = live.counts
    assert (anew.states, anew.waiting, anew.holders, anew.held) == (kept.states, kept.waiting, kept.holders, kept.held)
    held = {(node, slot) for job in live.running for node, slot in _gpus(live.records[job])}
    assert set(kept.holders) == held
    in_use = [node for node in service.engine.nodes().nodes if node.alive and node.drained is None]
    idle = {(node.name, slot) for node in in_use for slot in range(node.gpus) if slot not in node.withheld} - held
    assert len(idle) == sum(live.scheduler.state.free.idle)
    unended = [record for record in live.records.values() if record.finished is None]
    assert sum(service.engine.reasons().values()) == len(unended)
    assert all(service.engine.why(job).reason.text for job in live.records)
    assert sorted(row.id for row in paged(service)) == sorted(live.records)


def check_free(service: Service) -> None:
    """GPUs that are shown as free have no process of a run on them."""
    nodes = service.engine.nodes().nodes
    shown = {
        (node.name, slot)
        for node in nodes
        for slot, (job, leaving) in enumerate(zip(node.jobs, node.leaving, strict=True))
        if job is None and leaving is None
    }
    assert len(shown) == sum(node.free for node in nodes)
    busy = [(job, gpu) for job, gpu in service.machine.busy() if gpu in shown]
    assert not busy, f"shown as free, and not: {busy}"


def _gpus(record: JobRecord) -> set[tuple[str, int]]:
    run = record.current
    return set() if run is None else {(node, slot) for node, slots in run.gpus.items() for slot in slots}


def paged(service: Service, states: frozenset[JobState] = frozenset(), limit: int = 3, **which: str) -> list[JobRow]:
    """All pages of the queue, one after the other."""
    rows: list[JobRow] = []
    while True:
        page = service.engine.queue(JobFilter(states, **which), limit=limit, offset=len(rows))
        assert len(page.jobs) <= limit
        if not page.jobs:
            assert len(rows) == page.total
            return rows
        rows += page.jobs


def finish_all(service: Service) -> None:
    """Every run that may go on does all its work, until all jobs have ended."""
    for _ in range(100):
        for job, epoch in sorted(service.machine.alive):
            leaves = (job, epoch) in service.machine.leaving
            service.machine.end(job, RunEnding.YIELDED if leaves else RunEnding.FINISHED)
        service.pass_time(10)
        if not service.loop.state.records:
            return
    raise AssertionError("some job never ends")


def check_books(service: Service, jobs: list[str]) -> None:
    """All jobs have ended: the journal replays, and every account of it says the same."""
    store = service.loop.store
    chapters = store.chapters()
    ends = [first for _, first in chapters[1:]] + [None]
    for (header, first), end in zip(chapters, ends, strict=True):
        replay(core_of(read_header(header)), map(read_entry, store.entries(first, end)))
    entries = [read_entry(document) for document in store.entries(1)]
    moments = [entry.now for entry in entries]
    assert moments == sorted(moments)
    history = History.of(entries, service.loop.state.header.cluster)
    details = {job: service.engine.show(job) for job in jobs}
    charged = {job: each.gpu_seconds for job, each in details.items()}
    assert charged == pytest.approx({job: history.jobs[job].gpu_seconds for job in jobs})
    assert sum(each.gpu_seconds for each in service.engine.shares().tenants) == pytest.approx(sum(charged.values()))
    for job, each in details.items():
        life = (each.job.finished or 0.0) - each.job.submitted
        assert each.job.waited + each.job.ran == pytest.approx(life), job
        assert (history.jobs[job].status is Status.FINISHED) == (each.job.state is JobState.SUCCEEDED), job
        assert each.job.state is not JobState.SUCCEEDED or job in service.machine.finished, job
        assert (each.lost_gpu_seconds or 0.0) <= each.gpu_seconds + 1e-9, job
    assert sorted(row.id for row in paged(service, frozenset(JobState), 7)) == sorted(jobs)
