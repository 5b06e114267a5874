"""What the API reads of the service: pages of the queue, positions, evidence, events, logs."""

import errno
import os
from pathlib import Path

import pytest
from tests.machine import ALICE, BOB, FakeBackend, Service, a_request
from tests.machine_laws import paged

from poise.service.backends.api import LogPart, RunEnding
from poise.service.server import event_log as telling_module
from poise.service.server import queue_view as lining_module
from poise.service.server.service_api import JobFilter, RefusalCode, RequestRefusedError, Verb
from poise.service.wire.views import EventPage, EventRow, JobState, QueuePage

EVERY = frozenset(JobState)
OVER = frozenset(state for state in JobState if state.is_final)


@pytest.fixture
def service(tmp_path: Path) -> Service:
    return Service(tmp_path, policy="srtf", cluster="v100:2")


def queue(
    service: Service, states: frozenset[JobState] = frozenset(), limit: int = 100, offset: int = 0, **which: str | None
) -> QueuePage:
    return service.engine.queue(JobFilter(states, **which), limit=limit, offset=offset)


def events(service: Service, after: int = 0, **which: object) -> EventPage:
    return service.engine.events(after=after, **({"job": None, "tenant": None, "limit": 100} | which))  # type: ignore[arg-type]


def end(service: Service, job: str, how: RunEnding = RunEnding.FINISHED) -> None:
    service.machine.end(job, how, cause="import-error" if how is RunEnding.FAILED else None, code=1)
    service.settle()


# The queue


def test_jobs_are_found_by_their_name_whether_they_have_ended_or_not(service: Service) -> None:
    first, other = service.submit(a_request(name="fit"), a_request(name="fit-2"))
    end(service, first)
    second, nameless = service.submit(a_request(name="fit"), a_request())
    found = queue(service, EVERY, name="fit")
    assert ([row.id for row in found.jobs], found.total) == ([second, first], 2)
    assert [row.id for row in queue(service, name="fit").jobs] == [second]
    assert [row.id for row in queue(service, EVERY, name="fit-2").jobs] == [other]
    assert [row.id for row in queue(service, EVERY, name=nameless).jobs] == [nameless]
    assert queue(service, EVERY, name="none").jobs == ()


def test_ended_jobs_are_paged_by_state(service: Service) -> None:
    jobs = []
    for number in range(9):
        [job] = service.submit(a_request(app="odd" if number % 2 else None), by=BOB if number % 3 else ALICE)
        end(service, job, RunEnding.FAILED if number % 2 else RunEnding.FINISHED)
        service.pass_time(1)
        jobs.append(job)
    latest = jobs[::-1]
    assert [row.id for row in paged(service, OVER, limit=2)] == latest
    assert [row.id for row in paged(service, frozenset({JobState.FAILED}), limit=2)] == latest[1::2]
    assert [row.id for row in paged(service, frozenset({JobState.SUCCEEDED}), limit=2)] == latest[::2]
    assert [row.id for row in paged(service, frozenset({JobState.SUCCEEDED}), tenant="alice")] == ["7", "1"]
    assert paged(service, frozenset({JobState.FAILED}), app="none") == []
    assert len(paged(service, frozenset({JobState.FAILED}), app="odd", tenant="bob")) == 3
    assert paged(service, frozenset({JobState.CANCELLED})) == []
    assert service.engine.states() == {"SUCCEEDED": 5, "FAILED": 4}


def test_the_queue_lists_running_then_waiting_then_ended_jobs(service: Service) -> None:
    [over] = service.submit(a_request())
    end(service, over)
    waits = service.submit(*[a_request(duration=100.0 + number) for number in range(6)])[2:]
    held = service.submit(a_request(hold=True))
    rows = paged(service, EVERY, limit=2)
    assert [row.state.value for row in rows] == ["RUNNING"] * 2 + ["PENDING"] * 5 + ["SUCCEEDED"]
    assert [row.id for row in rows] == ["2", "3", *waits, *held, over]


def test_every_page_gives_positions_in_line(service: Service) -> None:
    """Shortest first: who came last stands first."""
    jobs = service.submit(*[a_request(gpus=2, duration=1_000.0 - number) for number in range(7)], a_request(hold=True))
    for limit in (1, 2, 3, 50):
        rows = paged(service, limit=limit)
        assert [row.id for row in rows] == [jobs[6], *jobs[5::-1], jobs[7]]
        assert [row.position for row in rows] == [None, 1, 2, 3, 4, 5, 6, None]
    for row in rows:
        assert service.engine.show(row.id).job.position == row.position


