"""Laws of the core over random worlds: nothing is held twice, nobody is forgotten, time and work are conserved."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import event, given
from tests.builders import Run, Story
from tests.strategies import World, worlds

from poise.lab.conformance.laws import wrong_gpus
from poise.scheduler.core.reasons import Code
from poise.scheduler.model.action import Action, Compute, Launch, Preempt, PreemptionCause, WakeAt
from poise.scheduler.model.event import (
    Finished,
    Synchronised,
)
from poise.scheduler.model.job import Status
from poise.scheduler.model.plan import Grain
from poise.scheduler.model.speed import Locality
from poise.scheduler.policies.catalogue import policy_named

LEAVING_IDLE = ("min-cost", "fifo-fastest:sticky=off", "whim")
"""Policies that stop a job though nobody else is to have its GPUs."""


@given(worlds(forever=True))
def test_every_decision_gives_gpus_that_a_job_can_do_with_on_live_nodes_and_none_twice(world: World) -> None:
    story = world.played()
    assert wrong_gpus(*world.judged(story), story.is_trial) is None


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
        waits = reason.code in {Code.CAPACITY, Code.UNAVAILABLE, Code.FRAGMENTATION, Code.ORDER, Code.SHARE, Code.HELD}
        assert waits == (status is Status.WAITING)


@given(worlds())
def test_gpu_time_is_conserved(world: World) -> None:
    """What runs held is what was not idle, and what the core attributes to the jobs, but for trials."""
    story = world.played()
    by_runs = sum(run.gpu_seconds for run in story.runs)
    busy = 0.0
    held: Counter[str] = Counter()
    spells = [(run.job, *spell) for run in story.runs for spell in run.spells]
    changes = sorted(
        [(began, job, gpus) for job, began, _, gpus in spells] + [(ended, job, -gpus) for job, _, ended, gpus in spells]
    )
    for (now, job, gpus), (then, _, _) in pairwise([*changes, (0.0, "", 0)]):
        held[job] += gpus
        busy += sum(held.values()) * (max(then, now) - now)
    assert by_runs == pytest.approx(busy)
    state = story.scheduler.state
    for each in world.jobs:
        seconds = sum(run.seconds for run in story.runs_of(each.job.id) if not story.is_trial(run.gpus))
        assert state.columns.received[state.rows[each.job.id]] == pytest.approx(seconds)


@given(worlds())
def test_waiting_by_cause_sums_to_the_time_waited(world: World) -> None:
    story = world.played()
    free_since = {each.job.id: each.job.submitted for each in world.jobs}
    ends: dict[tuple[str, int], float] = {(run.job, run.epoch): run.ended for run in story.runs}
    began: set[tuple[str, int]] = set()
    starts: list[tuple[float, Launch | Compute]] = [*story.actions(Launch), *story.actions(Compute)]
    for now, action in starts:
        since = ends.get((action.job, action.epoch - 1), free_since[action.job])
        goes_on = isinstance(action, Compute) and (action.job, action.epoch) in began
        assert sum(action.waited) == (0 if goes_on else pytest.approx(now - since))
        assert min(action.waited) >= -1e-9
        began.add((action.job, action.epoch))


@given(worlds())
def test_only_claims_that_insist_on_few_nodes_wait_for_fragmentation(world: World) -> None:
    story = world.played()
    state = story.scheduler.state
    if state.delay_scheduling or world.policy.startswith("whim"):
        return
    for _, launch in story.actions(Launch):
        if state.shape_of[state.rows[launch.job]].locality is Locality.CLUSTER or world.placement == "count":
            assert launch.waited.fragmentation == 0


def done(story: Story, runs: list[Run], overhead: float) -> float:
    """Steps, where turning to a job whose rounds divide costs nothing. At task grain a run is one step, or in vain."""
    is_rigid = all(each.job.micro_batches is None for each in story.jobs if runs and each.job.id == runs[0].job)
    lost = overhead if is_rigid else 0.0
    leases = sum(story.rate(run) * max(0.0, run.seconds - lost) for run in runs if run.grain is Grain.LEASE)
    return leases + sum(isinstance(run.ending, Synchronised | Finished) for run in runs if run.grain is Grain.TASK)


def surplus(runs: list[Run]) -> float:
    """The last round is as long as others, if only a part of a step is left to do."""
    return float(any(run.grain is Grain.TASK for run in runs))


@given(worlds(trouble=False))
def test_a_job_that_finishes_ran_for_exactly_its_work(world: World) -> None:
    story = world.at_no_cost.played()
    for each in world.jobs:
        runs = story.runs_of(each.job.id)
        if story.status(each.job.id) is Status.FINISHED:
            work, did = story.speeds.steps(each.job), done(story, runs, world.truth.restart_overhead)
            assert did == pytest.approx(work, abs=1e-6) or work < did < work + surplus(runs) + 1e-6


@given(worlds())
def test_a_job_that_finishes_in_trouble_ran_for_at_least_its_work(world: World) -> None:
    story = world.at_no_cost.played()
    for each in world.jobs:
        if story.status(each.job.id) is Status.FINISHED:
            work = story.speeds.steps(each.job)
            assert done(story, story.runs_of(each.job.id), world.truth.restart_overhead) >= work * (1 - 1e-9) - 1e-6


@given(worlds())
def test_the_core_believes_the_truth_of_progress_where_it_knows_the_speeds(world: World) -> None:
    story = world.at_no_cost.played()
    if world.how.perceive is not policy_named("fifo").perceive:
        return
    columns = story.scheduler.state.columns
    for _, fact in story.events(Finished):
        row = story.scheduler.state.rows[fact.job]
        did, steps = columns.steps_done[row], columns.steps[row]
        assert did == pytest.approx(steps, abs=1e-6) or steps < did < steps + surplus(story.runs_of(fact.job)) + 1e-6


def is_of_trial(story: Story, action: Action) -> bool:
    """The action begins or ends a trial; those come before the decision."""
    if isinstance(action, Launch):
        return story.is_trial(action.gpus)
    return isinstance(action, Preempt) and action.why is PreemptionCause.VALIDATED


@given(worlds())
def test_every_preemption_makes_room_for_a_job_that_is_launched_with_it(world: World) -> None:
    story = world.played()
    for _, _, everything in story.entries:
        actions = [action for action in everything if not is_of_trial(story, action)]
        launches = {action.job for action in actions if isinstance(action, Launch | Compute)}
        kinds = [type(action) for action in actions if isinstance(action, Launch | Preempt)]
        assert kinds == sorted(kinds, key=lambda kind: kind is Launch), "preemptions first"
        for action in actions:
            if isinstance(action, Preempt):
                match action.why:
                    case PreemptionCause.MOVED | PreemptionCause.RESIZED:
                        assert action.job in launches
                        assert action.beneficiary is None
                    case PreemptionCause.OUTRANKED:
                        assert action.beneficiary in launches or "+packed" in world.policy  # or the one it shared with
                        assert action.job not in launches
                    case PreemptionCause.VALIDATED:
                        raise AssertionError("left out above")
                    case PreemptionCause.UNPLANNED:
                        assert world.policy.startswith(LEAVING_IDLE), "others plan for everybody"


@given(worlds())
def test_a_job_that_just_started_is_not_preempted_but_to_be_faster_elsewhere(world: World) -> None:
    story = world.played()
    for each in world.jobs:
        for run, after in pairwise([*story.runs_of(each.job.id), None]):
            if run is None or not isinstance(run.ending, Preempt) or run.ending.why is PreemptionCause.VALIDATED:
                continue
            if run.seconds < world.settings.minimum_run - 1e-9:
                assert each.job.micro_batches is not None
                assert run.ending.why in (PreemptionCause.RESIZED, PreemptionCause.MOVED)
                assert after is not None
                assert after.began == run.ended


@given(worlds())
def test_epochs_count_launches_and_wake_ups_lie_ahead(world: World) -> None:
    story = world.played()
    for each in world.jobs:
        runs = [(now, action.epoch) for now, action in story.actions(Launch) if action.job == each.job.id]
        rounds = {action.epoch: now for now, action in reversed(story.actions(Compute)) if action.job == each.job.id}
        epochs = sorted([*runs, *((now, epoch) for epoch, now in rounds.items())])
        assert [epoch for _, epoch in epochs] == [*range(1, len(epochs) + 1)]
    assert all(action.time > now for now, action in story.actions(WakeAt))
