"""The fake Poise that tests of training scripts use: several ranks, their number, and what goes wrong with them."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.backends import until

from poise.worker import WorkerError, rank_processes
from poise.worker.testing import preempting

ROOT = Path(__file__).resolve().parents[2]
CHAIN = [sys.executable, str(ROOT / "tests" / "e2e" / "workers" / "ranks.py"), "12", "0", "seed"]
"""A chain of hashes over the random numbers of all ranks, none of which completes a step without the others."""


def _script(folder: Path, text: str) -> list[str]:
    path = folder / "train.py"
    path.write_text(f"import json, os, sys, time\nrank = int(os.environ['RANK'])\n{text}")
    return [sys.executable, str(path)]


def _hashes(processes: list[subprocess.CompletedProcess[str]]) -> list[str]:
    assert [each.returncode for each in processes] == [0] * len(processes), processes
    return [each.stdout.splitlines()[-1] for each in processes]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_preempting_runs_several_ranks_that_end_as_without_an_interruption(ranks: int) -> None:
    with preempting(after_steps=[], ranks=ranks) as poise:
        poise.run_command(CHAIN)
        want = _hashes(poise.processes)
    with preempting(after_steps=4, ranks=ranks) as poise:
        last = poise.run_command(CHAIN)
        assert _hashes(poise.processes) == want == [want[0]] * ranks
    assert last is poise.processes[0]
    assert poise.starts == 3


@pytest.mark.slow
def test_preempting_changes_the_number_of_ranks_from_run_to_run() -> None:
    with preempting(after_steps=3, ranks=[2, 3, 1]) as poise:
        said = poise.run_command(CHAIN).stdout
    assert (poise.starts, len(poise.processes)) == (4, 1)
    assert said.startswith("begins at step 11\n")  # 4 of two ranks, 4 of three, which agree in one step more; 3 of one


def test_preempting_says_to_each_rank_what_the_service_says(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "reference" / "lease-protocol.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[A-Z_`, ]+) \| (.*) \|$", page, re.MULTILINE)
    every = {name for names, text in rows for name in re.findall(r"`([A-Z_]+)`", names) if "not set" not in text}
    assert {"WORLD_SIZE", "POISE_TENANT"} <= every
    told = _script(tmp_path, "print(json.dumps(dict(os.environ)))")
    with preempting(after_steps=2, ranks=3, micro_batches=4, speeds=[2, 1, 0.5, 7]) as poise:
        poise.run_command(told)
    found = [json.loads(each.stdout) for each in poise.processes]
    assert every - set(found[0]) == {"CUDA_VISIBLE_DEVICES"}  # whatever GPUs the tests may use
    assert [(each["RANK"], each["LOCAL_RANK"]) for each in found] == [("0", "0"), ("1", "1"), ("2", "2")]
    names = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "POISE_GPUS", "POISE_MICRO_BATCHES", "POISE_RANK_SPEEDS", "POISE_LEASE_STEPS")
    assert [tuple(each[name] for name in names) for each in found] == [("3", "3", "3", "4", "2,1,0.5", "2")] * 3
    assert len({each["MASTER_PORT"] for each in found}) == 1


def test_preempting_says_nothing_of_micro_batches_to_a_job_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POISE_MICRO_BATCHES", "9")
    monkeypatch.setenv("POISE_RANK_SPEEDS", "1,2")
    told = _script(tmp_path, "print(sorted(os.environ))")
    with preempting(after_steps=[]) as poise:
        assert "POISE_MICRO_BATCHES" not in poise.run_command(told).stdout
        assert "POISE_RANK_SPEEDS" not in poise.processes[0].stdout


def test_preempting_ends_all_ranks_when_one_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_processes, "GRACE", 0.05)
    fails = _script(tmp_path, "if rank == 1:\n    sys.exit('no such data')\nwhile True:\n    time.sleep(60)")
    with preempting(after_steps=2, ranks=3) as poise:
        failed = poise.run_command(fails)
    assert (failed.returncode, failed.stderr) == (1, "no such data\n")
    assert [each.returncode for each in poise.processes] == [-9, 1, -9]


def test_preempting_names_ranks_that_hang(tmp_path: Path) -> None:
    hangs = _script(tmp_path, "print('rank', rank, 'waits', flush=True)\nwhile rank == 1:\n    time.sleep(60)")
    with preempting(after_steps=2, ranks=2, timeout=1.0) as poise, pytest.raises(AssertionError) as found:
        poise.run_command(hangs)
    assert str(found.value) == (
        "start 1: rank 1 of 2 did not end within 1 s (rank 0 ended with exit code 0); rank 1 printed last: rank 1 waits"
    )


@pytest.mark.parametrize("end", ["", "sys.exit(3)"])
def test_preempting_leaves_no_process_behind_that_a_rank_has_started(tmp_path: Path, end: str) -> None:
    """As the workers of a loader that did not end with their training."""
    starts = _script(tmp_path, f"import subprocess\nprint(subprocess.Popen(['sleep', '600']).pid)\n{end}")
    with preempting(after_steps=2, ranks=2) as poise:
        poise.run_command(starts)
    for pid in (int(each.stdout) for each in poise.processes):
        # Killed; whoever inherits it has yet to reap it, perhaps.
        until(lambda pid=pid: not _runs(pid))


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").split()[2] not in "ZX"
    except FileNotFoundError:
        return False


def test_preempting_refuses_a_function_on_several_ranks() -> None:
    with preempting(after_steps=2, ranks=[1, 2]) as poise, pytest.raises(WorkerError) as found:
        poise.run(print)
    assert str(found.value) == "run: a function is one rank, and ranks are up to 2; use run_command"
    assert poise.starts == 0


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"after_steps": 0}, "after_steps: expected 1 or more, got 0"),
        ({"after_steps": [1, 2.5]}, "after_steps: expected 1 or more, got [1, 2.5]"),
        ({"ranks": 0}, "ranks: expected 1 or more, got 0"),
        ({"ranks": [2, -1]}, "ranks: expected 1 or more, got [2, -1]"),
        ({"ranks": []}, "ranks: expected at least one number"),
        ({"micro_batches": 0}, "micro_batches: expected 1 or more, got 0"),
        ({"ranks": [1, 3], "speeds": [1, 2]}, "speeds: expected 3 numbers above 0, one per rank, got [1, 2]"),
        ({"speeds": [0]}, "speeds: expected 1 number above 0, one per rank, got [0]"),
        ({"timeout": 0}, "timeout: expected seconds above 0, got 0"),
        ({"after_steps": None}, "after_steps: expected 1 or more, got None"),
        ({"after_steps": True}, "after_steps: expected 1 or more, got True"),
        ({"after_steps": 2.5}, "after_steps: expected 1 or more, got 2.5"),
        ({"ranks": "two"}, "ranks: expected 1 or more, got 'two'"),
        ({"micro_batches": [1, 2]}, "micro_batches: expected 1 or more, got [1, 2]"),
        ({"speeds": 1.0}, "speeds: expected 1 number above 0, one per rank, got 1.0"),
        ({"speeds": ["fast"]}, "speeds: expected 1 number above 0, one per rank, got ['fast']"),
        ({"timeout": "1m"}, "timeout: expected seconds above 0, got '1m'"),
        ({"timeout": None}, "timeout: expected seconds above 0, got None"),
    ],
)
def test_preempting_refuses_what_cannot_be(more: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(problem)}$"), preempting(**{"after_steps": 1, **more}):  # type: ignore[arg-type]
        pass
