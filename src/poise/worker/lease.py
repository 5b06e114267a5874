"""The lease of one process on its GPUs, as a training loop sees it.

A boundary is the moment between two steps: `step` steps are done, and step number `step` comes next. At each, the lease
reports, looks whether it ends, and has a checkpoint written if one is due. Rank 0 alone reports and writes; all ranks load.
"""

import operator
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from enum import Enum
from time import monotonic
from types import FrameType
from typing import NoReturn, SupportsFloat

from poise.worker.checkpoints import Checkpoints
from poise.worker.micro_batches import share
from poise.worker.progress import Progress
from poise.worker.protocol import (
    CHECKPOINT_FAILED,
    LEASE,
    SAVE,
    STOP,
    YIELDED,
    Notice,
    Watched,
    WorkerEnv,
    WorkerError,
    notice_in,
    replace_json,
    say,
    say_traceback,
    step_in,
    tell_failure,
    worker_env,
)
from poise.worker.rank_state import Ranks

# Boundaries at which all ranks do the same thing, agreed on without a message between them.
#
# Rank 0 decides. Alone, it acts at once. With others, it publishes the boundary after the next step before it does that
# step:
# in synchronous training nobody can complete a step without rank 0, so everybody has read of it when it comes.


class StepBarrier:
    """One thing that all ranks are to do at the same boundary. Steps never go back."""

    def __init__(self, where: WorkerEnv, name: str) -> None:
        self._where, self._name = where, name
        self._watched = Watched(where.run_dir, name)
        self._at: int | None = None
        self._kept: int | None = None

    def due(self, step: int, is_wanted: Callable[[int], bool]) -> bool:
        """Whether the boundary has come. `is_wanted` is asked on rank 0 alone, until it is."""
        if self._where.rank:
            at = step_in(self._watched.fields())
            self._at = None if at == self._kept else at
        elif self._at is None and is_wanted(step):
            self._at = self._decided(step)
        return self._at is not None and step >= self._at

    def keep(self) -> None:
        """It was done; there may be another."""
        self._kept, self._at = self._at, None

    def _decided(self, step: int) -> int | None:
        if self._where.world_size == 1 or self._where.run_dir is None:
            return step
        try:
            replace_json(self._where.run_dir, self._name, {"step": step + 1})
        except OSError as error:
            say(f"the other ranks cannot be told to stop or save, so this one goes on: {error}")
            return None
        return step + 1


Use = Callable[[str], object]
"""Takes the path of a checkpoint, and writes or reads it."""


_loops: dict[tuple[int, str, int], object] = {}
"""The lease whose checkpoints are those of a job, by process, run and rank."""


class StopRequest(Enum):
    """What is to be done at a boundary: go on; have a checkpoint written and go on; or have one written and leave."""

    GO_ON = "go on"
    CHECKPOINT = "checkpoint"
    LEAVE = "leave"


class Writers(Enum):
    """Which ranks call `save`: rank 0 alone; or all, with the same path, for checkpoints in pieces.

    With ALL, `save` must not return on rank 0 before the other ranks have written their pieces.
    """

    FIRST = "first"
    ALL = "all"


def attach(
    save: Use | None = None,
    load: Use | None = None,
    *,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    checkpoint_every: float | None = None,
    writers: Writers = Writers.FIRST,
) -> "Lease":
    """The lease of this process, from its environment.

    save               `save(path)` writes the whole training state to a new file or directory at just that path
    load               `load(path)` reads it; what follows is then as if training had never stopped
    checkpoint_dir     where checkpoints are kept outside Poise; None: nothing is saved there. Inside, Poise says where
    checkpoint_every   seconds between checkpoints that nobody asked for, unless the job says otherwise; None: none

    Without `save` and `load` the loop begins at step 0 whenever it is started.
    """
    if (save is None) != (load is None):
        raise WorkerError("attach: give both save and load, or neither")
    if checkpoint_every is not None and not checkpoint_every > 0:
        raise WorkerError(f"attach: checkpoint_every: expected seconds above 0, got {checkpoint_every}")
    found = worker_env(os.environ)
    if found.checkpoint_dir is None and checkpoint_dir is not None:
        found = found._replace(checkpoint_dir=os.fspath(checkpoint_dir))
    if found.checkpoint_every is None:
        found = found._replace(checkpoint_every=checkpoint_every)
    if writers is Writers.ALL and found.run_dir is None and found.world_size > 1 and found.checkpoint_every is not None:
        raise WorkerError("attach: checkpoint_every: outside Poise, ranks that all write cannot agree on a step")
    return Lease(found, save, load, writers)


