"""Claims for other numbers of GPUs than the gang, jobs given up, and jobs held back for their tenant's share."""

from dataclasses import replace
from typing import Any

import pytest
from tests.builders import EVENTS, a_job, nodes, simulate
from tests.whims import a_plan, scripted

from poise.lab.analysis.history import History
from poise.lab.traces.schema import TraceJob
from poise.scheduler.core.reasons import Code
from poise.scheduler.model.action import Cancel, Entitled, Launch, Preempt, PreemptionCause
from poise.scheduler.model.cluster import gpu_count
from poise.scheduler.model.errors import InvariantError
from poise.scheduler.model.job import Status
from poise.scheduler.model.plan import Claim, JobEnding
from poise.scheduler.model.speed import Locality


def elastic(name: str, least: int, most: int, **fields: Any) -> TraceJob:
    """A job that can do with so many GPUs; with k of them it is as fast as k."""
    job = a_job(name, **fields)
    return replace(job, job=replace(job.job, min_gpus=least, max_gpus=most))


@pytest.mark.parametrize("types", [None, (0,)])
def test_a_claim_for_more_gpus_resizes_a_running_job(types: tuple[int, ...] | None) -> None:
    """10 of 40 s are done on 4 GPUs; on 8 the rest takes 15 s."""
    plans = {0.0: a_plan(Claim(0)), 10.0: a_plan(Claim(0, types=types, gpus=8))}
    story = simulate([elastic("a", 1, 8, gpus=4, seconds=40)], scripted(plans), "gpu:8")
    assert [gpu_count(run.gpus) for run in story.runs] == [4, 8]
    assert [(now, action.why) for now, action in story.actions(Preempt)] == [(10, PreemptionCause.RESIZED)]
    assert story.finishes == {"a": 25}
    life = History.of(story.entries, story.cluster).jobs["a"]
    assert life.gpu_seconds == 10 * 4 + 15 * 8


def test_a_claim_for_fewer_gpus_makes_room_for_others_in_the_same_decision() -> None:
    jobs = [elastic("wide", 1, 4, gpus=4, seconds=40), a_job("other", at=10, gpus=2, seconds=5)]
    plans = {0.0: a_plan(Claim(0)), 10.0: a_plan(Claim(0, gpus=2), Claim(1))}
    story = simulate(jobs, scripted(plans), "gpu:4")
    assert story.starts["other"] == 10
    assert story.finishes == {"other": 15, "wide": 70}


@pytest.mark.parametrize("claim", [Claim(0), Claim(0, gpus=2), Claim(0, Locality.PACKED, (0,), gpus=2)])
def test_a_claim_for_what_the_job_has_changes_nothing(claim: Claim) -> None:
    plans = {0.0: a_plan(Claim(0, gpus=2)), 10.0: a_plan(claim)}
    story = simulate([elastic("a", 1, 4, gpus=2, seconds=40)], scripted(plans))
    assert story.preemptions == 0


def test_a_resize_that_finds_no_room_leaves_the_job_as_it_is() -> None:
    jobs = [elastic("a", 1, 4, gpus=2, seconds=40), a_job("b", gpus=2, seconds=40)]
    story = simulate(jobs, scripted({0.0: a_plan(Claim(0), Claim(1)), 10.0: a_plan(Claim(0, gpus=3))}))
    assert story.preemptions == 0
    assert story.finishes["a"] == 40


@pytest.mark.parametrize("gpus", [1, 5])
def test_a_claim_beyond_what_a_job_can_do_with_is_a_bug_of_the_planner(gpus: int) -> None:
    with pytest.raises(InvariantError, match="needs 2 to 4 GPUs"):
        simulate([elastic("a", 2, 4, gpus=3)], scripted({0.0: a_plan(Claim(0, gpus=gpus))}), "gpu:8")


def test_a_job_that_waits_for_another_number_says_so() -> None:
    jobs = [a_job("b", gpus=3, seconds=40), elastic("a", 1, 4, gpus=4)]
    story = simulate(jobs, scripted({0.0: a_plan(Claim(0), Claim(1, gpus=2))}), until=5)
    assert story.scheduler.explain("a").text == "needs 2 GPUs at once; free now: 1 gpu"


def test_an_ending_frees_gpus_for_the_claims_of_the_same_plan() -> None:
    jobs = [a_job("loser", gpus=4, seconds=1000), a_job("next", at=10, gpus=4, seconds=5)]
    plans = {0.0: a_plan(Claim(0)), 10.0: a_plan(Claim(1), ends=(JobEnding(0, "its app has a better one"),))}
    story = simulate(jobs, scripted(plans))
    assert story.actions(Cancel) == [(10, Cancel("loser", "its app has a better one"))]
    assert story.preemptions == 0
    assert story.starts["next"] == 10
    assert story.status("loser") is Status.CANCELLED
    assert story.scheduler.explain("loser").text == "its app has a better one"
    lives = History.of(story.entries, story.cluster).jobs
    assert (lives["loser"].gpu_seconds, lives["loser"].ended, lives["loser"].status) == (40, 10, Status.CANCELLED)


