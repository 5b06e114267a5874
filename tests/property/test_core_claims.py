"""What the catalogue claims of its policies holds in random worlds."""

from dataclasses import replace
from math import inf

from hypothesis import given
from hypothesis import strategies as st
from tests.strategies import STABLE, VARIANTS, World, worlds

from poise.assembly import planned
from poise.core.scheduler import Scheduler
from poise.core.settings import Cadence
from poise.model.action import Preempt, Why
from poise.model.event import Event, Submitted
from poise.model.journal import Entry
from poise.placement.strategies import placement_named
from poise.policies.catalogue import COMBINATORS, POLICIES, Claim, policy_named

EVERYTHING = (*POLICIES, *VARIANTS, *STABLE, *(f"{name}+agnostic" for name in POLICIES))


def claiming(claim: Claim) -> st.SearchStrategy[str]:
    """Specifications of policies that make a claim; combinators change none of them."""
    return st.sampled_from([spec for spec in EVERYTHING if claim in POLICIES[spec.split("+")[0].split(":")[0]].claims])


def test_every_policy_of_the_catalogue_claims_something() -> None:
    assert all(listing.claims for listing in POLICIES.values())
    assert COMBINATORS


@given(worlds(policy=claiming(Claim.NO_PREEMPTION)))
def test_a_policy_that_claims_never_to_preempt_never_does(world: World) -> None:
    """Jobs are moved where the settings ask for it, and trials end."""
    whys = {wish.why for _, wish in world.played().actions(Preempt)}
    assert whys <= {Why.MOVED, Why.VALIDATED}
    assert Why.MOVED not in whys or world.settings.defragment
    assert Why.VALIDATED not in whys or world.settings.validation_gpus


@given(worlds(policy=claiming(Claim.IN_ORDER), plain=True))
def test_a_policy_that_claims_order_starts_jobs_in_the_order_of_submission(world: World) -> None:
    starts = world.played().starts
    assert list(starts) == [each.job.id for each in world.jobs if each.job.id in starts]


def assert_no_waiting_gang_fits(scheduler: Scheduler, entry: Entry) -> None:
    state = scheduler.state
    for shape in state.waiting_shapes.values():
        for gpu_type in shape.types:
            assert state.free.idle[gpu_type] < shape.gang, f"{entry}: {shape.gang} GPUs of type {gpu_type} are idle"


@given(worlds(policy=claiming(Claim.WORK_CONSERVING), cadence=st.just(Cadence.EVENTS), plain=True))
def test_a_work_conserving_policy_leaves_no_room_for_a_waiting_gang(world: World) -> None:
    world.played(assert_no_waiting_gang_fits)


def without_durations(events: tuple[Event, ...]) -> list[Event]:
    return [replace(event, steps=inf) if isinstance(event, Submitted) else event for event in events]


@given(worlds(policy=claiming(Claim.NO_DURATIONS)))
def test_a_policy_that_needs_no_durations_does_the_same_without_them(world: World) -> None:
    story = world.played()
    blind = Scheduler(
        world.cluster, planned(policy_named(world.policy), world.settings), placement_named(world.placement), world.settings
    )
    for now, events, actions in story.entries:
        assert blind.handle(now, without_durations(events)) == actions
