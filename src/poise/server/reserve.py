"""Room on the disk that is kept for what frees room: given up piece by piece when nothing else is left, and made again.

A file of its own beside the journal, with nothing in it. Whoever fills the disk meanwhile can take no more than the piece
that was given up just now.
"""

import os
from contextlib import closing, suppress
from os import fdopen
from pathlib import Path

from poise.server.folder import open_private
from poise.server.schema import FILE

RESERVE = f"{FILE}-reserve"
LARGEST = 16 << 20
"""Bytes."""
PART = 16
"""Of a small file system it is no more than one in so many bytes."""
PIECES = 4


class Reserve:
    """The file. `size`: how large it is meant to be."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / RESERVE
        found = os.statvfs(directory)
        self.size = min(LARGEST, found.f_blocks * found.f_frsize // PART)

    def make(self) -> bool:
        """Have all of it, and leave as much again to others; False if there is no room for that."""
        try:
            with closing(fdopen(open_private(self._path, os.O_CREAT | os.O_RDWR), "rb+", buffering=0)) as file:
                missing = self.size - os.fstat(file.fileno()).st_size
                if missing <= 0:
                    return True
                if self._free() < missing + self.size:
                    return False
                try:
                    os.posix_fallocate(file.fileno(), 0, self.size)
                except OSError:
                    os.ftruncate(file.fileno(), self.size - missing)  # some of it may have been had
                    return False
        except OSError:
            return False
        return True

    def give(self) -> bool:
        """Give up a piece; False if there is none left."""
        with suppress(OSError):
            left = self._path.stat().st_size
            if left > 0:
                os.truncate(self._path, max(0, left - -(-self.size // PIECES)))
                return True
        return False

    def _free(self) -> int:
        found = os.statvfs(self._path.parent)
        return (found.f_bavail if os.geteuid() else found.f_bfree) * found.f_frsize
