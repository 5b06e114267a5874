"""Keys of submissions: what is sent twice is taken once, whatever has happened meanwhile."""

from pathlib import Path

import pytest
from tests.machine import ALICE, BOB, Service, a_request

from poise.scheduler.model.errors import RequestError
from poise.service.server.engine_api import RefusalCode, RequestRefusedError
from poise.service.wire.request import JobRequest, Submission
from poise.service.wire.views import Account, Role


@pytest.fixture
def service(tmp_path: Path) -> Service:
    return Service(tmp_path)


def test_a_submission_sent_twice_is_taken_once(service: Service) -> None:
    first = service.submit(a_request(), key="the-same-key")
    assert service.submit(a_request(), key="the-same-key") == first
    service.restart()
    assert service.submit(a_request(), key="the-same-key") == first
    assert service.submit(a_request(), key="the-same-key", by=BOB) != first


def test_a_key_is_not_found_by_a_token_of_the_same_name_and_another_tenant(service: Service) -> None:
    first = service.submit(a_request(), key="the-same-key")
    heir = Account(name=ALICE.name, tenant="heirs", role=Role.USER)
    assert service.submit(a_request(), key="the-same-key", by=heir) != first
    assert service.submit(a_request(), key="the-same-key") == first


def test_a_submission_that_was_taken_is_answered_although_it_could_not_be_taken_now(tmp_path: Path) -> None:
    """Its folder has gone meanwhile, say."""
    problems: list[str] = []

    def check(_request: JobRequest) -> None:
        if problems:
            raise RequestError(problems[0])

    service = Service(tmp_path, check=check)
    first = service.submit(a_request(cwd="/data"), key="the-same-key")
    problems.append("cwd: /data is not there")
    assert service.submit(a_request(cwd="/data"), key="the-same-key") == first
    with pytest.raises(RequestRefusedError, match="cwd: /data is not there"):
        service.submit(a_request(cwd="/data"), key="another-key")


def test_other_jobs_under_the_same_key_are_a_conflict(service: Service) -> None:
    jobs = [a_request(name=f"n{number}") for number in range(300)]
    wishes = [service.engine.submit(ALICE, Submission(jobs=tuple(each), key="the-same-key")) for each in (jobs, jobs[1:])]
    service.settle()  # both in one instant
    assert service.submit(*jobs, key="the-same-key") == list(wishes[0].result(0).jobs)
    for other in (jobs[1:], [*jobs[1:], jobs[0]], [*jobs[:-1], a_request(gpus=2)]):
        with pytest.raises(RequestRefusedError, match=r"^key 'the-same-key': other jobs were submitted under it") as refused:
            service.submit(*other, key="the-same-key")
        assert refused.value.fault is RefusalCode.CONFLICT
    assert isinstance(wishes[1].exception(0), RequestRefusedError)
    assert sum(service.engine.states().values()) == 300
