"""Jobs that were set aside: what is kept of them was damaged, and all others go on without them.

Such a job has failed. Its number stays its own, whatever could be read of it stays to be seen, and what is left of its runs
is ended like any run that was not ordered; until then no other job gets its GPUs.
"""

import re
from contextlib import suppress
from dataclasses import dataclass

from poise.engine.journal import job_line, read_job
from poise.scheduler.model.errors import JournalError
from poise.scheduler.model.job import Job
from poise.service.server.quotas import size_of
from poise.service.server.records import JobRecord
from poise.service.server.storage.store import JobRowText
from poise.service.wire.request import NAME, JobRequest
from poise.service.wire.views import JobState

UNKNOWN = JobRequest(command=("(damaged)",))
"""In the place of what was submitted, where that cannot be read any more."""


class DamagedRowError(JournalError):
    """What is kept of a job makes no sense."""


@dataclass(frozen=True, slots=True)
class DamagedJobs:
    """A job of which something was damaged: what can be said of it, and how it is to be kept from now on."""

    record: JobRecord
    row: JobRowText


def read(row: JobRowText) -> JobRecord:
    """Where a job stands; DamagedRowError if it cannot be told, or what was submitted of a job that may have to be begun."""
    if row.damage is not None:
        raise DamagedRowError(f"its {row.damage} in the journal is damaged")
    try:
        record = JobRecord.read(read_job(row.job), row.record)
        if record.open_runs():
            JobRequest.model_validate_json(row.request)
    except (JournalError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedRowError(f"what is kept of it makes no sense: {error!r:.100}") from error
    record.size = size_of(row.request)
    return record


def set_aside(row: JobRowText, problem: str, now: float) -> DamagedJobs:
    """A job as it is from now on: failed, of the damage."""
    job, request = _job(row), request_of(row.request)
    record = JobRecord.of(job, request)
    record.state, record.finished, record.cause, record.held = JobState.FAILED, now, f"set aside: {problem}", False
    text = request.model_dump_json(exclude_defaults=True)
    return DamagedJobs(
        record, JobRowText(row.id, job.tenant, job.app, now, JobState.FAILED, job_line(job), text, record.text())
    )


def _job(row: JobRowText) -> Job:
    """As it was, if that part is whole; otherwise a job of which nothing is known but whose it is, as far as that is."""
    if "job" not in (row.damage or ""):
        with suppress(JournalError):
            return read_job(row.job)
    if "request" in (row.damage or "") and not re.fullmatch(NAME, str(row.tenant)):
        return Job(row.id, 0.0, 1)
    return Job(row.id, 0.0, 1, tenant=row.tenant, app=row.app)


def request_of(text: str) -> JobRequest:
    """What was submitted, or that it cannot be read."""
    try:
        return JobRequest.model_validate_json(text)
    except ValueError:
        return UNKNOWN
