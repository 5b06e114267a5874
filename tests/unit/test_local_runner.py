"""The runner: how light it is, and when its lease ends."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import poise
from poise.service.backends.local.lease_files import get, put, take_lock
from poise.service.backends.local.runner.supervisor import NEVER, RunnerLease
from poise.worker import protocol

ROOT = Path(poise.__file__).parents[1]
NOW = 5000.0
ORDER = {"term_seconds": 10.0, "deadline": 60.0, "seconds_left": None}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    handle = os.open(tmp_path, os.O_RDONLY)
    yield handle
    os.close(handle)


def test_runner_imports_little_and_nothing_that_is_not_pythons_own() -> None:
    text = (
        "import sys, json; sys.path.append(sys.argv[1])\n"
        "import poise.service.backends.local.runner.supervisor\n"
        "print(json.dumps(sorted(set(sys.modules))))"
    )
    said = subprocess.run([sys.executable, "-I", "-S", "-c", text, str(ROOT)], check=True, capture_output=True, text=True)
    modules = {name.partition(".")[0] for name in json.loads(said.stdout)}
    assert modules - set(sys.stdlib_module_names) <= {"poise", "__main__"}
    assert not modules & {"dataclasses", "subprocess", "pathlib", "socket", "inspect", "logging", "threading"}


def test_runner_and_worker_speak_of_the_same_things() -> None:
    from poise.service.backends.local import lease_files

    ours = (
        lease_files.VERSION,
        lease_files.YIELDED,
        lease_files.CHECKPOINT_FAILED,
        lease_files.LEASE,
        lease_files.PROGRESS,
        lease_files.FAILURE,
    )
    theirs = (
        protocol.VERSION,
        protocol.YIELDED,
        protocol.CHECKPOINT_FAILED,
        protocol.LEASE,
        protocol.PROGRESS,
        protocol.FAILURE,
    )
    assert ours == theirs


def lease(folder: int, *, ends: float | None, seconds: float | None, mode: str | None, **order: Any) -> RunnerLease:
    put(folder, "lease.json", {"ends": ends, "seconds": seconds, "mode": mode})
    made = RunnerLease(folder, {**ORDER, **order})
    made.look()
    return made


@pytest.fixture(autouse=True)
def _clock_that_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poise.service.backends.local.runner.supervisor.monotonic", lambda: NOW)


def left(moment: float) -> float:
    return moment - NOW


def test_lease_that_does_not_end_asks_for_nothing(folder: int) -> None:
    made = lease(folder, ends=None, seconds=None, mode=None)
    assert (made.mode, made.term_at, made.kill_at) == (None, NEVER, NEVER)


@pytest.mark.parametrize(("mode", "term", "kill"), [("checkpoint", 30.0, 40.0), ("restart", 0.0, 30.0), ("stop", 0.0, 10.0)])
def test_lease_ends_as_its_mode_says(
    folder: int, monkeypatch: pytest.MonkeyPatch, mode: str, term: float, kill: float
) -> None:
    monkeypatch.setattr("poise.service.backends.local.runner.supervisor.now", lambda: 1000.0)
    made = lease(folder, ends=1030.0, seconds=30.0, mode=mode)
    assert made.mode == mode
    assert left(made.term_at) == pytest.approx(term)
    assert left(made.kill_at) == pytest.approx(kill)


@pytest.mark.parametrize(("clock", "want"), [(-1e6, 30.0), (1000.0, 30.0), (1020.0, 10.0), (1e9, 0.0)])
def test_clock_that_jumps_gives_no_run_more_time(
    folder: int, monkeypatch: pytest.MonkeyPatch, clock: float, want: float
) -> None:
    monkeypatch.setattr("poise.service.backends.local.runner.supervisor.now", lambda: clock)
    made = lease(folder, ends=1030.0, seconds=30.0, mode="checkpoint")
    assert left(made.term_at) == pytest.approx(want)


def test_later_requests_only_make_it_sooner(folder: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poise.service.backends.local.runner.supervisor.now", lambda: 1000.0)
    made = lease(folder, ends=1030.0, seconds=30.0, mode="checkpoint")
    put(folder, "lease.json", {"ends": 1900.0, "seconds": 900.0, "mode": "checkpoint"})
    made.look()
    assert left(made.term_at) == pytest.approx(30)
    put(folder, "lease.json", {"ends": 1010.0, "seconds": 10.0, "mode": "stop"})
    made.look()
    assert (made.mode, left(made.term_at)) == ("stop", 0)
    assert left(made.kill_at) == pytest.approx(10)


def test_job_that_with_a_maximum_duration_has_an_end_without_any_lease(folder: int) -> None:
    made = lease(folder, ends=None, seconds=None, mode=None, seconds_left=5.0)
    assert left(made.term_at) == pytest.approx(5)
    assert left(made.kill_at) == pytest.approx(15)


def test_record_is_replaced_as_a_whole(folder: int, tmp_path: Path) -> None:
    put(folder, "a.json", {"x": 1})
    put(folder, "a.json", {"x": 2})
    assert get(folder, "a.json") == {"version": 1, "x": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"version": 2}', '"x"', "[" * 100_000, "\xff"])
def test_record_that_cannot_be_understood_is_none(folder: int, tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_bytes(text.encode("latin-1"))
    assert get(folder, "a.json") is None
    assert get(folder, "b.json") is None


def test_lock_is_held_by_one_at_a_time(folder: int) -> None:
    first = take_lock(folder)
    assert first is not None
    assert take_lock(folder) is None
    os.close(first)
    second = take_lock(folder)
    assert second is not None
    os.close(second)
