"""What has to hold whenever a run begins on the pretended machine, whatever the service believes of its job.

A job never begins before its time, nor before those it waits for are over as they have to be; these never begin again after
that. Of an array no more jobs have processes at once than its cap.
"""

from tests.machine import ALICE, Machine, Service

from poise.service.backends.api import RunOrder
from poise.service.server.service_api import RequestRefusedError, Verb
from poise.service.wire.after import AfterEnd, ids_of, term_of
from poise.service.wire.request import JobRequest
from poise.service.wire.views import JobState


class StartLaws:
    """Watches a machine. `begun`: how many runs it has looked at."""

    def __init__(self, machine: Machine) -> None:
        self.begun = 0
        self._machine = machine
        self._over: dict[str, str] = {}  # jobs that must not run again, and for whom
        self._begin = machine._begin
        machine._begin = self._checked  # type: ignore[method-assign]

    def _checked(self, order: RunOrder) -> None:
        machine, job, request = self._machine, order.job, order.request
        assert job not in self._over, f"job {job} runs again, after job {self._over[job]} that waited for its end"
        assert request.begin is None or request.begin <= machine.now, f"job {job} begins before its time"
        for text in request.after:
            self._check_term(job, text)
        if request.array_cap is not None:
            beside = {name for (name, _), each in machine.alive.items() if each.request.array == request.array}
            assert len(beside | {job}) <= request.array_cap, f"job {job} runs beside {sorted(beside)}"
        self.begun += 1
        self._begin(order)

    def _check_term(self, job: str, text: str) -> None:
        term = term_of(text)
        jobs = ids_of(term)
        alive = {name for name, _ in self._machine.alive}
        assert alive.isdisjoint(jobs), f"job {job} begins while one of {text} still runs"
        finished = set(self._machine.finished).intersection(jobs)
        if term.end is AfterEnd.SUCCEEDED:
            assert len(finished) == len(jobs), f"job {job} begins though not all of {text} have succeeded"
        elif term.end is AfterEnd.FAILED:
            assert len(finished) < len(jobs), f"job {job} begins though none of {text} has failed"
        self._over |= dict.fromkeys(jobs, job)


def is_hopeless(request: JobRequest, states: dict[str, JobState]) -> bool:
    """Whether a job can never start, by how those have ended that it waits for."""
    for term in map(term_of, request.after):
        have_succeeded = all(states[job] is JobState.SUCCEEDED for job in ids_of(term))
        if (term.end, have_succeeded) in {(AfterEnd.SUCCEEDED, False), (AfterEnd.FAILED, True)}:
            return True
    return False


def check_ends(service: Service, jobs: list[str], cancelled: set[str]) -> None:
    """All jobs have ended: those that could not start are cancelled, and no others but those that were to be."""
    details = {job: service.engine.show(job) for job in jobs}
    states = {job: each.job.state for job, each in details.items()}
    for job, detail in details.items():
        request = detail.request
        assert request is not None
        assert (states[job] is JobState.SUCCEEDED) == (job in service.machine.finished), job
        if is_hopeless(request, states):
            assert states[job] is JobState.CANCELLED, job
            assert not detail.runs, job
        elif states[job] is JobState.CANCELLED:
            assert job in cancelled, (job, detail.cause)


def change(service: Service, job: str, verb: Verb) -> None:
    """Ask for it once, without waiting for an answer."""
    try:
        service.engine.change(ALICE, job, verb)
    except RequestRefusedError:
        return
    service.settle()
