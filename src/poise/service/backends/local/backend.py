"""The local back end: `LiveBackend` by real processes on this machine, on real or declared GPUs.

`LocalBackend` is what other threads see: its methods hand their order to the thread of an event loop (`event_loop.py`) and
return; only `log` and `checkpoints` read files in the caller's thread. The loop's thread owns everything else here and needs
no locks: `Runs` takes each run from its order to the event that nothing of it is left, one callback at a time. An exception
in a callback ends the run that it was about, and no other (`Runs._guarded`).

A run is kept by its runner (`runner/supervisor.py`), a process that outlives the service. So a run can be in any state when
the service looks at it: just ordered, ordered before a crash, running, over, or left by a service whose journal was lost.
There is one way to take up a run, `Runs._settle`, and it looks at the run's directory:

    the lock is held              its runner lives: watch it
    exit.json is there            it is over, as that says
    runner.json is there          its runner was killed, and the run has failed
    none of these                 it never began: begin it if it is wanted, once its GPUs are free

    WAITING ──▶ ALIVE ──▶ CLEANUP ──▶ OVER      (UNKNOWN: between any two of them, until `_settle` has an answer)

**Files.** The service writes order.json and lease.json, and exit.json only for a run that has no runner; the runner writes
runner.json and exit.json; the worker writes progress.json and failure.json. Whoever holds the lock may write for the runner.

**Trust.** All of this is in a directory that the job can write: it may remove, replace or block any file. So before a run
counts as over, or is begun another time, every process that carries its mark is killed, unless its runner was seen to end in
order. Two runs never share a GPU because of a file that lies.
"""

import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from threading import Lock
from typing import Concatenate, ParamSpec

from poise.scheduler.model.cluster import Cluster
from poise.service.backends import api
from poise.service.backends.api import (
    DesiredState,
    LogPart,
    OnEvent,
    RunBegan,
    RunEnded,
    RunEnding,
    RunNotice,
    RunOrder,
)
from poise.service.backends.local import lease_files, orders, processes, run_files, starters
from poise.service.backends.local.event_loop import EventLoop
from poise.service.backends.local.gpus import devices_of, numbered
from poise.service.backends.local.lease_files import Fields, now
from poise.service.backends.local.logs import read_log
from poise.service.backends.local.orders import Devices, LocalSettings
from poise.service.backends.local.state_dir import StateDir, token
from poise.service.backends.run_table import Gpu, Key, RunTable

P = ParamSpec("P")
RunCallback = Callable[Concatenate["LocalRun", P], None]
LOG = logging.getLogger("poise.local")

RUN_DIR = b"POISE_RUN_DIR"  # the variable that marks all processes of a run
LOOK_SECONDS = 0.02
"""Between two looks at a run whose state is not known yet; doubles up to SLOWEST_LOOK while leftovers are killed."""
SLOWEST_LOOK = 1.0
WRITE_SECONDS = 0.5  # between two tries to write lease.json
STARTER_SECONDS = 0.1  # between two looks for a starter that is not there yet
ANSWER_SECONDS = 30.0  # for a starter to answer, before what it may have started is killed, and it is asked again
MOST_ATTEMPTS = 3  # runners that may die before they have begun a run, until the run counts as failed
UNWANTED = "it is not wanted any more"  # what a run is told that has to end for a reason that is not known
STANDARD = LocalSettings()


