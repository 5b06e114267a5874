"""What the HTTP API asks of the engine: one protocol, so that each can be built and tested without the other.

Reading methods answer at once from the current state. Writing methods return a future that is done once the wish is in the
journal; it raises RefusedError (with a code and one line for people) where the wish cannot be met.
"""

from concurrent.futures import Future
from enum import StrEnum
from typing import Protocol

from poise.scheduler.model.errors import PoiseError
from poise.service.wire.request import Submission
from poise.service.wire.views import (
    Account,
    CancelledJobs,
    CommandResult,
    EventPage,
    JobDetail,
    JobState,
    Log,
    NodeList,
    QueuePage,
    ServiceView,
    Shares,
    SubmittedView,
    WhyView,
)


class RefusalCode(StrEnum):
    """Why a wish is refused; each has its HTTP status."""

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
    """A wish that was not granted; nothing was changed.

    retry   seconds after which it is worth asking again, where that is known
    bound   the bound that was met, where it is one of several
    """

    def __init__(self, fault: RefusalCode, text: str, *, retry: int | None = None, bound: str | None = None) -> None:
        super().__init__(text)
        self.fault = fault
        self.retry = retry
        self.bound = bound


class EngineApi(Protocol):
    """The engine, as the API sees it. What takes `job` raises RefusedError(UNKNOWN) for one that was never submitted."""

    def submit(self, by: Account, submission: Submission) -> "Future[SubmittedView]":
        """Take jobs, all or none. The tenant is the account's, unless an operator names another."""

    def cancel(self, by: Account, job: str) -> "Future[CommandResult]":
        """Withdraw a job."""

    def cancel_all(self, by: Account, tenant: str) -> "Future[CancelledJobs]":
        """Withdraw all jobs of a tenant that have not ended."""

    def hold(self, by: Account, job: str) -> "Future[CommandResult]":
        """Keep a job from running until it is released. One that runs is preempted as soon as that loses no work."""

    def stop(self, by: Account, job: str) -> "Future[CommandResult]":
        """Hold a job, and make its run leave even if that loses work: asked to save, it gets TERM at its deadline."""

    def release(self, by: Account, job: str) -> "Future[CommandResult]":
        """End a hold."""

    def set_weight(self, by: Account, tenant: str, weight: float) -> "Future[Shares]":
        """Change a tenant's share."""

    def set_policy(self, by: Account, policy: str) -> "Future[ServiceView]":
        """Go on under another policy; running jobs stay where they are until it decides otherwise."""

    def owner(self, job: str) -> str:
        """The tenant that a job belongs to."""

    def queue(
        self,
        *,
        states: frozenset[JobState],
        tenant: str | None,
        app: str | None,
        limit: int,
        offset: int,
        name: str | None = None,
    ) -> QueuePage:
        """Jobs in scheduling order; no states: all that have not ended. Ended ones come last, the latest first."""

    def show(self, job: str) -> JobDetail:
        """Everything about a job, its request included."""

    def why(self, job: str) -> WhyView:
        """The one dominant reason."""

    def log(self, job: str, *, replica: int, offset: int, limit: int) -> Log:
        """At most `limit` bytes of a replica's log from `offset` on; a negative offset counts from the end."""

    def nodes(self) -> NodeList:
        """All nodes and who holds them."""

    def shares(self) -> Shares:
        """All tenants."""

    def events(self, *, after: int, job: str | None, tenant: str | None, limit: int) -> EventPage:
        """What happened after that number of the journal (negative: the last so many)."""

    def states(self) -> dict[str, int]:
        """How many jobs are in which state, ended ones too."""

    def reasons(self) -> dict[str, int]:
        """How many jobs that have not ended have which reason."""

    def service(self) -> ServiceView:
        """What runs here."""
