"""The sandbox of a run: namespaces in which it sees neither the service's state nor processes other than its own.

    runner              outside: it keeps the files and the lease; its children are the processes below
      ├── first         pid 1 of the run's pid namespace: makes the mount namespace, and reaps orphans
      └── replicas      enter the mount namespace, give up the privileges that could undo it, and exec the command

Replicas are children of the runner, not of the first process: the runner signals them by the pids that the machine knows,
and gets their exit codes from the kernel. Whatever they leave behind, in whatever session and with whatever environment, is
in the pid namespace and dies with its first process, which in turn dies with the runner (PR_SET_PDEATHSIG).

Python has no functions for these system calls before 3.12, hence ctypes. Standard library only.
"""

import ctypes
import errno
import os
import signal
import sys
from contextlib import suppress

TYPE_CHECKING = False  # importing `typing` takes time that the start of a runner does not have
if TYPE_CHECKING:
    from typing import NoReturn

CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID = 0x0002_0000, 0x1000_0000, 0x2000_0000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_SLAVE = 1 << 12, 1 << 14, 1 << 19
HARMLESS = MS_NOSUID | MS_NODEV | MS_NOEXEC
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER = 1, 24, 36
CAP_SYS_ADMIN, MOST_CAPS = 21, 64
KEPT_CAPS = frozenset({0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 14, 18, 23, 24, 29, 31})
"""Capabilities that a job of root keeps: chown, dac_override, fowner, fsetid, kill, setgid, setuid, setpcap,
net_bind_service, net_raw, ipc_lock, sys_chroot, sys_nice, sys_resource, audit_write, setfcap. Dropped is what mounts, makes
devices, opens files by inode, or looks into other processes."""

libc = ctypes.CDLL(None, use_errno=True)


class Sandbox:
    """Namespaces that the replicas of one run share."""

    def __init__(self, first: int, mounts: int, parent: int) -> None:
        self.first = first  # pid of their first process, as the machine knows it; 0: no pid namespace, or it is gone
        self.parent = parent  # pid of the runner as its children see it
        self._mounts = mounts
        self._was_asked_to_leave = False

    def enter(self) -> None:
        """Enter for good; called in a new child of the runner."""
        _call("enter", libc.setns, self._mounts, CLONE_NEWNS)
        for cap in sorted(set(range(MOST_CAPS)) - KEPT_CAPS):
            # EINVAL: this kernel does not have that capability.
            if libc.prctl(PR_CAPBSET_DROP, cap, 0, 0, 0) != 0 and ctypes.get_errno() != errno.EINVAL:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "drop privileges")
        _drop_privileges(but=KEPT_CAPS)

    def leave_when_alone(self) -> None:
        """Ask the first process to end as soon as there is nothing left for it to reap."""
        if self.first and not self._was_asked_to_leave:
            self._was_asked_to_leave = True
            with suppress(ProcessLookupError):
                os.kill(self.first, signal.SIGUSR1)

    def reaped(self, pid: int) -> None:
        """Note that the runner has reaped a child: its pid may be reused from now on."""
        if pid == self.first:
            self.first = 0


