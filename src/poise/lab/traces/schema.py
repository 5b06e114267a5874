"""The schema of traces: what every reader and generator returns, and what the simulator and studies start from."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from poise.scheduler.model.job import Job


class JobOutcome(StrEnum):
    """How a job ends once its work is done. Philly's `Killed` is its owner's cancellation."""

    PASSED = "passed"
    FAILED = "failed"
    KILLED = "killed"


class FailedAttempt(NamedTuple):
    """An attempt that dies after this many seconds of running, for this category of cause."""

    after: float
    cause: str


class RunAttempt(NamedTuple):
    """An attempt that a log tells of: times on the trace's clock, `end` None where the log does not tell it.

    nodes   GPUs on each node, in the order of the log; () where the log does not say
    """

    start: float
    end: float | None
    nodes: tuple[int, ...] = ()


class LossCurve(NamedTuple):
    """How a model gets better: the loss after k steps is 1 / (speed·k + start) + floor (Optimus, EuroSys'18 §3.1)."""

    speed: float
    start: float
    floor: float

    def loss(self, steps: float) -> float:
        """Return the loss after this many steps."""
        return 1.0 / (self.speed * steps + self.start) + self.floor


@dataclass(frozen=True, slots=True)
class TraceJob:
    """A job, and what will happen to it in a simulation: the scheduler sees only `job`.

    failures   attempts that die before the job's last one, in order; if it is broken, its last one too
    loss       how its loss falls; what it reports while it runs. None: it reports nothing
    observed   what a log says happened to it, in order: for studies of the log. The simulator does not look at it, and
               jobs that differ in nothing else are equal
    broken     it fails for good with the last of `failures`, whatever work is left; its outcome is FAILED
    """

    job: Job
    outcome: JobOutcome = JobOutcome.PASSED
    failures: tuple[FailedAttempt, ...] = ()
    loss: LossCurve | None = None
    observed: tuple[RunAttempt, ...] = field(default=(), compare=False)
    broken: bool = False


@dataclass(frozen=True, slots=True)
class Trace:
    """Jobs by (submitted, place in the trace). `notes` say what the reader left out or assumed, for stderr."""

    name: str
    jobs: tuple[TraceJob, ...]
    notes: tuple[str, ...] = ()
