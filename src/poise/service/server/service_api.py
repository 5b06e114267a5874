"""The interface between the HTTP API and the engine.

`ServiceApi` is what the routes call; `service.LiveService` implements it, and tests put a fake in its place. A call that
changes something becomes one of the commands at the end of this file: what is asked, who asks, and the future that carries
the answer back to the handler's thread. `RequestRefusedError` is the only way in which a request fails.
"""

from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from poise.scheduler.model.errors import PoiseError
from poise.service.wire import views
from poise.service.wire.request import Submission
from poise.service.wire.views import Account, JobState


@dataclass(frozen=True, slots=True)
class JobFilter:
    """Which jobs: in one of these states (none: all that have not ended); of a tenant, app and name (None: of any)."""

    states: frozenset[JobState] = frozenset()
    tenant: str | None = None
    app: str | None = None
    name: str | None = None


class ServiceApi(Protocol):
    """The engine, as the HTTP API sees it.

    Methods that read answer at once from the current state. Methods that change something return a future, which is done
    once the change is committed to the journal. Both raise RequestRefusedError; one that takes `job` does so with
    RefusalCode.UNKNOWN for a job that was never submitted.
    """

    def submit(self, by: Account, submission: Submission) -> "Future[views.SubmittedView]":
        """Accept all jobs or none. Their tenant is the account's, unless an operator names another."""

    def change(self, by: Account, job: str, verb: "Verb") -> "Future[views.CommandResult]":
        """Cancel, hold, stop or release a job."""

    def cancel_all(self, by: Account, wanted: JobFilter) -> "Future[views.CancelledJobs]":
        """Cancel all these jobs that have not ended."""

    def set_weight(self, by: Account, tenant: str, weight: float) -> "Future[views.Shares]":
        """Change a tenant's share."""

    def set_policy(self, by: Account, policy: str) -> "Future[views.ServiceView]":
        """Switch to another policy; running jobs stay where they are until it decides otherwise."""

    def drain(self, by: Account, node: str, reason: str | None) -> "Future[views.NodeRow]":
        """Keep new runs away from a node, and have those that are there leave. RefusalCode.UNKNOWN for an unknown node."""

    def return_node(self, by: Account, node: str) -> "Future[views.NodeRow]":
        """End the drain of a node. RefusalCode.UNKNOWN for an unknown node."""

    def owner(self, job: str) -> str:
        """The tenant that a job belongs to."""

    def queue(self, wanted: JobFilter, *, limit: int, offset: int) -> views.QueuePage:
        """One page of jobs in scheduling order; ended ones come last, the latest first."""

    def called(self, word: str, tenant: str) -> views.JobsCalled:
        """The jobs that are meant by this word in the place of a name; where it could be several, those of the tenant."""

    def show(self, job: str) -> views.JobDetail:
        """Everything about a job, its request included."""

    def why(self, job: str) -> views.WhyView:
        """Why a job waits, runs or has ended: the one dominant reason, the evidence, and one next step."""

    def log(self, job: str, *, replica: int, offset: int, limit: int) -> views.Log:
        """At most `limit` bytes of a replica's log from `offset` on; a negative offset counts from the end."""

    def nodes(self) -> views.NodeList:
        """All nodes: how they are, and which jobs hold their GPUs."""

    def shares(self) -> views.Shares:
        """Every tenant's share."""

    def events(self, *, after: int, job: str | None, tenant: str | None, limit: int) -> views.EventPage:
        """Events after entry `after` of the journal; a negative number asks for the last `-after` events."""

    def states(self) -> dict[str, int]:
        """Number of jobs in each state, ended ones included."""

    def reasons(self) -> dict[str, int]:
        """Number of jobs that have not ended, by reason code."""

    def receive_file(self, tenant: str, sha256: str, piece: views.FilePiece) -> views.FileReceived:
        """Take a piece of an archive that a tenant's jobs will name."""

    def service(self) -> views.ServiceView:
        """Version, policy, cluster and health of this service."""


class RefusalCode(StrEnum):
    """Why a request is refused; each has its HTTP status."""

    WRONG = "wrong-request"
    FORBIDDEN = "forbidden"
    UNKNOWN = "not-found"
    CONFLICT = "conflict"
    FULL = "too-many"
    QUOTA = "over-quota"
    RATE = "too-fast"
    STORAGE = "storage-full"
    NOT_READY = "not-ready"


class RequestRefusedError(PoiseError):
    """A request that was refused, with one line for people; nothing was changed.

    retry   seconds after which it is worth asking again, where that is known
    bound   name of the quota that was met, where it is one of several
    """

    def __init__(self, fault: RefusalCode, text: str, *, retry: int | None = None, bound: str | None = None) -> None:
        super().__init__(text)
        self.fault = fault
        self.retry = retry
        self.bound = bound


# Commands: what the engine's thread receives. Immutable but for the future, which that thread completes exactly once.


class Verb(StrEnum):
    """What can be done to one job.

    HOLD   keep it from running until it is released; a running job is preempted as soon as that loses no work
    STOP   hold it, and end its run even if that loses work: it is asked to save, and gets TERM at its deadline
    """

    CANCEL = "cancel"
    HOLD = "hold"
    STOP = "stop"
    RELEASE = "release"


@dataclass(frozen=True, slots=True)
class SubmitJobs:
    """Accept these jobs, all or none."""

    by: Account
    submission: Submission
    reply: "Future[views.SubmittedView]" = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class ChangeJob:
    """Cancel, hold, stop or release one job."""

    by: Account
    job: str
    verb: Verb
    reply: "Future[views.CommandResult]" = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class CancelJobs:
    """Cancel all jobs that are wanted, a limited number per batch so that other commands come in between.

    left   jobs still to be cancelled; None: not begun
    done   number of jobs cancelled so far
    """

    by: Account
    wanted: JobFilter
    reply: "Future[views.CancelledJobs]" = field(default_factory=Future)
    left: tuple[str, ...] | None = None
    done: int = 0


@dataclass(frozen=True, slots=True)
class SetWeight:
    """Give a tenant this weight."""

    by: Account
    tenant: str
    weight: float
    reply: "Future[None]" = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class SetPolicy:
    """Switch to this policy."""

    by: Account
    policy: str
    reply: "Future[None]" = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class ChangeNode:
    """Drain a node, for a reason that people are told, or end its drain. Either may be asked for twice."""

    by: Account
    node: str
    is_drain: bool
    reason: str | None = None
    reply: "Future[views.NodeRow]" = field(default_factory=Future)


Command = SubmitJobs | ChangeJob | CancelJobs | SetWeight | SetPolicy | ChangeNode


def frees_room(command: Command) -> bool:
    """Whether a command is accepted even on a full disk: it ends jobs, or keeps one from running."""
    return isinstance(command, CancelJobs) or (isinstance(command, ChangeJob) and command.verb is not Verb.RELEASE)


def fulfil(command: Command, answer: Any) -> None:  # noqa: ANN401 - each command has its own type of answer
    """Complete a command, unless its client has gone away."""
    with suppress(InvalidStateError):
        command.reply.set_result(answer)


def refuse(command: Command, error: BaseException) -> None:
    """Refuse a command, unless its client has gone away."""
    with suppress(InvalidStateError):
        command.reply.set_exception(error)
