"""Files of the lease protocol (docs/reference/lease-protocol.md): their names, and how they are read and replaced safely.

The job can write where these files are: it may put a link, a pipe or gigabytes there. So directories are opened name by name
without following links, only regular files of bounded size are read, and a file is replaced as a whole by a rename.

Imported by the runner: standard library only, and only what starts fast.
"""

import errno
import fcntl
import json
import os
from contextlib import suppress
from stat import S_ISREG
from time import time  # noqa: TID251 - what crosses process boundaries is in seconds since 1970

from poise.durable import replace_durably

TYPE_CHECKING = False  # importing `typing` takes as long as the rest of the runner's start
if TYPE_CHECKING:
    from typing import Any

    Fields = dict[str, Any]
else:
    Fields = dict

VERSION = 1

ORDER, LOCK, RUNNER, LEASE = "order.json", "lock", "runner.json", "lease.json"
PROGRESS, FAILURE, EXIT = "progress.json", "failure.json", "exit.json"
SET_UP = "set-up.json"  # in the job's directory, once its setup command has succeeded
LASTING = frozenset({ORDER, EXIT, SET_UP})
"""Files whose new version must survive a power failure; of the others the version before will do, or none."""
MOST_BYTES = {ORDER: 16 << 20, PROGRESS: 64 << 10, FAILURE: 64 << 10}
"""Largest size of a file that is read; a larger one counts as unreadable."""
USUAL_BYTES = 1 << 20  # the same for all other files

# Exit codes of replicas
YIELDED = 75  # it saved its work and left (EX_TEMPFAIL)
CHECKPOINT_FAILED = 73  # it could not write or read its checkpoint

# Exit codes of runners
NO_STORAGE = 74  # it could not write runner.json, for want of room (EX_IOERR)
UNSAID = 70  # it could not write runner.json or exit.json, and never will (EX_SOFTWARE)

# Causes
LOST = "node-lost"  # The runner was killed: the machine went down, or something on it killed it. No fault of the job.
STORAGE, OVERDUE = "storage-full", "max-duration"  # the run could not be written down; the job has run for as long as it may
LONGEST_CAUSE = 100  # characters of a cause

PASSING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS})
"""Errors of a full or broken disk: worth waiting for."""
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW  # how to open a directory that a job could have replaced


def one_line(text: str) -> str:
    """Make what a job says one line of printable characters, of bounded length.

    JSON can hold what cannot be written as UTF-8, and what a terminal would obey; the line is shown to other users.
    """
    return "".join(char if char.isprintable() else "?" for char in " ".join(text.split())[:LONGEST_CAUSE])


def now() -> float:
    """Return seconds since 1970, by a clock that may be set back."""
    return time()


def open_below(folder: int, first: str, *names: str) -> int:
    """Open a directory below an open one, name by name; OSError if one of them is missing, no directory, or a link."""
    here = os.open(first, FOLDER, dir_fd=folder)
    for name in names:
        try:
            below = os.open(name, FOLDER, dir_fd=here)
        finally:
            os.close(here)
        here = below
    return here


def open_run(path: str) -> int:
    """Open the directory of a run, STATE/jobs/<job>/runs/<epoch>."""
    jobs, *names = path.rsplit("/", 3)
    folder = os.open(jobs, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return open_below(folder, *names)
    finally:
        os.close(folder)


def put(folder: int, name: str, fields: Fields, *, forced: bool = True) -> None:
    """Replace a file atomically: readers see the old or the new version, also after a power failure if it is `forced`.

    A file in LASTING is certain to have the new version after a power failure once this returns, if it is forced.
    """
    text = json.dumps({"version": VERSION, **fields}, allow_nan=False).encode()
    part = f"{name}.part"
    with suppress(FileNotFoundError):
        os.unlink(part, dir_fd=folder)  # whatever the job has put there: opening a pipe could block for ever
    handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=folder)
    try:
        while text:
            text = text[os.write(handle, text) :]
        if forced:
            os.fsync(handle)
    finally:
        os.close(handle)
    if forced and name in LASTING:
        replace_durably(part, name, folder=folder)
    else:
        os.rename(part, name, src_dir_fd=folder, dst_dir_fd=folder)


def get(folder: int, name: str) -> Fields | None:
    """Read a file; None if it is missing, unreadable, or of another version."""
    try:
        handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except OSError:
        return None
    try:
        stat = os.fstat(handle)
        most = MOST_BYTES.get(os.path.basename(name), USUAL_BYTES)
        if not S_ISREG(stat.st_mode) or stat.st_size > most:
            return None
        text = bytearray()
        while len(text) < most and (part := os.read(handle, most - len(text))):  # bounded: it may grow meanwhile
            text += part
        fields = json.loads(bytes(text))
    except (OSError, ValueError, RecursionError):
        return None
    finally:
        os.close(handle)
    return fields if isinstance(fields, dict) and fields.get("version") == VERSION else None


def is_there(folder: int, name: str) -> bool:
    """Whether a file of that name exists, whatever it is."""
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return False
    return True


def take_lock(folder: int, name: str = LOCK) -> int | None:
    """Take a lock, and return an open file whose closing releases it; None: another process has it."""
    handle = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd=folder)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    return handle
