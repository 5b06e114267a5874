"""The simulated world: exact times, truth apart from belief, what failures and lost nodes cost. Numbers by hand."""

from math import inf

import pytest
from tests.builders import Story, a_job, a_table, nodes, simulate

from poise.lab.simulator.outages import Outage
from poise.lab.simulator.world import Truth
from poise.lab.traces.schema import JobOutcome, TraceJob
from poise.scheduler.core.settings import Cadence, Settings
from poise.scheduler.model.action import Abandon, Reject
from poise.scheduler.model.event import (
    Cancelled,
    Estimated,
    Failed,
    Finished,
    NodeLost,
    NodeReturned,
    Stopped,
    Submitted,
    Woke,
)
from poise.scheduler.model.job import Job, Status

ROUNDS = Settings(cadence=Cadence.ROUNDS, round=100)


def a_steps_job(name: str, steps: float, *, at: float = 0.0) -> TraceJob:
    """A job that states its work in steps of the model `net`."""
    return TraceJob(Job(name, at, 1, steps=steps, model="net"))


def runs(story: Story) -> list[tuple[str, float, float]]:
    return [(run.job, run.began, run.ended) for run in story.runs]


def test_a_run_ends_exactly_when_its_work_is_done() -> None:
    story = simulate([a_job("a", seconds=12.375)], settings=ROUNDS)
    assert story.finishes == {"a": 12.375}


def test_inside_a_round_freed_gpus_are_given_out_at_once_with_backfill() -> None:
    jobs = [a_job("a", gpus=4, seconds=30), a_job("b", at=10, gpus=4, seconds=30)]
    assert simulate(jobs, settings=ROUNDS).starts["b"] == 30


def test_inside_a_round_freed_gpus_idle_without_backfill() -> None:
    jobs = [a_job("a", gpus=4, seconds=30), a_job("b", at=10, gpus=4, seconds=30)]
    how = Settings(cadence=Cadence.ROUNDS, round=100, backfill=False)
    assert simulate(jobs, settings=how).starts["b"] == 100


def test_rounds_are_counted_from_the_first_arrival() -> None:
    how = Settings(cadence=Cadence.ROUNDS, round=100, backfill=False)
    jobs = [a_job("a", at=37, seconds=1), a_job("b", at=40, seconds=1)]
    assert simulate(jobs, settings=how).starts == {"a": 37, "b": 137}


def test_backfill_preempts_no_job() -> None:
    jobs = [a_job("long", gpus=4, seconds=300), a_job("short", at=10, gpus=4, seconds=30)]
    story = simulate(jobs, "srtf", settings=ROUNDS)
    assert runs(story) == [("long", 0, 100), ("short", 100, 130), ("long", 130, 330)]


def test_events_of_one_time_come_in_one_batch_ends_before_arrivals() -> None:
    jobs = [a_job("a", seconds=10), a_job("b", at=10, seconds=10)]
    story = simulate(jobs, cluster="gpu:1", outages=[Outage(10, 0, 5)])
    [entry] = [entry for entry in story.entries if entry.now == 10]
    assert [type(event) for event in entry.events] == [Finished, NodeLost, Submitted]


def test_the_estimate_of_a_kind_comes_once_before_its_first_job() -> None:
    story = simulate([a_job("a"), a_job("b"), a_job("c", gpus=2)])
    kinds = [type(event).__name__ for event in story.entries[0].events]
    assert kinds == ["Estimated", "Submitted", "Submitted", "Estimated", "Submitted"]
    assert len(story.events(Estimated)) == 2


def test_true_speeds_may_be_slower_than_believed_ones() -> None:
    """Believed 2 steps a second, in truth 1: 200 steps take 200 seconds, and not 100."""
    job = a_steps_job("a", 200)
    slower = simulate([job], cluster="v100:1", believed=a_table(net=2.0), true=a_table(net=1.0))
    assert slower.finishes == {"a": 200}
    assert simulate([job], cluster="v100:1", believed=a_table(net=2.0)).finishes == {"a": 100}


def test_a_duration_is_what_it_says_in_the_true_world() -> None:
    job = a_job("a", model="net", seconds=100)
    story = simulate([job], cluster="v100:1", believed=a_table(net=2.0), true=a_table(net=1.0))
    assert story.finishes == {"a": 100}


