"""The life of a runner: take the lock, run `setup` if it is due, start the replicas, watch them, write down how it ended.

`Supervisor.run` is that life in order; `RunnerLease` below it says when the run has to leave. There is one thread. It waits
in `poll` for output of replicas and for signals, and looks at lease.json twice a second in case a signal was lost.

Who writes what in the run's directory: the service writes order.json and lease.json; the runner writes runner.json and, as
the last thing it does, exit.json; the job's processes may write anything, so what is read from there is not trusted.
"""

import os
import select
import signal
from contextlib import suppress
from time import monotonic, sleep

import poise
from poise.service.backends.local import lease_files
from poise.service.backends.local.lease_files import (
    Fields,
    get,
    is_there,
    now,
    one_line,
    open_run,
    put,
    take_lock,
)
from poise.service.backends.local.logs import LogFile
from poise.service.backends.local.processes import SCARCE, boot_id, kill_where, oom_kills, start_of, stat_of
from poise.service.backends.local.runner.fence import Fence
from poise.service.backends.local.runner.isolation import PR_SET_CHILD_SUBREAPER, Sandbox, libc, make_sandbox
from poise.service.backends.local.runner.replica import CannotStartError, Replica
from poise.service.backends.local.venvs import VENV_GONE, has_python, inside

TYPE_CHECKING = False  # importing `typing` takes time that the start of a runner does not have
if TYPE_CHECKING:
    from collections.abc import Mapping

LOOK_SECONDS = 0.5  # longest time between two looks at the lease
SWEEP_SECONDS = 0.002  # wait before looking again for processes that were killed; doubles each time
SIGN_SECONDS = 5.0  # between two touches of the lock: after a power failure its time says until when the run lived
LOCK_SECONDS = 1.0
"""How long to try for the lock: the service holds it for an instant whenever it checks whether a runner lives."""
MOST_TRIES = 6
"""To write exit.json against errors that do not pass: the job has removed the directory, or put something in the way."""
NO_SANDBOX = "node-exhausted"  # cause of a run that could not be isolated: no fault of the job, and it may be possible later
NOT_MINE = 3  # exit code of a runner that was not needed
NEVER = float("inf")

CHECKPOINT, STOP = "checkpoint", "stop"
"""Modes of leaving. `checkpoint`: asked by lease.json, TERM at the deadline. `stop`: TERM at once, the job is not wanted any
more. Any other (`restart`): TERM at once, KILL at the deadline."""


def main(path: str, ready: int) -> int:
    """Run the order in that directory; `ready` is closed once all replicas have started."""
    os.set_inheritable(ready, False)
    os.closerange(ready + 1, 1 << 20)
    folder = open_run(path)
    until = monotonic() + LOCK_SECONDS
    while (lock := take_lock(folder)) is None and monotonic() <= until:
        sleep(0.02)
    # With the lock held, no other runner can be between these checks and its first write.
    if lock is None or is_there(folder, lease_files.EXIT) or is_there(folder, lease_files.RUNNER):
        return NOT_MINE
    order = get(folder, lease_files.ORDER)
    if order is None:
        return NOT_MINE
    job = os.open("../..", lease_files.FOLDER, dir_fd=folder)
    try:
        supervisor = Supervisor(folder, job, order, ready, lock)
    except OSError as error:
        if error.errno in SCARCE:  # no fault of the job: the service starts another runner
            raise
        return lease_files.NO_STORAGE if error.errno in lease_files.PASSING else lease_files.UNSAID
    return supervisor.run()


def completed(order: Fields, environ: "Mapping[str, str]") -> Fields:
    """Return an order with the whole environment of the job, where that is the one of this container.

    The copy of Poise that this runner is of comes last in PYTHONPATH, so that `poise.worker` is there in every image.
    """
    given = order.get("inherit")
    if given is None:
        return order
    own = inside(order.get("venv"), {**environ, **given})
    library = os.path.dirname(os.path.dirname(poise.__file__))
    paths = [each for each in own.get("PYTHONPATH", "").split(os.pathsep) if each not in ("", library)]
    own["PYTHONPATH"] = os.pathsep.join([*paths, library])
    return {**order, "environment": {**own, **order["environment"]}}


