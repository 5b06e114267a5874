"""Runs of real processes: how they are stopped, and what is left of them."""

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.backends import PATIENCE, QUICK, STUBBORN, TRAINS, WAITS, LocalStage, is_alive, notice, number_inside, until

import poise
from poise.service.backends.api import DesiredState, RunBegan, RunEnded, RunEnding, RunProgressed
from poise.service.backends.local import processes
from poise.service.backends.local.orders import LocalSettings


def test_worker_that_saves_yields_and_goes_on_from_there(stage: LocalStage) -> None:
    stage.begun("1", TRAINS)
    stage.wait(RunProgressed, "1", count=2)
    stage.backend.stop("1", 1, notice())
    ended = stage.wait(RunEnded, "1")
    assert (ended.how, ended.cause, ended.codes) == (RunEnding.YIELDED, None, (75,))
    assert [ended.steps] == stage.backend.checkpoints("1")
    stage.run("1", TRAINS, epoch=2)
    first = stage.wait(RunProgressed, "1", 2)
    assert ended.steps is not None
    assert first.steps > ended.steps > 0
    assert (first.total, first.throughput, first.loss, first.checkpoint) == (1000, 50.0, 0.5, None)


def test_lease_says_why_it_ends_and_when(stage: LocalStage) -> None:
    stage.begun("1", STUBBORN, preemption="checkpoint")
    lease = stage.run_dir("1") / "lease.json"
    before = json.loads(lease.read_text())
    stage.backend.stop("1", 1, notice(deadline=500.0))
    until(lambda: json.loads(lease.read_text())["ends"] is not None)
    after = json.loads(lease.read_text())
    assert (before["ends"], before["version"], before["job"], before["epoch"]) == (None, 1, "1", 1)
    assert (after["cause"], after["text"], after["mode"]) == ("preempted", "job 7 has waited for longer", "checkpoint")
    assert after["ends"] > stage.wait(RunBegan, "1").at + 499


def test_worker_that_finishes_while_it_is_asked_to_leave_has_finished(stage: LocalStage) -> None:
    text = TRAINS.replace("sys.exit(75)", "sys.exit(0)")
    stage.begun("1", text)
    stage.wait(RunProgressed, "1")
    stage.backend.stop("1", 1, notice())
    ended = stage.wait(RunEnded, "1")
    assert (ended.how, ended.codes) == (RunEnding.FINISHED, (0,))


SWALLOWS = """
import sys, time
from pathlib import Path
from poise.worker import attach
lease = attach(save=lambda path: Path(path).write_text("x"), load=lambda path: None)
try:
    for step in lease.steps(1000):
        time.sleep(0.02)
except BaseException:
    sys.exit({code})
"""


@pytest.mark.parametrize("code", [0, 1])
def test_worker_that_has_saved_to_leave_has_yielded_whatever_its_script_makes_of_it(stage: LocalStage, code: int) -> None:
    stage.begun("1", (sys.executable, "-c", SWALLOWS.format(code=code)))
    stage.wait(RunProgressed, "1", count=2)
    stage.backend.stop("1", 1, notice())
    ended = stage.wait(RunEnded, "1")
    assert (ended.how, ended.cause, ended.codes) == (RunEnding.YIELDED, None, (code,))
    assert [ended.steps] == stage.backend.checkpoints("1")


def test_job_that_finishes_on_its_way_out_is_not_begun_again(stage: LocalStage) -> None:
    """Whether its next run waited for that, or is ordered before anybody has taken notice."""
    text = TRAINS.replace("sys.exit(75)", "sys.exit(0)")
    stage.begun("1", text)
    stage.wait(RunProgressed, "1")
    stage.backend.stop("1", 1, notice())
    stage.run("1", text, epoch=2)
    ended = stage.wait(RunEnded, "1", 2)
    assert (ended.how, ended.codes) == (RunEnding.YIELDED, ())
    order = stage.run("1", text, epoch=3)
    assert stage.wait(RunEnded, "1", 3).how is RunEnding.YIELDED
    stage.reopen((order, DesiredState.RUN))
    assert stage.wait(RunEnded, "1", 3, count=2).how is RunEnding.YIELDED
    assert not any(stage.run_dir("1", epoch).exists() for epoch in (2, 3))


QUITS_AT_TERM = (
    "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(0)); print('ready', flush=True); time.sleep(1000)"
)


