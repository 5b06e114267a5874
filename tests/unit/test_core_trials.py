"""The validation pool: a gang is first tried on one GPU that is set aside."""

from dataclasses import replace

import pytest
from tests.builders import EVENTS, Story, a_job, nodes, simulate

from poise.lab.analysis.history import History
from poise.lab.simulator.outages import Outage
from poise.lab.traces.schema import TraceJob
from poise.scheduler.core.reasons import Code
from poise.scheduler.model.action import Launch, Preempt, PreemptionCause
from poise.scheduler.model.cluster import Cluster, Node, gpu_count
from poise.scheduler.model.errors import RequestError
from poise.scheduler.model.event import Cancelled, NodeReturned, Woke
from poise.scheduler.model.job import Status

POOL = replace(EVENTS, validation_gpus=1, validation_time=30.0)
EVERY_KIND = [
    "fifo",
    "srtf",
    "las",
    "tiresias",
    "stride",
    "max-min",
    "finish-time",
    "makespan",
    "hierarchical",
    "fifo+stable",
]


def sizes(story: Story, job: str) -> list[tuple[float, int]]:
    return [(now, gpu_count(launch.gpus)) for now, launch in story.actions(Launch) if launch.job == job]


@pytest.mark.parametrize("policy", EVERY_KIND)
def test_a_gang_is_tried_on_one_gpu_and_then_gets_its_gang(policy: str) -> None:
    story = simulate([a_job("a", gpus=4, seconds=100)], policy, "gpu:8", settings=POOL)
    assert sizes(story, "a") == [(0, 1), (30, 4)]
    assert [(now, action.why) for now, action in story.actions(Preempt)] == [(30, PreemptionCause.VALIDATED)]
    assert story.finishes == {"a": 130}


def test_a_broken_gang_dies_having_cost_one_gpu() -> None:
    jobs = [a_job("a", gpus=4, seconds=100, dies=(10.0,))]
    how = replace(POOL, retries=0)
    story = simulate(jobs, "fifo", "gpu:8", settings=how)
    assert sizes(story, "a") == [(0, 1)]
    assert story.status("a") is Status.FAILED
    assert History.of(story.entries, story.cluster).jobs["a"].gpu_seconds == 10
    without = simulate(jobs, "fifo", "gpu:8", settings=replace(how, validation_gpus=0))
    assert History.of(without.entries, without.cluster).jobs["a"].gpu_seconds == 40


def test_a_gang_that_fails_its_trial_is_tried_again_as_often_as_it_may_fail() -> None:
    story = simulate([a_job("a", gpus=4, seconds=100, dies=(10.0, 20.0))], "fifo", "gpu:8", settings=POOL)
    assert sizes(story, "a") == [(0, 1), (10, 1), (30, 1), (60, 4)]
    life = History.of(story.entries, story.cluster).jobs["a"]
    assert (life.restarts, life.migrations, life.preemptions) == (2, 0, 0)


def test_a_gang_that_breaks_after_its_trial_fails_in_full_and_goes_on_without_another() -> None:
    story = simulate([a_job("a", gpus=4, seconds=100, dies=(40.0,))], "fifo", "gpu:8", settings=POOL)
    assert sizes(story, "a") == [(0, 1), (30, 4), (70, 4)]


def test_a_single_gpu_needs_no_trial() -> None:
    assert sizes(simulate([a_job("a")], "fifo", "gpu:8", settings=POOL), "a") == [(0, 1)]
    assert not simulate([a_job("a")], "fifo", "gpu:8", settings=POOL).preemptions


def test_trials_are_in_the_order_of_submission_and_waiting_for_one_is_held_back() -> None:
    jobs = [a_job("a", gpus=2, seconds=50), a_job("b", gpus=2, seconds=50)]
    story = simulate(jobs, "fifo", "gpu:8", settings=POOL, until=10)
    assert story.scheduler.explain("a").text == "is tried for a short while on 1 GPU of gpu-1"
    assert story.scheduler.explain("b").code is Code.HELD
    story = simulate(jobs, "fifo", "gpu:8", settings=POOL)
    assert sizes(story, "b") == [(30, 1), (60, 2)]
    assert [launch.waited for _, launch in story.actions(Launch) if launch.job == "b"] == [(30, 0, 0), (0, 0, 0)]


def test_the_pool_is_not_for_jobs() -> None:
    story = simulate([a_job("a", gpus=8), a_job("b", gpus=7)], "fifo", "gpu:8", settings=POOL)
    assert story.scheduler.explain("a").text == "needs 8 GPUs of one type; the cluster has at most 7 (gpu)"
    assert "b" in story.finishes


