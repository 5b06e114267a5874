"""What a job does to the files of its run: its own run fails, its GPUs are freed, and the back end goes on."""

import errno
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from tests.backends import (
    PATIENCE,
    QUICK,
    WAITS,
    LocalStage,
    a_request,
    an_order,
    is_alive,
    notice,
    python,
    until,
)

from poise.scheduler.model.failures import Verdict, verdict
from poise.service.backends.api import DesiredState, RunBegan, RunEnded, RunEnding
from poise.service.backends.local import processes, run_files
from poise.service.backends.local.orders import Isolation

HERE = "import json, os, shutil, signal, subprocess, sys, time; run = os.environ['POISE_RUN_DIR']\n"
DONE = "\nprint('done', flush=True)\n"
FOREVER = DONE + "time.sleep(1000)"
TOLD = "while not os.path.exists('told'): time.sleep(0.01)\n"
BEGUN = "while json.load(open(run + '/runner.json'))['began'] is None: time.sleep(0.01)\n"
DUMPS = "json.dump(fields, open(name, 'w'))"
LOSES_ITS_RUNNER = "\nopen('struck', 'w').close(); time.sleep(1000)"
ESCAPES = "subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"


@pytest.fixture
def stage(tmp_path: Path, isolation: Isolation) -> Iterator[LocalStage]:
    made = LocalStage(tmp_path, replace(QUICK, guard_seconds=5.0), isolation)  # seconds that some of these runs stay for
    yield made
    made.close()


def still_works(stage: LocalStage) -> None:
    """The back end still answers."""
    done = Event()
    stage.backend._loop.post(done.set)
    assert done.wait(PATIENCE)


def meddled(stage: LocalStage, job: str, text: str, *slots: int, **more: Any) -> Any:
    """A run that has done that to its files, and goes on."""
    order = stage.begun(job, HERE + TOLD + text + FOREVER, *slots, **more)
    (stage.run_dir(job).parents[1] / "work" / "told").touch()
    stage.says(job, "done")
    return order


def struck(stage: LocalStage, text: str, number: int = signal.SIGKILL) -> None:
    """A run that does that to its files, and whose runner gets a signal then: from here, as a job may not see its runner."""
    stage.run("1", HERE + text + LOSES_ITS_RUNNER)
    until((stage.run_dir("1").parents[1] / "work" / "struck").exists)
    run = stage.backend._runs.table.get(("1", 1))
    assert run is not None
    os.kill(run.pid, number)


def exit_of(how: str) -> str:
    fields = {"version": 1, "at": 5.0, "began": 5.0, "how": how, "replicas": [], "made_to": None, "cause": "x"}
    return f"open(run + '/exit.json', 'w').write({json.dumps(fields)!r})"


# A restart after that


NONSENSE = {
    "pid": "fields = json.load(open(run + '/runner.json')); fields['pid'] = 1 << 40\n"
    "json.dump(fields, open(run + '/runner.json', 'w'))",
    "mark": "subprocess.Popen(['sleep', '1000'], env={**os.environ, 'POISE_RUN_DIR': '/x/runs/' + '9' * 5000})",
    "order": "old = run[:-1] + '7'; os.mkdir(old)\n"
    'open(old + \'/order.json\', \'w\').write(\'{"version": 1, "gpus": [["v100-0", "v100", [1e999]]]}\')\n'
    "subprocess.Popen(['sleep', '1000'], env={**os.environ, 'POISE_RUN_DIR': old})",
}


@pytest.mark.parametrize("kind", NONSENSE)
def test_numbers_that_no_machine_has_do_not_keep_the_back_end_from_starting(stage: LocalStage, kind: str) -> None:
    order = meddled(stage, "1", NONSENSE[kind])
    stage.reopen((order, DesiredState.RUN))
    stage.run("2", "", 1)
    assert stage.wait(RunEnded, "2").how is RunEnding.FINISHED


@pytest.mark.parametrize("text", ['"replicas": [{"rank": 1e999, "code": 0}]', '"replicas": [], "made_to": []'])
def test_exit_that_makes_no_sense_is_a_failed_run(stage: LocalStage, text: str) -> None:
    written = '{"version": 1, "how": "failed", ' + text + "}"
    struck(stage, f"open(run + '/exit.json', 'w').write({written!r})")
    assert stage.wait(RunEnded, "1").how is RunEnding.FAILED
    still_works(stage)


SAYS = "text = 'network-error \\ud800\\x1b[2J\\n'\n"
HARMLESS = "network-error ??[2J"


