"""Live back ends under test: events are collected, and nothing that they start is left behind."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from threading import Condition
from time import monotonic, sleep
from typing import Any, TypeVar

import pytest

from poise.scheduler.model.cluster import parse_cluster
from poise.service.backends.api import (
    BackendEvent,
    BackendFailed,
    DesiredState,
    Finding,
    NodeReport,
    RunBegan,
    RunEnded,
    RunEvent,
    RunNotice,
    RunOrder,
    RunPart,
    RunProgressed,
)
from poise.service.backends.local.backend import LocalBackend
from poise.service.backends.local.isolation import Isolate, IsolationLevel, isolated
from poise.service.backends.local.orders import Isolation, LocalSettings
from poise.service.wire.request import JobRequest

PATIENCE = 180.0
"""Seconds after which what was waited for is taken never to come; the machine may have other things to do."""
QUICK = LocalSettings(term_seconds=0.3, guard_seconds=PATIENCE, progress_every=0.05)
"""Short waits for replicas that ignore TERM, a long one for runners that work slowly."""
N = TypeVar("N", RunBegan, RunEnded, RunProgressed)


def python(text: str, *arguments: str) -> tuple[str, ...]:
    """A command that runs a piece of Python, started as fast as possible."""
    return (sys.executable, "-I", "-S", "-c", text, *arguments)


def a_request(command: tuple[str, ...] | str = "", **more: Any) -> JobRequest:
    """A job of one GPU. A text is a piece of Python; none at all does nothing."""
    return JobRequest(command=python(command) if isinstance(command, str) else command, **more)


def an_order(
    job: str,
    request: JobRequest,
    *slots: int,
    epoch: int = 1,
    parts: tuple[RunPart, ...] = (),
    ran: float = 0.0,
    beside: str | None = None,
) -> RunOrder:
    """A run on these slots of the one node there is; on slot 0 if none is named."""
    return RunOrder(job, epoch, parts or (RunPart("v100-0", "v100", slots or (0,)),), request, ran=ran, beside=beside)


def require(level: Isolation, folder: Path) -> None:
    """Skip the test, with a word, where the machine does not allow as much isolation as that."""
    found = IsolationLevel(Isolation.NONE, None) if level is Isolation.NONE else isolated(Isolate.AUTO, folder)
    if list(Isolation).index(found.level) < list(Isolation).index(level):
        pytest.skip(f"{level.value} isolation: {found.problem}")


WAITS = "import time; time.sleep(1000)"
STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(1000)"

TRAINS = """
import json, os, sys, time
run, kept = os.environ["POISE_RUN_DIR"], os.environ["POISE_CHECKPOINT_DIR"]
steps = max((int(name[5:]) for name in os.listdir(kept) if name[5:].isdigit()), default=0)
def replace(path, text):
    with open(path + ".part", "w") as file:
        file.write(text)
    os.rename(path + ".part", path)
def report():
    replace(run + "/progress.json", json.dumps({"version": 1, "steps": steps, "total": 1000, "checkpoint": None,
        "throughput": 50.0, "loss": 0.5, "first": 1.0, "at": time.time()}))
while True:
    with open(run + "/lease.json") as file:
        if json.load(file)["ends"] is not None:
            replace(kept + f"/step-{steps}", "")
            sys.exit(75)
    steps += 1
    report()
    time.sleep(0.01)
