"""Directories of jobs: what is removed, and what is taken for the directory of a run."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from poise.service.backends.local.state_dir import StateDir, remove_tree


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[StateDir]:
    made = StateDir(tmp_path / "state")
    yield made
    made.close()


def test_tree_is_removed_with_its_links_and_nothing_that_they_lead_to(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").touch()
    tree = tmp_path / "tree"
    for each in ("a/b/c", "a/d", "e"):
        (tree / each).mkdir(parents=True)
        (tree / each / "file").touch()
        (tree / each / "link").symlink_to(kept)
    os.mkfifo(tree / "a" / "pipe")
    before = len(os.listdir("/proc/self/fd"))
    parent = os.open(tmp_path, os.O_RDONLY)
    try:
        remove_tree(parent, "tree")
    finally:
        os.close(parent)
    assert os.listdir(tmp_path) == ["kept"]
    assert os.listdir(kept) == ["file"]
    assert len(os.listdir("/proc/self/fd")) == before


def test_path_is_that_of_a_run_only_as_it_would_be_written(folders: StateDir) -> None:
    path = str(folders.run_path("7", 12))
    assert folders.run_at(path) == ("7", 12)
    others = (path + "/x", "/x" + path, path.replace("12", "012"), path.replace("12", "9" * 5000), path.replace("12", "¹"))
    assert not any(map(folders.run_at, others))


def test_nothing_is_read_or_written_through_a_link(folders: StateDir, tmp_path: Path) -> None:
    folders.make_run("1", 1)
    folders.put("1", 1, "a.json", {})
    jobs = tmp_path / "state" / "jobs"
    (jobs / "2").symlink_to("1")
    assert folders.get("1", 1, "a.json") == {"version": 1}
    assert folders.get("2", 1, "a.json") is None
    assert not folders.has("2", 1)
    assert not folders.has("2", 1, "a.json")
    assert folders.stamp("2", 1, "a.json") is None
    assert folders.epochs("2") == []
    with pytest.raises(NotADirectoryError):
        folders.make_run("2", 2)
    with pytest.raises(NotADirectoryError):
        folders.put("2", 1, "b.json", {})
    with pytest.raises(NotADirectoryError):
        folders.lock("2", 1)
    assert os.listdir(jobs / "1" / "runs" / "1") == ["a.json"]


def test_checkpoints_may_be_kept_elsewhere(folders: StateDir, tmp_path: Path) -> None:
    folders.make_run("1", 1)
    (tmp_path / "large" / "step-7").mkdir(parents=True)
    kept = tmp_path / "state" / "jobs" / "1" / "checkpoint"
    kept.rmdir()
    kept.symlink_to(tmp_path / "large")
    assert folders.checkpoints("1") == [7]


def test_run_that_cannot_be_looked_at_for_want_of_files_is_taken_to_be_there(
    folders: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object, **__: object) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(os, "open", refuses)
    assert folders.has("1", 1)
    assert folders.has("1", 1, "runner.json")
