"""Laws of the core over random worlds: nothing is held twice, nobody is forgotten, time and work are conserved."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import event, given
from tests.builders import Run, Story
from tests.strategies import World, worlds

from poise.core.reasons import Code
from poise.model.action import Action, Cancel, Launch, Preempt, WakeAt, Why
from poise.model.cluster import gpu_count
from poise.model.event import Cancelled, Failed, Finished, NodeLost, NodeReturned
from poise.model.job import Job, Status
from poise.model.speed import Locality
from poise.model.topology import Topology
from poise.policies.catalogue import policy_named

LEAVING_IDLE = ("min-cost", "fifo-fastest:sticky=off", "whim")
"""Policies that stop a job though nobody else is to have its GPUs."""


def enough(job: Job, is_trial: bool) -> range:
    """The numbers of GPUs that a job can do with; one where it is tried."""
    return range(1, 2) if is_trial else range(job.min_gpus or job.gpus, (job.max_gpus or job.gpus) + 1)


@given(worlds(forever=True))
def test_every_decision_gives_whole_gangs_of_one_type_on_live_nodes_and_no_gpu_twice(world: World) -> None:
    story = world.played()
    topology = Topology(world.cluster)
    jobs = {each.job.id: each.job for each in world.jobs}
    held: dict[str, dict[int, int]] = {}
    lost: set[int] = set()
    for _, events, actions in story.entries:
        for fact in events:
            match fact:
                case NodeLost(node):
                    lost.add(node)
                    held = {job: gpus for job, gpus in held.items() if node not in gpus}
                case NodeReturned(node):
                    lost.discard(node)
                case Finished() | Failed() | Cancelled():
                    held.pop(fact.job, None)
                case _:
                    pass
        for wish in actions:
            if isinstance(wish, Preempt | Cancel):
                held.pop(wish.job, None)
            elif isinstance(wish, Launch):
                assert wish.job not in held
                assert gpu_count(wish.gpus) in enough(jobs[wish.job], story.is_trial(wish.gpus))
                assert len({topology.type_of[slots.node] for slots in wish.gpus}) == 1
                held[wish.job] = {slots.node: slots.mask for slots in wish.gpus}
        for node, full in enumerate(topology.full):
            masks = [gpus[node] for gpus in held.values() if node in gpus]
            assert sum(masks) & full == sum(masks), "a slot that is not there, or one that is held twice"
            assert all(not (one & other) for i, one in enumerate(masks) for other in masks[:i])
            assert not masks or node not in lost


@given(worlds())
def test_every_job_comes_to_its_end_if_lost_nodes_return(world: World) -> None:
    story = world.played()
    ends = Counter(story.status(each.job.id) for each in world.jobs)
    assert sum(ends.values()) == len(world.jobs)
    assert all(status.is_final for status in ends), ends
    event(" ".join(sorted(status.name for status in ends)))


@given(worlds(forever=True))
def test_every_job_that_does_not_end_has_a_reason_to_wait(world: World) -> None:
    story = world.played()
    for each in world.jobs:
        reason = story.scheduler.explain(each.job.id)
        status = story.status(each.job.id)
        assert status is not Status.RUNNING
        assert reason.text
        waits = reason.code in {Code.CAPACITY, Code.FRAGMENTATION, Code.ORDER, Code.SHARE, Code.HELD}
        assert waits == (status is Status.WAITING)


@given(worlds())
def test_gpu_time_is_conserved(world: World) -> None:
    """What runs held is what was not idle, and what the core attributes to the jobs, but for trials."""
    story = world.played()
    by_runs = sum(run.gpu_seconds for run in story.runs)
    busy = 0.0
    held: Counter[str] = Counter()
    changes = sorted(
        [(run.began, run.job, gpu_count(run.gpus)) for run in story.runs]
        + [(run.ended, run.job, -gpu_count(run.gpus)) for run in story.runs]
    )
    for (now, job, gpus), (then, _, _) in pairwise([*changes, (0.0, "", 0)]):
        held[job] += gpus
        busy += sum(held.values()) * (max(then, now) - now)
    assert by_runs == pytest.approx(busy)
    state = story.scheduler.state
    for each in world.jobs:
        seconds = sum(run.seconds for run in story.runs_of(each.job.id) if not story.is_trial(run.gpus))
        assert state.columns.held[state.rows[each.job.id]] == pytest.approx(seconds)


@given(worlds())
def test_waiting_by_cause_sums_to_the_time_waited(world: World) -> None:
    story = world.played()
    free_since = {each.job.id: each.job.submitted for each in world.jobs}
    ends: dict[tuple[str, int], float] = {(run.job, run.epoch): run.ended for run in story.runs}
    for now, launch in story.actions(Launch):
        since = ends.get((launch.job, launch.epoch - 1), free_since[launch.job])
        assert sum(launch.waited) == pytest.approx(now - since)
        assert min(launch.waited) >= -1e-9


@given(worlds())
def test_only_claims_that_insist_on_few_nodes_wait_for_fragmentation(world: World) -> None:
    story = world.played()
    state = story.scheduler.state
    if state.insistence or world.policy.startswith("whim"):
        return
    for _, launch in story.actions(Launch):
        if state.shape_of[state.rows[launch.job]].locality is Locality.CLUSTER or world.placement == "count":
            assert launch.waited.fragmentation == 0


def done(story: Story, runs: list[Run], overhead: float) -> float:
    return sum(story.rate(run) * max(0.0, run.seconds - overhead) for run in runs)


@given(worlds(trouble=False))
def test_a_job_that_finishes_ran_for_exactly_its_work(world: World) -> None:
    story = world.played()
    for each in world.jobs:
        runs = story.runs_of(each.job.id)
        if story.status(each.job.id) is Status.FINISHED:
            work = story.speeds.steps(each.job)
            assert done(story, runs, world.truth.restart_overhead) == pytest.approx(work, abs=1e-6)


@given(worlds())
def test_a_job_that_finishes_in_trouble_ran_for_at_least_its_work(world: World) -> None:
    story = world.played()
    for each in world.jobs:
        if story.status(each.job.id) is Status.FINISHED:
            work = story.speeds.steps(each.job)
            assert done(story, story.runs_of(each.job.id), world.truth.restart_overhead) >= work * (1 - 1e-9) - 1e-6


@given(worlds())
def test_the_core_believes_the_truth_of_progress_where_it_knows_the_speeds(world: World) -> None:
    story = world.played()
    if world.how.perceive is not policy_named("fifo").perceive:
        return
    columns = story.scheduler.state.columns
    for _, fact in story.events(Finished):
        row = story.scheduler.state.rows[fact.job]
        assert columns.steps_done[row] == pytest.approx(columns.steps[row], abs=1e-6)


def is_of_trial(story: Story, wish: Action) -> bool:
    """The wish begins or ends a trial; those come before the decision."""
    if isinstance(wish, Launch):
        return story.is_trial(wish.gpus)
    return isinstance(wish, Preempt) and wish.why is Why.VALIDATED


@given(worlds())
def test_every_preemption_makes_room_for_a_job_that_is_launched_with_it(world: World) -> None:
    story = world.played()
    for _, _, everything in story.entries:
        actions = [wish for wish in everything if not is_of_trial(story, wish)]
        launches = {wish.job: wish for wish in actions if isinstance(wish, Launch)}
        kinds = [type(wish) for wish in actions if isinstance(wish, Launch | Preempt)]
        assert kinds == sorted(kinds, key=lambda kind: kind is Launch), "preemptions first"
        for wish in actions:
            if isinstance(wish, Preempt):
                match wish.why:
                    case Why.MOVED | Why.RESIZED:
                        assert wish.job in launches
                        assert wish.beneficiary is None
                    case Why.OUTRANKED:
                        assert wish.beneficiary in launches or "+packed" in world.policy  # or the one it shared with
                        assert wish.job not in launches
                    case Why.VALIDATED:
                        raise AssertionError("left out above")
                    case Why.UNPLANNED:
                        assert world.policy.startswith(LEAVING_IDLE), "others plan for everybody"


@given(worlds())
def test_a_job_that_just_started_is_not_preempted(world: World) -> None:
    for run in world.played().runs:
        if isinstance(run.ending, Preempt) and run.ending.why is not Why.VALIDATED:
            assert run.seconds >= world.settings.minimum_run - 1e-9


@given(worlds())
def test_epochs_count_launches_and_wake_ups_lie_ahead(world: World) -> None:
    story = world.played()
    for each in world.jobs:
        epochs = [launch.epoch for _, launch in story.actions(Launch) if launch.job == each.job.id]
        assert epochs == [*range(1, len(epochs) + 1)]
    assert all(wish.time > now for now, wish in story.actions(WakeAt))
