"""Processes as /proc shows them. A process is named by its pid, its start and the boot: a pid alone is used again.

Imported by the runner too: standard library only.
"""

import errno
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress

SCARCE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN})
"""What goes wrong for want of files, memory or processes. It says nothing about what was looked at: look again later."""


def boot() -> str:
    """Which boot of the machine this is."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def stat_of(pid: int) -> list[str]:
    """State, parent, process group, session ... start (number 19), as proc(5) has them; empty: no such process."""
    return _read(pid, "stat").decode(errors="replace").rpartition(")")[2].split()


def turns_of(pid: int) -> int | None:
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
