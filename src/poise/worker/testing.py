"""A fake Poise for tests of a training script: is the result the same after preemptions?

from poise.worker.testing import preempting

def test_training_resumes_exactly():
    with preempting(after_steps=3) as poise:
        weights = poise.run(train, steps=10)
    assert poise.starts == 4
    assert weights == train(steps=10)

def test_script_resumes_on_another_number_of_gpus():
    with preempting(after_steps=3, ranks=[2, 3, 1], micro_batches=4) as poise:
        poise.run_command([sys.executable, "train.py"])
    assert [each.returncode for each in poise.processes] == [0]
"""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, repeat
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeGuard, TypeVar

from poise.worker.checkpoints import Checkpoints
from poise.worker.protocol import PROGRESS, VERSION, YIELDED, WatchedFile, WorkerError
from poise.worker.rank_processes import RankProcesses

Answer = TypeVar("Answer")


@contextmanager
def preempting(
    after_steps: int | Sequence[int],
    *,
    ranks: int | Sequence[int] = 1,
    micro_batches: int | None = None,
    speeds: Sequence[float] | None = None,
    timeout: float = 600.0,
) -> Iterator["Preempting"]:
    """Make a fake Poise that ends the lease of each run after this many steps; a sequence: of the first run, the second, ...

    after_steps     runs after the last of a sequence are not preempted. Several ranks do one step more: they agree in it
    ranks           processes of a run, one per GPU; a sequence: of the first run, the second, ..., the last of all others
    micro_batches   of the job; None: its steps do not divide
    speeds          relative speeds of rank 0, rank 1, ...; a run with fewer ranks takes the first of them; None: all alike
    timeout         seconds after which a run of `run_command` is taken to hang

    Checkpoints are kept in a directory that is removed at the end.
    """
    sizes = _counts("ranks", ranks)
    limits = _counts("after_steps", after_steps)
    if not sizes:
        raise ValueError("ranks: expected at least one number")
    if micro_batches is not None and not _is_count(micro_batches):
        raise ValueError(f"micro_batches: expected 1 or more, got {_shown(micro_batches)}")
    if speeds is not None and not (_holds(speeds, _is_speed) and len(speeds) >= max(sizes)):
        numbers = "1 number" if max(sizes) == 1 else f"{max(sizes)} numbers"
        raise ValueError(f"speeds: expected {numbers} above 0, one per rank, got {_shown(speeds)}")
    if not isinstance(timeout, int | float) or not timeout > 0:
        raise ValueError(f"timeout: expected seconds above 0, got {_shown(timeout)}")
    plan = _RunPlan(
        limits=chain(limits, repeat(limits[0] if isinstance(after_steps, int) else None)),
        sizes=chain(sizes, repeat(sizes[-1])),
        most=max(sizes),
        micro_batches=micro_batches,
        speeds=speeds,
        timeout=timeout,
    )
    with TemporaryDirectory(prefix="poise-") as folder:
        yield Preempting(folder, plan)


class _RunPlan(NamedTuple):
    """What the runs of a job get."""

    limits: Iterator[int | None]  # steps of the lease, by run; None: the lease does not end
    sizes: Iterator[int]  # ranks, by run
    most: int  # ranks of any run
    micro_batches: int | None
    speeds: Sequence[float] | None
    timeout: float


class Preempting:
    """Starts a training as Poise would, again after each preemption, until all work is done.

    starts           how often it was started
    processes        of the last run of a command, by rank: exit codes, and what each has printed
    checkpoint_dir   where its checkpoints are
    """

    def __init__(self, folder: str, plan: _RunPlan) -> None:
        self._folder, self._plan = folder, plan
        self.checkpoint_dir = os.path.join(folder, "checkpoint")
        self.starts = 0
        self.processes: list[subprocess.CompletedProcess[str]] = []

    def run(self, train: Callable[..., Answer], *arguments: Any, **named: Any) -> Answer:  # noqa: ANN401  whatever it takes
        """Call `train(...)` until it returns, and return what it does. Exits with another code than 75 are passed on.

        A loop in another thread than the main one ends the whole process: use `run_command` for that, and for several ranks.
        """
        if self._plan.most > 1:
            raise WorkerError(f"run: a function is one rank, and ranks are up to {self._plan.most}; use run_command")
        while True:
            saved, [variables] = self._saved(), self._start()
            before, had_group = dict(os.environ), _group() is not None
            os.environ.clear()
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
        """Run a command until it ends by itself; return rank 0 of its last run, or of ranks the first that failed.

        It ends by itself when all ranks exit with another code than 75. Where one fails, the others are killed after a
        moment. An AssertionError tells of ranks that hang.
        """
        while True:
            saved, variables = self._saved(), self._start()
            try:
                self.processes = RankProcesses(command, variables, self._run_dir).ended(self._plan.timeout)
            except TimeoutError as error:
                raise AssertionError(f"start {self.starts}: {error}") from None
            codes = [each.returncode for each in self.processes]
            if not (set(codes) <= {0, YIELDED} and YIELDED in codes) and not self._has_left():
                # One that was killed was so for another that failed, unless there is no other.
                return next((each for each in self.processes if each.returncode > 0), self._first_unlike_0())
            self._require_progress(saved)

    def _first_unlike_0(self) -> "subprocess.CompletedProcess[str]":
        return next((each for each in self.processes if each.returncode), self.processes[0])

    def _start(self) -> list[dict[str, str]]:
        """Return the variables of each rank of the next run."""
        self.starts += 1
        self._run_dir = os.path.join(self._folder, "runs", str(self.starts))
        os.makedirs(self._run_dir)
        plan, limit, size = self._plan, next(self._plan.limits), next(self._plan.sizes)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        shared = {
            **{name: value for name, value in os.environ.items() if name not in _STEPS_THAT_DIVIDE},
            "POISE_RUN": f"test/{self.starts}",
            "POISE_JOB": "test",
            "POISE_EPOCH": str(self.starts),
            "POISE_TENANT": "default",
            "POISE_RUN_DIR": self._run_dir,
            "POISE_CHECKPOINT_DIR": self.checkpoint_dir,
            "POISE_GPU_TYPE": "gpu",
            "POISE_GPUS": str(size),
            "POISE_LEASE_VERSION": str(VERSION),
            "POISE_LEASE_STEPS": "" if limit is None else str(limit),
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(size)),
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        if plan.micro_batches is not None:
            shared["POISE_MICRO_BATCHES"] = str(plan.micro_batches)
        if plan.speeds is not None:
            shared["POISE_RANK_SPEEDS"] = ",".join(map(str, plan.speeds[:size]))
        return [{**shared, **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))} for rank in range(size)]

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


_STEPS_THAT_DIVIDE = ("POISE_MICRO_BATCHES", "POISE_RANK_SPEEDS")  # not set where they do not


def _counts(name: str, given: int | Sequence[int]) -> list[int]:
    if _is_count(given):
        return [given]
    if not _holds(given, _is_count):
        raise ValueError(f"{name}: expected 1 or more, got {_shown(given)}")
    return list(given)


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_speed(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


def _holds(values: object, kind: Callable[[object], bool]) -> TypeGuard[Sequence[Any]]:
    """Say whether it is a sequence of this kind of values."""
    return isinstance(values, Sequence) and all(map(kind, values))


def _shown(value: object) -> str:
    return " ".join(f"{value!r:.60}".split())


def _group() -> Any:  # noqa: ANN401  torch.distributed
    """Return torch.distributed if this process has a process group; a Trainer makes one where RANK is set."""
    found = sys.modules.get("torch.distributed")
    return found if found and found.is_available() and found.is_initialized() else None
