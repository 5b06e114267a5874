"""The parts of the worker library: shares, checkpoints, reports, and what the environment says."""

import json
import os
import subprocess
import sys
from fractions import Fraction
from math import ceil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poise.worker import Notice, WorkerError, attach
from poise.worker.checkpoints import KEPT, Checkpoints
from poise.worker.micro_batches import counts, share
from poise.worker.progress import Progress, Speed
from poise.worker.protocol import WatchedFile, notice_in, replace_json, worker_env
from poise.worker.testing import preempting

speeds_of_ranks = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=12)


@given(st.integers(0, 200), speeds_of_ranks)
def test_shares_are_disjoint_and_cover_all(parts: int, speeds: list[float]) -> None:
    got = [index for rank in range(len(speeds)) for index in share(parts, rank, speeds)]
    assert got == list(range(parts))


@given(st.integers(0, 200), st.integers(1, 20))
def test_shares_of_ranks_alike_differ_by_at_most_one(parts: int, ranks: int) -> None:
    got = counts(parts, [1.0] * ranks)
    assert max(got) - min(got) <= 1
    assert got == sorted(got, reverse=True)


@given(st.integers(0, 200), speeds_of_ranks)
def test_shares_have_the_slowest_rank_done_as_early_as_can_be(parts: int, speeds: list[float]) -> None:
    """Whoever is done before that moment has not done all: so many micro-batches end before it, on all ranks together."""
    exact = list(map(Fraction, speeds))
    last = max(got / speed for got, speed in zip(counts(parts, speeds), exact, strict=True))
    assert sum(ceil(last * speed) - 1 for speed in exact) < max(parts, 1)


def test_shares_of_a_slow_rank_may_be_nothing() -> None:
    assert counts(9, [10.0, 1.0, 1.0]) == [9, 0, 0]
    assert counts(12, [10.0, 1.0, 1.0]) == [10, 1, 1]
    assert counts(9, [4.0, 4.0, 1.0]) == [4, 4, 1]


def test_shares_follow_the_speeds_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("POISE_MICRO_BATCHES", "8")
    assert [len(_of_rank(monkeypatch, rank)) for rank in range(3)] == [3, 3, 2]
    monkeypatch.setenv("POISE_RANK_SPEEDS", "2,1,1")
    assert [_of_rank(monkeypatch, rank) for rank in range(3)] == [range(4), range(4, 6), range(6, 8)]


def _of_rank(monkeypatch: pytest.MonkeyPatch, rank: int) -> range:
    monkeypatch.setenv("RANK", str(rank))
    return attach().share()


def test_shares_outside_poise_are_one_micro_batch_a_rank_or_what_the_script_says() -> None:
    lease = attach()
    assert (lease.micro_batches, lease.share(), lease.share(4)) == (1, range(1), range(4))


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({"RANK": "x"}, "RANK: cannot be 'x'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK: expected 0 to 1 as WORLD_SIZE is 2, got 2"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE: cannot be '0'"),
        ({"POISE_CHECKPOINT_EVERY": "-1"}, "POISE_CHECKPOINT_EVERY: cannot be '-1'"),
        ({"POISE_CHECKPOINT_EVERY": "nan"}, "POISE_CHECKPOINT_EVERY: cannot be 'nan'"),
        ({"POISE_MICRO_BATCHES": "1.5"}, "POISE_MICRO_BATCHES: cannot be '1.5'"),
        ({"POISE_RANK_SPEEDS": "1,0", "WORLD_SIZE": "2"}, "POISE_RANK_SPEEDS: cannot be '1,0'"),
        ({"POISE_RANK_SPEEDS": "1,2"}, "POISE_RANK_SPEEDS: expected 1 numbers, one a rank, got 2"),
        (
            {"POISE_RUN_DIR": "/run", "POISE_LEASE_VERSION": "2"},
            "POISE_LEASE_VERSION: the service speaks version 2, this library 1; install its Poise",
        ),
    ],
)
def test_surroundings_that_cannot_be_are_named(variables: dict[str, str], problem: str) -> None:
    with pytest.raises(WorkerError) as refused:
        worker_env(variables)
    assert str(refused.value) == problem


