"""Laws of stints: nothing is held twice or forgotten, and work is handed on from stint to stint."""

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
def test_stints_add_up_to_the_gpu_seconds_of_their_jobs(world: World) -> None:
    history = history_of(world)
    for job, life in history.jobs.items():
        mine = [stint for stint in history.stints if stint.job == job]
        assert sum(gpu_count(each.gpus) * (each.end - each.start) for each in mine) == pytest.approx(life.gpu_seconds)


@given(worlds(forever=True))
def test_a_gpu_is_held_by_one_job_at_a_time_or_by_two_that_share_all_of_theirs(world: World) -> None:
    held: dict[tuple[int, int], list[RunInterval]] = {}
    for stint in history_of(world).stints:
        for node, mask in stint.gpus:
            for bit in bits(mask):
                held.setdefault((node, bit), []).append(stint)
    for stints in held.values():
        for first, second in pairwise(sorted(stints, key=lambda each: (each.start, each.end))):
            assert first.end <= second.start or first.gpus == second.gpus


@given(worlds(forever=True))
def test_a_stint_begins_with_what_the_one_before_it_kept(world: World) -> None:
    """But for stints of tasks, of which both are 0 however they end."""
    history = history_of(world)
    divides = {each.job.id for each in world.jobs if each.job.micro_batches is not None}
    last: dict[str, RunInterval] = {}
    for stint in history.stints:
        is_task = stint.ended is RunEnd.COMPUTED or (stint.job in divides and stint.begun == stint.kept == 0.0)
        if not is_task and history.jobs[stint.job].holding is not None:
            assert stint.begun == (last[stint.job].kept if stint.job in last else 0.0)
            assert stint.begun <= stint.kept + 1e-9
            last[stint.job] = stint


@given(worlds())
def test_the_last_stint_ends_as_its_job_does(world: World) -> None:
    history = history_of(world)
    last = {stint.job: stint for stint in history.stints}
    for job, life in history.jobs.items():
        if life.status is Status.FINISHED:
            assert last[job].ended in (RunEnd.FINISHED, RunEnd.COMPUTED)
            if last[job].ended is RunEnd.FINISHED:
                assert last[job].kept == life.steps


def test_stints_say_how_they_ended_and_what_was_left_of_the_work() -> None:
    """A fails after 300 s of which checkpoints hold 200, waits for nobody, and is outranked by a shorter job at 500."""
    jobs = [a_job("a", gpus=4, seconds=1000, dies=(300,)), a_job("b", at=500, gpus=4, seconds=100)]
    story = simulate(jobs, "srtf", "gpu:4", truth=Truth(checkpoint_every=200))
    found = History.of(story.entries, story.cluster).stints
    assert [(each.job, each.start, each.end, each.ended) for each in found] == [
        ("a", 0.0, 300.0, RunEnd.FAILED),
        ("a", 300.0, 500.0, RunEnd.PREEMPTED),
        ("b", 500.0, 600.0, RunEnd.FINISHED),
        ("a", 600.0, 1200.0, RunEnd.FINISHED),
    ]
    assert [(each.begun, each.kept) for each in found] == [(0, 200), (200, 400), (0, 100), (400, 1000)]
    assert found[0].cause
    assert PreemptionCause.OUTRANKED in {wish.why for _, wish in story.actions(Preempt)}


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
    found = [each for each in History.of(story.entries, story.cluster).stints if each.job == "small"]
    assert [(each.start, each.end, each.begun, each.kept) for each in found] == [(0, 150, 0, 150), (150, 500, 150, 500)]
    assert [each.ended for each in found] == [RunEnd.PREEMPTED, RunEnd.FINISHED]