"""
"""A worker that speaks the lease protocol: it counts, and saves what it counted."""


class Stage:
    """Events of a back end, in the order in which they came."""

    def __init__(self) -> None:
        self.news: list[RunEvent] = []
        self.reports: list[NodeReport] = []
        self.findings: list[Finding] = []
        self.failures: list[BackendFailed] = []
        self._arrived = Condition()

    def tell(self, news: BackendEvent) -> None:
        with self._arrived:
            if isinstance(news, BackendFailed):  # raised by those who wait: in the back end's thread it would be lost
                self.failures.append(news)
            elif isinstance(news, NodeReport):
                self.reports.append(news)
            elif isinstance(news, Finding):
                self.findings.append(news)
            else:
                self.news.append(news)
            self._arrived.notify_all()

    def of(self, kind: type[N], job: str, epoch: int = 1) -> list[N]:
        return [each for each in [*self.news] if isinstance(each, kind) and (each.job, each.epoch) == (job, epoch)]

    def wait(self, kind: type[N], job: str, epoch: int = 1, count: int = 1) -> N:
        """The first news of that kind; or one that came later."""
        with self._arrived:
            came = self._arrived.wait_for(lambda: self.failures or len(self.of(kind, job, epoch)) >= count, PATIENCE)
            assert self.failures == []
            assert came, f"no {kind.__name__} of {job}/{epoch}; there was {self.news}"
            return self.of(kind, job, epoch)[count - 1]


class LocalStage(Stage):
    """A local back end in a directory, which may be closed and opened again."""

    def __init__(self, folder: Path, settings: LocalSettings = QUICK, isolation: Isolation = Isolation.NONE) -> None:
        super().__init__()
        self.folder = folder / "state"
        self.settings = replace(settings, isolation=isolation)
        self.backend = self.open()
        self.backend.adopt([])

    def open(self, settings: LocalSettings | None = None, **more: Any) -> LocalBackend:
        chosen = settings or self.settings
        self.backend = LocalBackend(parse_cluster("v100:4,k80:8"), self.folder, self.tell, settings=chosen, **more)
        return self.backend

    def reopen(self, *runs: tuple[RunOrder, DesiredState]) -> None:
        """As after a crash of the service: a new back end that is told what the journal knows."""
        self.backend.close()
        self.open().adopt(runs)

    def run(self, job: str, command: tuple[str, ...] | str = "", *slots: int, epoch: int = 1, **more: Any) -> RunOrder:
        order = an_order(job, a_request(command, **more), *slots, epoch=epoch)
        self.backend.launch(order)
        return order

    def begun(self, job: str, command: tuple[str, ...] | str = WAITS, *slots: int, epoch: int = 1, **more: Any) -> RunOrder:
        order = self.run(job, command, *slots, epoch=epoch, **more)
        self.wait(RunBegan, job, epoch)
        return order

    def run_dir(self, job: str, epoch: int = 1) -> Path:
        return self.folder / "jobs" / job / "runs" / str(epoch)

    def said(self, job: str, name: str, epoch: int = 1) -> dict[str, Any]:
        """What a file of a run says."""
        found = json.loads((self.run_dir(job, epoch) / name).read_text())
        assert isinstance(found, dict)
        return found

    def text(self, job: str, replica: int = 0) -> str:
        return self.backend.log(job, replica, 0, 1 << 20).text.decode()

    def says(self, job: str, text: str, replica: int = 0) -> None:
        until(lambda: text in self.text(job, replica))

    def processes(self) -> list[int]:
        """Everything that carries a mark of this back end."""
        mark = b"POISE_RUN_DIR=" + os.fsencode(self.folder)
        return [pid for pid in _pids() if any(each.startswith(mark) for each in _environ(pid))]

    @property
    def usual(self) -> int:
        """Processes of a run of one replica: the runner, the replica and the first process of its pid namespace."""
        return 3 if self.settings.isolation is Isolation.FULL else 2

    def close(self) -> None:
        """End what runs; afterwards nothing must be left."""
        self.backend.close()
        self.open().adopt([])  # a back end that knows of nothing ends everything
        until(lambda: not self.processes())
        until(lambda: not self.backend._runs.table._runs)
        self.backend.close()


def until(condition: Any) -> None:
    """Return once the condition holds."""
    deadline = monotonic() + PATIENCE
    while not condition():
        assert monotonic() < deadline, "it never came to that"
        sleep(0.01)


def notice(deadline: float = PATIENCE) -> RunNotice:
    return RunNotice("preempted", "job 7 has waited for longer", deadline)


def number_inside(pid: int) -> int:
    """The number of a process as it knows it itself, which in a pid namespace is another one."""
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[-1]) for line in file if line.startswith("NSpid:"))


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _environ(pid: int) -> list[bytes]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []
