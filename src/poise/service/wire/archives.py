"""Directory trees as tar archives that cross machines: checkpoints, and working directories that are shipped.

An archive is not compressed, so its size is known before it is made, and what comes out of one is never larger than what
went in. It is made and read in blocks, and never is in memory as a whole. The same tree makes the same bytes: names are
sorted, and times and owners left out.

What is unpacked comes from users. Members are files, directories, and links that stay inside the archive; links
are made last, so that nothing is ever written through one.
"""

import hashlib
import os
import stat
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from poise.durable import sync_folder

BLOCK = 1 << 20  # bytes that are read and written at once
MOST_PATH, MOST_NAME = 2_048, 255  # bytes of a path, and of each part of it
_END = b"\0" * 1024  # two empty records


class ArchiveError(Exception):
    """A tree that cannot be packed, or an archive that is not what it should be. The text says why, in one line."""


class ArchiveMember(NamedTuple):
    """One name of an archive, with the header that describes it. `size`: bytes that follow, of a file."""

    name: str
    path: str
    header: bytes
    size: int


@dataclass(frozen=True, slots=True)
class PackedTree:
    """A tree that is about to be packed: its members are known, the contents of files are read by `blocks`."""

    members: tuple[ArchiveMember, ...]

    @property
    def size(self) -> int:
        """Bytes of the archive."""
        return sum(len(each.header) + each.size + -each.size % 512 for each in self.members) + len(_END)

    def blocks(self) -> Iterator[bytes]:
        """Yield the archive. ArchiveError if a file has changed its size meanwhile."""
        for member in self.members:
            yield member.header
            if member.size:
                yield from _contents(member)
                yield b"\0" * (-member.size % 512)
        yield _END

    def digest(self) -> str:
        """Return the SHA-256 of the archive."""
        found = hashlib.sha256()
        for block in self.blocks():
            found.update(block)
        return found.hexdigest()


def packed(root: Path, names: Iterable[str], *, plain_modes: bool = False) -> PackedTree:
    """Pack these names of a directory, each a file or a directory with all that is below it.

    plain_modes   files are 0644, or 0755 if their owner may execute them, whatever else they were
    """
    members: list[ArchiveMember] = []
    for name in sorted(names):
        top = root / name
        members.append(_member(top, name, plain_modes=plain_modes))
        if top.is_dir() and not top.is_symlink():
            for folder, folders, files in os.walk(top):
                folders.sort()
                below = os.path.relpath(folder, root)
                links = [each for each in folders if os.path.islink(os.path.join(folder, each))]
                members += [
                    _member(Path(folder, each), f"{below}/{each}", plain_modes=plain_modes)
                    for each in sorted([*files, *folders])
                ]
                folders[:] = [each for each in folders if each not in links]
    return PackedTree(tuple(members))


def _member(path: Path, name: str, *, plain_modes: bool) -> ArchiveMember:
    found = os.lstat(path)
    if _is_too_long(name):
        raise ArchiveError(f"the name {name[:100]!r}… is too long")
    info = tarfile.TarInfo(name)
    info.mode = found.st_mode & 0o777
    if plain_modes:
        info.mode = 0o755 if stat.S_ISDIR(found.st_mode) or found.st_mode & 0o100 else 0o644
    if stat.S_ISLNK(found.st_mode):
        info.type, info.linkname, info.mode = tarfile.SYMTYPE, os.readlink(path), 0o777
        _check_link(name, info.linkname)
    elif stat.S_ISDIR(found.st_mode):
        info.type = tarfile.DIRTYPE
    elif stat.S_ISREG(found.st_mode):
        info.size = found.st_size
    else:
        raise ArchiveError(f"{name} is neither a file nor a directory")
    try:
        header = info.tobuf(tarfile.PAX_FORMAT)
    except UnicodeEncodeError:
        raise ArchiveError(f"the name {name!r} is not UTF-8") from None
    return ArchiveMember(name, str(path), header, info.size)


