"""The life of a runner: take the lock, run `setup` if that is due, start the replicas, watch, write down how it ended."""

import os
import re
import select
import signal
from contextlib import suppress
from time import monotonic, sleep

from poise.service.backends.local.lease_files import (
    CHECKPOINT_FAILED,
    EXIT,
    FAILURE,
    FOLDER,
    LEASE,
    LOST,
    NO_STORAGE,
    ORDER,
    OVERDUE,
    PASSING,
    PROGRESS,
    RUNNER,
    SET_UP,
    STORAGE,
    UNSAID,
    YIELDED,
    Fields,
    get,
    is_there,
    now,
    one_line,
    open_run,
    put,
    take_lock,
)
from poise.service.backends.local.orders import GONE, has_python
from poise.service.backends.local.processes import SCARCE, boot, kill_where, oom_kills, start_of, stat_of
from poise.service.backends.local.runner.isolation import Enclosure, enclose
from poise.service.backends.local.runner.logfile import LogFile
from poise.service.backends.local.runner.replica import CannotStartError, Replica, adopt_orphans

# When a run is to leave, and how it is made to: moments by the monotonic clock, which nobody can set back.
#
# A later wish can make TERM and KILL come sooner, never later.

NEVER = float("inf")

CHECKPOINT, STOP = "checkpoint", "stop"
"""Two modes of leaving: asked, with TERM at the deadline; and TERM at once, as the job is no longer wanted. In any other

(`restart`) TERM comes at once, and KILL at the deadline.
"""


class RunnerLease:
    """What the service wants of a run.

    term_at, kill_at   when to send TERM and KILL, if anything is left then
    mode               the mode of leaving that was asked for; None: nobody asked
    overdue_at         when the job has run for as long as it may
    """

    def __init__(self, folder: int, order: Fields) -> None:
        self._folder = folder
        self._term_seconds: float = order["term_seconds"]
        self._grace: float = order["deadline"]
        self._seen: tuple[int, int, int] | None = None
        left = order["seconds_left"]
        self.overdue_at = NEVER if left is None else monotonic() + left
        self.term_at = self.kill_at = NEVER
        self.mode: str | None = None
        self.soon(self.overdue_at)

    def look(self) -> None:
        """See what lease.json says now."""
        try:
            stat = os.stat(LEASE, dir_fd=self._folder)
        except OSError:
            return
        seen = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
        fields = get(self._folder, LEASE) if seen != self._seen else None
        if fields is not None:
            self._seen = seen
            if isinstance(fields.get("ends"), int | float):
                self._end(fields)

    def soon(self, moment: float) -> None:
        """TERM at that moment, KILL not long after."""
        self._sooner(moment, moment + self._term_seconds)

    def yielded(self) -> None:
        """A replica has left although nobody asked: the others have as long as if somebody had."""
        if self.mode is None:
            self._leave(CHECKPOINT, self._grace)

    def _end(self, fields: Fields) -> None:
        mode = fields.get("mode")
        seconds = fields.get("seconds")
        most = float(seconds) if isinstance(seconds, int | float) else self._grace
        # The span bounds the moment: a clock that was set back must not give a run hours.
        left = min(max(float(fields["ends"]) - now(), 0.0), most)
        self._leave(mode if isinstance(mode, str) else CHECKPOINT, left)

    def _leave(self, mode: str, left: float) -> None:
        moment = monotonic()
        if self.mode != STOP:
            self.mode = mode
        if mode == STOP:
            self.soon(moment)
        elif mode == CHECKPOINT:
            self.soon(moment + left)
        else:
            self._sooner(moment, moment + left)

    def _sooner(self, term_at: float, kill_at: float) -> None:
        self.term_at, self.kill_at = min(self.term_at, term_at), min(self.kill_at, kill_at)


LOOK_SECONDS = 0.5
"""Most time between two looks at the lease."""
SWEEP_SECONDS = 0.002
"""Before a second look for what was killed; it doubles each time."""
SIGN_SECONDS = 5.0
"""Between two signs of life: after a power failure it is known until when a run lived."""
LOCK_SECONDS = 1.0
"""How long to try for the lock: whoever looks whether it is held has it for an instant."""
UNENCLOSED = "node-exhausted"
"""What a run failed of that could not be enclosed: no fault of the job, and it may be possible later."""
NOT_MINE = 3
"""Exit code of a runner that was not needed."""
MOST_TRIES = 6
"""Of writing down an end against anything else: the job has removed the directory, or put something in the way."""


