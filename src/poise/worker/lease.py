"""The lease of one process on its GPUs, as a training loop sees it.

A *boundary* is the point between two steps: `step` steps are done, and step number `step` comes next. At each boundary the
lease reports progress, checks whether it ends, and has a checkpoint written if one is due. Rank 0 alone reports and writes;
all ranks load. All ranks do the same thing at the same boundary (`StepBarrier`).
"""

import operator
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from enum import Enum
from time import monotonic, sleep
from types import FrameType
from typing import NoReturn, SupportsFloat

from poise.worker import protocol
from poise.worker.checkpoints import Checkpoints
from poise.worker.micro_batches import MicroBatches
from poise.worker.progress import Progress
from poise.worker.protocol import Notice, WatchedFile, WorkerEnv, WorkerError, say
from poise.worker.rank_state import RankStates

UsePath = Callable[[str], object]  # takes the path of a checkpoint, and writes or reads it
POLL_SECONDS = 0.002  # between two looks at whether other nodes know what rank 0 has decided

_loops: dict[tuple[int, str, int], object] = {}
"""Which lease uses a job's checkpoints, by process, run directory and rank (`Lease._require_only_loop`)."""


class StopRequest(Enum):
    """What to do at a boundary: go on; write a checkpoint and go on; or write one and leave."""

    GO_ON = "go on"
    CHECKPOINT = "checkpoint"
    LEAVE = "leave"


class Writers(Enum):
    """Which ranks call `save`: rank 0 alone; or all, with the same path, for sharded checkpoints.

    With ALL, `save` must not return on rank 0 before the other ranks have written their shards.
    """

    FIRST = "first"
    ALL = "all"


def attach(
    save: UsePath | None = None,
    load: UsePath | None = None,
    *,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    checkpoint_every: float | None = None,
    writers: Writers = Writers.FIRST,
) -> "Lease":
    """Return the lease of this process, from its environment.

    save               `save(path)` writes the whole training state to a new file or directory at exactly that path
    load               `load(path)` reads it; what follows is then as if training had never stopped
    checkpoint_dir     where checkpoints are kept outside Poise; None: nothing is saved there. Inside, Poise says where
    checkpoint_every   seconds between periodic checkpoints, unless the job says otherwise; None: no periodic checkpoints

    Without `save` and `load` the loop begins at step 0 at each start.
    """
    if (save is None) != (load is None):
        raise WorkerError("attach: give both save and load, or neither")
    if checkpoint_every is not None and not checkpoint_every > 0:
        raise WorkerError(f"attach: checkpoint_every: expected seconds above 0, got {checkpoint_every}")
    env = protocol.worker_env(os.environ)
    if env.checkpoint_dir is None and checkpoint_dir is not None:
        env = env._replace(checkpoint_dir=os.fspath(checkpoint_dir))
    if env.checkpoint_every is None:
        env = env._replace(checkpoint_every=checkpoint_every)
    if writers is Writers.ALL and env.run_dir is None and env.world_size > 1 and env.checkpoint_every is not None:
        raise WorkerError("attach: checkpoint_every: outside Poise, ranks that all write cannot agree on a step")
    return Lease(env, save, load, writers)


