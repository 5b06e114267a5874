"""How far the journal has come, written beside it after every commit: so a journal that lost its end is known by that.

A few bytes in one block, written over each time and never forced to the disk: that costs microseconds. After a crash of the
machine the mark may be older than the journal, which says nothing; it is never newer, unless the journal has lost something.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from poise.service.server.storage.schema import FILE
from poise.service.server.storage.state_dir import open_private

MARK = f"{FILE}-mark"
SIZE = 64


class Reached(NamedTuple):
    """Numbers of the last entry and of the highest job that was answered."""

    entry: int
    job: int

    def is_in(self, found: "Reached") -> bool:
        """A journal that came so far has all of it."""
        return self.entry <= found.entry and self.job <= found.job

    def missing(self, found: "Reached") -> str:
        """What a journal does not have that ends earlier than this."""
        entries = _numbers("entry", "entries", found.entry, self.entry)
        jobs = _numbers("job", "jobs", found.job, self.job)
        what = " and ".join(each for each in (entries, jobs) if each)
        verbs = "were answered and are missing" if "–" in what or " and " in what else "was answered and is missing"
        return f"it has lost its end: {what} {verbs}"


def _numbers(one: str, many: str, have: int, had: int) -> str:
    if had <= have:
        return ""
    return f"{one} {had:,}" if had == have + 1 else f"{many} {have + 1:,}–{had:,}"


class JournalMark:
    """The file, open for as long as the store is. What cannot be read says nothing; what cannot be written is left."""

    def __init__(self, directory: Path) -> None:
        self._file = open_private(directory / MARK, os.O_CREAT | os.O_RDWR)

    def read(self) -> Reached | None:
        """What was written last; None if nothing was, or it makes no sense."""
        return _understood(os.pread(self._file, SIZE, 0))

    def write(self, reached: Reached) -> None:
        """From now on it is this."""
        entry, job = b"%d" % reached.entry, b"%d" % reached.job
        with suppress(OSError):
            os.pwrite(self._file, (b"%s %s %s" % (entry, job, _check(entry, job))).ljust(SIZE - 1) + b"\n", 0)

    def close(self) -> None:
        """Nothing more will be written."""
        os.close(self._file)


def marked(directory: Path) -> Reached | None:
    """What was written last beside a journal that is only looked at."""
    try:
        return _understood((directory / MARK).read_bytes()[:SIZE])
    except OSError:
        return None


def _understood(text: bytes) -> Reached | None:
    words = text.split()
    if len(words) != 3 or words[2] != _check(words[0], words[1]):
        return None
    return Reached(int(words[0]), int(words[1]))


def _check(entry: bytes, job: bytes) -> bytes:
    return b"%08x" % crc32(entry + b" " + job)
