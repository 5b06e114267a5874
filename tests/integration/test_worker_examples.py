"""The training scripts of examples/live, which the how-to shows: each resumes exactly, on as many ranks as it is for."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from poise.worker.testing import preempting

LIVE = Path(__file__).resolve().parents[2] / "examples" / "live"

pytestmark = pytest.mark.slow


def _command(script: str, *options: str) -> list[str]:
    return [sys.executable, str(LIVE / script), *options]


def _alone(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _printed(processes: list[subprocess.CompletedProcess[str]]) -> list[list[str]]:
    """What each rank printed."""
    assert [(each.returncode, each.stderr) for each in processes] == [(0, "")] * len(processes)
    return [each.stdout.splitlines() for each in processes]


def test_numpy_example_ends_with_the_weights_of_an_uninterrupted_run() -> None:
    command = _command("train_numpy.py")
    with preempting(after_steps=[1, 40]) as poise:
        assert poise.run_command(command).stdout == _alone(command)
    assert poise.starts == 3


@pytest.mark.frameworks
def test_jax_example_ends_with_the_weights_of_an_uninterrupted_run() -> None:
    pytest.importorskip("jax", reason="jax is not installed")
    command = _command("train_jax.py")
    with preempting(after_steps=[41]) as poise:
        assert poise.run_command(command).stdout == _alone(command)
    assert poise.starts == 2


@pytest.mark.frameworks
@pytest.mark.parametrize(("ranks", "after"), [(1, [13, 7]), (2, [12])], ids=["one rank", "two ranks"])
def test_epochs_example_ends_with_the_weights_of_an_uninterrupted_run(ranks: int, after: list[int]) -> None:
    """An epoch has 10 steps: it is left in its middle, and one rank leaves a second time between two epochs."""
    pytest.importorskip("torch", reason="torch is not installed")
    command = _command("train_epochs.py", "--epochs", "3")
    with preempting(after_steps=[], ranks=ranks) as poise:
        poise.run_command(command)
        want = _printed(poise.processes)
    assert [len(lines) for lines in want] == [4, 0][:ranks]
    with preempting(after_steps=after, ranks=ranks) as poise:
        poise.run_command(command)
        got = _printed(poise.processes)
    assert poise.starts == len(after) + 1
    assert got[0] == want[0][-len(got[0]) :]  # earlier runs have printed the first epochs
    assert len(got[0]) >= 2


@pytest.mark.frameworks
def test_micro_batches_example_ends_with_the_weights_of_one_process_on_ranks_that_change(tmp_path: Path) -> None:
    torch: Any = pytest.importorskip("torch", reason="torch is not installed")
    command = _command("train_micro_batches.py", "--steps", "30", "--out")
    alone, several = str(tmp_path / "alone.pt"), str(tmp_path / "ranks.pt")
    with preempting(after_steps=[], micro_batches=4) as poise:
        poise.run_command([*command, alone])
    with preempting(after_steps=[7], ranks=[3, 2], micro_batches=4, speeds=[2, 1, 1]) as poise:
        poise.run_command([*command, several])
        digests = _printed(poise.processes)
        assert digests[0] == digests[1]
        assert (poise.starts, len(poise.processes)) == (2, 2)
    torch.testing.assert_close(torch.load(several), torch.load(alone), rtol=0, atol=1e-6)


@pytest.mark.frameworks
def test_samples_that_workers_draw_are_the_same_whatever_the_workers_and_resumptions(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    script = tmp_path / "draw.py"
    script.write_text(
        """
import json, random, sys, numpy, torch
from poise.worker.pytorch import Batches

class Drawn(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, row):
        return torch.tensor([row, torch.rand(1).item(), random.random(), numpy.random.random()], dtype=torch.float64)

if __name__ == "__main__":
    found = []
    for workers in (1, 2):
        batches = Batches(Drawn(), batch_size=2, seed=3, num_workers=workers)
        found.append([*batches, *batches])
    resumed = Batches(Drawn(), batch_size=2, seed=3, num_workers=2)
    resumed.load_state_dict({"next": 2})
    found.append([*found[0][:2], *resumed, *resumed])
    first, *others = [torch.cat(each).tolist() for each in found]
    assert all(each == first for each in others)
    assert len({value for sample in first for value in sample[1:]}) == 3 * 16
"""
    )
    done = subprocess.run([sys.executable, "-W", "error", str(script)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), json.dumps(done.stderr)
