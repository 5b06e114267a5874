"""Read a trace: `read_trace` takes whatever a user may name and returns one Trace, or raises one clear TraceError.

It finds the files that the source stands for, recognises the format of each by its first bytes (`registry.py`), lets the
reader of that format (`formats/`) make jobs of its rows, and merges the jobs of all files by time. Compression and
archives are known by their first bytes too, so that a pipe is as good as a file. Nothing is unpacked to disk, nothing is
read twice, and only what a reader asks for is decompressed.
"""

import gzip
import io
import lzma
import os
import sys
import tarfile
import zlib
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path, PurePosixPath
from typing import BinaryIO, cast

from poise.engine.loop import collector_paused
from poise.lab.traces.parsing import TraceInput, shown
from poise.lab.traces.registry import AUTO, Format, format_named, format_names, recognise
from poise.lab.traces.schema import Trace, TraceJob
from poise.lab.traces.synthetic import SYNTHETIC, generate
from poise.scheduler.model.errors import TraceError, Where

STANDARD_INPUT = "-"
HEAD_BYTES = 1 << 16
MOST_FILES = 100_000
_GZIP, _XZ, _TAR, _TAR_AT = b"\x1f\x8b", b"\xfd7zXZ\x00", b"ustar", 257
_NAMED = {".gz": _GZIP, ".tgz": _GZIP, ".xz": _XZ, ".txz": _XZ}
_NAMED_FILES = 5
"""Files left out that a note names."""
_NAMED_REASONS = 3
"""Why jobs were left out, in an error that none is left."""


@dataclass(frozen=True, slots=True)
class FoundFile:
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


def read_trace(source: str, *, format: str = AUTO) -> Trace:
    """Return the trace that `source` names, its jobs by (submitted, file, row).

    source   a file, plain or gzip- or xz-compressed; a tar archive or a folder of files of one format, merged by time;
             `-` for standard input; or `synthetic:...` for the generator
    format   a name of `registry.format_names()`; `auto` goes by the first bytes of the file

    Where several files are merged a job's id is `<file stem>/<id>`, and files that are no traces are left out with a
    note. Raises TraceError with file, line and field if it cannot be read, UnknownNameError for an unknown format.
    """
    wanted = None if format == AUTO else format_named(format)
    if source.startswith(SYNTHETIC):
        return generate(source)
    loader = _TraceLoader(source, wanted)
    # A trace is a great many objects and no cycle: looking for cycles among them takes a third of the time.
    with collector_paused(), closing(found_files(source)) as files:
        for found in files:
            loader.take(found)
        return loader.trace()


@dataclass(frozen=True, slots=True)
class _TracePart:
    """The jobs of one file, whose ids begin with `prefix`."""

    path: str
    file: str
    prefix: str
    jobs: list[TraceJob]


class _TraceLoader:
    """What has been read so far of one source."""

    def __init__(self, source: str, wanted: Format | None) -> None:
        self._source, self._wanted = source, wanted
        self._format: Format | None = None
        self._parts: list[_TracePart] = []
        self._skipped: list[str] = []
        self._tally: Counter[str] = Counter()

    def take(self, found: FoundFile) -> None:
        """Read one file, or leave it out because it is one of several and no trace."""
        chosen = self._wanted if found.alone and self._wanted else recognise(found.head)
        if chosen is None and found.alone:
            raise _unrecognised(found)
        if chosen is None or self._wanted not in (None, chosen):
            self._skipped.append(found.path)
            return
        if self._format not in (None, chosen):
            first = f"{self._format.name if self._format else ''} ({self._parts[0].path})"
            got = f"{first} and {chosen.name} ({found.path}); choose a format"
            raise TraceError(Where(self._source), f"expected files of one format, got {got}")
        self._format = chosen
        # Whether ids need a prefix is known only when a second file is there: the first goes without until then.
        prefix = f"{stem(found.path)}/" if self._parts else ""
        trace_input = TraceInput(found.file, found.stream, prefix, tally=self._tally)
        with reading(found.file):
            jobs = chosen.read(trace_input)
        self._parts.append(_TracePart(found.path, found.file, prefix, jobs))

    def trace(self) -> Trace:
        """Return everything taken, merged."""
        if self._format is None:
            what = f"{self._wanted.name} trace" if self._wanted else "trace in a known format"
            raise TraceError(Where(self._source), f"expected at least one {what}, got none")
        parts = _with_final_ids(sorted(self._parts, key=attrgetter("path")))
        jobs = [job for part in parts for job in part.jobs]
        if not jobs:
            why = "".join(f"; {what}: {count:,}" for what, count in self._tally.most_common(_NAMED_REASONS))
            raise TraceError(Where(self._source), f"expected at least one job, got none{why}")
        jobs.sort(key=attrgetter("job.submitted"))
        name = "stdin" if self._source == STANDARD_INPUT else Path(self._source).resolve().name
        notes = [*self._format.notes]
        if len(parts) > 1:
            notes.append(f"{len(parts)} files merged by time; a job's id is <file>/<id>")
        if self._skipped:
            named = ", ".join(sorted(self._skipped)[:_NAMED_FILES])
            more = ", …" if len(self._skipped) > _NAMED_FILES else ""
            count = f"{len(self._skipped):,} ({named}{more})"
            notes.append(f"files left out because they are no {self._format.name} trace: {count}")
        notes += (f"{what}: {count:,}" for what, count in sorted(self._tally.items()))
        return Trace(name, tuple(jobs), tuple(notes))


