"""The fence: this node's lease, past which nothing of a run lives, whatever has become of the agent or of the runner itself.

The agent writes until when the node may run anything (`write_lease`); each runner reads that, and sets a timer of the kernel
to it whose signal is KILL to the runner. Replicas die with their runner (PR_SET_PDEATHSIG). KILL needs no cooperation: a
runner that hangs, or was stopped with all that it watches, ends on time too. Times are of CLOCK_BOOTTIME, which cannot be
set and goes on while the machine sleeps.

A lease also says since when the node has had one without a gap. A run belongs to the leases without a gap in which it was
ordered: after a gap it may have been started elsewhere, so a runner that was slow to start must not take a later lease for
its own.

What a replica has itself started dies with it only in a pid namespace (`--isolate`). Elsewhere the runner kills it a little
earlier, which takes a runner that works: one that was stopped leaves such processes to the next agent of the node.

Python has no function for timer_create(2), hence ctypes. Standard library only.
"""

import ctypes
import os
import signal
from contextlib import suppress
from time import CLOCK_BOOTTIME, clock_gettime
from typing import NamedTuple

from poise.service.backends.local.processes import boot_id
from poise.service.backends.local.runner.isolation import libc

TIMER_ABSTIME = 1
SIGEV_SIGNAL = 0
SOFT_PART = 0.4  # of the lease: when less than that is left, a job that can save its work is asked to leave
HARD_PART = 0.1  # of the lease: when less than that is left, the runner kills the run and all that it has started
NEVER = float("inf")


def since_boot() -> float:
    """Return seconds since the machine was started, also those in which it slept."""
    return clock_gettime(CLOCK_BOOTTIME)


class LeaseTimes(NamedTuple):
    """Until when this node may run anything, and since when that was so without a gap; seconds since boot."""

    until: float
    since: float


def write_lease(path: str, lease: LeaseTimes) -> None:
    """Write until when this node may run anything. Never forced to the disk: it ends with the boot.

    In place, in as many bytes as before: a disk that is full must not keep a node from renewing its lease. A reader that
    comes in the middle finds two lines that differ.
    """
    line = f"{lease.until:017.3f} {lease.since:017.3f} {boot_id()}\n"
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(handle, (line * 2).encode("ascii"), 0)
    finally:
        os.close(handle)


def read_lease(path: str) -> LeaseTimes | None:
    """Read until when this node may run anything; None: it cannot be read, or is of an earlier boot."""
    with suppress(OSError, ValueError):
        with open(path, encoding="ascii") as file:
            line, same = file.read(400).splitlines()
        until, since, boot = line.split()
        if line == same and boot == boot_id():
            return LeaseTimes(float(until), float(since))
    return None


class _SignalEvent(ctypes.Structure):
    """struct sigevent of Linux on 64-bit machines."""

    _fields_ = (("value", ctypes.c_void_p), ("signo", ctypes.c_int), ("notify", ctypes.c_int), ("rest", ctypes.c_int * 12))


class _TimerSpec(ctypes.Structure):
    """struct itimerspec: the interval, which is none, and the first expiry."""

    _fields_ = (
        ("interval", ctypes.c_long),
        ("interval_nanoseconds", ctypes.c_long),
        ("seconds", ctypes.c_long),
        ("nanoseconds", ctypes.c_long),
    )


def _function(name: str) -> "ctypes._NamedFuncPointer":
    """Find a function of the C library; before glibc 2.34, which images of users may have, it was in another one."""
    try:
        return getattr(libc, name)  # type: ignore[no-any-return]
    except AttributeError:
        return getattr(ctypes.CDLL("librt.so.1", use_errno=True), name)  # type: ignore[no-any-return]


class Fence:
    """The timer of one runner.

    path      file with the end of the lease
    seconds   how long a lease was when the run was ordered
    since     since when the node had had one then
    """

    def __init__(self, path: str, seconds: float, since: float) -> None:
        self._path, self._seconds, self._since = path, seconds, since
        self._timer = ctypes.c_void_p()
        event = _SignalEvent(None, signal.SIGKILL, SIGEV_SIGNAL)
        if _function("timer_create")(CLOCK_BOOTTIME, ctypes.byref(event), ctypes.byref(self._timer)) != 0:
            raise OSError(ctypes.get_errno(), "timer_create")
        self._until = self._length = 0.0
        # Without a lease there is no time to run in: the timer goes off in an instant.
        until = self._read()
        self._set(since_boot() if until is None else until)

    def renew(self) -> None:
        """Read the lease again. One that cannot be read, or that came after a gap, leaves the timer as it is."""
        until = self._read()
        if until is not None and until != self._until:
            self._set(until)

    @property
    def is_running_out(self) -> bool:
        """Whether the node has not heard from the server for so long that its runs should save their work."""
        return self._until - since_boot() < SOFT_PART * self._length

    @property
    def has_run_out(self) -> bool:
        """Whether it is time to kill what the timer would not: processes that have lost their parents outlive the runner."""
        return self._until - since_boot() < HARD_PART * self._length

    def lift(self) -> None:
        """Nothing of the run lives any more: let the runner take its time to write down how it ended."""
        _function("timer_delete")(self._timer)

    def _read(self) -> float | None:
        lease = read_lease(self._path)
        return lease.until if lease is not None and lease.since == self._since else None

    def _set(self, until: float) -> None:
        # A time of 0 would disarm the timer; one in the past lets it go off at once.
        nanoseconds = max(1, int(until * 1e9))
        spec = _TimerSpec(0, 0, nanoseconds // 1_000_000_000, nanoseconds % 1_000_000_000)
        if _function("timer_settime")(self._timer, TIMER_ABSTIME, ctypes.byref(spec), None) != 0:
            raise OSError(ctypes.get_errno(), "timer_settime")
        self._until = until
        # The server may have been started again with shorter leases since this run was ordered.
        self._length = min(self._seconds, max(0.0, until - since_boot()))
