"""Laws of the metrics, over random worlds and against slow and obvious calculations."""

from dataclasses import replace
from itertools import pairwise
from math import isfinite, isnan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.strategies import World, named, worlds

from poise.lab.analysis.fairness import Fairness, jain, rho
from poise.lab.analysis.history import History, JobHistory, cumulated
from poise.lab.analysis.summary import Effort, Summary, SummaryLabels, measure, summarise
from poise.scheduler.model.action import Preempt, PreemptionCause
from poise.scheduler.model.job import Status

values = st.lists(st.floats(0.01, 100), min_size=1, max_size=12)


def summary(history: History) -> Summary:
    labels, effort = SummaryLabels("p", "t", "c", 0, len(history.jobs)), Effort(0, 0.0, 0.0)
    return summarise(history, measure(history), labels, effort, round_seconds=None, partial=False)


@given(values)
def test_jains_index_lies_between_one_nth_and_one(found: list[float]) -> None:
    assert 1 / len(found) - 1e-9 <= jain(np.array(found)) <= 1 + 1e-9


@given(values.flatmap(lambda found: st.tuples(st.just(found), st.permutations(found))), st.floats(0.01, 100))
def test_jains_index_does_not_depend_on_scale_or_order(found: tuple[list[float], list[float]], factor: float) -> None:
    before, after = (np.array(each) for each in found)
    assert jain(after * factor) == pytest.approx(jain(before))


@given(st.floats(0.01, 100), st.integers(1, 30))
def test_jains_index_of_equal_values_is_one(value: float, count: int) -> None:
    assert jain(np.full(count, value)) == pytest.approx(1)


@given(st.lists(st.tuples(st.integers(0, 9).map(float), st.integers(-3, 3)), max_size=20), st.floats(-1, 11))
def test_a_level_is_the_sum_of_the_changes_so_far(changes: list[tuple[float, int]], time: float) -> None:
    times, levels = cumulated(changes)
    assert (np.diff(times) > 0).all()
    place = int(np.searchsorted(times, time, side="right")) - 1
    got = int(levels[place]) if place >= 0 else 0
    assert got == sum(change for at, change in changes if at <= time)


@given(worlds(forever=True))
def test_history_agrees_with_the_scheduler_and_with_the_runs(world: World) -> None:
    story = world.played()
    history = History.of(story.entries, world.cluster)
    assert {name: job.status for name, job in history.jobs.items()} == {name: story.status(name) for name in history.jobs}
    for name, job in history.jobs.items():
        closed = [run for run in story.runs_of(name) if isfinite(run.ended)]
        assert job.gpu_seconds == pytest.approx(sum(run.gpu_seconds for run in closed))
    assert {name: job.started for name, job in history.jobs.items() if not isnan(job.started)} == story.starts
    stops = [action for _, action in story.actions(Preempt) if action.why is not PreemptionCause.VALIDATED]
    assert sum(job.preemptions for job in history.jobs.values()) == len(stops)


@given(worlds())
def test_time_from_submission_to_end_is_waiting_or_holding(world: World) -> None:
    """Of jobs that ended while they ran; how long one waited is known when it starts."""
    story = world.played()
    for job in History.of(story.entries, world.cluster).ended_jobs():
        runs = story.runs_of(job.id)
        if runs and runs[-1].ended == job.ended:
            held = sum(run.seconds for run in runs)
            assert sum(job.waited) + held == pytest.approx(job.ended - job.submitted)


@given(worlds(forever=True))
def test_no_more_gpus_are_held_than_there_are(world: World) -> None:
    story = world.played()
    history = History.of(story.entries, world.cluster)
    moments, held = cumulated(history.held)
    times, lost = cumulated(history.live)
    alive = np.array([world.cluster.gpus + sum(lost[times <= moment][-1:]) for moment in moments])
    assert (held >= 0).all()
    assert (held <= alive).all()
    running = sum(job.using for job in history.jobs.values() if job.status is Status.RUNNING)
    assert not len(held) or held[-1] == running


