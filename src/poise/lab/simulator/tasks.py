"""Rounds of training computed task by task, each task on one GPU, which is free again when the task is done.

A step is one run. When its last task is computed the synchronisation begins, which needs no GPU; at its end the next
step may begin. Tasks are not preempted: what stops a step (a failure, a lost node, a cancellation) stops all of its
tasks, and nothing of the step counts. Times are exact: a task ends at its start + the time its GPU needs to switch to
the job + its computation.

`TaskRuns` is the part of the simulator that does this; below it stand `Switching`, what it costs a GPU to turn to
another job, and `ResidentModels`, which models each GPU still holds.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from heapq import heappop, heappush
from math import inf, nan

from poise.lab.simulator.runs import SimulatedJob, SimulatedRun, TaskStep
from poise.scheduler.model.action import Compute
from poise.scheduler.model.cluster import Holding, bits, gpu_count, merged
from poise.scheduler.model.errors import InvariantError, OptionError, UnknownNameError
from poise.scheduler.model.event import Computed, Event, Progressed, Stopped, Synchronised
from poise.scheduler.model.job import Job
from poise.scheduler.model.topology import Topology

LATER = 1 << 62
"""Added to the sequence number of a failure: work that is done at the same time counts first."""
ROUNDING = 1e-9
"""A smaller share of a job's work is a rounding error of sums and divisions, not worth another step."""


class TaskEvent(Enum):
    """What a step waits for."""

    COMPUTED = auto()
    SYNCHRONISED = auto()
    FAILURE = auto()


@dataclass(slots=True, eq=False)
class TaskRuns:
    """All steps under way.

    running   the simulator's running jobs, kept up to date here
    numbers   sequence numbers, shared with the simulator: they order what happens at the same time
    outcome   (job, epoch) -> how the job ends now that its work is done
    pending   a heap of what is to come, by time and then by sequence number; entries of steps that ended are void
    """

    topology: Topology
    gpus: "ResidentModels"
    running: dict[str, SimulatedJob]
    numbers: Iterator[int]
    report_every: float
    outcome: Callable[[SimulatedJob, int], Event]
    pending: list[tuple[float, int, SimulatedJob, TaskStep, TaskEvent]] = field(default_factory=list)

    def compute(self, action: Compute, job: SimulatedJob, now: float) -> None:
        """Start a task of the current step on each of these GPUs; the first tasks of a step begin it.

        Raises InvariantError for more tasks than the step has left, and for GPUs that are busy or of no use to the job.
        """
        tasks, run = job.speed.tasks, job.run
        if tasks is None:
            raise InvariantError(f"{action.job} is to compute tasks, but its steps do not divide")
        if run is None:
            run = job.run = TaskStep(action.epoch, now, tasks, tasks.count)
            self.running[action.job] = job
            failure = job.seconds_to_failure()
            if failure < inf:
                heappush(self.pending, (now + failure, next(self.numbers) + LATER, job, run, TaskEvent.FAILURE))
        elif isinstance(run, SimulatedRun) or run.epoch != action.epoch:
            raise InvariantError(f"{action.job} is to compute for run {action.epoch}, but run {run.epoch} has not ended")
        run.left -= gpu_count(action.gpus)
        if run.left < 0:
            raise InvariantError(f"{action.job} is to compute {-run.left} tasks more than its step has left")
        self.gpus.take(action.job, action.gpus)
        for node, mask in action.gpus:
            seconds = tasks.seconds[self.topology.type_of[node]]
            if seconds <= 0:
                raise InvariantError(f"{action.job} is to compute on node {node}, whose GPUs are of no use to it")
            run.used[node] = run.used.get(node, 0) | mask
            for bit in bits(mask):
                end = now + (self.gpus.turn(action.job, node, bit, job.cold) + seconds)
                if end not in run.ends:  # tasks of a step that end together are one event
                    run.ends[end] = {}
                    heappush(self.pending, (end, next(self.numbers), job, run, TaskEvent.COMPUTED))
                run.ends[end][node] = run.ends[end].get(node, 0) | bit

    def next_time(self) -> float:
        """Return when the next event of a step comes; inf if none will."""
        pending = self.pending
        while pending and pending[0][2].run is not pending[0][3]:
            heappop(pending)
        return pending[0][0] if pending else inf

    def emit(self, now: float, before: tuple[float, float], events: list[Event]) -> None:
        """Append all events that come before this (time, sequence number)."""
        pending = self.pending
        while pending and pending[0][:2] < before:
            time, _, job, run, due = heappop(pending)
            if job.run is not run:
                continue
            if due is TaskEvent.COMPUTED:
                self._computed(job, run, time, now, events)
            elif due is TaskEvent.SYNCHRONISED:
                self._synchronised(job, run, now, events)
            else:
                self.leave(job, run)
                events.append(job.fail_attempt(run.epoch))

    def _computed(self, job: SimulatedJob, run: TaskStep, time: float, now: float, events: list[Event]) -> None:
        """Free the GPUs of tasks that are done. After the last task of the step comes its synchronisation."""
        gpus = merged(run.ends.pop(time).items())
        self.gpus.free(gpus)
        events.append(Computed(job.id, run.epoch, gpus))
        if run.left or run.ends:
            return
        # The longest of the types that took part, at the distance of all GPUs that took part.
        locality = self.topology.locality(merged(run.used.items()))
        sync = max(run.tasks.sync[self.topology.type_of[node]][locality] for node in run.used)
        if sync > 0:
            heappush(self.pending, (now + sync, next(self.numbers), job, run, TaskEvent.SYNCHRONISED))
        else:
            self._synchronised(job, run, now, events)

    def _synchronised(self, job: SimulatedJob, run: TaskStep, now: float, events: list[Event]) -> None:
        """Complete the step, perhaps the last one."""
        self.leave(job, run)
        job.attempt_seconds += now - run.began
        job.steps = min(job.steps + 1.0, job.total)
        if job.total - job.steps <= ROUNDING * job.total:
            events.append(self.outcome(job, run.epoch))
            return
        curve = job.trace.loss
        job.unreported += now - run.began
        if curve is not None and job.unreported >= self.report_every:
            job.unreported = 0.0
            events.append(Progressed(job.id, run.epoch, job.steps, curve.loss(job.steps)))
        events.append(Synchronised(job.id, run.epoch, job.steps))

    def halt(self, job: SimulatedJob, run: TaskStep, now: float) -> Stopped:
        """Stop the step from outside."""
        self.leave(job, run)
        job.attempt_seconds += now - run.began
        return Stopped(job.id, run.epoch, job.steps)

    def leave(self, job: SimulatedJob, run: TaskStep) -> None:
        """End the step; whatever computes for it stops."""
        job.run = None
        del self.running[job.id]
        for gpus in run.ends.values():
            self.gpus.free(merged(gpus.items()))