class Lease:
    """One process's lease. Made by `attach`; good for one training loop.

    Most scripts need `steps` alone. Loops of others (Lightning's, a Trainer's) call `begin` once, `wish` at every boundary,
    `checkpoint` or `leave` when that says so, and `finish` at the end.
    """

    def __init__(self, where: WorkerEnv, save: Use | None, load: Use | None, writers: Writers) -> None:
        self._where, self._writers = where, writers
        self._save, self._load = save, load
        self._checkpoints = None if where.checkpoint_dir is None else Checkpoints(where.checkpoint_dir)
        self._ranks = Ranks(where)
        self._progress = Progress(where.run_dir if where.rank == 0 else None)
        self._lease = Watched(where.run_dir, LEASE)
        self._stop, self._saving = StepBarrier(where, STOP), StepBarrier(where, SAVE)
        self._notice: Notice | None = None
        self._first: int | None = None
        self._kept = 0
        self._tried: int | None = None
        self._last_save = monotonic()
        self._restore: Callable[[], object] = lambda: None
        self._mark = object()  # not the lease itself: what it saves is to be forgotten with it

    @property
    def rank(self) -> int:
        """Of this process, from 0."""
        return self._where.rank

    @property
    def world_size(self) -> int:
        """Processes of the job."""
        return self._where.world_size

    @property
    def micro_batches(self) -> int:
        """Parts that a step of the job divides into; one a rank if the job does not say."""
        return self._where.micro_batches or self._where.world_size

    def share(self, parts: int | None = None) -> range:
        """Those of `parts` micro-batches (None: of the job's) that are this rank's; all ranks together have each once."""
        speeds = self._where.rank_speeds or (1.0,) * self.world_size
        return share(self.micro_batches if parts is None else parts, self.rank, speeds)

    def steps(self, total: int) -> Iterator[int]:
        """The steps that are left of 0 .. total - 1. When the lease ends: saves, and exits with code 75.

        After the last step a checkpoint is written: a process that dies between the loop and its exit does not train again.
        """
        count = operator.index(total)
        if count < 0:
            raise WorkerError(f"steps: expected 0 or more, got {count}")
        if self._first is not None:
            raise WorkerError("steps: this lease has had its loop; count all steps of the training in one")
        if self._save is None:
            self._checkpoints = None
        return self._loop(count)

    def _loop(self, total: int) -> Iterator[int]:
        self._require_only_loop()
        step = self._resumed()
        self.begin(step, total)
        try:
            while step < total:
                wish = self.wish(step)
                if wish is StopRequest.LEAVE:
                    self.leave(step, self._save)
                elif wish is StopRequest.CHECKPOINT:
                    self.checkpoint(step, self._save)
                yield step
                step += 1
            self.finish(step, self._save)
        finally:
            self._restore()

    def report(self, *, loss: SupportsFloat) -> None:
        """Say how training goes; shown with the next report of progress."""
        # A tensor that is part of a graph warns when it is made a float, and has this method.
        self._progress.loss = float(loss.item() if hasattr(loss, "item") else loss)

    def preemption_notice(self) -> Notice | None:
        """Why, and by when, this process is to leave; None: it is not."""
        if self._notice is None:
            self._notice = notice_in(self._lease.fields())
        return self._notice

    def newest(self) -> str | None:
        """Path of the newest complete checkpoint, for loops of others to begin from; None: there is none."""
        if self._checkpoints is None:
            return None
        return next((self._checkpoints.path(step) for step in self._checkpoints.complete()), None)

    def restore_generators(self, step: int) -> bool:
        """Have this rank's random generators go on as in the checkpoint of `step` steps; whether that has them.

        Checkpoints of several ranks inside Poise have those of each. A rank that was not there gets a stream of its own.
        """
        return self._checkpoints is not None and self._ranks.restore(self._checkpoints.ranks(step), step)

    def begin(self, step: int, total: int | None) -> None:
        """The first step of this run begins, with `step` done before. total: steps in all, to be shown; None: not known."""
        self._require_only_loop()
        self._first, self._kept = step, step
        if self._checkpoints is not None:
            self._progress.checkpoint = step
            self._ranks.begin()
            if self.rank == 0:
                self._checkpoints.sweep()
        if self._where.run_dir is not None and _in_main_thread():
            self._hear_term()
        self._last_save = monotonic()
        self._progress.begin(step, total)

    def wish(self, step: int) -> StopRequest:
        """What is to be done at this boundary, the same on all ranks. Reports progress.

        After the last step there is nothing to leave for: whoever knows that it was the last goes on to `finish`.
        """
        self._progress.reached(step)
        if self._stop.due(step, self._is_over):
            return StopRequest.LEAVE
        if self._saving.due(step, self._is_stale):
            self._saving.keep()
            return StopRequest.CHECKPOINT
        return StopRequest.GO_ON

    def checkpoint(self, step: int, save: Use | None) -> None:
        """Have rank 0 write a checkpoint of `step` steps. If that fails it is said, and the older ones go on to count."""
        try:
            self._write(step, save)
        except Exception as error:
            say_traceback()
            say(f"the checkpoint of {step} steps failed ({_told(error)}); going on, {self._survives()}")

    def leave(self, step: int, save: Use | None) -> NoReturn:
        """Have rank 0 write a checkpoint of `step` steps, and exit with code 75; with 73 if that fails."""
        try:
            self._write(step, save)
        except Exception as error:
            say_traceback()
            self._fail(f"the checkpoint of {step} steps failed at the end of the lease: {_told(error)}")
        self._progress.left(step)
        notice = self._notice or Notice(None, "lease-end", "rank 0 says so")
        if self.rank == 0:
            say(f"leaving before step {step} ({notice.text}); {self._survives()}")
        _exit(YIELDED)

    def finish(self, step: int, save: Use | None) -> None:
        """All steps are done: write a last checkpoint and report."""
        self.checkpoint(step, save)
        self._progress.write(step)
        self._restore()

    def _require_only_loop(self) -> None:
        """A second loop would take the checkpoints of the first for its own, and skip its steps."""
        if self._where.run_dir is None or self._checkpoints is None:
            return
        whose = _loops.setdefault((os.getpid(), self._where.run_dir, self.rank), self._mark)
        if whose is not self._mark:
            raise WorkerError("a job has one training loop: count all its steps in one, or submit the second as its own job")

    def _survives(self) -> str:
        if self._checkpoints is None:
            return "nothing is saved by this script"
        return "1 step is saved" if self._kept == 1 else f"{self._kept} steps are saved"

    def _write(self, step: int, save: Use | None) -> None:
        if self._checkpoints is None or save is None or step == self._kept:
            return
        if self._writers is Writers.ALL:
            # Ranks wait for each other in `save`: it is called on all or on none, whatever came of the last time on each.
            if step == self._tried:
                return
            self._tried = step
        self._ranks.tell(step)  # before `save`, which may draw random numbers
        if self.rank == 0:
            self._write_here(self._checkpoints, step, save)
        elif self._writers is Writers.ALL:
            save(self._checkpoints.part(step))

    def _write_here(self, checkpoints: Checkpoints, step: int, save: Use) -> None:
        began = monotonic()
        try:
            checkpoints.write(step, save, lambda: self._ranks.gathered(step))
            self._kept = self._progress.checkpoint = step
        finally:
            self._last_save = monotonic()
            self._progress.paused(self._last_save - began)
        self._progress.write(step)

    def _resumed(self) -> int:
        """Load the newest checkpoint that can be loaded; the steps that it contains. Never begins anew if there is one."""
        if self._checkpoints is None or self._load is None:
            return 0
        steps = self._checkpoints.complete()
        for place, step in enumerate(steps):
            try:
                self._load(self._checkpoints.path(step))
            except Exception as error:
                say_traceback()
                say(f"the checkpoint of {step} steps cannot be loaded: {_told(error)}")
                if self.world_size > 1:
                    self._fail_together(steps)
            else:
                for unusable in steps[:place]:
                    self._checkpoints.set_aside(unusable)
                self.restore_generators(step)
                return step
        if steps:
            self._fail(f"none of the checkpoints can be loaded (of {', '.join(map(str, steps))} steps)")
        return 0

    def _fail_together(self, steps: list[int]) -> NoReturn:
        """Ranks that fall back each by itself could begin at different steps: leave, and begin anew with the one before.

        The first rank that finds out sets it aside: the others may be told to leave before they come to it.
        """
        if self._checkpoints is not None and len(steps) > 1:
            self._checkpoints.set_aside(steps[0])
            self._fail(f"the checkpoint of {steps[0]} steps cannot be loaded; the next run begins with {steps[1]} steps")
        self._fail(f"rank {self.rank} cannot load the checkpoint of {steps[0]} steps")

    def _fail(self, text: str) -> NoReturn:
        say(text)
        tell_failure(self._where.run_dir, text)
        _exit(CHECKPOINT_FAILED)

    def _is_over(self, step: int) -> bool:
        allowed = self._where.lease_steps
        if allowed is not None and self._first is not None and step >= self._first + allowed:
            self._notice = self._notice or Notice(None, "lease-steps", f"POISE_LEASE_STEPS is {allowed}")
        return self.preemption_notice() is not None

    def _is_stale(self, step: int) -> bool:
        every = self._where.checkpoint_every
        if every is None or self._checkpoints is None or step == self._kept:
            return False
        return monotonic() >= self._last_save + every

    def _hear_term(self) -> None:
        """From now on TERM means: leave at the next boundary. Child processes still die of it."""
        before, process = signal.getsignal(signal.SIGTERM), os.getpid()

        def hear(number: int, frame: FrameType | None) -> None:
            if os.getpid() == process:
                self._notice = self._notice or Notice(None, "term", "the process was sent TERM")
            else:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)

        def restore() -> None:
            if signal.getsignal(signal.SIGTERM) is hear and _in_main_thread():
                signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)

        signal.signal(signal.SIGTERM, hear)
        self._restore = restore


def _in_main_thread() -> bool:
    """Nobody else may say what a signal does."""
    return threading.current_thread() is threading.main_thread()


def _exit(code: int) -> NoReturn:
    """End the process. From another thread than the main one an exception would end that thread alone."""
    if _in_main_thread():
        raise SystemExit(code)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _told(error: Exception) -> str:
    """An error on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())
