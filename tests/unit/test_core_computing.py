"""Runs at the grain of tasks, as the core keeps them: GPUs come and go, and what cannot be is refused."""

import pytest
from tests.builders import EVENTS, a_cluster
from tests.whims import a_plan, scripted

from poise.scheduler.core.reasons import Code
from poise.scheduler.core.scheduler import Scheduler
from poise.scheduler.model.action import Action, Compute, Launch
from poise.scheduler.model.cluster import Slots, gpu_count
from poise.scheduler.model.errors import InvariantError
from poise.scheduler.model.event import (
    Cancelled,
    Computed,
    Estimated,
    Event,
    Failed,
    NodeLost,
    NodeReturned,
    Submitted,
    Synchronised,
)
from poise.scheduler.model.job import Job
from poise.scheduler.model.micro_batches import Tasks
from poise.scheduler.model.plan import Claim, Grain, Plan
from poise.scheduler.model.speed import Estimate
from poise.scheduler.placement.strategies import placement_named

FOUR = Tasks(4, (1.0, 3.0), ((0.5, 0.5, 0.5),) * 2, 2)
RATES = ((0.4, 0.4, 0.4), (0.15, 0.15, 0.15))
ARRIVES: tuple[Event, ...] = (
    Estimated("k", Estimate(RATES, tasks=FOUR)),
    Submitted(Job("a", 0.0, 2, micro_batches=4), "k", 10.0),
)


def a_task(*mix: int, row: int = 0) -> Plan:
    return a_plan(Claim(row, mix=mix, grain=Grain.TASK))


def begun(plans: dict[float, Plan]) -> tuple[Scheduler, tuple[Action, ...]]:
    scheduler = Scheduler(a_cluster("v100:2,k80:2"), scripted(plans), placement_named("consolidate"), EVENTS)
    return scheduler, scheduler.handle(0.0, ARRIVES)


def computes(actions: tuple[Action, ...]) -> list[Compute]:
    return [action for action in actions if isinstance(action, Compute)]


def test_tasks_begin_a_run_and_further_ones_are_of_the_same_epoch() -> None:
    scheduler, first = begun({0.0: a_task(1, 1), 1.0: a_task(1, 0)})
    columns = scheduler.state.columns
    assert [(action.epoch, gpu_count(action.gpus)) for action in computes(first)] == [(1, 2)]
    assert (columns.ready[0], columns.gpus[0]) == (2, 2)
    second = scheduler.handle(1.0, [Computed("a", 1, (Slots(0, 1),))])
    assert [(action.epoch, gpu_count(action.gpus)) for action in computes(second)] == [(1, 1)]
    assert (columns.ready[0], columns.gpus[0]) == (1, 2)


def test_each_gpu_does_its_part_of_a_step() -> None:
    """A quarter of a step a second on a V100, and a third of that on a K80."""
    scheduler, _ = begun({0.0: a_task(1, 1)})
    columns = scheduler.state.columns
    assert columns.rate[0] == pytest.approx(1 / 3)
    scheduler.handle(1.0, [Computed("a", 1, (Slots(0, 1),))])
    assert columns.rate[0] == pytest.approx(1 / 12)
    assert scheduler.state.snapshot(3.0).steps_so_far.tolist() == pytest.approx([0.5])


def test_gpus_that_are_done_are_free_and_the_job_goes_on_without_any() -> None:
    scheduler, _ = begun({0.0: a_task(2, 0)})
    scheduler.handle(1.0, [Computed("a", 1, (Slots(0, 3),))])
    state = scheduler.state
    assert state.free.idle == [2, 2]
    assert (state.columns.gpus[0], state.columns.rate[0]) == (0, 0.0)
    assert scheduler.explain("a").code is Code.RUNNING


def test_a_synchronised_round_makes_all_tasks_ready_and_counts_as_told() -> None:
    scheduler, _ = begun({0.0: a_task(2, 2), 3.5: a_task(2, 0)})
    scheduler.handle(1.0, [Computed("a", 1, (Slots(0, 3),))])
    scheduler.handle(3.0, [Computed("a", 1, (Slots(1, 3),))])
    again = scheduler.handle(3.5, [Synchronised("a", 1, 1.0)])
    assert [action.epoch for action in computes(again)] == [2]
    assert (scheduler.state.columns.ready[0], scheduler.state.columns.steps_done[0]) == (2, 1.0)


@pytest.mark.parametrize(
    "fact",
    [Failed("a", 1, "died", 0.0), NodeLost(0), Synchronised("a", 1, 1.0), Cancelled("a")],
    ids=lambda fact: type(fact).__name__,
)
def test_whatever_ends_a_round_gives_all_gpus_back_and_makes_all_tasks_ready(fact: Event) -> None:
    scheduler, _ = begun({0.0: a_task(2, 1)})
    scheduler.handle(0.5, [fact, NodeReturned(0)])
    state = scheduler.state
    assert state.free.idle == [2, 2]
    assert not state.ledger.holdings
    assert (state.columns.ready[0], state.columns.gpus[0], state.columns.rate[0]) == (4, 0, 0.0)
    assert not state.protected
    assert state.divisible == (not isinstance(fact, Cancelled))


def test_news_of_an_earlier_round_changes_nothing() -> None:
    scheduler, _ = begun({0.0: a_task(2, 0)})
    scheduler.handle(1.0, [Computed("a", 0, (Slots(0, 3),)), Synchronised("a", 2, 5.0), Computed("nobody", 1, ())])
    assert scheduler.state.free.idle == [0, 2]
    assert scheduler.state.columns.steps_done[0] == 0.0


def test_no_more_tasks_begin_than_gpus_are_free() -> None:
    _, actions = begun({0.0: a_task(4, 0)})
    assert [gpu_count(action.gpus) for action in computes(actions)] == [2]


def test_more_tasks_than_are_ready_are_refused() -> None:
    scheduler, _ = begun({0.0: a_task(2, 1), 1.0: a_task(2, 0)})
    with pytest.raises(InvariantError, match="to compute 2 tasks, and has 1 ready"):
        scheduler.handle(1.0, [Computed("a", 1, (Slots(0, 3),))])


def test_tasks_of_a_job_that_holds_a_lease_are_refused() -> None:
    plans = {0.0: a_plan(Claim(0, mix=(1, 0))), 1.0: a_task(1, 0)}
    scheduler, actions = begun(plans)
    assert [type(action) for action in actions[:1]] == [Launch]
    with pytest.raises(InvariantError, match="to compute 1 task,"):
        scheduler.handle(1.0, [NodeReturned(0)])


def test_gpus_that_a_round_does_not_hold_cannot_be_given_back() -> None:
    scheduler, _ = begun({0.0: a_task(1, 0)})
    with pytest.raises(InvariantError, match="which it does not hold"):
        scheduler.handle(1.0, [Computed("a", 1, (Slots(1, 1),))])