@pytest.mark.parametrize(
    ("preemption", "how"), [("restart", RunEnding.YIELDED), ("never", RunEnding.YIELDED), ("checkpoint", RunEnding.FINISHED)]
)
def test_exit_0_after_term_means_work_done_only_where_there_was_time_to_save(
    stage: LocalStage, preemption: str, how: RunEnding
) -> None:
    stage.backend.close()
    stage.open(settings=replace(QUICK, term_seconds=PATIENCE))
    stage.run("1", QUITS_AT_TERM, preemption=preemption)
    stage.says("1", "ready")
    stage.backend.stop("1", 1, notice(deadline=0.05 if preemption == "checkpoint" else PATIENCE))
    assert stage.wait(RunEnded, "1").how is how


@pytest.mark.parametrize("preemption", ["checkpoint", "restart"])
def test_worker_that_ignores_everything_is_killed(stage: LocalStage, preemption: str) -> None:
    stage.run("1", STUBBORN, preemption=preemption)
    stage.says("1", "ready")
    stage.backend.stop("1", 1, notice(deadline=0.2))
    ended = stage.wait(RunEnded, "1")
    assert (ended.how, ended.cause, ended.codes) == (RunEnding.YIELDED, "KILL", (-9,))


def test_script_that_knows_nothing_of_poise_is_ended_by_term(stage: LocalStage) -> None:
    stage.begun("1", WAITS, preemption="restart")
    stage.backend.stop("1", 1, notice())
    ended = stage.wait(RunEnded, "1")
    assert (ended.how, ended.cause, ended.codes, ended.steps) == (RunEnding.YIELDED, "TERM", (-15,), None)


def test_worker_that_dies_while_it_saves_has_failed_and_goes_on_from_the_checkpoint_before(stage: LocalStage) -> None:
    stage.begun("1", TRAINS.replace("replace(kept", "raise OSError('disk'); replace(kept"))
    stage.wait(RunProgressed, "1")
    (stage.folder / "jobs" / "1" / "checkpoint" / "step-1").touch()
    (stage.folder / "jobs" / "1" / "checkpoint" / "step-2.part").touch()
    stage.backend.stop("1", 1, notice())
    ended = stage.wait(RunEnded, "1")
    assert (ended.how, ended.cause, ended.codes, ended.steps) == (RunEnding.FAILED, "traceback-from-crash", (1,), 1.0)


def test_job_that_reports_and_never_saves_goes_on_from_nothing(stage: LocalStage) -> None:
    stage.begun("1", TRAINS, preemption="restart")
    stage.wait(RunProgressed, "1")
    os.kill(stage.said("1", "runner.json")["replicas"][0]["pid"], signal.SIGKILL)
    assert stage.wait(RunEnded, "1").steps == 0.0


def test_worker_that_leaves_unasked_has_yielded(stage: LocalStage) -> None:
    stage.run("1", "import os, sys, time\nif os.environ['RANK'] == '0': sys.exit(75)\ntime.sleep(1000)", 0, 1, gpus=2,
              replicas="gpu", checkpoint={"deadline": 0.2})  # fmt: skip
    ended = stage.wait(RunEnded, "1")
    assert (ended.how, ended.codes) == (RunEnding.YIELDED, (75, -15))


def test_kill_is_not_slowed_down_by_a_deadline(stage: LocalStage) -> None:
    stage.begun("1", WAITS)
    stage.backend.stop("1", 1, notice(deadline=5000.0))
    stage.backend.kill("1", 1, "cancelled by ann")
    ended = stage.wait(RunEnded, "1")
    assert (ended.how, ended.cause) == (RunEnding.YIELDED, "TERM")


MOVES = """
import os, signal, sys, time
def moves():
    child = os.fork()
    if child == 0:
        time.sleep(1000)
    os.setpgid(child, child)
    os.setpgid(0, child)
    print("moved", flush=True)
"""
"""To a process group of its making: the one that it was started in is empty."""


def test_replica_that_moves_to_another_process_group_gets_term_when_its_time_is_up(stage: LocalStage) -> None:
    stage.run("1", MOVES + "moves()\ntime.sleep(1000)", max_duration=0.5)
    ended = stage.wait(RunEnded, "1")
    assert (ended.how, ended.cause, ended.codes) == (RunEnding.FAILED, "max-duration", (-15,))


