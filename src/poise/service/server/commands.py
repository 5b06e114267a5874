"""What people want of the engine: each wish with the future that its answer is given by."""

import json
import sqlite3
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from poise.service.server.engine_api import RefusalCode, RequestRefusedError
from poise.service.wire.request import JobRequest, Submission
from poise.service.wire.views import Account, Done, SubmittedView, Withdrawn


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
    reply: "Future[Done]" = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class CancelTenant:
    """Cancel all jobs of a tenant. They are done part by part, so that other wishes come in between.

    left   jobs that are still to be cancelled; None: it has not begun
    done   jobs that have been
    """

    by: Account
    tenant: str
    reply: "Future[Withdrawn]" = field(default_factory=Future)
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


# Submissions that were taken, by their keys: what is sent twice under one key is taken once.

AT_ONCE = 128
"""Jobs that one statement asks for."""


class Submissions:
    """What was submitted, over one connection to the store."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def taken(self, by: Account, submission: Submission) -> tuple[str, ...] | None:
        """Ids of its jobs, if it was taken before; RefusedError if its key was that of another submission."""
        if submission.key is None:
            return None
        query = "SELECT jobs FROM submissions WHERE key = ? AND account = ?"
        row = self._db.execute(query, (submission.key, holder(by))).fetchone()
        if row is None:
            return None
        jobs = tuple(json.loads(row[0]))
        kept = self.requests(jobs)
        check_same(submission, tuple(JobRequest.model_validate_json(kept[job]) for job in jobs))
        return jobs

    def requests(self, jobs: Sequence[str]) -> dict[str, str]:
        """What was submitted, as JSON, by job."""
        found: dict[str, str] = {}
        for first in range(0, len(jobs), AT_ONCE):
            some = jobs[first : first + AT_ONCE]
            query = f"SELECT id, request FROM jobs WHERE id IN ({', '.join('?' * len(some))})"
            found.update(self._db.execute(query, some).fetchall())
        return found


def holder(by: Account) -> str:
    """Whose a key is: a token's name may be given to another tenant later, who is not to find the jobs of this one."""
    return f"{by.name}@{by.tenant}"


def check_same(submission: Submission, before: tuple[JobRequest, ...]) -> None:
    """Raise RefusedError if other jobs were taken under the key of a submission."""
    if submission.jobs != before:
        text = f"key {submission.key!r}: other jobs were submitted under it; a new submission needs a new key"
        raise RequestRefusedError(RefusalCode.CONFLICT, text)
