"""Submissions: keys, apps, and what users and tenants may queue, keep and send."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.machine import ALICE, BOB, Service, a_request

from poise.scheduler.core.settings import Settings
from poise.scheduler.model.errors import RequestError
from poise.service.backends.api import RunProgressed
from poise.service.server import batch
from poise.service.server.quotas import HOUR, LATER, MIB, SLOT, Allowance, size_of
from poise.service.server.service_api import JobFilter, RefusalCode, RequestRefusedError, Verb
from poise.service.server.storage.schema import checksum
from poise.service.wire.request import JobRequest, Submission
from poise.service.wire.views import Account, EventRow, JobState, Role

# Keys of submissions: what is sent twice is taken once, whatever has happened meanwhile.


@pytest.fixture
def service(tmp_path: Path) -> Service:
    return Service(tmp_path)


def test_a_submission_sent_twice_is_accepted_once(service: Service) -> None:
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


def test_a_repeated_submission_is_answered_even_if_it_would_be_refused_now(tmp_path: Path) -> None:
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
    replies = [service.engine.submit(ALICE, Submission(jobs=tuple(each), key="the-same-key")) for each in (jobs, jobs[1:])]
    service.settle()  # both in one instant
    assert service.submit(*jobs, key="the-same-key") == list(replies[0].result(0).jobs)
    for other in (jobs[1:], [*jobs[1:], jobs[0]], [*jobs[:-1], a_request(gpus=2)]):
        with pytest.raises(RequestRefusedError, match=r"^key 'the-same-key': other jobs were submitted under it") as refused:
            service.submit(*other, key="the-same-key")
        assert refused.value.fault is RefusalCode.CONFLICT
    assert isinstance(replies[1].exception(0), RequestRefusedError)
    assert sum(service.engine.states().values()) == 300


# Apps in the live engine: a stranger's app of the same name is another app, whatever its jobs report.


GOOD, BAD = (0.001, 0.002), (0.5, 0.6)


def judged(tmp_path: Path, *owners: Account) -> list[JobState]:
    """Four jobs of the app `sweep`, by their owners; the first two report far larger losses. What becomes of each.

    They report at 300 of 1,000 steps: beyond the first rung of four jobs (250), before the only one of two (500).
    """
    service = Service(tmp_path, policy="themis", cluster="v100:4", settings=Settings(round=10.0))
    request, machine = a_request(duration=1_000.0, app="sweep"), service.machine
    jobs = [job for owner in owners for job in service.submit(request, by=owner)]
    for (job, epoch), loss in zip(list(machine.alive), (*BAD, *GOOD), strict=True):
        machine.tell(RunProgressed(job, epoch, machine.wall, 300.0, 1_000.0, 300.0, 1.0, loss))
        service.settle()
    for _ in range(40):
        service.pass_time(10.0)
    return [service.engine.show(job).job.state for job in jobs]


def test_another_tenants_app_of_the_same_name_does_not_get_jobs_cancelled(tmp_path: Path) -> None:
    assert judged(tmp_path, ALICE, ALICE, BOB, BOB) == [JobState.RUNNING] * 4


def test_jobs_of_one_app_are_cancelled_on_those_reports(tmp_path: Path) -> None:
    assert judged(tmp_path, ALICE, ALICE, ALICE, ALICE) == [JobState.CANCELLED] * 2 + [JobState.RUNNING] * 2


# What users and tenants may queue, keep and send: each bound, who is held to it, and that a restart changes nothing.


CAROL = Account(name="carol", tenant=ALICE.tenant, role=Role.USER)
OPERATOR = Account(name="op", tenant="ops", role=Role.OPERATOR)
NONE = Allowance(0, 0, 0, 0, 0)
HELD = a_request(hold=True)


def refusal(service: Service, *requests: JobRequest, by: Account = ALICE) -> RequestRefusedError:
    with pytest.raises(RequestRefusedError) as refused:
        service.submit(*requests, by=by)
    return refused.value


def cancel(service: Service, job: str) -> None:
    service.call(lambda engine: engine.change(ALICE, job, Verb.CANCEL))


def counted(service: Service, bound: str) -> float | None:
    return service.loop.deps.metrics.registry.get_sample_value("poise_submissions_refused_total", {"bound": bound})


def test_a_users_job_quota_holds_over_a_restart(tmp_path: Path) -> None:
    service = Service(tmp_path, allowance=replace(NONE, user_jobs=5))
    first, *_ = service.submit(*[HELD] * 4)
    for _ in range(2):
        error = refusal(service, HELD, HELD)
        assert (error.fault, error.retry, error.bound) == (RefusalCode.QUOTA, LATER, "user-jobs")
        text = "token 'alice' has 4 jobs that have not ended, and 2 more would be over 5 (--user-jobs)"
        assert str(error) == f"{text}; cancel some, or wait for them to end"
        service.restart()
    service.submit(HELD)
    refusal(service, HELD)
    service.submit(HELD, by=CAROL)
    cancel(service, first)
    service.submit(HELD)
    assert counted(service, "user-jobs") == 1


def test_an_array_counts_each_job_and_is_accepted_whole_or_not_at_all(tmp_path: Path) -> None:
    service = Service(tmp_path, allowance=replace(NONE, user_jobs=1_000))
    service.submit(*[HELD] * 1_000)
    refusal(service, HELD)
    assert service.engine.states()["PENDING"] == 1_000


def test_submissions_of_one_batch_add_up_against_quotas(tmp_path: Path) -> None:
    service = Service(tmp_path, allowance=replace(NONE, user_jobs=5))
    replies = [service.engine.submit(ALICE, _submission(HELD, HELD)) for _ in range(4)]
    service.settle()
    assert [reply.exception(0) is None for reply in replies] == [True, True, False, False]


def _submission(*requests: JobRequest) -> Submission:
    return Submission(jobs=requests)


def test_a_tenants_job_quota_counts_all_its_users(tmp_path: Path) -> None:
    service = Service(tmp_path, allowance=replace(NONE, tenant_jobs=3))
    service.submit(HELD, HELD)
    service.submit(HELD, by=CAROL)
    for by in (ALICE, CAROL):
        text = "tenant alice has 3 jobs that have not ended, and 1 more would be over 3 (--tenant-jobs)"
        assert str(refusal(service, HELD, by=by)).startswith(text)
    service.submit(HELD, by=BOB)


def test_operators_are_exempt_from_all_quotas_but_the_total(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "MOST_QUEUED", 4)
    service = Service(tmp_path, allowance=Allowance(1, 1, 1, 1, 1))
    mine = HELD.model_copy(update={"tenant": ALICE.tenant})
    service.submit(*[mine] * 4, by=OPERATOR)
    error = refusal(service, mine, by=OPERATOR)
    assert (error.fault, error.bound) == (RefusalCode.FULL, "all-jobs")
    monkeypatch.setattr(batch, "MOST_QUEUED", 100)
    assert refusal(service, HELD).bound == "tenant-jobs"


BIG = a_request(hold=True, env={"FILLER": "x" * 60_000, "LETTERS": "é" * 1_000})
SIZE = size_of(BIG.model_dump_json(exclude_defaults=True))


def test_bytes_of_requests_count_until_their_jobs_have_ended(tmp_path: Path) -> None:
    assert SIZE > 62_000
    service = Service(tmp_path, allowance=replace(NONE, tenant_bytes=3 * SIZE + 100))
    first, *_ = service.submit(BIG, BIG)
    service.submit(BIG, by=CAROL)
    for _ in range(2):
        error = refusal(service, BIG)
        assert (error.fault, error.bound) == (RefusalCode.QUOTA, "tenant-mib")
        mib = f"{3 * SIZE / MIB:.4g} MiB"
        assert str(error).startswith(f"tenant alice has {mib} of jobs that have not ended, and ")
        service.restart()
    cancel(service, first)
    service.submit(BIG)


def test_submitting_and_cancelling_repeatedly_is_limited_per_hour(tmp_path: Path) -> None:
    service = Service(tmp_path, allowance=replace(NONE, user_bytes=3 * SIZE + 100))
    for _ in range(3):
        (job,) = service.submit(BIG)
        cancel(service, job)
        service.pass_time(SLOT)
    for _ in range(2):
        error = refusal(service, BIG)
        assert (error.fault, error.bound) == (RefusalCode.RATE, "user-mib")
        assert error.retry is not None
        assert HOUR - 3 * SLOT < error.retry <= HOUR - SLOT
        service.restart()
    assert error.retry is not None
    service.pass_time(error.retry - 1)
    refusal(service, BIG)
    service.pass_time(1)
    service.submit(BIG)
    refusal(service, BIG)


def test_a_user_submits_a_limited_number_of_jobs_per_hour(tmp_path: Path) -> None:
    service = Service(tmp_path, allowance=replace(NONE, user_rate=10))
    assert str(refusal(service, *[HELD] * 11)) == (
        "token 'alice' has submitted, held or released 0 jobs within an hour, of at most 10 (--user-rate);"
        " submit fewer at once"
    )
    for job in service.submit(*[HELD] * 8):
        cancel(service, job)
    for _ in range(2):
        error = refusal(service, *[HELD] * 3)
        assert (error.fault, error.bound) == (RefusalCode.RATE, "user-rate")
        text = "token 'alice' has submitted, held or released 8 jobs within an hour, of at most 10 (--user-rate)"
        assert str(error) == f"{text}; try again in {error.retry:,} s"
        service.restart()
    service.submit(HELD, HELD)
    service.submit(HELD, by=CAROL)
    assert error.retry is not None
    service.pass_time(error.retry)
    service.submit(*[HELD] * 10)


def test_holds_and_releases_are_limited_per_hour_and_cancels_are_not(tmp_path: Path) -> None:
    service = Service(tmp_path, allowance=replace(NONE, user_rate=5))
    (job,) = service.submit(HELD)
    for _ in range(2):
        service.call(lambda engine: engine.change(ALICE, job, Verb.RELEASE))
        service.call(lambda engine: engine.change(ALICE, job, Verb.HOLD))
    entries = service.loop.store.last
    for verb in (Verb.RELEASE, Verb.HOLD):
        reply = service.engine.change(ALICE, job, verb)
        service.settle()
        with pytest.raises(
            RequestRefusedError, match="submitted, held or released 5 jobs within an hour, of at most 5"
        ) as refused:
            reply.result(0)
        assert refused.value.fault is RefusalCode.RATE
    assert service.loop.store.last == entries
    service.call(lambda engine: engine.change(OPERATOR, job, Verb.HOLD))
    cancel(service, job)


def test_a_repeated_submission_is_answered_even_over_quota(tmp_path: Path) -> None:
    service = Service(tmp_path, allowance=replace(NONE, user_jobs=1))
    first = service.submit(HELD, key="the-same-key")
    assert service.submit(HELD, key="the-same-key") == first


def test_jobs_stored_without_a_token_count_for_their_tenant(tmp_path: Path) -> None:
    service = Service(tmp_path, allowance=replace(NONE, tenant_jobs=2, user_jobs=1))
    service.submit(HELD)
    db = service.loop.store._db
    [row] = db.execute("SELECT id, ended, state, json_remove(record, '$.by') FROM jobs")
    db.execute("UPDATE jobs SET record = ?, record_sum = ?", (row[-1], checksum(*row)))
    service.restart()
    service.submit(HELD)
    assert refusal(service, HELD, by=CAROL).bound == "tenant-jobs"


def test_cancelling_all_jobs_of_a_tenant_takes_several_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "CANCELLED_AT_ONCE", 4)
    service = Service(tmp_path)
    others = service.submit(a_request(), by=BOB)
    service.submit(*[a_request()] * 14)
    service.submit(HELD, by=CAROL)
    reply = service.engine.cancel_all(OPERATOR, JobFilter(tenant=ALICE.tenant))
    service.loop.turn(0.0)
    assert not reply.done()
    late = service.engine.submit(ALICE, _submission(HELD))
    service.loop.turn(0.0)
    service.loop.turn(0.0)
    assert not reply.done()
    assert late.done(), "others get their turn in between"
    service.settle()
    assert reply.result(0).model_dump() == {"tenant": ALICE.tenant, "jobs": 15}
    states = service.engine.states()
    assert (states[JobState.CANCELLED], sum(states.values())) == (15, 17)
    assert not service.engine.why(others[0]).state.is_final
    assert service.call(lambda engine: engine.cancel_all(ALICE, JobFilter(tenant=ALICE.tenant))).jobs == 1
    assert service.call(lambda engine: engine.cancel_all(ALICE, JobFilter(tenant=ALICE.tenant))).jobs == 0
    assert {each.actor for each in _cancelled(service)} == {"op", "alice"}


def _cancelled(service: Service) -> list[EventRow]:
    found = service.engine.events(after=0, job=None, tenant=ALICE.tenant, limit=1_000).events
    return [each for each in found if each.kind == "cancelled"]


def test_a_crash_while_all_jobs_of_a_tenant_are_cancelled_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "CANCELLED_AT_ONCE", 2)
    for commits in range(6):
        folder = tmp_path / str(commits)
        folder.mkdir()
        service = Service(folder, cluster="v100:4")
        service.submit(*[a_request()] * 6)
        service.crash_at = commits
        reply = service.engine.cancel_all(ALICE, JobFilter(tenant=ALICE.tenant))
        service.settle()
        if not reply.done():
            service.crash_at = None
            service.call(lambda engine: engine.cancel_all(ALICE, JobFilter(tenant=ALICE.tenant)))
        assert service.engine.states() == {JobState.CANCELLED.value: 6}
        assert not service.machine.alive
        assert not service.loop.state.usage.users


def test_cancelling_all_jobs_is_refused_by_a_stopping_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "CANCELLED_AT_ONCE", 2)
    service = Service(tmp_path)
    service.submit(*[HELD] * 6)
    reply = service.engine.cancel_all(ALICE, JobFilter(tenant=ALICE.tenant))
    service.loop._closing.set()
    service.loop.turn(0.0)
    with pytest.raises(RequestRefusedError, match="the service is stopping"):
        reply.result(0)
