"""The enclosure of a run: namespaces in which it sees neither the state of the service nor processes that are not its own.

    runner              outside: it keeps the files and the lease, and its children are the processes below
      ├── first         pid 1 of the run's pid namespace; it makes the mount namespace, and reaps what lost its parent
      └── replicas      enter the mount namespace, give up what could undo it, and become the command

Replicas are children of the runner: it knows them by the numbers that the machine knows them by, signals them as ever and
gets their exit codes from the kernel. Whatever they leave behind, in whatever session and with whatever environment, is in
the pid namespace, and dies with its first process. The runner's death is that one's (PR_SET_PDEATHSIG).

Python has no names for these system calls before 3.12. Standard library only, as all of the runner.
"""

import ctypes
import errno
import os
import signal
import sys
from contextlib import suppress

TYPE_CHECKING = False  # `typing` takes time to import, and a runner has to start at once
if TYPE_CHECKING:
    from typing import NoReturn

CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID = 0x0002_0000, 0x1000_0000, 0x2000_0000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_SLAVE = 1 << 12, 1 << 14, 1 << 19
PR_SET_PDEATHSIG, PR_CAPBSET_DROP = 1, 24
CAP_SYS_ADMIN, MOST_CAPS = 21, 64
KEPT_CAPS = frozenset({0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 14, 18, 23, 24, 29, 31})
"""What a job of root may go on to do: chown, dac_override, fowner, fsetid, kill, setgid, setuid, setpcap, net_bind_service,

net_raw, ipc_lock, sys_chroot, sys_nice, sys_resource, audit_write, setfcap. Nothing that mounts, makes devices, opens files
by their number on the disk, or looks into other processes.
"""
HARMLESS = MS_NOSUID | MS_NODEV | MS_NOEXEC

libc = ctypes.CDLL(None, use_errno=True)


class Enclosure:
    """Namespaces that the replicas of one run share.

    first     pid of their first process, as the machine knows it; 0: the run has no pid namespace
    parent    the pid of the runner as its children see it
    """

    def __init__(self, first: int, mounts: int, parent: int) -> None:
        self.first, self.parent = first, parent
        self._mounts = mounts
        self._is_to_leave = False

    def enter(self) -> None:
        """In a new child of the runner: see what the run sees, for good."""
        _call("enter", libc.setns, self._mounts, CLONE_NEWNS)
        for cap in sorted(set(range(MOST_CAPS)) - KEPT_CAPS):
            if libc.prctl(PR_CAPBSET_DROP, cap, 0, 0, 0) != 0 and ctypes.get_errno() != errno.EINVAL:  # there is no such one
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "drop privileges")
        _drop_privileges(but=KEPT_CAPS)

    def leave_when_alone(self) -> None:
        """The first process is to end as soon as nothing is left that it would have to reap."""
        if self.first and not self._is_to_leave:
            self._is_to_leave = True
            with suppress(ProcessLookupError):
                os.kill(self.first, signal.SIGUSR1)

    def ended(self, pid: int) -> None:
        """A child of the runner has been reaped: its pid may be reused from now on."""
        if pid == self.first:
            self.first = 0


def enclose(state: str, job: str, *, processes: bool) -> Enclosure:
    """Enclose what the calling process starts from now on. OSError, which names the stage: the machine does not allow it.

    state       directory that is hidden, but for `job`, a directory below it
    processes   hide processes too, which also ends whatever a run leaves behind
    """
    runner = os.getpid()
    if not _may_mount():
        _become_somebody_who_may()
    if processes:
        _call("pid namespace", libc.unshare, CLONE_NEWPID)
    said, tell = os.pipe()
    first = os.fork()
    if first == 0:
        _be_first(state, job, tell, processes=processes)
    os.close(tell)
    with open(said, "rb") as file:
        answer = file.read().decode(errors="replace")
    if answer != "ok":
        os.kill(first, signal.SIGKILL)
        os.waitpid(first, 0)
        number, _, stage = answer.partition(":")
        raise OSError(int(number or 0), os.strerror(int(number or 0)), stage or "first process")
    mounts = os.open(f"/proc/{first}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    if processes:
        return Enclosure(first, mounts, 0)
    os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)
    return Enclosure(0, mounts, runner)