@pytest.mark.parametrize("most", [2_000, 3])
def test_a_filtered_queue_keeps_the_order_of_the_whole_queue(
    service: Service, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(10):
        by, app = (BOB, "one") if number % 2 else (ALICE, "two")
        service.submit(a_request(gpus=2, duration=1_000.0 - number, app=app), by=by)
    rows = paged(service)
    bobs = [row.id for row in rows if row.tenant == "bob"]
    pending = [row.id for row in rows if row.state is JobState.PENDING]
    monkeypatch.setattr(lining_module, "IN_LINE", most)
    assert [row.id for row in paged(service, tenant="bob", limit=2)] == [row.id for row in paged(service, app="one")]
    assert sorted(row.id for row in paged(service, tenant="bob")) == sorted(bobs)
    if most > 10:
        assert [row.id for row in paged(service, tenant="bob", limit=2)] == bobs
        assert [row.id for row in paged(service, frozenset({JobState.PENDING}))] == pending
        assert [row.position for row in paged(service, tenant="bob")] == [None, 2, 4, 6, 8]
    else:  # further back in line there are no positions
        assert [row.position for row in paged(service)] == [None, 1, 2, 3, *[None] * 6]
        assert sorted(row.id for row in paged(service, frozenset({JobState.PENDING}))) == sorted(pending)


# Why


def test_evidence_uses_singular_and_plural(tmp_path: Path) -> None:
    service = Service(tmp_path, policy="srtf", cluster="v100:1")
    [long] = service.submit(a_request(duration=1_000.0))
    service.pass_time(1)
    assert service.engine.why(long).evidence == (
        "1 run, 1 GPU-second received, preempted 0 times, 0 GPU-seconds of work lost",
    )
    service.machine.end(long, RunEnding.FAILED, cause="traceback-from-crash", code=1)
    service.settle()
    [short] = service.submit(a_request(duration=100.0))
    service.pass_time(10)
    assert service.engine.why(long).evidence == (
        "2 runs, 1 GPU-second received, preempted 1 time, 0 GPU-seconds of work lost",
        "1 failed run; the last: traceback-from-crash, exit code 1",
        f"last run: preempted (outranked): job {short} ({short}, tenant alice) stands before it under the policy in force; "
        "it comes back by itself",
        "it can use v100; held of those: 1 GPU",
        f"held by job {short} (tenant alice, 1 v100)",
        "tenant alice holds 1 of 1 GPU",
    )


@pytest.mark.parametrize(
    ("how", "cause", "says"),
    [
        (RunEnding.FAILED, "network-error", "failed: network-error"),
        (RunEnding.YIELDED, None, "left without being asked to"),
    ],
)
def test_a_job_that_backs_off_says_until_when_and_why(
    service: Service, how: RunEnding, cause: str | None, says: str
) -> None:
    [job] = service.submit(a_request())
    service.machine.end(job, how, cause=cause, code=1)
    service.settle()
    for wait, left in [(0, "1m00s"), (20, "40s"), (39, "1s")]:
        service.pass_time(wait)
        why = service.engine.why(job)
        assert why.reason.code == "held-back"
        assert why.reason.text == f"is tried again in {left} at the earliest, as its last run {says}"
        assert why.advice == f"poise logs {job}"
        assert service.engine.show(job).job.reason == why.reason
    service.call(lambda engine: engine.change(ALICE, job, Verb.HOLD))
    assert service.engine.why(job).reason.text == "is held back by its owner"
    service.call(lambda engine: engine.change(ALICE, job, Verb.RELEASE))
    assert service.engine.show(job).job.state is JobState.RUNNING


# What happened


def told(found: EventPage) -> list[tuple[str | None, str]]:
    return [(each.job, each.kind) for each in found.events]


def follow(service: Service, start: int, **which: object) -> list[EventRow]:
    """All parts, one after the other, as one who follows reads them."""
    found: list[EventRow] = []
    while True:
        part = events(service, start, limit=1, **which)
        if part.next == start:
            return found
        found += part.events
        start = part.next


def test_the_latest_events_are_found_behind_silent_entries(tmp_path: Path) -> None:
    service = Service(tmp_path, policy="las")
    jobs = service.submit(*[a_request() for _ in range(3)])
    service.call(lambda engine: engine.change(ALICE, jobs[2], Verb.CANCEL))
    for _ in range(30):
        service.submit(a_request(), key="the-same-key")
        service.call(lambda engine: engine.change(ALICE, jobs[0], Verb.RELEASE))
    assert told(events(service, -2, job=jobs[2])) == [(jobs[2], "submitted"), (jobs[2], "cancelled")]
    last = events(service, -1, tenant="alice")
    assert (len(last.events), last.next) == (1, service.loop.store.last)
    assert len(events(service, -1_000, limit=1_000).events) == len(follow(service, 0))
    assert told(events(service, -1_000, limit=3)) == told(events(service, -3))


def test_following_events_misses_nothing_and_reaches_the_end(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telling_module, "PART", 2)
    monkeypatch.setattr(telling_module, "MOST_ENTRIES", 4)
    for number in range(12):
        [job] = service.submit(a_request(), by=BOB if number % 4 == 3 else ALICE)
        end(service, job)
    everything = follow(service, 0)
    assert len(everything) == 36
    bobs = follow(service, 0, tenant="bob")
    assert [each.job for each in bobs] == [each.job for each in everything if each.tenant == "bob"]
    assert [each.kind for each in follow(service, 0, job="5")] == ["submitted", "launched", "finished"]
    last = service.loop.store.last
    assert events(service, last, job="5").next == last
    assert events(service, 5, tenant="nobody").next == last
    assert events(service, last + 7).next == last + 7
    with pytest.raises(RequestRefusedError, match="there is no job '99'"):
        events(service, 0, job="99")


def test_a_new_chapter_is_no_event_of_its_jobs(service: Service) -> None:
    service.submit(*[a_request() for _ in range(4)])
    before = told(events(service))
    service.call(lambda engine: engine.set_weight(ALICE, "alice", 2.0))
    service.call(lambda engine: engine.set_policy(ALICE, "fifo"))
    new = [(None, "weight-changed"), (None, "policy-changed")]
    assert told(events(service)) == [*before, *new]
    assert told(events(service, -100)) == [*before, *new]


# Logs


@pytest.mark.parametrize(
    ("number", "fault", "text"),
    [
        (errno.EMFILE, RefusalCode.NOT_READY, "cannot be read at the moment"),
        (errno.EACCES, RefusalCode.UNKNOWN, "has no log that the service may read"),
    ],
)
def test_a_log_without_permission_is_not_reported_as_temporary(
    service: Service, monkeypatch: pytest.MonkeyPatch, number: int, fault: RefusalCode, text: str
) -> None:
    def refuses(*_: object) -> LogPart:
        raise OSError(number, os.strerror(number))

    [job] = service.submit(a_request())
    monkeypatch.setattr(FakeBackend, "log", refuses)
    with pytest.raises(RequestRefusedError, match=text) as refused:
        service.engine.log(job, replica=0, offset=0, limit=10)
    assert refused.value.fault is fault


@pytest.mark.parametrize(("replicas", "most"), [("node", 1), ("gpu", 2)])
def test_the_log_of_a_replica_that_a_job_does_not_have_is_refused(
    service: Service, monkeypatch: pytest.MonkeyPatch, replicas: str, most: int
) -> None:
    [job, waiting] = service.submit(*[a_request(gpus=2, replicas=replicas)] * 2)
    monkeypatch.setattr(FakeBackend, "log", lambda *_: LogPart(b"", 0, 0))
    assert service.engine.log(waiting, replica=1, offset=0, limit=10).text == ""
    for offset in (0, -10):
        for replica in range(most):
            assert service.engine.log(job, replica=replica, offset=offset, limit=10).text == ""
        wanted = f"^job {job} has {most} replicas?; the first is replica 0$"
        with pytest.raises(RequestRefusedError, match=wanted):
            service.engine.log(job, replica=most, offset=offset, limit=10)
    monkeypatch.setattr(FakeBackend, "log", lambda *_: LogPart(b"", 7, 7))  # of a run that is not kept one by one any more
    assert service.engine.log(job, replica=9, offset=7, limit=10).next == 7
