"""Working directories as archives: what .gitignore says counts as git reads it, and the size is bounded."""

import os
import subprocess
from pathlib import Path

import pytest

from poise.scheduler.model.errors import RequestError
from poise.service.client import shipping
from poise.service.client.shipping import packed_folder, pieces_of
from poise.service.client.submission import with_files
from poise.service.wire.request import JobRequest
from poise.service.wire.views import MOST_PIECE

MOST = 1 << 30


def names(folder: Path) -> list[str]:
    return [each.name for each in packed_folder(folder, MOST)[0].members]


@pytest.fixture(params=["work-tree", "plain"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A directory with ignore files, once as a work tree of git."""
    project = tmp_path / "project"
    for name, text in {
        "train.py": "", ".gitignore": "*.ckpt\n/data/\nlogs/*\n!logs/keep.txt\n", "a.ckpt": "", "data/big": "",
        "logs/1.txt": "", "logs/keep.txt": "", "pkg/.gitignore": "!b.ckpt\nsecret\n", "pkg/b.ckpt": "", "pkg/c.ckpt.py": "",
        "pkg/secret": "", "pkg/data/small": "", "with space é.txt": "",
    }.items():  # fmt: skip
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text)
    if request.param == "work-tree":
        subprocess.run(["git", "init", "-q", str(project)], check=True)
    return project


def test_ignore_files_mean_what_they_mean_to_git(folder: Path) -> None:
    assert names(folder) == [
        ".gitignore", "logs/keep.txt", "pkg/.gitignore", "pkg/b.ckpt", "pkg/c.ckpt.py", "pkg/data/small", "train.py",
        "with space é.txt",
    ]  # fmt: skip


def test_part_of_a_work_tree_and_repositories_inside_it_can_be_shipped(folder: Path) -> None:
    assert "data/small" in names(folder / "pkg")
    subprocess.run(["git", "init", "-q", str(folder / "vendored")], check=True)
    (folder / "vendored" / "lib.py").touch()
    assert "vendored/lib.py" in names(folder)
    assert not any(".git/" in each for each in names(folder))


def test_tracked_files_count_though_they_are_ignored_and_deleted_ones_do_not(tmp_path: Path) -> None:
    (tmp_path / "tracked.ckpt").touch()
    (tmp_path / "gone.py").touch()
    git = ["git", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "."], check=True)
    (tmp_path / ".gitignore").write_text("*.ckpt")
    (tmp_path / "gone.py").unlink()
    assert names(tmp_path) == [".gitignore", "tracked.ckpt"]


def test_same_folder_has_the_same_name_whenever_and_by_whomever_it_was_made(tmp_path: Path) -> None:
    digests = set()
    for name, mode in (("one", 0o600), ("two", 0o664)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_text("text")
        (tmp_path / name / "x").chmod(mode)
        os.utime(tmp_path / name / "x", (mode, mode))
        digests.add(packed_folder(tmp_path / name, MOST)[1])
    assert len(digests) == 1


def test_folder_that_is_too_large_names_the_largest_files(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x" * (2 << 20))
    (tmp_path / "train.py").write_text("pass")
    with pytest.raises(RequestError, match=r"2\.0 MiB to be shipped, of at most 1; the largest are model\.bin \(2\.0 MiB\)"):
        packed_folder(tmp_path, 1 << 20)


def test_what_cannot_be_shipped_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="not a directory"):
        packed_folder(tmp_path / "nowhere", MOST)
    with pytest.raises(RequestError, match="has no files"):
        packed_folder(tmp_path, MOST)
    (tmp_path / "link").symlink_to("/etc/passwd")
    with pytest.raises(RequestError, match="link is a link that leads out"):
        packed_folder(tmp_path, MOST)
    (tmp_path / "link").unlink()
    (tmp_path / "x").touch()

    def no_git(*_: str, folder: Path) -> list[str]:
        raise FileNotFoundError("git")

    monkeypatch.setattr(shipping, "_git", no_git)
    assert names(tmp_path) == ["x"]
    (tmp_path / ".gitignore").touch()
    with pytest.raises(RequestError, match="install git"):
        packed_folder(tmp_path, MOST)


@pytest.mark.parametrize("start", [0, 1, 511, 512, 1000, MOST_PIECE, MOST_PIECE + 7])
def test_pieces_are_the_archive_from_any_byte_on(tmp_path: Path, start: int) -> None:
    (tmp_path / "x").write_bytes(os.urandom(2 * MOST_PIECE))
    tree, _ = packed_folder(tmp_path, MOST)
    whole, found, at = b"".join(tree.blocks()), b"", start
    for offset, piece in pieces_of(tmp_path, tree, start):
        assert offset == at
        assert len(piece) <= MOST_PIECE
        at += len(piece)
        found += piece
    assert found == whole[start:]


def test_paths_into_the_folder_become_relative_to_it() -> None:
    request = JobRequest(command=("/p/train.sh", "--data", "/p/data", "/pp/x"), cwd="/p", setup=("./make", "x"))
    found = with_files(request, Path("/p"), "0" * 64)
    assert found.command == ("./train.sh", "--data", "./data", "/pp/x")
    assert (found.cwd, found.files, found.setup) == (None, "0" * 64, ("./make", "x"))


def git(folder: Path, *arguments: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@localhost")
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)


def test_submodule_that_was_not_fetched_is_left_out(tmp_path: Path) -> None:
    inner, outer = tmp_path / "inner", tmp_path / "outer"
    for folder in (inner, outer):
        folder.mkdir()
        git(folder, "init", "--quiet")
        (folder / "file.txt").write_text("x")
        git(folder, "add", "file.txt")
        git(folder, "commit", "--quiet", "-m", "first")
    git(outer, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(inner), "sub")
    git(outer, "commit", "--quiet", "-m", "second")
    assert names(outer) == [".gitmodules", "file.txt", "sub/file.txt"]
    git(tmp_path, "clone", "--quiet", str(outer), "clone")
    assert names(tmp_path / "clone") == [".gitmodules", "file.txt"]


def test_file_that_changes_while_it_is_packed_is_named_in_one_line(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text("step 1\n" * 1_000)
    tree, _ = packed_folder(tmp_path, MOST)
    log.write_text("step 2\n")
    with pytest.raises(RequestError, match=r"train.log has changed while it was packed; try again, or ignore it"):
        list(pieces_of(tmp_path, tree, 0))
