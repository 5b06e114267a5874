"""Runs of real processes: which other runs a launch waits for."""

from tests.backends import STUBBORN, WAITS, LocalStage, a_request, an_order, notice

from poise.service.backends.api import RunBegan, RunEnded, RunEnding


def test_launch_waits_until_the_run_before_it_has_left_its_gpus(stage: LocalStage) -> None:
    stage.run("1", STUBBORN, 0, 1)
    stage.says("1", "ready")
    stage.backend.stop("1", 1, notice())
    stage.run("2", "", 1, 2)
    stage.run("3", "", 3)
    stage.wait(RunEnded, "3")
    stage.backend.kill("1", 1, "cancelled")
    stage.wait(RunEnded, "2")
    order = [(type(news), news.job) for news in stage.news if isinstance(news, RunBegan | RunEnded)]
    assert order.index((RunEnded, "3")) < order.index((RunEnded, "1")) < order.index((RunBegan, "2"))


def test_launch_that_still_waits_yields_at_once_if_it_is_not_wanted(stage: LocalStage) -> None:
    stage.run("1", STUBBORN)
    stage.says("1", "ready")
    stage.backend.stop("1", 1, notice(deadline=500.0))
    for job in ("2", "3"):
        stage.run(job, "")
    stage.backend.stop("2", 1, notice())
    stage.backend.kill("3", 1, "cancelled")
    for job in ("2", "3"):
        ended = stage.wait(RunEnded, job)
        assert (ended.how, ended.codes) == (RunEnding.YIELDED, ())
        assert not stage.run_dir(job).exists()
    assert not stage.of(RunEnded, "1")


def test_launch_waits_for_the_run_of_its_own_job_wherever_that_is(stage: LocalStage) -> None:
    stage.run("1", STUBBORN, 0)
    stage.says("1", "ready")
    stage.backend.stop("1", 1, notice(deadline=0.3))
    stage.run("1", "", 3, epoch=2)
    stage.wait(RunEnded, "1", 2)
    kinds = [(type(news), news.epoch) for news in stage.news if isinstance(news, RunBegan | RunEnded)]
    assert kinds == [(RunBegan, 1), (RunEnded, 1), (RunBegan, 2), (RunEnded, 2)]


def test_run_that_is_to_share_gpus_does_not_wait_for_them(stage: LocalStage) -> None:
    stage.begun("1", WAITS, 0)
    stage.backend.launch(an_order("2", a_request(""), beside="1"))
    assert stage.wait(RunEnded, "2").how is RunEnding.FINISHED


def test_launch_waits_for_a_run_that_was_not_asked_to_leave_yet(stage: LocalStage) -> None:
    stage.begun("1", WAITS, 0, preemption="restart")
    stage.run("2", "", 0)
    stage.run("3", "", 1)
    stage.wait(RunEnded, "3")
    assert not stage.of(RunBegan, "2")
    stage.backend.stop("1", 1, notice())
    assert stage.wait(RunEnded, "2").how is RunEnding.FINISHED
