"""What must hold of a study whatever the world: nothing is lost, nothing is counted twice."""

from itertools import pairwise
from math import inf, isnan

import numpy as np
import pytest
from hypothesis import given
from tests.builders import Story
from tests.strategies import World, worlds

from poise.lab.analysis.history import History, RunInterval
from poise.lab.analysis.records import Records
from poise.lab.analysis.sources import RecordReader
from poise.lab.analysis.study import study
from poise.lab.analysis.tables import ALL, StudyPart, Value
from poise.scheduler.model.cluster import Slots
from poise.scheduler.model.event import Failed, NodeLost, NodeRestricted, NodeReturned


def read(story: Story, world: World) -> RecordReader:
    reading = RecordReader(world.cluster, world.settings.validation_gpus)
    for entry in story.entries:
        reading.take(entry)
    return reading


def parts_of(records: Records) -> dict[str, StudyPart]:
    return {part.key: part for part in study(records)}


def total(part: StudyPart, key: str) -> float:
    """The sum of a column, but for the row of everything."""
    rows = part.records()
    first = part.columns[0].key
    return sum(_number(row[key]) for row in rows if row[first] != ALL)


def _number(value: Value) -> float:
    assert isinstance(value, int | float)
    return value


@given(worlds())
def test_gpu_time_and_jobs_add_up_whatever_they_are_grouped_by(world: World) -> None:
    reading = read(world.played(), world)
    records = reading.records()
    parts = parts_of(records)
    hours = sum(job.gpu_seconds for job in reading.history.jobs.values()) / 3600
    groupings = [key for key in ("sizes", "gangs", "statuses", "tenants", "losses") if not parts[key].missing]
    assert [total(parts[key], "gpu_hours") for key in groupings] == pytest.approx([hours] * len(groupings))
    counted = [key for key in ("sizes", "gangs", "statuses", "tenants") if not parts[key].missing]
    assert [total(parts[key], "jobs") for key in counted] == [len(world.jobs)] * len(counted)
    by_job = np.bincount(records.runs.job, weights=records.runs.gpu_seconds, minlength=len(world.jobs))
    assert by_job == pytest.approx(records.gpu_seconds)


@given(worlds())
def test_counts_of_starts_nodes_and_attempts_add_up(world: World) -> None:
    reading = read(world.played(), world)
    records = reading.records()
    parts = parts_of(records)
    started = int(np.sum(~np.isnan(records.started)))
    assert total(parts["delays_by_size"], "jobs") == total(parts["nodes"], "jobs") == started
    assert total(parts["attempts"], "jobs") == np.sum(records.attempts > 0)
    attempts = sum(_number(row["attempts"]) * _number(row["jobs"]) for row in parts["attempts"].records())
    assert attempts == len(records.runs.attempts.job)
    failures = parts["failures"].records()
    assert total(parts["failures"], "trials") == (failures[0]["trials"] if failures else 0)
    assert np.all(records.runs.attempts.retried.sum() == attempts - np.sum(records.attempts > 0))


@given(worlds(divides=False))
def test_waiting_by_cause_is_all_waiting_that_ended_in_a_start(world: World) -> None:
    reading = read(world.played(), world)
    records = reading.records()
    spells = records.runs
    waited = np.where(spells.firsts, spells.start - records.submitted[spells.job], spells.gaps)
    total = np.bincount(spells.job, weights=waited, minlength=len(records.gpus))
    assert records.waited.sum(axis=1) == pytest.approx(total, abs=1e-6)
    causes = parts_of(records)["causes"].records()
    everything = [row for row in causes if row["size"] == ALL]
    assert sum(_number(row["hours"]) for row in everything) * 3600 == pytest.approx(total.sum(), abs=1e-6)
    assert sum(_number(row["jobs"]) for row in everything) == np.sum(records.waited.sum(axis=1) > 0)


@given(worlds(divides=False))
def test_every_failure_and_lost_node_ends_one_attempt(world: World) -> None:
    story = world.played()
    reading = read(story, world)
    records = reading.records()
    failed = records.runs.attempts.failed
    assert failed.sum() == sum(job.restarts for job in reading.history.jobs.values())
    causes = [records.runs.causes[cause] for cause in records.runs.attempts.cause[failed]]
    told = [fact.cause for _, fact in story.events(Failed)]
    assert sorted(cause for cause in causes if cause != "node lost") == sorted(told)


@given(worlds())
def test_what_failures_cost_is_the_same_by_category_and_by_end(world: World) -> None:
    parts = parts_of(read(world.played(), world).records())
    ended = [row for row in parts["losses"].records() if row["end"] in ("failed", "node lost")]
    lost = sum(_number(row["unkept_gpu_hours"]) for row in ended)
    assert total(parts["failures"], "unkept_gpu_hours") == pytest.approx(lost)


