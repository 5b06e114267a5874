"""Ranks of a training as real processes, forked from one that has imported the frameworks, which takes seconds."""

import multiprocessing
import os
import runpy
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.leases import Job
from tests.shell import PATIENCE

_FORKING = multiprocessing.get_context("forkserver")
_FRAMEWORKS = ["lightning.pytorch", "transformers.trainer"]  # left out where they are not installed
_FORKING.set_forkserver_preload(["torch", "torch._dynamo", "torch.distributed", "numpy", *_FRAMEWORKS])


class Rank:
    """A process that runs a script. What it prints goes to a file."""

    def __init__(self, script: Path, variables: dict[str, str], log: Path) -> None:
        self._log = log
        self._process = _FORKING.Process(target=_run, args=(str(script), variables, str(log)), daemon=True)
        self._process.start()

    @property
    def is_alive(self) -> bool:
        """Whether it runs still."""
        return self._process.is_alive()

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self._process.pid is not None
        return self._process.pid

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        self._process.kill()

    def ended(self) -> tuple[int, str]:
        """Wait for its end; the exit code, a signal negative, and what it printed."""
        self._process.join(PATIENCE)
        assert self._process.exitcode is not None, f"it hangs: {self._log.read_text()}"
        return self._process.exitcode, self._log.read_text()


def start_ranks(job: Job, script: Path, ranks: int, **variables: str) -> list[Rank]:
    """Start a run of several processes, which find each other as those of torchrun do."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    sizes = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": "0"}
    job.begin()
    every = {**job.variables, **sizes, **meeting, **variables}
    return [
        Rank(script, {**every, "RANK": str(rank), "LOCAL_RANK": str(rank)}, job.run_dir / f"{rank}.log")
        for rank in range(ranks)
    ]


def all_ended(ranks: Sequence[Rank]) -> list[tuple[int, str]]:
    """Wait for all ranks of a run. None is left behind if one hangs."""
    try:
        return [each.ended() for each in ranks]
    finally:
        for each in ranks:
            each.kill()


def _run(script: str, variables: dict[str, str], log: str) -> None:
    handle = os.open(log, os.O_WRONLY | os.O_CREAT, 0o600)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(handle, stream.fileno())
    os.environ.update(variables)
    sys.argv[:] = [script]
    runpy.run_path(script, run_name="__main__")
