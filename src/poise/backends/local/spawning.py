"""How a runner is started: a session of its own, next to nothing in its environment, and nothing of the server's files."""

import errno
import os
import signal
import sys
from pathlib import Path
from stat import S_ISREG
from typing import NamedTuple

from poise.backends.local.records import open_run

MAIN = str(Path(__file__).with_name("runner") / "__main__.py")
LOG = "runner.log"
READY = 3
"""The file that the runner closes once all replicas have started."""


class Spawned(NamedTuple):
    """A runner: its pid, a handle of the process, and a pipe that ends once its replicas have started or it has died."""

    pid: int
    process: int
    ready: int


def spawn(path: Path, environment: dict[str, str]) -> Spawned:
    """Start the runner of the order in that directory; OSError if that is not possible."""
    log = _log(path)
    try:
        ready, tell = os.pipe()
    except OSError:
        os.close(log)
        raise
    files = (
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
        (os.POSIX_SPAWN_DUP2, log, 2),
        (os.POSIX_SPAWN_DUP2, tell, READY),
    )
    argv = [sys.executable, "-I", "-S", "-X", "utf8", MAIN, str(path), str(READY)]
    try:
        # USR1 would kill a runner that does not listen yet: it is held back until the runner does.
        pid = os.posix_spawn(sys.executable, argv, environment, file_actions=files, setsid=True, setsigmask=[signal.SIGUSR1])
        return Spawned(pid, _opened(pid), ready)
    except BaseException:
        os.close(ready)
        raise
    finally:
        os.close(tell)
        os.close(log)


def _log(path: Path) -> int:
    """What the runner may write to, opened here: a process that is being started would wait for whoever reads a pipe."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
    folder = open_run(str(path))
    try:
        handle = os.open(LOG, flags, 0o600, dir_fd=folder)
    finally:
        os.close(folder)
    if S_ISREG(os.fstat(handle).st_mode):
        return handle
    os.close(handle)
    raise FileExistsError(errno.EEXIST, "not a file", str(path / LOG))


def _opened(pid: int) -> int:
    """A handle of a child. One that could not be watched is not left behind: nobody would know that it runs."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def reap(pid: int) -> int | None:
    """The exit code of a child that has ended; None: it is not a child of this process, or has been reaped."""
    try:
        reaped, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return os.waitstatus_to_exitcode(status) if reaped else None
