"""Runs as this world has them: from an order to the news that nothing of it is left.

There is one way to take up a run, whether it was ordered just now, before a crash, or by nobody: look at its directory.

    the lock is held              its runner lives: watch that
    exit.json is there            it is over, as that says
    runner.json is there          its runner was killed, and the run has failed
    nothing of that is there      it never began: begin it if it is wanted, once its GPUs are free

A job can write, remove and put in the way whatever it likes there. So before a run counts as over, or is begun another time,
whatever bears its mark is killed, unless its runner was seen to end in order.
"""

import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Concatenate, ParamSpec

from poise.service.backends.api import DesiredState, OnEvent, RunBegan, RunEnded, RunEnding, RunNotice, RunOrder
from poise.service.backends.local.event_loop import EventLoop
from poise.service.backends.local.lease_files import (
    EXIT,
    LEASE,
    LOST,
    NO_STORAGE,
    ORDER,
    OVERDUE,
    PASSING,
    PROGRESS,
    RUNNER,
    STORAGE,
    UNSAID,
    Fields,
    now,
)
from poise.service.backends.local.orders import (
    Devices,
    LocalSettings,
    free_port,
    lease_fields,
    leaving_mode,
    order_fields,
    replica_count,
    run_marks,
)
from poise.service.backends.local.processes import (
    SCARCE,
    belongs_to_run,
    boot_id,
    children,
    context_switches,
    environment_values,
    kill_where,
    open_process,
    reap,
    spawn,
    start_of,
)
from poise.service.backends.local.run_files import (
    UNREADABLE,
    ended,
    gpus_in,
    has_finished,
    line,
    lost_fields,
    number,
    port_in,
    progressed,
    refusal,
    runner_in,
    unbegun_fields,
)
from poise.service.backends.local.run_table import Key, LocalRun, Phase, RunTable
from poise.service.backends.local.state_dir import StateDir

# What is done about one run: what goes wrong there ends that run, and no other.

P = ParamSpec("P")
Deed = Callable[Concatenate[LocalRun, P], None]
LOG = logging.getLogger("poise.local")


class GuardedCallbacks:
    """Does things about runs, now, later, or when a file can be read.

    A run at which something goes wrong that nobody has thought of is given up: the log says why, and so does its cause.

    give_up   ends a run whose `fault` says what went wrong; a fault in that one is let through
    """

    def __init__(self, clockwork: EventLoop, give_up: Callable[[LocalRun], None]) -> None:
        self._clockwork, self._give_up = clockwork, give_up

    def do(self, run: LocalRun, deed: Deed[P], *args: P.args, **more: P.kwargs) -> None:
        """Do something about a run now."""
        try:
            deed(run, *args, **more)
        except Exception as error:
            if run.phase is Phase.OVER or run.fault is not None:
                raise
            LOG.exception("job %s: run %d is ended by a fault of the service", *run.key)
            run.fault = line(f"fault of the service: {error!r}")
            self._give_up(run)

    def after(self, seconds: float, run: LocalRun, deed: Deed[P], *args: P.args, **more: P.kwargs) -> None:
        """Do something about a run after so many seconds."""
        self._clockwork.after(seconds, lambda: self.do(run, deed, *args, **more))

    def watch(self, handle: int, run: LocalRun, deed: Deed[[]]) -> None:
        """Do something about a run whenever a file can be read."""
        self._clockwork.watch(handle, partial(self.do, run, deed))


# What is left of a run whose runner has gone, and what is told of it.

RUN_DIR = b"POISE_RUN_DIR"


def living_runner(folders: StateDir, run: LocalRun) -> tuple[int, int] | None:
    """The pid and a handle of a run's runner; None: runner.json names none that lives and bears the run's mark."""
    known = runner_in(folders.get(*run.key, RUNNER))
    if known is None or not belongs_to_run(known.pid, _mark(folders, run), {}):
        return None
    handle = open_process(known.pid, known.start)
    return None if handle is None else (known.pid, handle)