def _contents(member: ArchiveMember) -> Iterator[bytes]:
    left = member.size
    with open(os.open(member.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb", buffering=0) as file:
        while left and (block := file.read(min(left, BLOCK))):
            left -= len(block)
            yield block
        if left or file.read(1):
            raise ArchiveError(f"{member.name} has changed while it was packed")


def _check_link(name: str, target: str) -> None:
    """Refuse a link that leads out of the archive: `..` may stand only at its beginning, so that none is of another link."""
    parts = PurePosixPath(target).parts
    ups = next((place for place, part in enumerate(parts) if part != ".."), len(parts))
    if _is_too_long(target):
        raise ArchiveError(f"{name} is a link with too long a target")
    if not target or target.startswith("/") or ".." in parts[ups:] or ups > len(PurePosixPath(name).parts) - 1:
        raise ArchiveError(f"{name} is a link that leads out of what is packed")


class _BlockReader:
    """An archive that comes in blocks, as a file for `tarfile`; counts and hashes all of it."""

    def __init__(self, blocks: Iterable[bytes]) -> None:
        self._blocks, self._rest = iter(blocks), b""
        self.size, self.hash = 0, hashlib.sha256()

    def read(self, size: int) -> bytes:
        while len(self._rest) < size:
            block = next(self._blocks, None)
            if block is None:
                break
            self.size += len(block)
            self.hash.update(block)
            self._rest += block
        found, self._rest = self._rest[:size], self._rest[size:]
        return found

    def drain(self) -> None:
        """Read what follows the end of the archive."""
        while self.read(BLOCK):
            pass


def unpack(blocks: Iterable[bytes], folder: Path, accept: Callable[[str], bool] = lambda _name: True) -> tuple[int, str]:
    """Unpack an archive into an empty directory, force it to the disk, and return the archive's size and SHA-256.

    The caller compares these before anything is used. `accept` is asked for the first part of each name.
    """
    reader = _BlockReader(blocks)
    links: dict[str, str] = {}
    folders = [folder]
    try:
        with tarfile.open(fileobj=reader, mode="r|", bufsize=BLOCK) as archive:  # type: ignore[call-overload]
            for member in archive:
                parts = _checked_parts(member.name)
                if not accept(parts[0]):
                    raise ArchiveError(f"the archive has {member.name!r}, which does not belong there")
                path = folder.joinpath(*parts)
                if member.issym():
                    _check_link("/".join(parts), member.linkname)
                    links["/".join(parts)] = member.linkname
                elif member.isdir():
                    path.mkdir(mode=member.mode & 0o777 | 0o700, parents=True, exist_ok=True)
                    folders.append(path)
                elif member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and not member.issparse():
                    path.parent.mkdir(parents=True, exist_ok=True)
                    _write_file(archive, member, path)
                else:
                    raise ArchiveError(f"{member.name!r} is neither a file nor a directory")
        reader.drain()
        _make_links(folder, links)
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise ArchiveError(f"the archive is damaged: {error}") from None
    except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
        raise ArchiveError(f"the archive has {error.filename!r} twice") from None
    for each in reversed(folders):
        sync_folder(each)
    return reader.size, reader.hash.hexdigest()


def _checked_parts(name: str) -> Sequence[str]:
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in name or _is_too_long(name):
        raise ArchiveError(f"the archive has the impossible name {name[:100]!r}")
    return path.parts


def _is_too_long(path: str) -> bool:
    """Whether some machine may have no room for a path: a file system's word on that would look like a full disk."""
    return len(os.fsencode(path)) > MOST_PATH or any(len(os.fsencode(part)) > MOST_NAME for part in path.split("/"))


def _write_file(archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    source = archive.extractfile(member)
    assert source is not None
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, member.mode & 0o777 | 0o600)
    with open(handle, "wb", buffering=0) as file:
        while block := source.read(BLOCK):
            file.write(block)
        if file.tell() != member.size:
            raise ArchiveError(f"the archive ends inside {member.name!r}")
        os.fsync(file.fileno())


def _make_links(folder: Path, links: dict[str, str]) -> None:
    for name, target in links.items():
        path = folder / name
        if any(str(above) in links for above in PurePosixPath(name).parents):
            raise ArchiveError(f"the archive has {name!r} below a link")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(target)
