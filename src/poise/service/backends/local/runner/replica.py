"""One process of a run: how it is started, and what the runner keeps of it.

It is started by fork and exec, without a shell, as the leader of a process group of its own. The kernel kills it should the
runner die: nothing that belongs to a run outlives the process that watches it.
"""

import errno
import os
import resource
import signal
from contextlib import suppress

from poise.service.backends.local.lease_files import Fields
from poise.service.backends.local.processes import start_of
from poise.service.backends.local.runner.isolation import PR_SET_PDEATHSIG, Enclosure, libc
from poise.service.backends.local.runner.logfile import SOME, LogFile

PR_SET_CHILD_SUBREAPER = 36
_LIMITS = {
    "memory": resource.RLIMIT_AS,
    "cpu_seconds": resource.RLIMIT_CPU,
    "open_files": resource.RLIMIT_NOFILE,
    "processes": resource.RLIMIT_NPROC,
}
_CAUSES = {
    errno.EACCES: "permission-error",
    errno.EPERM: "permission-error",
    errno.ENOMEM: "cpu-out-of-memory",
    errno.EAGAIN: "cpu-out-of-memory",
    errno.ENOSPC: "storage-full",
    errno.EMFILE: "node-exhausted",
    errno.ENFILE: "node-exhausted",
}
KILL_AFTER = 5
"""Seconds of CPU time between XCPU, which says what happened, and KILL, which does not."""


def adopt_orphans() -> None:
    """From now on whatever loses its parent below this process becomes its child, so that nothing can slip away."""
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class CannotStartError(Exception):
    """A replica could not be started: the exit code that a shell would have given, a cause, and a line for people."""

    def __init__(self, code: int, cause: str, text: str) -> None:
        super().__init__(text)
        self.code, self.cause = code, cause


class Replica:
    """A started process and its log. `code` is None while it lives; a signal counts negative."""

    def __init__(
        self,
        rank: int,
        argv: list[str],
        order: Fields,
        environment: dict[str, str],
        log: LogFile,
        enclosure: Enclosure | None = None,
    ) -> None:
        self.rank, self.log = rank, log
        self.code: int | None = None
        self.pipe, out = _pipe(argv[0])
        os.set_blocking(self.pipe, False)
        try:
            self.pid = _start(argv, environment, order, out, enclosure)
        except BaseException:
            os.close(self.pipe)
            raise
        finally:
            os.close(out)
        self.start = 0
        with suppress(OSError):  # it is known by its mark, too
            self.start = start_of(self.pid) or 0

    def pump(self) -> None:
        """Move what it has said into its log; closes the pipe at its end."""
        try:
            data = os.read(self.pipe, SOME)
        except BlockingIOError:
            return
        if data:
            self.log.write(data)
        else:
            self.hang_up()

    def drain(self) -> None:
        """Everything that it has said so far, a bounded amount of it."""
        for _ in range(64):
            if self.pipe < 0:
                return
            try:
                data = os.read(self.pipe, SOME)
            except BlockingIOError:
                return
            if not data:
                return
            self.log.write(data)

    def hang_up(self) -> None:
        """Listen no more."""
        if self.pipe >= 0:
            os.close(self.pipe)
        self.pipe = -1

    def signal(self, number: int) -> None:
        """To its whole process group, and to itself should it have left that.

        It has not been reaped, so its number is still its own, as is that of the group.
        """
        if self.code is not None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)
        with suppress(ProcessLookupError):
            if os.getpgid(self.pid) != self.pid:  # not twice: somebody may count how often it is told
                os.kill(self.pid, number)


def _pipe(program: str) -> tuple[int, int]:
    try:
        return os.pipe()
    except OSError as error:
        raise _refused(program, error.errno or 0, "pipe") from None


def _start(argv: list[str], environment: dict[str, str], order: Fields, out: int, enclosure: Enclosure | None) -> int:
    """The pid of a process that runs the command by now; CannotStartError if it does not."""
    problem, tell = _pipe(argv[0])
    runner = os.getpid() if enclosure is None else enclosure.parent
    try:
        pid = os.fork()
    except OSError as error:
        os.close(problem)
        os.close(tell)
        raise _refused(argv[0], error.errno or 0, "fork") from None
    if pid == 0:
        _become(argv, environment, order, out, tell, runner, enclosure)
    os.close(tell)
    with open(problem, "rb") as file:
        said = file.read()  # until the command runs, or could not be run
    if said:
        os.waitpid(pid, 0)
        number, _, stage = said.decode(errors="replace").partition(":")
        raise _refused(argv[0], int(number), stage)
    return pid


def _become(
    argv: list[str],
    environment: dict[str, str],
    order: Fields,
    out: int,
    tell: int,
    runner: int,
    enclosure: Enclosure | None,
) -> None:
    """In the new process: turn into the command. Does not come back."""
    stage = "start"
    try:
        os.setpgid(0, 0)
        if enclosure is not None:
            stage = "isolation"
            enclosure.enter()
            stage = "start"
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != runner:  # it died before the kernel knew what to do then
            os._exit(1)
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (out, 1), (out, 2)):
            os.dup2(source, target)
        stage = "directory"
        os.chdir(order["directory"])
        stage = "limits"
        _limit(order["limits"])
        stage = "program"
        os.execvpe(argv[0], argv, environment)
    except OSError as error:
        os.write(tell, f"{error.errno or 0}:{stage}".encode())
    except BaseException:
        os.write(tell, f"{errno.EINVAL}:{stage}".encode())
    finally:
        os._exit(127)


def _limit(limits: dict[str, int | None]) -> None:
    for name, kind in _LIMITS.items():
        most = limits.get(name)
        if most is not None:
            ceiling = most + KILL_AFTER if kind == resource.RLIMIT_CPU else most
            hard = resource.getrlimit(kind)[1]
            if hard != resource.RLIM_INFINITY:
                most, ceiling = min(most, hard), min(ceiling, hard)
            resource.setrlimit(kind, (most, ceiling))


def _refused(program: str, number: int, stage: str) -> CannotStartError:
    what = {"directory": "the working directory", "limits": "the limits", "program": program}.get(
        stage, f"{program} ({stage})"
    )
    # A process that its own limits forbid is told by EAGAIN only once it is to become the program.
    is_crowded = stage == "fork" and number == errno.EAGAIN
    cause = "node-exhausted" if is_crowded else _CAUSES.get(number, "incorrect-inputs")
    return CannotStartError(126 if number == errno.EACCES else 127, cause, f"cannot start: {what}: {os.strerror(number)}")