def test_replica_that_moves_to_another_process_group_does_not_outlive_its_gang(stage: LocalStage) -> None:
    fails = "while not os.path.exists('moved'): time.sleep(0.01)\nsys.exit(1)"
    stays = "signal.signal(15, signal.SIG_IGN); moves(); open('moved', 'w'); time.sleep(1000)"
    text = MOVES + f"if os.environ['RANK'] == '0':\n exec({fails!r})\n{stays}"
    stage.run("1", text, 0, 1, gpus=2, replicas="gpu")
    ended = stage.wait(RunEnded, "1")
    assert (ended.how, ended.codes) == (RunEnding.FAILED, (1, -9))


def test_replica_gets_term_once(stage: LocalStage) -> None:
    counts = "signal.signal(15, lambda *_: print('told', flush=True)); print('ready', flush=True)\n"
    stage.run("1", "import signal, time; " + counts + "while True: time.sleep(1)", preemption="restart")
    stage.says("1", "ready")
    stage.backend.stop("1", 1, notice())
    stage.says("1", "told")
    stage.backend.kill("1", 1, "cancelled")
    assert stage.wait(RunEnded, "1").codes == (-9,)
    assert stage.text("1").count("told") == 1


# What is left


SPAWNS = f"""
import os, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        print("grandchild", os.getpid(), flush=True)
        {WAITS}
    os._exit(0)
os.wait()
"""


def grandchild(stage: LocalStage, job: str) -> int:
    stage.says(job, "grandchild")
    said = next(int(line.split()[1]) for line in stage.text(job).splitlines() if line.startswith("grandchild"))
    return next(pid for pid in stage.processes() if number_inside(pid) == said)


def test_run_is_over_only_when_nothing_of_it_is_left(stage: LocalStage) -> None:
    stage.run("1", SPAWNS)
    assert stage.wait(RunEnded, "1").how is RunEnding.FINISHED
    stage.says("1", "grandchild")
    assert not stage.processes()


def test_runner_that_is_killed_takes_everything_with_it_and_its_run_has_failed(stage: LocalStage) -> None:
    stage.begun("1", SPAWNS + WAITS)
    child, runner = grandchild(stage, "1"), stage.said("1", "runner.json")
    os.kill(runner["pid"], signal.SIGKILL)
    ended = stage.wait(RunEnded, "1")
    assert (ended.how, ended.cause, ended.codes) == (RunEnding.FAILED, "node-lost", (None,))
    assert not is_alive(child)
    assert not is_alive(runner["replicas"][0]["pid"])


def test_runner_that_is_killed_while_its_run_leaves_has_yielded(stage: LocalStage) -> None:
    stage.run("1", STUBBORN)
    stage.says("1", "ready")
    stage.backend.stop("1", 1, notice())
    until(lambda: "preempted" in (stage.run_dir("1") / "lease.json").read_text())
    os.kill(stage.said("1", "runner.json")["pid"], signal.SIGKILL)
    assert stage.wait(RunEnded, "1").how is RunEnding.YIELDED


def test_runner_that_does_not_do_its_work_is_killed(stage: LocalStage) -> None:
    stage.backend.close()
    stage.open(settings=LocalSettings(term_seconds=0.1, guard_seconds=0.2))
    stage.begun("1")
    os.kill(stage.said("1", "runner.json")["pid"], signal.SIGSTOP)
    stage.backend.stop("1", 1, notice(deadline=0.1))
    ended = stage.wait(RunEnded, "1")
    assert (ended.how, ended.cause) == (RunEnding.YIELDED, "KILL")


WRITES_LATER = """
import errno, sys
sys.path.append({source!r})
from poise.service.backends.local.lease_files import EXIT, is_there, put
from poise.service.backends.local.runner import supervisor
def put_later(folder, name, fields):
    if name == EXIT and not is_there(folder, "room"):
        raise OSError(errno.ENOSPC, "No space left on device")
    put(folder, name, fields)
supervisor.put = put_later
sys.exit(supervisor.main(sys.argv[1], int(sys.argv[2])))
"""
"""A runner on a disk without room for its end, until there is a file `room`."""


