"""A replica's log, of all runs of its job: appended to, and rotated by size.

`0.log` is what is written now, `0.log.<n>` a part that was closed, where n counts the bytes of the log before it. So a
rotation is one rename, and the place of every byte in the whole log is known whatever has been deleted.
"""

import os
import re
from stat import S_ISREG

SOME = 1 << 16
"""Bytes that are read from a replica at once."""
TAIL = 16 << 10
"""Bytes of the end of the log that are kept for finding what a replica died of."""


def parts(folder: int, rank: int) -> list[tuple[int, str]]:
    """Closed parts of a log, oldest first: bytes before it, and its name."""
    name = re.compile(rf"{rank}\.log\.([0-9]{{1,18}})")
    matches = (name.fullmatch(each) for each in os.listdir(folder))
    return sorted((int(match[1]), match[0]) for match in matches if match)


def begins(folder: int, closed: list[tuple[int, str]]) -> int:
    """Bytes of the log before what is written now."""
    if not closed:
        return 0
    before, name = closed[-1]
    return before + os.stat(name, dir_fd=folder, follow_symlinks=False).st_size


class LogFile:
    """Writes one log. A disk that is full costs lines, never the run: what was lost is said once there is room again.

    most    bytes of a part, give or take one reading
    kept    parts that are kept, the one that is written included
    """

    def __init__(self, folder: int, rank: int, most: int, kept: int) -> None:
        self._folder, self._rank, self._most, self._kept = folder, rank, most, kept
        self._name = f"{rank}.log"
        self._size = 0
        self._lost = 0
        self._handle = -1
        self.tail = bytearray()
        try:
            self._open()
        except OSError:
            self._handle = -1

    def title(self, text: str) -> None:
        """A line of Poise's own, on a line of its own."""
        self.tail.clear()
        self._append((b"" if self._ends_with_newline() else b"\n") + f"--- {text} ---\n".encode(errors="replace"))

    def write(self, data: bytes) -> None:
        """Add what a replica said."""
        self.tail += data
        del self.tail[:-TAIL]
        self._append(data)

    def close(self) -> None:
        """Nothing more will come."""
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
        if not S_ISREG(stat.st_mode):  # a pipe would be full at some time, and the runner would wait for its reader
            os.close(handle)
            raise FileExistsError(self._name)
        self._handle, self._size = handle, stat.st_size

    def _rotate(self) -> None:
        closed = parts(self._folder, self._rank)
        name = f"{self._name}.{begins(self._folder, closed)}"
        os.rename(self._name, name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        os.close(self._handle)
        self._handle = -1
        for _, old in closed[: max(0, len(closed) + 2 - self._kept)]:
            os.unlink(old, dir_fd=self._folder)
        self._open()

    def _ends_with_newline(self) -> bool:
        try:
            return self._size == 0 or os.pread(self._handle, 1, self._size - 1) == b"\n"
        except OSError:
            return True
