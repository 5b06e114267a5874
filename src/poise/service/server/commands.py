"""What people want of the engine: each wish with the future that its answer is given by."""

from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from poise.service.wire.request import Submission
from poise.service.wire.views import Account, CancelledJobs, CommandResult, SubmittedView


class Verb(StrEnum):
    """What may be wanted of one job. STOP: hold it, and end its run even if that loses work."""

    CANCEL = "cancel"
    HOLD = "hold"
    STOP = "stop"
    RELEASE = "release"


@dataclass(frozen=True, slots=True)
class SubmitJobs:
    """Take these jobs, all or none."""

    by: Account
    submission: Submission
    reply: "Future[SubmittedView]" = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class ChangeJobs:
    """Do this to a job."""

    by: Account
    job: str
    verb: Verb
    reply: "Future[CommandResult]" = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class CancelTenant:
    """Cancel all jobs of a tenant. They are done part by part, so that other wishes come in between.

    left   jobs that are still to be cancelled; None: it has not begun
    done   jobs that have been
    """

    by: Account
    tenant: str
    reply: "Future[CancelledJobs]" = field(default_factory=Future)
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
    """Go on under this policy."""

    by: Account
    policy: str
    reply: "Future[None]" = field(default_factory=Future)


def frees_room(wish: "Wish") -> bool:
    """It makes jobs fewer, or keeps one from running: it is granted when nothing else is."""
    return isinstance(wish, CancelTenant) or (isinstance(wish, ChangeJobs) and wish.verb is not Verb.RELEASE)


Wish = SubmitJobs | ChangeJobs | CancelTenant | SetWeight | SetPolicy
WHOLE = -1
"""Place of the note on an instant as a whole; those on its events have the places of those."""
LEAVES = -2
"""Place of what the runs were told that are to leave, by job."""
AWAITED = -3
"""Place of jobs that are to be held once that costs nothing, or no longer are: who said so, and which of the two."""


def policy_note(by: str, before: str, after: str) -> dict[str, Any]:
    """Who changed the policy, as the journal has it."""
    return {"by": by, "policy": after, "before": before}


def weight_note(wish: SetWeight, before: float) -> dict[str, Any]:
    """Who changed a tenant's weight, as the journal has it."""
    return {"by": wish.by.name, "tenant": wish.tenant, "weight": wish.weight, "before": before}


def grant(reply: "Future[Any]", answer: object) -> None:
    """Give the answer, unless whoever asked has gone away."""
    with suppress(InvalidStateError):
        reply.set_result(answer)


def refuse(wish: Wish, error: BaseException) -> None:
    """Say that it will not be done, unless whoever asked has gone away."""
    with suppress(InvalidStateError):
        wish.reply.set_exception(error)
