"""What the catalogue claims of its policies holds in random worlds."""

from dataclasses import replace
from math import inf

from hypothesis import given
from hypothesis import strategies as st
from tests.strategies import STABLE, VARIANTS, World, worlds

from poise.engine.assembly import with_rounds
from poise.lab.simulator.outages import Drain
from poise.scheduler.core.scheduler import Scheduler
from poise.scheduler.core.settings import Cadence
from poise.scheduler.model.action import Compute, JournalEntry, Launch, Preempt, PreemptionCause, Reject, Remark
from poise.scheduler.model.event import Event, Submitted
from poise.scheduler.model.plan import Order
from poise.scheduler.placement.strategies import placement_named
from poise.scheduler.policies.catalogue import COMBINATORS, POLICIES, PolicyProperty, policy_named

EVERYTHING = (*POLICIES, *VARIANTS, *STABLE, *(f"{name}+agnostic" for name in POLICIES))


def claiming(claim: PolicyProperty) -> st.SearchStrategy[str]:
    """Specifications of policies that make a claim; combinators change none of them."""
    return st.sampled_from([spec for spec in EVERYTHING if claim in POLICIES[spec.split("+")[0].split(":")[0]].claims])


def test_every_policy_of_the_catalogue_claims_something() -> None:
    assert all(listing.claims for listing in POLICIES.values())
    assert COMBINATORS


@given(worlds(policy=claiming(PolicyProperty.NO_PREEMPTION)))
def test_a_policy_that_claims_never_to_preempt_never_does(world: World) -> None:
    """Jobs are moved where the settings ask for it, or where nodes are drained, and trials end.

    Who can use any mix of GPUs may get better ones.
    """
    story = world.played()
    divides = {each.job.id for each in world.jobs if each.job.micro_batches is not None}
    assert not [
        action
        for _, action in story.actions(Preempt)
        if action.why in (PreemptionCause.OUTRANKED, PreemptionCause.UNPLANNED)
    ]
    whys = {action.why for _, action in story.actions(Preempt) if action.job not in divides}
    assert whys <= {PreemptionCause.MOVED, PreemptionCause.VALIDATED, PreemptionCause.DRAINED}
    assert PreemptionCause.DRAINED not in whys or any(isinstance(each, Drain) for each in world.outages)
    assert PreemptionCause.MOVED not in whys or world.settings.defragment
    assert PreemptionCause.VALIDATED not in whys or world.settings.validation_gpus


@given(worlds(policy=claiming(PolicyProperty.IN_ORDER), plain=True))
def test_a_policy_that_claims_order_starts_jobs_in_the_order_of_submission(world: World) -> None:
    """Where a policy deals out shares, those that start in one decision start in any order."""
    story = world.played()
    queue = [each.job.id for each in world.jobs if each.job.id in story.starts]
    first: dict[str, int] = {}
    for number, entry in enumerate(story.entries):
        for action in entry.actions:
            if isinstance(action, Launch | Compute):
                first.setdefault(action.job, number)
    assert [first[job] for job in queue] == sorted(first.values())
    if isinstance(policy_named(world.policy).answer, Order):
        assert list(story.starts) == queue


def assert_no_waiting_gang_fits(scheduler: Scheduler, entry: JournalEntry) -> None:
    state = scheduler.state
    for shape in state.waiting_shapes.values():
        for gpu_type in shape.types:
            assert state.free.idle[gpu_type] < shape.gang, f"{entry}: {shape.gang} GPUs of type {gpu_type} are idle"


@given(worlds(policy=claiming(PolicyProperty.WORK_CONSERVING), cadence=st.just(Cadence.EVENTS), plain=True))
def test_a_work_conserving_policy_leaves_no_room_for_a_waiting_gang(world: World) -> None:
    world.played(assert_no_waiting_gang_fits)


def without_durations(events: tuple[Event, ...]) -> list[Event]:
    return [replace(event, steps=inf) if isinstance(event, Submitted) else event for event in events]


@given(worlds(policy=claiming(PolicyProperty.NO_DURATIONS)))
def test_a_policy_that_needs_no_durations_does_the_same_without_them(world: World) -> None:
    story = world.played()
    blind = Scheduler(
        world.cluster,
        with_rounds(policy_named(world.policy), world.settings),
        placement_named(world.placement),
        world.settings,
    )
    for now, events, actions in story.entries:
        assert blind.handle(now, without_durations(events)) == actions


@given(worlds(policy=st.sampled_from([spec for spec in EVERYTHING if spec.startswith("hare") and "+" not in spec])))
def test_what_no_schedule_can_be_below_is_not_gone_below(world: World) -> None:
    """Of the jobs that were there when it was said, if all of them did all their work, on the GPUs that there were.

    Those are all GPUs of the cluster: none is lost, and none is set aside for trials.
    """
    story = replace(world, outages=[], settings=replace(world.settings, validation_gpus=0)).played()
    ends = story.finishes
    jobs = {fact.job.id: (now, fact.job.weight) for now, fact in story.events(Submitted)}
    for _, action in story.actions(Reject):
        del jobs[action.job]
    for said, remark in story.actions(Remark):
        there = {job: weight for job, (at, weight) in jobs.items() if at <= said <= ends.get(job, inf)}
        if there.keys() <= ends.keys():
            bound = float(remark.text.split("none below ")[1].split(" s is")[0])
            assert bound <= sum(weight * (ends[job] - said) for job, weight in there.items()) * (1 + 1e-5) + 1e-5
