"""Why a job waits, in seconds by cause and in words."""

from tests.builders import Story, a_job, nodes, simulate

from poise.lab.simulator.outages import Outage
from poise.scheduler.core.reasons import Code
from poise.scheduler.core.settings import Cadence, Settings
from poise.scheduler.model.action import Launch, Waited


def waited(story: Story, job: str) -> list[Waited]:
    return [launch.waited for _, launch in story.actions(Launch) if launch.job == job]


def test_a_gang_that_finds_too_few_free_gpus_waits_for_capacity() -> None:
    story = simulate([a_job("first", gpus=3, seconds=30), a_job("second", at=10, gpus=2)])
    assert waited(story, "first") == [(0, 0, 0)]
    assert waited(story, "second") == [(0, 0, 20)]


def test_a_job_behind_a_head_that_blocks_waits_for_order() -> None:
    jobs = [a_job("runs", gpus=3, seconds=30), a_job("head", at=5, gpus=4), a_job("small", at=10, seconds=1)]
    story = simulate(jobs, "fifo", until=20)
    assert story.scheduler.explain("small").code is Code.ORDER
    assert story.scheduler.explain("head").code is Code.CAPACITY
    story = simulate(jobs, "fifo")
    assert story.starts == {"runs": 0, "head": 30, "small": 40}
    assert waited(story, "small") == [(20, 0, 10)]


def test_a_job_that_waits_for_the_round_though_gpus_are_free_waits_for_order() -> None:
    how = Settings(cadence=Cadence.ROUNDS, round=100, backfill=False)
    story = simulate([a_job("first"), a_job("second", at=20)], settings=how)
    assert story.starts == {"first": 0, "second": 100}
    assert waited(story, "second") == [(80, 0, 0)]


def test_a_job_whose_gpus_come_free_inside_a_round_waits_for_order_from_then_on() -> None:
    how = Settings(cadence=Cadence.ROUNDS, round=100, backfill=False)
    story = simulate([a_job("first", gpus=4, seconds=30), a_job("second", gpus=4)], settings=how)
    assert waited(story, "second") == [(70, 0, 30)]


def test_a_job_waits_for_capacity_while_a_node_is_lost_on_which_nothing_ran() -> None:
    """From 15 to 25 no GPU is free; before and after, two are, and the head of the queue comes first. It runs from 30 on."""
    jobs = [a_job("runs", gpus=2, seconds=30), a_job("head", at=5, gpus=4), a_job("small", at=10, seconds=1)]
    story = simulate(jobs, "fifo", nodes(2, 2), placement="consolidate", outages=[Outage(15, 1, 10)])
    assert story.starts == {"runs": 0, "head": 30, "small": 40}
    assert waited(story, "small") == [(10, 0, 20)]


def test_waiting_is_clocked_anew_after_each_run() -> None:
    jobs = [a_job("long", gpus=4, seconds=100), a_job("short", at=30, gpus=1, seconds=10)]
    story = simulate(jobs, "srtf")
    assert waited(story, "long") == [(0, 0, 0), (0, 0, 10)]


def test_a_job_that_waits_for_one_gpu_does_not_say_gpus() -> None:
    jobs = [
        a_job("runs", gpus=3, seconds=30),
        a_job("head", at=5, gpus=4),
        a_job("small", at=10),
        a_job("other", at=10, gpus=2),
    ]
    story = simulate(jobs, "fifo", until=20)
    assert story.scheduler.explain("small").text == (
        "needs 1 GPU and would fit (free now: 1 gpu), but jobs ahead of it come first"
    )
    assert story.scheduler.explain("other").text == "needs 2 GPUs at once; free now: 1 gpu"
    full = simulate([a_job("runs", gpus=4, seconds=30), a_job("waits", at=5)], "fifo", until=20)
    assert full.scheduler.explain("waits").text == "needs 1 GPU at once; free now: 0 gpu"


def test_a_job_says_where_it_runs_and_how_it_ended() -> None:
    jobs = [a_job("here", gpus=2, seconds=30), a_job("huge", gpus=5)]
    story = simulate(jobs, until=10)
    assert story.scheduler.explain("here").text == "runs on 2 GPUs of gpu-0"
    assert story.scheduler.explain("huge").text == "needs 5 GPUs of one type; the cluster has at most 4 (gpu)"
    story = simulate(jobs)
    assert story.scheduler.explain("here").code is Code.FINISHED
