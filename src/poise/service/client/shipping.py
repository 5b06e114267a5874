"""`poise submit --ship`: the working directory as an archive, without what `.gitignore` files ignore.

Git itself says which files those are: of a work tree, those that are tracked or not ignored; of any other directory, those
that would not be ignored if it were one. So nested files, negations and global ignore files mean what they mean to git, and
no other program has to agree with it. Without git, a directory is packed as a whole, and only if it has no `.gitignore`.
"""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from poise.scheduler.model.errors import RequestError
from poise.service.wire.archives import ArchiveError, PackedTree, packed
from poise.service.wire.views import MOST_PIECE

IGNORED = ".gitignore"
SHIP_MIB = 64  # of an archive, unless the user says otherwise
CHANGED = f"try again, or ignore it in {IGNORED}"
NAMED = 5  # files that are named if it is too much
MIB = 1 << 20


def packed_folder(folder: Path, most: int) -> tuple[PackedTree, str]:
    """Pack a directory, and return the archive with its SHA-256; RequestError names the largest files if they are too much.

    most   bytes that the archive may have
    """
    if not folder.is_dir():
        raise RequestError(f"--ship: {folder} is not a directory")
    names = _listed(folder)
    if not names:
        raise RequestError(f"--ship: {folder} has no files that are not ignored")
    with _reporting(folder, f"ignore it in {IGNORED}, or copy what it leads to"):
        tree = packed(folder, names, plain_modes=True)
    if tree.size > most:
        largest = sorted(tree.members, key=lambda each: (-each.size, each.name))[:NAMED]
        named = ", ".join(f"{each.name} ({each.size / MIB:,.1f} MiB)" for each in largest if each.size)
        text = f"{folder} has {tree.size / MIB:,.1f} MiB to be shipped, of at most {most / MIB:,.0f}"
        raise RequestError(f"--ship: {text}; the largest are {named}: name them in {IGNORED}, or raise --ship-mib")
    with _reporting(folder, CHANGED):
        return tree, tree.digest()


@contextmanager
def _reporting(folder: Path, advice: str) -> Iterator[None]:
    """Say in one line what cannot be packed."""
    try:
        yield
    except ArchiveError as error:
        raise RequestError(f"--ship: {folder}: {error}; {advice}") from None
    except OSError as error:
        raise RequestError(f"--ship: {error.filename}: {error.strerror}") from None


def pieces_of(folder: Path, tree: PackedTree, start: int) -> Iterator[tuple[int, bytes]]:
    """Yield an archive in pieces for upload, each with its offset, from byte `start` on."""
    with _reporting(folder, CHANGED):
        yield from _pieces(tree, start)


def _pieces(tree: PackedTree, start: int) -> Iterator[tuple[int, bytes]]:
    offset, pending, skipped = start, bytearray(), 0
    for block in tree.blocks():
        if skipped < start:
            left = block[start - skipped :]
            skipped += len(block) - len(left)
            block = left
        pending += block
        while len(pending) >= MOST_PIECE:
            yield offset, bytes(pending[:MOST_PIECE])
            del pending[:MOST_PIECE]
            offset += MOST_PIECE
    if pending:
        yield offset, bytes(pending)


def _listed(folder: Path) -> list[str]:
    """List the files of a directory that are not ignored, by their paths in it."""
    try:
        if _git("rev-parse", "--is-inside-work-tree", folder=folder) == ["true"]:
            found = _git("ls-files", "-z", "--cached", "--others", "--exclude-standard", folder=folder)
        else:
            found = _listed_as_if_in_git(folder)
    except FileNotFoundError:
        if next(folder.rglob(IGNORED), None) is not None:
            raise RequestError(f"--ship: {folder} has a {IGNORED}, which git has to read; install git") from None
        return sorted(os.listdir(folder))
    names: set[str] = set()
    for name in found:
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            if (path / ".git").exists():  # another repository inside this one; a submodule may not have been fetched
                names.update(f"{name.rstrip('/')}/{each}" for each in _listed(path))
        elif os.path.lexists(path):  # one that is tracked may have been deleted
            names.add(name)
    return sorted(names)


def _listed_as_if_in_git(folder: Path) -> list[str]:
    with tempfile.TemporaryDirectory(prefix="poise-ship-") as empty:
        _git("init", "--quiet", "--bare", ".", folder=Path(empty))
        where = (f"--git-dir={empty}", f"--work-tree={folder}")
        return _git(*where, "ls-files", "-z", "--others", "--exclude-standard", folder=folder)


def _git(*arguments: str, folder: Path) -> list[str]:
    """Run git, and return what it lists; nothing if it fails. FileNotFoundError: there is no git."""
    command = ["git", "-c", "core.quotePath=false", "-c", "core.fsmonitor=false", *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False)
    if done.returncode:
        if "ls-files" in arguments:
            raise RequestError(f"--ship: git: {done.stderr.decode(errors='replace').strip()[:300]}")
        return []
    text = os.fsdecode(done.stdout)
    return [each for each in (text.split("\0") if "-z" in arguments else text.split("\n")) if each]
