"""The queues of Tiresias (docs/algorithms/tiresias.md), rule by rule. One GPU a node, so that there is nothing to place."""

import pytest
from tests.builders import Story, a_job, simulate

from poise.scheduler.core.settings import Cadence, Settings


def runs(story: Story) -> list[tuple[str, float, float]]:
    return [(run.job, run.began, run.ended) for run in story.runs]


def test_a_job_is_demoted_when_it_reaches_the_limit_and_not_before() -> None:
    jobs = [a_job("old", seconds=20), a_job("new", at=9.5, seconds=5)]
    assert runs(simulate(jobs, "tiresias:limits=10", "gpu:1")) == [("old", 0, 10), ("new", 10, 15), ("old", 15, 25)]


def test_service_is_gpu_seconds_unless_seconds_are_asked_for() -> None:
    jobs = [a_job("old", gpus=4, seconds=20), a_job("new", at=1, gpus=4, seconds=2)]
    assert simulate(jobs, "tiresias:limits=40", "gpu:4").starts["new"] == 10
    assert simulate(jobs, "tiresias:limits=40,service=seconds", "gpu:4").starts["new"] == 20


def test_a_demoted_job_goes_to_the_tail_of_the_next_queue() -> None:
    jobs = [a_job("a", seconds=30), a_job("b", at=1, seconds=30), a_job("c", at=2, seconds=30)]
    story = simulate(jobs, "tiresias:limits=10", "gpu:1")
    assert runs(story)[:3] == [("a", 0, 10), ("b", 10, 20), ("c", 20, 30)]
    assert runs(story)[3:] == [("a", 30, 50), ("b", 50, 70), ("c", 70, 90)], "the last queue is first come, first served"


def test_a_demoted_job_goes_on_while_nobody_waits_before_it() -> None:
    jobs = [a_job("a", seconds=30), a_job("b", at=15, seconds=5)]
    assert runs(simulate(jobs, "tiresias:limits=10", "gpu:1")) == [("a", 0, 15), ("b", 15, 20), ("a", 20, 35)]


def test_jobs_of_one_queue_do_not_preempt_each_other() -> None:
    jobs = [
        a_job("running", at=1, gpus=2, seconds=20),
        a_job("waiting", at=2, gpus=4, seconds=1),
        a_job("new", at=3, gpus=2),
    ]
    story = simulate(jobs, "tiresias", "gpu:4")
    assert story.preemptions == 0
    assert story.starts == {"running": 1, "new": 3, "waiting": 21}


def test_three_queues_are_served_in_order() -> None:
    jobs = [a_job("a", seconds=100), a_job("b", at=30, seconds=25), a_job("c", at=45, seconds=2)]
    story = simulate(jobs, "tiresias:limits=10/20", "gpu:1")
    assert runs(story) == [("a", 0, 30), ("b", 30, 45), ("c", 45, 47), ("b", 47, 52), ("a", 52, 122), ("b", 122, 127)]


def test_a_preempted_job_goes_to_the_head_of_those_who_wait_in_its_queue() -> None:
    """At 25 both wait in the second queue: `late` since 20, `early` since it was preempted."""
    jobs = [a_job("late", seconds=20), a_job("early", at=5, seconds=20), a_job("new", at=25, seconds=5)]
    story = simulate(jobs, "tiresias:limits=10", "gpu:1")
    assert runs(story)[:4] == [("late", 0, 10), ("early", 10, 20), ("late", 20, 25), ("new", 25, 30)]
    assert runs(story)[4:] == [("late", 30, 35), ("early", 35, 45)]


def test_a_job_that_waited_long_enough_is_promoted_and_counted_anew() -> None:
    """`old` ran 10 s and waits from 10 on; a stream of new jobs would hold it back until 50."""
    stream = [a_job(f"new-{i}", at=5 + i, seconds=8) for i in range(5)]
    jobs = [a_job("old", seconds=30), *stream]
    assert simulate(jobs, "tiresias:limits=10", "gpu:1").runs_of("old")[1].began == 50
    story = simulate(jobs, "tiresias:limits=10,promote=2", "gpu:1")
    again = story.runs_of("old")[1]
    assert again.began == 50, "promoted at 30, it goes to the tail of the first queue"
    assert again.ended == 70


def test_promotion_brings_a_job_before_later_arrivals() -> None:
    stream = [a_job(f"new-{i}", at=5 + 9 * i, seconds=9) for i in range(8)]
    jobs = [a_job("old", seconds=20), *stream]
    assert simulate(jobs, "tiresias:limits=10", "gpu:1").runs_of("old")[1].began == 82
    promoted = simulate(jobs, "tiresias:limits=10,promote=2", "gpu:1").runs_of("old")
    assert [(run.began, run.ended) for run in promoted] == [(0, 10), (37, 47)]


def test_after_a_promotion_a_whole_limit_of_service_is_due() -> None:
    jobs = [a_job("old", seconds=40), a_job("other", at=5, seconds=100)]
    story = simulate(jobs, "tiresias:limits=10,promote=1", "gpu:1")
    assert runs(story)[:4] == [("old", 0, 10), ("other", 10, 20), ("old", 20, 30), ("other", 30, 40)]


def test_a_job_of_the_first_queue_is_not_promoted() -> None:
    jobs = [a_job("tried", seconds=10, dies=(1,)), a_job("first", at=0.5, gpus=1, seconds=50)]
    story = simulate(jobs, "tiresias:limits=1000,promote=1", "gpu:1")
    assert runs(story)[:2] == [("tried", 0, 1), ("tried", 1, 11)]


@pytest.mark.parametrize("policy", ["tiresias", "tiresias:promote=0", "tiresias-gittins"])
def test_without_promotion_nothing_wakes_for_it(policy: str) -> None:
    story = simulate([a_job("a", seconds=5000), a_job("b", at=1, seconds=5000)], policy, "gpu:1")
    assert len(story.entries) < 12


def test_the_limit_counts_time_with_gpus_whether_work_is_done_or_not() -> None:
    """A restart costs 4 s without progress, which count as service."""
    how = Settings(cadence=Cadence.EVENTS, restart_overhead=4)
    jobs = [a_job("a", seconds=20), a_job("b", at=1, seconds=1)]
    assert simulate(jobs, "tiresias:limits=10", "gpu:1", settings=how).starts["b"] == 10


def test_nobody_is_demoted_before_it_has_worked_as_long_as_it_took_to_start() -> None:
    """A limit of 10 s, restarts of 15 s: a turn takes 30 s. Else both jobs, promoted again and again, would only restart."""
    jobs = [a_job("a", seconds=25), a_job("b", seconds=25)]
    how = Settings(cadence=Cadence.EVENTS, restart_overhead=15.0)
    story = simulate(jobs, "tiresias:limits=10,promote=1", "gpu:1", settings=how)
    assert runs(story) == [("a", 0, 30), ("b", 30, 60), ("a", 60, 85), ("b", 85, 110)]
