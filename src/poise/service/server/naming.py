"""Jobs by their names, or by how their names begin: what a word in the place of an id means.

The rule, also on the page of the command line: a job of the asking tenant comes before those of others, so that nobody else
can take a word over by calling a job so; then a name that is the word before names that begin with it; then a job that has
not ended before one that has. A number is an id and no beginning of a name, so that a mistyped id never meets a job that
was not meant.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from poise.service.server.records import JobRecord
from poise.service.wire.views import JobsCalled, JobState, NamedJob

LATEST = 10_000
"""Jobs that have ended among which a name is looked for, the latest: no question may read all that ever were."""
MOST_NAMED = 10
"""Jobs that an answer lists."""


class Candidate(NamedTuple):
    """A job that a word may mean."""

    id: str
    name: str
    tenant: str
    state: JobState


def candidates(records: Iterable[JobRecord], word: str) -> list[Candidate]:
    """Those of these jobs whose names begin with a word."""
    return [
        Candidate(record.job.id, record.name, record.job.tenant, record.state)
        for record in records
        if record.name.startswith(word)
    ]


def meant(jobs: Sequence[Candidate], word: str, tenant: str) -> JobsCalled:
    """Those of these jobs that a word means to somebody of a tenant: one, several that are alike, or none."""
    alike = [job for job in jobs if job.name == word or (job.name.startswith(word) and not word.isdecimal())]
    alike = [job for job in alike if job.tenant == tenant] or alike
    exact = [job for job in alike if job.name == word]
    alike = exact or alike
    alike = [job for job in alike if not job.state.is_final] or alike
    listed = tuple(NamedJob(**job._asdict()) for job in alike[:MOST_NAMED])
    return JobsCalled(jobs=listed, total=len(alike), exact=bool(exact))
