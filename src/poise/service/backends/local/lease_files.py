"""Files of the lease protocol (docs/reference/lease-protocol.md), and how they are read and replaced.

Imported by the runner too: standard library only, and of that only what starts fast.
"""

import errno
import fcntl
import json
import os
from contextlib import suppress
from stat import S_ISREG
from time import time  # noqa: TID251 - what crosses process boundaries is in seconds since 1970

from poise.durable import replace_durably

TYPE_CHECKING = False  # importing `typing` would take as long as the rest of the runner's start
if TYPE_CHECKING:
    from typing import Any

    Fields = dict[str, Any]
else:
    Fields = dict

VERSION = 1
YIELDED = 75
"""Exit code of a replica that saved its work and left (EX_TEMPFAIL)."""
CHECKPOINT_FAILED = 73
"""Exit code of a replica that could not write or read its checkpoint."""

NO_STORAGE = 74
"""Exit code of a runner that could not write down that it began, for want of room (EX_IOERR)."""

UNSAID = 70
"""Exit code of a runner that could not write down that its run began, or how it ended, and never will (EX_SOFTWARE)."""
PASSING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS})
"""What a disk that is full or sick says: that is waited for."""

LOST = "node-lost"
"""What a run died of whose runner was killed: the machine, or somebody on it, took it away. It is no fault of the job."""
STORAGE, OVERDUE = "storage-full", "max-duration"
"""Of one that could not be written down; and of one whose job had run for as long as it may."""

ORDER, LOCK, RUNNER, LEASE = "order.json", "lock", "runner.json", "lease.json"
PROGRESS, FAILURE, EXIT = "progress.json", "failure.json", "exit.json"
SET_UP = "set-up.json"
"""In the job's directory, once its setup command has succeeded."""

LASTING = frozenset({ORDER, EXIT, SET_UP})
"""Files whose new version must be there after a power failure; of the others the one before will do, or none."""

MOST_BYTES = {ORDER: 16 << 20, PROGRESS: 64 << 10, FAILURE: 64 << 10}
"""Of a file that is read whole. A job can write all of them, and what is larger says nothing."""
USUAL_BYTES = 1 << 20
"""Of any other."""

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
"""How a directory is opened that a job could have replaced."""
LONGEST = 100
"""Characters of a cause."""


def one_line(text: str) -> str:
    """What a job says, as one line of printable characters that is not too long.

    JSON can hold what cannot be written as UTF-8, and what a terminal would obey: it goes to everybody who asks.
    """
    return "".join(char if char.isprintable() else "?" for char in " ".join(text.split())[:LONGEST])


def now() -> float:
    """Seconds since 1970, by a clock that may be set back."""
    return time()


def open_below(folder: int, first: str, *names: str) -> int:
    """A directory below an open one, opened name by name; OSError if one of them is none, or a link.

    A job can put links where its directories were. They lead to what is somebody else's.
    """
    here = os.open(first, FOLDER, dir_fd=folder)
    for name in names:
        try:
            below = os.open(name, FOLDER, dir_fd=here)
        finally:
            os.close(here)
        here = below
    return here


def open_run(path: str) -> int:
    """The directory of a run, of which it is known where it is: STATE/jobs/<job>/runs/<epoch>."""
    jobs, *names = path.rsplit("/", 3)
    folder = os.open(jobs, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return open_below(folder, *names)
    finally:
        os.close(folder)


def put(folder: int, name: str, fields: Fields) -> None:
    """Replace a file of an open directory at once: readers see the old one or the new one, also after a power failure.

    Which one of the two, after that, is certain of what is LASTING: its directory is forced to the disk as well.

    Whatever somebody else has put where it is written first is removed: opening a pipe could take for ever.
    """
    text = json.dumps({"version": VERSION, **fields}, allow_nan=False).encode()
    part = f"{name}.part"
    with suppress(FileNotFoundError):
        os.unlink(part, dir_fd=folder)
    handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=folder)
    try:
        while text:
            text = text[os.write(handle, text) :]
        os.fsync(handle)
    finally:
        os.close(handle)
    if name in LASTING:
        replace_durably(part, name, folder=folder)
    else:
        os.rename(part, name, src_dir_fd=folder, dst_dir_fd=folder)


def get(folder: int, name: str) -> Fields | None:
    """What a file says; None if it is not there, cannot be read, or is of another version."""
    try:
        handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except OSError:
        return None
    try:
        # Whoever may write there may put anything there: only of a regular file it is known that reading ends.
        stat = os.fstat(handle)
        most = MOST_BYTES.get(os.path.basename(name), USUAL_BYTES)
        fields = json.loads(_read(handle, most)) if S_ISREG(stat.st_mode) and stat.st_size <= most else None
    except (OSError, ValueError, RecursionError):
        return None
    finally:
        os.close(handle)
    return fields if isinstance(fields, dict) and fields.get("version") == VERSION else None


def _read(handle: int, most: int) -> bytes:
    text = bytearray()
    while len(text) < most and (part := os.read(handle, most - len(text))):
        text += part
    return bytes(text)


def is_there(folder: int, name: str) -> bool:
    """A file of that name exists, whatever is in it."""
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return False
    return True


def take_lock(folder: int, name: str = LOCK) -> int | None:
    """An open file whose closing gives the lock back; None: somebody has it."""
    handle = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd=folder)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    return handle
