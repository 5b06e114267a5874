"""Submissions that were taken, by their keys: what is sent twice under one key is taken once."""

import json
import sqlite3
from collections.abc import Sequence

from poise.server.seam import Fault, RefusedError
from poise.wire.request import Request, Submission
from poise.wire.views import Account

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
        check_same(submission, tuple(Request.model_validate_json(kept[job]) for job in jobs))
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


def check_same(submission: Submission, before: tuple[Request, ...]) -> None:
    """Raise RefusedError if other jobs were taken under the key of a submission."""
    if submission.jobs != before:
        text = f"key {submission.key!r}: other jobs were submitted under it; a new submission needs a new key"
        raise RefusedError(Fault.CONFLICT, text)
