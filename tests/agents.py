"""Agents as processes of their own, for what is measured and for what is killed."""

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from time import monotonic, sleep

from tests.shell import COMMAND, PATIENCE

from poise.service.agent.node_state import LEASE

TICKS = os.sysconf("SC_CLK_TCK")


class AgentProcess:
    """`poise agent` of one node, on this machine and with virtual GPUs, in a folder of its own."""

    def __init__(self, folder: Path, url: str, token_file: Path, node: str, gpus: str, options: Sequence[str] = ()) -> None:
        self.node, self.state = node, folder / node
        where = ("--server", url, "--token-file", str(token_file), "--state", str(self.state))
        self._command = [COMMAND, "agent", *where, "--node", node, "--gpus", gpus, "--quiet", *options]
        self.process: subprocess.Popen[bytes]
        self.start()

    def start(self) -> None:
        """Start it; it may have been killed before."""
        (self.state / LEASE).unlink(missing_ok=True)
        self.process = subprocess.Popen(self._command)

    def wait(self) -> None:
        """Return once the server has answered it for the first time."""
        deadline = monotonic() + PATIENCE
        while not (self.state / LEASE).exists():
            if self.process.poll() is not None or monotonic() > deadline:
                raise RuntimeError(f"the agent of {self.node} did not come so far: exit code {self.process.poll()}")
            sleep(0.01)

    def cpu(self) -> float:
        """CPU seconds that it has used, without what it started."""
        return cpu_of(self.process.pid)

    def stop(self) -> None:
        """End it; its runs go on."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.wait()


def cpu_of(pid: int) -> float:
    """CPU seconds that a process has used."""
    words = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / TICKS
