"""Processes and files of runs where the machine runs out of files, or a job has put something in the way."""

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.backends import python, until

from poise.scheduler.model.failures import Verdict, verdict
from poise.service.backends.local import processes
from poise.service.backends.local.lease_files import ORDER, PROGRESS, get, put
from poise.service.backends.local.logs import LogFile
from poise.service.backends.local.processes import (
    belongs_to_run,
    context_switches,
    kill_where,
    open_process,
    start_of,
    stat_of,
)
from poise.service.backends.local.runner.replica import CannotStartError, Replica


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    handle = os.open(tmp_path, os.O_RDONLY)
    yield handle
    os.close(handle)


def refusing(number: int) -> Any:
    def refuse(*_: object, **__: object) -> Any:
        raise OSError(number, os.strerror(number))

    return refuse


@pytest.mark.parametrize("number", sorted(processes.SCARCE))
def test_process_that_cannot_be_looked_at_is_not_taken_to_be_gone(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    me = os.getpid()
    start = start_of(me)
    assert start is not None
    monkeypatch.setattr("builtins.open", refusing(number))
    for look in (lambda: stat_of(me), lambda: belongs_to_run(me, b"X=1", {}), lambda: open_process(me, start)):
        with pytest.raises(OSError, match=os.strerror(number)):
            look()
    monkeypatch.undo()
    monkeypatch.setattr(os, "pidfd_open", refusing(number))
    with pytest.raises(OSError, match=os.strerror(number)):
        kill_where(lambda pid: pid == os.getppid())


def test_process_does_not_kill_itself() -> None:
    assert kill_where(lambda pid: pid == os.getpid()) == 0


def test_process_that_is_gone_has_nothing() -> None:
    gone = 1 << 22
    assert stat_of(gone) == []
    assert (start_of(gone), context_switches(gone), open_process(gone, 1)) == (None, None, None)
    assert not belongs_to_run(gone, b"X=1", {})


def test_process_that_works_has_more_turns_each_time() -> None:
    before = context_switches(os.getpid())
    assert before is not None
    until(lambda: (context_switches(os.getpid()) or 0) > before)


def test_record_is_written_whatever_is_in_its_way(folder: int, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.json.part")
    put(folder, "x.json", {"a": 1})
    assert (get(folder, "x.json") or {})["a"] == 1
    (tmp_path / "x.json.part").symlink_to(tmp_path / "elsewhere")
    put(folder, "x.json", {"a": 2})
    assert (get(folder, "x.json") or {})["a"] == 2
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(("name", "most"), [(PROGRESS, 64 << 10), ("runner.json", 1 << 20), (ORDER, 16 << 20)])
def test_record_that_is_larger_than_it_can_be_says_nothing(folder: int, tmp_path: Path, name: str, most: int) -> None:
    for size, is_read in ((most, True), (most + 1, False)):
        text = json.dumps({"version": 1, "x": ""})
        (tmp_path / name).write_text(text.replace('""', '"' + "x" * (size - len(text)) + '"'))
        assert (get(folder, name) is not None) == is_read


@pytest.mark.parametrize(("call", "number"), [("pipe", errno.EMFILE), ("pipe", errno.ENFILE), ("fork", errno.EAGAIN)])
def test_replica_that_the_machine_has_no_room_for_is_tried_again(
    folder: int, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    monkeypatch.setattr(os, call, refusing(number))
    with pytest.raises(CannotStartError) as raised:
        Replica(0, [*python("")], {}, {}, LogFile(folder, 0, 1000, 2))
    assert verdict(raised.value.cause) is Verdict.TRANSIENT
