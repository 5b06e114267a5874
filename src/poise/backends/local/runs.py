"""Runs as this world has them: from an order to the news that nothing of it is left.

There is one way to take up a run, whether it was ordered just now, before a crash, or by nobody: look at its directory.

    exit.json is there            it is over, as that says
    the lock is held              its runner lives: watch that
    runner.json is there          its runner was killed: so is what is left of it, and the run has failed
    nothing of that is there      it never began: begin it if it is wanted, once its GPUs are free
"""

import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial

from poise.backends.local.clockwork import Clockwork
from poise.backends.local.endings import (
    LOST,
    OVERDUE,
    STORAGE,
    ended,
    gpus_in,
    lost_fields,
    number,
    progressed,
    refusal,
    runner_in,
    unbegun_fields,
)
from poise.backends.local.folders import Folders
from poise.backends.local.occupancy import Key, LocalRun, Occupancy, Phase
from poise.backends.local.orders import Devices, LocalSettings, free_port, leaving_mode, marked, order_fields, replica_count
from poise.backends.local.processes import belongs, boot, kill_where, marks, opened, start_of
from poise.backends.local.records import EXIT, LEASE, NO_STORAGE, ORDER, PROGRESS, RUNNER, Fields, now
from poise.backends.local.spawning import reap, spawn
from poise.engine.live import Ending, Grip, Notice, RunBegan, RunOrder, Tell

RUN_DIR = b"POISE_RUN_DIR"
LOOK_SECONDS = 0.02
"""Between two looks at a run of which it is not known yet what has become of it."""
SLOWEST_LOOK = 1.0
WRITE_SECONDS = 0.5
"""Between two tries to write what must be written."""
MOST_ATTEMPTS = 3
"""Runners that may die before they have begun a run, until it counts as failed."""


