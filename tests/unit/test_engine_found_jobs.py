"""Jobs that exist outside of Poise, as its back end finds them: submitted once, held, weighed, cancelled as they go."""

from pathlib import Path
from typing import Any

import pytest
from tests.machine import ALICE, FakeBackend, Service, a_request

from poise.service.backends.api import AllFound, JobFound, JobGone, JobHeld, TenantWeighed
from poise.service.server.service_api import RequestRefusedError
from poise.service.wire.request import JobRequest
from poise.service.wire.views import JobState

KEY = "gang-0001"


class FindingBackend(FakeBackend):
    """A back end that finds jobs, and remembers what it was told of them."""

    answers: list[tuple[Any, ...]] = []  # noqa: RUF012 - of the class: the back end is another one after a restart

    def accepted(self, key: str, job: str, *, is_over: bool) -> None:
        self.answers.append((key, job, is_over))

    def refused(self, key: str, text: str, *, is_final: bool) -> None:
        self.answers.append((key, text, is_final))


@pytest.fixture
def service(tmp_path: Path) -> Service:
    FindingBackend.answers.clear()
    return Service(tmp_path, backend=FindingBackend)


def gang(gpus: int = 1, size: int = 1, **more: Any) -> JobRequest:
    pods = {"key": KEY, "kind": "Job", "namespace": "team-a", "name": "resnet", "size": size, "gpus": gpus}
    return a_request(gpus=gpus * size, name="resnet", pods=pods, **more)


def find(service: Service, *findings: Any) -> None:
    for each in findings:
        service.machine.tell(each)
    service.settle()


def test_a_job_that_was_found_is_submitted_once_however_often_it_is_found(service: Service) -> None:
    find(service, JobFound(KEY, "team-a", gang()))
    find(
        service, JobFound(KEY, "team-a", gang(weight=2.0)), JobFound(KEY, "team-a", gang())
    )  # as it is by now: still the same
    service.restart()
    find(service, JobFound(KEY, "team-a", gang()))
    assert FindingBackend.answers == [(KEY, "1", False)] * 4
    assert service.engine.show("1").job.tenant == "team-a"


def test_a_job_that_cannot_run_is_refused_for_good_with_the_reason(service: Service) -> None:
    find(service, JobFound(KEY, "team-a", gang(gpus=8)))
    [(key, text, is_final)] = FindingBackend.answers
    assert (key, is_final) == (KEY, True)
    assert "8" in text


def test_pods_of_one_gang_are_never_divided_over_nodes(service: Service) -> None:
    """Two pods of two GPUs need two GPUs on one node each: the job says so to the core."""
    find(service, JobFound(KEY, "team-a", gang(gpus=2)))
    assert service.loop.state.records["1"].job.unit == 2


def test_a_job_whose_owner_was_deleted_is_cancelled(service: Service) -> None:
    find(service, JobFound(KEY, "team-a", gang()))
    find(service, JobGone("1"))
    assert service.engine.show("1").job.state is JobState.CANCELLED
    find(service, JobGone("1"), JobFound(KEY, "team-a", gang()))
    assert FindingBackend.answers[-1] == (KEY, "1", True)


def test_jobs_that_were_deleted_while_the_service_was_away_are_cancelled_at_its_start(service: Service) -> None:
    find(service, JobFound(KEY, "team-a", gang()), JobFound("gang-0002", "team-b", gang()))
    [other] = service.submit(a_request())
    service.restart()
    find(service, AllFound(frozenset({"gang-0002"})))
    states = {job: service.engine.show(job).job.state for job in ("1", "2", other)}
    assert states["1"] is JobState.CANCELLED
    assert not states["2"].is_final
    assert not states[other].is_final


def test_a_job_that_its_owner_suspends_is_held_until_it_is_resumed(service: Service) -> None:
    find(service, JobFound(KEY, "team-a", gang(preemption="restart")))
    find(service, JobHeld("1", True))
    assert service.engine.show("1").job.state in (JobState.PAUSED, JobState.CHECKPOINTING)
    find(service, JobHeld("1", False))
    assert service.engine.show("1").job.state is not JobState.PAUSED


def test_the_weight_of_a_tenant_is_what_an_administrator_says(service: Service) -> None:
    find(service, JobFound(KEY, "team-a", gang()), TenantWeighed("team-a", 3.0))
    assert {each.tenant: each.weight for each in service.engine.shares().tenants}["team-a"] == 3.0
    chapters = len(service.loop.store.chapters())
    find(service, TenantWeighed("team-a", 3.0))
    assert len(service.loop.store.chapters()) == chapters  # it is no news


def test_users_cannot_submit_pods_of_others(service: Service) -> None:
    with pytest.raises(RequestRefusedError, match="only the service itself"):
        service.submit(gang(), by=ALICE)
