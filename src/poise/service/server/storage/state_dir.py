"""The state directory: its owner's alone, and held by one server at a time. Files in it are replaced as a whole."""

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from poise.durable import make_folders, replace_durably
from poise.scheduler.model.errors import PoiseError, RequestError

LOCK = "lock"
SERVER = "server.json"
"""Where clients of this machine find the server: `{"url", "pid", "born"}`, the last its start, as pids are used again."""
OTHERS = 0o077


def open_folder(path: Path) -> Path:
    """Make the directory, 0700, unless it is there; refuse one that somebody else owns or that others may look into."""
    try:
        make_folders(path)  # parents 0700 too: whoever may write there could put another directory in its place
        found = path.stat()
    except OSError as error:
        raise RequestError(f"--state {path}: cannot be made: {error.strerror or error}") from None
    if found.st_uid != os.geteuid():
        raise RequestError(f"--state {path}: belongs to somebody else; tokens and jobs are kept there")
    if found.st_mode & OTHERS:
        mode = stat.S_IMODE(found.st_mode)
        remedy = f"run chmod 700 {path}" if _is_ours(path) else "name a directory of its own"
        raise RequestError(f"--state {path}: others may look into it (mode {mode:04o}); {remedy}")
    if not os.access(path, os.W_OK | os.X_OK):
        raise RequestError(f"--state {path}: cannot be written: permission denied")
    return path.resolve()


def existing_folder(path: Path) -> Path:
    """As `open_folder`, of a directory that must be there."""
    if not path.is_dir():
        raise RequestError(f"{path}: there is no such directory; name the state directory of a service")
    return open_folder(path)


def _is_ours(path: Path) -> bool:
    """Empty, or a state directory already: nobody should be told to close /etc to others."""
    try:
        names = os.listdir(path)
    except OSError:
        return False
    return not names or LOCK in names


class FolderLock:
    """Holds a state directory until it is let go of, or the process dies."""

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(self._file, 20, 0).decode("ascii", "replace").strip()
            os.close(self._file)
            by = f" (process {holder})" if holder.isdecimal() else ""
            raise RequestError(f"--state {folder}: another server holds it{by}; stop that one, or name another") from None
        with _naming(folder / LOCK):
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Let go of it."""
        os.close(self._file)


def open_private(path: Path, flags: int) -> int:
    """A descriptor of a file, made 0600 if it may be; PoiseError for a link, what is no file, and what others may read."""
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


def replace_file(path: Path, text: str) -> None:
    """Put a file, 0600, in the place of another, in one step: a crash leaves the one or the other."""
    new = path.with_name(path.name + ".new")
    new.unlink(missing_ok=True)
    create_file(new, text)
    replace_durably(new, path)


def create_file(path: Path, text: str) -> None:
    """Write a file, 0600, that must not be there yet, and see to it that it is on the disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with _naming(path), os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(descriptor)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """What goes wrong with a descriptor (a full disk, say) is said of the path that it is of."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise
