"""Stores of earlier versions: how the tables of one become those of the next, one small step each.

What a step does is never changed again. All steps that are due are one transaction: a store is as it was, or as it is now.
"""

import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from poise.engine.journal import migrate_entry, migrate_job
from poise.scheduler.model.errors import JournalError
from poise.service.server.storage.schema import INDEXES, TABLES, VERSION, read_tolerantly, sum_of

_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
NO_SUM = -1
"""Of a row that was damaged before it had a sum."""
MOST_LATER = 99
"""Versions that a later Poise may have. A larger one is damage."""
_SINCE_2 = ("floors", "damaged")
AT_ONCE = 1_000
"""Rows that are held in memory."""


def version_of(db: sqlite3.Connection, path: Path) -> int:
    """Of a store; 0: it is empty. JournalError for one that a later Poise wrote.

    Raises sqlite3.DatabaseError, as for any other damage, for a version that none can have or that the tables contradict.
    """
    version = int(db.execute("PRAGMA user_version").fetchone()[0])
    if VERSION < version <= MOST_LATER:
        problem = f"written in version {version}; this Poise reads versions up to {VERSION}"
        raise JournalError(f"{path}: {problem}; use the Poise that wrote it, or a later one")
    by_tables = version_by_tables(db)
    if version != by_tables and (by_tables or not 0 <= version <= VERSION):
        raise sqlite3.DatabaseError(f"its version is damaged: {version}, and its tables are of version {by_tables}")
    return version


def version_by_tables(db: sqlite3.Connection) -> int:
    """Which version a store is of, whatever it says itself; 0: it has no tables."""
    found = db.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table' AND name != 'room'").fetchall()
    if any(name in _SINCE_2 or "sum INTEGER" in sql for name, sql in found):
        return 2
    return 1 if found else 0


def migrate(db: sqlite3.Connection, path: Path) -> int:
    """Bring a store to the version of this Poise, all or nothing; which version it was of, 0 if it was empty."""
    version = version_of(db, path)
    if version == VERSION:
        return version
    db.execute("BEGIN IMMEDIATE")
    try:
        if version == 0:
            _execute(db, TABLES + INDEXES)
        else:
            _take_steps(db, version)
        db.execute(f"PRAGMA user_version = {VERSION}")
        db.execute("COMMIT")
    except BaseException:
        db.execute("ROLLBACK")
        raise
    return version


def copied(source: sqlite3.Connection, path: Path) -> sqlite3.Connection:
    """A store as one of this version, for reading: itself if it is one, otherwise a copy that is gone when it is closed."""
    read_tolerantly(source)
    if version_of(source, path) in (0, VERSION):
        return source
    with closing(source):
        copy = sqlite3.connect("", isolation_level=None)  # a file without a name, once memory is short
        source.backup(copy)
    read_tolerantly(copy)
    migrate(copy, path)
    return copy


def _take_steps(db: sqlite3.Connection, version: int) -> None:
    for each in range(version, VERSION):
        STEPS[each](db)


def _execute(db: sqlite3.Connection, statements: str) -> None:
    """Like `executescript`, which would commit first."""
    for each in statements.split(";"):
        db.execute(each)


_HOLDERS_2 = """UPDATE submissions SET account = account || '@' || coalesce(
    (SELECT tenant FROM jobs WHERE id = json_extract(submissions.jobs, '$[0]')), account)
WHERE account NOT LIKE '%@%' AND json_valid(jobs)"""
"""A key belonged to the name of a token, and belongs to its tenant too."""

# From 1 to 2: sums; a column for the state. Records of runs count their GPUs by type; jobs say for how long they were busy.


def _to_2(db: sqlite3.Connection) -> None:
    old = ("chapters", "entries", "jobs", "mentions", "submissions", "tenants")
    for (index,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL").fetchall():
        db.execute(f"DROP INDEX {index}")
    for each in old:
        db.execute(f"ALTER TABLE {each} RENAME TO old_{each}")
    _execute(db, TABLES)
    for row in _rows(db, "SELECT number, first, header, asked FROM old_chapters"):
        db.execute("INSERT INTO chapters VALUES (?, ?, ?, ?, ?)", _whole_or_not(_chapter_2, row, 1))
    for row in _rows(db, "SELECT number, now, document, notes FROM old_entries"):
        db.execute("INSERT INTO entries VALUES (?, ?, ?, ?, ?)", _whole_or_not(_entry_2, row, 1))
    for row in _rows(db, "SELECT number, id, tenant, app, ended, 'FAILED', job, request, record FROM old_jobs"):
        db.execute("INSERT INTO jobs VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", _whole_or_not(_job_2, row, 3))
    for row in _rows(db, "SELECT name, weight, gpu_seconds, preemptions FROM old_tenants"):
        db.execute("INSERT INTO tenants VALUES (?, ?, ?, ?, ?)", (*row, sum_of(*row)))
    db.execute("INSERT INTO mentions SELECT job, entry FROM old_mentions")
    db.execute("INSERT INTO submissions SELECT key, account, jobs FROM old_submissions")
    db.execute(_HOLDERS_2)
    for each in old:
        db.execute(f"DROP TABLE old_{each}")
    _execute(db, INDEXES)


def _rows(db: sqlite3.Connection, query: str) -> Iterator[tuple[Any, ...]]:
    found = db.execute(query)
    while some := found.fetchmany(AT_ONCE):
        yield from some


def _whole_or_not(renew: Callable[..., tuple[object, ...]], row: tuple[Any, ...], sums: int) -> tuple[object, ...]:
    """A row in its new form; one that makes no sense as it was, with sums that are those of a damaged one."""
    try:
        return renew(*row)
    except (AttributeError, KeyError, TypeError, ValueError):
        return (*row, *[NO_SUM] * sums)


def _chapter_2(number: int, first: int, header: str, asked: str) -> tuple[object, ...]:
    texts = [_encode(json.loads(text) | {"journal": 2}) for text in (header, asked)]
    return number, first, *texts, sum_of(first, *texts)


def _entry_2(number: int, now: float, text: str, notes: str | None) -> tuple[object, ...]:
    """Most instants have nothing that was different, and are not even looked into."""
    if '"carried"' in text or '"steadfast"' in text:
        text = _encode(migrate_entry(1, json.loads(text)))
    return number, now, text, notes, sum_of(number, text, notes)


def _job_2(*row: Any) -> tuple[object, ...]:  # noqa: ANN401
    number, name, tenant, app, ended, _, job, request, record = row
    job = _encode(migrate_job(1, json.loads(job)))
    found = json.loads(record)
    found["runs"] = [_run_2(run) for run in found["runs"]]
    found = {"unsaved": False, "busy": sum(map(_busy, found["runs"]))} | found
    record, state = _encode(found), found["state"]
    sums = sum_of(name, job), sum_of(name, tenant, app, request), sum_of(name, ended, state, record)
    return number, name, tenant, app, ended, state, job, request, record, *sums


def _run_2(run: dict[str, Any]) -> dict[str, Any]:
    """GPUs of a run were of one type."""
    new = {"attached": None, "by_type": {run.get("gpu_type"): run["count"]}} | run
    new.pop("gpu_type", None)
    return new


def _busy(run: dict[str, Any]) -> float:
    """Seconds of a run that is over, from its beginning."""
    began, over = run["began"], run["released"]
    return 0.0 if began is None or over is None else max(over - began, 0.0)


STEPS: dict[int, Callable[[sqlite3.Connection], None]] = {1: _to_2}
"""By the version that they lead on from."""
