"""Laws of jobs whose rounds divide, over random worlds: nothing of use idles, and speeds are those of best splits."""

from math import inf

import pytest
from hypothesis import assume, event, given
from hypothesis import strategies as st
from tests.strategies import ORDERS, World, worlds

from poise.scheduler.core.scheduler import Scheduler
from poise.scheduler.core.settings import Cadence
from poise.scheduler.core.state import SchedulerState
from poise.scheduler.model.action import JournalEntry, Preempt
from poise.scheduler.policies.catalogue import POLICIES, PolicyProperty
from poise.scheduler.policies.listing import Family

DEALING = ("hlas:lease=400", "hlas:lease=400,long=0.01", "hlas:lease=400,long=0.2")
"""With leases so long that no gang waits for one: then GPUs would be kept for it."""
CONSERVING = [
    spec
    for spec in (*ORDERS, *POLICIES)
    if PolicyProperty.WORK_CONSERVING in (listing := POLICIES[spec.split(":")[0]]).claims
    and listing.family is not Family.MARKET
]
"""Policies that leave nothing idle which a job could use, be it a part of its gang. Markets think in whole gangs."""


def at_every_change(policy: list[str], *, trouble: bool = True) -> st.SearchStrategy[World]:
    specs = st.sampled_from(policy)
    return worlds(policy=specs, cadence=st.just(Cadence.EVENTS), plain=True, divides=True, trouble=trouble)


def rows_that_divide(state: SchedulerState) -> list[int]:
    return [row for row in state.active if state.columns.tasks[row]]


def check_idle(state: SchedulerState, entry: JournalEntry) -> None:
    """Of the GPUs that are free, no waiting job could use enough."""
    for shape in state.waiting_shapes.values():
        need, types = (shape.gang, shape.types) if shape.tasks is None else (1, shape.tasks.types)
        assert all(state.free.idle[kind] < need for kind in types), (
            f"{entry}: {state.free.idle} for {shape.gang} {shape.tasks}"
        )


@given(at_every_change([*CONSERVING, *DEALING]))
def test_no_gpu_idles_that_a_waiting_job_could_use(world: World) -> None:
    """A planner does not see whom the core protects: what it meant to take from them it does not take elsewhere at once."""
    assume(world.policy not in DEALING or not world.settings.minimum_run)
    world.played(lambda scheduler, entry: check_idle(scheduler.state, entry))


@given(at_every_change([spec for spec in ORDERS if spec in CONSERVING]))
def test_no_gpu_idles_with_which_a_running_job_would_be_faster(world: World) -> None:
    """But where distance costs more than it would bring."""

    def check(scheduler: Scheduler, entry: JournalEntry) -> None:
        state = scheduler.state
        for row in rows_that_divide(state):
            tasks = state.estimate(row).tasks
            if state.running(row) and tasks is not None and not tasks.suffers_from_distance:
                has = state.topology.mix(state.of(row))
                more = tasks.fewest([mine + free for mine, free in zip(has, state.free.idle, strict=True)])
                now, then = tasks.step_seconds(has, 0), tasks.step_seconds(more or has, 0)
                assert then == pytest.approx(now) or (then or 0.0) > (now or 0.0), f"{entry}: {has} of {state.free.idle}"

    world.played(check)


@given(worlds(divides=True))
def test_speed_is_that_of_the_best_split_and_no_gpu_is_of_no_use(world: World) -> None:
    seen = 0

    def check(scheduler: Scheduler, _entry: JournalEntry) -> None:
        nonlocal seen
        state, columns = scheduler.state, scheduler.state.columns
        for row in (row for row in rows_that_divide(state) if state.running(row)):
            estimate, holding = state.estimate(row), state.of(row)
            mix = state.topology.mix(holding)
            assert estimate.tasks is not None
            assert sum(mix) == columns.gpus[row] <= columns.tasks[row] - columns.ready[row] % columns.tasks[row]
            assert all(estimate.tasks.seconds[kind] > 0 for kind, gpus in enumerate(mix) if gpus)
            if state.protected.get(row) != inf:  # it is not computing task by task
                assert columns.rate[row] == pytest.approx(estimate.on(mix, state.topology.locality(holding)))
            seen += 1

    world.played(check)
    event("divided" if seen else "nobody divides")


@given(worlds(divides=True))
def test_tasks_ready_are_all_of_them_but_for_those_of_the_round_under_way(world: World) -> None:
    def check(scheduler: Scheduler, _entry: JournalEntry) -> None:
        state, columns = scheduler.state, scheduler.state.columns
        for row in rows_that_divide(state):
            is_tasked = state.protected.get(row) == inf
            assert (columns.ready[row] < columns.tasks[row]) == is_tasked
        assert state.divisible == sum(columns.tasks[row] > 0 for row in (*state.active, *state.suspended))

    world.played(check)


@given(worlds(policy=st.sampled_from(["hlas:lease=4,long=0.01", "hlas:lease=3,long=0.01,guard=on"])))
def test_tasks_are_never_preempted(world: World) -> None:
    story = world.played()
    divides = {each.job.id for each in world.jobs if each.job.micro_batches is not None}
    trials = {(run.job, run.epoch) for run in story.runs if story.is_trial(run.gpus)}
    stopped = {(action.job, action.epoch) for _, action in story.actions(Preempt) if action.job in divides}
    assert stopped <= trials
