"""A fake Poise for tests of a training script: is the result the same after preemptions?

from poise.worker.testing import preempting

def test_training_resumes_exactly():
    with preempting(after_steps=3) as poise:
        weights = poise.run(train, steps=10)
    assert poise.starts == 4
    assert weights == train(steps=10)
"""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, repeat
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from poise.worker.checkpoints import Checkpoints
from poise.worker.protocol import PROGRESS, VERSION, YIELDED, WatchedFile

Answer = TypeVar("Answer")


@contextmanager
def preempting(after_steps: int | Sequence[int]) -> Iterator["Preempting"]:
    """Make a fake Poise that ends the lease of each run after this many steps; a sequence: of the first run, the second, ...

    Runs after the last of a sequence are not preempted. Checkpoints are kept in a directory that is removed at the end.
    """
    with TemporaryDirectory(prefix="poise-") as folder:
        yield Preempting(folder, after_steps)


class Preempting:
    """Starts a training as Poise would, as a single process, again after each preemption, until all work is done.

    starts           how often it was started
    checkpoint_dir   where its checkpoints are
    """

    def __init__(self, folder: str, after_steps: int | Sequence[int]) -> None:
        every = isinstance(after_steps, int)
        limits = [after_steps] if isinstance(after_steps, int) else list(after_steps)
        if not all(limit >= 1 for limit in limits):
            raise ValueError(f"after_steps: expected 1 or more, got {after_steps}")
        self._folder = folder
        self._limits = chain(limits, repeat(limits[0] if every else None))
        self.checkpoint_dir = os.path.join(folder, "checkpoint")
        self.starts = 0

    def run(self, train: Callable[..., Answer], *arguments: Any, **named: Any) -> Answer:  # noqa: ANN401  whatever it takes
        """Call `train(...)` until it returns, and return what it does. Exits with another code than 75 are passed on.

        A loop in another thread than the main one ends the whole process: use `run_command` for that.
        """
        while True:
            saved, variables = self._saved(), self._start()
            before, had_group = dict(os.environ), _group() is not None
            os.environ.update(variables)
            try:
                answer = train(*arguments, **named)
                if not self._has_left():
                    return answer
            except SystemExit as leaving:
                if leaving.code != YIELDED:
                    raise
            finally:
                os.environ.clear()
                os.environ.update(before)
                if not had_group and (group := _group()):
                    group.destroy_process_group()  # a real next start is a new process
            self._require_progress(saved)

    def run_command(self, command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        """Run a command until it exits with another code than 75; return its last run, with what that printed."""
        while True:
            saved, variables = self._saved(), self._start()
            environment = {**os.environ, **variables}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            if done.returncode != YIELDED and not self._has_left():
                return done
            self._require_progress(saved)

    def _start(self) -> dict[str, str]:
        """Return the variables of the next run."""
        self.starts += 1
        self._run_dir = os.path.join(self._folder, "runs", str(self.starts))
        os.makedirs(self._run_dir)
        limit = next(self._limits)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        return {
            "POISE_RUN": f"test/{self.starts}",
            "POISE_JOB": "test",
            "POISE_EPOCH": str(self.starts),
            "POISE_RUN_DIR": self._run_dir,
            "POISE_CHECKPOINT_DIR": self.checkpoint_dir,
            "POISE_LEASE_VERSION": str(VERSION),
            "POISE_LEASE_STEPS": "" if limit is None else str(limit),
            **dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK"), "0"),
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1"),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }

    def _has_left(self) -> bool:
        """Whether the last run was preempted although its script exited with another code than 75."""
        return WatchedFile(self._run_dir, PROGRESS).fields().get("left") is True

    def _saved(self) -> int:
        return max(Checkpoints(self.checkpoint_dir).complete(), default=0)

    def _require_progress(self, before: int) -> None:
        if self._saved() <= before:
            raise AssertionError(
                f"start {self.starts} left with {self._saved()} steps saved, no more than before: it would never end"
            )


def _group() -> Any:  # noqa: ANN401  torch.distributed
    """Return torch.distributed if this process has a process group; a Trainer makes one where RANK is set."""
    found = sys.modules.get("torch.distributed")
    return found if found and found.is_available() and found.is_initialized() else None
