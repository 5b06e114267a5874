"""Runs of a job as Poise starts them, by hand: a directory for each, variables, and a lease that can be ended."""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.shell import PATIENCE

from poise.worker.protocol import replace_json


class Job:
    """A job's directory, in which runs are started as Poise starts them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.checkpoints = folder, folder / "checkpoint"
        self.epoch = 0

    @property
    def run_dir(self) -> Path:
        """Of the run that was started last."""
        return self.folder / "runs" / str(self.epoch)

    def start(self, command: Sequence[str], **variables: str) -> subprocess.Popen[str]:
        """Start a run; its first process."""
        self.begin()
        return self.join(command, **variables)

    def join(self, command: Sequence[str], **variables: str) -> subprocess.Popen[str]:
        """Start one more process of the same run."""
        own = {**os.environ, **self.variables, **variables}
        return subprocess.Popen(command, env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def begin(self) -> None:
        """Begin a run that has no processes yet."""
        self.epoch += 1
        self.run_dir.mkdir(parents=True)
        replace_json(str(self.run_dir), "lease.json", {"job": "a", "epoch": self.epoch, "ends": None})

    @property
    def variables(self) -> dict[str, str]:
        """Variables of all processes of the run that was begun last."""
        folders = {"POISE_RUN_DIR": str(self.run_dir), "POISE_CHECKPOINT_DIR": str(self.checkpoints)}
        return {**folders, "POISE_LEASE_VERSION": "1"}

    def end_lease(self) -> None:
        """Ask the run to leave."""
        fields = {"job": "a", "epoch": self.epoch, "ends": 1.0, "cause": "share", "text": "b is behind its share"}
        replace_json(str(self.run_dir), "lease.json", fields)

    def steps(self) -> int:
        """Steps done, as the run reports them."""
        try:
            return int(json.loads((self.run_dir / "progress.json").read_text())["steps"])
        except FileNotFoundError:
            return 0

    def saved(self) -> int:
        """Steps of the newest complete checkpoint."""
        return max((int(path.name[5:]) for path in self.checkpoints.glob("step-*")), default=0)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for a process; its exit code and what it printed, or else complained of."""
    out, err = process.communicate(timeout=PATIENCE)
    return process.returncode, out or err