def test_runner_that_waits_for_room_to_write_down_the_end_is_let(
    stage: LocalStage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runner.py").write_text(WRITES_LATER.format(source=str(Path(poise.__file__).parents[1])))
    monkeypatch.setattr(processes, "MAIN", str(tmp_path / "runner.py"))
    stage.backend.close()
    stage.open(settings=LocalSettings(term_seconds=0.1, guard_seconds=0.1))
    stage.begun("1", "")
    stage.begun("2", WAITS, 1)
    until(lambda: not is_alive(stage.said("1", "runner.json")["replicas"][0]["pid"]))
    os.kill(stage.said("2", "runner.json")["pid"], signal.SIGSTOP)
    for job in ("1", "2"):
        stage.backend.stop(job, 1, notice(deadline=0.1))
    assert stage.wait(RunEnded, "2").cause == "KILL"
    assert not stage.of(RunEnded, "1")
    (stage.run_dir("1") / "room").touch()
    ended = stage.wait(RunEnded, "1")
    assert (ended.how, ended.codes) == (RunEnding.FINISHED, (0,))


def test_runner_that_gets_term_ends_its_run_as_lost(stage: LocalStage) -> None:
    stage.begun("1")
    os.kill(stage.said("1", "runner.json")["pid"], signal.SIGTERM)
    ended = stage.wait(RunEnded, "1")
    assert (ended.how, ended.cause, ended.codes) == (RunEnding.FAILED, "node-lost", (-15,))


def test_replicas_do_not_outlive_their_runner_without_a_service(stage: LocalStage) -> None:
    order = stage.begun("1")
    runner = stage.said("1", "runner.json")
    stage.backend.close()
    os.kill(runner["pid"], signal.SIGKILL)
    until(lambda: not is_alive(runner["replicas"][0]["pid"]))
    stage.reopen((order, DesiredState.RUN))
    assert stage.wait(RunEnded, "1").cause == "node-lost"


# Housekeeping


def test_runs_of_long_ago_are_removed(stage: LocalStage) -> None:
    for epoch in range(1, 6):
        stage.run("1", "raise SystemExit(1)", epoch=epoch)
        stage.wait(RunEnded, "1", epoch)
    assert sorted(path.name for path in (stage.folder / "jobs" / "1" / "runs").iterdir()) == ["3", "4", "5"]
    assert stage.text("1").count("--- run") == 5


def test_log_of_a_chatty_replica_is_rotated_and_read_as_one(stage: LocalStage) -> None:
    stage.backend.close()
    stage.open(settings=LocalSettings(QUICK.term_seconds, log_bytes=100_000, log_files=3))
    stage.run("1", "for number in range(60_000): print(f'{number:09}')")
    assert stage.wait(RunEnded, "1").how is RunEnding.FINISHED
    title = "--- run 1 on v100-0 [0] ---\n"
    end = len(title) + 600_000
    kept = stage.backend.log("1", 0, 0, 1 << 20)
    assert kept.next == end
    assert 150_000 < len(kept.text) <= 300_000
    assert kept.offset == end - len(kept.text)
    middle = end - 150_000
    part = stage.backend.log("1", 0, middle, 100_000)
    want = "".join(f"{number:09}\n" for number in range(60_000))
    assert part.text.decode() == want[middle - len(title) :][:100_000]
    assert len(list((stage.folder / "jobs" / "1" / "log").iterdir())) == 3


def test_hundreds_of_lines_at_the_end_are_all_kept(stage: LocalStage) -> None:
    stage.run("1", "import sys; sys.stdout.write('x' * 300_000 + '\\n'); sys.stdout.write('last'); sys.exit(3)")
    assert stage.wait(RunEnded, "1").codes == (3,)
    assert len(stage.text("1")) > 300_000
    stage.run("1", "", epoch=2)
    stage.wait(RunEnded, "1", 2)
    assert "xlast\n--- run 2" in stage.text("1").replace("\nlast", "last")


def test_worker_of_the_reference_page_yields_and_goes_on(stage: LocalStage) -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "lease-protocol.md").read_text(encoding="utf-8")
    text = page.partition("```python\n")[2].partition("```")[0]
    stage.begun("1", text)
    stage.backend.stop("1", 1, notice())
    ended = stage.wait(RunEnded, "1")
    assert (ended.how, ended.codes, [ended.steps]) == (RunEnding.YIELDED, (75,), stage.backend.checkpoints("1"))
    stage.run("1", text.replace("200", str(int(ended.steps or 0) + 1)), epoch=2)
    assert stage.wait(RunEnded, "1", 2).how is RunEnding.FINISHED
