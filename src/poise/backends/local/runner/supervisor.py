"""The life of a runner: take the lock, run `setup` if that is due, start the replicas, watch, write down how it ended."""

import os
import select
import signal
from contextlib import suppress
from time import monotonic, sleep

from poise.backends.local.processes import SCARCE, boot, kill_where, oom_kills, start_of, stat_of
from poise.backends.local.records import (
    EXIT,
    FAILURE,
    FOLDER,
    LOST,
    NO_STORAGE,
    ORDER,
    OVERDUE,
    PASSING,
    PROGRESS,
    RUNNER,
    SET_UP,
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
from poise.backends.local.runner.enclosure import Enclosure, enclose
from poise.backends.local.runner.lease import CHECKPOINT, NEVER, STOP, Lease
from poise.backends.local.runner.logfile import LogFile
from poise.backends.local.runner.replica import CannotStartError, Replica, adopt_orphans
from poise.backends.local.venvs import GONE, has_python

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
        self._lease = Lease(folder, order)
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
        from poise.backends.local.runner.causes import cause_of  # only what fails pays for it

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
