"""The examples as real processes: killed, ended, told to leave; what they come to is what they come to undisturbed."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
from tests.leases import Job, ended
from tests.shell import wait_until

from poise.worker import attach
from poise.worker.testing import preempting

LIVE = Path(__file__).resolve().parents[2] / "examples" / "live"
COUNT = [sys.executable, str(LIVE / "count_steps.py")]


def _hash(steps: int, seed: str = "0") -> str:
    got = hashlib.sha256(seed.encode()).hexdigest()
    for step in range(steps):
        got = hashlib.sha256(f"{got} {step}".encode()).hexdigest()
    return got


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_worker_killed_at_any_point_comes_to_the_same(job: Job) -> None:
    command, chance = [*COUNT, "--steps", "20000"], Random(4)
    for _ in range(8):
        target = job.saved() + chance.randint(1, 20)
        process = job.start([*command, "--seconds-per-step", "0.0005"], POISE_CHECKPOINT_EVERY="0.000001")
        wait_until(lambda target=target: job.saved() >= target, process)  # type: ignore[misc]
        process.kill()
        assert ended(process)[0] == -signal.SIGKILL
        assert target <= job.saved() < 20_000
    assert ended(job.start(command)) == (0, f"{_hash(20_000)}\n")
    assert sorted(path.name.partition("-")[0] for path in job.checkpoints.iterdir()) == ["step", "step"]


def test_worker_whose_lease_ends_leaves_with_75_and_goes_on_at_the_very_step(job: Job) -> None:
    command = [*COUNT, "--steps", "2000", "--seconds-per-step", "0.02", "--speeds", "v100=1,k80=0.5"]
    process = job.start(command, POISE_GPU_TYPE="k80")
    wait_until(lambda: job.steps() > 0, process)
    job.end_lease()
    code, said = ended(process)
    assert code == 75
    assert said == f"poise: leaving before step {job.saved()} (b is behind its share); {job.saved()} steps are saved\n"
    report = json.loads((job.run_dir / "progress.json").read_text())
    assert 0 < report["steps"] == report["checkpoint"] == job.saved() < 2000
    assert 0 < report["throughput"] < 45  # 25 on a k80 that is not late
    assert ended(job.start([*COUNT, "--steps", "2000"])) == (0, f"{_hash(2000)}\n")


def test_worker_that_gets_term_leaves_with_75_and_its_work(job: Job) -> None:
    process = job.start([*COUNT, "--steps", "2000", "--seconds-per-step", "0.05"])
    wait_until(lambda: job.steps() > 0, process)
    process.terminate()
    assert ended(process)[0] == 75
    assert ended(job.start([*COUNT, "--steps", "2000"])) == (0, f"{_hash(2000)}\n")


def test_worker_that_cannot_save_at_the_end_of_its_lease_leaves_with_73(job: Job) -> None:
    process = job.start([*COUNT, "--steps", "2000", "--seconds-per-step", "0.05"])
    wait_until(lambda: job.steps() > 0, process)
    job.checkpoints.write_text("in the way")
    job.end_lease()
    assert ended(process)[0] == 73
    assert json.loads((job.run_dir / "failure.json").read_text())["cause"] == "model-checkpoint-error"


def test_worker_examples_run_outside_poise() -> None:
    alone = subprocess.run([*COUNT, "--steps", "20", "--seed", "x"], capture_output=True, text=True, check=True)
    assert alone.stdout == f"{_hash(20, 'x')}\n"
    unaware = subprocess.run(
        [sys.executable, str(LIVE / "unaware.py"), "2", "0.01"], capture_output=True, text=True, check=True
    )
    assert unaware.stdout == "1 of 2\n2 of 2\n"


@pytest.mark.frameworks
@pytest.mark.slow
def test_worker_pytorch_example_ends_with_the_weights_of_an_uninterrupted_run() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    command = [sys.executable, str(LIVE / "train_pytorch.py"), "--steps", "40"]
    alone = subprocess.run(command, capture_output=True, text=True, check=True)
    with preempting(after_steps=[22]) as poise:
        done = poise.run_command(command)
    assert (done.returncode, done.stdout, done.stderr) == (0, alone.stdout, "")
    assert poise.starts == 2


LOOP = """
import threading, time
from pathlib import Path
from poise.worker import attach

