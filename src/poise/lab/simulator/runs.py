"""The state of simulated jobs: what will happen to each, how far it has come, and the run that it has now, if any.

A run is either a `SimulatedRun`, which holds its GPUs from launch to end, or a `TaskStep`, one step of training that
is computed task by task (`tasks.py`).
"""

from dataclasses import dataclass, field
from math import floor, inf

from poise.lab.traces.schema import TraceJob
from poise.scheduler.model.cluster import Holding
from poise.scheduler.model.event import Failed
from poise.scheduler.model.micro_batches import Tasks
from poise.scheduler.model.speed import Estimate


class SimulatedRun:
    """A run that holds GPUs and makes progress at a constant rate, until that rate changes.

    began    when it first made progress, which is after the restart overhead
    since    when it got its present rate, in steps per second; steps: work done by then
    kept     work in the last checkpoint when the rate last changed
    dies     the attempt fails at the forecast end, rather than finish its work
    forecast number of the last forecast of its end; earlier forecasts in the queue are void
    """

    __slots__ = ("began", "dies", "epoch", "forecast", "gpus", "kept", "rate", "since", "steps")

    def __init__(self, epoch: int, gpus: Holding, rate: float, since: float, steps: float) -> None:
        self.epoch, self.gpus, self.rate = epoch, gpus, rate
        self.dies, self.forecast = False, 0
        self.began = self.since = since
        self.steps = self.kept = steps

    def is_on(self, node: int) -> bool:
        """Whether it holds GPUs of this node."""
        return any(slots.node == node for slots in self.gpus)

    def steps_at(self, now: float) -> float:
        """Return the work done so far."""
        return self.steps + self.rate * max(0.0, now - self.since)

    def change_rate(self, now: float, rate: float, every: float) -> None:
        """Go on at another rate. That does not write a checkpoint, so remember what the last one holds."""
        self.kept = self.saved_at(now, every)
        self.steps, self.since, self.rate = self.steps_at(now), max(now, self.since), rate

    def saved_at(self, now: float, every: float) -> float:
        """Return the work in the last checkpoint, if one is written every `every` seconds since `began`; 0: always."""
        if every <= 0:
            return self.steps_at(now)
        if self.since == self.began:
            return self.steps + self.rate * every * floor(max(0.0, now - self.since) / every)
        last = self.began + every * floor((now - self.began) / every)
        return self.steps + self.rate * (last - self.since) if last >= self.since else self.kept


@dataclass(slots=True, eq=False)
class TaskStep:
    """One step of training, computed task by task: a run at task grain.

    tasks   what the step divides into;  left: how many tasks have not been started
    ends    GPUs that compute now, as masks by node, by the time at which they are done
    used    all GPUs that have taken part, as masks by node
    """

    epoch: int
    began: float
    tasks: Tasks
    left: int
    ends: dict[float, dict[int, int]] = field(default_factory=dict)
    used: dict[int, int] = field(default_factory=dict)

    def is_on(self, node: int) -> bool:
        """Whether a GPU of this node computes for it."""
        return any(node in gpus for gpus in self.ends.values())


class SimulatedJob:
    """One job of the trace: what will happen to it, which only the simulator knows, and how far it has come.

    total            work to be done;  steps: work that would survive a stop now
    attempts         failed ones so far;  attempt_seconds: running time of the current attempt before the current run
    cold             seconds until a GPU that does not keep its model can compute; 0 unless its steps divide
    unreported       running time at task grain since its last report of loss
    """

    __slots__ = ("attempt_seconds", "attempts", "cold", "id", "run", "speed", "steps", "total", "trace", "unreported")

    def __init__(self, trace: TraceJob, speed: Estimate, total: float, cold: float = 0.0) -> None:
        self.id, self.trace = trace.job.id, trace
        self.speed, self.total, self.cold = speed, total, cold
        self.attempts = 0
        self.steps = self.attempt_seconds = self.unreported = 0.0
        self.run: SimulatedRun | TaskStep | None = None

    def seconds_to_failure(self) -> float:
        """Return the running time until the current attempt fails; inf if it will not."""
        failures = self.trace.failures
        return failures[self.attempts].after - self.attempt_seconds if self.attempts < len(failures) else inf

    def fail_attempt(self, epoch: int) -> Failed:
        """End the current attempt with its failure, which is final if the job is broken and has no further attempt."""
        failures = self.trace.failures
        cause = failures[self.attempts].cause
        self.attempts += 1
        self.attempt_seconds = 0.0
        final = self.trace.broken and self.attempts == len(failures)
        return Failed(self.id, epoch, cause, self.steps, final=final)

    def fail_at_end(self, epoch: int) -> Failed:
        """Fail for good with all work done, as the trace says of this job."""
        cause = self.trace.failures[-1].cause if self.trace.broken else "unsuccessful at its end"
        return Failed(self.id, epoch, cause, self.total, final=True)
