"""Waiting for locality, defragmentation, trials and retries by cause do what they say under any policy, in any world."""

from collections.abc import Iterator
from itertools import zip_longest

from hypothesis import given
from hypothesis import strategies as st
from tests.builders import Run, Story
from tests.strategies import ORDERS, World, worlds

from poise.scheduler.core.settings import RetryRule
from poise.scheduler.model.action import Launch, Preempt, PreemptionCause
from poise.scheduler.model.cluster import gpu_count
from poise.scheduler.model.event import Failed
from poise.scheduler.model.failures import Verdict, verdict
from poise.scheduler.model.plan import Order, PreemptionRule
from poise.scheduler.model.speed import Locality
from poise.scheduler.model.topology import Topology
from poise.scheduler.policies.catalogue import POLICIES, policy_named
from poise.scheduler.policies.listing import Family


def successions(story: Story, job: str) -> Iterator[tuple[Run, Run | None]]:
    """Each run of a job and the next one."""
    runs = story.runs_of(job)
    yield from zip_longest(runs, runs[1:])


@given(worlds())
def test_a_gang_is_spread_only_after_it_has_waited_for_less(world: World) -> None:
    """Or where the cluster has no room for it in one place at all, or a running job is moved by its policy.

    Policies that choose nodes themselves get what they ask for.
    """
    name = world.policy.partition("+")[0].partition(":")[0]
    if world.placement == "count" or name not in POLICIES or POLICIES[name].family is Family.MARKET:
        return
    story = world.played()
    state, topology = story.scheduler.state, Topology(world.cluster)
    moved = {
        (action.job, action.epoch + 1)
        for _, action in story.actions(Preempt)
        if action.why in (PreemptionCause.MOVED, PreemptionCause.RESIZED)
    }
    for now, launch in story.actions(Launch):
        row = state.rows[launch.job]
        gpu_type = topology.type_of[launch.gpus[0].node]
        wanted = state.shape(row, Locality.PACKED, (gpu_type,), gpu_count(launch.gpus)).locality
        if (launch.job, launch.epoch) not in moved and topology.locality(launch.gpus) > wanted:
            assert sum(launch.waited) >= world.settings.packed_wait - 1e-9, (now, launch)


NEVER_PREEMPTING = [
    spec
    for spec in ORDERS
    if isinstance(order := policy_named(spec).answer, Order) and order.preemption is PreemptionRule.NEVER
]


@given(worlds(policy=st.sampled_from(NEVER_PREEMPTING)))
def test_who_is_moved_to_make_room_stays_on_its_type_and_on_one_node(world: World) -> None:
    """Who can use any mix of GPUs may also be moved to better ones."""
    story, topology = world.played(), Topology(world.cluster)
    for each in (each for each in world.jobs if each.job.micro_batches is None):
        for run, after in successions(story, each.job.id):
            if isinstance(run.ending, Preempt) and run.ending.why is PreemptionCause.MOVED:
                assert after is not None
                assert len(run.gpus) == len(after.gpus) == 1
                assert topology.type_of[after.gpus[0].node] == topology.type_of[run.gpus[0].node]
                assert run.seconds >= world.settings.defragment - 1e-9 > -1e-9


@given(worlds())
def test_a_gang_runs_only_after_a_trial_that_it_passed_or_that_nobody_could_give(world: World) -> None:
    story = world.played()
    state, lost = story.scheduler.state, {outage.node for outage in world.outages}
    pool = state.pool
    if any(slots.node in lost for slots in pool.slots):
        return
    for each in world.jobs:
        runs = story.runs_of(each.job.id)
        is_gang = state.columns.gang[state.rows[each.job.id]] > 1
        if pool and runs and is_gang and not each.job.gpu_types and len(world.cluster.gpu_types) == 1:
            trials = [run for run in runs if story.is_trial(run.gpus)]
            assert trials == runs[: len(trials)]
            assert trials
            assert all(isinstance(run.ending, Failed) for run in trials[:-1])
            if len(trials) < len(runs):
                assert isinstance(trials[-1].ending, Preempt)
                assert trials[-1].ending.why is PreemptionCause.VALIDATED


@given(worlds())
def test_retries_go_by_cause_where_they_are_to(world: World) -> None:
    story, how = world.played(), world.settings
    for each in world.jobs:
        for run, after in successions(story, each.job.id):
            if isinstance(run.ending, Failed) and how.retry is RetryRule.CAUSE and after is not None:
                outlook = verdict(run.ending.cause)
                assert outlook is not Verdict.HOPELESS
                if outlook is Verdict.TRANSIENT and not story.is_trial(run.gpus):
                    assert after.began >= run.ended + how.backoff - 1e-9
