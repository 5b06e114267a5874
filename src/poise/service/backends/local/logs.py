"""Reading a replica's log while it is written and rotated. Offsets count all bytes that were ever written to it."""

import os
from contextlib import suppress
from stat import S_ISREG
from typing import NamedTuple

from poise.service.backends.api import LogPart
from poise.service.backends.local.lease_files import open_below
from poise.service.backends.local.runner.logfile import parts

TRIES = 5
"""A log that is rotated while it is looked at is looked at again."""


class _Piece(NamedTuple):
    """A file of the log: bytes before it, its own bytes, its name, and its number on the disk."""

    begin: int
    size: int
    name: str
    inode: int

    @property
    def end(self) -> int:
        """Bytes before what follows it."""
        return self.begin + self.size


def read_log(jobs: int, job: str, replica: int, offset: int, limit: int) -> LogPart:
    """At most `limit` bytes from `offset` on, in whole characters; a negative offset counts from the end. No log: no text.

    What was deleted is passed over: the answer says where it begins. So is what the job has put there instead of a file:
    nothing of its log is in that. OSError: it cannot be read at the moment; PermissionError: it may not be read.
    """
    try:
        folder = open_below(jobs, job, "log")
    except (FileNotFoundError, NotADirectoryError):
        return LogPart(b"", 0, 0)
    try:
        for _ in range(TRIES):
            with suppress(FileNotFoundError):
                return _read(folder, replica, offset, limit)
        raise BlockingIOError(f"{job}/log is being rotated")
    finally:
        os.close(folder)


def _read(folder: int, replica: int, offset: int, limit: int) -> LogPart:
    """FileNotFoundError: it was rotated meanwhile."""
    pieces = _pieces(folder, replica)
    if not pieces:
        return LogPart(b"", 0, 0)
    end = pieces[-1].end
    start = min(max(pieces[0].begin, end + offset if offset < 0 else offset), end)
    data = bytearray()
    for piece in pieces:
        at, most = start + len(data) - piece.begin, limit - len(data)
        if at < piece.size and most > 0:
            data += _bytes(folder, piece, at, min(most, piece.size - at))
    skipped = _continuation(data) if offset < 0 else 0
    whole = _whole(bytes(data[skipped:]))
    begin = start + skipped
    return LogPart(whole, begin, begin + len(whole))


def _pieces(folder: int, replica: int) -> list[_Piece]:
    """All there is, oldest first, without a gap."""
    name = f"{replica}.log"
    try:
        current = _file(folder, name)
    except FileNotFoundError:
        current = None  # it was closed, and nothing has been written since
    closed = [(begin, each, _file(folder, each)) for begin, each in parts(folder, replica)]
    pieces = _joined([_Piece(begin, stat.st_size, each, stat.st_ino) for begin, each, stat in closed if stat is not None])
    if current is None:
        return pieces
    if any(piece.inode == current.st_ino for piece in pieces):
        raise FileNotFoundError(name)
    return [*pieces, _Piece(pieces[-1].end if pieces else 0, current.st_size, name, current.st_ino)]


def _file(folder: int, name: str) -> os.stat_result | None:
    """What is known of a file; None: what is there is none."""
    stat = os.stat(name, dir_fd=folder, follow_symlinks=False)
    return stat if S_ISREG(stat.st_mode) else None


def _joined(pieces: list[_Piece]) -> list[_Piece]:
    """Those after the last gap: where the job took one away, those before it count as deleted too."""
    gaps = [number for number in range(1, len(pieces)) if pieces[number - 1].end != pieces[number].begin]
    return pieces[gaps[-1] :] if gaps else pieces


def _bytes(folder: int, piece: _Piece, at: int, count: int) -> bytes:
    handle = os.open(piece.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    try:
        if os.fstat(handle).st_ino != piece.inode:
            raise FileNotFoundError(piece.name)
        return os.pread(handle, count, at)
    finally:
        os.close(handle)


def _continuation(data: bytearray) -> int:
    """Bytes at the beginning that belong to a character before it."""
    return next((number for number, byte in enumerate(data[:3]) if byte & 0xC0 != 0x80), min(3, len(data)))


def _whole(data: bytes) -> bytes:
    """Without a character at the end that is not complete; the rest of it comes next time."""
    for back in range(1, min(3, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0xC0:
            need = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return data[:-back] if need > back and len(data) > back else data
        if byte < 0x80:
            break
    return data
