"""FfDL (docs/algorithms/ffdl.md): pack against spread, gang admission against pods one by one, and the order of the
queue."""

from collections.abc import Iterable

import pytest
from tests.builders import a_job, nodes, simulate

FOUR_SMALL_AND_A_LARGE = [*(a_job(f"small-{i}", gpus=1, seconds=100) for i in range(4)), a_job("large", at=1, gpus=4)]


def test_pack_leaves_a_node_for_the_large_job() -> None:
    story = simulate(FOUR_SMALL_AND_A_LARGE, "ffdl", nodes(4, 4), placement="pack")
    assert story.starts["large"] == 1


def test_spread_leaves_two_halves_and_the_large_job_waits() -> None:
    story = simulate(FOUR_SMALL_AND_A_LARGE, "ffdl", nodes(4, 4), placement="spread")
    assert story.starts["large"] == 100
    halves = {run.gpus[0].node for run in story.runs if run.job != "large"}
    assert halves == {0, 1}


def test_a_gang_larger_than_a_node_is_pods_of_whole_nodes() -> None:
    jobs = [a_job("small", gpus=1, seconds=50), a_job("large", gpus=8, at=1, seconds=10)]
    story = simulate(jobs, "ffdl", nodes(4, 4, 4), placement="spread")
    [run] = story.runs_of("large")
    assert run.began == 1
    assert [slots.mask.bit_count() for slots in run.gpus] == [4, 4]


def test_the_first_job_that_cannot_be_placed_stops_the_queue() -> None:
    jobs = [a_job("runs", gpus=3, seconds=100), a_job("head", at=1, gpus=4), a_job("behind", at=2, gpus=1)]
    story = simulate(jobs, "ffdl", nodes(4), placement="pack")
    assert story.starts == {"runs": 0, "head": 100, "behind": 110}


def test_of_jobs_that_arrive_together_the_largest_gang_goes_first() -> None:
    jobs = [a_job("one", gpus=1), a_job("two", gpus=2), a_job("also-two", gpus=2), a_job("four", gpus=4)]
    story = simulate(jobs, "ffdl", nodes(4), placement="pack")
    assert list(story.starts) == ["four", "two", "also-two", "one"]


def test_a_job_that_came_a_moment_earlier_goes_before_a_larger_one() -> None:
    jobs = [a_job("runs", gpus=4, seconds=5), a_job("small", at=1, gpus=1), a_job("large", at=1.001, gpus=4)]
    story = simulate(jobs, "ffdl", nodes(4), placement="pack")
    assert story.starts == {"runs": 0, "small": 5, "large": 15}


def pod_by_pod(arrivals: Iterable[str], pods: int, gpus: int) -> tuple[dict[str, int], set[str]]:
    """An oracle without gang admission: pods take a GPU each as they come, and wait with what their job holds.

    `arrivals` names the job of each pod. Returns the GPUs that each job holds in the end, and the jobs that ever ran.
    """
    held: dict[str, int] = {}
    ran: set[str] = set()
    waiting = list(arrivals)
    while True:
        while waiting and sum(held.values()) < gpus:
            job = waiting.pop(0)
            held[job] = held.get(job, 0) + 1
        whole = {job for job, count in held.items() if count == pods}
        if not whole:
            return held, ran
        ran |= whole
        held = {job: count for job, count in held.items() if job not in whole}


def test_pods_one_by_one_deadlock_where_gang_admission_runs_one_job_after_the_other() -> None:
    held, ran = pod_by_pod(["a", "b", "a", "b"], pods=2, gpus=2)
    assert held == {"a": 1, "b": 1}
    assert not ran
    story = simulate([a_job("a", gpus=2), a_job("b", gpus=2)], "ffdl", nodes(1, 1), placement="spread")
    assert story.finishes == {"a": 10, "b": 20}


def test_pods_one_by_one_run_where_a_jobs_pods_come_together() -> None:
    """The oracle itself deadlocks only where pods of two jobs come mixed."""
    assert pod_by_pod(["a", "a", "b", "b"], pods=2, gpus=2) == ({}, {"a", "b"})


@pytest.mark.parametrize("placement", ["pack", "spread"])
def test_no_run_ever_holds_a_part_of_its_gang(placement: str) -> None:
    jobs = [a_job(f"j{i}", at=i % 3, gpus=1 + i % 4, seconds=5 + i) for i in range(20)]
    story = simulate(jobs, "ffdl", nodes(4, 4), placement=placement)
    gangs = {each.job.id: each.job.gpus for each in jobs}
    assert all(sum(slots.mask.bit_count() for slots in run.gpus) == gangs[run.job] for run in story.runs)
    assert len(story.finishes) == len(jobs)
    assert story.preemptions == 0
