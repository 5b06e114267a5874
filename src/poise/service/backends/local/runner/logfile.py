"""The log of a replica over all runs of its job: appended to, and rotated by size.

`0.log` is the part that is written now; `0.log.<n>` is a closed part, where n is the number of bytes of the log before it.
So a rotation is one rename, and the offset of each byte in the whole log is known even after old parts were deleted. The
reader is local/logs.py.
"""

import os
import re
from stat import S_ISREG

READ_BYTES = 1 << 16  # bytes that are read from a replica at once
TAIL = 16 << 10  # bytes of the end of the log that are kept in memory, for finding what a replica died of


def parts(folder: int, rank: int) -> list[tuple[int, str]]:
    """List the closed parts of a log, oldest first: bytes before it, and its name."""
    name = re.compile(rf"{rank}\.log\.([0-9]{{1,18}})")
    matches = (name.fullmatch(each) for each in os.listdir(folder))
    return sorted((int(match[1]), match[0]) for match in matches if match)


class LogFile:
    """Writer of one log. A full disk costs lines, never the run; the log says how much was lost once there is room again.

    most    bytes per part, give or take one read
    kept    parts that are kept, including the one that is being written
    tail    the last bytes of the current run's output
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
