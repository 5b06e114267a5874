"""Laws of the runs of a history: nothing is held twice or forgotten, and work is handed on from run to run."""

from itertools import pairwise

import pytest
from hypothesis import given
from tests.builders import a_job, simulate
from tests.strategies import World, worlds

from poise.lab.analysis.history import History, RunEnd, RunInterval
from poise.lab.simulator.world import Truth
from poise.scheduler.core.settings import Cadence, Settings
from poise.scheduler.model.action import Preempt, PreemptionCause
from poise.scheduler.model.cluster import bits, gpu_count
from poise.scheduler.model.job import Status


def history_of(world: World) -> History:
    return History.of(world.played().entries, world.cluster)


@given(worlds(forever=True))
def test_runs_add_up_to_the_gpu_seconds_of_their_jobs(world: World) -> None:
    history = history_of(world)
    for name, job in history.jobs.items():
        mine = [run for run in history.runs if run.job == name]
        assert sum(gpu_count(each.gpus) * (each.end - each.start) for each in mine) == pytest.approx(job.gpu_seconds)


@given(worlds(forever=True))
def test_a_gpu_is_held_by_one_job_at_a_time_or_by_two_that_share_all_of_theirs(world: World) -> None:
    held: dict[tuple[int, int], list[RunInterval]] = {}
    for run in history_of(world).runs:
        for node, mask in run.gpus:
            for bit in bits(mask):
                held.setdefault((node, bit), []).append(run)
    for runs in held.values():
        for first, second in pairwise(sorted(runs, key=lambda each: (each.start, each.end))):
            assert first.end <= second.start or first.gpus == second.gpus


@given(worlds(forever=True))
def test_a_run_begins_with_what_the_one_before_it_kept(world: World) -> None:
    """But for runs of tasks, of which both are 0 however they end."""
    history = history_of(world)
    divides = {each.job.id for each in world.jobs if each.job.micro_batches is not None}
    last: dict[str, RunInterval] = {}
    for run in history.runs:
        is_task = run.ended is RunEnd.COMPUTED or (run.job in divides and run.steps_before == run.steps_after == 0.0)
        if not is_task and history.jobs[run.job].holding is not None:
            assert run.steps_before == (last[run.job].steps_after if run.job in last else 0.0)
            assert run.steps_before <= run.steps_after + 1e-9
            last[run.job] = run


@given(worlds())
def test_the_last_run_ends_as_its_job_does(world: World) -> None:
    history = history_of(world)
    last = {run.job: run for run in history.runs}
    for name, job in history.jobs.items():
        if job.status is Status.FINISHED:
            assert last[name].ended in (RunEnd.FINISHED, RunEnd.COMPUTED)
            if last[name].ended is RunEnd.FINISHED:
                assert last[name].steps_after == job.steps


def test_stints_say_how_they_ended_and_what_was_left_of_the_work() -> None:
    """A fails after 300 s of which checkpoints hold 200, waits for nobody, and is outranked by a shorter job at 500."""
    jobs = [a_job("a", gpus=4, seconds=1000, dies=(300,)), a_job("b", at=500, gpus=4, seconds=100)]
    story = simulate(jobs, "srtf", "gpu:4", truth=Truth(checkpoint_every=200))
    found = History.of(story.entries, story.cluster).runs
    assert [(each.job, each.start, each.end, each.ended) for each in found] == [
        ("a", 0.0, 300.0, RunEnd.FAILED),
        ("a", 300.0, 500.0, RunEnd.PREEMPTED),
        ("b", 500.0, 600.0, RunEnd.FINISHED),
        ("a", 600.0, 1200.0, RunEnd.FINISHED),
    ]
    assert [(each.steps_before, each.steps_after) for each in found] == [(0, 200), (200, 400), (0, 100), (400, 1000)]
    assert found[0].cause
    assert PreemptionCause.OUTRANKED in {action.why for _, action in story.actions(Preempt)}


def test_a_job_that_moves_says_afterwards_how_far_it_had_come() -> None:
    """A small job is moved out of the way of a gang that insists on one node, and goes on elsewhere at once."""
    jobs = [
        a_job("first", gpus=3, seconds=100),
        a_job("small", gpus=1, seconds=500),
        a_job("other", gpus=2, seconds=900),
        a_job("gang", at=150, gpus=4, seconds=50),
    ]
    how = Settings(cadence=Cadence.EVENTS, packed_wait=1000, defragment=10)
    story = simulate(jobs, "fifo", "gpu:8", placement="consolidate", settings=how)
    found = [each for each in History.of(story.entries, story.cluster).runs if each.job == "small"]
    assert [(each.start, each.end, each.steps_before, each.steps_after) for each in found] == [
        (0, 150, 0, 150),
        (150, 500, 150, 500),
    ]
    assert [each.ended for each in found] == [RunEnd.PREEMPTED, RunEnd.FINISHED]
