"""Live jobs on one machine: real processes on real or declared GPUs."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from poise.scheduler.model.cluster import Cluster
from poise.service.backends.api import BackendFailed, DesiredState, LogPart, OnEvent, RunNotice, RunOrder
from poise.service.backends.local.event_loop import EventLoop
from poise.service.backends.local.gpus import devices_of, numbered
from poise.service.backends.local.logs import read_log
from poise.service.backends.local.orders import Devices, LocalSettings, inherited
from poise.service.backends.local.runs import Runs
from poise.service.backends.local.state_dir import StateDir, token

STANDARD = LocalSettings()


class LocalBackend:
    """A World of processes (poise.service.backends.api). Each run is kept by a runner that outlives this process.

    cluster     the GPUs that there are, or are said to be
    state_dir   where jobs, logs and checkpoints are; one world at a time
    devices     UUIDs of real GPUs by node and slot, the others are numbered; None: those that are found in this machine
    environ     the server's environment, of which jobs see a harmless part; None: this process's
    """

    def __init__(
        self,
        cluster: Cluster,
        state_dir: Path,
        tell: OnEvent,
        *,
        devices: Devices | None = None,
        settings: LocalSettings = STANDARD,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        base = inherited(os.environ if environ is None else environ)
        known = {**numbered(cluster), **(devices_of(cluster) if devices is None else devices)}
        self._folders = StateDir(state_dir)
        self._clockwork = EventLoop("local-world", lambda error: tell(BackendFailed(repr(error))))
        self._runs = Runs(self._folders, tell, self._clockwork, settings, base, known)
        self._clockwork.ask(self._runs.poll)
        self._is_closed = False

    def adopt(self, runs: Sequence[tuple[RunOrder, DesiredState]]) -> None:
        """Take over what runs, tell what ended meanwhile, begin what never began, end what nobody ordered.

        Comes back once all of them have been looked at: nothing is decided before that.
        """
        for order, _ in runs:
            token(order.job)
        self._clockwork.have(lambda: self._runs.adopt(runs))

    def launch(self, order: RunOrder) -> None:
        """Begin a run once those that are to leave its GPUs, and the run of its job before it, are gone."""
        token(order.job)
        self._clockwork.ask(lambda: self._runs.launch(order))

    def stop(self, job: str, epoch: int, notice: RunNotice) -> None:
        """Ask a run for a checkpoint and its GPUs."""
        self._clockwork.ask(lambda: self._runs.leave((job, epoch), notice))

    def kill(self, job: str, epoch: int, reason: str) -> None:
        """End a run whose job is no longer wanted."""
        self._clockwork.ask(lambda: self._runs.kill((job, epoch), reason))

    def close(self) -> None:
        """Let go of everything; processes go on, and the next world finds them."""
        if not self._is_closed:
            self._is_closed = True
            self._clockwork.close()
            self._runs.let_go()
            self._folders.close()

    def log(self, job: str, replica: int, offset: int, limit: int) -> LogPart:
        """At most `limit` bytes of a replica's log, of all its runs; from any thread."""
        return read_log(self._folders.handle, token(job), replica, offset, limit)

    def checkpoints(self, job: str) -> list[int]:
        """Steps of the complete checkpoints of a job, the latest first; from any thread."""
        return self._folders.checkpoints(job)