def main(path: str, ready: int) -> int:
    """Run the order in that directory; `ready` is closed once all replicas have started."""
    os.set_inheritable(ready, False)
    os.closerange(ready + 1, 1 << 20)
    folder = open_run(path)
    lock = _lock(folder)
    if lock is None or is_there(folder, EXIT) or is_there(folder, RUNNER):
        return NOT_MINE
    order = get(folder, ORDER)
    if order is None:
        return NOT_MINE
    job = os.open("../..", FOLDER, dir_fd=folder)
    try:
        supervisor = Supervisor(folder, job, order, ready, lock)
    except OSError as error:
        if error.errno in SCARCE:  # no fault of the job: somebody will start another one
            raise
        return NO_STORAGE if error.errno in PASSING else UNSAID
    return supervisor.run()


def _lock(folder: int) -> int | None:
    until = monotonic() + LOCK_SECONDS
    while True:
        lock = take_lock(folder)
        if lock is not None or monotonic() > until:
            return lock
        sleep(0.02)


class Supervisor:
    """One run, from its order to exit.json."""

    def __init__(self, folder: int, job: int, order: Fields, ready: int, lock: int) -> None:
        self._folder, self._job, self._order, self._ready, self._lock = folder, job, order, ready, lock
        self._next_sign = 0.0
        self._began: float | None = None
        self._replicas: list[Replica] = []
        self._failure: tuple[int, str, str | None] | None = None  # code, end of the log, cause if it is known
        self._unstarted: int | None = None
        self._sent: str | None = None
        self._told_to_go = False
        self._is_overdue = False
        self._enclosure: Enclosure | None = None
        self._lease = RunnerLease(folder, order)
        self._wake = _listen()
        adopt_orphans()
        self._oom_kills = oom_kills()
        self._is_recorded = True
        logs = os.open("log", FOLDER, dir_fd=job)
        rotation: Fields = order["log"]
        self._logs = [LogFile(logs, each["rank"], rotation["bytes"], rotation["files"]) for each in order["replicas"]]
        put(folder, RUNNER, self._state())  # last: what cannot be written down has not begun

    def run(self) -> int:
        """Everything, in order. Comes back with an exit code once nothing of the run is left, and exit.json says so."""
        for log, each in zip(self._logs, self._order["replicas"], strict=True):
            log.title(each["title"])
        if self._enclose() and self._set_up():
            self._start_all()
            self._announce()
            self._watch(self._replicas)
        return self._write_down()

    def _enclose(self) -> bool:
        """Everything that is started from now on is enclosed, if the order wants that; it never runs otherwise."""
        wanted: Fields | None = self._order.get("isolation")
        if wanted is None:
            return True
        try:
            self._enclosure = enclose(wanted["state"], wanted["job"], processes=wanted["processes"])
        except OSError as error:
            self._logs[0].title(f"cannot start: isolation ({error.filename}): {error.strerror}")
            self._fail(127, "", UNENCLOSED)
            return False
        return True

    def _set_up(self) -> bool:
        """The job's setup command has succeeded, now or before a run before this one."""
        command: list[str] = self._order["setup"]
        if not command or is_there(self._job, SET_UP):
            return True
        self._logs[0].title("setup")
        first: Fields = self._order["replicas"][0]
        process = self._start(0, command, first["environment"], self._logs[0])
        if process is None:
            return False
        self._watch([process])
        if process.code == 0 and self._sent is None:
            try:
                put(self._job, SET_UP, {"at": now()})
            except OSError as error:
                self._logs[0].title(f"setup done, but not noted, so the next run does it again: {error.strerror}")
            else:
                self._logs[0].title("setup done")
            return True
        self._logs[0].title(f"setup ended with exit code {process.code}")
        return False

    def _start_all(self) -> None:
        for log, each in zip(self._logs, self._order["replicas"], strict=True):
            replica = self._start(each["rank"], self._order["argv"], each["environment"], log)
            if replica is None:
                self._unstarted = each["rank"]
                return
            self._replicas.append(replica)
            self._record()

    def _start(self, rank: int, argv: list[str], environment: dict[str, str], log: LogFile) -> Replica | None:
        try:
            self._check_venv()
            return Replica(rank, argv, self._order, {**self._order["environment"], **environment}, log, self._enclosure)
        except CannotStartError as error:
            log.title(str(error))
            self._fail(error.code, "", error.cause)
            return None

    def _check_venv(self) -> None:
        """Without it another Python would be found in PATH, which the job was not meant for."""
        venv = self._order.get("venv")
        if venv is not None and not has_python(venv):
            raise CannotStartError(127, GONE, f"cannot start: the virtual environment {venv} is gone: it has no bin/python")

    def _announce(self) -> None:
        """All replicas run. Who waits for that is told by the closing of a pipe."""
        if self._failure is None:
            self._began = now()
            self._record()
        os.close(self._ready)

    def _state(self) -> Fields:
        replicas = [{"rank": each.rank, "pid": each.pid, "start": each.start} for each in self._replicas]
        me = {"pid": os.getpid(), "start": start_of(os.getpid()), "boot": boot()}
        return {**me, "began": self._began, "replicas": replicas}

    def _record(self) -> None:
        """Write down who is there; what cannot be written now is tried again at every look."""
        self._is_recorded = False
        with suppress(OSError):
            put(self._folder, RUNNER, self._state())
            self._is_recorded = True

    def _watch(self, replicas: list[Replica]) -> None:
        """Until all of them have ended, and whatever was told to go has gone or had its time."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        for each in replicas:
            poll.register(each.pipe, select.POLLIN)
        by_pipe = {each.pipe: each for each in replicas}
        next_look = 0.0
        while self._is_awaited(replicas):
            moment = monotonic()
            next_event = min(next_look, self._next_signal())
            for handle, _ in poll.poll(max(0.0, next_event - moment) * 1000 + 1):
                if handle == self._wake:
                    next_look = 0.0
                    self._told_to_go |= signal.SIGTERM in os.read(self._wake, 4096)
                else:
                    self._pump(poll, handle, by_pipe)
            if monotonic() >= next_look:
                self._look()
                next_look = monotonic() + LOOK_SECONDS
            self._press(replicas)
        self._sweep(replicas)

    def _look(self) -> None:
        self._lease.look()
        if not self._is_recorded:
            self._record()
        if monotonic() >= self._next_sign:
            self._next_sign = monotonic() + SIGN_SECONDS
            with suppress(OSError):
                os.utime(self._lock)

    def _pump(self, poll: select.poll, handle: int, by_pipe: dict[int, Replica]) -> None:
        by_pipe[handle].pump()
        if by_pipe[handle].pipe < 0:
            poll.unregister(handle)

    def _is_awaited(self, replicas: list[Replica]) -> bool:
        """There is something left to wait for. After KILL there is not: whatever is there is swept away."""
        if not self._reap(replicas) or self._sent == "KILL":
            return False
        if any(each.code is None for each in replicas):
            return True
        if self._sent is not None and self._enclosure is not None:
            self._enclosure.leave_when_alone()
        return self._sent is not None and monotonic() < self._lease.kill_at

    def _reap(self, replicas: list[Replica]) -> bool:
        """Take note of what has ended; False once there are no children."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            for each in replicas:
                if each.pid == pid:
                    self._ended(each, os.waitstatus_to_exitcode(status))
            if self._enclosure is not None:
                self._enclosure.ended(pid)

    def _ended(self, replica: Replica, code: int) -> None:
        replica.code = code
        replica.drain()
        if self._sent is not None:
            return
        self._lease.look()  # it may have read the end of its lease before the runner did
        if replica in self._replicas and (code == YIELDED or self._has_left()):  # it means nothing from `setup`
            self._lease.yielded()
        elif code != 0:
            self._fail(code, bytes(replica.log.tail).decode(errors="replace"), None)

    def _fail(self, code: int, tail: str, cause: str | None) -> None:
        """The first that fails takes the others with it."""
        if self._failure is None:
            self._failure = (code, tail, cause)
            self._lease.soon(monotonic())

    def _next_signal(self) -> float:
        return {None: self._lease.term_at, "TERM": self._lease.kill_at}.get(self._sent, NEVER)

    def _press(self, replicas: list[Replica]) -> None:
        """Send what is due."""
        if self._told_to_go:
            self._lease.soon(monotonic())
        if monotonic() < self._next_signal():
            return
        if self._sent is None:
            self._sent = "TERM"
            self._is_overdue = self._failure is None and self._lease.mode is None and monotonic() >= self._lease.overdue_at
        elif self._sent == "TERM":
            self._sent = "KILL"
        for each in replicas:
            each.signal(signal.SIGKILL if self._sent == "KILL" else signal.SIGTERM)

    def _sweep(self, replicas: list[Replica]) -> None:
        """Nothing is left afterwards: whatever lost its parent is a child of this process by now.

        Or of the first process of its enclosure. That one is needed for the replicas after `setup`; otherwise it goes, and
        the kernel sees to it that nothing outlives it.
        """
        first = self._enclosure.first if self._enclosure is not None and replicas is not self._replicas else 0
        parents = {os.getpid(), first}
        pause = SWEEP_SECONDS
        while self._reap(replicas):
            with suppress(OSError):  # for want of files: it is tried again
                if not kill_where(lambda pid: pid != first and _is_child(pid, parents)) and first:
                    break
            sleep(pause)
            pause = min(pause * 2, LOOK_SECONDS)  # what waits for a sick device dies once that answers
        for each in replicas:
            each.drain()
            each.hang_up()

    def _write_down(self) -> int:
        how, cause = self._outcome()
        codes = {each.rank: each.code for each in self._replicas}
        if self._unstarted is not None and self._failure is not None:
            codes[self._unstarted] = self._failure[0]
        asked = "leave" if self._lease.mode is not None else None
        fields: Fields = {
            "at": now(),
            "began": self._began,
            "how": how,
            "replicas": [{"rank": each["rank"], "code": codes.get(each["rank"])} for each in self._order["replicas"]],
            "made_to": asked if self._failure is not None or self._sent is None else self._sent,
            "cause": cause,
        }
        tries = 0
        while tries < MOST_TRIES:
            try:
                put(self._folder, EXIT, fields)
            except OSError as error:  # most likely a full disk; the end of a run must not be lost
                tries += error.errno not in PASSING
                sleep(LOOK_SECONDS)
            else:
                return 0
        return UNSAID

    def _outcome(self) -> tuple[str, str | None]:
        """How the run ended, and what it failed of."""
        self._lease.look()
        if self._lease.mode == STOP:
            return "yielded", None
        if self._failure is not None:
            return "failed", self._cause()
        if self._is_overdue:
            return "failed", OVERDUE
        codes = [each.code for each in self._replicas]
        was_free_to_end = self._sent is None or self._lease.mode == CHECKPOINT
        if was_free_to_end and codes and not any(codes) and not self._has_left():
            return "finished", None
        if self._lease.mode is None:  # the runner itself was told to go: the machine goes down
            return "failed", LOST
        return "yielded", None

    def _has_left(self) -> bool:
        """The worker has saved everything to leave. What the script makes of that, be it exit code 0, is not its end."""
        return (get(self._folder, PROGRESS) or {}).get("left") is True

    def _cause(self) -> str:
        assert self._failure is not None
        code, tail, cause = self._failure
        said = (get(self._folder, FAILURE) or {}).get("cause")
        if isinstance(said, str) and said.strip():
            return one_line(said)
        if cause is not None:
            return cause
        pass  # import gone  # only what fails pays for it

        return cause_of(code, tail, oom_kills() - self._oom_kills)


