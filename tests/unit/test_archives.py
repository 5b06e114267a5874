"""Archives of trees: the same tree makes the same bytes, what is unpacked is what was packed, and nothing leads out."""

import io
import os
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poise.service.wire.archives import ArchiveError, packed, unpack

NAMES = st.text("abcdefgh-._ é", min_size=1, max_size=12).filter(lambda name: name not in (".", "..") and name.strip())
TREES = st.recursive(
    st.binary(max_size=2000), lambda inner: st.dictionaries(NAMES, inner, max_size=4), max_leaves=12
).filter(lambda tree: isinstance(tree, dict) and tree)


def write(folder: Path, tree: dict[str, object]) -> None:
    folder.mkdir()
    for name, what in tree.items():
        if isinstance(what, dict):
            write(folder / name, what)
        else:
            assert isinstance(what, bytes)
            (folder / name).write_bytes(what)


def read(folder: Path) -> dict[str, object]:
    return {each.name: read(each) if each.is_dir() else each.read_bytes() for each in folder.iterdir()}


@given(tree=TREES)
def test_what_is_unpacked_is_what_was_packed(tree: dict[str, object], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("trees")
    write(folder / "given", tree)
    made = packed(folder / "given", os.listdir(folder / "given"))
    text = b"".join(made.blocks())
    assert len(text) == made.size
    (folder / "found").mkdir()
    assert unpack(iter([text[:100], text[100:]]), folder / "found") == (made.size, made.digest())
    assert read(folder / "found") == tree
    again = packed(folder / "found", os.listdir(folder / "found"))
    assert again.digest() == made.digest()


def test_links_inside_are_kept_and_modes_too(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "run.sh").write_text("#!/bin/sh\n")
    (tmp_path / "a" / "run.sh").chmod(0o755)
    (tmp_path / "a" / "b" / "link").symlink_to("../run.sh")
    (tmp_path / "a" / "folder").symlink_to("b")
    (tmp_path / "to").mkdir()
    unpack(packed(tmp_path, ["a"]).blocks(), tmp_path / "to")
    assert os.readlink(tmp_path / "to" / "a" / "b" / "link") == "../run.sh"
    assert os.readlink(tmp_path / "to" / "a" / "folder") == "b"
    assert os.access(tmp_path / "to" / "a" / "run.sh", os.X_OK)


@pytest.mark.parametrize("target", ["/etc/passwd", "../../x", "b/../../../x", "b/../x", ""])
def test_link_that_leads_out_is_not_packed(tmp_path: Path, target: str) -> None:
    (tmp_path / "a").mkdir()
    if target:
        (tmp_path / "a" / "link").symlink_to(target)
        with pytest.raises(ArchiveError, match="leads out"):
            packed(tmp_path, ["a"])


def test_neither_pipes_nor_changing_files_are_packed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ArchiveError, match="neither a file nor a directory"):
        packed(tmp_path, ["pipe"])
    (tmp_path / "grows").write_bytes(b"x" * 100)
    tree = packed(tmp_path, ["grows"])
    (tmp_path / "grows").write_bytes(b"x" * 101)
    with pytest.raises(ArchiveError, match="has changed"):
        list(tree.blocks())


def archive(*members: tuple[str, bytes, str]) -> Iterator[bytes]:
    """An archive as an attacker would make it: name, type and target of each member."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name, kind, target in members:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, target
            tar.addfile(info, io.BytesIO())
    yield made.getvalue()


FILE, LINK, HARD, PIPE = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE


@pytest.mark.parametrize(
    "members",
    [
        [("../x", FILE, "")],
        [("/tmp/x", FILE, "")],
        [("a/../../x", FILE, "")],
        [("a", LINK, "/etc"), ("a/x", FILE, "")],
        [("a", LINK, "..")],
        [("a", LINK, "b"), ("a/x", LINK, "y")],
        [("a/b/s", LINK, "../.."), ("a/b/t", LINK, "s/../x")],
        [("x", FILE, ""), ("y", HARD, "x")],
        [("x", PIPE, "")],
        [("x", tarfile.CHRTYPE, "")],
        [("x", FILE, ""), ("x", FILE, "")],
        [("x", FILE, ""), ("x/y", FILE, "")],
        [("x", FILE, ""), ("x", LINK, "y")],
        [("x", FILE, ""), ("x/y", LINK, "z")],
        [("x" * 300, FILE, "")],
        [("/".join("x" * 1_500), FILE, "")],
        [("x", LINK, "y/" * 2_000)],
    ],
)
def test_archive_cannot_write_outside_its_folder(tmp_path: Path, members: list[tuple[str, bytes, str]]) -> None:
    (tmp_path / "to").mkdir()
    with pytest.raises(ArchiveError):
        unpack(archive(*members), tmp_path / "to")
    assert os.listdir(tmp_path) == ["to"]


@pytest.mark.parametrize("spoil", [lambda text: text[: len(text) // 2], lambda _: b"nonsense" * 99, lambda text: text[:700]])
def test_archive_that_is_cut_or_damaged_is_found_out(tmp_path: Path, spoil: Callable[[bytes], bytes]) -> None:
    (tmp_path / "file").write_bytes(os.urandom(5000))
    tree = packed(tmp_path, ["file"])
    text = spoil(b"".join(tree.blocks()))
    (tmp_path / "to").mkdir()
    try:
        found = unpack(iter([text]), tmp_path / "to")
    except ArchiveError:
        return
    assert found != (tree.size, tree.digest())


def test_only_accepted_names_are_unpacked(tmp_path: Path) -> None:
    (tmp_path / "to").mkdir()
    with pytest.raises(ArchiveError, match="does not belong"):
        unpack(archive(("step-2", FILE, "")), tmp_path / "to", {"step-1"}.__contains__)
