"""What is stored has a version: earlier ones are read, later ones are refused, and none changes without another number."""

import re
import sqlite3
from contextlib import closing
from io import StringIO
from pathlib import Path

import pytest
from tests import formats
from tests.shell import poise
from tests.states import STATES, load

from poise.engine import journal
from poise.engine.journal import JournalReader
from poise.scheduler.core.settings import Settings
from poise.scheduler.model.cluster import parse_cluster
from poise.scheduler.model.errors import JournalError
from poise.scheduler.model.job import Yields
from poise.service.server.logs import Logbook
from poise.service.server.service import LiveService
from poise.service.server.startup import BackendKind, Setup, open_service
from poise.service.server.storage import schema
from poise.service.server.storage.replay import last_chapter, replay_store
from poise.service.server.storage.schema import FILE, VERSION
from poise.service.wire.views import JobState

DUMPS = sorted(STATES.glob("*.sql"))
KEPT = pytest.mark.parametrize("kept", DUMPS, ids=lambda path: path.stem)


def opened(state: Path) -> tuple[LiveService, StringIO]:
    log = StringIO()
    cluster = parse_cluster("v100:2")
    return open_service(Setup(state, cluster, None, "consolidate", Settings(round=1.0), BackendKind.NULL, Logbook(log))), log


def everything(state: Path) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(state / FILE)) as db:
        return [*db.iterdump(), db.execute("PRAGMA user_version").fetchone()]


@KEPT
def test_a_state_of_every_version_is_served(kept: Path, tmp_path: Path) -> None:
    load(kept, tmp_path)
    with closing(sqlite3.connect(tmp_path / FILE)) as db:
        ended = dict(db.execute("SELECT id, json_extract(record, '$.state') FROM jobs WHERE ended IS NOT NULL"))
        jobs = [job for (job,) in db.execute("SELECT id FROM jobs ORDER BY number")]
        entries = db.execute("SELECT max(number) FROM entries").fetchone()[0]
    engine, log = opened(tmp_path)
    engine.start()
    try:
        assert "error" not in log.getvalue()
        details = {job: engine.show(job) for job in jobs}
        assert {job: details[job].job.state for job in ended} == ended
        assert {detail.job.name for detail in details.values()} >= {"done", "failed", "held", "gone", "counts", "restarts"}
        states = {detail.job.name: detail.job.state for detail in details.values()}
        assert (states["done"], states["failed"], states["gone"]) == (
            JobState.SUCCEEDED,
            JobState.FAILED,
            JobState.CANCELLED,
        )
        assert any(detail.preemptions for detail in details.values())
        assert {run.epoch for detail in details.values() for run in detail.runs} >= {1, 2}
        assert all(detail.request is not None for detail in details.values())
        weights = {each.tenant: each.weight for each in engine.shares().tenants}
        assert weights["speech"] == 2
        told = engine.events(after=0, job=None, tenant=None, limit=5_000).events
        assert {each.kind for each in told} >= {
            "submitted",
            "launched",
            "finished",
            "failed",
            "cancelled",
            "held",
            "preempted",
        }
        assert entries - 5 < max(each.number for each in told)
    finally:
        engine.close()
    assert replay_store(tmp_path / FILE).missing == ()  # also what was added since


@KEPT
def test_a_state_of_every_version_is_replayed_and_left_as_it_is(kept: Path, tmp_path: Path) -> None:
    load(kept, tmp_path)
    before = everything(tmp_path)
    found = poise("replay", "--json", tmp_path).json
    assert (found["exact"], found["policy"], found["missing"]) == (True, "fifo", [])
    assert found["instants"] > 20
    chapter = tmp_path / "chapter.jsonl"
    chapter.write_text("\n".join((*last_chapter(tmp_path / FILE), "")))
    assert len(list(JournalReader(chapter).entries())) > 1
    assert everything(tmp_path) == before


def test_a_state_of_a_later_version_is_refused_in_one_line_and_left_as_it_is(tmp_path: Path) -> None:
    load(DUMPS[-1], tmp_path)
    with closing(sqlite3.connect(tmp_path / FILE)) as db:
        db.execute(f"PRAGMA user_version = {VERSION + 1}")
    before = everything(tmp_path)
    problem = f"written in version {VERSION + 1}; this Poise reads versions up to {VERSION}; use the Poise that wrote it"
    with pytest.raises(JournalError, match=problem):
        opened(tmp_path)
    assert problem in poise("replay", tmp_path).failure
    assert everything(tmp_path) == before


def test_a_migration_that_is_cut_off_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(DUMPS[0], tmp_path)
    before = everything(tmp_path)
    step = schema.STEPS[1]

    def cut_off(db: sqlite3.Connection) -> None:
        step(db)
        raise KeyboardInterrupt

    monkeypatch.setitem(schema.STEPS, 1, cut_off)
    with pytest.raises(KeyboardInterrupt):
        opened(tmp_path)
    assert everything(tmp_path) == before
    monkeypatch.undo()
    engine, _ = opened(tmp_path)
    engine.start()
    engine.close()


def test_a_journal_file_of_version_1_is_read(tmp_path: Path) -> None:
    lines = [
        '{"journal":1,"trace":"t","policy":"fifo","placement":"consolidate","seed":0,"settings":{"cadence":"both"},'
        '"nodes":[["n","v100",2,"r"]]}',
        '[0.0,[["carried",{"id":"a","submitted":0.0,"gpus":1,"steadfast":true},"k",null,0,0.0,0.0,0,0.0,[],false]],[]]',
        '[1.0,[["submitted",{"id":"b","submitted":1.0,"gpus":1,"steadfast":false},"k",null]],[]]',
        '{"end":"interrupted"}',
    ]
    path = tmp_path / "journal.jsonl"
    path.write_text("\n".join((*lines, "")))
    first, second = JournalReader(path).entries()
    [carried], [submitted] = first.events, second.events
    assert carried.job.yields is Yields.NEVER  # type: ignore[union-attr]
    assert (carried.attached, carried.until) == (None, None)  # type: ignore[union-attr]
    assert submitted.job.yields is Yields.ANY_TIME  # type: ignore[union-attr]


def test_there_is_a_step_from_every_version_and_a_state_of_each() -> None:
    assert sorted(schema.STEPS) == list(range(1, VERSION))
    assert sorted(journal.MIGRATIONS) == list(range(1, journal.VERSION))
    assert {int(path.stem.partition(".")[0]) for path in DUMPS} == set(range(1, VERSION + 1))


def test_nothing_that_is_stored_changes_without_another_version() -> None:
    """If this fails: raise VERSION in service/server/storage/schema.py (for events, actions, jobs, headers also that of
    engine/journal.py). A new kind of event or action, or a new word, needs none: earlier versions refuse it by name.

    Add a step to service/server/storage/schema.py (and to engine/journal.py). Then run `python -m tests.formats`, and
    `python tests/states.py tests/data/states/VERSION.0.sql`. A new field of a request or a job that has a default needs no
    other version: what is stored of them are the fields that differ from their defaults.
    """
    assert formats.FILE.exists(), test_nothing_that_is_stored_changes_without_another_version.__doc__
    kept = formats.FILE.read_text(encoding="utf-8")
    assert formats.described() == kept, test_nothing_that_is_stored_changes_without_another_version.__doc__


@KEPT
def test_states_name_nothing_of_the_machine_that_they_were_made_on(kept: Path) -> None:
    text = kept.read_text(encoding="utf-8")
    assert not re.search(r"/(work|tmp|root|home|usr|opt)/|poise_[A-Za-z0-9]{8}", text)
    assert len(text) < 40_000
