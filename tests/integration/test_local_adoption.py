"""Adoption: what a back end finds that starts after another one, as after a crash of the service."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.backends import PATIENCE, STUBBORN, TRAINS, WAITS, LocalStage, a_request, an_order, is_alive, notice, until

from poise.service.backends.api import DesiredState, RunBegan, RunEnded, RunEnding, RunProgressed
from poise.service.backends.local.processes import MAIN, boot_id, start_of


def test_run_that_goes_on_is_taken_over_as_it_is(stage: LocalStage) -> None:
    order = stage.begun("1", TRAINS)
    before = stage.said("1", "runner.json")
    stage.reopen((order, DesiredState.RUN))
    again = stage.wait(RunBegan, "1", count=2)
    assert again.at == before["began"]
    stage.wait(RunProgressed, "1", count=3)
    assert stage.said("1", "runner.json") == before
    stage.backend.stop("1", 1, notice())
    assert stage.wait(RunEnded, "1").codes == (75,)


def test_run_that_ended_meanwhile_is_reported_with_the_time_at_which_it_did(stage: LocalStage) -> None:
    order = stage.begun("1", "import os, time\nwhile not os.path.exists('closed'): time.sleep(0.01)")
    stage.backend.close()
    (stage.folder / "jobs" / "1" / "work" / "closed").touch()
    until(lambda: (stage.run_dir("1") / "exit.json").exists() and not stage.processes())
    written = stage.said("1", "exit.json")
    stage.reopen((order, DesiredState.RUN))
    [ended] = stage.of(RunEnded, "1")  # there already: nothing is decided before it is known
    assert (ended.at, ended.how, ended.codes) == (written["at"], RunEnding.FINISHED, (0,))
    assert stage.news.index(stage.wait(RunBegan, "1", count=2)) < stage.news.index(ended)


def test_end_is_reported_after_each_adoption(stage: LocalStage) -> None:
    order = stage.run("1", "raise ValueError")
    first = stage.wait(RunEnded, "1")
    for count in (2, 3):
        stage.reopen((order, DesiredState.RUN))
        assert stage.wait(RunEnded, "1", count=count) == first


def test_run_that_ended_after_its_job_was_given_up_has_yielded(stage: LocalStage) -> None:
    order = stage.run("1")
    stage.wait(RunEnded, "1")
    stage.reopen((order, DesiredState.GONE))
    assert stage.wait(RunEnded, "1", count=2).how is RunEnding.YIELDED


def test_run_that_was_to_leave_is_asked_again(stage: LocalStage) -> None:
    order = stage.begun("1", TRAINS)
    stage.wait(RunProgressed, "1")
    stage.reopen((order, DesiredState.LEAVE))
    ended = stage.wait(RunEnded, "1")
    assert (ended.how, ended.codes) == (RunEnding.YIELDED, (75,))


@pytest.mark.parametrize("desired", [DesiredState.LEAVE, DesiredState.GONE])
def test_worker_gets_the_same_reason_after_a_crash_as_before(stage: LocalStage, desired: DesiredState) -> None:
    order = stage.run("1", STUBBORN)
    stage.says("1", "ready")
    stage.reopen((replace(order, reason="preempted (outranked): job 7 stands before it"), desired))
    until(lambda: stage.said("1", "lease.json")["ends"] is not None)
    assert stage.said("1", "lease.json")["text"] == "preempted (outranked): job 7 stands before it"


def test_run_that_was_asked_to_leave_keeps_its_deadline(stage: LocalStage) -> None:
    order = stage.run("1", STUBBORN)
    stage.says("1", "ready")
    stage.backend.stop("1", 1, notice(deadline=500.0))
    until(lambda: stage.said("1", "lease.json")["ends"] is not None)
    lease = stage.said("1", "lease.json")
    stage.reopen((order, DesiredState.LEAVE))
    stage.wait(RunBegan, "1", count=2)
    stage.backend.stop("1", 1, notice(deadline=900.0))
    stage.run("2", "", 1)
    stage.wait(RunEnded, "2")
    assert stage.said("1", "lease.json") == lease


def test_run_of_a_job_that_was_given_up_is_ended(stage: LocalStage) -> None:
    order = stage.begun("1", WAITS)
    stage.reopen((order, DesiredState.GONE))
    assert stage.wait(RunEnded, "1").how is RunEnding.YIELDED


def test_unknown_run_is_ended_before_its_gpus_are_used(stage: LocalStage) -> None:
    stage.run("1", STUBBORN)
    stage.says("1", "ready")
    pid = stage.said("1", "runner.json")["replicas"][0]["pid"]
    stage.reopen((an_order("2", a_request("")), DesiredState.RUN))
    stage.wait(RunBegan, "2")
    assert not is_alive(pid)
    assert not stage.of(RunEnded, "1")


def test_launch_that_was_ordered_waits_for_what_is_to_leave(stage: LocalStage) -> None:
    victim = stage.run("1", STUBBORN)
    stage.says("1", "ready")
    stage.reopen((an_order("2", a_request("")), DesiredState.RUN), (victim, DesiredState.GONE))
    stage.wait(RunEnded, "2")
    kinds = [(type(news), news.job) for news in stage.news if isinstance(news, RunBegan | RunEnded)]
    assert kinds.index((RunEnded, "1")) < kinds.index((RunBegan, "2"))


def test_run_whose_runner_was_killed_meanwhile_ended_when_it_last_gave_a_sign(stage: LocalStage) -> None:
    order = stage.begun("1")
    runner = stage.said("1", "runner.json")
    stage.backend.close()
    os.kill(runner["pid"], signal.SIGKILL)
    until(lambda: not is_alive(runner["pid"]))
    os.utime(stage.run_dir("1") / "lock", (runner["began"], runner["began"]))
    stage.reopen((order, DesiredState.RUN))
    ended = stage.wait(RunEnded, "1")
    assert (ended.how, ended.cause, ended.at) == (RunEnding.FAILED, "node-lost", runner["began"])
    assert stage.said("1", "exit.json")["how"] == "failed"


def test_process_that_got_the_number_of_a_dead_one_is_left_alone(stage: LocalStage) -> None:
    bystander = subprocess.Popen([sys.executable, "-I", "-S", "-c", WAITS], start_new_session=True)
    try:
        folder = stage.run_dir("1")
        folder.mkdir(parents=True)
        start = start_of(bystander.pid)
        assert start is not None
        me = {"pid": bystander.pid, "start": start - 1}
        runner = {"version": 1, **me, "boot": boot_id(), "began": 5.0, "replicas": [{"rank": 0, **me}]}
        (folder / "runner.json").write_text(json.dumps(runner))
        stage.reopen((an_order("1", a_request("")), DesiredState.RUN))
        assert stage.wait(RunEnded, "1").cause == "node-lost"
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 1, "pid": -1, "start": 1, "boot": "", "replicas": []}'])
def test_records_that_make_no_sense_do_no_harm(stage: LocalStage, text: str) -> None:
    for name in ("runner.json", "exit.json", "order.json", "lease.json", "progress.json"):
        stage.run_dir("1").mkdir(parents=True, exist_ok=True)
        (stage.run_dir("1") / name).write_text(text)
    stage.reopen((an_order("1", a_request("")), DesiredState.RUN))
    assert stage.wait(RunEnded, "1").how is RunEnding.FAILED
    stage.run("2")
    assert stage.wait(RunEnded, "2").how is RunEnding.FINISHED


def late_runner(folder: Path) -> int:
    """A runner that comes to a run after its back end has seen to it."""
    read, write = os.pipe()
    try:
        command = [sys.executable, "-I", "-S", MAIN, str(folder), str(write)]
        return subprocess.run(command, pass_fds=(write,), check=False, timeout=PATIENCE).returncode
    finally:
        os.close(read)
        os.close(write)


def test_runner_that_comes_too_late_does_nothing(stage: LocalStage) -> None:
    order = stage.run("1", "print('once')")
    stage.wait(RunEnded, "1")
    assert late_runner(stage.run_dir("1")) == 3  # it is over
    (stage.run_dir("1") / "exit.json").unlink()
    assert late_runner(stage.run_dir("1")) == 3  # it has begun
    (stage.run_dir("1") / "runner.json").unlink()
    stage.reopen((order, DesiredState.GONE))
    assert stage.wait(RunEnded, "1", count=2).codes == ()
    assert late_runner(stage.run_dir("1")) == 3  # it must not begin
    assert stage.text("1").count("once") == 1


def test_second_runner_of_a_run_gives_way_to_the_first(stage: LocalStage) -> None:
    stage.begun("1")
    assert late_runner(stage.run_dir("1")) == 3
    assert len(stage.processes()) == stage.usual


def test_runner_that_died_before_it_began_is_started_again(stage: LocalStage, monkeypatch: pytest.MonkeyPatch) -> None:
    from poise.service.backends.local import processes

    broken = iter(["/no/such/file", "/no/such/file"])
    real = processes.MAIN

    def spawn(path: str, environment: dict[str, str]) -> tuple[int, int, int]:
        monkeypatch.setattr(processes, "MAIN", next(broken, real))
        return spawning_spawn(path, environment)

    spawning_spawn = processes.spawn
    monkeypatch.setattr(processes, "spawn", spawn)
    stage.run("1")
    assert stage.wait(RunEnded, "1").how is RunEnding.FINISHED
    broken = iter(["/no/such/file"] * 9)
    stage.run("2")
    ended = stage.wait(RunEnded, "2")
    assert (ended.how, ended.cause) == (RunEnding.FAILED, "node-lost")


def test_two_back_ends_do_not_touch_each_others_runs_though_their_jobs_have_the_same_names(tmp_path: Path) -> None:
    stages = [LocalStage(tmp_path / name) for name in ("one", "two")]
    try:
        for each in stages:
            each.begun("1")
        stages[0].reopen()
        until(lambda: not stages[0].processes())
        assert len(stages[1].processes()) == 2
    finally:
        for each in stages:
            each.close()
