"""Orders without queues: who goes first, who preempts whom, and how the heterogeneity-agnostic world looks."""

import pytest
from tests.builders import Story, a_job, simulate

from poise.scheduler.core.settings import Cadence, Settings
from poise.scheduler.model.action import Preempt
from poise.scheduler.model.cluster import Cluster, Node
from poise.scheduler.model.speed import Estimate
from poise.scheduler.policies.catalogue import policy_named


def runs(story: Story) -> list[tuple[str, float, float]]:
    return [(run.job, run.began, run.ended) for run in story.runs]


def test_fifo_blocks_behind_a_gang_that_does_not_fit() -> None:
    jobs = [a_job("a", gpus=3), a_job("b", at=1, gpus=4), a_job("c", at=2, gpus=1, seconds=1)]
    assert simulate(jobs, "fifo").starts == {"a": 0, "b": 10, "c": 20}


def test_fifo_skip_passes_a_gang_that_does_not_fit() -> None:
    jobs = [a_job("a", gpus=3), a_job("b", at=1, gpus=4), a_job("c", at=2, gpus=1, seconds=1)]
    assert simulate(jobs, "fifo-skip").starts == {"a": 0, "c": 2, "b": 10}


def test_smallest_first_preempts_larger_gangs_only() -> None:
    jobs = [a_job("large", gpus=3), a_job("same", at=1, gpus=3), a_job("small", at=2, gpus=2, seconds=3)]
    story = simulate(jobs, "smallest-first")
    assert runs(story) == [("large", 0, 2), ("small", 2, 5), ("large", 5, 13), ("same", 13, 23)]


def test_srtf_preempts_for_a_job_that_ends_sooner() -> None:
    jobs = [a_job("long", seconds=100), a_job("short", at=10, seconds=20), a_job("shorter", at=15, seconds=14)]
    story = simulate(jobs, "srtf", "gpu:1")
    assert runs(story) == [("long", 0, 10), ("short", 10, 15), ("shorter", 15, 29), ("short", 29, 44), ("long", 44, 134)]


def test_srtf_lets_a_job_of_equal_rest_go_on() -> None:
    jobs = [a_job("first", seconds=20), a_job("second", at=5, seconds=15)]
    assert simulate(jobs, "srtf", "gpu:1").preemptions == 0


def test_srsf_weighs_the_rest_by_the_gang() -> None:
    jobs = [a_job("wide", gpus=4, seconds=10), a_job("narrow", at=1, gpus=2, seconds=15)]
    assert simulate(jobs, "srtf").preemptions == 0
    assert runs(simulate(jobs, "srsf"))[:2] == [("wide", 0, 1), ("narrow", 1, 16)]


def test_lrtf_is_the_opposite_of_srtf() -> None:
    jobs = [a_job("short", seconds=10), a_job("long", at=1, seconds=20)]
    assert runs(simulate(jobs, "lrtf", "gpu:1")) == [("short", 0, 1), ("long", 1, 21), ("short", 21, 30)]


def test_las_looks_again_at_every_round() -> None:
    how = Settings(cadence=Cadence.BOTH, round=10)
    jobs = [a_job("a", seconds=30), a_job("b", seconds=30)]
    story = simulate(jobs, "las", "gpu:1", settings=how)
    assert runs(story) == [("a", 0, 10), ("b", 10, 20), ("a", 20, 30), ("b", 30, 40), ("a", 40, 50), ("b", 50, 60)]


def test_las_at_events_alone_slices_no_time() -> None:
    jobs = [a_job("a", seconds=30), a_job("b", seconds=30)]
    assert runs(simulate(jobs, "las", "gpu:1")) == [("a", 0, 30), ("b", 30, 60)]


def test_the_victim_is_told_who_comes_instead() -> None:
    story = simulate([a_job("long", seconds=100), a_job("short", at=10, seconds=20)], "srtf", "gpu:1")
    [(when, action)] = story.actions(Preempt)
    assert (when, action.job, action.epoch, action.why, action.beneficiary) == (10, "long", 1, "outranked", "short")


def test_the_fewest_jobs_furthest_back_are_preempted() -> None:
    """The 2 GPUs for `urgent` come from c alone; b, which stands further ahead, is spared."""
    jobs = [a_job(name, gpus=gpus, seconds=s) for name, gpus, s in (("a", 1, 50), ("b", 1, 60), ("c", 2, 70))]
    story = simulate([*jobs, a_job("urgent", at=1, gpus=2, seconds=5)], "srtf")
    assert [action.job for _, action in story.actions(Preempt)] == ["c"]


def test_a_job_is_not_moved_because_others_come_and_go() -> None:
    """At 3 `kept` loses its GPUs to the first of three, and there is room for it again once `wide` has gone."""
    jobs = [a_job("kept", gpus=2, seconds=4), a_job("wide", at=1, gpus=5, seconds=8)]
    three = [a_job(f"new-{i}", at=3, gpus=2, seconds=8) for i in range(3)]
    story = simulate([*jobs, *three], "lrtf", "gpu:8")
    assert [action.job for now, action in story.actions(Preempt) if now == 3] == ["wide"]
    assert [(run.began, run.ended) for run in story.runs_of("kept")] == [(0, 4)]


