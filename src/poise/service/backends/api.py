"""What a live back end is: orders go down, events come up. A new back end implements `LiveBackend`, and nothing else.

The engine (`service/server/engine.py`) decides and journals; a back end carries out. It chooses nothing: the engine says
which run starts on which GPUs and which run ends. A *run* is one launch of a job, identified by `(job, epoch)`; a job's
next run has a higher epoch. The engine gives an order only after the journal has it, so after a crash the journal knows
every run that may exist, and `adopt` hands all of them to the new back end.

The guarantees, in short:

- **Idempotence.** An order names its run. Carrying it out twice is the same as once; an order for an unknown run does
  nothing.
- **One end.** Each run that was launched or adopted is reported as `RunEnded` exactly once, unless the back end is closed
  first; then the next back end reports it. By then its processes are gone and its GPUs are free.
- **Threads.** The engine calls all methods from one thread, except `log`, which any thread may call. Events may come from
  any thread, also during a call; `on_event` only queues, so it does not block and may be called with locks held.
- **Blocking.** `adopt` may block until it has looked at every run; `close` until its threads have ended. All other orders
  return at once and report their outcome as events.
- **Failures.** A run that cannot start or be kept is reported as `RunEnding.FAILED` with a cause. A back end that cannot go
  on at all reports `BackendFailed`; the service then stops, and the runs stay as they are.

Times are seconds since 1970 by the back end's clock. They may be wrong: the engine sees to it that time never goes
backwards.

`tests/contract/test_backends.py` holds every back end to this.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol

from poise.scheduler.model.cluster import Node
from poise.service.wire.request import JobRequest


class LiveBackend(Protocol):
    """Runs jobs on real resources. Lives as long as one start of the service; the runs outlive it."""

    def adopt(self, runs: "Sequence[tuple[RunOrder, DesiredState]]") -> None:
        """Take over the runs of the service before a restart. Called exactly once, before anything else.

        `runs` are all runs whose end the journal does not know, each with what is wanted of it. A run that lives is watched
        from now on, and ended if it is not wanted. A run that ended meanwhile is reported with the time at which it did. A
        run that was ordered and never began is begun (RUN) or reported as YIELDED. Runs that are found and not in `runs`
        are ended and not reported.

        Returns once each run was looked at: ends that are known by then have been reported, so that the first decision
        after a restart counts on GPUs that are really in use.
        """

    def launch(self, order: "RunOrder") -> None:
        """Start a run once its GPUs are free and earlier runs of its job are over; RunBegan or RunEnded (FAILED) follows."""

    def stop(self, job: str, epoch: int, notice: "RunNotice") -> None:
        """Ask a run for a checkpoint and its GPUs; RunEnded follows.

        The run has until the notice's deadline to leave by itself, then gets TERM, then KILL. A run that finishes its work
        on the way out is reported as FINISHED. `kill` may follow; a second `stop` does nothing.
        """

    def kill(self, job: str, epoch: int, reason: str) -> None:
        """End a run whose job is not wanted any more: TERM, a short wait, KILL; RunEnded (YIELDED), however it went."""

    def log(self, job: str, replica: int, offset: int, limit: int) -> "LogPart":
        """Read at most `limit` bytes of what a replica has written in all runs of its job; empty if there is nothing.

        A negative offset counts from the end. Called from any thread, and may block on storage. OSError: it cannot be read
        at the moment; PermissionError: it may not be read.
        """

    def close(self) -> None:
        """Stop watching and reporting, and release everything; the runs go on. May be called twice."""


class OperatorLog(Protocol):
    """Where the operator reads what is odd (`server/logs.py`)."""

    def info(self, event: str, **values: object) -> None:
        """Write an event of normal operation."""

    def warning(self, event: str, **values: object) -> None:
        """Write an event that an operator may want to look at."""


# Orders: from the engine to the back end


class RunPart(NamedTuple):
    """The GPUs of a run on one node: their slots, ascending."""

    node: str
    gpu_type: str
    slots: tuple[int, ...]


class GangPart(NamedTuple):
    """The part of a run that one node starts, where the others are elsewhere.

    master   address of the node that has rank 0
    port     MASTER_PORT of the run; 0: that node is this one, and chooses it
    """

    node: str
    master: str
    port: int


@dataclass(frozen=True, slots=True)
class RunOrder:
    """Start the job's processes on exactly these GPUs. Rebuilt from the journal after a restart (`LiveBackend.adopt`).

    speeds   believed speed of one GPU by type, for a job whose steps divide into micro-batches; empty: all alike
    """

    job: str
    epoch: int
    gpus: tuple[RunPart, ...]
    request: JobRequest
    tenant: str = "default"  # owner of the job
    ran: float = 0.0  # seconds that earlier runs of the job have taken, to be counted against `request.max_duration`
    beside: str | None = None  # job that shares these GPUs: the run need not wait for it to leave them
    speeds: Mapping[str, float] = field(default_factory=dict, hash=False)
    reason: str | None = None  # of an adopted run that is to end: why, as users were told; None: not known
    part: GangPart | None = None  # start only this part of it; None: all of it

    @property
    def parts_here(self) -> tuple[RunPart, ...]:
        """The GPUs on which this order starts processes."""
        return self.gpus if self.part is None else tuple(each for each in self.gpus if each.node == self.part.node)


@dataclass(frozen=True, slots=True)
class RunNotice:
    """Why a run has to end, in the same words for the worker, the owner and the log."""

    cause: str  # code, such as `preempted`
    text: str
    deadline: float  # seconds from now in which to write a checkpoint and leave


class DesiredState(StrEnum):
    """What is wanted of an adopted run: RUN on, LEAVE after a checkpoint (as by `stop`), or be GONE (as by `kill`)."""

    RUN = "run"
    LEAVE = "leave"
    GONE = "gone"


# Events: from the back end to the engine


@dataclass(frozen=True, slots=True)
class RunBegan:
    """All replicas of a run have started. Reported again for a run that is adopted while it lives.

    It knows best what the runs before it have kept: the node of one that was lost may not have told.
    """

    job: str
    epoch: int
    at: float
    begun: float | None = None  # steps from which it goes on; None: not known


@dataclass(frozen=True, slots=True)
class RunProgressed:
    """What a run reports of itself. Only the latest counts, so a back end may skip some.

    A run that has reported both a checkpoint and a throughput is taken to leave when asked to.
    """

    job: str
    epoch: int
    at: float
    steps: float  # done in all runs of the job
    total: float | None  # steps of the job; None: not known
    checkpoint: float | None  # steps that would survive now; None: it saves nothing
    throughput: float | None  # steps per second; None: it has not completed a step yet
    loss: float | None


class RunEnding(StrEnum):
    """How a run ended."""

    FINISHED = "finished"  # the job has done all its work (exit code 0)
    YIELDED = "yielded"  # it left when asked to, was made to leave, or never began because it was not wanted any more
    FAILED = "failed"  # it died by itself, or could not be started


@dataclass(frozen=True, slots=True)
class RunEnded:
    """All processes of a run are gone, and its GPUs are free. The last event of a run.

    cause   of a failure, a signature of scheduler/model/failures.py where one fits; of a run that was made to leave, the
            signal (`TERM`, `KILL`)
    codes   exit codes by rank, signals negative; None: not known; empty: no replica was started, or none is known
    """

    job: str
    epoch: int
    at: float
    how: RunEnding
    steps: float | None  # from which the job would continue; None: it never reported any
    cause: str | None
    codes: tuple[int | None, ...]


class NodeState(StrEnum):
    """What is known of a node.

    UP            it takes orders
    UNREACHABLE   it has been silent for a while; its runs may go on, and orders for it wait
    LOST          nothing runs there any more, and nothing can be started
    """

    UP = "up"
    UNREACHABLE = "unreachable"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class NodeReport:
    """What a node is and how it is, from now on. Reported when that changes, also for a node that was unknown so far.

    A node that is LOST has ended its runs; their `RunEnded` come before or after this. Runs that are reported to be UP again
    are none that were lost with it. A back end whose nodes cannot change (this machine) reports none.

    evidence   why, in words for people
    withheld   slots that are used by others and must not be given out
    """

    node: Node
    state: NodeState
    at: float
    evidence: str
    withheld: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class JobFound:
    """A job that was created outside of Poise, and that this back end is to run where Poise says.

    Reported again after each start, and whenever an answer (`JobFinder`) has asked for that.

    key      that it is known by for ever: found again, it is the same job
    tenant   whose it is
    """

    key: str
    tenant: str
    request: JobRequest


@dataclass(frozen=True, slots=True)
class JobGone:
    """A job that was found does not exist any more: its owner has deleted it."""

    job: str


@dataclass(frozen=True, slots=True)
class JobHeld:
    """The owner of a job that was found wants it not to run for the time being, or to run again."""

    job: str
    is_held: bool


@dataclass(frozen=True, slots=True)
class AllFound:
    """The keys of all jobs that exist outside of Poise at a start: others that were found before have been deleted since."""

    keys: frozenset[str]


@dataclass(frozen=True, slots=True)
class TenantWeighed:
    """An administrator has said, outside of Poise, what a tenant counts against others."""

    tenant: str
    weight: float


class JobFinder(Protocol):
    """A back end that reports `JobFound`. Called from the engine's thread, and returns at once."""

    def accepted(self, key: str, job: str, *, is_over: bool) -> None:
        """Take the id of a job that was found. `is_over`: it has ended, or was cancelled, and is not to run."""

    def refused(self, key: str, text: str, *, is_final: bool) -> None:
        """Take why a job was not accepted; unless that is final it has to be reported again later."""


@dataclass(frozen=True, slots=True)
class BackendFailed:
    """The back end cannot go on, by a fault of its own. The last event of all."""

    problem: str


RunEvent = RunBegan | RunProgressed | RunEnded
Finding = JobFound | JobGone | JobHeld | AllFound | TenantWeighed
BackendEvent = RunEvent | NodeReport | Finding | BackendFailed
OnEvent = Callable[[BackendEvent], None]
"""How a back end reports. Given to its constructor; events of one run come in the order in which they became known."""


class LogPart(NamedTuple):
    """Bytes of a log. Offsets count from the first byte ever written, whatever has been deleted since."""

    text: bytes
    offset: int  # of the first byte of `text`, which is later than what was asked for where that was deleted
    next: int  # offset at which to read on