class Lease:
    """One process's lease. Made by `attach`; good for one training loop.

    Most scripts need only `steps`. Integrations of frameworks that own the loop call `begin` once, `check` at each boundary,
    `checkpoint` or `leave` when it says so, and `finish` at the end.
    """

    def __init__(self, env: WorkerEnv, save: UsePath | None, load: UsePath | None, writers: Writers) -> None:
        self._env, self._writers = env, writers
        self._save, self._load = save, load
        self._checkpoints = None if env.checkpoint_dir is None else Checkpoints(env.checkpoint_dir)
        self._rank_states = RankStates(env)
        self._progress = Progress(env.run_dir if env.rank == 0 else None)
        self._lease_file = WatchedFile(env.run_dir, protocol.LEASE)
        self._stopping, self._saving = (
            StepBarrier(env, name, self._is_cut_short) for name in (protocol.STOP, protocol.SAVE)
        )
        self._notice: Notice | None = None
        self._got_term = False
        self._first: int | None = None  # steps done when this run began; None: it has not
        self._saved = 0  # steps of the last checkpoint
        self._tried: int | None = None  # step of the last `save` on all ranks, whatever came of it
        self._last_save = monotonic()
        self._restore_term: Callable[[], object] = lambda: None
        self._micro_batches = MicroBatches(env, lambda loss: self.report(loss=loss))
        self._loop_token = object()  # not the lease itself: `_loops` must not keep what the lease saves alive

    @property
    def rank(self) -> int:
        """Rank of this process, from 0."""
        return self._env.rank

    @property
    def world_size(self) -> int:
        """Number of processes of the job."""
        return self._env.world_size

    @property
    def micro_batches(self) -> MicroBatches:
        """Number of micro-batches per step; one per rank if the job does not say.

        Call it with a batch and a model of PyTorch to compute this rank's parts: see `MicroBatches`.
        """
        return self._micro_batches

    def share(self, parts: int | None = None) -> range:
        """Return this rank's share of `parts` micro-batches (None: of the job's); all ranks together have each once."""
        return self._micro_batches.share(parts)

    def steps(self, total: int) -> Iterator[int]:
        """Yield the steps that are left of 0 .. total - 1. When the lease ends: saves, and exits with code 75.

        After the last step a checkpoint is written: a process that dies between the loop and its exit does not train again.
        """
        count = operator.index(total)
        if count < 0:
            raise WorkerError(f"steps: expected 0 or more, got {count}")
        if self._first is not None:
            raise WorkerError("steps: this lease has had its loop; count all steps of the training in one")
        if self._save is None:
            self._checkpoints = None
        return self._loop(count)  # a generator of its own, so that the checks above are made at the call

    def _loop(self, total: int) -> Iterator[int]:
        self._require_only_loop()
        step = self._load_newest()
        self.begin(step, total)
        try:
            while step < total:
                request = self.check(step)
                if request is StopRequest.LEAVE:
                    self.leave(step, self._save)
                elif request is StopRequest.CHECKPOINT:
                    self.checkpoint(step, self._save)
                yield step
                step += 1
            self._micro_batches.require_complete()
            self.finish(step, self._save)
        finally:
            self._restore_term()

    def report(self, *, loss: SupportsFloat) -> None:
        """Report the loss; shown with the next report of progress."""
        # A tensor that is part of a graph warns when it is made a float, and has this method.
        self._progress.loss = float(loss.item() if hasattr(loss, "item") else loss)

    def preemption_notice(self) -> Notice | None:
        """Return why, and by when, this process has to leave; None: it does not."""
        if self._notice is None:
            found = protocol.notice_in(self._lease_file.fields())
            if found is not None:  # else TERM, which may have come meanwhile, would be forgotten
                self._notice = found
        return self._notice

    def newest(self) -> str | None:
        """Return the path of the newest complete checkpoint, for a framework to resume from; None: there is none."""
        if self._checkpoints is None:
            return None
        return next((self._checkpoints.path(step) for step in self._checkpoints.complete()), None)

    def restore_generators(self, step: int) -> bool:
        """Restore this rank's random generators from the checkpoint of `step` steps; False: it has none.

        Checkpoints of several ranks inside Poise have those of each. A rank that was not there gets a stream of its own.
        """
        return self._checkpoints is not None and self._rank_states.restore(self._checkpoints.ranks(step), step)

    def begin(self, step: int, total: int | None) -> None:
        """Begin the run's first step, with `step` steps done before.

        total   steps in all, to be shown; None: not known
        """
        self._require_only_loop()
        self._first, self._saved = step, step
        if self._checkpoints is not None:
            self._progress.checkpoint = step
            self._rank_states.begin()
            if self.rank == 0:
                self._checkpoints.sweep()
        if self._env.run_dir is not None and _in_main_thread():
            self._handle_term()
        self._last_save = monotonic()
        self._progress.begin(step, total)

    def check(self, step: int) -> StopRequest:
        """Report progress, and return what to do at this boundary: the same on all ranks.

        A loop that knows that this was the last step goes on to `finish`: there is nothing to leave for.
        """
        self._micro_batches.begin_step(step)
        self._progress.reached(step)
        if self._stopping.is_due(step, self._is_over):
            return StopRequest.LEAVE
        if self._saving.is_due(step, self._is_checkpoint_due):
            self._saving.reset()
            return StopRequest.CHECKPOINT
        return StopRequest.GO_ON

    wish = check  # its name in version 0.1

    def checkpoint(self, step: int, save: UsePath | None) -> None:
        """Have rank 0 write a checkpoint of `step` steps. A failure is logged, and the older checkpoints still count."""
        try:
            self._write(step, save)
        except Exception as error:
            protocol.say_traceback()
            say(f"the checkpoint of {step} steps failed ({_one_line(error)}); going on, {self._saved_text()}")

    def leave(self, step: int, save: UsePath | None) -> NoReturn:
        """Have rank 0 write a checkpoint of `step` steps, and exit with code 75; with 73 if that fails."""
        try:
            self._write(step, save)
        except Exception as error:
            protocol.say_traceback()
            self._fail(f"the checkpoint of {step} steps failed at the end of the lease: {_one_line(error)}")
        self._progress.left(step)
        notice = self._notice or Notice(None, "lease-end", "rank 0 says so")
        if self.rank == 0:
            say(f"leaving before step {step} ({notice.text}); {self._saved_text()}")
        _exit(protocol.YIELDED)

    def finish(self, step: int, save: UsePath | None) -> None:
        """Write a last checkpoint and report: all steps are done."""
        self.checkpoint(step, save)
        self._progress.write(step)
        self._restore_term()

    def _require_only_loop(self) -> None:
        """Refuse a second loop: it would take the checkpoints of the first for its own, and skip its steps."""
        if self._env.run_dir is None or self._checkpoints is None:
            return
        owner = _loops.setdefault((os.getpid(), self._env.run_dir, self.rank), self._loop_token)
        if owner is not self._loop_token:
            raise WorkerError("a job has one training loop: count all its steps in one, or submit the second as its own job")

    def _saved_text(self) -> str:
        if self._checkpoints is None:
            return "nothing is saved by this script"
        return "1 step is saved" if self._saved == 1 else f"{self._saved} steps are saved"

    def _write(self, step: int, save: UsePath | None) -> None:
        if self._checkpoints is None or save is None or step == self._saved:
            return
        if self._writers is Writers.ALL:
            # Ranks wait for each other in `save`: it is called on all or on none, whatever came of the last time on each.
            if step == self._tried:
                return
            self._tried = step
        self._rank_states.publish(step)  # before `save`, which may draw random numbers
        if self.rank == 0:
            began = monotonic()
            try:
                self._checkpoints.write(step, save, lambda: self._rank_states.gather(step))
                self._saved = self._progress.checkpoint = step
            finally:
                self._last_save = monotonic()
                self._progress.paused(self._last_save - began)
            self._progress.write(step)
        elif self._writers is Writers.ALL:
            save(self._checkpoints.part(step))

    def _load_newest(self) -> int:
        """Load the newest checkpoint that can be loaded, and return its steps. Never begins anew if there is one."""
        if self._checkpoints is None or self._load is None:
            return 0
        steps = self._checkpoints.complete()
        for place, step in enumerate(steps):
            try:
                self._load(self._checkpoints.path(step))
            except Exception as error:
                protocol.say_traceback()
                say(f"the checkpoint of {step} steps cannot be loaded: {_one_line(error)}")
                if self.world_size > 1:
                    # Ranks that fall back each by itself could begin at different steps. So the first rank that finds out
                    # sets the checkpoint aside for all, and the job starts again with the one before.
                    if len(steps) == 1:
                        self._fail(f"rank {self.rank} cannot load the checkpoint of {step} steps")
                    self._checkpoints.set_aside(step)
                    self._fail(f"the checkpoint of {step} steps cannot be loaded; the next run begins with {steps[1]} steps")
            else:
                for unusable in steps[:place]:
                    self._checkpoints.set_aside(unusable)
                self.restore_generators(step)
                return step
        if steps:
            self._fail(f"none of the checkpoints can be loaded (of {', '.join(map(str, steps))} steps)")
        return 0

    def _fail(self, text: str) -> NoReturn:
        say(text)
        if self._env.run_dir is not None:
            with suppress(OSError):  # a full disk may be what is wrong
                fields = {"cause": protocol.CHECKPOINT_CAUSE, "text": text}
                protocol.replace_json(self._env.run_dir, protocol.FAILURE, fields)
        _exit(protocol.CHECKPOINT_FAILED)

    def _is_over(self, step: int) -> bool:
        allowed = self._env.lease_steps
        if allowed is not None and self._first is not None and step >= self._first + allowed:
            self._notice = self._notice or Notice(None, "lease-steps", f"POISE_LEASE_STEPS is {allowed}")
        return self.preemption_notice() is not None

    def _is_checkpoint_due(self, step: int) -> bool:
        every = self._env.checkpoint_every
        if every is None or self._checkpoints is None or step == self._saved:
            return False
        return monotonic() >= self._last_save + every

    def _is_cut_short(self) -> bool:
        """Whether TERM has come, so that there is no time to agree with ranks on nodes that do not answer."""
        if self._got_term:
            self._rank_states.hurry()
        return self._got_term

    def _handle_term(self) -> None:
        """From now on TERM means: leave at the next boundary. Child processes still die of it."""
        before, process = signal.getsignal(signal.SIGTERM), os.getpid()

        def handler(number: int, frame: FrameType | None) -> None:
            if os.getpid() == process:
                self._got_term = True
                self._notice = self._notice or Notice(None, "term", "the process was sent TERM")
            else:  # a fork, such as a worker of a data loader, has inherited this handler
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)

        def restore() -> None:
            if signal.getsignal(signal.SIGTERM) is handler and _in_main_thread():
                signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)

        signal.signal(signal.SIGTERM, handler)
        self._restore_term = restore


