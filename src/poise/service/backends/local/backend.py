"""The local back end: `LiveBackend` by real processes on this machine, on real or declared GPUs.

All work happens in one event-loop thread (`event_loop.py`), which owns the runs (`runs.py`) and needs no locks. Methods here
hand their order to that thread and return; only `log` and `checkpoints` read files in the caller's thread.
"""

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
    """A `LiveBackend` of processes. Each run is kept by a runner process that outlives this one.

    cluster     the GPUs that there are, or are declared to be
    state_dir   directory of jobs, logs and checkpoints; one back end at a time
    devices     UUIDs of real GPUs by node and slot; others are numbered. None: those that are found in this machine
    environ     the service's environment, of which jobs see a harmless part; None: this process's
    """

    def __init__(
        self,
        cluster: Cluster,
        state_dir: Path,
        on_event: OnEvent,
        *,
        devices: Devices | None = None,
        settings: LocalSettings = STANDARD,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        base = inherited(os.environ if environ is None else environ)
        known = {**numbered(cluster), **(devices_of(cluster) if devices is None else devices)}
        self._state = StateDir(state_dir)
        self._loop = EventLoop("local-backend", lambda error: on_event(BackendFailed(repr(error))))
        self._runs = Runs(self._state, on_event, self._loop, settings, base, known)
        self._loop.post(self._runs.poll)
        self._is_closed = False

    def adopt(self, runs: Sequence[tuple[RunOrder, DesiredState]]) -> None:
        """Take over what runs, report what ended meanwhile, begin what never began, end what was not ordered."""
        for order, _ in runs:
            token(order.job)
        self._loop.call(lambda: self._runs.adopt(runs))

    def launch(self, order: RunOrder) -> None:
        """Begin a run once its GPUs are free and the job's run before it is gone."""
        token(order.job)  # checked here: a job id that cannot name a directory is the caller's error
        self._loop.post(lambda: self._runs.launch(order))

    def stop(self, job: str, epoch: int, notice: RunNotice) -> None:
        """Ask a run for a checkpoint and its GPUs."""
        self._loop.post(lambda: self._runs.stop((job, epoch), notice))

    def kill(self, job: str, epoch: int, reason: str) -> None:
        """End a run whose job is not wanted any more."""
        self._loop.post(lambda: self._runs.kill((job, epoch), reason))

    def close(self) -> None:
        """Release everything; processes go on, and the next back end adopts them."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.close()
            self._runs.release()
            self._state.close()

    def log(self, job: str, replica: int, offset: int, limit: int) -> LogPart:
        """Read at most `limit` bytes of a replica's log over all its runs; from any thread."""
        return read_log(self._state.handle, token(job), replica, offset, limit)

    def checkpoints(self, job: str) -> list[int]:
        """List the steps of a job's complete checkpoints, the latest first; from any thread."""
        return self._state.checkpoints(job)
