"""From what the user typed to unpacked streams of bytes: a file, a folder, an archive, standard input.

Compression and archives are known by their first bytes, so that a pipe is as good as a file. Nothing is unpacked to
disk, nothing is read twice, and only what a reader asks for is decompressed.
"""

import gzip
import io
import lzma
import os
import sys
import tarfile
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, cast

from poise.model.errors import TraceError, Where
from poise.traces.tape import members

STANDARD_INPUT = "-"
HEAD_BYTES = 1 << 16
MOST_FILES = 100_000
_GZIP, _XZ, _TAR, _TAR_AT = b"\x1f\x8b", b"\xfd7zXZ\x00", b"ustar", 257
_NAMED = {".gz": _GZIP, ".tgz": _GZIP, ".xz": _XZ, ".txz": _XZ}


@dataclass(frozen=True, slots=True)
class Found:
    """One file that may be a trace. Its stream is good until the next one is asked for.

    path    inside the folder or archive, of printable characters
    file    for messages
    alone   it is what the user named, rather than one of several in a folder or archive
    head    the first bytes, which the stream gives once more
    """

    path: str
    file: str
    alone: bool
    head: bytes
    stream: BinaryIO


def found_files(source: str) -> Generator[Found]:
    """The files that a source stands for: one, or those in a folder (by path) or archive (in its order)."""
    if source == STANDARD_INPUT:
        yield from _unpacked(sys.stdin.buffer, "stdin", "stdin")
    elif os.path.isdir(source):
        yield from _in_folder(Path(source))
    else:
        with _opened(source) as stream:
            yield from _unpacked(stream, os.path.basename(source), source)


@contextmanager
def reading(file: str) -> Iterator[None]:
    """Turns what a broken disk, compression or archive raises into a TraceError on one line."""
    try:
        yield
    except OSError as problem:
        raise TraceError(Where(file), f"cannot be read: {problem.strerror or problem}") from None
    except (EOFError, zlib.error, lzma.LZMAError, tarfile.TarError) as problem:
        raise TraceError(Where(file), f"cannot be read, it is damaged or cut off: {problem}") from None


def stem(path: str) -> str:
    """A file's name without the endings that say how it is packed and what it is."""
    return PurePosixPath(bare(path)).name


def bare(path: str) -> str:
    """A path without those endings."""
    inner = PurePosixPath(path)
    if inner.suffix in _NAMED:
        inner = inner.with_suffix("")
    return str(inner.with_suffix("")) if inner.suffix else str(inner)


def _opened(path: str) -> BinaryIO:
    try:
        return open(path, "rb")
    except FileNotFoundError:
        raise TraceError(Where(path or "''"), "no such file") from None
    except (OSError, ValueError) as problem:
        raise TraceError(Where(path), f"cannot be read: {getattr(problem, 'strerror', None) or problem}") from None


def _in_folder(folder: Path) -> Iterator[Found]:
    with reading(str(folder)):
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
    if len(paths) > MOST_FILES:
        raise TraceError(Where(str(folder)), f"expected at most {MOST_FILES:,} files, got {len(paths):,}")
    for path in paths:
        with _opened(str(path)) as stream:
            yield from _unpacked(stream, path.relative_to(folder).as_posix(), str(path), alone=False)


def _unpacked(raw: BinaryIO, path: str, file: str, *, alone: bool = True) -> Iterator[Found]:
    """The file itself, decompressed; or those in it, if it is an archive."""
    with reading(file):
        head, stream = _decompressed(raw, path, file)
    if head[_TAR_AT : _TAR_AT + len(_TAR)] == _TAR:
        yield from _in_archive(stream, path, file, alone=alone)
    else:
        yield Found(_printable(path), file, alone, head, stream)


def _in_archive(stream: BinaryIO, path: str, file: str, *, alone: bool) -> Iterator[Found]:
    """The files of an archive. An archive in it is left packed: its head is no trace's."""
    inside = members(stream, MOST_FILES)
    while True:
        with reading(file):
            member = next(inside, None)
            if member is None:
                return
            name, content = member
            within = f"{file}/{_printable(name)}"
            head, unpacked = _decompressed(content, name, within)
        yield Found(_printable(name if alone else f"{bare(path)}/{name}"), within, False, head, unpacked)


def _decompressed(raw: BinaryIO, path: str, file: str) -> tuple[bytes, BinaryIO]:
    """The first bytes, and the stream with those bytes still in it."""
    head, stream = _peeked(raw)
    if head.startswith(_GZIP):
        return _peeked(cast(BinaryIO, gzip.GzipFile(fileobj=stream)))
    if head.startswith(_XZ):
        return _peeked(cast(BinaryIO, lzma.LZMAFile(stream)))
    ending = PurePosixPath(path).suffix
    if ending in _NAMED:
        raise TraceError(Where(file), f"expected {ending[1:]}-compressed data, as its name says, got something else")
    return head, stream


def _peeked(stream: BinaryIO) -> tuple[bytes, BinaryIO]:
    head = stream.read(HEAD_BYTES)
    return head, io.BufferedReader(_Replayed(head, stream), HEAD_BYTES)


class _Replayed(io.RawIOBase):
    """A stream of which the head was read already, from its head."""

    def __init__(self, head: bytes, rest: BinaryIO) -> None:
        super().__init__()
        self._head = head
        self._rest = rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # BufferedReader gives nothing else
        data = self._head or self._rest.read(len(buffer))
        self._head = data[len(buffer) :]
        buffer[: len(data)] = data[: len(buffer)]
        return min(len(data), len(buffer))


def _printable(name: str) -> str:
    """A name fit for ids and messages, whatever bytes a file system or an archive has in it."""
    return "".join(character if character.isprintable() else "?" for character in name)
