"""What became of every job, read off a journal into columns: the input of all metrics."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf, nan

import numpy as np

from poise.model.action import Abandon, Action, Cancel, Launch, Preempt, Reject, Why
from poise.model.arrays import Floats, Ints
from poise.model.cluster import Cluster, Holding, gpu_count
from poise.model.event import Cancelled, Estimated, Event, Failed, Finished, NodeLost, NodeReturned, Stopped, Submitted
from poise.model.job import Status
from poise.model.journal import Entry
from poise.model.speed import Locality


class Life:
    """One job. Moments are NaN until they come; `gpus` it asked for, `using` in its last run; `waited`: seconds by cause."""

    __slots__ = (
        "app", "ended", "epoch", "gpu_seconds", "gpus", "holding", "id", "kind", "least", "migrations", "preemptions",
        "restarts", "since", "started", "status", "steps", "submitted", "tenant", "using", "waited",
    )  # fmt: skip

    def __init__(self, event: Submitted) -> None:
        job = event.job
        self.id = job.id
        self.tenant = job.tenant
        self.app = job.app
        self.gpus = job.gpus
        self.least = min(job.min_gpus or job.gpus, job.gpus)
        self.kind = event.kind
        self.steps = event.steps
        self.submitted = job.submitted
        self.started = self.ended = self.since = nan
        self.status = Status.WAITING
        self.preemptions = self.migrations = self.restarts = 0
        self.gpu_seconds = 0.0
        self.using = 0
        self.waited = (0.0, 0.0, 0.0)
        self.holding: Holding | None = None
        self.epoch = 0

    def launch(self, action: Launch, now: float) -> None:
        """It gets GPUs."""
        if self.started != self.started:  # NaN: it has not run before
            self.started = now
        elif self.holding not in (None, action.gpus) and self.using >= self.least:  # not from a trial
            self.migrations += 1
        self.holding = action.gpus
        self.using = gpu_count(action.gpus)
        self.epoch = action.epoch
        self.since = now
        self.status = Status.RUNNING
        order, fragmentation, capacity = self.waited
        more = action.waited
        self.waited = (order + more.order, fragmentation + more.fragmentation, capacity + more.capacity)

    def release(self, now: float, status: Status) -> bool:
        """It no longer has GPUs, if it had any; says whether it had."""
        had = self.status is Status.RUNNING
        if had:
            self.gpu_seconds += self.using * (now - self.since)
        self.status = status
        if status.is_final:
            self.ended = now
        return had


@dataclass
class History:
    """All jobs in order of submission, the GPUs that were there over time, and the span of the journal."""

    cluster: Cluster
    jobs: dict[str, Life] = field(default_factory=dict)
    rates: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """Steps per second, packed, a GPU type, by kind of job."""
    held: list[tuple[float, int]] = field(default_factory=list)
    """(moment, change of the number of GPUs held)."""
    waiting: list[tuple[float, int]] = field(default_factory=list)
    """(moment, change of the number of waiting jobs)."""
    live: list[tuple[float, int]] = field(default_factory=list)
    """(moment, change of the number of GPUs there are)."""
    rejections: list[tuple[str, str]] = field(default_factory=list)
    """(job, why it can never run here)."""
    end: float = -inf
    _holders: dict[Holding, int] = field(default_factory=dict)

    @staticmethod
    def of(entries: Iterable[Entry], cluster: Cluster) -> "History":
        """Read a journal."""
        history = History(cluster)
        for now, events, actions in entries:
            for event in events:
                history._event(event, now)
            for action in actions:
                history._action(action, now)
            history.end = now
        for life in history.jobs.values():
            if life.status is Status.RUNNING:  # the journal ends in the middle of its run
                life.gpu_seconds += life.using * (history.end - life.since)
        return history

    def _event(self, event: Event, now: float) -> None:
        match event:
            case Finished():
                self._release(self.jobs[event.job], now, Status.FINISHED)
            case Submitted():
                self.jobs[event.job.id] = Life(event)
                self.waiting.append((now, 1))
            case Failed() | Stopped():
                life = self.jobs[event.job]
                if life.status is Status.RUNNING and life.epoch == event.epoch:
                    life.restarts += 1
                    self._release(life, now, Status.WAITING)
            case Cancelled():
                self._release(self.jobs[event.job], now, Status.CANCELLED)
            case Estimated():
                self.rates[event.kind] = tuple(row[Locality.PACKED] for row in event.estimate.rates)
            case NodeLost():
                self.live.append((now, -self.cluster.nodes[event.node].gpus))
            case NodeReturned():
                self.live.append((now, self.cluster.nodes[event.node].gpus))
            case _:
                pass

    def _action(self, action: Action, now: float) -> None:
        match action:
            case Launch():
                life = self.jobs[action.job]
                life.launch(action, now)
                self._holders[action.gpus] = self._holders.get(action.gpus, 0) + 1
                if self._holders[action.gpus] == 1:  # GPUs that two jobs share are held once
                    self.held.append((now, life.using))
                self.waiting.append((now, -1))
            case Preempt():
                life = self.jobs[action.job]
                self._release(life, now, Status.WAITING)
                if action.why is Why.VALIDATED:  # that was only a trial
                    life.holding = None
                else:
                    life.preemptions += 1
            case Reject():
                self._release(self.jobs[action.job], now, Status.REJECTED)
                self.rejections.append((action.job, action.reason))
            case Abandon():
                self._release(self.jobs[action.job], now, Status.FAILED)
            case Cancel():
                self._release(self.jobs[action.job], now, Status.CANCELLED)
            case _:
                pass

    def _release(self, life: Life, now: float, status: Status) -> None:
        if life.release(now, status):
            if life.holding is not None:
                self._holders[life.holding] -= 1
                if not self._holders[life.holding]:
                    del self._holders[life.holding]
                    self.held.append((now, -life.using))
            if not status.is_final:
                self.waiting.append((now, 1))
        elif status.is_final:
            self.waiting.append((now, -1))

    def ran(self) -> list[Life]:
        """Jobs that came to an end of their own: finished, failed or cancelled."""
        return [life for life in self.jobs.values() if life.status.is_final and life.status is not Status.REJECTED]

    def count(self, status: Status) -> int:
        """Jobs of a status."""
        return sum(life.status is status for life in self.jobs.values())


def floats(values: Iterable[float]) -> Floats:
    """A column of numbers."""
    return np.fromiter(values, dtype=np.float64)


def cumulated(changes: Iterable[tuple[float, int]]) -> tuple[Floats, Ints]:
    """(moments, level from each moment on) of a list of changes; several changes at a moment count as one."""
    table = np.array(list(changes), dtype=np.float64).reshape(-1, 2)
    moments = table[:, 0]
    if np.any(np.diff(moments) < 0):
        table = table[np.argsort(moments, kind="stable")]
        moments = table[:, 0]
    levels = np.cumsum(table[:, 1].astype(np.int64))
    last = np.append(np.diff(moments) > 0, True) if len(moments) else np.empty(0, dtype=bool)
    return moments[last], levels[last]