def _is_child(pid: int, parents: set[int]) -> bool:
    """A process that lives, and has one of these as its parent."""
    fields = stat_of(pid)
    return bool(fields) and fields[0] not in "ZX" and int(fields[1]) in parents


def _listen() -> int:
    """A pipe that gets a byte for each signal that means something to the runner."""
    wake, tell = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(tell, False)
    signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    return wake


# What a run died of: from the exit code and the last lines of the log, in the words of scheduler/model/failures.py.
#
# The order of looking: a signal that leaves no words behind (KILL, TERM); words of GPU and communication libraries,
# which say
# more than the signal or exception that follows them; other signals; the exception that ended a Python program; exit codes
# that mean something by convention. What shows none of these has `no-signature`.

LAST_LINES = 40
"""Of a log: what a program says long before its end is not what it died of."""

KILLED = "killed"
"""Somebody outside sent a signal. Whether it will happen again, nobody can tell."""
HOST_MEMORY = "cpu-out-of-memory"
UNEXPLAINED = "no-signature"

SAYINGS = (
    ("gpu-out-of-memory", r"CUDA out of memory|CUDA error: out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED"),
    ("gpu-ecc-error", r"uncorrectable ECC error"),
    ("cuda-version-mismatch", r"CUDA driver version is insufficient|no kernel image is available|non supported HW"),
    ("cuda-init-failed", r"CUDA error: initialization error|CUDA initialization:|No CUDA GPUs are available"),
    (
        "mpi-error",
        r"\bNCCL error\b|\bnccl[A-Z]\w*Error\b|\bNCCL WARN\b.*\berror\b|DistBackendError|ProcessGroupNCCL.*\btime",
    ),
    ("mpi-runtime-failure", r"\bMPI_ABORT\b|\bMPI_ERR\w*|\bPMIX? ERROR\b"),
    ("invalid-memory-access", r"illegal memory access|CUDA error: misaligned address"),
    ("cuda-failure", r"CUDA error:|CUDNN_STATUS_(?!SUCCESS)|CUBLAS_STATUS_(?!SUCCESS)"),
    ("model-diverged", r"(?i)\bloss (?:is|was|became|=|:)\s*(?:nan|inf)\b"),
    (STORAGE, r"No space left on device|Disk quota exceeded"),
)
"""Words of libraries, the most telling first."""

