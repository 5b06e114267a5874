"""A journal that is damaged anywhere: a service starts with all that was answered, or says in one line what is wrong.

Jobs that cannot be read are set aside by their names; after `poise repair` the service starts. No number is given again.
"""

import json
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.shell import poise
from tests.states import STATES, load

from poise.scheduler.core.settings import Settings
from poise.scheduler.model.cluster import parse_cluster
from poise.scheduler.model.errors import PoiseError
from poise.service.server.logs import Logbook
from poise.service.server.service import LiveService
from poise.service.server.service_api import JobFilter, Verb
from poise.service.server.startup import BackendKind, Setup, open_service
from poise.service.server.storage.replay import replay_store
from poise.service.server.storage.schema import FILE
from poise.service.server.storage.sidecar import MARK
from poise.service.wire.request import JobRequest, Submission
from poise.service.wire.views import Account, JobState, Role

ANN = Account(name="ann", tenant="ann", role=Role.ADMIN)
LONG = 180.0
JOBS = 40
LOG = f"{FILE}-wal"


def submitted(engine: LiveService, **given: object) -> str:
    request = JobRequest.model_validate({"command": ("sleep", "1000"), "cwd": "/"} | given)
    return engine.submit(ANN, Submission(jobs=(request,))).result(LONG).jobs[0]


def started(state: Path) -> tuple[LiveService, str]:
    log = StringIO()
    cluster, settings = parse_cluster("v100:4"), Settings(round=60.0)
    setup = Setup(state, cluster, "fifo", "consolidate", settings, BackendKind.NULL, Logbook(log))
    engine = open_service(setup)
    engine.start()
    return engine, log.getvalue()


@dataclass(frozen=True)
class Kept:
    """A state, as files, and what was answered of its jobs: name, tenant and, if it has come to an end, state."""

    files: dict[str, bytes]
    answered: dict[str, tuple[str, str, JobState | None]]


def answers(engine: LiveService) -> dict[str, tuple[str, str, JobState | None]]:
    rows = (engine.show(str(number)).job for number in range(1, JOBS + 1))
    return {row.id: (row.name, row.tenant, row.state if row.state.is_final else None) for row in rows}


@cache
def kept(*, closed: bool) -> Kept:
    """Of a service that was killed, with all of its journal in the log; or that was stopped."""
    with TemporaryDirectory() as folder:
        state = Path(folder)
        engine, _ = started(state)
        for number in range(JOBS):
            submitted(engine, name=f"job-{number}", tenant=f"tenant-{number % 3}", hold=number % 5 == 0)
        for job in ("2", "3", "12", "30"):
            engine.change(ANN, job, Verb.CANCEL).result(LONG)
        engine.set_weight(ANN, "tenant-1", 2.0).result(LONG)
        engine.set_policy(ANN, "las").result(LONG)
        answered = answers(engine)
        if closed:
            engine.close()
            with closing(sqlite3.connect(state / FILE)) as db:  # all of it is in the file itself then
                db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        files = {name: (state / name).read_bytes() for name in (FILE, LOG, MARK) if (state / name).exists()}
        if not closed:
            engine.close()
        return Kept(files, answered)


