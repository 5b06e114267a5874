"""Directories of jobs: what is removed, and what is taken for the directory of a run."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from poise.backends.local.folders import Folders, remove_tree


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[Folders]:
    made = Folders(tmp_path / "state")
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


def test_path_is_that_of_a_run_only_as_it_would_be_written(folders: Folders) -> None:
    path = str(folders.run_path("7", 12))
    assert folders.run_at(path) == ("7", 12)
    others = (path + "/x", "/x" + path, path.replace("12", "012"), path.replace("12", "9" * 5000), path.replace("12", "¹"))
    assert not any(map(folders.run_at, others))
