"""The token that an agent shows: one that was given, or what a file says now."""

import os
from contextlib import suppress
from pathlib import Path


class AgentToken:
    """The current token. From any thread.

    A file is looked at with each use, and read again when it has been replaced: Kubernetes puts a new token there before
    the one before is over. While it cannot be read, the one before is shown.
    """

    def __init__(self, given: str, path: Path | None) -> None:
        self._given, self._path = given, path
        self._stamp: tuple[int, int, int] | None = None

    def __call__(self) -> str:
        """Return it."""
        if self._path is not None:
            with suppress(OSError, UnicodeDecodeError):
                stat = os.stat(self._path)
                stamp = stat.st_mtime_ns, stat.st_ino, stat.st_size
                if stamp != self._stamp:
                    found = self._path.read_text().strip()
                    if found:
                        self._given, self._stamp = found, stamp
        return self._given