class Supervisor:
    """One run, from its order to exit.json.

    folder, job   the open directories of the run and of its job
    ready         pipe to the service, closed once all replicas have started
    lock          open lock file; the lock is held until this process ends
    """

    def __init__(self, folder: int, job: int, order: Fields, ready: int, lock: int) -> None:
        self._folder, self._job, self._ready, self._lock = folder, job, ready, lock
        self._order = order = completed(order, os.environ)
        self._next_sign = 0.0
        self._began: float | None = None
        self._replicas: list[Replica] = []
        self._unstarted_rank: int | None = None
        self._failure: tuple[int, str, str | None] | None = None  # exit code, end of the log, cause if known
        self._failed_at: float | None = None
        self._sent: str | None = None  # the last signal sent to the replicas: TERM, KILL
        self._got_term = False  # the runner itself was sent TERM: the machine goes down
        self._is_overdue = False
        self._sandbox: Sandbox | None = None
        self._lease = RunnerLease(folder, order)
        self._fence = Fence(*order["node_lease"]) if order.get("node_lease") else None
        # A pipe that gets one byte, the signal's number, for each signal that the runner handles.
        self._wake, write_end = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])  # USR1 was blocked since `spawn`
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # be the parent of all orphans below: none can slip away
        self._in_container = order.get("inherit") is not None
        self._oom_kills = oom_kills(in_container=self._in_container)
        self._is_recorded = True
        logs = os.open("log", lease_files.FOLDER, dir_fd=job)
        rotation: Fields = order["log"]
        self._logs = [LogFile(logs, each["rank"], rotation["bytes"], rotation["files"]) for each in order["replicas"]]
        # Last: from here on the run counts as begun, and a run whose runner.json cannot be written must not begin.
        put(folder, lease_files.RUNNER, self._state())

    def run(self) -> int:
        """Run everything. Returns an exit code once nothing of the run is left and exit.json says how it ended."""
        for log, each in zip(self._logs, self._order["replicas"], strict=True):
            log.title(each["title"])
        if self._isolate() and self._unpack() and self._set_up():
            for log, each in zip(self._logs, self._order["replicas"], strict=True):
                replica = self._start(each["rank"], self._order["argv"], each["environment"], log)
                if replica is None:
                    self._unstarted_rank = each["rank"]
                    break
                self._replicas.append(replica)
                self._record()
            if self._failure is None:
                self._began = now()
                self._record()
            os.close(self._ready)
            self._watch(self._replicas)
        return self._write_exit()

    def _isolate(self) -> bool:
        """Put everything that is started from now on into a sandbox, if the order wants one. Never runs without it then."""
        wanted: Fields | None = self._order.get("isolation")
        if wanted is None:
            return True
        try:
            self._sandbox = make_sandbox(wanted["state"], wanted["job"], processes=wanted["processes"])
        except OSError as error:
            self._logs[0].title(f"cannot start: isolation ({error.filename}): {error.strerror}")
            self._fail(127, "", NO_SANDBOX)
            return False
        return True

    def _unpack(self) -> bool:
        """Unpack the files that were shipped with the job, unless an earlier run on this machine did."""
        if self._order.get("files") is None or os.path.isdir(self._order["directory"]):
            return True
        from poise.service.backends.local.shipped_files import ShippedFilesError, unpack_files  # only jobs with files pay

        try:
            files: Fields = self._order["files"]
            unpack_files(files["archive"], files["sha256"], self._order["directory"], self._renew_fence)
        except ShippedFilesError as error:
            self._logs[0].title(f"cannot start: {error}")
            self._fail(127, "", error.cause)
            return False
        return True

    def _set_up(self) -> bool:
        """Run the job's setup command, unless it succeeded in an earlier run. Returns whether it has succeeded."""
        command: list[str] = self._order["setup"]
        if not command or is_there(self._job, lease_files.SET_UP):
            return True
        self._logs[0].title("setup")
        process = self._start(0, command, self._order["replicas"][0]["environment"], self._logs[0])
        if process is None:
            return False
        self._watch([process])
        if process.code != 0 or self._sent is not None:
            self._logs[0].title(f"setup ended with exit code {process.code}")
            return False
        try:
            put(self._job, lease_files.SET_UP, {"at": now()})
        except OSError as error:
            self._logs[0].title(f"setup done, but not noted, so the next run does it again: {error.strerror}")
        else:
            self._logs[0].title("setup done")
        return True

    def _start(self, rank: int, argv: list[str], environment: dict[str, str], log: LogFile) -> Replica | None:
        """Start one process; None: it could not be started, and the run has failed."""
        venv = self._order.get("venv")
        if venv is not None and not has_python(venv):  # PATH would find another Python, which the job is not made for
            log.title(f"cannot start: the virtual environment {venv} is gone: it has no bin/python")
            self._fail(127, "", VENV_GONE)
            return None
        try:
            return Replica(rank, argv, self._order, {**self._order["environment"], **environment}, log, self._sandbox)
        except CannotStartError as error:
            log.title(str(error))
            self._fail(error.code, "", error.cause)
            return None

    def _state(self) -> Fields:
        replicas = [{"rank": each.rank, "pid": each.pid, "start": each.start} for each in self._replicas]
        me = {"pid": os.getpid(), "start": start_of(os.getpid()), "boot": boot_id()}
        return {**me, "began": self._began, "replicas": replicas}

    def _record(self) -> None:
        """Write runner.json. If that fails, it is tried again at each look."""
        self._is_recorded = False
        with suppress(OSError):
            put(self._folder, lease_files.RUNNER, self._state())
            self._is_recorded = True

    def _watch(self, replicas: list[Replica]) -> None:
        """Wait until all of them have ended; send signals when they are due; kill whatever is left in the end."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        by_pipe = {each.pipe: each for each in replicas}
        for pipe in by_pipe:
            poll.register(pipe, select.POLLIN)
        next_look = 0.0
        while self._has_work(replicas):
            wait = max(0.0, min(next_look, self._next_signal()) - monotonic())
            for handle, _ in poll.poll(wait * 1000 + 1):
                if handle == self._wake:
                    next_look = 0.0
                    self._got_term |= signal.SIGTERM in os.read(self._wake, 4096)
                else:
                    by_pipe[handle].pump()
                    if by_pipe[handle].pipe < 0:
                        poll.unregister(handle)
            if monotonic() >= next_look:
                self._lease.look()
                self._heed_fence()
                if not self._is_recorded:
                    self._record()
                if monotonic() >= self._next_sign:
                    self._next_sign = monotonic() + SIGN_SECONDS
                    with suppress(OSError):
                        os.utime(self._lock)
                next_look = monotonic() + LOOK_SECONDS
            self._send_due_signal(replicas)
        self._sweep(replicas)

    def _heed_fence(self) -> None:
        """Renew the node's lease. When it runs out, have a job leave that saves when asked to: KILL comes when it ends."""
        self._renew_fence()
        if self._fence is not None:
            if self._fence.has_run_out:
                self._lease.at_once(monotonic())
            elif self._fence.is_running_out and self._order["saves"]:
                self._lease.soon(monotonic())

    def _renew_fence(self) -> None:
        if self._fence is not None:
            self._fence.renew()

    def _has_work(self, replicas: list[Replica]) -> bool:
        """Whether there is something left to wait for. After KILL there is not: what is left is swept away."""
        if not self._reap(replicas) or self._sent == "KILL":
            return False
        if any(each.code is None for each in replicas):
            return True
        # Replicas are gone, but what they started may still be leaving after TERM: it has until KILL.
        if self._sent is not None and self._sandbox is not None:
            self._sandbox.leave_when_alone()
        return self._sent is not None and monotonic() < self._lease.kill_at

    def _reap(self, replicas: list[Replica]) -> bool:
        """Collect exit codes, and note which replicas yielded or failed unasked; False once there are no children."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            for each in replicas:
                if each.pid == pid:
                    each.code = os.waitstatus_to_exitcode(status)
                    each.drain()
                    if self._sent is not None:
                        continue
                    self._lease.look()  # the replica may have read the end of its lease before the runner did
                    # Of `setup`, an exit code says only whether it failed.
                    if each in self._replicas and (each.code == lease_files.YIELDED or self._worker_left()):
                        self._lease.yielded()
                    elif each.code != 0:
                        self._fail(each.code, bytes(each.log.tail).decode(errors="replace"), None)
            if self._sandbox is not None:
                self._sandbox.reaped(pid)

    def _fail(self, code: int, tail: str, cause: str | None) -> None:
        """Note the first failure, and have the other replicas stopped."""
        if self._failure is None:
            self._failure = (code, tail, cause)
            self._failed_at = now()
            self._lease.soon(monotonic())

    def _next_signal(self) -> float:
        return {None: self._lease.term_at, "TERM": self._lease.kill_at}.get(self._sent, NEVER)

    def _send_due_signal(self, replicas: list[Replica]) -> None:
        if self._got_term:
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
        """Kill and reap until nothing is left. Processes that lost their parent are children of this process by now.

        Or of the first process of the sandbox. After `setup` that one is kept, for the replicas; after the replicas it is
        killed too, and the kernel then kills everything in its pid namespace.
        """
        first = self._sandbox.first if self._sandbox is not None and replicas is not self._replicas else 0
        parents = {os.getpid(), first}

        def is_leftover(pid: int) -> bool:
            fields = stat_of(pid)
            return pid != first and bool(fields) and fields[0] not in "ZX" and int(fields[1]) in parents

        pause = SWEEP_SECONDS
        while self._reap(replicas):
            self._renew_fence()
            with suppress(OSError):  # for want of files: try again
                if not kill_where(is_leftover) and first:
                    break
            sleep(pause)
            pause = min(pause * 2, LOOK_SECONDS)  # a process that waits for a broken device dies only once that answers
        for each in replicas:
            each.drain()
            each.hang_up()

    def _write_exit(self) -> int:
        if self._fence is not None:
            self._fence.lift()
        how, cause = self._outcome()
        codes = {each.rank: each.code for each in self._replicas}
        if self._unstarted_rank is not None and self._failure is not None:
            codes[self._unstarted_rank] = self._failure[0]
        asked = "leave" if self._lease.mode is not None else None
        fields: Fields = {
            "at": now(),
            "began": self._began,
            "how": how,
            "replicas": [{"rank": each["rank"], "code": codes.get(each["rank"])} for each in self._order["replicas"]],
            "made_to": asked if self._failure is not None or self._sent is None else self._sent,
            "cause": cause,
            "failed_at": self._failed_at,
        }
        tries = 0
        while tries < MOST_TRIES:
            try:
                put(self._folder, lease_files.EXIT, fields)
            except OSError as error:
                # A full disk is waited for without limit: the end of a run must not be lost.
                tries += error.errno not in lease_files.PASSING
                sleep(LOOK_SECONDS)
            else:
                return 0
        return lease_files.UNSAID

    def _outcome(self) -> tuple[str, str | None]:
        """Return how the run ended, and the cause of a failure."""
        self._lease.look()
        if self._lease.mode == STOP:
            return "yielded", None
        if self._failure is not None:
            return "failed", self._cause(*self._failure)
        if self._is_overdue:
            return "failed", lease_files.OVERDUE
        codes = [each.code for each in self._replicas]
        was_free_to_end = self._sent is None or self._lease.mode == CHECKPOINT
        if was_free_to_end and codes and not any(codes) and not self._worker_left():
            return "finished", None
        if self._lease.mode is None:  # not asked for: the runner itself was sent TERM, as the machine goes down
            return "failed", lease_files.LOST
        return "yielded", None

    def _worker_left(self) -> bool:
        """Whether the worker library says that it saved and left, whatever exit code the script made of that."""
        return (get(self._folder, lease_files.PROGRESS) or {}).get("left") is True

    def _cause(self, code: int, tail: str, cause: str | None) -> str:
        said = (get(self._folder, lease_files.FAILURE) or {}).get("cause")
        if isinstance(said, str) and said.strip():
            return one_line(said)
        if cause is not None:
            return cause
        from poise.service.backends.local.runner.causes import cause_of  # compiles patterns: only runs that fail pay

        return cause_of(code, tail, oom_kills(in_container=self._in_container) - self._oom_kills)


class RunnerLease:
    """When the run has to leave, and how it is made to. Times are of the monotonic clock, which cannot be set back."""

    def __init__(self, folder: int, order: Fields) -> None:
        self._folder = folder
        self._term_seconds: float = order["term_seconds"]
        self._grace: float = order["deadline"]
        self._seen: tuple[int, int, int] | None = None
        left = order["seconds_left"]
        self.overdue_at = NEVER if left is None else monotonic() + left  # when the job has run for its `max_duration`
        self.term_at = self.kill_at = NEVER  # when to send TERM and KILL; later requests can only make them come sooner
        self.mode: str | None = None  # the mode of leaving that was asked for; None: none was
        self.soon(self.overdue_at)

    def look(self) -> None:
        """Read lease.json if it was replaced."""
        try:
            stat = os.stat(lease_files.LEASE, dir_fd=self._folder)
        except OSError:
            return
        seen = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
        fields = get(self._folder, lease_files.LEASE) if seen != self._seen else None
        if fields is None:
            return
        self._seen = seen
        ends, seconds, mode = fields.get("ends"), fields.get("seconds"), fields.get("mode")
        if isinstance(ends, int | float):
            most = float(seconds) if isinstance(seconds, int | float) else self._grace
            # `seconds` bounds `ends`: a clock that was set back must not give a run hours.
            self._leave(mode if isinstance(mode, str) else CHECKPOINT, min(max(float(ends) - now(), 0.0), most))

    def soon(self, at: float) -> None:
        """Send TERM at that time, and KILL `term_seconds` later."""
        self._sooner(at, at + self._term_seconds)

    def at_once(self, at: float) -> None:
        """Send TERM and KILL at that time."""
        self._sooner(at, at)

    def yielded(self) -> None:
        """A replica has left without being asked to: the others have as long as if they had been asked."""
        if self.mode is None:
            self._leave(CHECKPOINT, self._grace)

    def _leave(self, mode: str, left: float) -> None:
        current = monotonic()
        if self.mode != STOP:
            self.mode = mode
        if mode == STOP:
            self.soon(current)
        elif mode == CHECKPOINT:
            self.soon(current + left)
        else:
            self._sooner(current, current + left)

    def _sooner(self, term_at: float, kill_at: float) -> None:
        self.term_at, self.kill_at = min(self.term_at, term_at), min(self.kill_at, kill_at)