class Runs:
    """All runs of a world. Everything here happens in one thread."""

    def __init__(
        self,
        folders: Folders,
        tell: Tell,
        clockwork: Clockwork,
        settings: LocalSettings,
        base: Mapping[str, str],
        devices: Devices,
    ) -> None:
        self._folders, self._tell, self._clockwork, self._settings = folders, tell, clockwork, settings
        self._base, self._devices = base, devices
        self.table = Occupancy()
        self._ports: set[int] = set()

    def adopt(self, runs: Sequence[tuple[RunOrder, Grip]]) -> None:
        """Take up what was ordered before, and end what nobody wants."""
        wanted = {(order.job, order.epoch) for order, _ in runs}
        found = [*(LocalRun.of(order, grip) for order, grip in runs), *self._strays(wanted)]
        # Who is to begin waits for who is to go and for who is there.
        found.sort(key=lambda run: (not run.must_end, not self._folders.has_run(*run.key)))
        for run in found:
            self.table.enter(run)
        for run in found:
            self._settle(run)

    def launch(self, order: RunOrder) -> None:
        """Take up a new run."""
        if (order.job, order.epoch) not in self.table:
            run = LocalRun.of(order, Grip.RUN)
            self.table.enter(run)
            self._settle(run)

    def leave(self, key: Key, notice: Notice) -> None:
        """Ask a run to leave."""
        run = self.table.get(key)
        if run is not None and run.order is not None and run.grip is Grip.RUN:
            run.grip = Grip.LEAVE
            self._end_lease(run, notice, leaving_mode(run.order.request))

    def kill(self, key: Key, reason: str) -> None:
        """Tell a run to go."""
        run = self.table.get(key)
        if run is not None and run.grip is not Grip.GONE:
            run.grip = Grip.GONE
            self._end_lease(run, Notice("stopped", reason, self._settings.term_seconds), "stop")

    def let_go(self) -> None:
        """Watch nothing any more; what runs goes on."""
        for run in self.table:
            self._unwatch(run)
            _give_back(run)

    def _strays(self, wanted: set[Key]) -> list[LocalRun]:
        """Runs of which something lives that nobody knows. Its marks lead there: directories may be many."""
        keys = {self._folders.run_at(os.fsdecode(path)) for path in marks(RUN_DIR)} - wanted
        gpus = {key: gpus_in(self._folders.get(*key, ORDER)) for key in keys if key is not None}
        return [LocalRun(key, gpus[key], None, Grip.GONE) for key in sorted(gpus) if self._folders.has_run(*key)]

    # What has become of a run

    def _settle(self, run: LocalRun) -> None:
        """Look at what there is of a run and go on from there."""
        if run.phase is Phase.OVER:
            return
        run.phase = Phase.OPEN
        fields = self._folders.get(*run.key, EXIT)
        if fields is not None:
            self._over(run, fields)
        elif not self._folders.has_run(*run.key):
            self._unbegun(run)
        else:
            self._settle_open(run)

    def _settle_open(self, run: LocalRun) -> None:
        try:
            lock = self._folders.lock(*run.key)
        except OSError:
            self._again(run)
            return
        if lock is None:
            self._meet(run)
            return
        run.lock = lock
        fields = self._folders.get(*run.key, EXIT)  # it may have been written before the lock was given back
        if fields is not None:
            self._over(run, fields)
        elif self._folders.has(*run.key, RUNNER):
            run.phase = Phase.LOST
            self._sweep(run, LOOK_SECONDS)
        else:
            self._settle_unbegun(run)

    def _settle_unbegun(self, run: LocalRun) -> None:
        """A directory and nothing else. A runner may yet come to it: what must not begin is over before it does."""
        if run.must_end:
            with suppress(OSError):
                self._folders.put(*run.key, EXIT, unbegun_fields())
        _give_back(run)
        self._unbegun(run)

    def _again(self, run: LocalRun) -> None:
        self._clockwork.after(LOOK_SECONDS, partial(self._look_again, run))

    def _look_again(self, run: LocalRun) -> None:
        if run.phase is Phase.OPEN:
            self._settle(run)

    def _meet(self, run: LocalRun) -> None:
        """Somebody has the lock: the runner, as soon as it has said who it is."""
        runner = runner_in(self._folders.get(*run.key, RUNNER))
        process = None if runner is None else opened(runner.pid, runner.start)
        if runner is None or process is None:
            self._again(run)
            return
        run.phase, run.pid, run.process = Phase.ALIVE, runner.pid, process
        self._clockwork.watch(process, partial(self._runner_gone, run))
        self._look_for_begin(run)
        if run.must_end:
            self._resume_ending(run)

    def _resume_ending(self, run: LocalRun) -> None:
        """The end of a lease that was wanted before a crash: it may or may not have been written down."""
        lease = self._folders.get(*run.key, LEASE) or {}
        if run.grip is Grip.GONE:
            reason = "its job is no longer wanted"
            self._end_lease(run, Notice("stopped", reason, self._settings.term_seconds), "stop")
        elif number(lease.get("ends")) is None and run.order is not None:
            request = run.order.request
            notice = Notice("preempted", "its GPUs are wanted for another job", request.checkpoint.deadline)
            self._end_lease(run, notice, leaving_mode(request))
        else:
            self._guard(run, number(lease.get("seconds")) or 0.0)

    # From its beginning

    def _unbegun(self, run: LocalRun) -> None:
        if run.must_end or run.order is None or self._has_finished(*run.key):
            self._over(run, unbegun_fields())
            return
        blockers = self.table.blockers(run)
        if not blockers:
            self._start(run, run.order)
            return
        run.phase, run.awaited = Phase.WAITING, {each.key for each in blockers}
        for each in blockers:
            each.waiters.append(run)

    def _has_finished(self, job: str, epoch: int) -> bool:
        """The job's run before this one did all its work on its way out: nothing is left to be done."""
        before = [each for each in self._folders.epochs(job) if each < epoch]
        fields = self._folders.get(job, before[-1], EXIT) if before else None
        return fields is not None and fields.get("how") == Ending.FINISHED.value

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
                self._refuse(run, refusal(error))

    def _spawn(self, run: LocalRun, order: RunOrder) -> None:
        self._folders.make_run(*run.key)
        self._ports.discard(run.port)
        run.port = free_port(self._ports)
        self._ports.add(run.port)
        fields = order_fields(order, self._folders, self._settings, base=self._base, devices=self._devices, port=run.port)
        self._folders.put(*run.key, ORDER, fields)
        self._folders.put(*run.key, LEASE, _lease(run.key, None, None, ""))
        run.pid, run.process, run.ready = spawn(self._folders.run_path(*run.key), marked(self._folders, *run.key))
        run.phase = Phase.ALIVE
        self._clockwork.watch(run.process, partial(self._runner_gone, run))
        self._clockwork.watch(run.ready, partial(self._runner_ready, run))

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

    def _end_lease(self, run: LocalRun, notice: Notice, mode: str) -> None:
        if run.phase is Phase.WAITING:
            self._over(run, unbegun_fields())
            return
        self._guard(run, notice.deadline)
        self._write_lease(run, _lease(run.key, now() + notice.deadline, notice, mode))

    def _write_lease(self, run: LocalRun, fields: Fields) -> None:
        if run.phase is Phase.OVER:
            return
        try:
            self._folders.put(*run.key, LEASE, fields)
        except OSError:
            self._clockwork.after(WRITE_SECONDS, partial(self._write_lease, run, fields))
            return
        self._signal(run, signal.SIGUSR1)

    def _guard(self, run: LocalRun, deadline: float) -> None:
        """A runner that does not do its work in time is killed: its GPUs were promised to somebody."""
        seconds = deadline + self._settings.term_seconds + self._settings.guard_seconds
        self._clockwork.after(seconds, partial(self._signal, run, signal.SIGKILL))

    def _signal(self, run: LocalRun, number: signal.Signals) -> None:
        if run.process >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(run.process, number)

    def _runner_gone(self, run: LocalRun) -> None:
        if run.process < 0:
            return
        self._unwatch(run)
        run.died = now()
        if reap(run.pid) == NO_STORAGE and not self._folders.has(*run.key, RUNNER):
            self._refuse(run, STORAGE)
        else:
            self._settle(run)

    def _sweep(self, run: LocalRun, pause: float) -> None:
        """Kill what a dead runner has left behind, until there is nothing."""
        if run.phase is not Phase.LOST:
            return
        runner = self._folders.get(*run.key, RUNNER) or {}
        known = runner_in(runner)
        groups = dict(known.replicas) if known is not None and known.boot == boot() else {}
        mark = RUN_DIR + b"=" + os.fsencode(self._folders.run_path(*run.key))
        if kill_where(lambda pid: belongs(pid, mark, groups)):
            self._clockwork.after(pause, partial(self._sweep, run, min(pause * 2, SLOWEST_LOOK)))
            return
        replicas = 0 if run.order is None else replica_count(run.order)
        died = run.died if run.died is not None else self._folders.last_sign(*run.key)
        fields = lost_fields(number(runner.get("began")), died, replicas, run.grip)
        with suppress(OSError):  # after a crash it would only be found lost once more
            self._folders.put(*run.key, EXIT, fields)
        self._over(run, fields)

    def _over(self, run: LocalRun, fields: Fields) -> None:
        """Nothing of a run is left: tell it, and begin what has waited for that."""
        self._unwatch(run)
        _give_back(run)
        self._look_for_begin(run)
        self._look_at_progress(run)
        run.phase = Phase.OVER
        self.table.remove(run)
        self._ports.discard(run.port)
        self._bury(run)
        if run.order is not None:
            self._tell(ended(self._folders, *run.key, fields, run.grip))
        for waiter in run.waiters:
            waiter.awaited.discard(run.key)
            if waiter.phase is Phase.WAITING and not waiter.awaited:
                self._unbegun(waiter)

    def _bury(self, run: LocalRun) -> None:
        """A runner that this world never watched may still be a child of this process, started by a world before it."""
        runner = None if run.pid else runner_in(self._folders.get(*run.key, RUNNER))
        if runner is not None and start_of(runner.pid) == runner.start:
            reap(runner.pid)

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
                if not run.has_begun and run.ready < 0:
                    self._look_for_begin(run)
                self._look_at_progress(run)
        self._clockwork.after(self._settings.progress_every, self.poll)

    def _look_at_progress(self, run: LocalRun) -> None:
        seen = self._folders.stamp(*run.key, PROGRESS)
        if seen is None or seen == run.seen or run.order is None:
            return
        report = progressed(*run.key, self._folders.get(*run.key, PROGRESS))
        if report is not None:
            run.seen = seen
            self._tell(report)


def _give_back(run: LocalRun) -> None:
    if run.lock >= 0:
        os.close(run.lock)
    run.lock = -1


def _lease(key: Key, ends: float | None, notice: Notice | None, mode: str) -> Fields:
    """What lease.json says. `seconds` bounds `ends`, should the clock be set back."""
    job, epoch = key
    if notice is None:
        return {"job": job, "epoch": epoch, "ends": None, "cause": None, "text": None, "seconds": None, "mode": None}
    said = {"cause": notice.cause, "text": notice.text, "seconds": notice.deadline, "mode": mode}
    return {"job": job, "epoch": epoch, "ends": ends, **said}