def test_cause_that_cannot_be_written_or_that_a_terminal_would_obey_is_made_harmless(stage: LocalStage) -> None:
    fails = "json.dump({'version': 1, 'cause': text}, open(run + '/failure.json', 'w')); sys.exit(1)"
    stage.run("1", HERE + SAYS + fails)
    assert stage.wait(RunEnded, "1").cause == HARMLESS


def test_cause_in_a_forged_exit_is_made_harmless_too(stage: LocalStage) -> None:
    fields = "fields = {'version': 1, 'at': 5.0, 'how': 'failed', 'replicas': [], 'cause': text}\n"
    struck(stage, SAYS + fields + "json.dump(fields, open(run + '/exit.json', 'w'))")
    assert stage.wait(RunEnded, "1").cause == HARMLESS


def test_run_that_has_removed_its_directory_does_not_run_twice_at_once(stage: LocalStage) -> None:
    order = meddled(stage, "1", "shutil.rmtree(run)")
    before = stage.processes()
    stage.reopen((order, DesiredState.RUN))
    assert stage.wait(RunEnded, "1").how is RunEnding.FAILED
    assert len(before) == stage.usual
    assert not stage.processes()


def test_run_that_has_removed_its_directory_and_is_unknown_is_ended(stage: LocalStage) -> None:
    meddled(stage, "1", "shutil.rmtree(run)")
    assert stage.processes()
    stage.reopen()
    until(lambda: not stage.processes())


def test_run_that_leaves_something_behind_is_not_begun_again_as_the_same_run(stage: LocalStage) -> None:
    struck(stage, ESCAPES + BEGUN + "os.unlink(run + '/runner.json')")
    assert stage.wait(RunEnded, "1").how is RunEnding.FAILED
    assert not stage.processes()
    assert stage.text("1").count("--- run 1") == 1


def test_exit_is_not_believed_while_the_run_lives(stage: LocalStage) -> None:
    order = meddled(stage, "1", exit_of("finished"))
    stage.reopen((order, DesiredState.RUN))
    stage.wait(RunBegan, "1", count=2)
    assert not stage.of(RunEnded, "1")
    stage.backend.kill("1", 1, "cancelled")
    assert stage.wait(RunEnded, "1").codes == (-signal.SIGTERM,)


def test_exit_is_not_believed_while_something_of_the_run_lives(stage: LocalStage) -> None:
    struck(stage, ESCAPES + exit_of("finished"))
    stage.wait(RunEnded, "1")
    assert not stage.processes()


def test_process_that_a_run_names_as_its_runner_is_not_taken_for_it(stage: LocalStage) -> None:
    with subprocess.Popen(python(WAITS), env={}) as bystander:
        try:
            forged = {"pid": bystander.pid, "start": processes.start_of(bystander.pid)}
            order = meddled(stage, "1", f"name = run + '/runner.json'; fields = json.load(open(name)) | {forged}\n" + DUMPS)
            stage.reopen((order, DesiredState.RUN))
            assert stage.wait(RunEnded, "1").how is RunEnding.FAILED
            assert not stage.processes()
            assert bystander.poll() is None
        finally:
            bystander.kill()


def test_ports_of_runs_that_go_on_are_not_given_away(stage: LocalStage) -> None:
    order = stage.begun("1")
    port = json.loads((stage.run_dir("1") / "order.json").read_text())["environment"]["MASTER_PORT"]
    stage.reopen((order, DesiredState.RUN))
    stage.wait(RunBegan, "1", count=2)
    assert int(port) in stage.backend._runs._ports


LINKS = {
    "job": "os.rename(job, job + '-old'); os.symlink('2', job)",
    "runs": "os.rename(job + '/runs', job + '/old'); os.symlink('../2/runs', job + '/runs')",
    "run": "os.symlink('../../2/runs/1', job + '/runs/2')",
}


@pytest.mark.parametrize("kind", LINKS)
def test_link_in_place_of_a_directory_fails_the_run_and_leads_to_nothing(stage: LocalStage, kind: str) -> None:
    stage.begun("2", WAITS, 1)
    other = stage.folder / "jobs" / "2"
    before = {path: path.stat().st_ino for path in other.rglob("*")}
    stage.run("1", HERE + BEGUN + "job = os.path.dirname(os.path.dirname(run))\n" + LINKS[kind] + "; sys.exit(1)")
    assert stage.wait(RunEnded, "1").how is RunEnding.FAILED
    if "OSError" in stage.text("1"):
        assert kind == "job"
        pytest.skip("a job that is isolated cannot move its own directory")
    order = stage.run("1", epoch=2)
    ended = stage.wait(RunEnded, "1", 2)
    assert (ended.how, ended.cause) == (RunEnding.FAILED, "no-signature")
    stage.reopen((order, DesiredState.RUN), (an_order("2", a_request(WAITS), 1), DesiredState.RUN))
    assert stage.wait(RunEnded, "1", 2, count=2).how is RunEnding.FAILED
    stage.wait(RunBegan, "2", count=2)
    assert {path: path.stat().st_ino for path in other.rglob("*")} == before


