"""What became of every job, read off a journal into columns: the input of all metrics."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf, nan

import numpy as np

from poise.scheduler.model.action import (
    Abandon,
    Action,
    Cancel,
    Compute,
    JournalEntry,
    Launch,
    Preempt,
    PreemptionCause,
    Reject,
    Remark,
    Waited,
)
from poise.scheduler.model.arithmetic import Floats, Ints
from poise.scheduler.model.cluster import Cluster, Holding, Slots, bits, gpu_count
from poise.scheduler.model.event import (
    Cancelled,
    Carried,
    Computed,
    Estimated,
    Event,
    Failed,
    Finished,
    NodeLost,
    NodeReturned,
    Revealed,
    Stopped,
    Submitted,
    Synchronised,
)
from poise.scheduler.model.job import Status

# Stints: who held which GPUs from when to when, and how that ended. Timelines, failures and locality are read off them.


class RunEnd(StrEnum):
    """How a stint ended."""

    FINISHED = "finished"
    FAILED = "failed"
    LOST = "node lost"
    PREEMPTED = "preempted"
    TRIED = "trial over"
    CANCELLED = "cancelled"
    COMPUTED = "task computed"
    OPEN = "still under way"


class RunInterval:
    """One job's hold of some GPUs, from `start` to `end`.

    begun   steps that the job had done before;  kept: steps that were left of its work afterwards. Of tasks both are 0:
            they make progress as rounds, not one by one
    cause   of a failure, in the words of the journal
    """

    __slots__ = ("begun", "cause", "end", "ended", "gpus", "job", "kept", "start")

    def __init__(  # noqa: PLR0913, PLR0917 - who, when, where, how it ended, and two counts of steps
        self,
        job: str,
        start: float,
        end: float,
        gpus: Holding,
        ended: RunEnd,
        cause: str = "",
        begun: float = 0.0,
        kept: float = 0.0,
    ) -> None:
        self.job = job
        self.start = start
        self.end = end
        self.gpus = gpus
        self.ended = ended
        self.cause = cause
        self.begun = begun
        self.kept = kept


class JobHistory:
    """One job. Moments are NaN until they come; `gpus` it asked for, `using` in its last run; `waited`: seconds by cause.

    steps   its work: the true one where the journal tells it, else the declared one, inf if unknown
    rates   true steps per second by GPU type, packed; None where the journal tells nothing but what is believed of its kind
    tasks   GPUs that compute a task for it now, as (node, bit of the slot), since when
    kept    steps of its work that the last fact about a run of its says are done;  last: its last stint, if any
    """

    __slots__ = (
        "app", "ended", "epoch", "gpu_seconds", "gpus", "holding", "id", "kept", "kind", "last", "least", "migrations",
        "preemptions", "rates", "restarts", "since", "started", "status", "steps", "submitted", "tasks", "tenant", "using",
        "waited", "weight",
    )  # fmt: skip

    def __init__(self, event: Submitted) -> None:
        job = event.job
        self.id = job.id
        self.tenant = job.tenant
        self.app = job.app
        self.weight = job.weight
        self.gpus = job.gpus
        self.least = 1 if job.micro_batches else min(job.min_gpus or job.gpus, job.gpus)
        self.kind = event.kind
        self.steps = event.steps
        self.rates: tuple[float, ...] | None = None
        self.submitted = job.submitted
        self.started = self.ended = self.since = nan
        self.status = Status.WAITING
        self.preemptions = self.migrations = self.restarts = 0
        self.gpu_seconds = 0.0
        self.using = 0
        self.waited = (0.0, 0.0, 0.0)
        self.holding: Holding | None = None
        self.tasks: dict[tuple[int, int], float] = {}
        self.epoch = 0
        self.kept = 0.0
        self.last: RunInterval | None = None

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
        self._wait(action.waited)

    def _wait(self, more: Waited) -> None:
        order, fragmentation, capacity = self.waited
        self.waited = (order + more.order, fragmentation + more.fragmentation, capacity + more.capacity)

    def compute(self, action: Compute, now: float) -> None:
        """It gets GPUs for a task each, of a new round or of the one under way."""
        if self.started != self.started:  # NaN: it has not run before
            self.started = now
        self.tasks.update((gpu, now) for gpu in _each(action.gpus))
        self.holding, self.using, self.since = None, 0, now  # of the whole round it holds nothing
        self.epoch = action.epoch
        self.status = Status.RUNNING
        self._wait(action.waited)

    def give_back(self, gpus: Iterable[tuple[int, int]], now: float, ended: RunEnd, cause: str = "") -> list[RunInterval]:
        """Tasks have been computed, or given up: a stint each."""
        found = [RunInterval(self.id, self.tasks.pop(gpu), now, (Slots(*gpu),), ended, cause) for gpu in gpus]
        self.gpu_seconds += sum(now - stint.start for stint in found)
        return found

    def release(self, now: float, status: Status) -> bool:
        """It no longer has GPUs, if it had any; says whether it had."""
        had = self.status is Status.RUNNING
        if had:
            self.gpu_seconds += self.using * (now - self.since)
        self.status = status
        if status.is_final:
            self.ended = now
        return had


def _each(gpus: Holding) -> Iterator[tuple[int, int]]:
    """GPUs one by one, as (node, bit of the slot)."""
    return ((node, bit) for node, mask in gpus for bit in bits(mask))


@dataclass
class History:
    """All jobs in order of submission, the GPUs that were there over time, and the span of the journal."""

    cluster: Cluster
    jobs: dict[str, JobHistory] = field(default_factory=dict)
    rates: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """Steps per second, packed, a GPU type, by kind of job, as they are believed; `rates_of` knows better of some jobs."""
    held: list[tuple[float, int]] = field(default_factory=list)
    """(moment, change of the number of GPUs held)."""
    waiting: list[tuple[float, int]] = field(default_factory=list)
    """(moment, change of the number of waiting jobs)."""
    live: list[tuple[float, int]] = field(default_factory=list)
    """(moment, change of the number of GPUs there are)."""
    rejections: list[tuple[str, str]] = field(default_factory=list)
    """(job, why it can never run here)."""
    remarks: list[tuple[float, str]] = field(default_factory=list)
    """(moment, what people should know of the decision)."""
    stints: list[RunInterval] = field(default_factory=list)
    """Who held which GPUs when, in the order in which that ended; what the journal leaves open comes last."""
    end: float = -inf
    _holders: dict[Holding, int] = field(default_factory=dict)

    @staticmethod
    def of(entries: Iterable[JournalEntry], cluster: Cluster) -> "History":
        """Read a journal."""
        history = History(cluster)
        for entry in entries:
            history.take(entry)
        history.close()
        return history

    def take(self, entry: JournalEntry) -> None:
        """Read one more instant."""
        now, events, actions = entry
        for event in events:
            self._event(event, now)
        for action in actions:
            self._action(action, now)
        self.end = now

    def close(self) -> None:
        """The journal ends here, perhaps in the middle of runs."""
        for life in self.jobs.values():
            if life.status is Status.RUNNING:
                life.gpu_seconds += life.using * (self.end - life.since)
                life.gpu_seconds += sum(self.end - since for since in life.tasks.values())
                self._open(life)

    def _open(self, life: JobHistory) -> None:
        """What a job holds where the journal ends; the job itself is left as it is."""
        if life.holding is not None:
            self._note(life, self.end, life.holding, RunEnd.OPEN)
        self.stints += (
            RunInterval(life.id, since, self.end, (Slots(*gpu),), RunEnd.OPEN) for gpu, since in life.tasks.items()
        )

    def _event(self, event: Event, now: float) -> None:
        match event:
            case Finished() | Cancelled() if self.jobs[event.job].status.is_final:
                pass  # whichever came first counts
            case Finished():
                self._finish(self.jobs[event.job], now)
            case Submitted():
                self.jobs[event.job.id] = JobHistory(event)
                self.waiting.append((now, 1))
            case Carried():
                self._carry(event, now)
            case Failed() | Stopped() | Synchronised():
                self._end_run(event, now)
            case Computed():
                self._give_back(event, now)
            case Cancelled():
                self._release(self.jobs[event.job], now, Status.CANCELLED, RunEnd.CANCELLED)
            case Estimated() | Revealed():
                self._learn(event)
            case NodeLost() | NodeReturned():
                gpus = self.cluster.nodes[event.node].gpus
                self.live.append((now, gpus if isinstance(event, NodeReturned) else -gpus))
            case _:
                pass

    def _learn(self, event: Estimated | Revealed) -> None:
        if isinstance(event, Estimated):
            self.rates[event.kind] = event.estimate.packed
        else:
            life = self.jobs[event.job]
            life.steps, life.rates = event.steps, event.rates

    def _action(self, action: Action, now: float) -> None:
        match action:
            case Launch():
                life = self.jobs[action.job]
                life.launch(action, now)
                self._holders[action.gpus] = self._holders.get(action.gpus, 0) + 1
                if self._holders[action.gpus] == 1:  # GPUs that two jobs share are held once
                    self.held.append((now, life.using))
                self.waiting.append((now, -1))
            case Compute():
                self._compute(action, now)
            case Preempt():
                life = self.jobs[action.job]
                tried = action.why is PreemptionCause.VALIDATED
                self._release(life, now, Status.WAITING, RunEnd.TRIED if tried else RunEnd.PREEMPTED)
                if tried:  # that was no run in earnest
                    life.holding = None
                else:
                    life.preemptions += 1
            case Reject():
                self._release(self.jobs[action.job], now, Status.REJECTED, RunEnd.CANCELLED)
                self.rejections.append((action.job, action.reason))
            case Abandon():
                self._release(self.jobs[action.job], now, Status.FAILED, RunEnd.FAILED)
            case Cancel():
                self._release(self.jobs[action.job], now, Status.CANCELLED, RunEnd.CANCELLED)
            case Remark():
                self.remarks.append((now, action.text))
            case _:
                pass

    def _finish(self, life: JobHistory, now: float) -> None:
        """All its work is done, perhaps before it could be stopped."""
        life.kept = life.steps
        if life.status is not Status.RUNNING and life.last is not None:
            life.last.kept = life.steps
        self._release(life, now, Status.FINISHED, RunEnd.FINISHED)

    def _carry(self, event: Carried, now: float) -> None:
        """A job of an earlier journal; one that is known already stands where it stood, if that is still there."""
        job = event.job
        if job.id in self.jobs:
            if not event.gpus and self.jobs[job.id].status is Status.RUNNING:
                self._release(self.jobs[job.id], now, Status.WAITING, RunEnd.LOST)
            return
        life = self.jobs[job.id] = JobHistory(Submitted(job, event.kind, event.steps))
        self.waiting.append((now, 1))
        life.kept, life.epoch = event.done, event.epoch - bool(event.gpus)
        if event.gpus:
            self._action(Launch(job.id, event.epoch, event.gpus, Waited(0.0, 0.0, 0.0)), event.since)

    def _compute(self, action: Compute, now: float) -> None:
        """A job that waits for its next round begins it with its first tasks; then it waits no more until its end."""
        life = self.jobs[action.job]
        if life.status is Status.WAITING:
            self.waiting.append((now, -1))
        life.compute(action, now)
        self.held.append((now, gpu_count(action.gpus)))

    def _end_run(self, event: Failed | Stopped | Synchronised, now: float) -> None:
        """A run ended, and its job waits again; a round that is complete is no restart."""
        life = self.jobs[event.job]
        is_moving = life.status is Status.RUNNING and life.last is not None and life.epoch == event.epoch + 1
        if life.epoch != event.epoch and not is_moving:
            return
        life.kept = event.steps
        if life.status is Status.RUNNING and not is_moving:
            life.restarts += not isinstance(event, Synchronised)
            ended, cause = (RunEnd.FAILED, event.cause) if isinstance(event, Failed) else (RunEnd.LOST, "")
            self._release(life, now, Status.WAITING, ended, cause)
        elif life.last is not None:  # it was preempted at this very moment, and now says how far it had come
            life.last.kept = event.steps

    def _give_back(self, event: Computed, now: float) -> None:
        life = self.jobs[event.job]
        if life.status is Status.RUNNING and life.epoch == event.epoch:
            self.stints += life.give_back(_each(event.gpus), now, RunEnd.COMPUTED)
            self.held.append((now, -gpu_count(event.gpus)))

    def _release(self, life: JobHistory, now: float, status: Status, ended: RunEnd, cause: str = "") -> None:
        if life.tasks:
            self.held.append((now, -len(life.tasks)))
            self.stints += life.give_back(list(life.tasks), now, ended, cause)
        if life.release(now, status):
            if life.holding is not None:
                self._note(life, now, life.holding, ended, cause)
                self._holders[life.holding] -= 1
                if not self._holders[life.holding]:
                    del self._holders[life.holding]
                    self.held.append((now, -life.using))
            if not status.is_final:
                self.waiting.append((now, 1))
        elif status.is_final:
            self.waiting.append((now, -1))

    def _note(self, life: JobHistory, now: float, gpus: Holding, ended: RunEnd, cause: str = "") -> None:
        """Remember a stint; what it began with is what the one before it kept."""
        begun = life.last.kept if life.last else 0.0
        life.last = RunInterval(life.id, life.since, now, gpus, ended, cause, begun, life.kept)
        self.stints.append(life.last)

    def rates_of(self, life: JobHistory) -> tuple[float, ...]:
        """Steps per second by GPU type, packed: the true ones where the journal tells them, else those last believed."""
        return self.rates[life.kind] if life.rates is None else life.rates

    def ran(self) -> list[JobHistory]:
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
