"""Processes as /proc shows them. A process is named by its pid, its start and the boot: a pid alone is used again.

Imported by the runner too: standard library only.
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress


def boot() -> str:
    """Which boot of the machine this is."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def stat_of(pid: int) -> list[str]:
    """State, parent, process group, session ... start (number 19), as proc(5) has them; empty: no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


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
    """A handle (pidfd) of just that process; None: it is gone."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return None
    if start_of(pid) == start:
        return handle
    os.close(handle)
    return None


def kill_where(is_ours: Callable[[int], bool]) -> int:
    """KILL every process of which that is true, and say how many there were. A pid that is used again is never hit."""
    killed = 0
    for pid in pids():
        if not is_ours(pid):
            continue
        try:
            handle = os.pidfd_open(pid)
        except OSError:
            continue
        try:
            if is_ours(pid):  # asked again: the handle is now of this very process
                killed += 1
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        except OSError:
            pass
        finally:
            os.close(handle)
    return killed


def marks(name: bytes) -> set[bytes]:
    """All values of a variable in the environments of living processes."""
    found = set()
    for pid in pids():
        with suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
            found |= {each[len(name) + 1 :] for each in file.read().split(b"\0") if each.startswith(name + b"=")}
    return found


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
    with suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
        return mark in file.read().split(b"\0")
    return False


def oom_kills() -> int:
    """Processes that the kernel has killed for want of memory since it was booted; 0 where it does not say."""
    try:
        with open("/proc/vmstat", encoding="ascii") as file:
            return int(next((line.split()[1] for line in file if line.startswith("oom_kill ")), 0))
    except (OSError, ValueError):
        return 0
