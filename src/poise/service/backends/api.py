"""The seam between the live engine and a world of real processes: orders go down, news comes up.

An order carries job and epoch; carrying one out twice is the same as once. News is told in the order in which it became
known, from whatever thread; the engine turns it into facts for the core. Moments are seconds since 1970 by this machine's
clock, and may be wrong: the engine sees to it that time never goes backwards.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol

from poise.service.wire.request import JobRequest


class RunPart(NamedTuple):
    """GPUs of one node that a run has: their slots, ascending."""

    node: str
    gpu_type: str
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RunOrder:
    """Start the job's processes on just these GPUs, once they are free and the job's run before this one is over.

    tenant   that the job belongs to
    ran      seconds for which processes of its job have run before
    beside   job that is to share these GPUs: it need not have left them
    speeds   of a job whose steps divide: how fast one GPU of each type is believed to be; empty: all alike
    reason   of a run that is to end by now (`LiveBackend.adopt`): why, in the words that everybody was told; None: not known
    """

    job: str
    epoch: int
    gpus: tuple[RunPart, ...]
    request: JobRequest
    tenant: str = "default"
    ran: float = 0.0
    beside: str | None = None
    speeds: Mapping[str, float] = field(default_factory=dict, hash=False)
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class RunNotice:
    """Why a run is to end: said to the worker, to the owner and in the log alike.

    deadline   seconds that it has, from now, to write its checkpoint and leave
    """

    cause: str
    text: str
    deadline: float


class RunEnding(StrEnum):
    """How a run ended.

    FINISHED   the job has done all its work (exit code 0)
    YIELDED    it left because it was asked to; or it was made to leave, or never began because that was no longer wanted
    FAILED     it died by itself, or could not be started
    """

    FINISHED = "finished"
    YIELDED = "yielded"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class RunBegan:
    """All replicas of a run have been started."""

    job: str
    epoch: int
    at: float


@dataclass(frozen=True, slots=True)
class RunProgressed:
    """What a run reports of itself. A run that has reported a checkpoint and a throughput is one that leaves when asked to.

    steps        done in all
    checkpoint   steps that would survive now; None: it saves nothing
    throughput   steps a second; None: it has not done a step yet
    """

    job: str
    epoch: int
    at: float
    steps: float
    total: float | None
    checkpoint: float | None
    throughput: float | None
    loss: float | None


@dataclass(frozen=True, slots=True)
class RunEnded:
    """All processes of a run are gone, and its GPUs are free.

    steps   steps that the job would go on from; None: it never reported any
    cause   of a failure, in the words of scheduler/model/failures.py where one fits; of a run that was made to leave, how
    codes   exit codes by rank; a signal counts negative; None: not known
    """

    job: str
    epoch: int
    at: float
    how: RunEnding
    steps: float | None
    cause: str | None
    codes: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class BackendFailed:
    """The world can do nothing any more, by a fault of its own: the last thing that it tells."""

    problem: str


RunEvent = RunBegan | RunProgressed | RunEnded


class DesiredState(StrEnum):
    """What the journal wants of a run that it does not know the end of."""

    RUN = "run"
    LEAVE = "leave"
    GONE = "gone"


class LogPart(NamedTuple):
    """Some bytes of a log, counted from the first one ever written: where they begin, and where to go on."""

    text: bytes
    offset: int
    next: int


class LiveBackend(Protocol):
    """A live back end. Methods, but for `adopt`, return at once; all are called from one thread. News comes from any."""

    def adopt(self, runs: Sequence[tuple[RunOrder, DesiredState]]) -> None:
        """Called once, before anything else: every run that the journal does not know the end of, and what is wanted of it.

        A run that is under way is taken over; one that ended meanwhile is told with the moment at which it did; one that
        was ordered and never began is begun (RUN) or told as YIELDED. Whatever else is found is ended.

        Comes back once all of them have been looked at: what ended meanwhile has been told by then, as far as it is known.
        """

    def launch(self, order: RunOrder) -> None:
        """Begin a run. If it cannot be begun, it is told as FAILED."""

    def stop(self, job: str, epoch: int, notice: RunNotice) -> None:
        """End a run's lease: ask for a checkpoint, wait until the deadline, then TERM, then KILL. Told as RunEnded."""

    def kill(self, job: str, epoch: int, reason: str) -> None:
        """End a run whose job is no longer wanted: TERM, a short wait, KILL. Told as RunEnded (YIELDED)."""

    def log(self, job: str, replica: int, offset: int, limit: int) -> LogPart:
        """A part of what a replica has written, in all of its job's runs; nothing if it has written nothing.

        OSError: it cannot be read at the moment; PermissionError: it may not be read.
        """

    def close(self) -> None:
        """Let go of everything; processes go on."""


OnEvent = Callable[[RunEvent | BackendFailed], None]
