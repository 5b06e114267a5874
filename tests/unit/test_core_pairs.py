"""Plans that stop jobs which share their GPUs: stops that were for nobody are undone, of both."""

from dataclasses import replace

from tests.builders import Story, a_job, simulate
from tests.whims import a_plan, scripted

from poise.lab.traces.schema import TraceJob
from poise.scheduler.model.action import Preempt
from poise.scheduler.model.job import Yields
from poise.scheduler.model.plan import Claim, Plan, StopMode

PAIR = [a_job("a"), a_job("b")]
"""Two jobs of 10 s; each has half its speed beside the other."""


def played(at_5: Plan, *others: TraceJob, pair: list[TraceJob] = PAIR) -> Story:
    """What becomes of two jobs that share a GPU from 0 on, and of others, if that is the plan at 5."""
    plans = {0.0: a_plan(Claim(0, beside=1)), 5.0: at_5}
    return simulate([*pair, *others], scripted(plans), "gpu:1", until=100.0)


def preempted(story: Story) -> list[tuple[str, str | None]]:
    return [(action.job, action.beneficiary) for _, action in story.actions(Preempt)]


def test_two_that_are_stopped_for_nobody_go_on_together() -> None:
    story = played(a_plan(stops=(0, 1)))
    assert preempted(story) == []
    assert story.finishes == {"a": 20.0, "b": 20.0}
    assert story.scheduler.state.free.idle == [1]


def test_two_whose_gpu_somebody_takes_both_make_way_for_it() -> None:
    story = played(a_plan(Claim(2), stops=(0, 1)), a_job("c", at=1.0))
    assert preempted(story) == [("a", "c"), ("b", "c")]
    assert story.finishes == {"c": 15.0}


def test_one_that_is_stopped_by_itself_makes_way_for_its_partner() -> None:
    story = played(a_plan(stops=(1,)))
    assert [job for job, _ in preempted(story)] == ["b"]
    assert story.finishes == {"a": 12.5}


def test_one_whose_partner_cannot_be_stopped_with_it_goes_on_too() -> None:
    firm = [PAIR[0], replace(PAIR[1], job=replace(PAIR[1].job, yields=Yields.NEVER))]
    assert played(a_plan(stops=(0, 1)), pair=firm).finishes == {"a": 20.0, "b": 20.0}


def test_one_whose_place_somebody_takes_beside_its_partner_makes_way_for_it() -> None:
    """b may not be stopped; c is put beside it."""
    firm = [PAIR[0], replace(PAIR[1], job=replace(PAIR[1].job, yields=Yields.NEVER))]
    story = played(a_plan(Claim(1, beside=2), stops=(0, 1)), a_job("c", at=1.0), pair=firm)
    assert preempted(story) == [("a", "c")]
    assert set(story.finishes) == {"b", "c"}


def test_firm_stops_are_of_both() -> None:
    assert [job for job, _ in preempted(played(a_plan(stops=(0, 1), stopping=StopMode.FIRM)))] == ["a", "b"]