class LocalBackend:
    """A `LiveBackend` of processes. Each run is kept by a runner process that outlives this one.

    cluster     the GPUs that there are, or are declared to be
    state_dir   directory of jobs, logs and checkpoints; one back end at a time
    devices     UUIDs of real GPUs by node and slot; others are numbered. None: those that are found in this machine
    environ     the service's environment, of which jobs see a harmless part; None: this process's
    """

    def __init__(
        self,
        cluster: Cluster,
        state_dir: Path,
        on_event: OnEvent,
        *,
        devices: Devices | None = None,
        settings: LocalSettings = STANDARD,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        base = orders.inherited(os.environ if environ is None else environ)
        if settings.starter is not None:
            devices = {}  # a container has its own GPUs and no others, numbered from 0
        known = {**numbered(cluster), **(devices_of(cluster) if devices is None else devices)}
        self._state = StateDir(state_dir)
        self._loop = EventLoop("local-backend", lambda error: on_event(api.BackendFailed(repr(error))))
        self._runs = Runs(self._state, on_event, self._loop, settings, base, known)
        self._loop.post(self._runs.poll)
        self._is_closed, self._closing = False, Lock()

    def adopt(self, runs: Sequence[tuple[RunOrder, DesiredState]]) -> None:
        """Take over what runs, report what ended meanwhile, begin what never began, end what was not ordered."""
        for order, _ in runs:
            token(order.job)
        self._loop.call(lambda: self._runs.adopt(runs))

    def launch(self, order: RunOrder) -> None:
        """Begin a run once its GPUs are free and the job's run before it is gone."""
        token(order.job)  # checked here: a job id that cannot name a directory is the caller's error
        self._loop.post(lambda: self._runs.launch(order))

    def stop(self, job: str, epoch: int, notice: RunNotice) -> None:
        """Ask a run for a checkpoint and its GPUs."""
        self._loop.post(lambda: self._runs.stop((job, epoch), notice))

    def kill(self, job: str, epoch: int, reason: str) -> None:
        """End a run whose job is not wanted any more."""
        self._loop.post(lambda: self._runs.kill((job, epoch), reason))

    def close(self) -> None:
        """Release everything; processes go on, and the next back end adopts them."""
        with self._closing:  # a second call waits for the first: until then nothing else may work in the directory
            if not self._is_closed:
                self._is_closed = True
                self._loop.close()
                self._runs.release()
                self._state.close()

    def log(self, job: str, replica: int, offset: int, limit: int) -> LogPart:
        """Read at most `limit` bytes of a replica's log over all its runs; from any thread."""
        return LogPart(*read_log(self._state.handle, token(job), replica, offset, limit))

    def checkpoints(self, job: str) -> list[int]:
        """List the steps of a job's complete checkpoints, the latest first; from any thread."""
        return self._state.checkpoints(job)

    def has_run(self, job: str, epoch: int) -> bool:
        """Whether there is a directory of this run; from any thread."""
        return self._state.has(job, epoch)

    def master_port(self, job: str, epoch: int) -> int:
        """Return the MASTER_PORT of a run; 0 if there is none; from any thread."""
        return run_files.port_in(self._state.get(job, epoch, lease_files.ORDER))

    def failed_at(self, job: str, epoch: int) -> float | None:
        """Return when the first replica of a run failed; None if none did, or that is not known; from any thread."""
        return run_files.number((self._state.get(job, epoch, lease_files.EXIT) or {}).get("failed_at"))


class Phase(Enum):
    """How far a run has come."""

    WAITING = auto()  # for other runs to be gone, or for its starter to be there
    UNKNOWN = auto()  # has to be looked at: it was just taken up, or its runner has gone
    STARTING = auto()  # its starter was asked for a runner
    ALIVE = auto()  # its runner is watched
    CLEANUP = auto()  # its runner has gone or cannot be found, and what it left is being killed
    OVER = auto()  # nothing of it is left


@dataclass(eq=False, slots=True)
class LocalRun:
    """One run. `order` is None for a run that the journal does not know: it is ended, and not reported."""

    key: Key
    gpus: frozenset[Gpu]
    order: RunOrder | None
    desired: DesiredState
    phase: Phase = Phase.UNKNOWN
    sequence: int = 0  # order in which runs were taken up
    waiters: list["LocalRun"] = field(default_factory=list)  # runs that wait for this one
    awaited: set[Key] = field(default_factory=set)  # runs that this one waits for
    is_new: bool = True  # just ordered: no runner was started, so nothing can be left of it
    attempts: int = 0  # runners that were started
    lock_checks: int = 0  # looks in a row at which an unknown process had the lock
    port: int = 0  # MASTER_PORT; 0: none
    pid: int = 0  # its runner
    pidfd: int = -1  # the same; -1: none is watched
    ready: int = -1  # pipe that ends once all replicas have started; -1: closed
    asked: int = -1  # connection to its starter, which has yet to answer; -1: none
    lock: int = -1  # the run's lock, held by this process; -1: not held
    died_at: float | None = None  # when its runner was seen to have gone
    runner_code: int | None = None  # exit code of its runner; None: not known, or it has not ended
    has_begun: bool = False
    had_leftovers: bool = False  # processes of it lived on after its runner had gone
    fault: str | None = None  # exception of this service; the run is ended because of it
    progress_stamp: tuple[int, int, int] | None = None  # version of progress.json that was read last
    _switches: int | None = None
    _silence: float = 0.0

    @classmethod
    def of(cls, order: RunOrder, desired: DesiredState) -> "LocalRun":
        """Make the run of an order."""
        gpus = frozenset((part.node, slot) for part in order.parts_here for slot in part.slots)
        return cls((order.job, order.epoch), gpus, order, desired)

    @property
    def must_end(self) -> bool:
        """Whether it was asked or told to end."""
        return self.desired is not DesiredState.RUN

    def silent_for(self, switches: int | None, seconds: float) -> float:
        """Note the context switches of its runner, `seconds` after the last look; for how long there were no new ones.

        Counted in looks, not by the clock: when the whole machine was suspended for an hour, no runner is to blame.
        """
        self._silence = self._silence + seconds if switches is not None and switches == self._switches else 0.0
        self._switches = switches
        return self._silence

    def release_lock(self) -> None:
        """Release the lock, if this process holds it."""
        if self.lock >= 0:
            os.close(self.lock)
        self.lock = -1


class Runs:
    """All runs of a local back end."""

    def __init__(
        self,
        state: StateDir,
        on_event: OnEvent,
        loop: EventLoop,
        settings: LocalSettings,
        base: Mapping[str, str],
        devices: Devices,
    ) -> None:
        self._state, self._on_event, self._loop, self._settings = state, on_event, loop, settings
        self._base, self._devices = base, devices
        self.table: RunTable[LocalRun] = RunTable()
        self._ports: set[int] = set()  # MASTER_PORT of all runs that are not over

    def adopt(self, runs: Sequence[tuple[RunOrder, DesiredState]]) -> None:
        """Take up what was ordered before a restart, and end what was not."""
        ordered = {(order.job, order.epoch) for order, _ in runs}
        # Found by the mark of living processes: only those hold GPUs, and directories may be many.
        marked = {self._state.run_at(os.fsdecode(path)) for path in processes.environment_values(RUN_DIR)} - ordered
        strays = sorted(key for key in marked if key is not None)
        found = [LocalRun.of(order, desired) for order, desired in runs]
        found += [
            LocalRun(key, run_files.gpus_in(self._state.get(*key, lease_files.ORDER)), None, DesiredState.GONE)
            for key in strays
        ]
        # A run waits for those that were entered before it on the same GPUs (`RunTable.blockers`): first those that have to
        # go, then those that may be running, then those that have yet to begin.
        found.sort(key=lambda run: (not run.must_end, not self._state.has(*run.key)))
        for run in found:
            run.is_new = False
            self.table.enter(run)
        # Only now: settling a run may begin it, and then it has to see all that it must wait for.
        for run in found:
            self._guarded(run, self._settle)

    def launch(self, order: RunOrder) -> None:
        """Take up a new run."""
        if self.table.get((order.job, order.epoch)) is None:
            run = LocalRun.of(order, DesiredState.RUN)
            self.table.enter(run)
            self._guarded(run, self._settle)

    def stop(self, key: Key, notice: RunNotice) -> None:
        """Ask a run to leave."""
        run = self.table.get(key)
        if run is not None and run.order is not None and run.desired is DesiredState.RUN:
            run.desired = DesiredState.LEAVE
            self._guarded(run, self._end_lease, notice, orders.leaving_mode(run.order.request))

    def kill(self, key: Key, reason: str) -> None:
        """End a run that is not wanted any more."""
        run = self.table.get(key)
        if run is not None and run.desired is not DesiredState.GONE:
            run.desired = DesiredState.GONE
            self._guarded(run, self._end_lease, RunNotice("stopped", reason, self._settings.term_seconds), "stop")

    def poll(self) -> None:
        """Look at what runs report and whether their runners work; again every `progress_every` seconds."""
        for run in self.table:
            if run.phase is Phase.ALIVE:
                self._guarded(run, self._look_at)
        self._loop.after(self._settings.progress_every, self.poll)

    def release(self) -> None:
        """Stop watching; what runs goes on. Called when the loop's thread has ended."""
        for run in self.table:
            self._unwatch(run)
            run.release_lock()

    # Callbacks about one run

    def _guarded(self, run: LocalRun, callback: RunCallback[P], *args: P.args, **more: P.kwargs) -> None:
        """Call back. An unexpected exception ends this run only: the log says why, and so does the run's cause."""
        try:
            callback(run, *args, **more)
        except Exception as error:
            if run.phase is Phase.OVER or run.fault is not None:
                raise  # a second fault, while giving up: the back end fails
            LOG.exception("job %s: run %d is ended by a fault of the service", *run.key)
            run.fault = run_files.cause_line(f"fault of the service: {error!r}")
            self._signal(run, signal.SIGKILL)
            self._unwatch(run)
            self._clean_up(run)

    def _after(self, seconds: float, run: LocalRun, callback: RunCallback[P], *args: P.args, **more: P.kwargs) -> None:
        self._loop.after(seconds, lambda: self._guarded(run, callback, *args, **more))

    def _watch(self, handle: int, run: LocalRun, callback: RunCallback[[]]) -> None:
        self._loop.watch(handle, lambda: self._guarded(run, callback))

    def _unwatch(self, run: LocalRun) -> None:
        for handle in (run.pidfd, run.ready, run.asked):
            if handle >= 0:
                self._loop.unwatch(handle)
        run.pidfd = run.ready = run.asked = -1

    # Finding out what has become of a run

    def _settle(self, run: LocalRun) -> None:
        """Look at what there is of a run, and continue from there."""
        if run.phase is Phase.OVER:
            return
        run.phase = Phase.UNKNOWN
        if not self._state.has(*run.key):
            if run.is_new:
                self._begin(run)
            else:
                self._clean_up(run)  # the job may have removed its directory, and run on
            return
        try:
            lock = self._state.lock(*run.key)
            runner = self._living_runner(run) if lock is None else None
        except OSError as error:
            if error.errno in processes.SCARCE | lease_files.PASSING:
                self._after(LOOK_SECONDS, run, self._settle_if_unknown)
            else:
                self._clean_up(run)
            return
        if lock is not None:
            run.lock = lock  # held until the run is over or begun anew: a runner that comes late finds it taken
            self._clean_up(run)
        elif runner is not None:
            self._take_over(run, *runner)
        else:
            # The holder is unknown: a runner that is about to write runner.json or to end, or a process of the job.
            run.lock_checks += 1
            if run.lock_checks * LOOK_SECONDS > self._settings.guard_seconds:
                self._clean_up(run)
            else:
                self._after(LOOK_SECONDS, run, self._settle_if_unknown)

    def _settle_if_unknown(self, run: LocalRun) -> None:
        if run.phase is Phase.UNKNOWN:
            self._settle(run)

    def _living_runner(self, run: LocalRun) -> tuple[int, int] | None:
        """Return pid and pidfd of a run's runner; None: runner.json names none that lives and carries the run's mark."""
        known = run_files.runner_in(self._state.get(*run.key, lease_files.RUNNER))
        if known is None or not processes.belongs_to_run(known.pid, self._mark(run), {}):
            return None
        pidfd = processes.open_process(known.pid, known.start)
        return None if pidfd is None else (known.pid, pidfd)

    def _take_over(self, run: LocalRun, pid: int, pidfd: int) -> None:
        """Watch a runner that lives."""
        run.phase, run.pid, run.pidfd, run.lock_checks = Phase.ALIVE, pid, pidfd, 0
        self._watch(pidfd, run, self._runner_exited)
        self._take_port(run, run_files.port_in(self._state.get(*run.key, lease_files.ORDER)))
        self._report_begin(run)
        if not run.must_end:
            return
        # Its end was decided before a crash, which may or may not have come before lease.json was written.
        lease = self._state.get(*run.key, lease_files.LEASE) or {}
        reason = (None if run.order is None else run.order.reason) or UNWANTED
        if run.desired is DesiredState.GONE:
            self._end_lease(run, RunNotice("stopped", reason, self._settings.term_seconds), "stop")
        elif run_files.number(lease.get("ends")) is None and run.order is not None:
            request = run.order.request
            self._end_lease(run, RunNotice("preempted", reason, request.checkpoint.deadline), orders.leaving_mode(request))
        else:
            self._guard(run, run_files.number(lease.get("seconds")) or 0.0)

    # From its order to its beginning

    def _begin(self, run: LocalRun) -> None:
        """Start a run of which nothing exists, once those that it has to wait for are gone."""
        # What a part of a run over several nodes has come to says nothing of the others: the server knows all of them.
        is_whole = run.order is not None and run.order.part is None
        if run.must_end or run.order is None or (is_whole and run_files.has_finished(self._state, *run.key)):
            self._over(run, run_files.unbegun_fields())
            return
        blockers = self.table.blockers(run)
        if blockers:
            run.phase, run.awaited = Phase.WAITING, {each.key for each in blockers}
            for each in blockers:
                each.waiters.append(run)
            return
        most = run.order.request.max_duration
        run.attempts += 1
        if most is not None and run.order.ran >= most:
            self._fail_to_start(run, lease_files.OVERDUE)
        elif run.attempts > MOST_ATTEMPTS:
            self._fail_to_start(run, lease_files.LOST)
        else:
            try:
                self._spawn(run, run.order)
            except OSError as error:
                if run.pidfd >= 0:
                    raise  # the runner runs and cannot be watched: a fault, so it is killed
                self._fail_to_start(run, run_files.CANNOT_START.get(error.errno or 0, run_files.UNREADABLE))

    def _spawn(self, run: LocalRun, order: RunOrder) -> None:
        run.is_new, run.died_at, run.runner_code = False, None, None
        has_rank_0 = order.part is None or order.part.node == order.gpus[0].node
        self._take_port(run, orders.free_port(self._ports) if has_rank_0 else 0)
        given = 0 if order.part is None else order.part.port
        port = run.port or given or run_files.port_in(self._state.get(*run.key, lease_files.ORDER))
        if not port:  # the server does not know it yet, and did not when it gave this order for the first time
            self._fail_to_start(run, lease_files.LOST)
            return
        self._state.make_run(*run.key)
        base, devices = self._base, self._devices
        begun = float(next(iter(self._state.checkpoints(order.job)), 0))
        fields = orders.order_fields(order, self._state, self._settings, base=base, devices=devices, port=port, begun=begun)
        self._state.put(*run.key, lease_files.ORDER, fields)
        self._state.put(*run.key, lease_files.LEASE, orders.lease_fields(*run.key, None, None, ""))
        if self._settings.starter is not None:
            self._ask_starter(run, self._settings.starter)
            return
        path, marks = str(self._state.run_path(*run.key)), orders.run_marks(self._state, *run.key)
        run.pid, run.pidfd, run.ready = processes.spawn(path, marks)
        self._watch_runner(run)

    def _watch_runner(self, run: LocalRun) -> None:
        run.phase = Phase.ALIVE
        self._watch(run.pidfd, run, self._runner_exited)
        self._watch(run.ready, run, self._runner_ready)

    # Runners in another container

    def _ask_starter(self, run: LocalRun, starter: Path) -> None:
        """Ask for a runner. A starter that is not there yet is waited for: its image may be large."""
        path, marks = str(self._state.run_path(*run.key)), orders.run_marks(self._state, *run.key)
        call = starters.ask_for_runner(starter, path, marks)
        if call is None:
            run.phase = Phase.WAITING
            self._after(STARTER_SECONDS, run, self._ask_again, starter)
            return
        run.phase, run.asked, run.ready = Phase.STARTING, call.connection, call.ready
        self._watch(run.asked, run, self._starter_answered)
        self._after(ANSWER_SECONDS, run, self._give_up_answer, run.attempts)

    def _ask_again(self, run: LocalRun, starter: Path) -> None:
        if run.phase is Phase.WAITING:
            self._ask_starter(run, starter)

    def _starter_answered(self, run: LocalRun) -> None:
        call = starters.StarterCall(run.asked, run.ready)
        try:
            runner = starters.answer_to(call)
        except OSError as error:
            self._unwatch(run)
            is_over = error.errno == starters.OVER
            cause = lease_files.LOST if is_over else run_files.CANNOT_START.get(error.errno or 0, run_files.UNREADABLE)
            self._fail_to_start(run, cause)
            return
        if runner is None:
            self._unwatch(run)
            self._settle(run)
            return
        self._loop.unwatch(run.asked)
        run.asked, run.pid, run.pidfd = -1, runner.pid, runner.pidfd
        self._watch_runner(run)

    def _give_up_answer(self, run: LocalRun, attempt: int) -> None:
        """A starter that does not answer may have started a runner: see what there is, and begin anew."""
        if run.phase is Phase.STARTING and run.attempts == attempt:
            self._unwatch(run)
            self._settle(run)

    def _take_port(self, run: LocalRun, port: int) -> None:
        self._ports.discard(run.port)
        run.port = port
        self._ports.add(port)

    def _fail_to_start(self, run: LocalRun, cause: str) -> None:
        self._over(run, {**run_files.unbegun_fields(), "how": "failed", "cause": cause})

    def _runner_ready(self, run: LocalRun) -> None:
        """The pipe has ended: replicas have started, or the runner has died."""
        if run.ready >= 0:
            self._loop.unwatch(run.ready)
            run.ready = -1
            self._report_begin(run)

    def _report_begin(self, run: LocalRun) -> None:
        began = run_files.number((self._state.get(*run.key, lease_files.RUNNER) or {}).get("began"))
        if began is not None and not run.has_begun and run.order is not None:
            run.has_begun = True
            begun = run_files.amount((self._state.get(*run.key, lease_files.ORDER) or {}).get("begun"))
            self._on_event(RunBegan(*run.key, began, begun))

    # While it runs

    def _look_at(self, run: LocalRun) -> None:
        if not run.has_begun and run.ready < 0:
            self._report_begin(run)
        self._report_progress(run)
        with suppress(OSError):
            # A runner that was stopped, or waits for a device that never answers, would keep its GPUs for ever.
            switches = processes.context_switches(run.pid)
            if run.silent_for(switches, self._settings.progress_every) > self._settings.silent_seconds:
                self._signal(run, signal.SIGKILL)

    def _report_progress(self, run: LocalRun) -> None:
        stamp = self._state.stamp(*run.key, lease_files.PROGRESS)
        if stamp is None or stamp == run.progress_stamp or run.order is None:
            return
        run.progress_stamp = stamp
        report = run_files.read_progress(*run.key, self._state.get(*run.key, lease_files.PROGRESS))
        if report is not None:
            self._on_event(report)

    # From the end of its lease to its own

    def _end_lease(self, run: LocalRun, notice: RunNotice, mode: str) -> None:
        if run.phase is Phase.WAITING:
            self._over(run, run_files.unbegun_fields())
            return
        self._guard(run, notice.deadline)
        self._write_lease(run, orders.lease_fields(*run.key, now() + notice.deadline, notice, mode))

    def _write_lease(self, run: LocalRun, fields: Fields) -> None:
        if run.phase is Phase.OVER:
            return
        try:
            self._state.put(*run.key, lease_files.LEASE, fields)
        except OSError:
            self._after(WRITE_SECONDS, run, self._write_lease, fields)
            return
        self._signal(run, signal.SIGUSR1)

    def _guard(self, run: LocalRun, deadline: float) -> None:
        """See to it that the runner is gone in time, as its GPUs were promised to another run."""
        seconds = deadline + self._settings.term_seconds + self._settings.guard_seconds
        self._after(seconds, run, self._kill_late_runner)

    def _kill_late_runner(self, run: LocalRun) -> None:
        """Kill a runner that has processes left. One that has none only waits for room to write exit.json, and may."""
        if run.pidfd >= 0:
            try:
                is_only_writing = not processes.children(run.pid)
            except OSError:  # cannot be found out now; a runner that hangs is found by `silent_for`
                is_only_writing = True
            if is_only_writing:
                self._after(self._settings.guard_seconds, run, self._kill_late_runner)
                return
        self._signal(run, signal.SIGKILL)

    def _signal(self, run: LocalRun, signum: signal.Signals) -> None:
        if run.pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(run.pidfd, signum)

    def _runner_exited(self, run: LocalRun) -> None:
        if run.pidfd < 0:
            return
        self._unwatch(run)
        run.died_at, run.runner_code = now(), processes.reap(run.pid)
        if run.runner_code == lease_files.NO_STORAGE and not self._state.has(*run.key, lease_files.RUNNER):
            self._fail_to_start(run, lease_files.STORAGE)
        else:
            self._settle(run)

    # After its runner

    def _mark(self, run: LocalRun) -> bytes:
        return RUN_DIR + b"=" + os.fsencode(self._state.run_path(*run.key))

    def _clean_up(self, run: LocalRun) -> None:
        """The runner has gone or cannot be found: kill what is left before any file is believed, or anything begun."""
        run.phase = Phase.CLEANUP
        if run.runner_code == 0:  # it ended in order, and has killed everything itself
            self._conclude(run)
        else:
            self._kill_leftovers(run, LOOK_SECONDS)

    def _kill_leftovers(self, run: LocalRun, pause: float) -> None:
        """Kill whatever belongs to a run, until a look finds nothing."""
        if run.phase is not Phase.CLEANUP:
            return
        # The files of a run that caused a fault are not read again.
        known = None if run.fault is not None else run_files.runner_in(self._state.get(*run.key, lease_files.RUNNER))
        mark = self._mark(run)
        try:
            groups = dict(known.replicas) if known is not None and known.boot == processes.boot_id() else {}
            left = processes.kill_where(lambda pid: processes.belongs_to_run(pid, mark, groups))
        except OSError:  # not all could be looked at
            left = None
        if left == 0:
            self._conclude(run)
            return
        run.had_leftovers |= left is not None
        self._after(pause, run, self._kill_leftovers, min(pause * 2, SLOWEST_LOOK))

    def _conclude(self, run: LocalRun) -> None:
        """Nothing of the run lives: its files say what has become of it."""
        if run.fault is not None:
            is_wanted = run.desired is DesiredState.RUN
            how, cause = (RunEnding.FAILED, run.fault) if is_wanted else (RunEnding.YIELDED, "KILL")
            self._finish(run, RunEnded(*run.key, now(), how, None, cause, ()))
            return
        fields = self._state.get(*run.key, lease_files.EXIT)
        had_runner = run.runner_code == lease_files.UNSAID or self._state.has(*run.key, lease_files.RUNNER)
        if fields is not None:
            self._over(run, fields)
        elif run.has_begun or run.had_leftovers or had_runner:
            fields = self._lost_fields(run)
            with suppress(OSError):  # without it, the next service would find the run lost once more
                self._state.put(*run.key, lease_files.EXIT, fields)
            self._over(run, fields)
        else:
            # A directory and nothing else. A late runner may still come: exit.json keeps it from beginning what must not.
            if run.must_end:
                with suppress(OSError):
                    self._state.put(*run.key, lease_files.EXIT, run_files.unbegun_fields())
            run.release_lock()
            self._begin(run)

    def _lost_fields(self, run: LocalRun) -> Fields:
        """Return what exit.json would say of a run that began, and whose runner has not said how it ended."""
        ranks = [] if run.order is None else orders.ranks_here(run.order)
        is_wanted = run.desired is DesiredState.RUN
        died_at = run.died_at if run.died_at is not None else self._state.last_sign(*run.key)
        # A runner that was killed is no fault of the job. One that exited by itself was kept from writing by the job.
        cause = lease_files.LOST if run.runner_code is None or run.runner_code < 0 else run_files.UNREADABLE
        began = run_files.number((self._state.get(*run.key, lease_files.RUNNER) or {}).get("began"))
        return {
            "at": died_at if began is None else max(began, died_at),
            "began": began,
            "how": "failed" if is_wanted else "yielded",
            "replicas": [{"rank": rank, "code": None} for rank in ranks],
            "made_to": None if is_wanted else "KILL",
            "cause": cause if is_wanted else None,
        }

    def _over(self, run: LocalRun, fields: Fields) -> None:
        """The run has ended as `fields`, the contents of exit.json, say."""
        self._report_begin(run)
        self._report_progress(run)
        # A runner that this back end never watched may be a child of this process, if an earlier back end in it spawned it.
        runner = None if run.pid else run_files.runner_in(self._state.get(*run.key, lease_files.RUNNER))
        with suppress(OSError):
            if runner is not None and processes.start_of(runner.pid) == runner.start:
                processes.reap(runner.pid)
        self._finish(run, run_files.read_end(self._state, *run.key, fields, run.desired))

    def _finish(self, run: LocalRun, event: RunEnded) -> None:
        """Report the end of a run, and begin what has waited for it."""
        self._unwatch(run)
        run.release_lock()
        run.phase = Phase.OVER
        self.table.remove(run)
        self._ports.discard(run.port)
        if run.order is not None:
            self._on_event(event)
        for waiter in run.waiters:
            waiter.awaited.discard(run.key)
            if waiter.phase is Phase.WAITING and not waiter.awaited:
                self._guarded(waiter, self._begin)
        with suppress(
            OSError, ValueError
        ):  # it has no directory, the disk is full, or the job has made nonsense of the file
            self._state.forget_environment(*run.key)
