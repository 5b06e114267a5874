"""The state directory: private to its owner, locked by one server at a time. Its small files are replaced as a whole.

A file is on disk for certain only after two syncs: of the file, for its contents, and of its directory, for its name.
"""

import errno
import fcntl
import hashlib
import os
import stat
from pathlib import Path

from poise.durable import make_folders
from poise.scheduler.model.errors import PoiseError, RequestError

LOCK = "lock"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
SERVER = "server.json"
"""Where clients of this machine find the server: `{"url", "pid", "born"}`; `born`, its start, because pids are reused."""
OTHERS = 0o077


def open_folder(path: Path) -> Path:
    """Make the directory with mode 0700, unless it exists; refuse one of another owner or that others may read."""
    try:
        make_folders(path)  # parents 0700 too: who may write to one could replace the directory
        found = path.stat()
    except OSError as error:
        raise RequestError(f"--state {path}: cannot be made: {error.strerror or error}") from None
    if found.st_uid != os.geteuid():
        raise RequestError(f"--state {path}: belongs to another user; tokens and jobs are kept there")
    if found.st_mode & OTHERS:
        mode = stat.S_IMODE(found.st_mode)
        # Suggest chmod only for an empty directory or one that is a state directory already, never for /etc.
        try:
            names = os.listdir(path)
        except OSError:  # it may not be a directory
            names = ["unknown"]
        remedy = "name a directory of its own" if names and LOCK not in names else f"run chmod 700 {path}"
        raise RequestError(f"--state {path}: others may look into it (mode {mode:04o}); {remedy}")
    if not os.access(path, os.W_OK | os.X_OK):
        raise RequestError(f"--state {path}: cannot be written: permission denied")
    return path.resolve()


def existing_folder(path: Path) -> Path:
    """Like `open_folder`, for a directory that must exist."""
    if not path.is_dir():
        raise RequestError(f"{path}: there is no such directory; name the state directory of a service")
    return open_folder(path)


class FolderLock:
    """A lock on a state directory, held until it is released or the process dies.

    `flock` is bound to the open file, so the kernel releases it even after `kill -9`, and no stale lock can be left. The pid
    in the file is for the message alone.
    """

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(self._file, 20, 0).decode("ascii", "replace").strip()
            os.close(self._file)
            by = f" (process {holder})" if holder.isdecimal() else ""
            raise RequestError(f"--state {folder}: another server holds it{by}; stop that one, or name another") from None
        try:
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:
            error.filename = str(folder / LOCK)  # an error of a descriptor has none
            raise

    @property
    def name(self) -> str | None:
        """What no other lock on any machine is called: who has a lock of that name has this very lock.

        It is a digest of the start of the kernel that grants the lock, and of the file system and number of its file, which
        nothing else gets while a process has the file open. A copy of the directory has another name, and so has
        the same directory on another machine, whose kernel need not know of this lock. None: the kernel does not say when it
        was started.
        """
        try:
            boot = BOOT_ID.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            return None
        found = os.fstat(self._file)
        return hashlib.sha256(f"{boot} {found.st_dev} {found.st_ino}".encode()).hexdigest()[:16] if boot else None

    def release(self) -> None:
        """Release the lock."""
        os.close(self._file)


def open_private(path: Path, flags: int) -> int:
    """Open a file, with mode 0600 if it is created; raises PoiseError for a link, for no file, and if others may read it."""
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise PoiseError(f"{path}: is a symbolic link; put the file itself in its place") from None
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode) and not mode & OTHERS:
        return descriptor
    os.close(descriptor)
    if stat.S_ISREG(mode):
        raise PoiseError(f"{path}: others may read it (mode {stat.S_IMODE(mode):04o}); run chmod 600 {path}")
    raise PoiseError(f"{path}: is no file; move it away")