def test_surroundings_that_are_empty_are_not_said() -> None:
    empty = worker_env({"POISE_RUN_DIR": "", "POISE_CHECKPOINT_EVERY": "", "RANK": "", "POISE_MICRO_BATCHES": ""})
    assert empty == worker_env({})
    assert (empty.rank, empty.world_size, empty.run_dir) == (0, 1, None)


def _save(text: str, path: str) -> None:
    Path(path).write_text(text, encoding="utf-8")


def _write(checkpoints: Checkpoints, *steps: int) -> None:
    for step in steps:
        checkpoints.write(step, lambda path, step=step: _save(str(step), path))  # type: ignore[misc]


def test_checkpoints_keep_the_newest_and_the_one_before(tmp_path: Path) -> None:
    checkpoints = Checkpoints(str(tmp_path))
    _write(checkpoints, 1, 9, 10, 11)
    assert checkpoints.complete() == [11, 10]
    assert KEPT == 2
    assert sorted(os.listdir(tmp_path)) == ["step-10", "step-11"]


def test_checkpoints_may_be_directories(tmp_path: Path) -> None:
    checkpoints = Checkpoints(str(tmp_path / "made" / "when needed"))

    def save(path: str) -> None:
        (Path(path) / "deeper").mkdir(parents=True)
        _save("x", f"{path}/deeper/file")
        os.symlink("nowhere", f"{path}/link")

    for step in (1, 2, 3):
        checkpoints.write(step, save)
    assert checkpoints.complete() == [3, 2]
    assert Path(checkpoints.path(3), "deeper", "file").read_text() == "x"
    assert len(os.listdir(tmp_path / "made" / "when needed")) == 2


def test_checkpoint_that_fails_leaves_the_others_and_nothing_else(tmp_path: Path) -> None:
    checkpoints = Checkpoints(str(tmp_path))
    _write(checkpoints, 1, 2)

    def save(path: str) -> None:
        _save("half", path)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        checkpoints.write(3, save)
    assert sorted(os.listdir(tmp_path)) == ["step-1", "step-2"]


def test_checkpoint_written_elsewhere_is_refused(tmp_path: Path) -> None:
    checkpoints = Checkpoints(str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"made neither a file nor a directory at the path that it was given"):
        checkpoints.write(3, lambda path: _save("x", f"{path}.npy"))
    assert checkpoints.complete() == []


def test_checkpoints_have_no_other_names(tmp_path: Path) -> None:
    for name in ("saving-5", "removing-4", "bad-step-3", "step-007", "step-", "step-x", "step-2.tmp", "step--1", "step-1"):
        (tmp_path / name).touch()
    checkpoints = Checkpoints(str(tmp_path))
    assert checkpoints.complete() == [1]
    checkpoints.sweep()
    assert not {"saving-5", "removing-4"} & set(os.listdir(tmp_path))


def test_checkpoint_set_aside_is_kept_until_the_next_one(tmp_path: Path) -> None:
    checkpoints = Checkpoints(str(tmp_path))
    _write(checkpoints, 1, 2)
    checkpoints.set_aside(2)
    checkpoints.set_aside(1)
    assert os.listdir(tmp_path) == ["bad-step-1"]


def test_checkpoint_set_aside_by_several_processes_is_kept(tmp_path: Path) -> None:
    for name in ("step-1", "step-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").touch()
    mine, others = Checkpoints(str(tmp_path)), Checkpoints(str(tmp_path))
    mine.set_aside(2)
    others.set_aside(2)
    assert sorted(os.listdir(tmp_path)) == ["bad-step-2", "step-1"]
    (tmp_path / "bad-step-2").rename(tmp_path / "step-2")
    (tmp_path / "bad-step-2").mkdir()
    (tmp_path / "bad-step-2" / "older").touch()
    mine.set_aside(2)
    assert os.listdir(tmp_path / "bad-step-2") == ["weights"]


