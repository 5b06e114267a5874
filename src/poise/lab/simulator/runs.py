"""What is under way in the simulated world: runs that hold GPUs, rounds of training task by task, and the fates of jobs."""

from math import floor, inf

from poise.lab.traces.schema import TraceJob
from poise.scheduler.model.cluster import Holding
from poise.scheduler.model.event import Failed
from poise.scheduler.model.micro_batches import Tasks
from poise.scheduler.model.speed import Estimate


class SimulatedRun:
    """A run under way: since when it is how fast, from which step, where, and whether it dies at its end.

    began   when it first made progress;  note: number of the last forecast of its end
    kept    work that the last checkpoint held when the speed last changed
    """

    __slots__ = ("began", "dies", "epoch", "gpus", "kept", "note", "rate", "since", "steps")

    def __init__(self, epoch: int, gpus: Holding, rate: float, since: float, steps: float) -> None:
        self.epoch = epoch
        self.dies = False
        self.note = 0
        self.began = since
        self.gpus = gpus
        self.rate = rate
        self.since = since
        self.steps = self.kept = steps

    def is_on(self, node: int) -> bool:
        """It has GPUs of this node."""
        return any(slots.node == node for slots in self.gpus)

    def seconds(self, now: float) -> float:
        """Time with progress so far."""
        return max(0.0, now - self.since)

    def steps_at(self, now: float) -> float:
        """Work done so far."""
        return self.steps + self.rate * self.seconds(now)

    def change_rate(self, now: float, rate: float, every: float) -> None:
        """From now on it is as fast as this; nothing is saved for that."""
        self.kept = self.saved_at(now, every)
        self.steps, self.since, self.rate = self.steps_at(now), max(now, self.since), rate

    def saved_at(self, now: float, every: float) -> float:
        """Work that the last checkpoint holds, of those that are written every so many seconds from its beginning on."""
        if every <= 0:
            return self.steps_at(now)
        if self.since == self.began:
            return self.steps + self.rate * every * floor(self.seconds(now) / every)
        last = self.began + every * floor((now - self.began) / every)
        return self.steps + self.rate * (last - self.since) if last >= self.since else self.kept


class Round:
    """A round of training that is computed task by task: a run at task grain.

    tasks   what it divides into;  left: how many of them no GPU has been asked for yet
    began   moment of its first tasks
    ends    GPUs that are computing, as masks by node, by the moment at which they are done
    used    all GPUs that have taken part, as masks by node
    """

    __slots__ = ("began", "ends", "epoch", "left", "tasks", "used")

    def __init__(self, epoch: int, began: float, tasks: Tasks) -> None:
        self.epoch = epoch
        self.began = began
        self.tasks = tasks
        self.left = tasks.count
        self.ends: dict[float, dict[int, int]] = {}
        self.used: dict[int, int] = {}

    def is_on(self, node: int) -> bool:
        """A GPU of this node is computing for it."""
        return any(node in gpus for gpus in self.ends.values())


class Fate:
    """What will happen to one job, and how far it has come.

    total        work to be done;  steps: work that would survive a stop now
    attempts     failed ones so far;  attempt_seconds: running time of the current one before the current run
    cold         seconds until a GPU that does not keep the job's model can compute; of jobs whose rounds divide
    unreported   running time at task grain since the last report of loss
    """

    __slots__ = ("attempt_seconds", "attempts", "cold", "run", "speed", "steps", "total", "trace_job", "unreported")

    def __init__(self, trace_job: TraceJob, speed: Estimate, total: float, cold: float = 0.0) -> None:
        self.trace_job = trace_job
        self.speed = speed
        self.total = total
        self.cold = cold
        self.steps = 0.0
        self.attempts = 0
        self.attempt_seconds = 0.0
        self.unreported = 0.0
        self.run: SimulatedRun | Round | None = None

    def seconds_to_failure(self) -> float:
        """Running time until the current attempt dies; inf if it will not."""
        failures = self.trace_job.failures
        return failures[self.attempts].after - self.attempt_seconds if self.attempts < len(failures) else inf

    def die(self, epoch: int) -> Failed:
        """The current attempt dies; of a job that is broken, the last of them for good."""
        failures = self.trace_job.failures
        cause = failures[self.attempts].cause
        self.attempts += 1
        self.attempt_seconds = 0.0
        final = self.trace_job.broken and self.attempts == len(failures)
        return Failed(self.trace_job.job.id, epoch, cause, self.steps, final=final)

    def fail(self, epoch: int) -> Failed:
        """All work is done, and was for nothing."""
        cause = self.trace_job.failures[-1].cause if self.trace_job.broken else "unsuccessful at its end"
        return Failed(self.trace_job.job.id, epoch, cause, self.total, final=True)
