"""The two small files beside the journal: the mark, which says how far it came, and the reserve, for a full disk.

Neither is part of the history. A mark that is lost costs the check that nothing is missing; a reserve that is lost costs
the last few commits on a full disk.
"""

import os
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from poise.service.server.storage.schema import FILE
from poise.service.server.storage.state_dir import open_private

MARK = f"{FILE}-mark"
MARK_BYTES = 64
RESERVE = f"{FILE}-reserve"
LARGEST_RESERVE = 16 << 20  # bytes
LARGEST_PART = 16  # on a small file system the reserve takes at most this part of it, as a divisor
PIECES = 4


class JournalEnd(NamedTuple):
    """Numbers of the last entry and of the highest job that a journal has, or that were answered."""

    entry: int
    job: int

    def is_in(self, found: "JournalEnd") -> bool:
        """Whether a journal that ends at `found` has all of it."""
        return self.entry <= found.entry and self.job <= found.job

    def missing(self, found: "JournalEnd") -> str:
        """What a journal that ends at `found`, which is earlier, does not have."""
        parts = []
        for one, many, have, had in (("entry", "entries", found.entry, self.entry), ("job", "jobs", found.job, self.job)):
            if had > have:
                parts.append(f"{one} {had:,}" if had == have + 1 else f"{many} {have + 1:,}–{had:,}")
        what = " and ".join(parts)
        verbs = "were answered and are missing" if "–" in what or " and " in what else "was answered and is missing"
        return f"it has lost its end: {what} {verbs}"


class JournalMark:
    """The end of the journal as of the last commit, in a file that stays open as long as the store.

    A few bytes in one block, overwritten after each commit and never synced, which costs microseconds. After a power
    failure the mark may therefore lag behind the journal, which hides a loss at worst; it is never ahead, unless the journal
    has lost its end. A mark that cannot be read says nothing, and one that cannot be written is left as it is.
    """

    def __init__(self, directory: Path) -> None:
        self._file = open_private(directory / MARK, os.O_CREAT | os.O_RDWR)

    def read(self) -> JournalEnd | None:
        """What was written last; None if nothing was, or it is damaged."""
        return _parsed(os.pread(self._file, MARK_BYTES, 0))

    def write(self, end: JournalEnd) -> None:
        """Replace what was written before."""
        numbers = b"%d %d" % end
        with suppress(OSError):
            os.pwrite(self._file, (b"%s %08x" % (numbers, crc32(numbers))).ljust(MARK_BYTES - 1) + b"\n", 0)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def read_mark(directory: Path) -> JournalEnd | None:
    """The mark beside a journal that is only read, and may be in use by a service."""
    try:
        return _parsed((directory / MARK).read_bytes()[:MARK_BYTES])
    except OSError:
        return None


def _parsed(text: bytes) -> JournalEnd | None:
    words = text.split()
    if len(words) != 3 or words[2] != b"%08x" % crc32(b" ".join(words[:2])):
        return None
    return JournalEnd(int(words[0]), int(words[1]))


class Reserve:
    """Disk space that is kept for what frees space: a file without contents, given up in pieces and made again.

    In pieces, so that a process which fills the disk can take only the piece that was given up last.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / RESERVE
        found = os.statvfs(directory)
        self.size = min(LARGEST_RESERVE, found.f_blocks * found.f_frsize // LARGEST_PART)

    def make(self) -> bool:
        """Allocate all of it, if that leaves as much again to others; False if there is not enough space."""
        try:
            with closing(os.fdopen(open_private(self._path, os.O_CREAT | os.O_RDWR), "rb+", buffering=0)) as file:
                missing = self.size - os.fstat(file.fileno()).st_size
                if missing <= 0:
                    return True
                if self.free() < missing + self.size:
                    return False
                try:
                    os.posix_fallocate(file.fileno(), 0, self.size)
                except OSError:
                    os.ftruncate(file.fileno(), self.size - missing)  # it may have been allocated in part
                    return False
        except OSError:
            return False
        return True

    def free(self) -> int:
        """Bytes of the file system that this user may still write."""
        found = os.statvfs(self._path.parent)
        return (found.f_bavail if os.geteuid() else found.f_bfree) * found.f_frsize

    def give(self) -> bool:
        """Give up a piece; False if none is left."""
        with suppress(OSError):
            left = self._path.stat().st_size
            if left > 0:
                os.truncate(self._path, max(0, left - -(-self.size // PIECES)))
                return True
        return False
