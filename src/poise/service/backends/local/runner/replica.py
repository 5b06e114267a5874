"""One process of a run: how it is started, and what the runner keeps of it.

It is started by fork and exec, without a shell, as the leader of a process group of its own. The kernel kills it when the
runner dies (PR_SET_PDEATHSIG): no replica outlives the process that watches it.
"""

import errno
import os
import resource
import signal
from contextlib import suppress

from poise.service.backends.local.lease_files import Fields
from poise.service.backends.local.logs import READ_BYTES, LogFile
from poise.service.backends.local.processes import start_of
from poise.service.backends.local.runner.isolation import PR_SET_PDEATHSIG, Sandbox, libc

_LIMITS = {
    "memory": resource.RLIMIT_AS,
    "cpu_seconds": resource.RLIMIT_CPU,
    "open_files": resource.RLIMIT_NOFILE,
    "processes": resource.RLIMIT_NPROC,
}
_CAUSES = {
    **dict.fromkeys((errno.EACCES, errno.EPERM), "permission-error"),
    **dict.fromkeys((errno.ENOMEM, errno.EAGAIN), "cpu-out-of-memory"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "node-exhausted"),
    errno.ENOSPC: "storage-full",
}
_MISSING = {"directory": "working-directory-missing", "program": "program-missing"}
"""Causes by what this machine lacks."""
KILL_AFTER = 5  # seconds of CPU time between XCPU, which says what happened, and KILL, which does not


class CannotStartError(Exception):
    """A replica could not be started: the exit code that a shell would have given, a cause, and a line for the log."""

    def __init__(self, program: str, number: int, stage: str, directory: str = "") -> None:
        names = {"directory": f"the working directory {directory}", "limits": "the limits", "program": program}
        is_missing = number in (errno.ENOENT, errno.ENOTDIR)
        hint = "; `poise submit --ship` brings it along" if stage == "directory" and is_missing else ""
        super().__init__(f"cannot start: {names.get(stage, f'{program} ({stage})')}: {os.strerror(number)}{hint}")
        self.code = 126 if number == errno.EACCES else 127
        # The job's own limit on processes shows as EAGAIN too, but only at exec: at fork it is the machine that is full.
        is_machine_full = stage == "fork" and number == errno.EAGAIN
        missing = _MISSING.get(stage) if is_missing else None
        self.cause = "node-exhausted" if is_machine_full else missing or _CAUSES.get(number, "incorrect-inputs")


class Replica:
    """A started process and its log. `code` is None while it lives; a signal is negative."""

    def __init__(
        self,
        rank: int,
        argv: list[str],
        order: Fields,
        environment: dict[str, str],
        log: LogFile,
        sandbox: Sandbox | None = None,
    ) -> None:
        self.rank, self.log = rank, log
        self.code: int | None = None
        self.pipe, out = _pipe(argv[0])
        os.set_blocking(self.pipe, False)
        try:
            self.pid = _fork_and_exec(argv, environment, order, out, sandbox)
        except BaseException:
            os.close(self.pipe)
            raise
        finally:
            os.close(out)
        self.start = 0
        with suppress(OSError):  # without it the process is still recognised by the mark in its environment
            self.start = start_of(self.pid) or 0

    def pump(self) -> None:
        """Move pending output into the log; closes the pipe at its end."""
        if self._move_output() == b"":
            self.hang_up()

    def drain(self) -> None:
        """Move all pending output into the log. Bounded: a process that inherited the pipe may write for ever."""
        for _ in range(64):
            if self.pipe < 0 or not self._move_output():
                return

    def _move_output(self) -> bytes | None:
        """Move what can be read at once into the log, and return it; empty: the pipe has ended; None: nothing is there."""
        try:
            data = os.read(self.pipe, READ_BYTES)
        except BlockingIOError:
            return None
        if data:
            self.log.write(data)
        return data

    def hang_up(self) -> None:
        """Close the pipe; calling it twice is harmless."""
        if self.pipe >= 0:
            os.close(self.pipe)
        self.pipe = -1

    def signal(self, number: int) -> None:
        """Signal its process group, and the process itself if it has left that group.

        It has not been reaped, so neither its pid nor that of the group can be another's.
        """
        if self.code is not None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)
        with suppress(ProcessLookupError):
            if os.getpgid(self.pid) != self.pid:  # never twice: programs may count signals
                os.kill(self.pid, number)


def _pipe(program: str) -> tuple[int, int]:
    try:
        return os.pipe()
    except OSError as error:
        raise CannotStartError(program, error.errno or 0, "pipe") from None


def _fork_and_exec(argv: list[str], environment: dict[str, str], order: Fields, out: int, sandbox: Sandbox | None) -> int:
    """Return the pid of a process that already runs the command; CannotStartError if it does not."""
    problem, write_end = _pipe(argv[0])
    runner = os.getpid() if sandbox is None else sandbox.parent
    try:
        pid = os.fork()
    except OSError as error:
        os.close(problem)
        os.close(write_end)
        raise CannotStartError(argv[0], error.errno or 0, "fork") from None
    if pid == 0:
        _become_command(argv, environment, order, out, write_end, runner, sandbox)
    os.close(write_end)
    with open(problem, "rb") as file:
        said = file.read()  # ends when exec closes the pipe, or with the stage that failed
    if said:
        os.waitpid(pid, 0)
        number, _, stage = said.decode(errors="replace").partition(":")
        raise CannotStartError(argv[0], int(number), stage, order["directory"])
    return pid


def _become_command(
    argv: list[str], environment: dict[str, str], order: Fields, out: int, problem: int, runner: int, sandbox: Sandbox | None
) -> None:
    """Turn the new process into the command. Does not return: a failure is written to `problem` as errno:stage."""
    stage = "start"
    try:
        os.setpgid(0, 0)
        if sandbox is not None:
            stage = "isolation"
            sandbox.enter()
            stage = "start"
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != runner:  # the runner died before the kernel knew what to do then
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
        for name, kind in _LIMITS.items():
            soft = order["limits"].get(name)
            if soft is not None:
                ceiling = soft + KILL_AFTER if kind == resource.RLIMIT_CPU else soft
                hard = resource.getrlimit(kind)[1]
                if hard != resource.RLIM_INFINITY:
                    soft, ceiling = min(soft, hard), min(ceiling, hard)
                resource.setrlimit(kind, (soft, ceiling))
        stage = "program"
        os.execvpe(argv[0], argv, environment)
    except OSError as error:
        os.write(problem, f"{error.errno or 0}:{stage}".encode())
    except BaseException:
        os.write(problem, f"{errno.EINVAL}:{stage}".encode())
    finally:
        os._exit(127)