def test_a_job_runs_on_its_fastest_free_type() -> None:
    story = simulate([a_job("a", model="ResNet50"), a_job("b", model="ResNet50")], cluster="k80:1,v100:1")
    names = {run.job: story.cluster.nodes[run.gpus[0].node].gpu_type for run in story.runs}
    assert names == {"a": "v100", "b": "k80"}


def test_an_agnostic_policy_takes_types_in_the_order_of_the_cluster() -> None:
    jobs = [a_job("a", model="ResNet50"), a_job("b", model="ResNet50")]
    story = simulate(jobs, "fifo+agnostic", cluster="k80:1,v100:1")
    names = {run.job: story.cluster.nodes[run.gpus[0].node].gpu_type for run in story.runs}
    assert names == {"a": "k80", "b": "v100"}


def test_an_agnostic_policy_changes_what_is_believed_and_not_what_is_true() -> None:
    jobs = [a_job("a", model="ResNet50", seconds=100)]
    slow = simulate(jobs, "fifo+agnostic", cluster="k80:1,v100:1").finishes["a"]
    assert slow == pytest.approx(100 * 38.358209 / 7.4626866, rel=1e-6)
    assert simulate(jobs, "fifo", cluster="k80:1,v100:1").finishes["a"] == pytest.approx(100)


def test_agnostic_gives_every_usable_type_the_best_speed() -> None:
    perceive = policy_named("fifo+agnostic").perceive
    seen = perceive(Estimate(((1.0, 0.9, 0.8), (0.0, 0.0, 0.0), (4.0, 3.0, 2.0)), skew=0.3))
    assert seen == Estimate(((4.0, 3.0, 2.0), (0.0, 0.0, 0.0), (4.0, 3.0, 2.0)), skew=0.3)


def test_agnostic_of_a_job_that_runs_nowhere_is_nothing() -> None:
    assert policy_named("fifo+agnostic").perceive(Estimate(())) == Estimate(())


def test_ties_go_by_submission_and_then_by_place_in_the_trace() -> None:
    jobs = [a_job("z", at=0, gpus=4), a_job("y", at=0, gpus=4), a_job("x", at=0, gpus=4)]
    for policy in ("fifo", "srtf", "smallest-first", "las", "tiresias", "stride:quantum=100"):
        assert list(simulate(jobs, policy).starts) == ["z", "y", "x"]


@pytest.mark.parametrize("policy", ["las", "lrtf"])
def test_equal_jobs_do_not_take_turns_within_one_instant(policy: str) -> None:
    """At 5.4 all four have had 2.7 s, up to the last bit: who runs has been looked at, and is not looked at again."""
    how = Settings(cadence=Cadence.ROUNDS, round=2.7)
    story = simulate([a_job(name, seconds=1) for name in "abcd"], policy, "k80:2", settings=how)
    assert len(story.finishes) == 4
    assert all(run.seconds > 1 for run in story.runs)


@pytest.mark.parametrize("policy", ["srtf", "srtf+stable"])
def test_a_newcomer_of_equal_rank_stands_behind(policy: str) -> None:
    """At 2 both have 4 s left and run; at 3 one of them has to go."""
    jobs = [a_job("first", gpus=2, seconds=6), a_job("equal", at=2, gpus=2, seconds=4)]
    story = simulate([*jobs, a_job("short", at=3, gpus=2, seconds=1)], policy)
    assert [action.job for _, action in story.actions(Preempt)] == ["equal"]


def test_keeping_a_job_in_place_leaves_no_gpus_idle_that_others_wait_for() -> None:
    """`new` takes the place of `odd`, which takes that of `one` and `two`; back in place it would leave room for one."""
    cluster = Cluster((Node("a", "gpu", 3), Node("b", "v100", 4)))
    jobs = [a_job("one", at=1, gpus=2, seconds=4), a_job("two", at=2.5, gpus=2, seconds=20)]
    story = simulate([*jobs, a_job("odd", at=3.75, gpus=3), a_job("new", at=4, gpus=2)], "las", cluster, until=4)
    state = story.scheduler.state
    waiting = [row for row in state.active if not state.running(row)]
    assert all(state.columns.gang[row] > max(state.free.idle) for row in waiting)


@pytest.mark.parametrize("policy", ["las", "stride:quantum=3"])
def test_time_slices_no_longer_than_the_overhead_still_get_work_done(policy: str) -> None:
    how = Settings(cadence=Cadence.BOTH, round=3, restart_overhead=3)
    story = simulate([a_job("a", seconds=10), a_job("b", seconds=10)], policy, "gpu:1", settings=how)
    assert story.finishes == {"a": 40, "b": 44}