# GPUs come free


OBSTACLES = {
    "no directory": "shutil.rmtree(run)",
    "no job": "shutil.rmtree(run + '/../..')",
    "exit": "os.mkdir(run + '/exit.json')",
}


@pytest.mark.parametrize("kind", OBSTACLES)
def test_run_whose_end_cannot_be_written_down_ends_and_counts_against_its_job(stage: LocalStage, kind: str) -> None:
    stage.run("1", HERE + BEGUN + OBSTACLES[kind])
    ended = stage.wait(RunEnded, "1")
    assert (ended.how, ended.cause) == (RunEnding.FAILED, "no-signature")
    stage.run("2")
    assert stage.wait(RunEnded, "2").how is RunEnding.FINISHED


def test_lock_that_is_no_file_frees_the_gpus_of_a_dead_runner(stage: LocalStage) -> None:
    struck(stage, BEGUN + "os.unlink(run + '/lock'); os.mkdir(run + '/lock')")
    assert stage.wait(RunEnded, "1").cause == "node-lost"


def test_lock_that_another_process_holds_frees_the_gpus_of_a_dead_runner(stage: LocalStage) -> None:
    holds = "import fcntl, sys; lock = open(sys.argv[1]); fcntl.flock(lock, 2); print('held', flush=True);" + WAITS
    order = stage.begun("1")
    runner = json.loads((stage.run_dir("1") / "runner.json").read_text())["pid"]
    stage.backend.close()
    os.kill(runner, signal.SIGKILL)
    until(lambda: not is_alive(runner))
    command = python(holds, str(stage.run_dir("1") / "lock"))
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={}) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"
            stage.reopen((order, DesiredState.RUN))
            assert stage.wait(RunEnded, "1").cause == "node-lost"
            assert holder.poll() is None
        finally:
            holder.kill()


def test_runner_that_was_stopped_is_killed_and_its_gpus_come_free(stage: LocalStage) -> None:
    stage.backend.close()
    stage.open(replace(stage.settings, silent_seconds=2.0)).adopt([])
    struck(stage, "", signal.SIGSTOP)
    assert stage.wait(RunEnded, "1").cause == "node-lost"


def test_runner_that_works_is_not_taken_for_a_silent_one(stage: LocalStage) -> None:
    stage.backend.close()
    stage.open(replace(stage.settings, silent_seconds=2.0)).adopt([])
    stage.run("1", "import time; time.sleep(4)")
    assert stage.wait(RunEnded, "1").how is RunEnding.FINISHED


# Nothing is waited for that may never come


def test_pipe_where_the_lease_is_written_does_not_block_the_back_end(stage: LocalStage) -> None:
    meddled(stage, "1", "os.mkfifo(run + '/lease.json.part')")
    stage.backend.stop("1", 1, notice(0.1))
    assert stage.wait(RunEnded, "1").how is RunEnding.YIELDED


def test_pipe_where_the_runner_logs_does_not_block_the_back_end(stage: LocalStage) -> None:
    stage.run("1", HERE + "os.mkdir(run[:-1] + '2'); os.mkfifo(run[:-1] + '2/runner.log'); sys.exit(1)")
    stage.wait(RunEnded, "1")
    stage.run("1", epoch=2)
    assert stage.wait(RunEnded, "1", 2).how is RunEnding.FAILED


def test_log_that_is_a_pipe_does_not_stop_the_runner(stage: LocalStage) -> None:
    stage.run("1", HERE + "log = run + '/../../log/0.log'; os.unlink(log); os.mkfifo(log); sys.exit(1)")
    stage.wait(RunEnded, "1")
    stage.run("1", "import os; os.write(1, b'x' * (1 << 20))", epoch=2)
    assert stage.wait(RunEnded, "1", 2).how is RunEnding.FINISHED


def test_directories_that_are_too_deep_for_recursion_are_removed(stage: LocalStage) -> None:
    deep = "os.chdir(run)\nfor _ in range(1100): os.mkdir('d'); os.chdir('d')"
    for epoch in range(1, 5):
        stage.run("1", HERE + deep + "\nsys.exit(1)" if epoch == 1 else "raise ValueError", epoch=epoch)
        stage.wait(RunEnded, "1", epoch)
    assert not stage.run_dir("1").exists()


