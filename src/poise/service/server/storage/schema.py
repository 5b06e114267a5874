"""What is stored in `journal.db`: its tables, the checksums of their rows, its version, and steps from earlier versions.

chapters      headers: the configuration of the core, the one that the service was started with, and the first entry
entries       the journal: one row per batch, events and actions as in a journal file; `notes`: who, and other remarks
jobs          requests as they were submitted; `record`: the state of the job as of the last entry
mentions      which entries name which job, or are about a tenant itself
submissions   keys of submissions that were accepted, so that one sent twice is accepted once
tenants       weights, and what tenants have received
nodes         what is known of nodes that were reported or drained
floors        after a repair: numbers of entries and jobs that were given out before, whatever is left of them
damaged       rows that were set aside, as far as they could be read

A step from one version to the next is never changed again. All steps that are due run in one transaction: a store has its
earlier version or the current one, nothing in between.
"""

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from zlib import crc32

from poise.engine.journal import migrate_entry, migrate_job
from poise.scheduler.model.errors import JournalError

FILE = "journal.db"
VERSION = 3
"""Increase it whenever a table, a record or a request gets other fields, or the journal another version. Then add a step
below, and a state of the version before to `tests/data/states`."""
LATEST_PLAUSIBLE = 99  # versions that a later Poise may have. A larger number is damage.

TABLES = """
CREATE TABLE chapters (
    number INTEGER PRIMARY KEY, first INTEGER NOT NULL, header TEXT NOT NULL, asked TEXT NOT NULL, sum INTEGER NOT NULL
);
CREATE TABLE entries (
    number INTEGER PRIMARY KEY, now REAL NOT NULL, document TEXT NOT NULL, notes TEXT, sum INTEGER NOT NULL
);
CREATE TABLE jobs (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, app TEXT, ended REAL, state TEXT NOT NULL,
    job TEXT NOT NULL, request TEXT NOT NULL, record TEXT NOT NULL,
    job_sum INTEGER NOT NULL, request_sum INTEGER NOT NULL, record_sum INTEGER NOT NULL
);
CREATE TABLE mentions (job TEXT NOT NULL, entry INTEGER NOT NULL, PRIMARY KEY (job, entry)) WITHOUT ROWID;
CREATE TABLE submissions (
    key TEXT NOT NULL, account TEXT NOT NULL, jobs TEXT NOT NULL, PRIMARY KEY (key, account)
) WITHOUT ROWID;
CREATE TABLE tenants (
    name TEXT PRIMARY KEY, weight REAL NOT NULL, gpu_seconds REAL NOT NULL, preemptions INTEGER NOT NULL,
    sum INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE nodes (name TEXT PRIMARY KEY, record TEXT NOT NULL, sum INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE floors (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE damaged (number INTEGER PRIMARY KEY, kind TEXT NOT NULL, name TEXT NOT NULL, found TEXT NOT NULL);
"""
INDEXES = """
CREATE INDEX jobs_by_end ON jobs (ended);
CREATE INDEX jobs_by_tenant ON jobs (tenant);
CREATE INDEX jobs_by_state ON jobs (state, ended) WHERE ended IS NOT NULL;
"""

# --- damage ---

UNREADABLE = (sqlite3.Error, UnicodeDecodeError)
"""Raised for a damaged file; UnicodeDecodeError because SQLite's messages quote the file, which may be no text any more."""
_MAGIC = b"SQLite format 3\0"
_WRITE_FORMAT, _LATEST_FORMAT = 18, 2
"""Offset of the byte in an SQLite file that says how it is written (1: rollback journal, 2: write-ahead log)."""


def checksum(*values: object) -> int:
    """CRC-32 over the values of a row. Damage that keeps the sum is one in four thousand million."""
    return crc32("\x1f".join(map(str, values)).encode("utf-8", "replace"))


def decode_leniently(db: sqlite3.Connection) -> None:
    """Read text that is not UTF-8 any more with replacement characters: its checksum is wrong, but no statement fails."""
    db.text_factory = lambda data: data.decode("utf-8", "replace")


def error_text(error: Exception) -> str:
    """The message of an UNREADABLE error, in characters that can be shown."""
    return error.object.decode("utf-8", "replace") if isinstance(error, UnicodeDecodeError) else str(error)


def check_writable(file: Path) -> None:
    """Raise sqlite3.DatabaseError for a file whose header is damaged so that SQLite would open it for reading only."""
    with file.open("rb") as stream:
        header = stream.read(_WRITE_FORMAT + 1)
    if header.startswith(_MAGIC) and header[_WRITE_FORMAT:] > bytes([_LATEST_FORMAT]):
        raise sqlite3.DatabaseError(f"its header is damaged: write format {header[_WRITE_FORMAT]}")


# --- versions ---


def version_of(db: sqlite3.Connection, path: Path) -> int:
    """The version of a store; 0 if it is empty. Raises JournalError for one that a later Poise wrote.

    Raises sqlite3.DatabaseError, as for any other damage, for a version that none can have or that the tables contradict.
    """
    version = int(db.execute("PRAGMA user_version").fetchone()[0])
    if VERSION < version <= LATEST_PLAUSIBLE:
        problem = f"written in version {version}; this Poise reads versions up to {VERSION}"
        raise JournalError(f"{path}: {problem}; use the Poise that wrote it, or a later one")
    by_tables = version_by_tables(db)
    if version != by_tables and (by_tables or not 0 <= version <= VERSION):
        raise sqlite3.DatabaseError(f"its version is damaged: {version}, and its tables are of version {by_tables}")
    return version