def test_a_stop_tells_the_core_the_truth_of_progress() -> None:
    """At 40 the core believes 80 of 200 steps; the world has done 40, and 160 are left at 1 a second."""
    jobs = [a_steps_job("slow", 200), a_steps_job("short", 10, at=40)]
    story = simulate(jobs, "srtf", "v100:1", believed=a_table(net=2.0), true=a_table(net=1.0))
    [(when, stop)] = story.events(Stopped)
    assert (when, stop.job, stop.steps) == (40, "slow", 40)
    assert story.finishes == {"short": 50, "slow": 210}


def test_a_restart_costs_its_overhead_every_time() -> None:
    how = Settings(cadence=Cadence.EVENTS, restart_overhead=5)
    jobs = [a_job("long", seconds=100), a_job("short", at=30, seconds=10)]
    story = simulate(jobs, "srtf", "gpu:1", settings=how)
    assert runs(story) == [("long", 0, 30), ("short", 30, 45), ("long", 45, 125)]


def test_overhead_in_the_world_is_charged_though_the_core_knows_of_none() -> None:
    assert simulate([a_job("a", seconds=10)], truth=Truth(restart_overhead=7)).finishes == {"a": 17}


def test_a_preemption_in_the_middle_of_the_overhead_loses_no_work() -> None:
    how = Settings(cadence=Cadence.EVENTS, restart_overhead=5)
    jobs = [a_job("long", seconds=100), a_job("short", at=3, seconds=10)]
    story = simulate(jobs, "srtf", "gpu:1", settings=how)
    assert runs(story) == [("long", 0, 3), ("short", 3, 18), ("long", 18, 123)]


def test_a_failed_attempt_goes_back_to_its_last_checkpoint() -> None:
    """It dies after 25 s with checkpoints every 10: 20 s of work are kept."""
    story = simulate([a_job("a", seconds=60, dies=(25,))], truth=Truth(checkpoint_every=10))
    [(_, failed)] = story.events(Failed)
    assert (failed.steps, failed.final) == (20, False)
    assert runs(story) == [("a", 0, 25), ("a", 25, 65)]


def test_an_attempt_that_would_die_after_its_work_is_done_does_not() -> None:
    story = simulate([a_job("a", seconds=20, dies=(25,))])
    assert story.finishes == {"a": 20}


def test_running_time_of_an_attempt_adds_up_over_preemptions() -> None:
    """It dies after 25 s of running, of which 10 come before it is preempted."""
    jobs = [a_job("dying", seconds=60, dies=(25,)), a_job("short", at=10, seconds=5)]
    story = simulate(jobs, "srtf", "gpu:1", truth=Truth(checkpoint_every=0))
    assert runs(story) == [("dying", 0, 10), ("short", 10, 15), ("dying", 15, 30), ("dying", 30, 65)]


def test_a_job_is_retried_as_often_as_it_may_be_and_then_abandoned() -> None:
    how = Settings(cadence=Cadence.EVENTS, retries=2)
    story = simulate([a_job("a", seconds=60, dies=(5, 5, 5, 5))], settings=how, truth=Truth(checkpoint_every=600))
    assert runs(story) == [("a", 0, 5), ("a", 5, 10), ("a", 10, 15)]
    [(when, abandon)] = story.actions(Abandon)
    assert (when, abandon.job, abandon.reason) == (15, "a", "run 3 failed: out of memory")
    assert story.status("a") is Status.FAILED


def test_retries_enough_let_a_job_finish() -> None:
    how = Settings(cadence=Cadence.EVENTS, retries=2)
    story = simulate([a_job("a", seconds=60, dies=(5, 5))], settings=how, truth=Truth(checkpoint_every=5))
    assert story.finishes == {"a": 60}


def test_a_job_whose_outcome_is_failed_fails_at_its_end_and_is_not_retried() -> None:
    story = simulate([a_job("a", seconds=10, outcome=JobOutcome.FAILED)])
    [(when, failed)] = story.events(Failed)
    assert (when, failed.final) == (10, True)
    assert story.status("a") is Status.FAILED
    assert len(story.runs) == 1


def test_a_job_that_its_owner_kills_is_cancelled_at_its_end() -> None:
    story = simulate([a_job("a", seconds=10, outcome=JobOutcome.KILLED), a_job("b", gpus=4, seconds=1)])
    assert [(when, fact.job) for when, fact in story.events(Cancelled)] == [(10, "a")]
    assert story.status("a") is Status.CANCELLED
    assert story.starts["b"] == 10


def test_a_lost_node_takes_the_work_since_the_last_checkpoint() -> None:
    """Lost at 27 with checkpoints every 10 s of running: 20 s are kept; back at 32."""
    outage = Outage(27, 0, 5)
    story = simulate([a_job("a", seconds=60)], cluster="gpu:4", outages=[outage], truth=Truth(checkpoint_every=10))
    [(_, stop)] = story.events(Stopped)
    assert stop.steps == 20
    assert runs(story) == [("a", 0, 27), ("a", 32, 72)]