def make_sandbox(state: str, job: str, *, processes: bool) -> Sandbox:
    """Make the sandbox for all that the calling process starts from now on.

    state       directory that is hidden, except for `job`, a directory below it
    processes   hide other processes too; this also ends whatever a run leaves behind

    OSError: the machine does not allow it; `filename` names the stage.
    """
    runner = os.getpid()
    _require_mount_privilege()
    if processes:
        _call("pid namespace", libc.unshare, CLONE_NEWPID)
    answers, write_end = os.pipe()
    first = os.fork()
    if first == 0:
        _be_first_process(state, job, write_end, processes=processes)
    os.close(write_end)
    with open(answers, "rb") as file:
        answer = file.read().decode(errors="replace")
    if answer != "ok":
        _kill_and_reap(first)
        number, _, stage = answer.partition(":")
        raise OSError(int(number or 0), os.strerror(int(number or 0)), stage or "first process")
    mounts = os.open(f"/proc/{first}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    if processes:
        return Sandbox(first, mounts, 0)
    _kill_and_reap(first)  # the open file keeps the mount namespace; without a pid namespace there is nothing to reap
    return Sandbox(0, mounts, runner)


def _require_mount_privilege() -> None:
    """Gain CAP_SYS_ADMIN by a user namespace that maps this user to itself, unless the process has it already."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        caps = next(int(line.split()[1], 16) for line in file if line.startswith("CapEff:"))
    if caps >> CAP_SYS_ADMIN & 1:
        return
    user, group = os.geteuid(), os.getegid()
    _call("user namespace", libc.unshare, CLONE_NEWUSER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)


def _be_first_process(state: str, job: str, answers: int, *, processes: bool) -> "NoReturn":
    """Make what the run sees, answer "ok" or the stage that failed, then reap orphans. Keeps no file of the runner."""
    try:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        signal.set_wakeup_fd(-1)
        signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGCHLD, signal.SIGUSR1})
        for number in (signal.SIGCHLD, signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDWR)
        for handle in range(3):
            os.dup2(nothing, handle)
        os.closerange(3, answers)
        os.closerange(answers + 1, 1 << 20)
        os.chdir("/")
        _call("mount namespace", libc.unshare, CLONE_NEWNS)
        # Slave: what the machine mounts later is seen here too; what is mounted here is seen nowhere else.
        _mount("mount namespace", None, "/", None, MS_REC | MS_SLAVE)
        # An empty read-only directory in place of the state, with the job's own directory where it was.
        kept = os.open(job, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
        _mount("hide the state", "tmpfs", state, "tmpfs", HARMLESS, b"mode=700,size=64k,nr_inodes=64")
        os.makedirs(job, 0o700)
        _mount("show the job", f"/proc/self/fd/{kept}", job, None, MS_BIND | MS_REC)
        os.close(kept)
        _mount("hide the state", None, state, None, MS_REMOUNT | MS_BIND | MS_RDONLY | HARMLESS)
        if processes:
            _mount("/proc of its own", "proc", "/proc", "proc", HARMLESS)
        _drop_privileges()  # a job of the same user can trace this process
        os.write(answers, b"ok")
        os.close(answers)
        _reap_orphans()
    except OSError as error:
        with suppress(OSError):
            os.write(answers, f"{error.errno or 0}:{error.filename or 'first process'}".encode())
    finally:
        os._exit(1)


def _reap_orphans() -> "NoReturn":
    """Reap until the runner asks this process to leave and nothing is left, or until the runner kills it."""
    is_to_leave = False
    while True:
        info = signal.sigwaitinfo({signal.SIGCHLD, signal.SIGUSR1})
        # The runner is outside the pid namespace, so its pid reads 0 here: processes of the job cannot pretend to be it.
        is_to_leave |= info.si_signo == signal.SIGUSR1 and info.si_pid == 0
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                if is_to_leave:
                    os._exit(0)
                break
            if pid == 0:
                break


def _drop_privileges(but: frozenset[int] = frozenset()) -> None:
    """Drop all capabilities except these, and pass none on."""
    header = (ctypes.c_uint32 * 2)(0x2008_0522, 0)  # version 3 of capset(2), of this process
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; then the upper halves of the same
    _call("drop privileges", libc.capget, header, sets)
    for half in (0, 1):
        kept = sum(1 << cap - 32 * half for cap in but if cap // 32 == half) & sets[3 * half + 1]
        sets[3 * half : 3 * half + 3] = [kept, kept, 0]
    _call("drop privileges", libc.capset, header, sets)


def _mount(stage: str, source: str | None, target: str, kind: str | None, flags: int, data: bytes | None = None) -> None:
    names = (None if name is None else os.fsencode(name) for name in (source, target, kind))
    _call(stage, libc.mount, *names, ctypes.c_ulong(flags), data)


def _call(stage: str, function: "ctypes._NamedFuncPointer", *args: object) -> None:
    if function(*args) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), stage)


def _kill_and_reap(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


# The trial at the start of the service: `__main__.py --try`

NOT_ENTERED, NOT_HIDDEN = 2, 3
FULL = "full"


def try_out(state: str, job: str, level: str) -> int:
    """Isolate a process as a run would be, and have it look around. Returns 0 if nothing is seen that should be hidden.

    Otherwise one line on standard output says which stage failed, and why.
    """
    try:
        sandbox = make_sandbox(state, job, processes=level == FULL)
    except OSError as error:
        sys.stdout.write(f"{error.filename or 'enclosure'}: {error.strerror}\n")
        return 1
    child = os.fork()
    if child == 0:
        code = NOT_ENTERED
        with suppress(OSError):
            sandbox.enter()
            is_hidden = os.listdir(state) == [os.path.relpath(job, state).split("/")[0]]
            others = [each for each in os.listdir("/proc") if each.isdigit() and each not in ("1", str(os.getpid()))]
            code = 0 if is_hidden and (level != FULL or not others) else NOT_HIDDEN
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if sandbox.first:
        _kill_and_reap(sandbox.first)
    if code:
        said = {NOT_ENTERED: "a process could not enter it", NOT_HIDDEN: "it shows what it should hide"}
        sys.stdout.write(said.get(code, f"exit code {code}") + "\n")
    return code
