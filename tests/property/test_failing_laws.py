"""Laws of drawn failures, under any policy: who is broken never finishes, attempts last as drawn, GPU time adds up."""

from dataclasses import replace
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders import EVENTS, Story, simulate
from tests.strategies import clusters, traces

from poise.lab.analysis.history import History, RunEnd
from poise.lab.traces.failure_model import FailureModel, with_failures
from poise.lab.traces.schema import Trace, TraceJob
from poise.scheduler.model.cluster import Cluster, gpu_count
from poise.scheduler.model.event import Failed
from poise.scheduler.model.job import Job, Status
from poise.scheduler.throughput.speeds import Speeds
from poise.scheduler.throughput.table import shipped

POLICIES = st.sampled_from(["fifo", "fifo-skip", "srtf", "tiresias:limits=300/900"])
"""None with rounds: attempts may last for weeks."""
SOME = FailureModel(rate=0.7, heal=0.7, killed=0.1)
HOW = replace(EVENTS, retries=10)


def failing(jobs: list[TraceJob], cluster: Cluster, seed: int) -> list[TraceJob]:
    """The jobs with failures drawn for them."""
    speeds = Speeds(shipped(), cluster)

    def seconds(job: Job) -> float:
        best = speeds.estimate(job).best()
        return speeds.steps(job) / best if best > 0 else float("inf")

    return list(with_failures(Trace("test", tuple(jobs)), SOME, seed, seconds).jobs)


def attempts(story: Story) -> dict[str, list[float]]:
    """Running time of every failed attempt by job: over the runs that preemptions cut it into."""
    found: dict[str, list[float]] = {}
    for job, runs in groupby(sorted(story.runs, key=lambda run: (run.job, run.began)), lambda run: run.job):
        so_far = 0.0
        for run in runs:
            so_far += run.seconds
            if isinstance(run.ending, Failed):
                found.setdefault(job, []).append(so_far)
                so_far = 0.0
    return found


@given(traces(most=8, trouble=False), clusters(), POLICIES, st.integers(0, 999))
def test_broken_jobs_never_finish_and_attempts_last_as_drawn(
    jobs: list[TraceJob], cluster: Cluster, policy: str, seed: int
) -> None:
    drawn = failing(jobs, cluster, seed)
    story = simulate(drawn, policy, cluster, settings=HOW)
    lasted = attempts(story)
    for each in drawn:
        status = story.status(each.job.id)
        if status is Status.REJECTED:
            continue
        assert status is not Status.FINISHED or not each.broken
        assert (status is Status.FAILED) == each.broken
        assert lasted.get(each.job.id, []) == pytest.approx([death.after for death in each.failures], rel=1e-6, abs=1e-3)


@given(traces(most=8, trouble=False), clusters(), st.integers(0, 999))
def test_the_same_seed_gives_every_policy_the_same_deaths(jobs: list[TraceJob], cluster: Cluster, seed: int) -> None:
    told = []
    for policy in ("fifo", "tiresias", "srtf"):
        story = simulate(failing(jobs, cluster, seed), policy, cluster, settings=HOW)
        told.append(sorted((fact.job, fact.cause, fact.final) for _, fact in story.events(Failed)))
    assert told[0] == told[1] == told[2]


@given(traces(most=8, trouble=False), clusters(), POLICIES, st.integers(0, 999), st.sampled_from((0, 1)))
def test_gpu_time_is_lost_or_kept_and_adds_up(
    jobs: list[TraceJob], cluster: Cluster, policy: str, seed: int, pool: int
) -> None:
    """What failed runs held is a part of what all runs held, which is what the jobs are charged for."""
    how = replace(HOW, validation_gpus=pool if cluster.gpus > 1 else 0)
    story = simulate(failing(jobs, cluster, seed), policy, cluster, settings=how)
    history = History.of(story.entries, cluster)
    held = [((run.end - run.start) * gpu_count(run.gpus), run.ended) for run in history.runs]
    assert all(amount >= 0 for amount, _ in held)
    lost = sum(amount for amount, ended in held if ended is RunEnd.FAILED)
    charged = sum(life.gpu_seconds for life in history.jobs.values())
    assert 0 <= lost <= sum(amount for amount, _ in held) == pytest.approx(charged, rel=1e-9, abs=1e-6)