def _unrecognised(found: FoundFile) -> TraceError:
    text = found.head.decode(errors="replace").strip()
    if not text:
        got = "nothing but blanks at its beginning" if found.head else "an empty file"
        return TraceError(Where(found.file), f"expected at least one job, got {got}")
    known, got = ", ".join(format_names()[1:]), shown(text.splitlines()[0])
    return TraceError(Where(found.file, 1), f"expected a trace in a known format ({known}), got {got}")


def _with_final_ids(parts: list[_TracePart]) -> list[_TracePart]:
    """Return the parts with final ids: the shortest prefix that tells files apart, of none, stem, bare path, path.

    Most have theirs already. Ids are unique in a file, and prefixes differ; only a prefix with a slash of its own can
    make two ids equal.
    """
    prefixes = [""]
    if len(parts) > 1:
        for name in (stem, bare, str):
            prefixes = [f"{name(part.path)}/" for part in parts]
            if len(set(prefixes)) == len(prefixes):
                break
    final: list[_TracePart] = []
    for part, prefix in zip(parts, prefixes, strict=True):
        if part.prefix != prefix:
            start = len(part.prefix)
            jobs = [replace(each, job=replace(each.job, id=prefix + each.job.id[start:])) for each in part.jobs]
            final.append(replace(part, prefix=prefix, jobs=jobs))
        else:
            final.append(part)
    if any("/" in prefix[:-1] for prefix in prefixes):
        seen: dict[str, str] = {}
        for part in final:
            for each in part.jobs:
                if seen.setdefault(each.job.id, part.file) is not part.file:
                    other = seen[each.job.id]
                    raise TraceError(Where(part.file), f"expected new job ids, got {shown(each.job.id)}, as in {other}")
    return final


def found_files(source: str) -> Generator[FoundFile]:
    """Yield the files that a source stands for: one, or those in a folder (by path) or archive (in its order)."""
    if source == STANDARD_INPUT:
        yield from _unpacked(sys.stdin.buffer, "stdin", "stdin")
    elif os.path.isdir(source):
        folder = Path(source)
        with reading(str(folder)):
            paths = sorted(path for path in folder.rglob("*") if path.is_file())
        if len(paths) > MOST_FILES:
            raise TraceError(Where(str(folder)), f"expected at most {MOST_FILES:,} files, got {len(paths):,}")
        for path in paths:
            with _opened(str(path)) as stream:
                yield from _unpacked(stream, path.relative_to(folder).as_posix(), str(path), alone=False)
    else:
        with _opened(source) as stream:
            yield from _unpacked(stream, os.path.basename(source), source)


@contextmanager
def reading(file: str) -> Iterator[None]:
    """Turn what a broken disk, compression or archive raises into a TraceError on one line."""
    try:
        yield
    except OSError as problem:
        raise TraceError(Where(file), f"cannot be read: {problem.strerror or problem}") from None
    except (EOFError, zlib.error, lzma.LZMAError, tarfile.TarError) as problem:
        raise TraceError(Where(file), f"cannot be read, it is damaged or cut off: {problem}") from None


