"""The one schema that every reader and generator answers with."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from poise.model.job import Job


class Outcome(StrEnum):
    """How a job ends once its work is done. Philly's `Killed` is its owner's cancellation."""

    PASSED = "passed"
    FAILED = "failed"
    KILLED = "killed"


class FailedAttempt(NamedTuple):
    """An attempt that dies after this many seconds of running, for this category of cause."""

    after: float
    cause: str


class Curve(NamedTuple):
    """How a model gets better: the loss after k steps is 1 / (speed·k + start) + floor (Optimus, EuroSys'18 §3.1)."""

    speed: float
    start: float
    floor: float

    def loss(self, steps: float) -> float:
        """After so many steps."""
        return 1.0 / (self.speed * steps + self.start) + self.floor


@dataclass(frozen=True, slots=True)
class TraceJob:
    """A job, and what the world will do to it: the scheduler sees only `job`.

    failures   attempts that die before the job's last one, in order
    loss       how its loss falls; what it reports while it runs. None: it reports nothing
    """

    job: Job
    outcome: Outcome = Outcome.PASSED
    failures: tuple[FailedAttempt, ...] = ()
    loss: Curve | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """Jobs by (submitted, place in the trace). `notes` say what the reader left out or assumed, for stderr."""

    name: str
    jobs: tuple[TraceJob, ...]
    notes: tuple[str, ...] = ()