EXCEPTIONS = {
    "ModuleNotFoundError": "import-error",
    "ImportError": "import-error",
    "SyntaxError": "syntax-error",
    "IndentationError": "syntax-error",
    "TabError": "syntax-error",
    "NameError": "syntax-error",
    "UnboundLocalError": "syntax-error",
    "TypeError": "semantic-error",
    "ValueError": "semantic-error",
    "AttributeError": "semantic-error",
    "KeyError": "semantic-error",
    "FileNotFoundError": "incorrect-inputs",
    "IsADirectoryError": "incorrect-inputs",
    "NotADirectoryError": "incorrect-inputs",
    "PermissionError": "permission-error",
    "MemoryError": HOST_MEMORY,
    "ConnectionError": "network-error",
    "ConnectionRefusedError": "network-error",
    "ConnectionResetError": "network-error",
    "ConnectionAbortedError": "network-error",
    "BrokenPipeError": "network-error",
    "TimeoutError": "network-error",
    "gaierror": "network-error",
    "URLError": "network-error",
}
"""Python's exceptions; any other is a `traceback-from-crash`."""

SIGNALS: dict[int, str] = {
    signal.SIGSEGV: "invalid-memory-access",
    signal.SIGBUS: "invalid-memory-access",
    signal.SIGABRT: "core-dump",
    signal.SIGILL: "core-dump",
    signal.SIGFPE: "core-dump",
    signal.SIGTRAP: "core-dump",
    signal.SIGSYS: "core-dump",
    signal.SIGQUIT: "core-dump",
    signal.SIGXCPU: "cpu-seconds",
}

