"""The examples as real processes: killed, ended, told to leave; what they come to is what they come to undisturbed."""

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
from tests.shell import PATIENCE, wait_until

from poise.worker import attach
from poise.worker.protocol import replace_json
from poise.worker.testing import preempting

LIVE = Path(__file__).resolve().parents[2] / "examples" / "live"
COUNT = [sys.executable, str(LIVE / "count_steps.py")]


def _hash(steps: int, seed: str = "0") -> str:
    got = hashlib.sha256(seed.encode()).hexdigest()
    for step in range(steps):
        got = hashlib.sha256(f"{got} {step}".encode()).hexdigest()
    return got


class Job:
    """A job's directory, in which runs are started as Poise starts them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.checkpoints = folder, folder / "checkpoint"
        self.epoch = 0

    @property
    def run_dir(self) -> Path:
        return self.folder / "runs" / str(self.epoch)

    def start(self, command: Sequence[str], **variables: str) -> subprocess.Popen[str]:
        self.epoch += 1
        self.run_dir.mkdir(parents=True)
        replace_json(str(self.run_dir), "lease.json", {"job": "a", "epoch": self.epoch, "ends": None})
        return self.join(command, **variables)

    def join(self, command: Sequence[str], **variables: str) -> subprocess.Popen[str]:
        """One more process of the same run."""
        own = {"POISE_RUN_DIR": str(self.run_dir), "POISE_CHECKPOINT_DIR": str(self.checkpoints), "POISE_LEASE_VERSION": "1"}
        return subprocess.Popen(
            command, env={**os.environ, **own, **variables}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def end_lease(self) -> None:
        fields = {"job": "a", "epoch": self.epoch, "ends": 1.0, "cause": "share", "text": "b is behind its share"}
        replace_json(str(self.run_dir), "lease.json", fields)

    def steps(self) -> int:
        """As the run reports them."""
        try:
            return int(json.loads((self.run_dir / "progress.json").read_text())["steps"])
        except FileNotFoundError:
            return 0

    def saved(self) -> int:
        return max((int(path.name[5:]) for path in self.checkpoints.glob("step-*")), default=0)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def _ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, err = process.communicate(timeout=PATIENCE)
    return process.returncode, out or err


def test_worker_killed_at_any_point_comes_to_the_same(job: Job) -> None:
    command, chance = [*COUNT, "--steps", "20000"], Random(4)
    for _ in range(8):
        target = job.saved() + chance.randint(1, 20)
        process = job.start([*command, "--seconds-per-step", "0.0005"], POISE_CHECKPOINT_EVERY="0.000001")
        wait_until(lambda target=target: job.saved() >= target, process)  # type: ignore[misc]
        process.kill()
        assert _ended(process)[0] == -signal.SIGKILL
        assert target <= job.saved() < 20_000
    assert _ended(job.start(command)) == (0, f"{_hash(20_000)}\n")
    assert sorted(path.name.partition("-")[0] for path in job.checkpoints.iterdir()) == ["step", "step"]


def test_worker_whose_lease_ends_leaves_with_75_and_goes_on_at_the_very_step(job: Job) -> None:
    command = [*COUNT, "--steps", "2000", "--seconds-per-step", "0.02", "--speeds", "v100=1,k80=0.5"]
    process = job.start(command, POISE_GPU_TYPE="k80")
    wait_until(lambda: job.steps() > 0, process)
    job.end_lease()
    code, said = _ended(process)
    assert code == 75
    assert said == f"poise: leaving before step {job.saved()} (b is behind its share); {job.saved()} steps are saved\n"
    report = json.loads((job.run_dir / "progress.json").read_text())
    assert 0 < report["steps"] == report["checkpoint"] == job.saved() < 2000
    assert 0 < report["throughput"] < 45  # 25 on a k80 that is not late
    assert _ended(job.start([*COUNT, "--steps", "2000"])) == (0, f"{_hash(2000)}\n")


def test_worker_that_gets_term_leaves_with_75_and_its_work(job: Job) -> None:
    process = job.start([*COUNT, "--steps", "2000", "--seconds-per-step", "0.05"])
    wait_until(lambda: job.steps() > 0, process)
    process.terminate()
    assert _ended(process)[0] == 75
    assert _ended(job.start([*COUNT, "--steps", "2000"])) == (0, f"{_hash(2000)}\n")


def test_worker_that_cannot_save_at_the_end_of_its_lease_leaves_with_73(job: Job) -> None:
    process = job.start([*COUNT, "--steps", "2000", "--seconds-per-step", "0.05"])
    wait_until(lambda: job.steps() > 0, process)
    job.checkpoints.write_text("in the way")
    job.end_lease()
    assert _ended(process)[0] == 73
    assert json.loads((job.run_dir / "failure.json").read_text())["cause"] == "model-checkpoint-error"


def test_worker_examples_run_outside_poise() -> None:
    alone = subprocess.run([*COUNT, "--steps", "20", "--seed", "x"], capture_output=True, text=True, check=True)
    assert alone.stdout == f"{_hash(20, 'x')}\n"
    unaware = subprocess.run(
        [sys.executable, str(LIVE / "unaware.py"), "2", "0.01"], capture_output=True, text=True, check=True
    )
    assert unaware.stdout == "1 of 2\n2 of 2\n"


@pytest.mark.slow
def test_worker_pytorch_example_ends_with_the_weights_of_an_uninterrupted_run() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    command = [sys.executable, str(LIVE / "train_pytorch.py"), "--steps", "40"]
    alone = subprocess.run(command, capture_output=True, text=True, check=True)
    with preempting(after_steps=[22]) as poise:
        done = poise.run_command(command)
    assert (done.returncode, done.stdout, done.stderr) == (0, alone.stdout, "")
    assert poise.starts == 2


RANKS = """
import hashlib, os, time, torch, torch.distributed as dist
from poise.worker import attach
from poise.worker.pytorch import State, batch_at

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
data = torch.randn(64, 4)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
state = State(model=model, optimizer=optimizer)
lease = attach(save=state.save, load=state.load)
for step in lease.steps(200):
    rows = batch_at(step, samples=64, batch_size=8, seed=0).chunk(lease.micro_batches)
    optimizer.zero_grad()
    for index in lease.share():
        (model(data[rows[index]]).square().mean() / lease.micro_batches).backward()
    for weights in model.parameters():
        dist.all_reduce(weights.grad)
    optimizer.step()
    time.sleep(float(os.environ.get("PAUSE", 0)))
