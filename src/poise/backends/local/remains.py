"""What is left of a run whose runner has gone, and what is told of it."""

import os
from contextlib import suppress

from poise.backends.local.endings import UNREADABLE, lost_fields, number, runner_in
from poise.backends.local.folders import Folders
from poise.backends.local.occupancy import LocalRun
from poise.backends.local.orders import replica_count
from poise.backends.local.processes import belongs, boot, children, kill_where, opened, start_of
from poise.backends.local.records import LOST, RUNNER, Fields, now
from poise.backends.local.spawning import reap
from poise.engine.live import Ending, Grip, RunEnded

RUN_DIR = b"POISE_RUN_DIR"


def living_runner(folders: Folders, run: LocalRun) -> tuple[int, int] | None:
    """The pid and a handle of a run's runner; None: runner.json names none that lives and bears the run's mark."""
    known = runner_in(folders.get(*run.key, RUNNER))
    if known is None or not belongs(known.pid, _mark(folders, run), {}):
        return None
    handle = opened(known.pid, known.start)
    return None if handle is None else (known.pid, handle)


def kill_left(folders: Folders, run: LocalRun) -> int:
    """KILL whatever belongs to a run, and say how many processes there were. OSError: not all could be looked at."""
    # Of a run whose files were this service's undoing, none is read again.
    known = None if run.fault is not None else runner_in(folders.get(*run.key, RUNNER))
    groups = dict(known.replicas) if known is not None and known.boot == boot() else {}
    mark = _mark(folders, run)
    return kill_where(lambda pid: belongs(pid, mark, groups))


def _mark(folders: Folders, run: LocalRun) -> bytes:
    return RUN_DIR + b"=" + os.fsencode(folders.run_path(*run.key))


def is_only_writing(run: LocalRun) -> bool:
    """Nothing is left of a run but its runner; also if that cannot be found out just now.

    Whatever lost its parent there is the runner's child. A runner that hangs is found by its silence.
    """
    try:
        return not children(run.pid)
    except OSError:
        return True


def lost(folders: Folders, run: LocalRun) -> Fields:
    """What exit.json would say of a run that began, and whose runner has not said how it ended."""
    replicas = 0 if run.order is None else replica_count(run.order)
    died = run.died if run.died is not None else folders.last_sign(*run.key)
    # A runner that was killed is no fault of the job. One that left by itself was kept from writing.
    cause = LOST if run.code is None or run.code < 0 else UNREADABLE
    began = number((folders.get(*run.key, RUNNER) or {}).get("began"))
    return lost_fields(began, died, replicas, run.grip, cause)


def faulted(run: LocalRun) -> RunEnded:
    """The end of a run at which this service did something wrong."""
    if run.grip is Grip.RUN:
        return RunEnded(*run.key, now(), Ending.FAILED, None, run.fault, ())
    return RunEnded(*run.key, now(), Ending.YIELDED, None, "KILL", ())


def bury(folders: Folders, run: LocalRun) -> None:
    """A runner that this world never watched may still be a child of this process, started by a world before it."""
    runner = None if run.pid else runner_in(folders.get(*run.key, RUNNER))
    with suppress(OSError):
        if runner is not None and start_of(runner.pid) == runner.start:
            reap(runner.pid)