@given(worlds())
def test_speed_is_never_above_that_of_a_packed_gang(world: World) -> None:
    reading = read(world.played(), world)
    spells = reading.records().runs
    told = ~np.isnan(spells.ideal)
    assert np.all(spells.ideal[told] <= spells.seconds[told] * (1 + 1e-6) + 1e-6)


@given(worlds())
def test_a_study_is_the_same_every_time(world: World) -> None:
    story = world.played()
    once, again = (read(story, world).records() for _ in range(2))
    assert [part.rows for part in study(once)] == [part.rows for part in study(again)]


@given(worlds())
def test_harm_is_what_looking_at_every_time_finds(world: World) -> None:
    story = world.played()
    reading = read(story, world)
    records = reading.records()
    assert records.cluster is not None
    harmful, seconds = slow_harm(story, reading.history, records, pool(story))
    assert records.cluster.harm.harmful.tolist() == harmful
    assert records.cluster.harm.seconds == pytest.approx(seconds)


def pool(story: Story) -> frozenset[Slots]:
    return frozenset(story.scheduler.state.pool.slots)


def slow_harm(story: Story, history: History, records: Records, reserved: frozenset[Slots]) -> tuple[list[bool], float]:
    """Harm by its definition, at every moment at which anything changes."""
    jobs = sorted(history.jobs.values(), key=lambda job: job.submitted)
    runs = [run for run in history.runs if run.gpus[0] not in reserved]
    rank = {job.id: place for place, job in enumerate(jobs)}
    left = records.left.tolist()
    edges = {job.submitted for job in jobs} | {moment for moment in left if moment < inf}
    edges |= {run.start for run in runs} | {run.end for run in runs} | {entry.now for entry in story.entries}
    moments = sorted(edges)
    harmful = [False] * len(jobs)
    seconds = 0.0
    for now, then in pairwise(moments):
        waiting = [place for place, job in enumerate(jobs) if job.submitted <= now < left[place]]
        if not waiting:
            continue
        head = jobs[waiting[0]]
        running = [run for run in runs if run.start <= now < run.end]
        later = [run for run in running if rank[run.job] > waiting[0]]
        others = [run for run in running if rank[run.job] <= waiting[0]]
        idle, without = (_free(story, history, held, running, reserved, now) for held in (running, others))
        usable = [kind for kind, rate in enumerate(history.rates[head.kind]) if rate > 0]
        if any(idle[kind] >= head.min_gpus for kind in usable) or all(without[kind] < head.min_gpus for kind in usable):
            continue
        seconds += then - now
        for run in later:
            harmful[rank[run.job]] = True
    return harmful, seconds


def _free(
    story: Story,
    history: History,
    held: list[RunInterval],
    running: list[RunInterval],
    reserved: frozenset[Slots],
    now: float,
) -> list[int]:
    """GPUs of each type that none of `held` holds. A closed GPU is there only while a run holds it."""
    names = history.cluster.gpu_types
    alive = [True] * len(history.cluster.nodes)
    closed = [0] * len(history.cluster.nodes)
    for entry in story.entries:
        for fact in entry.events if entry.now <= now else ():
            if isinstance(fact, NodeLost | NodeReturned):
                alive[fact.node] = isinstance(fact, NodeReturned)
            elif isinstance(fact, NodeRestricted):
                closed[fact.node] = sum(1 << slot for slot in fact.closed)
    for slots in (part for run in running for part in run.gpus):
        closed[slots.node] &= ~slots.mask
    free = [(1 << node.gpus) - 1 if there else 0 for node, there in zip(history.cluster.nodes, alive, strict=True)]
    for slots in (*reserved, *(part for run in held for part in run.gpus)):
        free[slots.node] &= ~slots.mask
    free = [mask & ~shut for mask, shut in zip(free, closed, strict=True)]
    counts = [0] * len(names)
    for node, mask in zip(history.cluster.nodes, free, strict=True):
        counts[names.index(node.gpu_type)] += mask.bit_count()
    return counts


@given(worlds())
def test_a_start_is_out_of_order_if_some_earlier_job_still_waits(world: World) -> None:
    reading = read(world.played(), world)
    records = reading.records()
    row = parts_of(records)["order"].records()[0]
    jobs = list(zip(records.submitted.tolist(), records.started.tolist(), records.left.tolist(), strict=True))
    late = sum(any(other[0] < submitted and other[2] > started for other in jobs) for submitted, started, _ in jobs)
    assert row["out_of_order"] == late
    assert row["starts"] == sum(not isnan(started) for _, started, _ in jobs)
