"""What people want of the engine: each wish with the future that its answer is given by."""

from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from poise.wire.request import Submission
from poise.wire.views import Account, Done, Submitted


class Verb(StrEnum):
    """What may be wanted of one job."""

    CANCEL = "cancel"
    HOLD = "hold"
    RELEASE = "release"


@dataclass(frozen=True, slots=True)
class Submit:
    """Take these jobs, all or none."""

    by: Account
    submission: Submission
    reply: "Future[Submitted]" = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class Change:
    """Do this to a job."""

    by: Account
    job: str
    verb: Verb
    reply: "Future[Done]" = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class Weigh:
    """Give a tenant this weight."""

    by: Account
    tenant: str
    weight: float
    reply: "Future[None]" = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class Adopt:
    """Go on under this policy."""

    by: Account
    policy: str
    reply: "Future[None]" = field(default_factory=Future)


def frees_room(wish: "Wish") -> bool:
    """It makes jobs fewer, or keeps one from running: it is granted when nothing else is."""
    return isinstance(wish, Change) and wish.verb in {Verb.CANCEL, Verb.HOLD}


Wish = Submit | Change | Weigh | Adopt
WHOLE = -1
"""Place of the note on an instant as a whole; those on its events have the places of those."""
LEAVES = -2
"""Place of what the runs were told that are to leave, by job."""


def policy_note(by: str, before: str, after: str) -> dict[str, Any]:
    """Who changed the policy, as the journal has it."""
    return {"by": by, "policy": after, "before": before}


def weight_note(wish: Weigh, before: float) -> dict[str, Any]:
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
