"""Reading a replica's log while it is written and rotated. Offsets count all bytes that were ever written to it.

A log is a sequence of files (`runner/logfile.py`). Each is identified by its inode: a rotation between listing and reading
shows as another inode, and the log is looked at again.
"""

import os
from codecs import getincrementaldecoder
from contextlib import suppress
from stat import S_ISREG
from typing import NamedTuple

from poise.service.backends.api import LogPart
from poise.service.backends.local.lease_files import open_below
from poise.service.backends.local.runner.logfile import parts

TRIES = 5  # looks at a log that is being rotated


class _Piece(NamedTuple):
    """One file of the log: bytes of the log before it, its size, name and inode."""

    begin: int
    size: int
    name: str
    inode: int

    @property
    def end(self) -> int:
        """Bytes of the log before the next piece."""
        return self.begin + self.size


def read_log(jobs: int, job: str, replica: int, offset: int, limit: int) -> LogPart:
    """Read at most `limit` bytes from `offset` on, in whole characters; a negative offset counts from the end.

    Deleted parts are skipped: the answer says where it begins. So is what the job has put in place of a file. No log: no
    text. OSError: it cannot be read at the moment; PermissionError: it may not be read.
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
    """Read once; FileNotFoundError: the log was rotated meanwhile."""
    pieces = _pieces(folder, replica)
    if not pieces:
        return LogPart(b"", 0, 0)
    end = pieces[-1].end
    begin = min(max(pieces[0].begin, end + offset if offset < 0 else offset), end)
    data = bytearray()
    for piece in pieces:
        at, most = begin + len(data) - piece.begin, limit - len(data)
        if at >= piece.size or most <= 0:
            continue
        handle = os.open(piece.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        try:
            if os.fstat(handle).st_ino != piece.inode:
                raise FileNotFoundError(piece.name)
            data += os.pread(handle, min(most, piece.size - at), at)
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
    return LogPart(text, begin, begin + len(text))


def _pieces(folder: int, replica: int) -> list[_Piece]:
    """List the pieces of the log, oldest first, without a gap."""
    name = f"{replica}.log"
    try:
        current = _stat(folder, name)
    except FileNotFoundError:
        current = None  # just rotated, and nothing was written since
    pieces: list[_Piece] = []
    for begin, each in parts(folder, replica):
        stat = _stat(folder, each)
        if stat is not None:
            if pieces and pieces[-1].end != begin:
                pieces = []  # the job took a file away: what was before it counts as deleted too
            pieces.append(_Piece(begin, stat.st_size, each, stat.st_ino))
    if current is None:
        return pieces
    if any(piece.inode == current.st_ino for piece in pieces):
        raise FileNotFoundError(name)
    return [*pieces, _Piece(pieces[-1].end if pieces else 0, current.st_size, name, current.st_ino)]


def _stat(folder: int, name: str) -> os.stat_result | None:
    """Return the status of a regular file; None: it is something else."""
    stat = os.stat(name, dir_fd=folder, follow_symlinks=False)
    return stat if S_ISREG(stat.st_mode) else None
