"""Failed runs: forgiven by their count, or by what they died of."""

from dataclasses import replace
from itertools import pairwise

import pytest
from tests.builders import EVENTS, Story, a_job, simulate

from poise.lab.traces.schema import FailedAttempt, TraceJob
from poise.scheduler.core.lifecycle import MOST_DOUBLINGS
from poise.scheduler.core.reasons import Code
from poise.scheduler.core.settings import RetryRule, Settings
from poise.scheduler.model.action import Launch
from poise.scheduler.model.errors import RequestError
from poise.scheduler.model.event import Cancelled, Failed, Held, Released, Woke
from poise.scheduler.model.job import Status

BY_CAUSE = replace(EVENTS, retry=RetryRule.CAUSE, backoff=60.0)


def dying(*deaths: tuple[float, str], gpus: int = 1, seconds: float = 1000.0) -> TraceJob:
    """A job whose attempts die after so long, of these causes."""
    return replace(a_job("a", gpus=gpus, seconds=seconds), failures=tuple(FailedAttempt(*each) for each in deaths))


def launches(story: Story) -> list[float]:
    return [now for now, _ in story.actions(Launch)]


@pytest.mark.parametrize("cause", ["syntax-error", "import-error", "gpu-out-of-memory"])
def test_what_no_retry_heals_is_given_up_at_once(cause: str) -> None:
    story = simulate([dying((10, cause))], settings=BY_CAUSE)
    assert launches(story) == [0]
    assert story.status("a") is Status.FAILED
    assert story.scheduler.explain("a").text == f"run 1 failed: {cause}, which no retry heals"


def test_what_no_retry_heals_is_retried_where_failures_are_counted() -> None:
    story = simulate([dying((10, "syntax-error"))], settings=replace(EVENTS, backoff=60.0))
    assert launches(story) == [0, 10]
    assert story.status("a") is Status.FINISHED


def test_what_passes_is_tried_again_after_a_back_off_that_doubles() -> None:
    story = simulate([dying((10, "network-error"), (20, "gpu-ecc-error"), (5, "network-error"))], settings=BY_CAUSE)
    assert launches(story) == [0, 10 + 60, 90 + 120, 215 + 240]
    assert [launch.waited for _, launch in story.actions(Launch)] == [(0, 0, 0), (60, 0, 0), (120, 0, 0), (240, 0, 0)]


def test_what_nobody_can_tell_is_tried_again_at_once() -> None:
    assert launches(simulate([dying((10, "core-dump"), (10, "never heard of"))], settings=BY_CAUSE)) == [0, 10, 20]


def test_no_more_runs_are_forgiven_than_retries_say_whatever_the_cause() -> None:
    how = replace(BY_CAUSE, retries=1, backoff=1.0)
    story = simulate([dying((10, "network-error"), (10, "network-error"))], settings=how)
    assert story.status("a") is Status.FAILED
    assert story.scheduler.explain("a").text == "run 2 failed: network-error"


def test_a_job_that_backs_off_leaves_its_gpus_to_others_and_says_why_it_waits() -> None:
    jobs = [dying((10, "network-error"), gpus=4), a_job("other", at=5, gpus=4, seconds=30)]
    story = simulate(jobs, settings=BY_CAUSE, until=20)
    assert story.starts["other"] == 10
    reason = story.scheduler.explain("a")
    assert reason.code is Code.HELD
    assert reason.text == "is tried again later, after 1 failed run"
    assert story.scheduler.backs_off_until("a") == 70
    assert story.scheduler.backs_off_until("other") is None


@pytest.mark.parametrize("policy", ["fifo", "srtf", "tiresias", "max-min", "stride"])
def test_a_back_off_of_no_time_is_none(policy: str) -> None:
    how = replace(BY_CAUSE, backoff=0.0)
    assert launches(simulate([dying((10, "network-error"))], policy, settings=how)) == [0, 10]


def test_a_back_off_is_doubled_so_often_and_no_more() -> None:
    deaths = [(1.0, "network-error")] * (MOST_DOUBLINGS + 3)
    how = replace(BY_CAUSE, backoff=1.0, retries=2000)
    moments = launches(simulate([dying(*deaths)], settings=how))
    gaps = [late - early - 1.0 for early, late in pairwise(moments)]
    assert gaps[:4] == [1, 2, 4, 8]
    assert gaps[-2:] == [2.0**MOST_DOUBLINGS] * 2


@pytest.mark.parametrize("cause", ["core-dump", "network-error"])
def test_a_retry_goes_on_from_the_last_checkpoint_and_the_core_knows_it(cause: str) -> None:
    """Checkpoints every 600 s of running time: of 700 s the last 100 are lost."""
    story = simulate([dying((700, cause))], settings=replace(BY_CAUSE, backoff=0.0))
    assert [fact.steps for _, fact in story.events(Failed)] == [600]
    assert story.finishes == {"a": 1100}
    state = story.scheduler.state
    assert state.columns.steps_done[state.rows["a"]] == 1000


def test_a_job_cancelled_while_it_backs_off_is_not_tried_again() -> None:
    story = simulate([dying((10, "network-error"))], settings=BY_CAUSE, until=20)
    scheduler = story.scheduler
    scheduler.handle(30.0, [Cancelled("a")])
    assert scheduler.handle(70.0, [Woke()]) == ()
    assert scheduler.explain("a").code is Code.CANCELLED


def test_a_job_that_its_owner_did_not_let_wait_backs_off_in_full_after_its_next_failure() -> None:
    scheduler = simulate([dying((10, "network-error"))], settings=BY_CAUSE, until=20).scheduler
    scheduler.handle(30.0, [Held("a")])
    assert scheduler.backs_off_until("a") is None
    assert [type(each) for each in scheduler.handle(31.0, [Released("a")])][:1] == [Launch]
    scheduler.handle(40.0, [Failed("a", 2, "network-error", 0.0)])
    assert scheduler.backs_off_until("a") == 160
    for moment in (70.0, 159.0):
        assert not any(isinstance(each, Launch) for each in scheduler.handle(moment, [Woke()]))
    assert any(isinstance(each, Launch) for each in scheduler.handle(160.0, [Woke()]))
    assert scheduler.backs_off_until("a") is None


@pytest.mark.parametrize("backoff", [-1.0, float("inf"), float("nan")])
def test_settings_refuse_a_back_off_that_is_no_time(backoff: float) -> None:
    with pytest.raises(RequestError, match="back-off"):
        Settings(backoff=backoff)
