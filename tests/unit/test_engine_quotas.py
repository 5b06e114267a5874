"""What users and tenants may queue, keep and send: each bound, who is held to it, and that a restart changes nothing."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.machine import ALICE, BOB, Service, a_request

from poise.service.server import batch
from poise.service.server.engine_api import RefusalCode, RequestRefusedError
from poise.service.server.quotas import HOUR, LATER, MIB, SLOT, Allowance, size_of
from poise.service.server.storage.schema import checksum
from poise.service.wire.request import JobRequest, Submission
from poise.service.wire.views import Account, EventRow, JobState, Role

CAROL = Account(name="carol", tenant=ALICE.tenant, role=Role.USER)
OPERATOR = Account(name="op", tenant="ops", role=Role.OPERATOR)
NONE = Allowance(0, 0, 0, 0, 0)
HELD = a_request(hold=True)


def refusal(service: Service, *requests: JobRequest, by: Account = ALICE) -> RequestRefusedError:
    with pytest.raises(RequestRefusedError) as refused:
        service.submit(*requests, by=by)
    return refused.value


def cancel(service: Service, job: str) -> None:
    service.wish(lambda engine: engine.cancel(ALICE, job))


def counted(service: Service, bound: str) -> float | None:
    return service.loop.deps.metrics.registry.get_sample_value("poise_submissions_refused_total", {"bound": bound})


def test_user_has_so_many_jobs_that_have_not_ended_and_a_restart_changes_nothing(tmp_path: Path) -> None:
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


def test_array_counts_as_many_times_as_it_has_jobs_and_is_taken_whole_or_not_at_all(tmp_path: Path) -> None:
    service = Service(tmp_path, allowance=replace(NONE, user_jobs=1_000))
    service.submit(*[HELD] * 1_000)
    refusal(service, HELD)
    assert service.engine.states()["PENDING"] == 1_000


def test_submissions_of_one_instant_are_counted_on_top_of_each_other(tmp_path: Path) -> None:
    service = Service(tmp_path, allowance=replace(NONE, user_jobs=5))
    replies = [service.engine.submit(ALICE, _submission(HELD, HELD)) for _ in range(4)]
    service.settle()
    assert [reply.exception(0) is None for reply in replies] == [True, True, False, False]


def _submission(*requests: JobRequest) -> Submission:
    return Submission(jobs=requests)


def test_tenant_has_so_many_jobs_whoever_submits_them(tmp_path: Path) -> None:
    service = Service(tmp_path, allowance=replace(NONE, tenant_jobs=3))
    service.submit(HELD, HELD)
    service.submit(HELD, by=CAROL)
    for by in (ALICE, CAROL):
        text = "tenant alice has 3 jobs that have not ended, and 1 more would be over 3 (--tenant-jobs)"
        assert str(refusal(service, HELD, by=by)).startswith(text)
    service.submit(HELD, by=BOB)


def test_operators_are_held_to_the_bound_on_all_jobs_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_bytes_of_what_was_submitted_are_counted_until_the_jobs_have_ended(tmp_path: Path) -> None:
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


def test_what_is_submitted_and_cancelled_again_and_again_is_held_by_the_hour(tmp_path: Path) -> None:
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


def test_user_submits_so_many_jobs_an_hour(tmp_path: Path) -> None:
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


def test_user_holds_and_releases_only_so_often_and_may_always_cancel(tmp_path: Path) -> None:
    service = Service(tmp_path, allowance=replace(NONE, user_rate=5))
    (job,) = service.submit(HELD)
    for _ in range(2):
        service.wish(lambda engine: engine.release(ALICE, job))
        service.wish(lambda engine: engine.hold(ALICE, job))
    entries = service.loop.store.last
    for verb in (service.engine.release, service.engine.hold):
        reply = verb(ALICE, job)
        service.settle()
        with pytest.raises(
            RequestRefusedError, match="submitted, held or released 5 jobs within an hour, of at most 5"
        ) as refused:
            reply.result(0)
        assert refused.value.fault is RefusalCode.RATE
    assert service.loop.store.last == entries
    service.wish(lambda engine: engine.hold(OPERATOR, job))
    cancel(service, job)


def test_submission_that_was_taken_is_answered_although_no_more_could_be(tmp_path: Path) -> None:
    service = Service(tmp_path, allowance=replace(NONE, user_jobs=1))
    first = service.submit(HELD, key="the-same-key")
    assert service.submit(HELD, key="the-same-key") == first


def test_jobs_from_before_tokens_were_noted_count_for_their_tenant(tmp_path: Path) -> None:
    service = Service(tmp_path, allowance=replace(NONE, tenant_jobs=2, user_jobs=1))
    service.submit(HELD)
    db = service.loop.store._db
    [row] = db.execute("SELECT id, ended, state, json_remove(record, '$.by') FROM jobs")
    db.execute("UPDATE jobs SET record = ?, record_sum = ?", (row[-1], checksum(*row)))
    service.restart()
    service.submit(HELD)
    assert refusal(service, HELD, by=CAROL).bound == "tenant-jobs"


def test_all_jobs_of_a_tenant_are_cancelled_part_by_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "CANCELLED_AT_ONCE", 4)
    service = Service(tmp_path)
    others = service.submit(a_request(), by=BOB)
    service.submit(*[a_request()] * 14)
    service.submit(HELD, by=CAROL)
    reply = service.engine.cancel_all(OPERATOR, ALICE.tenant)
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
    assert service.wish(lambda engine: engine.cancel_all(ALICE, ALICE.tenant)).jobs == 1
    assert service.wish(lambda engine: engine.cancel_all(ALICE, ALICE.tenant)).jobs == 0
    assert {each.actor for each in _cancelled(service)} == {"op", "alice"}


def _cancelled(service: Service) -> list[EventRow]:
    found = service.engine.events(after=0, job=None, tenant=ALICE.tenant, limit=1_000).events
    return [each for each in found if each.kind == "cancelled"]


def test_tenant_whose_jobs_are_cancelled_is_asked_to_leave_and_a_crash_on_the_way_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "CANCELLED_AT_ONCE", 2)
    for commits in range(6):
        folder = tmp_path / str(commits)
        folder.mkdir()
        service = Service(folder, cluster="v100:4")
        service.submit(*[a_request()] * 6)
        service.crash_at = commits
        reply = service.engine.cancel_all(ALICE, ALICE.tenant)
        service.settle()
        if not reply.done():
            service.crash_at = None
            service.wish(lambda engine: engine.cancel_all(ALICE, ALICE.tenant))
        assert service.engine.states() == {JobState.CANCELLED.value: 6}
        assert not service.machine.alive
        assert not service.loop.state.usage.users


def test_cancelling_all_is_refused_by_a_service_that_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "CANCELLED_AT_ONCE", 2)
    service = Service(tmp_path)
    service.submit(*[HELD] * 6)
    reply = service.engine.cancel_all(ALICE, ALICE.tenant)
    service.loop._closing.set()
    service.loop.turn(0.0)
    with pytest.raises(RequestRefusedError, match="the service is stopping"):
        reply.result(0)
