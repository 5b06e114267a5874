"""The engine and its store: commits that fail, full disks, and stores that cannot be used."""

import os
import sqlite3
import stat
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from typing import Any

import pytest
from tests.machine import ALICE, FakeBackend, Service, a_request
from tests.machine_laws import check_books, check_standing, finish_all
from tests.start_laws import StartLaws

from poise.scheduler.model.errors import InvariantError, JournalError, PoiseError
from poise.service.backends.api import BackendFailed, DesiredState, RunEnding, RunOrder
from poise.service.server.engine import ServiceEngine
from poise.service.server.service import LiveService
from poise.service.server.service_api import ChangeJob, RefusalCode, RequestRefusedError, Verb
from poise.service.server.storage.schema import FILE, checksum
from poise.service.server.storage.sidecar import RESERVE
from poise.service.server.storage.store import Changes, StorageError, Store
from poise.service.wire.request import Submission
from poise.service.wire.views import JobState

LONG = 180.0


@pytest.fixture
def service(tmp_path: Path) -> Service:
    return Service(tmp_path)


def failing(service: Service, times: int, *, reserve: bool = False) -> Callable[[], int]:
    """Make the next commits fail, with or without room in reserve; how many are left to."""
    store, commit = service.loop.store, service.loop.store.commit
    left = [times]

    def full(changes: Any) -> None:
        if left[0]:
            left[0] -= 1
            raise StorageError("journal.db: cannot be written: database or disk is full")
        commit(changes)

    store.commit = full  # type: ignore[method-assign]
    if not reserve:
        store.reserve.give = lambda: False  # type: ignore[method-assign]
    service.loop._closing.wait = lambda _timeout=None: False  # type: ignore[assignment, method-assign]
    return lambda: left[0]


def test_a_chapter_that_cannot_be_committed_does_not_begin(service: Service) -> None:
    jobs = service.submit(a_request(gpus=2), a_request())
    failing(service, 1)
    reply = service.engine.set_policy(ALICE, "fifo")
    service.settle()
    with pytest.raises(RequestRefusedError, match="disk is full"):
        reply.result(0)
    assert service.engine.service().policy == "las"
    failing(service, 1)
    weight = service.engine.set_weight(ALICE, "alice", 5.0)
    service.settle()
    with pytest.raises(RequestRefusedError, match="disk is full"):
        weight.result(0)
    assert [each.weight for each in service.engine.shares().tenants] == [1.0]
    check_standing(service)
    finish_all(service)
    check_books(service, jobs)


def test_a_service_stopped_while_nothing_can_be_committed_restarts_correctly(service: Service) -> None:
    """What could not be kept is forgotten, also if there is room again before the last of it has been handled."""
    [job] = service.submit(a_request(gpus=2))
    service.machine.now += 5
    failing(service, 1)
    service.loop._closing.wait = lambda _timeout=None: True  # type: ignore[assignment, method-assign]
    entries = service.loop.store.last
    service.machine.end(job, RunEnding.FINISHED)
    service.machine.now += 50  # so that it is handled by itself, before the rest
    reply = service.engine.submit(ALICE, Submission(jobs=(a_request(),)))
    service.loop.turn(0.0)
    with pytest.raises(RequestRefusedError, match="disk is full"):
        reply.result(0)
    assert service.loop.store.last == entries
    assert service.engine.show(job).job.state is JobState.RUNNING  # as far as anybody can know
    service.restart()
    service.settle()
    assert service.engine.show(job).gpu_seconds == pytest.approx(10)
    check_books(service, [job])


