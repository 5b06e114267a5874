"""A real `poise serve` with real jobs, to be killed at will; and whatever carries its mark, to be found and ended."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from tests.shell import COMMAND

from poise.service.backends.local.processes import kill_where, pids, stat_of
from poise.service.client import Client
from poise.service.wire.views import JobDetail, JobState, NodeCondition

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "live"
WORKERS = Path(__file__).parent / "workers"
PATIENCE = 180.0
"""Seconds after which what was waited for is taken never to come; the machine may have other things to do."""

ISOLATE = os.environ.get("POISE_TEST_ISOLATE", "auto")
"""Whether jobs are isolated where a test does not say: all that is tested holds with and without."""


class Kind(Enum):
    """A process of a run: the runner that keeps it, the first process of its pid namespace, or something that it runs."""

    RUNNER = "runner"
    FIRST = "first"
    REPLICA = "replica"


@dataclass(frozen=True)
class Process:
    """A living process that carries the mark of a run."""

    pid: int
    kind: Kind
    run: str
    start: str

    @property
    def job(self) -> str:
        """Whose it is."""
        return self.run.partition("/")[0]

    def kill(self) -> bool:
        """SIGKILL to this very process; says whether it was still there."""
        return bool(kill_where(lambda pid: pid == self.pid and stat_of(pid)[19:20] == [self.start]))


def until(condition: Callable[[], object], what: str, patience: float = PATIENCE) -> None:
    """Return once the condition holds."""
    deadline = monotonic() + patience
    while not condition():
        assert monotonic() < deadline, f"after {patience:g} s: {what}"
        sleep(0.02)


class Service:
    """A service in a folder of its own. It may be killed and started again; `options` are those of `poise serve`."""

    def __init__(self, folder: Path, *options: object, command: Sequence[str] = (COMMAND,)) -> None:
        self.state, self.locks = folder / "state", folder / "locks"
        self.locks.mkdir()
        self.options, self.command = options, tuple(command)
        self.starts = 0
        self.process: subprocess.Popen[bytes] | None = None
        self._folder = folder
        self._log = folder / "server.log"
        self._clients: list[Client] = []

    def start(self) -> None:
        """Start the server, and do not wait for it."""
        self.starts += 1
        where = ("--state", self.state, "--listen", "127.0.0.1:0", "--isolate", ISOLATE)
        words = [*self.command, "serve", *where, "--json", *self.options]
        with self._announcement.open("wb") as out, self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [str(word) for word in words], stdin=subprocess.DEVNULL, stdout=out, stderr=log, start_new_session=True
            )

    @property
    def _announcement(self) -> Path:
        return self._folder / f"server-{self.starts}.json"

    @property
    def server(self) -> "subprocess.Popen[bytes]":
        """The server's process."""
        assert self.process is not None
        return self.process

    @property
    def log(self) -> str:
        """What all servers have said on standard error."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def is_ready(self) -> bool:
        """It answers; an AssertionError if it never will."""
        assert self.server.poll() is None, f"the server ended with exit code {self.server.returncode}:\n{self.log[-4000:]}"
        return self._announcement.stat().st_size > 0

    def ready(self) -> None:
        """Return once it answers."""
        until(self.is_ready, "the server has not started")

    def up(self) -> Client:
        """Start the server; a client once it answers."""
        self.start()
        self.ready()
        return self.client()

    def client(self, patience: float = PATIENCE) -> Client:
        """A client that finds the server again, wherever it comes back. Needs the `service` fixture's environment."""
        client = Client.from_config(patience=patience)
        self._clients.append(client)
        client.service()
        return client

    def kill(self) -> None:
        """SIGKILL to the server."""
        self.server.kill()
        self.server.wait()

    def stop(self) -> int:
        """SIGTERM to the server; its exit code."""
        self.server.terminate()
        return self.server.wait(PATIENCE)

    def joined(self, client: Client, *names: str) -> None:
        """Wait until these nodes take orders."""
        until(lambda: all(self.state_of(client, name) is NodeCondition.UP for name in names), f"{names} have not joined")

    def state_of(self, client: Client, name: str) -> NodeCondition | None:
        """How a node is; None: it is not known."""
        return next((node.state for node in client.nodes().nodes if node.name == name), None)

    def evidence_of(self, client: Client, name: str) -> str:
        """Why a node is in its state."""
        return next((node.evidence or "" for node in client.nodes().nodes if node.name == name), "")

    def processes(self) -> list[Process]:
        """Everything alive that carries a mark of this service."""
        return marked_with(self.state)

    def replicas(self, job: str) -> list[Process]:
        """Processes of a job that its runner started."""
        return [each for each in self.processes() if each.kind is Kind.REPLICA and each.job == job]

    def guarded(self, script: Path, *words: object) -> tuple[str, ...]:
        """A command that runs a script while it holds the locks of its job and of its GPUs, which nobody else may have."""
        return (sys.executable, str(WORKERS / "guarded.py"), str(self.locks), str(script), *map(str, words))

    def counting(self, steps: int, seconds: float, seed: str) -> tuple[str, ...]:
        """A command that counts steps, each of so many seconds."""
        return self.guarded(EXAMPLES / "count_steps.py", "--steps", steps, "--seconds-per-step", seconds, "--seed", seed)

    def ranks(self, steps: int, seconds: float, seed: str) -> tuple[str, ...]:
        """A command that counts steps on several ranks, each step together."""
        return self.guarded(WORKERS / "ranks.py", steps, seconds, seed)

    def held(self, steps: int, seconds: float, seed: str) -> tuple[str, ...]:
        """The same command, which counts no further than `let` says: however slow the machine is, it is not over sooner."""
        count = (EXAMPLES / "count_steps.py", "--steps", steps, "--seconds-per-step", seconds, "--seed", seed)
        return self.guarded(WORKERS / "held.py", self.locks / "let", *count)

    def let(self, steps: int) -> None:
        """So many steps may be done by each job that is held."""
        (self.locks / "let").write_text(str(steps), encoding="ascii")

    @property
    def violations(self) -> str:
        """Who found a lock taken that should have been theirs."""
        path = self.locks / "violations"
        return path.read_text() if path.exists() else ""

    def run_file(self, job: str, epoch: int, name: str) -> dict[str, Any]:
        """A file of the lease protocol; empty if it is not there."""
        try:
            found = json.loads((self.state / "jobs" / job / "runs" / str(epoch) / name).read_text())
        except OSError:
            return {}
        assert isinstance(found, dict)
        return found

    def close(self) -> None:
        """End everything that was started here."""
        for client in self._clients:
            client.close()
        if self.process is not None:
            self.kill()
        deadline = monotonic() + PATIENCE
        while self.processes() and monotonic() < deadline:
            for each in self.processes():
                each.kill()
            sleep(0.02)