def stem(path: str) -> str:
    """Return a file's name without the endings that say how it is packed and what it is."""
    return PurePosixPath(bare(path)).name


def bare(path: str) -> str:
    """Return a path without those endings."""
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


def _unpacked(raw: BinaryIO, path: str, file: str, *, alone: bool = True) -> Iterator[FoundFile]:
    """Yield the file itself, decompressed; or those in it, if it is an archive."""
    with reading(file):
        head, stream = _decompressed(raw, path, file)
    if head[_TAR_AT : _TAR_AT + len(_TAR)] != _TAR:
        yield FoundFile(_printable(path), file, alone, head, stream)
        return
    inside = members(stream, MOST_FILES)  # an archive among them is left packed: its head is no trace's
    while True:
        with reading(file):
            member = next(inside, None)
            if member is None:
                return
            name, content = member
            within = f"{file}/{_printable(name)}"
            head, unpacked = _decompressed(content, name, within)
        yield FoundFile(_printable(name if alone else f"{bare(path)}/{name}"), within, False, head, unpacked)


def _decompressed(raw: BinaryIO, path: str, file: str) -> tuple[bytes, BinaryIO]:
    """Return the first bytes, and the stream with those bytes still in it."""
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
    """A stream whose head was read already, from its head."""

    def __init__(self, head: bytes, rest: BinaryIO) -> None:
        super().__init__()
        self._head, self._rest = head, rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # BufferedReader gives nothing else
        data = self._head or self._rest.read(len(buffer))
        self._head = data[len(buffer) :]
        buffer[: len(data)] = data[: len(buffer)]
        return min(len(data), len(buffer))


def _printable(name: str) -> str:
    """Return a name fit for ids and messages, whatever bytes a file system or an archive has in it."""
    return "".join(character if character.isprintable() else "?" for character in name)


# Tar archives, in one pass over a stream that cannot go back. The standard library reads the headers; this sees to it that
# no header makes it read a gigabyte into memory, and that a damaged header is an error: by itself the library takes one in
# the middle of an archive for its end.

_MOST_READ = 1 << 20
_MOST_PADDING = 1 << 24
_CHUNK = 1 << 16


def members(stream: BinaryIO, most: int) -> Iterator[tuple[str, BinaryIO]]:
    """Yield name and content of every plain file, in order; content is good until the next one. TarError if damaged."""
    tape = _Tape(stream)
    with _headers():
        archive = tarfile.TarFile(fileobj=cast(BinaryIO, tape), mode="r")
    for _ in range(most):
        with _headers():
            header = archive.next()
        if header is None:
            tape.check_end()
            return
        content = archive.extractfile(header) if header.isreg() else None
        if content is not None:
            yield header.name, cast(BinaryIO, content)
    raise tarfile.ReadError(f"more than {most:,} entries")


@contextmanager
def _headers() -> Iterator[None]:
    """Turn errors of numbers in a header, which the library lets escape, into ReadError."""
    try:
        yield
    except (ValueError, OverflowError) as problem:
        raise tarfile.ReadError(f"bad header ({problem})") from None


class _Tape:
    """As much of a file as the library needs: it reads, and seeks forward only."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._position, self._last = stream, 0, b""

    def tell(self) -> int:
        return self._position

    def seek(self, position: int) -> int:
        if position < self._position:
            raise tarfile.ReadError("an entry begins before the end of the one in front of it")
        while self._position < position:
            skipped = len(self._stream.read(min(_CHUNK, position - self._position)))
            if not skipped:
                break
            self._position += skipped
        return self._position

    def read(self, size: int) -> bytes:
        if size > _MOST_READ:
            raise tarfile.ReadError(f"a header of {size:,} bytes")
        self._last = self._stream.read(size)
        self._position += len(self._last)
        return self._last

    def check_end(self) -> None:
        """Raise unless the archive ended with a block of zeros; reading on to the end checks the stream's checksum too."""
        if len(self._last) != tarfile.BLOCKSIZE or self._last.strip(b"\0"):
            raise tarfile.ReadError("an entry's header is broken, or the end is missing")
        self.seek(self._position + _MOST_PADDING)
