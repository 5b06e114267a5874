"""Whether a server that is away seems to come back."""

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from poise.service.backends.local.processes import start_of
from poise.service.client.config import is_restarting

LONG_AGO = (1.0, 1.0)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """The directory of a service that stopped long ago."""
    tmp_path.chmod(0o700)
    for name in ("admin.token", "lock"):
        (tmp_path / name).touch()
    os.utime(tmp_path, LONG_AGO)
    return tmp_path


def announce(state: Path, pid: int, born: int | None) -> None:
    (state / "server.json").write_text(json.dumps({"url": "http://127.0.0.1:1", "pid": pid, "born": born}))


def dead() -> int:
    """The pid of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_one_that_stopped_long_ago_does_not(state: Path) -> None:
    assert not is_restarting(state)
    assert not is_restarting(state / "none")


def test_one_that_stopped_a_moment_ago_does(state: Path) -> None:
    os.utime(state)
    assert is_restarting(state)
    (state / "admin.token").unlink()  # there never was a service
    assert not is_restarting(state)


def test_one_that_holds_its_directory_does(state: Path) -> None:
    with (state / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert is_restarting(state)
    assert not is_restarting(state)


def test_one_that_was_killed_does_unless_that_was_before_the_machine_was_started(state: Path) -> None:
    announce(state, dead(), 1)
    assert is_restarting(state)
    os.utime(state / "server.json", LONG_AGO)
    assert not is_restarting(state)


def test_one_that_is_there_does_not(state: Path) -> None:
    announce(state, os.getpid(), start_of(os.getpid()))
    assert not is_restarting(state)