def test_a_job_of_seven_waits_while_one_runs_beside_the_pool() -> None:
    story = simulate([a_job("one", seconds=90), a_job("b", gpus=7, seconds=5)], "fifo", "gpu:8", settings=POOL)
    assert sizes(story, "b") == [(0, 1), (90, 7)]
    assert [launch.waited for _, launch in story.actions(Launch) if launch.job == "b"] == [(0, 0, 0), (0, 0, 60)]


@pytest.mark.parametrize("gpus", [8, 9])
def test_a_pool_that_leaves_nothing_is_refused(gpus: int) -> None:
    with pytest.raises(RequestError, match="leaves none of 8"):
        simulate([a_job("a")], "fifo", "gpu:8", settings=replace(POOL, validation_gpus=gpus))


def test_a_trial_whose_node_is_lost_is_begun_anew_elsewhere() -> None:
    how = replace(POOL, validation_gpus=5)
    story = simulate([a_job("a", gpus=2)], "fifo", "gpu:8", settings=how, outages=[Outage(10, 0, 90)])
    assert [(now, launch.gpus[0].node) for now, launch in story.actions(Launch)] == [(0, 0), (10, 1), (100, 0)]
    assert story.finishes == {"a": 110}


def test_where_the_whole_pool_is_lost_jobs_compete_untried() -> None:
    jobs = [a_job("a", gpus=2, seconds=50), a_job("b", gpus=2, seconds=50, at=100)]
    story = simulate(jobs, "fifo", nodes(4, 4), settings=POOL, outages=[Outage(10, 1, 1e6)])
    assert sizes(story, "a") == [(0, 1), (10, 2)]
    assert sizes(story, "b") == [(100, 2)]


def test_a_node_that_was_never_away_may_return() -> None:
    story = simulate([a_job("a", gpus=2, seconds=50)], "fifo", nodes(4, 4), settings=POOL, until=5)
    story.scheduler.handle(6.0, [NodeReturned(1), NodeReturned(0)])
    assert story.scheduler.state.free.masks == [0b1111, 0b0111]


def test_a_node_of_the_pool_comes_back_without_its_reserved_gpus() -> None:
    story = simulate([a_job("a", gpus=7, seconds=50)], "fifo", nodes(4, 4), settings=POOL, outages=[Outage(10, 1, 20)])
    assert story.scheduler.state.free.masks == [0b1111, 0b0111]
    assert story.status("a") is Status.FINISHED


def test_jobs_are_tried_on_types_that_they_run_on() -> None:
    cluster = Cluster((Node("a", "v100", 4), Node("b", "v100", 1), Node("c", "k80", 4)))
    how = replace(POOL, validation_gpus=5)
    picky = a_job("picky", gpus=2, seconds=20, gpu_types=("v100",))
    free = a_job("free", gpus=2, seconds=20, gpu_types=("k80", "v100"))
    story = simulate([picky, free], "fifo", cluster, settings=how)
    where = {launch.job: launch.gpus[0].node for now, launch in story.actions(Launch) if now == 0}
    assert where["picky"] == 1
    assert {"picky", "free"} == {*story.finishes}


def test_a_trial_of_a_job_that_can_do_with_one_gpu_is_work_done() -> None:
    """30 s on one of four GPUs are 7.5 of 100 s."""
    job = a_job("a", gpus=4, seconds=100)
    job = replace(job, job=replace(job.job, min_gpus=1))
    story = simulate([job], "fifo", "gpu:8", settings=POOL)
    assert story.finishes == {"a": 30 + 92.5}
    state = story.scheduler.state
    assert state.columns.steps_done[0] == 100
    short = replace(job, job=replace(job.job, duration=5.0))
    assert simulate([short], "fifo", "gpu:8", settings=POOL).finishes == {"a": 20}


@pytest.mark.parametrize("when", [5.0, 35.0])
@pytest.mark.parametrize("job", ["a", "b"])
def test_a_job_may_be_cancelled_on_trial_and_before(job: str, when: float) -> None:
    jobs: list[TraceJob] = [a_job("a", gpus=2, seconds=50), a_job("b", gpus=2, seconds=50)]
    scheduler = simulate(jobs, "fifo", "gpu:8", settings=POOL, until=when - 1).scheduler
    scheduler.handle(when, [Cancelled(job)])
    scheduler.handle(when + 60, [Woke()])
    assert scheduler.explain(job).code is Code.CANCELLED
    assert not scheduler.state.suspended or job == "a"


def test_service_on_trial_does_not_count() -> None:
    story = simulate([a_job("a", gpus=4, seconds=100)], "las", "gpu:8", settings=POOL)
    assert story.scheduler.state.columns.received[0] == 100