@pytest.mark.parametrize("size", [100, 1 << 20])
def test_report_that_says_nothing_is_read_once(stage: LocalStage, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    read: list[object] = []

    def progressed(job: str, epoch: int, fields: object) -> None:
        if job == "1":
            read.append(fields)

    monkeypatch.setattr(run_files, "read_progress", progressed)
    report = f"open(run + '/part', 'w').write('{{\"version\": 1, \"x\": \"' + 'x' * {size} + '\"}}')\n"
    meddled(stage, "1", report + "os.rename(run + '/part', run + '/progress.json')")
    until(lambda: read)
    stage.run("2", "", 1)
    stage.wait(RunEnded, "2")
    stage.run("3", "", 1)
    stage.wait(RunEnded, "3")
    assert [each is None for each in read] == [size > 64 << 10]


# Want of means


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EMFILE, errno.ENFILE])
def test_machine_without_room_for_a_run_is_no_fault_of_the_job(
    stage: LocalStage, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuses(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(processes, "spawn", refuses)
    stage.run("1")
    cause = stage.wait(RunEnded, "1").cause
    assert cause is not None
    assert verdict(cause) is Verdict.TRANSIENT


def test_run_is_not_over_before_what_is_left_could_be_looked_for(stage: LocalStage, monkeypatch: pytest.MonkeyPatch) -> None:
    refusals = [errno.EMFILE] * 3

    original = processes.kill_where

    def kill_where(is_ours: Any) -> int:
        if refusals:
            raise OSError(refusals.pop(), "too many open files")
        return original(is_ours)

    monkeypatch.setattr(processes, "kill_where", kill_where)
    struck(stage, ESCAPES)
    assert stage.wait(RunEnded, "1").cause == "node-lost"
    assert not refusals
    assert not stage.processes()


def test_setup_that_cannot_be_noted_is_no_reason_to_fail(stage: LocalStage) -> None:
    stage.run("1", "", setup=python(HERE + "os.mkdir(run + '/../../set-up.json.part')"))
    assert stage.wait(RunEnded, "1").how is RunEnding.FINISHED
    assert "setup done, but not noted" in stage.text("1")


def test_log_directory_that_is_none_keeps_a_run_from_beginning(stage: LocalStage) -> None:
    stage.run("1", HERE + "shutil.rmtree(run + '/../../log'); open(run + '/../../log', 'w'); sys.exit(1)")
    stage.wait(RunEnded, "1")
    stage.run("1", epoch=2)
    ended = stage.wait(RunEnded, "1", 2)
    assert (ended.how, ended.cause) == (RunEnding.FAILED, "no-signature")
    assert verdict("no-signature") is not Verdict.TRANSIENT


# Faults of the service


def test_fault_about_one_run_ends_that_run_and_says_so(
    stage: LocalStage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original = run_files.read_progress

    def progressed(job: str, epoch: int, fields: Any) -> Any:
        if job == "1":
            raise LookupError("nobody thought of that")
        return original(job, epoch, fields)

    monkeypatch.setattr(run_files, "read_progress", progressed)
    other = stage.begun("2", WAITS, 1)
    stage.run("1", HERE + ESCAPES + "open(run + '/progress.json', 'w').write('{}')" + FOREVER)
    ended = stage.wait(RunEnded, "1")
    assert ended.how is RunEnding.FAILED
    assert ended.cause == "fault of the service: LookupError('nobody thought of that')"
    assert "nobody thought of that" in caplog.text
    assert len(stage.processes()) == stage.usual
    stage.reopen((other, DesiredState.RUN))
    stage.wait(RunBegan, "2", count=2)


def test_fault_at_the_end_of_a_run_leaves_its_gpus_to_others(stage: LocalStage, monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(*_: object) -> None:
        raise LookupError

    stage.begun("1")
    stage.run("2")
    monkeypatch.setattr(run_files, "read_end", ended)
    stage.backend.kill("1", 1, "cancelled")
    assert stage.wait(RunEnded, "1").how is RunEnding.YIELDED
    stage.wait(RunBegan, "2")


def test_runner_that_cannot_be_watched_is_killed(stage: LocalStage, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> None:
        raise OSError(errno.ENOSPC, "too many watches")

    monkeypatch.setattr(stage.backend._loop, "watch", refuses)
    stage.run("1", WAITS)
    assert stage.wait(RunEnded, "1").how is RunEnding.FAILED
    assert not stage.processes()