def test_watched_file_is_read_again_when_it_is_replaced(tmp_path: Path) -> None:
    watched = WatchedFile(str(tmp_path), "lease.json")
    assert notice_in(watched.fields()) is None
    replace_json(str(tmp_path), "lease.json", {"ends": None})
    assert notice_in(watched.fields()) is None
    replace_json(str(tmp_path), "lease.json", {"ends": 12, "cause": "share", "text": "b is behind"})
    assert notice_in(watched.fields()) == Notice(12.0, "share", "b is behind")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 2, "ends": 1}', '{"version": 1, "ends": "soon"}'])
def test_watched_file_that_makes_no_sense_says_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "lease.json").write_text(text)
    assert notice_in(WatchedFile(str(tmp_path), "lease.json").fields()) is None


def test_speed_leaves_out_the_first_step_once_there_is_another() -> None:
    speed = Speed(5, 0.0)
    assert speed.steps_per_second is None
    speed.mark(6, 10.0)
    assert speed.steps_per_second == 0.1
    speed.mark(8, 12.0)
    assert speed.steps_per_second == 1.0
    for second in range(13, 400):
        speed.mark(8 + (second - 12) * 4, float(second))
    assert speed.steps_per_second == 4.0


def test_progress_says_what_the_protocol_has(tmp_path: Path) -> None:
    progress = Progress(str(tmp_path))
    progress.loss, progress.checkpoint = float("nan"), 3
    progress.begin(3, 10)
    first = json.loads((tmp_path / "progress.json").read_text())
    assert set(first) == {"version", "steps", "total", "checkpoint", "throughput", "loss", "first", "left", "at"}
    assert (first["version"], first["steps"], first["total"], first["checkpoint"]) == (1, 3, 10, 3)
    assert (first["throughput"], first["loss"]) == (None, None)
    assert first["first"] <= first["at"]
    progress.loss = 0.5
    progress.write(4)
    second = json.loads((tmp_path / "progress.json").read_text())
    assert (second["steps"], second["loss"], second["first"]) == (4, 0.5, first["first"])
    assert second["throughput"] > 0


def test_progress_beyond_the_total_has_none(tmp_path: Path) -> None:
    progress = Progress(str(tmp_path))
    progress.begin(0, 10)
    for step, total in ((10, 10), (11, None)):
        progress.write(step)
        assert json.loads((tmp_path / "progress.json").read_text())["total"] == total


def test_progress_is_reported_at_most_about_twice_a_second(tmp_path: Path) -> None:
    progress = Progress(str(tmp_path))
    progress.begin(0, None)
    (tmp_path / "progress.json").unlink()
    progress.reached(1)
    assert not (tmp_path / "progress.json").exists()


def test_progress_that_cannot_be_written_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(str(tmp_path / "gone"))
    progress.begin(0, 1)
    progress.write(1)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("poise: progress cannot be reported: ")


def test_preempting_says_what_the_service_says_of_a_single_rank() -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")
    with preempting(after_steps=[]) as poise:
        got, port = poise.run(lambda: ([os.environ[name] for name in names], os.environ["MASTER_PORT"]))
    assert got == ["0", "1", "0", "1", "0", "127.0.0.1"]
    assert 1024 <= int(port) < 65_536


def test_worker_imports_nothing_heavy() -> None:
    asked = "import sys, poise.worker; print(*sorted(name for name in sys.modules if '.' not in name))"
    said = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True, env={})
    loaded = set(said.stdout.split())
    # What takes long of the standard library is left out too: a worker starts often.
    assert not loaded & {"numpy", "pydantic", "torch", "asyncio", "logging", "inspect", "shutil", "subprocess", "traceback"}