def test_overhead_is_no_running_time_between_checkpoints() -> None:
    """4 s of overhead, then 23 s of work until the node is lost at 27: 20 are kept."""
    how = Settings(cadence=Cadence.EVENTS, restart_overhead=4)
    truth = Truth(restart_overhead=4, checkpoint_every=10)
    story = simulate([a_job("a", seconds=60)], settings=how, truth=truth, outages=[Outage(27, 0, 5)])
    assert runs(story) == [("a", 0, 27), ("a", 32, 76)]


def test_a_gang_goes_elsewhere_when_one_of_its_nodes_is_lost() -> None:
    story = simulate([a_job("a", gpus=4, seconds=60)], cluster=nodes(2, 2, 2), outages=[Outage(10, 1, inf)])
    assert [tuple(slots.node for slots in run.gpus) for run in story.runs] == [(0, 1), (0, 2)]


def test_runs_on_other_nodes_go_on() -> None:
    story = simulate([a_job("a", gpus=2), a_job("b", gpus=2)], cluster=nodes(2, 2), outages=[Outage(5, 1, 1)])
    assert runs(story)[0] == ("a", 0, 10)


def test_overlapping_outages_of_a_node_are_one() -> None:
    lost = [Outage(10, 0, 10), Outage(15, 0, 10), Outage(12, 0, 2), Outage(25, 0, 5), Outage(40, 0, 1)]
    story = simulate([a_job("a", seconds=60)], cluster="gpu:1", outages=lost)
    assert [now for now, _ in story.events(NodeLost)] == [10, 40]
    assert [now for now, _ in story.events(NodeReturned)] == [30, 41]


def test_a_job_waits_in_vain_for_a_node_that_does_not_return() -> None:
    story = simulate([a_job("a", seconds=60)], "stride", "gpu:1", outages=[Outage(10, 0, inf)])
    assert story.status("a") is Status.WAITING
    assert not story.finishes


def test_there_are_no_events_of_nodes_once_all_jobs_have_ended() -> None:
    story = simulate([a_job("a", seconds=5)], outages=[Outage(10, 0, 1)])
    assert story.entries[-1].now == 5


def test_until_is_the_time_of_the_last_events() -> None:
    jobs = [a_job("a", seconds=20), a_job("b", at=20, seconds=20), a_job("c", at=21)]
    story = simulate(jobs, until=20)
    assert story.entries[-1].now == 20
    assert story.finishes == {"a": 20}
    assert story.status("b") is Status.RUNNING
    assert "c" not in story.scheduler.state.rows


def test_a_job_that_can_never_run_is_rejected_when_it_arrives() -> None:
    jobs = [a_job("huge", gpus=9), a_job("wrong", gpu_types=("h100",)), a_job("fine")]
    story = simulate(jobs, cluster="v100:8")
    assert {action.job: action.reason for _, action in story.actions(Reject)} == {
        "huge": "needs 9 GPUs of one type; the cluster has at most 8 (v100)",
        "wrong": "asks for h100; the cluster has v100",
    }
    assert story.finishes == {"fine": 10}


def test_work_of_no_length_is_done_at_once() -> None:
    story = simulate([a_job("none", seconds=0), a_job("some", gpus=4, seconds=1)])
    assert story.finishes == {"none": 0, "some": 1}


def test_the_wake_up_comes_after_all_other_events() -> None:
    story = simulate([a_job("a", seconds=20), a_job("b", at=10, seconds=5)], "tiresias:limits=10", "gpu:1")
    [entry] = [entry for entry in story.entries if Woke() in entry.events]
    assert isinstance(entry.events[-1], Woke)


@pytest.mark.parametrize("placement", ["count", "consolidate", "best-fit"])
def test_speed_depends_on_how_far_apart_the_gpus_are(placement: str) -> None:
    """VGG16 on 4 P100: 103.6 steps/s on one node, 80.4 across nodes of a rack."""
    jobs = [a_job("vgg", gpus=4, seconds=100, model="VGG16", gpu_types=("p100",))]
    packed = simulate(jobs, cluster=nodes(4, gpu_type="p100"), placement=placement).finishes["vgg"]
    apart = simulate(jobs, cluster=nodes(2, 2, 2, 4, gpu_type="p100"), placement=placement).finishes["vgg"]
    assert (apart / packed == pytest.approx(103.6 / 80.4)) == (placement == "count")
