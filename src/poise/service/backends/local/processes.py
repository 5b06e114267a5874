"""Processes as /proc shows them. A process is named by its pid, its start and the boot: a pid alone is used again.

Imported by the runner too: standard library only.
"""

import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from stat import S_ISREG
from typing import NamedTuple

from poise.service.backends.local.lease_files import open_run

SCARCE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN})
"""What goes wrong for want of files, memory or processes. It says nothing about what was looked at: look again later."""


def boot() -> str:
    """Which boot of the machine this is."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def stat_of(pid: int) -> list[str]:
    """State, parent, process group, session ... start (number 19), as proc(5) has them; empty: no such process."""
    return _read(pid, "stat").decode(errors="replace").rpartition(")")[2].split()


def context_switches(pid: int) -> int | None:
    """How often a process has had a processor and given it back: one that goes on working has more of them each time."""
    lines = (line.split() for line in _read(pid, "status").splitlines())
    counts = [int(words[1]) for words in lines if len(words) == 2 and words[0].endswith(b"voluntary_ctxt_switches:")]
    return sum(counts) if counts else None


def environment_of(pid: int) -> list[bytes]:
    """The variables that a process was started with, as name=value; none of a process of somebody else."""
    return _read(pid, "environ").split(b"\0")


def _read(pid: int, name: str) -> bytes:
    """What /proc says of a process; nothing if it is gone, or of somebody else. OSError: it could not be looked at."""
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read()
    except OSError as error:
        if error.errno in SCARCE:
            raise
        return b""


def start_of(pid: int) -> int | None:
    """Clock ticks between boot and the start of a process; None: there is none of that pid."""
    fields = stat_of(pid)
    return int(fields[19]) if fields else None


def pids() -> Iterator[int]:
    """Everything that runs, or waits to be reaped."""
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def children(parent: int) -> list[int]:
    """Direct children that have not ended. Those of the calling process cannot be mixed up with others: it reaps them."""
    found = []
    for pid in pids():
        fields = stat_of(pid)
        if fields and int(fields[1]) == parent and fields[0] != "Z":
            found.append(pid)
    return found


def opened(pid: int, start: int) -> int | None:
    """A handle (pidfd) of just that process; None: it is gone. OSError: it could not be looked at."""
    handle = _handle(pid)
    if handle is None:
        return None
    try:
        is_it = start_of(pid) == start
    except OSError:
        os.close(handle)
        raise
    if is_it:
        return handle
    os.close(handle)
    return None


def _handle(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno in SCARCE:
            raise
        return None


def kill_where(is_ours: Callable[[int], bool]) -> int:
    """KILL every process of which that is true, and say how many there were. A pid that is used again is never hit.

    OSError: not all could be looked at.
    """
    killed = 0
    for pid in pids():
        if pid == os.getpid() or not is_ours(pid):  # a service that was started from within a run is not that run's
            continue
        handle = _handle(pid)
        if handle is None:
            continue
        try:
            if is_ours(pid):  # asked again: the handle is now of this very process
                killed += 1
                with suppress(ProcessLookupError, PermissionError):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)
    return killed


def marks(name: bytes) -> set[bytes]:
    """All values of a variable in the environments of living processes."""
    variables = (each for pid in pids() for each in environment_of(pid))
    return {each[len(name) + 1 :] for each in variables if each.startswith(name + b"=")}


def belongs(pid: int, mark: bytes, groups: dict[int, int]) -> bool:
    """A living process that has the run's mark in its environment, or is in a group whose leader is that of the run.

    groups   start by process group; the leader has the group's number as its pid
    """
    fields = stat_of(pid)
    if not fields or fields[0] in "ZX":
        return False
    group = int(fields[2])
    if group in groups and start_of(group) == groups[group]:
        return True
    return mark in environment_of(pid)


def oom_kills() -> int:
    """Processes that the kernel has killed for want of memory since it was booted; 0 where it does not say."""
    try:
        with open("/proc/vmstat", encoding="ascii") as file:
            return int(next((line.split()[1] for line in file if line.startswith("oom_kill ")), 0))
    except (OSError, ValueError):
        return 0


# How a runner is started: a session of its own, next to nothing in its environment, and nothing of the server's files.

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