def kill_left(folders: StateDir, run: LocalRun) -> int:
    """KILL whatever belongs_to_run to a run, and say how many processes there were. OSError: not all could be looked at."""
    # Of a run whose files were this service's undoing, none is read again.
    known = None if run.fault is not None else runner_in(folders.get(*run.key, RUNNER))
    groups = dict(known.replicas) if known is not None and known.boot == boot_id() else {}
    mark = _mark(folders, run)
    return kill_where(lambda pid: belongs_to_run(pid, mark, groups))


def _mark(folders: StateDir, run: LocalRun) -> bytes:
    return RUN_DIR + b"=" + os.fsencode(folders.run_path(*run.key))


def is_only_writing(run: LocalRun) -> bool:
    """Nothing is left of a run but its runner; also if that cannot be found out just now.

    Whatever lost its parent there is the runner's child. A runner that hangs is found by its silence.
    """
    try:
        return not children(run.pid)
    except OSError:
        return True


def lost(folders: StateDir, run: LocalRun) -> Fields:
    """What exit.json would say of a run that began, and whose runner has not said how it ended."""
    replicas = 0 if run.order is None else replica_count(run.order)
    died = run.died if run.died is not None else folders.last_sign(*run.key)
    # A runner that was killed is no fault of the job. One that left by itself was kept from writing.
    cause = LOST if run.code is None or run.code < 0 else UNREADABLE
    began = number((folders.get(*run.key, RUNNER) or {}).get("began"))
    return lost_fields(began, died, replicas, run.grip, cause)


def faulted(run: LocalRun) -> RunEnded:
    """The end of a run at which this service did something wrong."""
    if run.grip is DesiredState.RUN:
        return RunEnded(*run.key, now(), RunEnding.FAILED, None, run.fault, ())
    return RunEnded(*run.key, now(), RunEnding.YIELDED, None, "KILL", ())


def reap_orphan(folders: StateDir, run: LocalRun) -> None:
    """A runner that this world never watched may still be a child of this process, started by a world before it."""
    runner = None if run.pid else runner_in(folders.get(*run.key, RUNNER))
    with suppress(OSError):
        if runner is not None and start_of(runner.pid) == runner.start:
            reap(runner.pid)


LOOK_SECONDS = 0.02
"""Between two looks at a run of which it is not known yet what has become of it."""
SLOWEST_LOOK = 1.0
WRITE_SECONDS = 0.5
"""Between two tries to write what must be written."""
UNWANTED = "it is not wanted any more"
"""What a run is told that is to end, and that nobody knows."""
MOST_ATTEMPTS = 3
"""Runners that may die before they have begun a run, until it counts as failed."""