def test_room_that_is_gone_again_at_once_is_waited_for(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    [job] = service.submit(a_request())
    left, begin = failing(service, 1), service.loop.open
    tries = []

    def begin_again() -> None:
        tries.append(left())
        if len(tries) < 3:
            raise StorageError("journal.db: cannot be written: database or disk is full")
        begin()

    monkeypatch.setattr(service.loop, "open", begin_again)
    reply = service.engine.change(ALICE, job, Verb.HOLD)
    service.settle()
    assert len(tries) == 3
    assert isinstance(reply.exception(0), RequestRefusedError)
    assert service.engine.service().ready
    assert service.engine.show(job).job.state is JobState.RUNNING


@pytest.mark.parametrize("fails", [1, 2])
def test_a_commit_that_fails_lets_nobody_in_that_waits_for_others(fails: int, tmp_path: Path) -> None:
    service = Service(tmp_path, policy="fifo", cluster="v100:4")
    laws = StartLaws(service.machine)
    [first] = service.submit(a_request())
    waiting = service.submit(*[a_request(after=(first,), array_cap=1, array="grid")] * 2)
    failing(service, fails)
    service.machine.end(first, RunEnding.FINISHED)
    service.settle()
    check_standing(service)
    assert [job for job, _ in service.machine.alive] == waiting[:1]
    assert laws.begun == 2
    finish_all(service)
    check_books(service, [first, *waiting])


@pytest.mark.parametrize("has_reserve", [True, False])
def test_an_ambiguous_commit_is_looked_up_in_the_store(has_reserve: bool, tmp_path: Path) -> None:
    """A disk may refuse after everything was written; what is in the store then counts."""
    service = Service(tmp_path)
    store, commit = service.loop.store, service.loop.store.commit

    def late(changes: Any) -> None:
        last = store.last
        commit(changes)
        store.last = last
        store.commit = commit  # type: ignore[method-assign]
        raise StorageError("journal.db: cannot be written: disk I/O error")

    store.commit = late  # type: ignore[method-assign]
    store.reserve.give = lambda: has_reserve  # type: ignore[method-assign]
    service.loop._closing.wait = lambda _timeout=None: False  # type: ignore[assignment, method-assign]
    submission = Submission(jobs=(a_request(),), key="the-same-key")
    reply = service.engine.submit(ALICE, submission)
    service.settle()
    assert isinstance(reply.exception(0), RequestRefusedError)
    again = service.engine.submit(ALICE, submission)
    service.settle()
    assert again.result(0).jobs == ("1",)
    assert list(service.machine.alive) == [("1", 1)]


def test_commands_are_refused_when_the_engine_dies(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise InvariantError("a bug")

    loop = ServiceEngine(service.loop.deps)
    engine = LiveService(loop)
    engine.start()
    [job] = engine.submit(ALICE, Submission(jobs=(a_request(),))).result(LONG).jobs
    monkeypatch.setattr(loop.state.scheduler, "handle", broken)
    for _ in range(2):  # as it dies, and later
        with pytest.raises(RequestRefusedError, match="the engine has stopped: a bug"):
            engine.change(ALICE, job, Verb.HOLD).result(LONG)
    loop._thread.join(LONG)
    assert isinstance(engine.failed, InvariantError)
    assert engine.show(job).job.state is JobState.RUNNING
    engine.close()


def test_commands_are_refused_when_the_engine_stops(service: Service) -> None:
    loop = ServiceEngine(service.loop.deps)
    engine = LiveService(loop)
    engine.start()
    [job] = engine.submit(ALICE, Submission(jobs=(a_request(),))).result(LONG).jobs
    engine.close()
    with pytest.raises(RequestRefusedError, match="the service is stopping"):
        engine.change(ALICE, job, Verb.HOLD).result(LONG)
    loop._closing.clear()  # a client that had looked just before
    with pytest.raises(RequestRefusedError, match="the service is stopping"):
        engine.change(ALICE, job, Verb.HOLD).result(LONG)
    assert engine.failed is None


@pytest.mark.parametrize("name", [FILE, f"{FILE}-wal", f"{FILE}-shm"])
def test_a_store_that_others_may_read_or_that_is_a_link_is_refused(name: str, tmp_path: Path) -> None:
    Store(tmp_path).close()
    path = tmp_path / name
    path.touch(mode=0o600)
    path.chmod(0o640)
    with pytest.raises(PoiseError, match=rf"^{path}: others may read it \(mode 0640\); run chmod 600 {path}$"):
        Store(tmp_path)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PoiseError, match=rf"^{path}: is a symbolic link; "):
        Store(tmp_path)


def test_all_files_of_a_store_are_their_owners_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = Store(tmp_path)
    finally:
        os.umask(before)
    store.commit([Changes(1.0)])
    modes = {each.name: stat.S_IMODE(each.stat().st_mode) for each in tmp_path.iterdir()}
    assert modes == dict.fromkeys((FILE, f"{FILE}-wal", f"{FILE}-shm", f"{FILE}-mark"), 0o600)
    store.close()


def test_a_store_that_is_damaged_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / FILE).touch(mode=0o600)
    (tmp_path / FILE).write_bytes(b"this is no database, however long it may be" * 100)
    with pytest.raises(JournalError, match=r"journal\.db: cannot be used: file is not a database"):
        Store(tmp_path)