@dataclass(frozen=True, slots=True)
class Switching:
    """What it costs a GPU to turn to another job whose steps divide into tasks (docs/algorithms/hare.md).

    It is free if the same job ran last, `resident` seconds if the GPU still keeps the job's model, and otherwise (cold)
    the size of the model ÷ the bandwidth of the bus.

    bandwidth   bytes per second
    size        bytes of a model whose size is not stated
    keep        jobs whose models a GPU keeps, the running one included
    """

    resident: float = 0.003
    bandwidth: float = 12e9
    size: float = 500e6
    keep: int = 4

    def cold(self, size: float | None) -> float:
        """Return the seconds to load a model of this many bytes."""
        return (self.size if size is None else size) / self.bandwidth


FREE = Switching(resident=0.0, bandwidth=inf)
"""Turning to another job costs nothing."""
_LEAST = {"resident": 0.0, "bandwidth": 1.0, "size": 0.0, "keep": 1.0}
"""The least value of each cost."""


def parse_switching(spec: str) -> Switching | None:
    """Read `naive` (None: each start costs the restart overhead), `free`, or costs: `resident=0.01,bandwidth=6e9,keep=2`."""
    if spec == "naive":
        return None
    if spec == "free":
        return FREE
    given: dict[str, float] = {}
    for part in spec.split(","):
        name, _, text = part.partition("=")
        if name not in _LEAST:
            raise UnknownNameError("cost of switching", name, (*_LEAST, "naive", "free"))
        try:
            value = float(text)
        except ValueError:
            value = nan
        if not _LEAST[name] <= value < inf:
            raise OptionError("switching", f"{name}: expected a number of at least {_LEAST[name]:g}, got {text[:50]!r}")
        if name == "keep" and value != int(value):
            raise OptionError("switching", f"keep: expected a whole number of jobs, got {text[:50]!r}")
        given[name] = value
    return replace(Switching(**given), keep=int(given.get("keep", Switching().keep)))  # type: ignore[arg-type]


def unknown_size(_job: Job) -> float | None:
    """Return None: the size of this job's model is not known."""
    return None


class ResidentModels:
    """For every GPU, whether it is busy and which jobs' models it keeps. All operations are O(1) per GPU.

    A GPU keeps the models of the jobs that ran on it last. To make room it evicts the one whose run completed earliest.
    Two jobs never have the same weights, so residency is a matter of jobs, whatever their models are called.

    A GPU is named by its node and its bit in a mask of slots. Runs on a GPU follow one another, so they complete in the
    order in which they began; jobs that share a GPU count in that order too.
    """

    def __init__(self, nodes: int, keep: int, resident: float) -> None:
        self._keep, self._resident = keep, resident
        self._busy = [0] * nodes
        self._kept: list[dict[int, dict[str, None]]] = [{} for _ in range(nodes)]

    def take(self, job: str, gpus: Holding) -> None:
        """Mark GPUs as busy. Raises InvariantError if one of them is."""
        busy = self._busy
        for node, mask in gpus:
            if busy[node] & mask:
                raise InvariantError(f"{job} is to run on node {node}, slots {mask:#b}, of which {busy[node]:#b} are busy")
            busy[node] |= mask

    def free(self, gpus: Holding) -> None:
        """Mark GPUs as idle."""
        for node, mask in gpus:
            self._busy[node] &= ~mask

    def turn(self, job: str, node: int, bit: int, cold: float) -> float:
        """Turn a GPU to a job; return the seconds it takes, `cold` if the GPU does not keep the job's model."""
        kept = self._kept[node].get(bit)
        if kept is None:
            kept = self._kept[node][bit] = {}
        elif job in kept:
            if next(reversed(kept)) == job:
                return 0.0
            del kept[job]
            kept[job] = None  # insertion order: it is now the last to have run
            return self._resident
        kept[job] = None
        if len(kept) > self._keep:
            del kept[next(iter(kept))]
        return cold

    def turn_all(self, job: str, gpus: Holding, cold: float) -> float:
        """Turn these GPUs to a job; return the seconds until the last of them has."""
        return max(self.turn(job, node, bit, cold) for node, mask in gpus for bit in bits(mask))

    def forget(self, node: int) -> None:
        """Drop what a lost node kept."""
        self._kept[node].clear()
