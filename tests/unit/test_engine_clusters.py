"""Restarts with another cluster or policy: what becomes of jobs, and of what was changed while the service ran."""

import json
from pathlib import Path

import pytest
from tests.machine import ALICE, Service, a_request
from tests.machine_laws import check_books, check_standing, finish_all
from tests.shell import poise

from poise.engine.journal import read_header
from poise.scheduler.core.settings import Settings
from poise.service.backends.api import RunEnding
from poise.service.server.service_api import JobFilter, RequestRefusedError, Verb
from poise.service.server.storage.replay import replay_store
from poise.service.wire.views import JobState


@pytest.fixture
def service(tmp_path: Path) -> Service:
    return Service(tmp_path, cluster="v100:2,k80:2")


def with_cluster(service: Service, cluster: str) -> None:
    service.cluster = cluster
    service.restart()
    service.settle()


def test_a_job_that_the_cluster_cannot_run_any_more_waits_until_it_can(service: Service) -> None:
    wide = service.submit(a_request(gpus=2, gpu_types=("v100",)))
    old = service.submit(a_request(gpus=2, gpu_types=("k80",)), a_request(gpus=1, gpu_types=("k80",)))
    with_cluster(service, "v100:1")
    [fits] = service.submit(a_request(gpus=1))
    for _ in range(2):  # as it stands, and after one more restart
        check_standing(service)
        states = {job: service.engine.show(job).job.state for job in (*wide, *old, fits)}
        assert states == {wide[0]: "PAUSED", old[0]: "PAUSED", old[1]: "PENDING", fits: "RUNNING"}
        why = service.engine.why(old[1])
        assert (why.reason.code, why.reason.text) == (
            "rejected",
            "cannot run on the cluster as it is now: asks for k80; the cluster has v100",
        )
        assert "poise cancel" in (why.advice or "")
        assert "the cluster has at most 1" in service.engine.why(wide[0]).reason.text
        assert service.engine.reasons()["rejected"] == 3
        page = service.engine.queue(JobFilter(), limit=10, offset=0)
        assert {row.id for row in page.jobs} == set(states)
        service.restart()
        service.settle()
    with_cluster(service, "v100:2,k80:2")
    finish_all(service)
    assert all(service.engine.show(job).job.state is JobState.SUCCEEDED for job in states)
    check_books(service, list(states))
    replay_store(service.loop.store.path)


def test_a_stranded_job_can_be_held_and_cancelled(service: Service) -> None:
    [job] = service.submit(a_request(gpus=2, gpu_types=("k80",)))
    with_cluster(service, "v100:1")
    service.call(lambda engine: engine.change(ALICE, job, Verb.HOLD))
    service.call(lambda engine: engine.change(ALICE, job, Verb.RELEASE))
    service.call(lambda engine: engine.change(ALICE, job, Verb.CANCEL))
    assert service.engine.show(job).job.state is JobState.CANCELLED
    assert service.engine.reasons()["rejected"] == 0
    service.restart()
    assert service.engine.show(job).job.state is JobState.CANCELLED


def test_a_job_that_the_cluster_cannot_run_is_still_refused_when_it_is_new(service: Service) -> None:
    with_cluster(service, "v100:1")
    with pytest.raises(RequestRefusedError, match="the cluster has at most 1"):
        service.submit(a_request(gpus=2))


def test_a_run_that_finishes_on_removed_gpus_finishes_its_job(service: Service) -> None:
    [job] = service.submit(a_request(gpus=2, gpu_types=("k80",)))
    service.machine.tell = lambda _news: None
    service.machine.end(job, RunEnding.FINISHED)  # while the service is away
    with_cluster(service, "v100:1")
    assert service.engine.show(job).job.state is JobState.SUCCEEDED


@pytest.mark.parametrize(
    ("named", "round_", "expected"),
    [(None, 10.0, "fifo"), (None, 20.0, "fifo"), ("las", 10.0, "fifo"), ("las", 20.0, "las"), ("srtf", 10.0, "srtf")],
)
def test_a_policy_holds_until_the_service_is_started_with_another(
    service: Service, named: str | None, round_: float, expected: str
) -> None:
    """It was started with `las`; a start with the same options keeps the policy in force."""
    service.call(lambda engine: engine.set_policy(ALICE, "fifo"))
    service.settings = Settings(round=round_, retries=2)
    service.policy = named
    service.restart()
    assert service.engine.service().policy == expected
    last = service.loop.store.chapter()
    assert last is not None
    assert read_header(last[0]).settings.round == round_


def test_the_journal_of_a_service_can_be_studied(service: Service) -> None:
    service.submit(a_request(gpus=2), a_request(gpus=2), a_request(gpus=2))
    service.pass_time(10)
    service.call(lambda engine: engine.set_policy(ALICE, "fifo"))
    finish_all(service)
    for verb, key in (("analyze", "source"), ("shares", "tenants")):
        said = poise(verb, service.directory, "--json")
        assert (said.code, said.err) == (0, "")
        assert key in json.loads(said.out)


@pytest.mark.parametrize("policy", ["fifo", "max-min", "gandiva-fair"])
def test_a_job_that_backs_off_goes_on_doing_so_under_another_policy(service: Service, policy: str) -> None:
    [job] = service.submit(a_request())
    service.machine.end(job, RunEnding.FAILED, cause="network-error", code=1)
    service.settle()
    advice = service.engine.why(job).advice
    service.call(lambda engine: engine.set_policy(ALICE, policy))
    assert service.engine.why(job).advice == advice
    service.pass_time(service.settings.backoff - 1)
    assert not service.machine.alive
    for _ in range(2):
        service.pass_time(service.settings.round)
    assert [each for each, _ in service.machine.alive] == [job]