def test_a_store_with_damaged_pages_is_refused_in_one_line(tmp_path: Path) -> None:
    service = Service(tmp_path)
    service.submit(*[a_request(name=f"n{number}") for number in range(200)])
    service.loop.store.close()
    size = (tmp_path / FILE).stat().st_size
    with (tmp_path / FILE).open("r+b") as file:
        file.seek(2 * 4096)
        file.write(os.urandom(size - 4 * 4096))
    with pytest.raises(JournalError, match=r"journal\.db: damaged: [^\n]*; run poise repair "):
        service.start()


def test_a_store_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    Store(tmp_path).close()
    db = sqlite3.connect(tmp_path / FILE)
    db.execute("PRAGMA user_version = 7")
    db.close()
    with pytest.raises(JournalError, match=r"written in version 7; this Poise reads versions up to \d+; use the Poise"):
        Store(tmp_path)


def test_a_journal_that_does_not_replay_is_continued_from_the_records(service: Service) -> None:
    """As after an upgrade to a Poise that decides in another way: jobs go on where they are, in a new chapter."""
    jobs = service.submit(a_request(gpus=2), a_request(gpus=2), a_request(hold=True))
    service.pass_time(10)
    before = {job: service.engine.show(job).job.state for job in jobs}
    alive = list(service.machine.alive)
    db = sqlite3.connect(service.loop.store.path)
    db.execute('UPDATE entries SET document = replace(document, \'"launch","1",1\', \'"launch","1",7\') WHERE number = 2')
    db.commit()
    db.close()
    service.restart()
    service.settle()
    assert {job: service.engine.show(job).job.state for job in jobs} == before
    assert list(service.machine.alive) == alive
    assert len(service.loop.store.chapters()) == 2
    check_standing(service)


def test_a_gpu_type_without_measurements_survives_a_restart(tmp_path: Path) -> None:
    service = Service(tmp_path, cluster="rtx9999:2")
    [job] = service.submit(a_request(gpus=2))
    service.restart()
    service.settle()
    assert service.engine.show(job).job.state is JobState.RUNNING
    assert len(service.loop.store.chapters()) == 1


def test_a_store_error_other_than_a_full_disk_is_not_taken_for_one(service: Service) -> None:
    [job] = service.submit(a_request())
    with pytest.raises(InvariantError, match="NOT NULL constraint failed"):
        service.loop.store.commit([Changes(2_000.0, records={job: (2_000.0, None, "{}")})])  # type: ignore[dict-item]


def test_a_waiting_job_with_an_unreadable_request_is_reported_in_one_line(service: Service) -> None:
    service.submit(a_request(gpus=2))
    [job] = service.submit(a_request())
    text = "{}"
    values = text, checksum(job, "alice", None, text), job
    service.loop.store._db.execute("UPDATE jobs SET request = ?, request_sum = ? WHERE id = ?", values)
    service.machine.end("1", RunEnding.FINISHED)
    with pytest.raises(JournalError, match=f"^job {job}: what was submitted makes no sense any more"):
        service.settle()
    service.loop.store.close()


