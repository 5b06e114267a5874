"""Jobs whose rows are damaged: each is set aside, and all others go on without it.

Such a job has failed. It keeps its number, and whatever could be read of it is still shown. Its runs, if there are any,
are ended like any run that nothing ordered; until then no other job gets their GPUs.
"""

import re
from contextlib import suppress
from dataclasses import dataclass

from poise.engine.journal import job_line, read_job
from poise.scheduler.model.errors import JournalError
from poise.scheduler.model.job import Job
from poise.service.server.quotas import size_of
from poise.service.server.records import JobRecord
from poise.service.server.storage.store import StoredJob
from poise.service.wire.request import NAME, JobRequest
from poise.service.wire.views import JobState

UNKNOWN = JobRequest(command=("(damaged)",))  # in the place of a request that cannot be read any more


class DamagedRowError(JournalError):
    """The row of a job cannot be understood."""


@dataclass(frozen=True, slots=True)
class DamagedJob:
    """A job of which something was damaged: its record, and the row that is stored from now on."""

    record: JobRecord
    row: StoredJob


def read_record(row: StoredJob) -> JobRecord:
    """The record of a job; raises DamagedRowError if it, or a request that may be needed to start a run, is damaged."""
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


def set_aside(row: StoredJob, problem: str, now: float) -> DamagedJob:
    """A job as it is from now on: failed because of the damage, with whatever else can be read."""
    damage, job = row.damage or "", None
    if "job" not in damage:
        with suppress(JournalError):
            job = read_job(row.job)
    if job is None and "request" in damage and not re.fullmatch(NAME, str(row.tenant)):
        job = Job(row.id, 0.0, 1)  # not even its tenant is known
    job = job or Job(row.id, 0.0, 1, tenant=row.tenant, app=row.app)
    request = request_of(row.request)
    record = JobRecord.of(job, request)
    record.state, record.finished, record.cause, record.held = JobState.FAILED, now, f"set aside: {problem}", False
    text = request.model_dump_json(exclude_defaults=True)
    kept = StoredJob(row.id, job.tenant, job.app, now, JobState.FAILED, job_line(job), text, record.text())
    return DamagedJob(record, kept)


def request_of(text: str) -> JobRequest:
    """What was submitted, or UNKNOWN."""
    try:
        return JobRequest.model_validate_json(text)
    except ValueError:
        return UNKNOWN
