"""Jobs by their names, or by how their names begin: what a word in the place of an id means.

The rule, also on the page of the command line: a name that is the word comes before names that begin with it; then a job
that has not ended before one that has; then a job of the asking tenant before those of others. A number is an id and no
beginning of a name, so that a mistyped id never meets a job that was not meant.
"""

from collections.abc import Sequence

from poise.service.server.service_state import ServiceState
from poise.service.wire.views import JobsCalled, NamedJob

LATEST = 10_000
"""Jobs that have ended among which a name is looked for, the latest: no question may read all that ever were."""
MOST_NAMED = 10
"""Jobs that an answer lists."""


def names_of(state: ServiceState, word: str) -> list[NamedJob]:
    """The jobs in memory whose names begin with a word, in order of submission. Called under the engine's lock."""
    return [
        NamedJob(id=job, name=record.name, tenant=record.job.tenant, state=record.state)
        for job, record in state.records.items()
        if record.name.startswith(word)
    ]


def meant(jobs: Sequence[NamedJob], word: str, tenant: str) -> JobsCalled:
    """Those of these jobs that a word means to somebody of a tenant: one, several that are alike, or none."""
    exact = [job for job in jobs if job.name == word]
    beginning = [] if exact or word.isdecimal() else [job for job in jobs if job.name.startswith(word)]
    alike = exact or beginning
    alike = [job for job in alike if not job.state.is_final] or alike
    alike = [job for job in alike if job.tenant == tenant] or alike
    return JobsCalled(jobs=tuple(alike[:MOST_NAMED]), total=len(alike), exact=bool(exact))