@given(worlds(forever=True))
def test_waiting_jobs_are_those_that_are_neither_running_nor_at_their_end(world: World) -> None:
    history = History.of(world.played().entries, world.cluster)
    _, waiting = cumulated(history.waiting)
    assert (waiting >= 0).all()
    assert not len(waiting) or waiting[-1] == history.count(Status.WAITING)


@given(worlds(forever=True))
def test_counts_add_up_and_shares_are_shares(world: World) -> None:
    found = summary(History.of(world.played().entries, world.cluster))
    assert found.finished + found.failed + found.cancelled + found.rejected + found.unfinished == found.jobs
    assert found.jobs == len(world.jobs)
    assert 0 <= found.utilisation <= 1 + 1e-9
    if found.unfair_fraction is not None:
        assert 0 <= found.unfair_fraction <= 1
        assert found.worst_rho is not None
        assert found.mean_rho is not None
        assert 0 < found.mean_rho <= found.worst_rho + 1e-9


def owned(world: World) -> World:
    """The same world with its jobs dealt out to three tenants."""
    jobs = [replace(each, job=replace(each.job, tenant=f"t{n % 3}")) for n, each in enumerate(world.jobs)]
    return replace(world, jobs=jobs)


def slow_rho(history: History, job: JobHistory, fairness: Fairness) -> float:
    """By the definition, one piece of time after the other."""
    cluster = history.cluster
    rates = history.rates[job.kind]
    speed = sum(rate * cluster.gpus_of(name) / cluster.gpus for rate, name in zip(rates, cluster.gpu_types, strict=True))
    who = "tenant" if fairness is Fairness.TENANT else "id"
    ends = {job: history.end if isnan(each.ended) else each.ended for job, each in history.jobs.items()}
    spans = [(each.submitted, ends[job], getattr(each, who)) for job, each in history.jobs.items()]
    edges = sorted({job.submitted, job.ended, *(edge for span in spans for edge in span[:2])})
    area = 0.0
    for start, end in pairwise(edges):
        if job.submitted <= start and end <= job.ended:
            area += (end - start) * len({name for begin, stop, name in spans if begin <= start and end <= stop})
    mean = area / (job.ended - job.submitted)
    return (job.ended - job.submitted) / (job.steps / speed * max(1, job.gpus * mean / cluster.gpus))


@pytest.mark.parametrize("fairness", [Fairness.JOB, Fairness.TENANT])
@given(world=worlds(policy=named, plain=True))
def test_rho_agrees_with_its_definition(fairness: Fairness, world: World) -> None:
    history = History.of(owned(world).played().entries, world.cluster)
    jobs = history.ended_jobs()
    for job, got in zip(jobs, rho(history, jobs, fairness).tolist() if jobs else [], strict=True):
        if job.steps == 0:
            assert isnan(got)
        else:
            assert got == pytest.approx(slow_rho(history, job, fairness))


@given(worlds(policy=named, plain=True))
def test_a_job_that_names_no_app_has_the_rho_of_a_job(world: World) -> None:
    """Unless it was given up: of such a job only that work counts which GPUs were spent on."""
    history = History.of(world.played().entries, world.cluster)
    jobs = history.ended_jobs()
    if jobs:
        alone = np.array([job.app is None and job.status is not Status.CANCELLED for job in jobs])
        by_job, by_app = rho(history, jobs, Fairness.JOB), rho(history, jobs, Fairness.APP)
        if all(job.app is None for job in history.jobs.values()):
            assert by_app[alone] == pytest.approx(by_job[alone], nan_ok=True)


@given(worlds())
def test_rho_among_jobs_is_at_most_rho_among_tenants(world: World) -> None:
    """There are at least as many jobs as tenants: a slice among jobs is no larger, and what it takes alone no shorter."""
    history = History.of(owned(world).played().entries, world.cluster)
    jobs = history.ended_jobs()
    if jobs:
        by_job, by_tenant = rho(history, jobs, Fairness.JOB), rho(history, jobs, Fairness.TENANT)
        known = ~np.isnan(by_job)
        assert (by_job[known] <= by_tenant[known] + 1e-9).all()