class Runs:
    """All runs of a world. Everything here happens in one thread."""

    def __init__(
        self,
        folders: StateDir,
        tell: OnEvent,
        clockwork: EventLoop,
        settings: LocalSettings,
        base: Mapping[str, str],
        devices: Devices,
    ) -> None:
        self._folders, self._tell, self._clockwork, self._settings = folders, tell, clockwork, settings
        self._base, self._devices = base, devices
        self._deeds = GuardedCallbacks(clockwork, self._give_up)
        self.table = RunTable()
        self._ports: set[int] = set()

    def adopt(self, runs: Sequence[tuple[RunOrder, DesiredState]]) -> None:
        """Take up what was ordered before, and end what nobody wants."""
        wanted = {(order.job, order.epoch) for order, _ in runs}
        found = [*(LocalRun.of(order, grip) for order, grip in runs), *self._strays(wanted)]
        # Who is to begin waits for who is to go and for who is there.
        found.sort(key=lambda run: (not run.must_end, not self._folders.has_run(*run.key)))
        for run in found:
            run.is_new = False
            self.table.enter(run)
        for run in found:
            self._deeds.do(run, self._settle)

    def launch(self, order: RunOrder) -> None:
        """Take up a new run."""
        if (order.job, order.epoch) not in self.table:
            run = LocalRun.of(order, DesiredState.RUN)
            self.table.enter(run)
            self._deeds.do(run, self._settle)

    def leave(self, key: Key, notice: RunNotice) -> None:
        """Ask a run to leave."""
        run = self.table.get(key)
        if run is not None and run.order is not None and run.grip is DesiredState.RUN:
            run.grip = DesiredState.LEAVE
            self._deeds.do(run, self._end_lease, notice, leaving_mode(run.order.request))

    def kill(self, key: Key, reason: str) -> None:
        """Tell a run to go."""
        run = self.table.get(key)
        if run is not None and run.grip is not DesiredState.GONE:
            run.grip = DesiredState.GONE
            self._deeds.do(run, self._end_lease, RunNotice("stopped", reason, self._settings.term_seconds), "stop")

    def let_go(self) -> None:
        """Watch nothing any more; what runs goes on."""
        for run in self.table:
            self._unwatch(run)
            run.give_back()

    def _strays(self, wanted: set[Key]) -> list[LocalRun]:
        """Runs of which something lives that nobody knows. Its marks lead there: directories may be many."""
        keys = {self._folders.run_at(os.fsdecode(path)) for path in environment_values(RUN_DIR)} - wanted
        gpus = {key: gpus_in(self._folders.get(*key, ORDER)) for key in keys if key is not None}
        return [LocalRun(key, gpus[key], None, DesiredState.GONE) for key in sorted(gpus)]

    # What has become of a run

    def _settle(self, run: LocalRun) -> None:
        """Look at what there is of a run and go on from there."""
        if run.phase is Phase.OVER:
            return
        run.phase = Phase.OPEN
        if self._folders.has_run(*run.key):
            self._settle_open(run)
        elif run.is_new:
            self._unbegun(run)
        else:
            self._clear(run)

    def _settle_open(self, run: LocalRun) -> None:
        try:
            lock = self._folders.lock(*run.key)
            runner = living_runner(self._folders, run) if lock is None else None
        except OSError as error:
            if error.errno in SCARCE | PASSING:
                self._again(run)
            else:
                self._clear(run)
            return
        if lock is not None:
            run.lock = lock
            self._clear(run)
        elif runner is not None:
            self._meet(run, *runner)
        else:
            self._wait_for_runner(run)

    def _wait_for_runner(self, run: LocalRun) -> None:
        """Somebody has the lock: a runner that is about to say who it is, or to end. Or somebody who has no right to it."""
        run.looks += 1
        if run.looks * LOOK_SECONDS > self._settings.guard_seconds:
            self._clear(run)
        else:
            self._again(run)

    def _again(self, run: LocalRun) -> None:
        self._deeds.after(LOOK_SECONDS, run, self._look_again)

    def _look_again(self, run: LocalRun) -> None:
        if run.phase is Phase.OPEN:
            self._settle(run)

    def _meet(self, run: LocalRun, pid: int, process: int) -> None:
        """Its runner lives."""
        run.phase, run.pid, run.process, run.looks = Phase.ALIVE, pid, process, 0
        self._deeds.watch(process, run, self._runner_gone)
        self._take_port(run, port_in(self._folders.get(*run.key, ORDER)))
        self._look_for_begin(run)
        if run.must_end:
            self._resume_ending(run)

    def _resume_ending(self, run: LocalRun) -> None:
        """The end of a lease that was wanted before a crash: it may or may not have been written down."""
        lease = self._folders.get(*run.key, LEASE) or {}
        reason = (None if run.order is None else run.order.reason) or UNWANTED
        if run.grip is DesiredState.GONE:
            self._end_lease(run, RunNotice("stopped", reason, self._settings.term_seconds), "stop")
        elif number(lease.get("ends")) is None and run.order is not None:
            request = run.order.request
            self._end_lease(run, RunNotice("preempted", reason, request.checkpoint.deadline), leaving_mode(request))
        else:
            self._guard(run, number(lease.get("seconds")) or 0.0)

    # After its runner

    def _clear(self, run: LocalRun) -> None:
        """Its runner has gone, or is not to be found: nothing is believed or begun while something is left of it."""
        run.phase = Phase.LEFT
        if run.code == 0:  # it ended in order, and so has seen to that itself
            self._cleared(run)
        else:
            self._sweep(run, LOOK_SECONDS)

    def _sweep(self, run: LocalRun, pause: float) -> None:
        """Kill what is left of a run, until there is nothing."""
        if run.phase is not Phase.LEFT:
            return
        try:
            left = kill_left(self._folders, run)
        except OSError:  # not all could be looked at
            left = None
        if left == 0:
            self._cleared(run)
            return
        run.has_left |= left is not None
        self._deeds.after(pause, run, self._sweep, min(pause * 2, SLOWEST_LOOK))

    def _give_up(self, run: LocalRun) -> None:
        """This service has done something wrong about a run: end it without another look at its files."""
        self._signal(run, signal.SIGKILL)
        self._unwatch(run)
        self._clear(run)

    def _cleared(self, run: LocalRun) -> None:
        """Nothing of it lives: what has become of it is what its files say."""
        if run.fault is not None:
            self._gone(run, faulted(run))
            return
        fields = self._folders.get(*run.key, EXIT)
        has_begun = run.has_begun or run.has_left or run.code == UNSAID or self._folders.has(*run.key, RUNNER)
        if fields is None and not has_begun:
            self._settle_unbegun(run)
            return
        if fields is None:
            fields = lost(self._folders, run)
            with suppress(OSError):  # after a crash it would only be found lost once more
                self._folders.put(*run.key, EXIT, fields)
        self._over(run, fields)

    def _settle_unbegun(self, run: LocalRun) -> None:
        """A directory and nothing else. A runner may yet come to it: what must not begin is over before it does."""
        if run.must_end:
            with suppress(OSError):
                self._folders.put(*run.key, EXIT, unbegun_fields())
        run.give_back()
        self._unbegun(run)

    # From its beginning

    def _unbegun(self, run: LocalRun) -> None:
        if run.must_end or run.order is None or has_finished(self._folders, *run.key):
            self._over(run, unbegun_fields())
            return
        blockers = self.table.blockers(run)
        if not blockers:
            self._start(run, run.order)
            return
        run.phase, run.awaited = Phase.WAITING, {each.key for each in blockers}
        for each in blockers:
            each.waiters.append(run)

    def _start(self, run: LocalRun, order: RunOrder) -> None:
        most = order.request.max_duration
        run.attempts += 1
        if most is not None and order.ran >= most:
            self._refuse(run, OVERDUE)
        elif run.attempts > MOST_ATTEMPTS:
            self._refuse(run, LOST)
        else:
            try:
                self._spawn(run, order)
            except OSError as error:
                if run.process >= 0:
                    raise  # it runs, and cannot be watched
                self._refuse(run, refusal(error))

    def _spawn(self, run: LocalRun, order: RunOrder) -> None:
        run.is_new, run.died, run.code = False, None, None
        self._folders.make_run(*run.key)
        self._take_port(run, free_port(self._ports))
        fields = order_fields(order, self._folders, self._settings, base=self._base, devices=self._devices, port=run.port)
        self._folders.put(*run.key, ORDER, fields)
        self._folders.put(*run.key, LEASE, lease_fields(*run.key, None, None, ""))
        run.pid, run.process, run.ready = spawn(str(self._folders.run_path(*run.key)), run_marks(self._folders, *run.key))
        run.phase = Phase.ALIVE
        self._deeds.watch(run.process, run, self._runner_gone)
        self._deeds.watch(run.ready, run, self._runner_ready)

    def _take_port(self, run: LocalRun, port: int) -> None:
        self._ports.discard(run.port)
        run.port = port
        self._ports.add(port)

    def _refuse(self, run: LocalRun, cause: str) -> None:
        """It could not be begun."""
        self._over(run, {**unbegun_fields(), "how": "failed", "cause": cause})

    def _runner_ready(self, run: LocalRun) -> None:
        if run.ready >= 0:
            self._clockwork.unwatch(run.ready)
            run.ready = -1
            self._look_for_begin(run)

    def _look_for_begin(self, run: LocalRun) -> None:
        began = number((self._folders.get(*run.key, RUNNER) or {}).get("began"))
        if began is not None and not run.has_begun and run.order is not None:
            run.has_begun = True
            self._tell(RunBegan(*run.key, began))

    # To its end

    def _end_lease(self, run: LocalRun, notice: RunNotice, mode: str) -> None:
        if run.phase is Phase.WAITING:
            self._over(run, unbegun_fields())
            return
        self._guard(run, notice.deadline)
        self._write_lease(run, lease_fields(*run.key, now() + notice.deadline, notice, mode))

    def _write_lease(self, run: LocalRun, fields: Fields) -> None:
        if run.phase is Phase.OVER:
            return
        try:
            self._folders.put(*run.key, LEASE, fields)
        except OSError:
            self._deeds.after(WRITE_SECONDS, run, self._write_lease, fields)
            return
        self._signal(run, signal.SIGUSR1)

    def _guard(self, run: LocalRun, deadline: float) -> None:
        """A runner that does not do its work in time is killed: its GPUs were promised to somebody."""
        self._deeds.after(deadline + self._settings.term_seconds + self._settings.guard_seconds, run, self._press)

    def _press(self, run: LocalRun) -> None:
        """Its runner should be gone. One that only waits for room to write down the end is let: the end would be lost."""
        if run.process >= 0 and is_only_writing(run):
            self._deeds.after(self._settings.guard_seconds, run, self._press)
        else:
            self._signal(run, signal.SIGKILL)

    def _signal(self, run: LocalRun, number: signal.Signals) -> None:
        if run.process >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(run.process, number)

    def _runner_gone(self, run: LocalRun) -> None:
        if run.process < 0:
            return
        self._unwatch(run)
        run.died, run.code = now(), reap(run.pid)
        if run.code == NO_STORAGE and not self._folders.has(*run.key, RUNNER):
            self._refuse(run, STORAGE)
        else:
            self._settle(run)

    def _over(self, run: LocalRun, fields: Fields) -> None:
        """A run has ended as that says."""
        self._look_for_begin(run)
        self._look_at_progress(run)
        reap_orphan(self._folders, run)
        self._gone(run, ended(self._folders, *run.key, fields, run.grip))

    def _gone(self, run: LocalRun, news: RunEnded) -> None:
        """Nothing of a run is left: tell it, and begin what has waited for that."""
        self._unwatch(run)
        run.give_back()
        run.phase = Phase.OVER
        self.table.remove(run)
        self._ports.discard(run.port)
        if run.order is not None:
            self._tell(news)
        for waiter in run.waiters:
            waiter.awaited.discard(run.key)
            if waiter.phase is Phase.WAITING and not waiter.awaited:
                self._deeds.do(waiter, self._unbegun)

    def _unwatch(self, run: LocalRun) -> None:
        for handle in (run.process, run.ready):
            if handle >= 0:
                self._clockwork.unwatch(handle)
        run.process = run.ready = -1

    # Meanwhile

    def poll(self) -> None:
        """Look at what runs report of themselves, now and from now on."""
        for run in self.table:
            if run.phase is Phase.ALIVE:
                self._deeds.do(run, self._look_at)
        self._clockwork.after(self._settings.progress_every, self.poll)

    def _look_at(self, run: LocalRun) -> None:
        if not run.has_begun and run.ready < 0:
            self._look_for_begin(run)
        self._look_at_progress(run)
        with suppress(OSError):
            # A runner that was stopped, or waits for what never comes, keeps GPUs and does nothing about it.
            if run.listen(context_switches(run.pid), self._settings.progress_every) > self._settings.silent_seconds:
                self._signal(run, signal.SIGKILL)

    def _look_at_progress(self, run: LocalRun) -> None:
        seen = self._folders.stamp(*run.key, PROGRESS)
        if seen is None or seen == run.seen or run.order is None:
            return
        run.seen = seen
        report = progressed(*run.key, self._folders.get(*run.key, PROGRESS))
        if report is not None:
            self._tell(report)