def _may_mount() -> bool:
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        caps = next(int(line.split()[1], 16) for line in file if line.startswith("CapEff:"))
    return bool(caps >> CAP_SYS_ADMIN & 1)


def _become_somebody_who_may() -> None:
    """A user namespace, in which this user is who they are, and may mount what concerns them alone."""
    user, group = os.geteuid(), os.getegid()
    _call("user namespace", libc.unshare, CLONE_NEWUSER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)


def _be_first(state: str, job: str, tell: int, *, processes: bool) -> "NoReturn":
    """In the first process: make what the run sees, then reap. Keeps no file and no privilege of the runner."""
    stage = "first process"
    try:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        signal.set_wakeup_fd(-1)
        signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGCHLD, signal.SIGUSR1})
        for number in (signal.SIGCHLD, signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDWR)
        for handle in range(3):
            os.dup2(nothing, handle)
        os.closerange(3, tell)
        os.closerange(tell + 1, 1 << 20)
        os.chdir("/")
        _call("mount namespace", libc.unshare, CLONE_NEWNS)
        # What the machine mounts later is seen here too; what is mounted here is seen nowhere else.
        _mount("mount namespace", None, "/", None, MS_REC | MS_SLAVE)
        _hide(state, job)
        if processes:
            _mount("/proc of its own", "proc", "/proc", "proc", HARMLESS)
        _drop_privileges()  # a job of the same user could make this process do what it likes
        os.write(tell, b"ok")
        os.close(tell)
        _reap_forever()
    except OSError as error:
        with suppress(OSError):
            os.write(tell, f"{error.errno or 0}:{error.filename or stage}".encode())
    finally:
        os._exit(1)


def _hide(state: str, job: str) -> None:
    """An empty directory in the place of one, with one directory of it where that was."""
    kept = os.open(job, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
    _mount("hide the state", "tmpfs", state, "tmpfs", HARMLESS, b"mode=700,size=64k,nr_inodes=64")
    os.makedirs(job, 0o700)
    _mount("show the job", f"/proc/self/fd/{kept}", job, None, MS_BIND | MS_REC)
    os.close(kept)
    _mount("hide the state", None, state, None, MS_REMOUNT | MS_BIND | MS_RDONLY | HARMLESS)


def _reap_forever() -> "NoReturn":
    """Until the runner says that it is time to leave, and nothing is left; or until it kills this process."""
    awaited = {signal.SIGCHLD, signal.SIGUSR1}
    is_to_leave = False
    while True:
        heard = signal.sigwaitinfo(awaited)
        # Whoever is in the namespace has a number there. The runner is not.
        is_to_leave |= heard.si_signo == signal.SIGUSR1 and heard.si_pid == 0
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
    """Have no capabilities but these, and hand none on."""
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


# Whether this machine lets a run be enclosed: a process is, by the very code that encloses runs, and looks around.

UNENTERED, SHOWN = 2, 3
SAYINGS = {UNENTERED: "a process could not enter it", SHOWN: "it shows what it should hide"}
FULL = "full"


def try_out(state: str, job: str, level: str) -> int:
    """Exit code 0 if a process is enclosed; otherwise a line on standard output says at which stage that failed, and why."""
    try:
        enclosure = enclose(state, job, processes=level == FULL)
    except OSError as error:
        sys.stdout.write(f"{error.filename or 'enclosure'}: {error.strerror}\n")
        return 1
    child = os.fork()
    if child == 0:
        code = UNENTERED
        with suppress(OSError):
            enclosure.enter()
            is_hidden = os.listdir(state) == [os.path.relpath(job, state).split("/")[0]]
            others = [each for each in os.listdir("/proc") if each.isdigit() and each not in ("1", str(os.getpid()))]
            code = 0 if is_hidden and (level != FULL or not others) else SHOWN
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if enclosure.first:
        os.kill(enclosure.first, signal.SIGKILL)
        os.waitpid(enclosure.first, 0)
    if code:
        sys.stdout.write(SAYINGS.get(code, f"exit code {code}") + "\n")
    return code