def put(state: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        (state / name).touch(mode=0o600)
        (state / name).write_bytes(data)


@dataclass(frozen=True)
class Blow:
    """What is done to a file, at a part of its length, or at a byte of it: it is cut off there, or bytes become others."""

    place: float
    others: bytes | None

    def fall(self, data: bytes) -> bytes:
        at = int(self.place * (len(data) if self.place < 1 else 1))
        return data[:at] if self.others is None else (data[:at] + self.others + data[at + len(self.others) :])[: len(data)]


BLOWS = st.builds(
    Blow,
    st.floats(0, 1, exclude_max=True),
    st.one_of(st.none(), st.binary(min_size=1, max_size=4), st.just(bytes(4096)), st.binary(min_size=200, max_size=200)),
)


def check(engine: LiveService, log: str, answered: dict[str, tuple[str, str, JobState | None]], lost: set[str]) -> None:
    """Everything that was answered is there, but for what is said to be damaged or lost; no number is given again."""
    for job, (name, tenant, state) in answered.items():
        if job in lost:
            continue
        shown = engine.show(job)
        if (shown.cause or "").startswith("set aside"):
            assert shown.job.state is JobState.FAILED
            continue
        now = shown.job.state if shown.job.state.is_final else None
        assert (shown.job.name, shown.job.tenant, now) == (name, tenant, state), log
    engine.queue(JobFilter(frozenset(JobState)), limit=500, offset=0)
    engine.events(after=0, job=None, tenant=None, limit=5_000)
    engine.shares()
    engine.nodes()
    assert int(submitted(engine)) > max(map(int, answered))


def refused(state: Path) -> str | None:
    """What the service says that does not start; None: it does."""
    try:
        started(state)[0].close()
    except PoiseError as error:
        return str(error)
    return None


def lost_jobs(problems: list[str], answered: dict[str, tuple[str, str, JobState | None]], state: Path) -> set[str]:
    """Jobs of which nothing is left, all of them named by what `poise repair` says."""
    engine, _ = started(state)
    gone = set()
    for job in answered:
        try:
            engine.show(job)
        except PoiseError:
            gone.add(job)
    engine.close()
    if gone:
        assert any("missing" in each or "nothing can be read of job" in each for each in problems), problems
    return gone


def tried(blows: list[Blow], name: str, *, closed: bool) -> None:
    whole = kept(closed=closed)
    with TemporaryDirectory() as folder:
        state = Path(folder)
        put(state, whole.files)
        data = whole.files[name]
        for blow in blows:
            data = blow.fall(data)
        (state / name).write_bytes(data)
        refusal = refused(state)
        if refusal is None:
            engine, log = started(state)
            try:
                check(engine, log, whole.answered, set())
            finally:
                engine.close()
            return
        assert "\n" not in refusal
        assert "poise repair" in refusal
        dry = poise("repair", "--dry-run", "--json", state)
        assert dry.code == 1, dry
        said = poise("repair", "--json", "-y", state).json
        assert said["problems"] == json.loads(dry.out)["problems"]
        assert (Path(said["backup"]) / name).read_bytes() == data
        lost = lost_jobs(said["problems"], whole.answered, state)
        rewound = any("lost its end" in each or "pages" in each for each in said["problems"])
        answered = {job: (job_name, tenant, None) for job, (job_name, tenant, _) in whole.answered.items()}
        engine, log = started(state)
        try:
            if rewound:  # what was wanted of jobs since then may be lost with it, and is said to be
                for job in set(answered) - lost:
                    engine.show(job)
                assert int(submitted(engine)) > max(map(int, answered))
            else:
                check(engine, log, whole.answered, lost)
        finally:
            engine.close()
        replay_store(state / FILE)
        assert poise("repair", state).out.startswith("nothing to repair")


@pytest.mark.slow
@given(st.lists(BLOWS, min_size=1, max_size=3))
@settings(max_examples=settings().max_examples * 5 // 8)
@example([Blow(0.5, None)])
@example([Blow(0.0, None)])
def test_a_log_that_is_damaged_loses_nothing_without_a_word(blows: list[Blow]) -> None:
    tried(blows, LOG, closed=False)


@pytest.mark.slow
@given(st.lists(BLOWS, min_size=1, max_size=3))
@settings(max_examples=settings().max_examples * 5 // 8)
@example([Blow(0.5, None)])
@example([Blow(0.0, bytes(4096))])
@example([Blow(60, b"\0\0\0\1")])
def test_a_journal_that_is_damaged_loses_nothing_without_a_word(blows: list[Blow]) -> None:
    tried(blows, FILE, closed=True)


@pytest.mark.parametrize(
    ("at", "byte"), [(18, b"\x03"), (18, b"\xff"), (60, b"\xff"), (62, b"\x01"), (63, b"\x00"), (63, b"\xff")]
)
def test_a_byte_of_the_header_that_is_damaged_can_be_repaired(at: int, byte: bytes) -> None:
    tried([Blow(at, byte)], FILE, closed=True)


def repaired(state: Path) -> set[str]:
    """Jobs that are there after a repair of a journal that was refused in one line."""
    refusal = refused(state)
    assert refusal is not None
    assert "\n" not in refusal
    assert "codec" not in refusal
    assert poise("replay", state).failure.startswith(f"{state / FILE}: cannot be read: ")
    poise("repair", "--json", "-y", state)
    engine, _ = started(state)
    found = engine.queue(JobFilter(frozenset(JobState)), limit=500, offset=0).jobs
    engine.close()
    return {job.id for job in found}


def test_a_table_whose_definition_is_no_text_costs_no_other_table(tmp_path: Path) -> None:
    whole = kept(closed=True)
    put(tmp_path, whole.files | {FILE: whole.files[FILE].replace(b"CREATE TABLE entries", b"CREATE T\x96BLE entries")})
    assert repaired(tmp_path) == set(whole.answered)


def test_a_journal_that_is_cut_off_keeps_what_is_left(tmp_path: Path) -> None:
    whole = kept(closed=True)
    put(tmp_path, whole.files | {FILE: whole.files[FILE][: len(whole.files[FILE]) * 3 // 4]})
    assert repaired(tmp_path)


@pytest.mark.parametrize(
    "statement",
    [
        "DROP TABLE jobs", "DROP TABLE entries", "DROP TABLE tenants", "DELETE FROM chapters",
        "PRAGMA user_version = 0", "PRAGMA user_version = 1", "PRAGMA user_version = -5", "PRAGMA user_version = 16777216",
    ],
)  # fmt: skip
def test_a_journal_without_a_table_or_its_version_can_be_repaired(tmp_path: Path, statement: str) -> None:
    whole = kept(closed=True)
    put(tmp_path, whole.files)
    with closing(sqlite3.connect(tmp_path / FILE, isolation_level=None)) as db:
        db.execute(statement)
    assert "poise repair" in (refused(tmp_path) or "")
    if "version" in statement:
        assert f"poise repair {tmp_path}" in poise("replay", tmp_path).failure
    assert poise("repair", "--dry-run", tmp_path).code == 1
    assert poise("repair", "-y", tmp_path).code == 0
    engine, log = started(tmp_path)
    try:
        if "jobs" not in statement:
            check(engine, log, whole.answered, set())
        assert int(submitted(engine)) > max(map(int, whole.answered))
    finally:
        engine.close()


def test_a_journal_of_an_earlier_version_that_says_it_is_of_this_one_can_be_repaired(tmp_path: Path) -> None:
    load(STATES / "1.7.sql", tmp_path)
    with closing(sqlite3.connect(tmp_path / FILE, isolation_level=None)) as db:
        jobs = {str(job) for (job,) in db.execute("SELECT id FROM jobs")}
        db.execute("PRAGMA user_version = 2")
    assert jobs
    assert repaired(tmp_path) == jobs


def test_a_journal_of_an_earlier_version_that_cannot_be_repaired_is_refused_in_one_line(tmp_path: Path) -> None:
    load(STATES / "1.7.sql", tmp_path)
    with closing(sqlite3.connect(tmp_path / FILE, isolation_level=None)) as db:
        db.execute("DROP TABLE mentions")
    assert "poise repair" in (refused(tmp_path) or "")
    found = (tmp_path / FILE).read_bytes()
    assert poise("repair", "-y", tmp_path).failure.startswith(f"{tmp_path / FILE}: cannot be repaired: ")
    assert (tmp_path / FILE).read_bytes() == found


@pytest.mark.parametrize("mark", [None, b"", b"12 40 00000000"])
def test_a_journal_without_its_mark_starts_with_one_warning_and_gives_no_number_again(
    tmp_path: Path, mark: bytes | None
) -> None:
    whole = kept(closed=True)
    put(tmp_path, {FILE: whole.files[FILE]} | ({} if mark is None else {MARK: mark}))
    (tmp_path / "jobs" / "70").mkdir(parents=True)
    engine, log = started(tmp_path)
    try:
        check(engine, log, whole.answered, set())
        assert submitted(engine) == "72"  # after the directory, and the one that was just submitted
    finally:
        engine.close()
    [line] = [each for each in log.splitlines() if "journal-mark-missing" in each]
    assert "cannot be checked" in line
    assert "journal-mark-missing" not in once_more(tmp_path)


def test_a_new_journal_and_one_with_its_mark_start_without_a_warning(tmp_path: Path) -> None:
    assert "journal-mark-missing" not in once_more(tmp_path)
    assert "journal-mark-missing" not in once_more(tmp_path)


@pytest.mark.parametrize("journal", [None, b""])
@pytest.mark.parametrize("named", [".", FILE])
@pytest.mark.parametrize("verb", ["replay", "analyze"])
def test_a_journal_that_is_gone_is_known_by_its_mark(tmp_path: Path, journal: bytes | None, named: str, verb: str) -> None:
    whole = kept(closed=True)
    put(tmp_path, {MARK: whole.files[MARK]} | ({} if journal is None else {FILE: journal}))
    said = poise(verb, tmp_path / named).failure
    assert said.startswith(f"{tmp_path / FILE}: it has lost its end: entries 1–")
    assert said.endswith(f" and jobs 1–{JOBS} were answered and are missing; run poise repair {tmp_path}")
    assert (tmp_path / FILE).exists() == (journal is not None)


def once_more(state: Path) -> str:
    """The log of a start."""
    engine, log = started(state)
    engine.close()
    return log


@pytest.mark.parametrize("column", ["tenant", "app", "job", "request", "record", "state"])
def test_a_job_whose_text_became_bytes_is_set_aside(tmp_path: Path, column: str) -> None:
    """One bit of a row says whether a value is text or bytes; no look at the pages of a file finds that."""
    whole = kept(closed=True)
    put(tmp_path, whole.files)
    with closing(sqlite3.connect(tmp_path / FILE, isolation_level=None)) as db:
        db.execute(f"UPDATE jobs SET {column} = x'7bff00' WHERE id = '4'")
    engine, log = started(tmp_path)
    try:
        assert (engine.show("4").cause or "").startswith("set aside")
        check(engine, log, whole.answered, {"4"})
    finally:
        engine.close()