def marked_with(state: Path) -> list[Process]:
    """Everything alive that belongs to a run of this state directory."""
    mark = b"POISE_RUN_DIR=" + os.fsencode(state / "jobs")
    return [found for pid in pids() if (found := _marked(pid, mark)) is not None]


def _marked(pid: int, mark: bytes) -> Process | None:
    fields = stat_of(pid)
    if not fields or fields[0] in "ZX":
        return None
    with suppress(OSError):
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if any(each.startswith(mark) for each in environment):
            run = next(each for each in environment if each.startswith(b"POISE_RUN=")).decode().partition("=")[2]
            runs = any(word.endswith(b"/runner/__main__.py") for word in words)
            is_first = runs and words == Path(f"/proc/{fields[1]}/cmdline").read_bytes().split(b"\0")
            return Process(pid, Kind.FIRST if is_first else Kind.RUNNER if runs else Kind.REPLICA, run, fields[19])
    return None


def ended(client: Client, job: str, patience: float = PATIENCE) -> JobDetail:
    """The job once it has come to its end, which must be a good one, and all its processes are gone."""
    until(lambda: client.show(job).job.state.is_final, f"job {job} has not ended: {client.show(job)}", patience)
    detail = client.show(job)
    assert detail.job.state is JobState.SUCCEEDED, detail
    until(lambda: all(run.how is not None for run in client.show(job).runs), f"runs of {job} are still there")
    return client.show(job)