print(hashlib.sha256(b"".join(weights.detach().numpy().tobytes() for weights in model.parameters())).hexdigest())
"""


def _ranks(job: Job, script: Path, **more: str) -> list[subprocess.Popen[str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "POISE_MICRO_BATCHES": "4", **more}
    first = job.start([sys.executable, str(script)], RANK="0", **variables)
    return [first, job.join([sys.executable, str(script)], RANK="1", **variables)]


@pytest.mark.slow
def test_worker_ranks_stop_together_and_end_with_the_weights_of_an_uninterrupted_run(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not torch.distributed.is_available():
        pytest.skip("torch has no torch.distributed")
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    want = [_ended(process) for process in _ranks(Job(tmp_path / "alone"), script)]
    assert [code for code, _ in want] == [0, 0], want
    job = Job(tmp_path / "shared")
    first, second = _ranks(job, script, PAUSE="0.05")
    wait_until(lambda: job.steps() > 0, first)
    job.end_lease()
    assert [_ended(first)[0], _ended(second)[0]] == [75, 75]
    assert json.loads((job.run_dir / "stop.json").read_text()) == {"version": 1, "step": job.saved()}
    assert [_ended(process) for process in _ranks(job, script)] == want


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
    assert _ended(job.start([sys.executable, str(script)]))[0] == 73
