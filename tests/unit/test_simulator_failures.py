"""How attempts die in the simulated world: after their running time, of their cause, and the last one for good."""

from dataclasses import replace

import pytest
from tests.builders import EVENTS, a_job, simulate

from poise.lab.simulator.world import Truth
from poise.lab.traces.reader import read_trace
from poise.lab.traces.schema import FailedAttempt, JobOutcome, TraceJob
from poise.scheduler.core.settings import RetryRule
from poise.scheduler.model.action import Abandon, Launch
from poise.scheduler.model.cluster import gpu_count
from poise.scheduler.model.event import Failed, Finished
from poise.scheduler.model.job import Status

PATIENT = replace(EVENTS, retries=100)


def broken(*deaths: tuple[float, str], gpus: int = 1, seconds: float = 1000.0, batches: int | None = None) -> TraceJob:
    """A job that fails for good with the last of these attempts."""
    job = a_job("a", gpus=gpus, seconds=seconds, outcome=JobOutcome.FAILED, batches=batches)
    return replace(job, failures=tuple(FailedAttempt(*each) for each in deaths), broken=True)


def deaths(job: TraceJob, policy: str = "fifo", truth: Truth | None = None) -> list[tuple[float, str, bool]]:
    story = simulate([job], policy, settings=PATIENT, truth=truth)
    assert not story.events(Finished)
    assert story.status("a") is Status.FAILED
    assert len(story.actions(Abandon)) == 1
    return [(now, fact.cause, fact.final) for now, fact in story.events(Failed)]


def test_a_broken_job_fails_for_good_with_its_last_attempt_however_many_are_forgiven() -> None:
    assert deaths(broken((10, "core-dump"), (700, "core-dump"))) == [(10, "core-dump", False), (710, "core-dump", True)]


@pytest.mark.parametrize("policy", ["hare", "hlas", "fifo"])
def test_a_broken_job_whose_steps_divide_fails_of_its_cause_too(policy: str) -> None:
    found = deaths(broken((10, "core-dump"), (20, "core-dump"), batches=4), policy)
    assert [(cause, final) for _, cause, final in found] == [("core-dump", False), ("core-dump", True)]


@pytest.mark.parametrize("policy", ["hare", "fifo"])
def test_a_broken_job_that_is_done_too_early_fails_at_its_end_of_its_cause(policy: str) -> None:
    found = deaths(broken((1e6, "core-dump"), seconds=100, batches=4 if policy == "hare" else None), policy)
    assert [(cause, final) for _, cause, final in found] == [("core-dump", True)]


def test_a_job_that_is_not_broken_goes_on_after_its_failed_attempts_and_fails_at_its_end() -> None:
    job = a_job("a", seconds=100, outcome=JobOutcome.FAILED, dies=(10.0,))
    assert deaths(job) == [(10, "out of memory", False), (110, "unsuccessful at its end", True)]


@pytest.mark.parametrize("every", [0.0, 600.0, 1e9])
def test_drawn_attempts_run_as_long_as_drawn_whatever_checkpoints_keep(every: float) -> None:
    """Before any influence of a scheduler: every job begins at once and no job is preempted."""
    jobs = read_trace("synthetic:jobs=300,failures=0.9,sizes=1").jobs
    story = simulate(jobs, "fifo", "gpu:300@8", settings=PATIENT, truth=Truth(checkpoint_every=every))
    runs: dict[str, list[float]] = {}
    for run in story.runs:
        if isinstance(run.ending, Failed):
            runs.setdefault(run.job, []).append(run.seconds)
    for each in jobs:
        assert runs.get(each.job.id, []) == pytest.approx([death.after for death in each.failures], abs=1e-4)
        assert (each.job.id in story.finishes) == (not each.broken)


def test_a_preemption_stops_the_clock_of_an_attempt() -> None:
    jobs = [broken((100, "core-dump")), replace(a_job("b", at=40, seconds=30))]
    story = simulate(jobs, "srtf", "gpu:1", settings=PATIENT)
    assert [now for now, _ in story.events(Failed)] == [130]


def test_a_broken_gang_dies_in_its_trial_of_every_attempt_that_is_short_enough() -> None:
    how = replace(PATIENT, validation_gpus=1, validation_time=30.0)
    story = simulate(
        [broken((10, "core-dump"), (50, "core-dump"), (20, "core-dump"), gpus=4)], cluster="gpu:8", settings=how
    )
    held = [(now, gpu_count(launch.gpus)) for now, launch in story.actions(Launch)]
    assert held == [(0, 1), (10, 1), (40, 4), (90, 4)]
    assert [(now, fact.final) for now, fact in story.events(Failed)] == [(10, False), (90, False), (110, True)]


@pytest.mark.parametrize(("cause", "runs"), [("syntax-error", 1), ("core-dump", 3), ("mpi-error", 3)])
def test_retry_by_cause_spares_what_no_retry_heals(cause: str, runs: int) -> None:
    story = simulate([broken(*[(10, cause)] * 3)], settings=replace(PATIENT, retry=RetryRule.CAUSE))
    assert len(story.actions(Launch)) == runs
    assert story.status("a") is Status.FAILED
