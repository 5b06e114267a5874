"""The tables of the store, and the sums by which a row that was damaged is known. Its version is `VERSION`.

chapters      headers: what the core was put together from, what the service was started with, and the first entry
entries       the journal: one row an instant, facts and wishes as in a journal file; `notes`: who, and what else is said
jobs          requests as they were submitted; `record`: where the job stands, as of the last entry
mentions      which entries name which job, or are about a tenant itself
submissions   keys of submissions that were taken, so that one sent twice is taken once
tenants       weights, and what they have received
floors        after a repair: numbers of entries and jobs that were given out before, whatever is left of them
damaged       rows that were set aside, as far as they could be read
"""

import sqlite3
from pathlib import Path
from zlib import crc32

FILE = "journal.db"
VERSION = 2
"""Goes up whenever a table, a record or a request gets other fields, or the journal another version. `migrations.py` then
gets a step, and `tests/data/states` a state of the version before."""

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
CREATE TABLE floors (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE damaged (number INTEGER PRIMARY KEY, kind TEXT NOT NULL, name TEXT NOT NULL, found TEXT NOT NULL);
"""
INDEXES = """
CREATE INDEX jobs_by_end ON jobs (ended);
CREATE INDEX jobs_by_tenant ON jobs (tenant);
CREATE INDEX jobs_by_state ON jobs (state, ended) WHERE ended IS NOT NULL;
"""


_MAGIC = b"SQLite format 3\0"
_WRITE_FORMAT, _LATEST_FORMAT = 18, 2
"""Where the header of an SQLite file says how it is written; 1: with a journal, 2: with a write-ahead log."""
UNREADABLE = (sqlite3.Error, UnicodeDecodeError)
"""What is raised for a damaged file: the words of SQLite quote what they are about, which may be no text any more."""


def said_of(error: Exception) -> str:
    """What SQLite says, in letters that can be shown."""
    return error.object.decode("utf-8", "replace") if isinstance(error, UnicodeDecodeError) else str(error)


def check_writable(file: Path) -> None:
    """Raise sqlite3.DatabaseError for a file whose header is damaged so that SQLite would only read it."""
    with file.open("rb") as stream:
        header = stream.read(_WRITE_FORMAT + 1)
    if header.startswith(_MAGIC) and header[_WRITE_FORMAT:] > bytes([_LATEST_FORMAT]):
        raise sqlite3.DatabaseError(f"its header is damaged: write format {header[_WRITE_FORMAT]}")


def sum_of(*values: object) -> int:
    """A sum over the values of a row: one that was damaged has another one, but for one in four thousand million."""
    return crc32("\x1f".join(map(str, values)).encode("utf-8", "replace"))


def read_tolerantly(db: sqlite3.Connection) -> None:
    """Text that is none any more is read all the same, with other letters: its sum is wrong then, and no statement fails."""
    db.text_factory = _text


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")
