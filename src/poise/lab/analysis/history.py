"""What became of every job, read off a journal: the input of all metrics.

`History.of` walks the entries of a journal once, in order. Each event and action updates the `JobHistory` of its job and
appends to what is kept over time: runs (`RunInterval`: which GPUs a job held from when to when, and how that ended), and
changes of the numbers of GPUs held, jobs waiting and GPUs there are. Times are seconds on the journal's clock.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf, nan

import numpy as np

from poise.lab.analysis.withheld import withheld_slots
from poise.scheduler.model import action as actions
from poise.scheduler.model import event as events
from poise.scheduler.model.action import JournalEntry, Waited
from poise.scheduler.model.arithmetic import Floats, Ints
from poise.scheduler.model.cluster import Cluster, Holding, Slots, bits, gpu_count
from poise.scheduler.model.job import Status


class RunEnd(StrEnum):
    """How a run ended."""

    FINISHED = "finished"
    FAILED = "failed"
    LOST = "node lost"
    PREEMPTED = "preempted"
    TRIED = "trial over"
    CANCELLED = "cancelled"
    COMPUTED = "task computed"
    OPEN = "still under way"


@dataclass(slots=True, eq=False)
class RunInterval:
    """One job's hold of some GPUs, from `start` to `end`: a run, or one task of a round.

    cause          of a failure, in the words of the journal
    steps_before   work of the job that was done when the run began;  steps_after: work that was kept when it ended. Both
                   are 0 for tasks, which make progress as rounds, not one by one
    """

    job: str
    start: float
    end: float
    gpus: Holding
    ended: RunEnd
    cause: str = ""
    steps_before: float = 0.0
    steps_after: float = 0.0


class JobHistory:
    """One job. Times are NaN until they come; `gpus` it asked for, `using` in its last run; `waited`: seconds by cause.

    steps       its work: the true one where the journal tells it, else the declared one, inf if unknown
    rates       true steps per second by GPU type, packed; None where the journal tells only what is believed of its kind
    min_gpus    the fewest GPUs that it can run on
    holding     GPUs of its last run; None if it has had none, or its last run was a trial or a round of tasks
    tasks       GPUs that compute a task for it now, as (node, bit of the slot), with the start of that task
    done        steps that the last event about one of its runs says are done
    last_run    its last run that is over, if any
    """

    __slots__ = (
        "app", "done", "ended", "epoch", "gpu_seconds", "gpus", "holding", "id", "kind", "last_run", "migrations",
        "min_gpus", "preemptions", "rates", "restarts", "since", "started", "status", "steps", "submitted", "tasks",
        "tenant", "using", "waited", "weight",
    )  # fmt: skip

    def __init__(self, event: events.Submitted) -> None:
        job = event.job
        self.id, self.tenant, self.app, self.weight = job.id, job.tenant, job.app, job.weight
        self.gpus, self.submitted = job.gpus, job.submitted
        self.min_gpus = 1 if job.micro_batches else min(job.min_gpus or job.gpus, job.gpus)
        self.kind, self.steps = event.kind, event.steps
        self.rates: tuple[float, ...] | None = None
        self.started = self.ended = self.since = nan
        self.status = Status.WAITING
        self.preemptions = self.migrations = self.restarts = self.using = self.epoch = 0
        self.gpu_seconds = self.done = 0.0
        self.waited = (0.0, 0.0, 0.0)
        self.holding: Holding | None = None
        self.tasks: dict[tuple[int, int], float] = {}
        self.last_run: RunInterval | None = None

    def start(self, action: actions.Launch | actions.Compute, now: float) -> None:
        """Give it GPUs: for a run, or for one task each of a round that is new or under way."""
        is_first = self.started != self.started  # NaN: it has not run before
        if is_first:
            self.started = now
        if isinstance(action, actions.Launch):
            if not is_first and self.holding not in (None, action.gpus) and self.using >= self.min_gpus:  # not a trial
                self.migrations += 1
            self.holding, self.using = action.gpus, gpu_count(action.gpus)
        else:
            self.tasks.update((gpu, now) for gpu in _each(action.gpus))
            self.holding, self.using = None, 0  # of the whole round it holds nothing
        self.epoch = action.epoch
        self.since = now
        self.status = Status.RUNNING
        order, fragmentation, capacity = self.waited
        more = action.waited
        self.waited = (order + more.order, fragmentation + more.fragmentation, capacity + more.capacity)

    def end_tasks(self, gpus: Iterable[tuple[int, int]], now: float, ended: RunEnd, cause: str = "") -> list[RunInterval]:
        """End the tasks on these GPUs, computed or given up; return a run for each."""
        found = [RunInterval(self.id, self.tasks.pop(gpu), now, (Slots(*gpu),), ended, cause) for gpu in gpus]
        self.gpu_seconds += sum(now - run.start for run in found)
        return found

    def end_run(self, now: float, status: Status) -> bool:
        """Take its GPUs away, if it has any; return whether it had."""
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


_JobEnd = events.Stopped | events.Failed | events.Finished | events.Cancelled
Changes = list[tuple[float, int]]
"""(time, change of a number), in order of time."""


@dataclass
class History:
    """All jobs in order of submission, what was held when, and the GPUs that were there over time.

    rates        steps per second, packed, by GPU type, of each kind of job, as believed; see `rates_of`
    held         changes of the number of GPUs held;  waiting: of waiting jobs;  live: of the GPUs that there are
    rejections   (job, why it can never run here)
    remarks      (time, what people should know of the decision)
    runs         in the order in which they ended; those that are open at the end of the journal come last
    withheld     GPUs, by slot, that are closed on a live node and that no run holds: (time, slot, 1 from then on, -1: no
                 more). `close` finds them, and takes them off `live`: a closed GPU is there while a run holds it
    end          time of the last entry
    is_live      the journal is of a live service, and may tell the ends of jobs that it does not name
    """

    cluster: Cluster
    is_live: bool = False
    jobs: dict[str, JobHistory] = field(default_factory=dict)
    rates: dict[str, tuple[float, ...]] = field(default_factory=dict)
    held: Changes = field(default_factory=list)
    waiting: Changes = field(default_factory=list)
    live: Changes = field(default_factory=list)
    rejections: list[tuple[str, str]] = field(default_factory=list)
    remarks: list[tuple[float, str]] = field(default_factory=list)
    runs: list[RunInterval] = field(default_factory=list)
    withheld: list[tuple[float, Slots, int]] = field(default_factory=list)
    end: float = -inf
    _holders: dict[Holding, int] = field(default_factory=dict)
    _nodes: list[tuple[float, events.NodeEvent]] = field(default_factory=list)

    @staticmethod
    def of(entries: Iterable[JournalEntry], cluster: Cluster) -> "History":
        """Read a journal."""
        history = History(cluster)
        for entry in entries:
            history.take(entry)
        history.close()
        return history

    def take(self, entry: JournalEntry) -> None:
        """Read one more entry."""
        for event in entry.events:
            # A live service keeps jobs from the core that cannot run on its cluster. Their runs end, and so may they.
            if not self.is_live or not isinstance(event, _JobEnd) or event.job in self.jobs:
                self._event(event, entry.now)
        for action in entry.actions:
            self._action(action, entry.now)
        self.end = entry.now

    def close(self) -> None:
        """End the journal here, perhaps in the middle of runs: they become open runs, and their jobs go on running."""
        for job in self.jobs.values():
            if job.status is Status.RUNNING:
                job.gpu_seconds += job.using * (self.end - job.since)
                job.gpu_seconds += sum(self.end - since for since in job.tasks.values())
                if job.holding is not None:
                    self._add_run(job, self.end, job.holding, RunEnd.OPEN)
                self.runs += (
                    RunInterval(job.id, since, self.end, (Slots(*gpu),), RunEnd.OPEN) for gpu, since in job.tasks.items()
                )
        self.withheld = withheld_slots(self._nodes, ((run.start, run.end, run.gpus) for run in self.runs))
        self.live += ((time, -more) for time, _, more in self.withheld)

    def rates_of(self, job: JobHistory) -> tuple[float, ...]:
        """Return steps per second by GPU type, packed: the true ones where the journal tells them, else those believed."""
        return self.rates[job.kind] if job.rates is None else job.rates

    def ended_jobs(self) -> list[JobHistory]:
        """Return the jobs that came to an end of their own: finished, failed or cancelled."""
        return [job for job in self.jobs.values() if job.status.is_final and job.status is not Status.REJECTED]

    def count(self, status: Status) -> int:
        """Return the number of jobs with this status."""
        return sum(job.status is status for job in self.jobs.values())

    def _event(self, event: events.Event, now: float) -> None:
        match event:
            case events.Submitted():
                self.jobs[event.job.id] = JobHistory(event)
                self.waiting.append((now, 1))
            case events.Carried():
                self._carried(event, now)
            case events.Failed() | events.Stopped() | events.Synchronised():
                self._run_ended(event, now)
            case events.Computed():
                job = self.jobs[event.job]
                if job.status is Status.RUNNING and job.epoch == event.epoch:
                    self.runs += job.end_tasks(_each(event.gpus), now, RunEnd.COMPUTED)
                    self.held.append((now, -gpu_count(event.gpus)))
            case events.Finished() | events.Cancelled():
                self._job_ended(event, now)
            case events.Estimated():
                self.rates[event.kind] = event.estimate.packed
            case events.Revealed():
                self.jobs[event.job].steps, self.jobs[event.job].rates = event.steps, event.rates
            case events.NodeLost() | events.NodeReturned() | events.NodeRestricted():
                self._node_changed(event, now)
            case _:
                pass

    def _node_changed(self, event: events.NodeEvent, now: float) -> None:
        self._nodes.append((now, event))
        if not isinstance(event, events.NodeRestricted):  # what is closed counts only while no run holds it: see `close`
            gpus = self.cluster.nodes[event.node].gpus
            self.live.append((now, gpus if isinstance(event, events.NodeReturned) else -gpus))
        if isinstance(event, events.NodeLost):
            self._lose_runs(event.node, now)

    def _lose_runs(self, node: int, now: float) -> None:
        """End the runs on a lost node that have not ended yet: a live service hears of that later, the simulator before."""
        if not any(slots.node == node for holding in self._holders for slots in holding):
            return
        for job in self.jobs.values():
            is_there = job.holding is not None and any(slots.node == node for slots in job.holding)
            if is_there and job.status is Status.RUNNING:
                job.restarts += 1
                self._release(job, now, Status.WAITING, RunEnd.LOST)

    def _job_ended(self, event: events.Finished | events.Cancelled, now: float) -> None:
        job = self.jobs[event.job]
        if job.status.is_final:
            return  # whichever end came first counts
        if isinstance(event, events.Cancelled):
            self._release(job, now, Status.CANCELLED, RunEnd.CANCELLED)
            return
        job.done = job.steps
        if job.status is not Status.RUNNING and job.last_run is not None:  # it was done before it could be stopped
            job.last_run.steps_after = job.steps
        self._release(job, now, Status.FINISHED, RunEnd.FINISHED)

    def _carried(self, event: events.Carried, now: float) -> None:
        """Take over a job of an earlier journal. One that is known already stays as it is, unless its run is gone."""
        job = self.jobs.get(event.job.id)
        if job is not None:
            if not event.gpus and job.status is Status.RUNNING:
                self._release(job, now, Status.WAITING, RunEnd.LOST)
            return
        job = self.jobs[event.job.id] = JobHistory(events.Submitted(event.job, event.kind, event.steps))
        self.waiting.append((now, 1))
        job.done, job.epoch = event.done, event.epoch - bool(event.gpus)
        if event.gpus:
            self._action(actions.Launch(job.id, event.epoch, event.gpus, Waited(0.0, 0.0, 0.0)), event.since)

    def _run_ended(self, event: events.Failed | events.Stopped | events.Synchronised, now: float) -> None:
        """Let the job wait again. A complete round is no restart; an event about an older run changes nothing.

        A run that was preempted was closed with that action. The event that follows says how far the run had come: also
        if the job was launched elsewhere in the meantime, so that its epoch is one ahead.
        """
        job = self.jobs[event.job]
        is_moving = job.status is Status.RUNNING and job.last_run is not None and job.epoch == event.epoch + 1
        if job.epoch != event.epoch and not is_moving:
            return
        job.done = event.steps
        if job.status is Status.RUNNING and not is_moving:
            job.restarts += not isinstance(event, events.Synchronised)
            ended, cause = (RunEnd.FAILED, event.cause) if isinstance(event, events.Failed) else (RunEnd.LOST, "")
            self._release(job, now, Status.WAITING, ended, cause)
        elif job.last_run is not None:
            job.last_run.steps_after = event.steps

    def _action(self, action: actions.Action, now: float) -> None:
        match action:
            case actions.Launch() | actions.Compute():
                self._start(action, now)
            case actions.Preempt():
                job = self.jobs[action.job]
                tried = action.why is actions.PreemptionCause.VALIDATED
                self._release(job, now, Status.WAITING, RunEnd.TRIED if tried else RunEnd.PREEMPTED)
                if tried:  # a trial does not count as a run
                    job.holding = None
                else:
                    job.preemptions += 1
            case actions.Reject():
                self._release(self.jobs[action.job], now, Status.REJECTED, RunEnd.CANCELLED)
                self.rejections.append((action.job, action.reason))
            case actions.Abandon():
                self._release(self.jobs[action.job], now, Status.FAILED, RunEnd.FAILED)
            case actions.Cancel():
                self._release(self.jobs[action.job], now, Status.CANCELLED, RunEnd.CANCELLED)
            case actions.Remark():
                self.remarks.append((now, action.text))
            case _:
                pass

    def _start(self, action: actions.Launch | actions.Compute, now: float) -> None:
        job = self.jobs[action.job]
        if job.status is Status.WAITING or isinstance(action, actions.Launch):  # not with further tasks of the same round
            self.waiting.append((now, -1))
        job.start(action, now)
        if isinstance(action, actions.Launch):
            self._holders[action.gpus] = self._holders.get(action.gpus, 0) + 1
            if self._holders[action.gpus] > 1:  # GPUs that two jobs share are held once
                return
        self.held.append((now, gpu_count(action.gpus)))

    def _release(self, job: JobHistory, now: float, status: Status, ended: RunEnd, cause: str = "") -> None:
        """End whatever the job holds and give it a new status."""
        if job.tasks:
            self.held.append((now, -len(job.tasks)))
            self.runs += job.end_tasks(list(job.tasks), now, ended, cause)
        if job.end_run(now, status):
            if job.holding is not None:
                self._add_run(job, now, job.holding, ended, cause)
                self._holders[job.holding] -= 1
                if not self._holders[job.holding]:
                    del self._holders[job.holding]
                    self.held.append((now, -job.using))
            if not status.is_final:
                self.waiting.append((now, 1))
        elif status.is_final:
            self.waiting.append((now, -1))

    def _add_run(self, job: JobHistory, now: float, gpus: Holding, ended: RunEnd, cause: str = "") -> None:
        """Add a run; it began with what the run before it kept."""
        before = job.last_run.steps_after if job.last_run else 0.0
        job.last_run = RunInterval(job.id, job.since, now, gpus, ended, cause, before, job.done)
        self.runs.append(job.last_run)


def floats(values: Iterable[float]) -> Floats:
    """Return a column of numbers."""
    return np.fromiter(values, dtype=np.float64)


def ints(values: Iterable[int]) -> Ints:
    """Return a column of whole numbers."""
    return np.fromiter(values, dtype=np.int64)


def cumulated(changes: Iterable[tuple[float, int]]) -> tuple[Floats, Ints]:
    """Return (times, level from each time on) of a list of changes; several changes at one time count as one."""
    table = np.array(list(changes), dtype=np.float64).reshape(-1, 2)
    times = table[:, 0]
    if np.any(np.diff(times) < 0):
        table = table[np.argsort(times, kind="stable")]
        times = table[:, 0]
    levels = np.cumsum(table[:, 1].astype(np.int64))
    last = np.append(np.diff(times) > 0, True) if len(times) else np.empty(0, dtype=bool)
    return times[last], levels[last]
