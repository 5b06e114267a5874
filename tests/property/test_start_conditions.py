"""Whatever happens to jobs and to the service, no job starts before its conditions are met, and each ends as it has to."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.machine import ALICE, FakeBackend, LingeringBackend, Service, a_request
from tests.machine_laws import check_books, check_standing, finish_all
from tests.start_laws import StartLaws, change, check_ends

from poise.service.backends.api import RunEnding
from poise.service.server.service_api import Verb
from poise.service.wire.after import AfterEnd
from poise.service.wire.request import JobRequest
from poise.service.wire.views import JobState

ENDS = list(AfterEnd)


@pytest.mark.slow
@given(data=st.data(), backend=st.sampled_from([FakeBackend, LingeringBackend]), policy=st.sampled_from(["fifo", "las"]))
def test_no_job_starts_before_its_conditions_are_met(data: Any, backend: type[FakeBackend], policy: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        service = Service(Path(folder), policy=policy, cluster="v100:3", backend=backend)
        laws = StartLaws(service.machine)
        jobs: list[str] = []
        cancelled: set[str] = set()
        for _ in range(data.draw(st.integers(3, 14), "steps")):
            _step(service, data, jobs, cancelled)
            check_standing(service)
        service.crash_at = None
        for job in jobs:
            change(service, job, Verb.RELEASE)
        service.pass_time(100)
        finish_all(service)
        check_ends(service, jobs, cancelled)
        check_books(service, jobs)
        assert laws.begun >= len(service.machine.finished)


def _step(service: Service, data: Any, jobs: list[str], cancelled: set[str]) -> None:
    """Something happens."""
    alive = sorted(service.machine.alive)
    kinds = (
        ["submit", "submit", "time", "restart", "crash", "policy"] + ["end"] * 3 * bool(alive) + ["verb"] * 2 * bool(jobs)
    )
    match data.draw(st.sampled_from(kinds), "what"):
        case "submit":
            jobs += service.submit(*_requests(service, data, jobs))
        case "time":
            service.pass_time(data.draw(st.sampled_from([1, 10, 25]), "seconds"))
        case "restart":
            service.restart()
            service.settle()
        case "crash":
            service.crash_at = data.draw(st.integers(0, 3), "crash at")
        case "policy":
            service.engine.set_policy(ALICE, data.draw(st.sampled_from(["fifo", "las", "max-min"]), "policy"))
            service.settle()
        case "end":
            key = data.draw(st.sampled_from(alive), "run")
            how = RunEnding.FINISHED if data.draw(st.booleans(), "finishes") else RunEnding.FAILED
            how = RunEnding.YIELDED if key in service.machine.leaving else how
            service.machine.end(key[0], how, cause="traceback-from-crash" if how is RunEnding.FAILED else None)
            service.settle()
        case "verb":
            job, verb = data.draw(st.sampled_from(jobs), "job"), data.draw(st.sampled_from(Verb), "verb")
            cancelled |= {job} if verb is Verb.CANCEL else set()
            change(service, job, verb)


def _requests(service: Service, data: Any, jobs: list[str]) -> list[JobRequest]:
    """A job, or an array, with conditions."""
    some: dict[str, Any] = {}
    if jobs and data.draw(st.booleans(), "waits"):
        others = data.draw(st.lists(st.sampled_from(jobs), min_size=1, max_size=3, unique=True), "for")
        end = data.draw(st.sampled_from(ENDS), "end")
        together = (f"{','.join(others)}:{end}",)
        some["after"] = together if data.draw(st.booleans(), "together") else tuple(f"{each}:{end}" for each in others)
    if data.draw(st.integers(0, 3), "later") == 0:
        some["begin"] = service.machine.now + data.draw(st.sampled_from([-5.0, 0.5, 10.0, 40.0]), "begin")
    if data.draw(st.integers(0, 4), "held") == 0:
        some["hold"] = True
    count = data.draw(st.sampled_from([1, 1, 3, 4]), "count")
    if count > 1:
        some |= {"array_cap": data.draw(st.integers(1, 2), "cap"), "array": f"array-{len(jobs)}"}
    return [a_request(**some)] * count


POINTS = 60
"""More points than the scenario has: the last runs are not killed at all."""


def scenario(service: Service) -> list[str]:
    """Dependencies that are met and that never will be, a time to begin, a capped array, and a hold; ids of the jobs."""
    first, fails = service.submit(a_request(), a_request(retry={"on_errors": 0}))
    jobs = [first, fails]
    jobs += service.submit(
        a_request(after=(first,)), a_request(after=(f"{fails}:succeeded",)), a_request(after=(f"{first},{fails}:failed",))
    )
    jobs += service.submit(a_request(after=(f"{jobs[3]}:succeeded",)), a_request(begin=service.machine.now + 25))
    jobs += service.submit(*[a_request(array_cap=1, array="grid", after=(first,))] * 3)
    change(service, jobs[2], Verb.HOLD)
    service.pass_time(12)
    if fails in {job for job, _ in service.machine.alive}:
        service.machine.end(fails, RunEnding.FAILED, cause="traceback-from-crash", code=1)
        service.settle()
    service.machine.end(first, RunEnding.FINISHED)
    service.pass_time(1)
    service.engine.set_policy(ALICE, "fifo")
    service.pass_time(12)
    change(service, jobs[2], Verb.RELEASE)
    return jobs


@pytest.mark.parametrize(
    "point", [pytest.param(each, marks=pytest.mark.slow if each % 10 else ()) for each in range(POINTS)]
)
def test_killed_at_any_point_the_service_still_keeps_conditions(point: int, tmp_path: Path) -> None:
    service = Service(tmp_path, policy="las", cluster="v100:3")
    laws = StartLaws(service.machine)
    service.crash_at = point
    jobs = scenario(service)
    check_standing(service)
    service.crash_at = None
    change(service, jobs[2], Verb.RELEASE)  # once more: there may have been no answer
    finish_all(service)
    check_ends(service, jobs, cancelled=set())
    states = {job: service.engine.show(job).job.state for job in jobs}
    assert [job for job in jobs if states[job] is JobState.CANCELLED] == [jobs[3], jobs[5]]
    assert [job for job in jobs if states[job] is JobState.FAILED] == [jobs[1]]
    assert laws.begun >= 8
    check_books(service, jobs)


def test_the_scenario_has_fewer_points_than_are_tried(tmp_path: Path) -> None:
    service = Service(tmp_path, policy="las", cluster="v100:3")
    service.crash_at = POINTS
    scenario(service)
    assert service.crash_at is not None
