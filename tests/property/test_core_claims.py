"""What the catalogue claims of its policies holds in random worlds."""

from dataclasses import replace
from math import inf

from hypothesis import given
from hypothesis import strategies as st
from tests.strategies import STABLE, VARIANTS, World, worlds

from poise.lab.conformance.laws import needs_lengths, out_of_order, preempts, room_for_a_gang
from poise.scheduler.core.scheduler import Scheduler
from poise.scheduler.core.settings import Cadence
from poise.scheduler.model.action import JournalEntry, Reject, Remark
from poise.scheduler.model.event import Submitted
from poise.scheduler.policies.catalogue import COMBINATORS, POLICIES, PolicyProperty

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
    assert preempts(*world.judged(world.played())) is None


@given(worlds(policy=claiming(PolicyProperty.IN_ORDER), plain=True))
def test_a_policy_that_claims_order_starts_jobs_in_the_order_of_submission(world: World) -> None:
    """Where a policy deals out shares, those that start in one decision start in any order."""
    assert out_of_order(*world.judged(world.played())) is None


def assert_no_waiting_gang_fits(scheduler: Scheduler, entry: JournalEntry) -> None:
    assert room_for_a_gang(scheduler) is None, entry


@given(worlds(policy=claiming(PolicyProperty.WORK_CONSERVING), cadence=st.just(Cadence.EVENTS), plain=True))
def test_a_work_conserving_policy_leaves_no_room_for_a_waiting_gang(world: World) -> None:
    world.played(assert_no_waiting_gang_fits)


@given(worlds(policy=claiming(PolicyProperty.NO_DURATIONS)))
def test_a_policy_that_needs_no_durations_does_the_same_without_them(world: World) -> None:
    assert needs_lengths(*world.judged(world.played())) is None


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
