"""Processes of this machine: what /proc says of them, how they are signalled, and how a runner is spawned.

A pid alone is reused, so a process is identified by its pid, its start time and the boot. Signals go through a pidfd, which
stays with one process for good.

Imported by the runner: standard library only, and only what starts fast (`typing` and `pathlib` do not).
"""

import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from stat import S_ISREG

from poise.service.backends.local.lease_files import open_run

SCARCE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN})
"""Errors for want of files, memory or processes. They say nothing about what was looked at: look again later."""


CONTAINER_EVENTS = "/sys/fs/cgroup/memory.events"  # of the control group that a container sees as the topmost one


def boot_id() -> str:
    """Identify the current boot of the machine."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def stat_of(pid: int) -> list[str]:
    """Return state, parent, process group, session ... start time (index 19), as in proc(5); empty: no such process."""
    return _read(pid, "stat").decode(errors="replace").rpartition(")")[2].split()


def start_of(pid: int) -> int | None:
    """Return clock ticks from boot to the start of a process; None: no such process."""
    fields = stat_of(pid)
    return int(fields[19]) if fields else None


def context_switches(pid: int) -> int | None:
    """Count the context switches of a process so far. A process that is working has more of them at each look."""
    lines = (line.split() for line in _read(pid, "status").splitlines())
    counts = [int(words[1]) for words in lines if len(words) == 2 and words[0].endswith(b"voluntary_ctxt_switches:")]
    return sum(counts) if counts else None


def environment_of(pid: int) -> list[bytes]:
    """Return the variables that a process was started with, as name=value; empty for processes of another user."""
    return _read(pid, "environ").split(b"\0")


def _read(pid: int, name: str) -> bytes:
    """Read a file of /proc/PID; empty if the process is gone or another user's. OSError: it could not be looked at."""
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read()
    except OSError as error:
        if error.errno in SCARCE:
            raise
        return b""


def pids() -> Iterator[int]:
    """List all processes, zombies included."""
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def children(parent: int) -> list[int]:
    """List direct children that have not ended."""
    looks = ((pid, stat_of(pid)) for pid in pids())
    return [pid for pid, fields in looks if fields and int(fields[1]) == parent and fields[0] != "Z"]


def open_process(pid: int, start: int) -> int | None:
    """Open a pidfd of the process with this pid and start time; None: it is gone. OSError: it could not be looked at."""
    handle = _pidfd(pid)
    if handle is None:
        return None
    is_same = False
    try:
        # Compared after opening: from then on the pid cannot be reused unnoticed.
        is_same = start_of(pid) == start
    finally:
        if not is_same:
            os.close(handle)
    return handle if is_same else None


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno in SCARCE:
            raise
        return None


def kill_where(is_ours: Callable[[int], bool]) -> int:
    """Send KILL to each process for which `is_ours(pid)` holds, and return how many there were.

    Never hits a reused pid. OSError: not all processes could be looked at.
    """
    killed = 0
    for pid in pids():
        if pid == os.getpid() or not is_ours(pid):  # a service that was started from within a run is not part of it
            continue
        handle = _pidfd(pid)
        if handle is None:
            continue
        try:
            if is_ours(pid):  # asked again: from now on the handle belongs to this very process
                killed += 1
                with suppress(ProcessLookupError, PermissionError):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)
    return killed


def environment_values(name: bytes) -> set[bytes]:
    """Collect the values of a variable in the environments of all processes."""
    variables = (each for pid in pids() for each in environment_of(pid))
    return {each[len(name) + 1 :] for each in variables if each.startswith(name + b"=")}


def belongs_to_run(pid: int, mark: bytes, groups: dict[int, int]) -> bool:
    """Whether a living process has the run's mark in its environment, or is in a process group of the run.

    groups   start time of the leader by process group; the leader's pid is the group's number
    """
    fields = stat_of(pid)
    if not fields or fields[0] in "ZX":
        return False
    group = int(fields[2])
    if group in groups and start_of(group) == groups[group]:
        return True
    return mark in environment_of(pid)


def oom_kills(*, in_container: bool = False) -> int:
    """Count processes that the kernel has killed for want of memory since boot; 0 where the kernel does not say.

    in_container   only those of this container, where the kernel says that; other pods of the machine do not count
    """
    for path in (*([CONTAINER_EVENTS] if in_container else []), "/proc/vmstat"):
        with suppress(OSError, ValueError), open(path, encoding="ascii") as file:
            return int(next((line.split()[1] for line in file if line.startswith("oom_kill ")), 0))
    return 0


# Runners as child processes

MAIN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "runner", "__main__.py")
LOG = "runner.log"
READY = 3  # file descriptor that the runner closes once all replicas have started


def spawn(path: str, environment: dict[str, str]) -> tuple[int, int, int]:
    """Start the runner of the order in a run's directory; OSError if that is not possible.

    Returns its pid, a pidfd, and a pipe that ends once its replicas have started or it has died. The runner has a session
    of its own, so that it outlives the service, and inherits none of its files and next to nothing of its environment.
    """
    with ExitStack() as ours, ExitStack() as on_error:
        ready, write_end = os.pipe()
        ours.callback(os.close, write_end)
        on_error.callback(os.close, ready)
        pid, pidfd = spawn_with(path, environment, write_end)
        on_error.pop_all()
    return pid, pidfd, ready


def spawn_with(path: str, environment: dict[str, str], write_end: int, *more_blocked: signal.Signals) -> tuple[int, int]:
    """Start a runner that closes `write_end` once its replicas have started; return its pid and a pidfd.

    more_blocked   signals that wait until the runner has handlers for them
    """
    argv = [sys.executable, "-I", "-S", "-X", "utf8", MAIN, path, str(READY)]
    log = _open_log(path)
    try:
        files = (
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
            (os.POSIX_SPAWN_DUP2, log, 2),
            (os.POSIX_SPAWN_DUP2, write_end, READY),
        )
        # USR1 would kill a runner that has no handler for it yet: it stays blocked until the runner has one.
        blocked = [signal.SIGUSR1, *more_blocked]
        pid = os.posix_spawn(sys.executable, argv, environment, file_actions=files, setsid=True, setsigmask=blocked)
    finally:
        os.close(log)
    try:
        return pid, os.pidfd_open(pid)
    except OSError:
        # A runner that cannot be watched would run on unknown to the service.
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def _open_log(path: str) -> int:
    """Open the runner's standard error. Done here, not by posix_spawn: opening a pipe that a job put there could block."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
    folder = open_run(path)
    try:
        handle = os.open(LOG, flags, 0o600, dir_fd=folder)
    finally:
        os.close(folder)
    if S_ISREG(os.fstat(handle).st_mode):
        return handle
    os.close(handle)
    raise FileExistsError(errno.EEXIST, "not a file", os.path.join(path, LOG))


def reap(pid: int) -> int | None:
    """Return the exit code of a child that has ended; None: it is not a child of this process, or was reaped before."""
    try:
        reaped, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return os.waitstatus_to_exitcode(status) if reaped else None