class StepBarrier:
    """One thing that all ranks do at the same boundary, agreed on without a message between them.

    Rank 0 decides. Alone, it acts at once. With others, it publishes the boundary after the next step before it takes that
    step: in synchronous training no rank can complete a step without rank 0, so all have read the file when the boundary
    comes. Steps never go back.

    Other nodes get the file from their agents, so rank 0 waits before that step until all of them have it. If it is cut
    short in that, a node has gone or does not answer, and no step will ever be completed with it: rank 0 acts at once.
    """

    def __init__(self, env: WorkerEnv, name: str, is_cut_short: Callable[[], bool] = lambda: False) -> None:
        self._env, self._name, self._is_cut_short = env, name, is_cut_short
        self._file = WatchedFile(env.run_dir, name)
        self._acknowledged = WatchedFile(env.run_dir, protocol.acknowledged(name)) if env.nodes > 1 else None
        self._at: int | None = None
        self._past: int | None = None  # the last boundary that was done: its file is still there

    def is_due(self, step: int, is_wanted: Callable[[int], bool]) -> bool:
        """Whether the boundary has come. `is_wanted` is asked on rank 0 only, until it says yes."""
        if self._env.rank:
            at = self._file.fields().get("step")
            self._at = at if isinstance(at, int) and at != self._past else None
        elif self._at is None and is_wanted(step):
            if self._env.world_size == 1 or self._env.run_dir is None:
                self._at = step
            else:
                try:
                    protocol.replace_json(self._env.run_dir, self._name, {"step": step + 1})
                    self._at = step + 1 if self._is_known_everywhere(step + 1) else step
                except OSError as error:
                    say(f"the other ranks cannot be told to stop or save, so this one goes on: {error}")
        return self._at is not None and step >= self._at

    def _is_known_everywhere(self, step: int) -> bool:
        """Wait until all nodes have the file; False: it was cut short."""
        if self._acknowledged is not None:
            while self._acknowledged.fields().get("step") != step:
                if self._is_cut_short():
                    return False
                sleep(POLL_SECONDS)
        return True

    def reset(self) -> None:
        """Note that it was done; there may be another."""
        self._past, self._at = self._at, None


def _in_main_thread() -> bool:
    """Whether this is the main thread, the only one that may set signal handlers."""
    return threading.current_thread() is threading.main_thread()


def _exit(code: int) -> NoReturn:
    """End the process. From another thread than the main one, SystemExit would end that thread only."""
    if _in_main_thread():
        raise SystemExit(code)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