def test_an_ending_of_a_waiting_job_ends_its_wait() -> None:
    jobs = [a_job("runs", gpus=4, seconds=20), a_job("waits", gpus=4)]
    story = simulate(jobs, scripted({0.0: a_plan(Claim(0), Claim(1)), 10.0: a_plan(ends=(JobEnding(1, "enough"),))}))
    assert story.status("waits") is Status.CANCELLED
    assert not story.scheduler.state.waiting_shapes
    assert History.of(story.entries, story.cluster).waiting[-1] == (10, -1)


def test_a_job_held_back_waits_for_its_tenants_share_whatever_is_free() -> None:
    jobs = [a_job("runs", gpus=4, seconds=30), a_job("held", gpus=4)]
    held = a_plan(over_share=(1,))
    plans = {0.0: a_plan(Claim(0), over_share=(1,)), 20.0: held, 30.0: held, 50.0: a_plan(Claim(1))}
    story = simulate(jobs, scripted(plans), until=40)
    assert story.scheduler.explain("held").code is Code.SHARE
    assert story.scheduler.explain("held").text == "would take tenant default beyond its share of the cluster"
    story = simulate(jobs, scripted(plans))
    assert [launch.waited for _, launch in story.actions(Launch) if launch.job == "held"] == [(50, 0, 0)]


def test_a_job_that_the_next_plan_does_not_hold_back_waits_for_something_else() -> None:
    jobs = [a_job("runs", gpus=4, seconds=50), a_job("waits", gpus=4)]
    plans = {0.0: a_plan(Claim(0), over_share=(1,)), 20.0: a_plan(), 50.0: a_plan(Claim(1))}
    story = simulate(jobs, scripted(plans))
    assert [launch.waited for _, launch in story.actions(Launch) if launch.job == "waits"] == [(20, 0, 30)]


def test_a_job_that_a_plan_stops_and_holds_back_waits_for_its_share() -> None:
    jobs = [a_job("over", gpus=4, seconds=30), a_job("other", at=10, gpus=4, seconds=20)]
    plans = {0.0: a_plan(Claim(0)), 10.0: a_plan(Claim(1), stops=(0,), over_share=(0,)), 30.0: a_plan(Claim(0))}
    story = simulate(jobs, scripted(plans), until=20)
    assert story.scheduler.explain("over").code is Code.SHARE
    story = simulate(jobs, scripted(plans))
    assert [launch.waited for _, launch in story.actions(Launch) if launch.job == "over"] == [(0, 0, 0), (20, 0, 0)]


def test_a_job_that_was_held_back_once_is_not_for_ever() -> None:
    jobs = [a_job("a", gpus=4, seconds=30), a_job("b", at=20, gpus=4, seconds=10)]
    plans = {
        0.0: a_plan(over_share=(0,)),
        10.0: a_plan(Claim(0)),
        20.0: a_plan(Claim(1), stops=(0,)),
        30.0: a_plan(Claim(0)),
    }
    story = simulate(jobs, scripted(plans))
    assert [launch.waited for _, launch in story.actions(Launch) if launch.job == "a"] == [(10, 0, 0), (0, 0, 10)]


def test_stops_of_jobs_that_do_not_run_and_holds_of_jobs_that_do_mean_nothing() -> None:
    jobs = [a_job("a", gpus=2, seconds=30), a_job("b", gpus=4, seconds=30)]
    plans = {0.0: a_plan(Claim(0)), 10.0: a_plan(stops=(1,), over_share=(0,)), 30.0: a_plan(Claim(1))}
    story = simulate(jobs, scripted(plans))
    assert story.finishes == {"a": 30, "b": 60}


def test_notes_of_a_plan_go_into_the_journal_before_its_launches() -> None:
    note = Entitled("default", (4.0,))
    story = simulate([a_job("a")], scripted({0.0: a_plan(Claim(0), notes=(note,))}))
    assert story.entries[0].actions[0] == note


def test_elastic_jobs_under_an_order_get_the_gang_that_they_ask_for() -> None:
    story = simulate([elastic("a", 1, 8, gpus=4, seconds=10)], "srtf", nodes(8), settings=EVENTS)
    assert [gpu_count(run.gpus) for run in story.runs] == [4]
