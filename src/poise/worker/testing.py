"""A fake of Poise for the tests of a training script: does it come to the same, preempted and resumed?

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
from poise.worker.protocol import PROGRESS, VERSION, YIELDED, Watched

Answer = TypeVar("Answer")


@contextmanager
def preempting(after_steps: int | Sequence[int]) -> Iterator["Preempting"]:
    """A fake Poise that ends the lease of a run after so many steps: of every run, or of the first, the second, ...

    Runs after the last of a sequence are not preempted. Checkpoints are kept in a directory that goes away at the end.
    """
    with TemporaryDirectory(prefix="poise-") as folder:
        yield Preempting(folder, after_steps)


class Preempting:
    """Starts a training as Poise would, one process alone, again after every preemption, until it has done all its work.

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
        """Call `train(...)` until it returns; what it returns. Exits with another code than 75 come out.

        A loop in another thread than the main one ends the whole process: that is for `run_command`.
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
                    group.destroy_process_group()  # the next start is another process, but for this
            self._require_progress(saved)

    def run_command(self, command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        """Run a command until it exits with another code than 75; its last run, with what that printed."""
        while True:
            saved, variables = self._saved(), self._start()
            environment = {**os.environ, **variables}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            if done.returncode != YIELDED and not self._has_left():
                return done
            self._require_progress(saved)

    def _start(self) -> dict[str, str]:
        """Variables of the next run."""
        self.starts += 1
        run_dir = self._run_dir()
        os.makedirs(run_dir)
        limit = next(self._limits)
        return {
            "POISE_RUN": f"test/{self.starts}",
            "POISE_JOB": "test",
            "POISE_EPOCH": str(self.starts),
            "POISE_RUN_DIR": run_dir,
            "POISE_CHECKPOINT_DIR": self.checkpoint_dir,
            "POISE_LEASE_VERSION": str(VERSION),
            "POISE_LEASE_STEPS": "" if limit is None else str(limit),
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
        }

    def _run_dir(self) -> str:
        return os.path.join(self._folder, "runs", str(self.starts))

    def _has_left(self) -> bool:
        """The last run was preempted, and its script made something else of that than exit code 75."""
        return Watched(self._run_dir(), PROGRESS).fields().get("left") is True

    def _saved(self) -> int:
        return max(Checkpoints(self.checkpoint_dir).complete(), default=0)

    def _require_progress(self, before: int) -> None:
        if self._saved() <= before:
            raise AssertionError(
                f"start {self.starts} left with {self._saved()} steps saved, no more than before: it would never end"
            )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _group() -> Any:  # noqa: ANN401  torch.distributed
    """The module of torch, if this process has a group of ranks; a Trainer makes one of its own where RANK is set."""
    found = sys.modules.get("torch.distributed")
    return found if found and found.is_available() and found.is_initialized() else None