done = []

def save(path):
    Path(path).write_text(str(done))

def load(path):
    done.extend(eval(Path(path).read_text()))

def train():
    lease = attach(save=save, load=load)
    for step in lease.steps(20):
        done.append(step)
"""
IN_A_THREAD = f"{LOOP}\nthread = threading.Thread(target=train)\nthread.start()\nthread.join()\nprint(done)\n"
CATCHES_ALL = f"{LOOP}\ntry:\n    train()\nexcept BaseException as error:\n    print('caught', error)\nprint(done)\n"


@pytest.mark.parametrize("text", [IN_A_THREAD, CATCHES_ALL])
def test_script_that_does_not_let_the_exit_through_is_resumed_all_the_same(tmp_path: Path, text: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    with preempting(after_steps=7) as poise:
        last = poise.run_command([sys.executable, str(script)])
    assert (poise.starts, last.returncode, last.stdout) == (3, 0, f"{list(range(20))}\n")


def test_function_that_catches_the_exit_is_called_again(tmp_path: Path) -> None:
    def train() -> list[int]:
        done: list[int] = []
        lease = attach(save=lambda path: Path(path).write_text(json.dumps(done)), load=lambda path: done.extend(_read(path)))
        with suppress(SystemExit):
            done.extend(lease.steps(20))
        return done

    with preempting(after_steps=7) as poise:
        assert poise.run(train) == list(range(20))
    assert poise.starts == 3


def _read(path: str) -> list[int]:
    found = json.loads(Path(path).read_text())
    assert isinstance(found, list)
    return found


def test_thread_whose_checkpoint_cannot_be_loaded_ends_the_process_with_73(job: Job, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(IN_A_THREAD)
    job.checkpoints.mkdir()
    (job.checkpoints / "step-3").write_text("no list")
    assert ended(job.start([sys.executable, str(script)]))[0] == 73


DIES_IN_BETWEEN = """
import os, signal, sys, time
from pathlib import Path
from poise.worker import attach
from poise.worker.rank_state import RankStates

lease = attach(save=lambda path: Path(path).write_text("weights"), load=lambda path: Path(path).read_text())
if lease.rank and os.environ.get("DIES"):
    RankStates.publish = lambda ranks, step: os.kill(os.getpid(), signal.SIGKILL)
for step in lease.steps(3):
    print("begins at", step, flush=True)
"""


def test_rank_killed_before_it_has_told_its_state_leaves_no_checkpoint_that_counts(job: Job, tmp_path: Path) -> None:
    """Rank 0 has written its own part by then, and waits for the other until the runner ends it."""
    script = tmp_path / "train.py"
    script.write_text(DIES_IN_BETWEEN)
    command = [sys.executable, str(script)]
    both = {"WORLD_SIZE": "2", "DIES": "1"}
    first = job.start(command, RANK="0", **both)
    second = job.join(command, RANK="1", **both)
    assert ended(second)[0] == -signal.SIGKILL
    wait_until(lambda: (job.checkpoints / "saving-3").exists(), first)
    first.kill()
    assert ended(first)[0] == -signal.SIGKILL
    assert os.listdir(job.checkpoints) == ["saving-3"]
    again = [job.start(command, RANK="0", WORLD_SIZE="2"), job.join(command, RANK="1", WORLD_SIZE="2")]
    said = "begins at 0\nbegins at 1\nbegins at 2\n"
    assert [ended(each) for each in again] == [(0, said)] * 2
    assert sorted(os.listdir(job.checkpoints)) == ["ranks-3.json", "step-3"]