def test_a_command_that_arrives_during_recovery_is_answered(service: Service) -> None:
    """A client that saw no trouble puts its command in after the engine has begun to reopen."""
    [job] = service.submit(a_request(gpus=2))
    store, adopt = service.loop.store, service.backend.adopt
    late = ChangeJob(ALICE, job, Verb.HOLD)
    failing(service, 1)

    def busy(self: FakeBackend, runs: Sequence[tuple[RunOrder, DesiredState]]) -> None:
        service.loop._inbox.put(late)
        adopt(self, runs)

    service.backend.adopt = busy  # type: ignore[method-assign]
    try:
        reply = service.engine.submit(ALICE, Submission(jobs=(a_request(),)))
        service.settle()
    finally:
        service.backend.adopt = adopt  # type: ignore[method-assign]
    assert isinstance(reply.exception(0), RequestRefusedError)
    assert late.reply.result(0).job == job
    assert store.last > 2


def test_a_command_that_arrives_while_a_broken_back_end_opens_is_refused(service: Service) -> None:
    [job] = service.submit(a_request())
    late = ChangeJob(ALICE, job, Verb.HOLD)
    loop = ServiceEngine(service.loop.deps)
    loop._inbox.put(late)
    loop._inbox.put(BackendFailed("nothing works"))
    with pytest.raises(InvariantError, match="nothing works"):
        LiveService(loop).start()
    loop._thread.join(LONG)
    assert isinstance(late.reply.exception(0), RequestRefusedError)


def test_commands_that_free_room_work_on_a_full_disk(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, waits, other = service.submit(a_request(gpus=2), a_request(gpus=2), a_request())
    reserve = service.loop.store.reserve
    monkeypatch.setattr(reserve, "make", lambda: False)
    left = failing(service, 1, reserve=True)
    replies = [service.engine.change(ALICE, job, Verb.CANCEL) for job in (runs, other)]
    service.settle()
    assert left() == 0
    assert [reply.result(0).state for reply in replies] == [JobState.CANCELLED, JobState.CANCELLED]
    assert not service.machine.alive  # nothing is begun in its place
    assert not service.engine.service().ready
    for reply in (
        service.engine.submit(ALICE, Submission(jobs=(a_request(),))),
        service.engine.change(ALICE, waits, Verb.RELEASE),
        service.engine.set_policy(ALICE, "fifo"),
        service.engine.set_weight(ALICE, "alice", 2.0),
    ):
        with pytest.raises(
            RequestRefusedError, match="the disk is full: nothing is taken on or started until there is room"
        ) as info:
            reply.result(0)
        assert info.value.fault is RefusalCode.STORAGE
    service.engine.change(ALICE, waits, Verb.HOLD)
    service.settle()
    assert service.engine.show(waits).job.state is JobState.PENDING
    service.restart()  # with a full disk: what was kept is there
    assert [service.engine.show(job).job.state for job in (runs, other)] == [JobState.CANCELLED, JobState.CANCELLED]
    service.call(lambda engine: engine.change(ALICE, waits, Verb.RELEASE))
    assert service.engine.show(waits).job.state is JobState.RUNNING
    check_standing(service)
    finish_all(service)
    check_books(service, [runs, waits, other])


def test_the_reserve_is_restored_before_jobs_are_accepted(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    [job] = service.submit(a_request(gpus=2))
    [waits] = service.submit(a_request(gpus=2))
    store = service.loop.store
    full = store.reserve.size
    monkeypatch.setattr(store.reserve, "free", lambda: 0)
    failing(service, 1, reserve=True)
    service.call(lambda engine: engine.change(ALICE, job, Verb.CANCEL))
    path = service.directory / RESERVE
    assert path.stat().st_size < full
    monkeypatch.undo()
    service.loop._looked = -inf
    service.settle()
    assert path.stat().st_size == path.stat().st_blocks * 512 == full
    assert service.engine.service().ready
    assert service.engine.show(waits).job.state is JobState.RUNNING  # what was not decided then is decided now
