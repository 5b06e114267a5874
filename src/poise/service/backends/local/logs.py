"""The log of a replica over all runs of its job: `LogFile` appends to it and rotates it, `read_log` reads it meanwhile.

`0.log` is the part that is written now; `0.log.<n>` is a closed part, where n is the number of bytes of the log before it.
So a rotation is one rename, and the offset of each byte in the whole log is known even after old parts were deleted. A part
is identified by its inode: a rotation between listing and reading shows as another inode, and the log is looked at again.

Imported by the runner: standard library only, and only what starts fast.
"""

import os
import re
from codecs import getincrementaldecoder
from contextlib import suppress
from stat import S_ISREG

from poise.service.backends.local.lease_files import open_below

READ_BYTES = 1 << 16  # bytes that are read from a replica at once
TAIL = 16 << 10  # bytes of the end of the log that are kept in memory, for finding what a replica died of
TRIES = 5  # looks at a log that is being rotated

Piece = tuple[int, str, os.stat_result]  # one file of the log: bytes of the log before it, its name and status


class LogFile:
    """Writer of one log. A full disk costs lines, never the run; the log says how much was lost once there is room again.

    most    bytes per part, give or take one read
    kept    parts that are kept, including the one that is being written
    """

    def __init__(self, folder: int, rank: int, most: int, kept: int) -> None:
        self._folder, self._rank, self._most, self._kept = folder, rank, most, kept
        self._name = f"{rank}.log"
        self._size = self._lost = 0
        self._handle = -1
        self.tail = bytearray()  # the last bytes of the current run's output
        with suppress(OSError):  # tried again with each write
            self._open()

    def title(self, text: str) -> None:
        """Write a line of Poise's own, and forget the tail."""
        self.tail.clear()
        try:
            is_at_line_start = self._size == 0 or os.pread(self._handle, 1, self._size - 1) == b"\n"
        except OSError:
            is_at_line_start = True
        self._append((b"" if is_at_line_start else b"\n") + f"--- {text} ---\n".encode(errors="replace"))

    def write(self, data: bytes) -> None:
        """Append output of the replica."""
        self.tail += data
        del self.tail[:-TAIL]
        self._append(data)

    def append_all(self, data: bytes) -> None:
        """Append data of another log, all of it; OSError if that fails, with as much of it written as could be."""
        if self._handle < 0:
            self._open()
        if self._size and self._size + len(data) > self._most:
            self._rotate()
        self._write_all(data)

    def close(self) -> None:
        """Close the file."""
        if self._handle >= 0:
            os.close(self._handle)
        self._handle = -1

    def _append(self, data: bytes) -> None:
        try:
            if self._handle < 0:
                self._open()
            if self._size and self._size + len(data) > self._most:
                self._rotate()
            if self._lost:
                self._write_all(f"\n--- could not be written: {self._lost} byte{'s' * (self._lost != 1)} ---\n".encode())
                self._lost = 0
            self._write_all(data)
        except OSError:
            self._lost += len(data)

    def _write_all(self, data: bytes) -> None:
        while data:
            written = os.write(self._handle, data)
            self._size += written
            data = data[written:]

    def _open(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
        handle = os.open(self._name, flags, 0o600, dir_fd=self._folder)
        stat = os.fstat(handle)
        if not S_ISREG(stat.st_mode):  # a full pipe would block the runner
            os.close(handle)
            raise FileExistsError(self._name)
        self._handle, self._size = handle, stat.st_size

    def _rotate(self) -> None:
        closed = parts(self._folder, self._rank)
        begin = 0
        if closed:
            before, last = closed[-1]
            begin = before + os.stat(last, dir_fd=self._folder, follow_symlinks=False).st_size
        name = f"{self._name}.{begin}"
        os.rename(self._name, name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        os.close(self._handle)
        self._handle = -1
        for _, old in closed[: max(0, len(closed) + 2 - self._kept)]:
            os.unlink(old, dir_fd=self._folder)
        self._open()


def parts(folder: int, rank: int) -> list[tuple[int, str]]:
    """List the closed parts of a log, oldest first: bytes before it, and its name."""
    name = re.compile(rf"{rank}\.log\.([0-9]{{1,18}})")
    matches = (name.fullmatch(each) for each in os.listdir(folder))
    return sorted((int(match[1]), match[0]) for match in matches if match)


def read_log(jobs: int, job: str, replica: int, offset: int, limit: int) -> tuple[bytes, int, int]:
    """Read at most `limit` bytes from `offset` on, in whole characters; a negative offset counts from the end.

    Returns the text, its offset and the offset at which to read on (`LogPart`). Deleted parts are skipped: the answer says
    where it begins. So is what the job has put in place of a file. No log: no text. OSError: it cannot be read now;
    PermissionError: it may not be read.
    """
    try:
        folder = open_below(jobs, job, "log")
    except (FileNotFoundError, NotADirectoryError):
        return b"", 0, 0
    try:
        for _ in range(TRIES):
            with suppress(FileNotFoundError):
                return _read(folder, replica, offset, limit)
        raise BlockingIOError(f"{job}/log is being rotated")
    finally:
        os.close(folder)


def _read(folder: int, replica: int, offset: int, limit: int) -> tuple[bytes, int, int]:
    """Read once; FileNotFoundError: the log was rotated meanwhile."""
    pieces = _pieces(folder, replica)
    if not pieces:
        return b"", 0, 0
    end = _end(pieces)
    begin = min(max(pieces[0][0], end + offset if offset < 0 else offset), end)
    data = bytearray()
    for before, name, stat in pieces:
        at, most = begin + len(data) - before, limit - len(data)
        if at >= stat.st_size or most <= 0:
            continue
        handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        try:
            if os.fstat(handle).st_ino != stat.st_ino:
                raise FileNotFoundError(name)
            data += os.pread(handle, min(most, stat.st_size - at), at)
        finally:
            os.close(handle)
    if offset < 0:  # it may begin in the middle of a character: leave out the rest of that
        skipped = next((place for place, byte in enumerate(data[:3]) if byte & 0xC0 != 0x80), min(3, len(data)))
        del data[:skipped]
        begin += skipped
    decoder = getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    incomplete = len(decoder.getstate()[0])  # bytes of a character at the end, which comes with the next read
    text = bytes(data[:-incomplete] if 0 < incomplete < len(data) else data)
    return text, begin, begin + len(text)


def end_of(folder: int, replica: int) -> int:
    """Return the length of a log, with what has been deleted of it."""
    for _ in range(TRIES):
        with suppress(FileNotFoundError):
            return _end(_pieces(folder, replica))
    raise BlockingIOError(f"log {replica} is being rotated")


def _pieces(folder: int, replica: int) -> list[Piece]:
    """List the pieces of the log, oldest first, without a gap."""
    name = f"{replica}.log"
    try:
        current = _stat(folder, name)
    except FileNotFoundError:
        current = None  # just rotated, and nothing was written since
    pieces: list[Piece] = []
    for begin, each in parts(folder, replica):
        stat = _stat(folder, each)
        if stat is not None:
            if _end(pieces) != begin:
                pieces = []  # the job took a file away: what was before it counts as deleted too
            pieces.append((begin, each, stat))
    if current is None:
        return pieces
    if any(stat.st_ino == current.st_ino for _, _, stat in pieces):
        raise FileNotFoundError(name)
    return [*pieces, (_end(pieces), name, current)]


def _end(pieces: list[Piece]) -> int:
    return pieces[-1][0] + pieces[-1][2].st_size if pieces else 0


def _stat(folder: int, name: str) -> os.stat_result | None:
    """Return the status of a regular file; None: it is something else."""
    stat = os.stat(name, dir_fd=folder, follow_symlinks=False)
    return stat if S_ISREG(stat.st_mode) else None