CODES = {126: "incorrect-inputs", 127: "incorrect-inputs", CHECKPOINT_FAILED: "model-checkpoint-error"}
"""By convention: found and not a program; not found; the worker library's own."""

_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_SAYINGS = tuple((cause, re.compile(words)) for cause, words in SAYINGS)
_RAISED = re.compile(r"^(?:[A-Za-z_]\w*\.)*([A-Za-z_]\w*)(?::.*)?$")
_USAGE = re.compile(r"^usage: ", re.MULTILINE)


def cause_of(code: int, tail: str, oom_kills: int) -> str:
    """What a replica died of.

    code        its exit code; a signal counts negative, or as a shell reports it (128 + signal)
    tail        the end of its log
    oom_kills   processes that the kernel killed for want of memory while it ran
    """
    number = -code if code < 0 else code - 128 if 128 < code < 128 + 65 else 0
    if number in _FROM_OUTSIDE:
        return HOST_MEMORY if number == signal.SIGKILL and oom_kills else KILLED
    lines = tail.splitlines()[-LAST_LINES:]
    text = "\n".join(lines)
    for cause, words in _SAYINGS:
        if words.search(text):
            return cause
    return (
        SIGNALS.get(number)
        or _exception(lines)
        or CODES.get(code)
        or ("incorrect-inputs" if _USAGE.search(text) else UNEXPLAINED)
    )


def _exception(lines: list[str]) -> str | None:
    """The cause by the last exception that was printed; None: there was no traceback."""
    frames = [number for number, line in enumerate(lines) if line.startswith(("Traceback (most recent", '  File "'))]
    if not frames:
        return None
    for line in lines[frames[-1] + 1 :]:
        raised = _RAISED.match(line)
        if raised:
            return EXCEPTIONS.get(raised[1], "traceback-from-crash")
    return "traceback-from-crash"