def version_by_tables(db: sqlite3.Connection) -> int:
    """The version that the tables of a store have, whatever its own number says; 0 if it has no tables."""
    found = db.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table' AND name != 'room'").fetchall()
    if any(name == "nodes" for name, _ in found):
        return 3
    if any(name in ("floors", "damaged") or "sum INTEGER" in sql for name, sql in found):
        return 2
    return 1 if found else 0


def migrate(db: sqlite3.Connection, path: Path) -> int:
    """Bring a store to the current version, all or nothing; returns the version that it had, 0 if it was empty."""
    version = version_of(db, path)
    if version == VERSION:
        return version
    db.execute("BEGIN IMMEDIATE")
    try:
        if version == 0:
            _execute(db, TABLES + INDEXES)
        else:
            for each in range(version, VERSION):
                STEPS[each](db)
        db.execute(f"PRAGMA user_version = {VERSION}")
        db.execute("COMMIT")
    except BaseException:
        db.execute("ROLLBACK")
        raise
    return version


def migrated_copy(source: sqlite3.Connection, path: Path) -> sqlite3.Connection:
    """A store in the current version, for reading: itself, or a migrated copy that is gone when it is closed."""
    decode_leniently(source)
    if version_of(source, path) in (0, VERSION):
        return source
    with closing(source):
        copy = sqlite3.connect("", isolation_level=None)  # in memory, or in a temporary file if it is large
        source.backup(copy)
    decode_leniently(copy)
    migrate(copy, path)
    return copy


def _execute(db: sqlite3.Connection, statements: str) -> None:
    """Like `executescript`, which would commit first."""
    for each in statements.split(";"):
        db.execute(each)


# --- from version 1 to 2: checksums; a column for the state; runs count their GPUs by type; jobs have their busy time ---

_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_NO_SUM = -1  # checksum of a row that was damaged before it had one: no row has it, so the row stays recognisable as damaged
_HOLDERS_2 = """UPDATE submissions SET account = account || '@' || coalesce(
    (SELECT tenant FROM jobs WHERE id = json_extract(submissions.jobs, '$[0]')), account)
WHERE account NOT LIKE '%@%' AND json_valid(jobs)"""
"""A key belonged to the name of a token; now it belongs to its tenant too."""


def _to_2(db: sqlite3.Connection) -> None:
    old = ("chapters", "entries", "jobs", "mentions", "submissions", "tenants")
    for (index,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL").fetchall():
        db.execute(f"DROP INDEX {index}")
    for each in old:
        db.execute(f"ALTER TABLE {each} RENAME TO old_{each}")
    _execute(db, TABLES)
    for table, columns, convert, sums in (
        ("chapters", "number, first, header, asked", _chapter_2, 1),
        ("entries", "number, now, document, notes", _entry_2, 1),
        ("jobs", "number, id, tenant, app, ended, 'FAILED', job, request, record", _job_2, 3),
        ("tenants", "name, weight, gpu_seconds, preemptions", lambda *row: (*row, checksum(*row)), 1),
    ):
        found = db.execute(f"SELECT {columns} FROM old_{table}")
        while some := found.fetchmany(1_000):  # not all in memory
            for row in some:
                new = _converted(convert, row, sums)
                db.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(new))})", new)
    db.execute("INSERT INTO mentions SELECT job, entry FROM old_mentions")
    db.execute("INSERT INTO submissions SELECT key, account, jobs FROM old_submissions")
    db.execute(_HOLDERS_2)
    for each in old:
        db.execute(f"DROP TABLE old_{each}")
    _execute(db, INDEXES)


def _converted(convert: Callable[..., tuple[object, ...]], row: tuple[Any, ...], sums: int) -> tuple[object, ...]:
    """A row in its new form; one that cannot be understood as it was, with the checksums of a damaged one."""
    try:
        return convert(*row)
    except (AttributeError, KeyError, TypeError, ValueError):
        return (*row, *[_NO_SUM] * sums)


def _chapter_2(number: int, first: int, header: str, asked: str) -> tuple[object, ...]:
    texts = [_encode(json.loads(text) | {"journal": 2}) for text in (header, asked)]
    return number, first, *texts, checksum(first, *texts)


def _entry_2(number: int, now: float, text: str, notes: str | None) -> tuple[object, ...]:
    if '"carried"' in text or '"steadfast"' in text:  # few have what was different; the others are not parsed
        text = _encode(migrate_entry(1, json.loads(text)))
    return number, now, text, notes, checksum(number, text, notes)


def _job_2(*row: Any) -> tuple[object, ...]:  # noqa: ANN401
    number, name, tenant, app, ended, _, job, request, record = row
    job = _encode(migrate_job(1, json.loads(job)))
    found = json.loads(record)
    runs, busy = [], []
    for run in found["runs"]:
        new = {"attached": None, "by_type": {run.get("gpu_type"): run["count"]}} | run  # all its GPUs were of one type
        new.pop("gpu_type", None)
        runs.append(new)
        began, over = run["began"], run["released"]
        busy.append(0.0 if began is None or over is None else max(over - began, 0.0))
    found = {"unsaved": False, "busy": sum(busy)} | found | {"runs": runs}
    record, state = _encode(found), found["state"]
    sums = checksum(name, job), checksum(name, tenant, app, request), checksum(name, ended, state, record)
    return number, name, tenant, app, ended, state, job, request, record, *sums


# --- from version 2 to 3: what is known of nodes ---

_NODES_3 = """CREATE TABLE IF NOT EXISTS nodes (
    name TEXT PRIMARY KEY, record TEXT NOT NULL, sum INTEGER NOT NULL
) WITHOUT ROWID"""
"""The step before makes the tables of the current version, and so may have made this one."""


def _to_3(db: sqlite3.Connection) -> None:
    db.execute(_NODES_3)


STEPS: dict[int, Callable[[sqlite3.Connection], None]] = {1: _to_2, 2: _to_3}  # by the version that they start from
