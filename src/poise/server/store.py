"""The store: the journal in SQLite, and what can be read off it, kept up to date in the same transactions.

Everything that a decision changes is committed at once, before any of it is carried out (docs/design/0009-live.md). Tables:

    chapters      headers: what the core was put together from, what the service was started with, and the first entry
    entries       the journal: one row an instant, facts and wishes as in a journal file; `notes`: who, and what else is said
    jobs          requests as they were submitted; `record`: where the job stands, as of the last entry
    mentions      which entries name which job, or are about a tenant itself
    submissions   keys of submissions that were taken, so that one sent twice is taken once
    tenants       weights, and what they have received
"""

import os
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

from poise.model.errors import InvariantError, JournalError, PoiseError
from poise.server.folder import open_private
from poise.server.quotas import SLOT, Sent
from poise.server.submissions import Submissions

FILE = "journal.db"
VERSION = 1
_NO_STORAGE = {
    sqlite3.SQLITE_BUSY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_PERM, sqlite3.SQLITE_READONLY,
}  # fmt: skip
"""Errors that pass once there is room again. With any other, to try again would be in vain."""
BUSY_SECONDS = 10.0
ROWS_AT_ONCE = 128
"""Rows that one statement writes."""
STATEMENTS = 512
"""That are kept ready: one for each number of rows."""
LARGEST_LOG = 64 << 20
"""Bytes that the write-ahead log keeps once it has been carried over."""

_SCHEMA = """
CREATE TABLE chapters (number INTEGER PRIMARY KEY, first INTEGER NOT NULL, header TEXT NOT NULL, asked TEXT NOT NULL);
CREATE TABLE entries (number INTEGER PRIMARY KEY, now REAL NOT NULL, document TEXT NOT NULL, notes TEXT);
CREATE TABLE jobs (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, app TEXT, ended REAL,
    job TEXT NOT NULL, request TEXT NOT NULL, record TEXT NOT NULL
);
CREATE INDEX jobs_by_end ON jobs (ended);
CREATE INDEX jobs_by_tenant ON jobs (tenant);
CREATE INDEX jobs_by_state ON jobs (json_extract(record, '$.state'), ended) WHERE ended IS NOT NULL;
CREATE TABLE mentions (job TEXT NOT NULL, entry INTEGER NOT NULL, PRIMARY KEY (job, entry)) WITHOUT ROWID;
CREATE TABLE submissions (
    key TEXT NOT NULL, account TEXT NOT NULL, jobs TEXT NOT NULL, PRIMARY KEY (key, account)
) WITHOUT ROWID;
CREATE TABLE tenants (
    name TEXT PRIMARY KEY, weight REAL NOT NULL, gpu_seconds REAL NOT NULL, preemptions INTEGER NOT NULL
) WITHOUT ROWID;
"""


_STANDS = """UPDATE jobs SET ended = given.column2, record = given.column3
FROM (VALUES {}) AS given WHERE jobs.id = given.column1"""
_REWEIGHED = "UPDATE jobs SET job = given.column2 FROM (VALUES {}) AS given WHERE jobs.id = given.column1"
_TENANTS = "SELECT name, weight, gpu_seconds, preemptions FROM tenants"
_ENTRIES = "SELECT number, document, notes FROM entries"
_STATE = "json_extract(record, '$.state')"
_NAME = "json_extract(record, '$.name')"
_SENT = """SELECT tenant, json_extract(record, '$.by') AS by, CAST(json_extract(job, '$.submitted') / ? AS INTEGER),
count(*), sum(length(CAST(request AS BLOB))) FROM jobs
WHERE ended >= ? AND json_extract(job, '$.submitted') >= ? AND by IS NOT NULL GROUP BY 1, 2, 3"""
_JOBS = "SELECT id, tenant, app, ended, job, request, record FROM jobs"


class StorageError(PoiseError):
    """Something could not be kept: the disk is full, or refuses. Nothing of it was."""


class JobRowText(NamedTuple):
    """A job as it is kept; all but the first four are JSON. `ended`: moment, or None."""

    id: str
    tenant: str
    app: str | None
    ended: float | None
    job: str
    request: str
    record: str


@dataclass
class Changes:
    """What one instant changes, committed as a whole. No entry: nothing of it concerns the core."""

    now: float
    entry: str | None = None
    notes: str | None = None
    chapter: tuple[str, str] | None = None
    """If a chapter begins here: its header, and the one that the service was started with."""
    jobs: list[JobRowText] = field(default_factory=list)
    records: dict[str, tuple[float | None, str]] = field(default_factory=dict)
    """By job: moment of its end or None, its record."""
    reweighed: dict[str, str] = field(default_factory=dict)
    """Jobs that are not as they were submitted any more."""
    mentions: set[str] = field(default_factory=set)
    keys: list[tuple[str, str, str]] = field(default_factory=list)
    """(key, whose it is, ids of the jobs as JSON) of submissions."""
    tenants: dict[str, tuple[float, float, int]] = field(default_factory=dict)
    """Weight, GPU-seconds received, preemptions suffered."""


class Store:
    """The journal of one service. One thread writes; any thread may read, each with a connection of its own."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / FILE
        with self.legible():
            self._create()
            self._db = self._connect()
            self._look()
        self.submissions = Submissions(self._db)

    @contextmanager
    def legible(self) -> Iterator[None]:
        """Whatever is wrong with the file is said in one line, as a JournalError."""
        try:
            yield
        except sqlite3.Error as error:
            raise JournalError(f"{self.path}: cannot be used: {error}") from error

    def _look(self) -> None:
        """What is in the store is what counts, whatever was thought to be."""
        self.last = int(self._db.execute("SELECT coalesce(max(number), 0) FROM entries").fetchone()[0])
        self._first = int(self._db.execute("SELECT coalesce(max(first), 0) FROM chapters").fetchone()[0])

    @property
    def chapter_length(self) -> int:
        """Entries of the last chapter."""
        return self.last + 1 - self._first

    def _create(self) -> None:
        """The file is its owner's alone from its first moment on; SQLite gives its other files the same rights.

        PoiseError for files that are there and others may read, and for links, as of accounts.
        """
        os.close(open_private(self.path, os.O_CREAT | os.O_RDWR))
        for other in ("-wal", "-shm"):
            with suppress(FileNotFoundError):
                os.close(open_private(self.path.with_name(FILE + other), os.O_RDONLY))
        with closing(self._connect()) as db:
            version = db.execute("PRAGMA user_version").fetchone()[0]
            if version == 0:
                db.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version = {VERSION}; COMMIT;")
            elif version != VERSION:
                raise JournalError(f"{self.path}: written in version {version}; this Poise reads version {VERSION}")

    def _connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(
            self.path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False, cached_statements=STATEMENTS
        )
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        db.execute(f"PRAGMA journal_size_limit = {LARGEST_LOG}")
        return db

    def commit(self, changes: Sequence[Changes]) -> None:
        """Keep these instants, all or none of them; raises StorageError if that is not possible."""
        last = self.last
        try:
            self._db.execute("BEGIN IMMEDIATE")
            for each in changes:
                last += each.entry is not None
                self._write(last, each)
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            self._roll_back()
            if getattr(error, "sqlite_errorcode", 0) & 0xFF not in _NO_STORAGE:  # the low byte: what kind, not which
                raise InvariantError(f"{self.path}: {error}") from error
            raise StorageError(f"{self.path}: cannot be written: {error}") from error
        self.last = last
        self._first = last if any(each.chapter is not None for each in changes) else self._first

    def _roll_back(self) -> None:
        if self._db.in_transaction:
            with suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")

    def _write(self, number: int, changes: Changes) -> None:
        db = self._db
        if changes.chapter is not None:
            db.execute("INSERT INTO chapters (first, header, asked) VALUES (?, ?, ?)", (number, *changes.chapter))
        if changes.entry is not None:
            db.execute("INSERT INTO entries VALUES (?, ?, ?, ?)", (number, changes.now, changes.entry, changes.notes))
        _each(db, "INSERT INTO jobs (id, tenant, app, ended, job, request, record) VALUES {}", changes.jobs)
        _each(db, _STANDS, ((job, *state) for job, state in changes.records.items()))
        _each(db, _REWEIGHED, changes.reweighed.items())
        _each(db, "INSERT OR IGNORE INTO mentions VALUES {}", ((job, number) for job in sorted(changes.mentions)))
        _each(db, "INSERT INTO submissions VALUES {}", changes.keys)
        _each(db, "INSERT OR REPLACE INTO tenants VALUES {}", ((name, *books) for name, books in changes.tenants.items()))

    def has_room(self) -> bool:
        """Something can be written now. It is tried: what is rolled back would never have reached the disk."""
        try:
            self._db.execute("CREATE TABLE IF NOT EXISTS room (filler BLOB)")
            self._db.execute("INSERT INTO room VALUES (zeroblob(65536))")
            self._db.execute("DROP TABLE room")
            self._look()
        except sqlite3.Error:
            self._roll_back()
            return False
        return True

    def chapter(self) -> tuple[str, str, int] | None:
        """Header, header asked for, and number of the first entry of the last chapter; None if nothing was ever written."""
        row = self._db.execute("SELECT header, asked, first FROM chapters ORDER BY number DESC LIMIT 1").fetchone()
        return None if row is None else (row[0], row[1], row[2])

    def chapters(self) -> list[tuple[str, int]]:
        """All chapters: header, number of the first entry."""
        return [(header, first) for header, first in self._db.execute("SELECT header, first FROM chapters ORDER BY number")]

    def entries(self, first: int, end: int | None = None) -> Iterator[str]:
        """Documents of the entries from a number on, before `end`."""
        rows = self._db.execute(
            "SELECT document FROM entries WHERE number >= ? AND number < ? ORDER BY number", (first, end or 1 << 62)
        )
        return (document for (document,) in rows)

    def last_moment(self) -> float:
        """The latest moment that the journal knows; 0 if it is empty."""
        with self.legible():
            row = self._db.execute("SELECT now FROM entries WHERE number = ?", (self.last,)).fetchone()
        return 0.0 if row is None else float(row[0])

    def unended(self) -> Iterator[JobRowText]:
        """Jobs that have not ended, in order of submission."""
        return (JobRowText(*row) for row in self._db.execute(f"{_JOBS} WHERE ended IS NULL ORDER BY number"))

    def tenants(self) -> dict[str, tuple[float, float, int]]:
        """Weight, GPU-seconds received and preemptions suffered, by tenant."""
        return {name: (weight, seconds, preempted) for name, weight, seconds, preempted in self._db.execute(_TENANTS)}

    def ended(self) -> dict[str, int]:
        """How many jobs have ended, by their final state."""
        query = f"SELECT {_STATE}, count(*) FROM jobs WHERE ended IS NOT NULL GROUP BY 1"
        return dict(self._db.execute(query))

    def sent_since(self, moment: float) -> Iterator[Sent]:
        """What was submitted from a moment on, of jobs that have ended, by whom and minute by minute."""
        rows = self._db.execute(_SENT, (SLOT, moment, moment))
        return (Sent(*row) for row in rows)

    def final_state(self, job: str) -> str:
        """What became of a job that has ended."""
        return str(self._db.execute(f"SELECT {_STATE} FROM jobs WHERE id = ?", (job,)).fetchone()[0])

    def last_id(self) -> int:
        """The id of the last job that was submitted, which is a number; 0: none was."""
        with self.legible():
            row = self._db.execute("SELECT id FROM jobs ORDER BY number DESC LIMIT 1").fetchone()
        if row is not None and not str(row[0]).isdecimal():
            raise JournalError(f"{self.path}: damaged: a job is called {row[0]!r:.100}")
        return 0 if row is None else int(row[0])

    def reader(self) -> "Reader":
        """For another thread."""
        return Reader(self._connect())

    def close(self) -> None:
        """Nothing more will be written."""
        self._db.close()


class Reader:
    """What HTTP handlers ask of the store; one a thread."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self.submissions = Submissions(db)

    def job(self, job: str) -> JobRowText | None:
        """A job, ended or not."""
        row = self._db.execute(f"{_JOBS} WHERE id = ?", (job,)).fetchone()
        return None if row is None else JobRowText(*row)

    def ended(self, wanted: "Ended", *, limit: int, offset: int) -> list[JobRowText]:
        """Jobs that have ended, the latest first."""
        where, values = wanted.condition()
        rows = self._db.execute(
            f"{_JOBS} WHERE {where} ORDER BY ended DESC, number DESC LIMIT ? OFFSET ?", (*values, limit, offset)
        )
        return [JobRowText(*row) for row in rows]

    def ended_counts(self, wanted: "Ended") -> Counter[str]:
        """How many have, by their final state."""
        where, values = wanted.condition()
        return Counter(dict(self._db.execute(f"SELECT {_STATE}, count(*) FROM jobs WHERE {where} GROUP BY 1", values)))

    def entries(self, named: "Named", *, after: int, limit: int) -> list["Written"]:
        """Entries after a number, in order."""
        where, values = named.condition("> ?", after)
        rows = self._db.execute(f"{_ENTRIES} WHERE {where} ORDER BY number LIMIT ?", (*values, limit))
        return [Written(*row) for row in rows]

    def entries_back(self, named: "Named", *, until: int, limit: int) -> list["Written"]:
        """Entries up to a number, the last one first."""
        where, values = named.condition("<= ?", until)
        rows = self._db.execute(f"{_ENTRIES} WHERE {where} ORDER BY number DESC LIMIT ?", (*values, limit))
        return [Written(*row) for row in rows]

    def chapters(self) -> list[int]:
        """Numbers of the first entries of all chapters."""
        return [first for (first,) in self._db.execute("SELECT first FROM chapters ORDER BY number")]

    def header_at(self, first: int) -> str:
        """Header of the chapter that begins with an entry."""
        return str(self._db.execute("SELECT header FROM chapters WHERE first = ?", (first,)).fetchone()[0])

    def last(self) -> int:
        """Number of the last entry."""
        return int(self._db.execute("SELECT coalesce(max(number), 0) FROM entries").fetchone()[0])

    def tenants_of(self, jobs: Iterable[str]) -> dict[str, str]:
        """Whose jobs they are."""
        found = {}
        for job in jobs:
            row = self._db.execute("SELECT tenant FROM jobs WHERE id = ?", (job,)).fetchone()
            if row is not None:
                found[job] = str(row[0])
        return found


class Written(NamedTuple):
    """An entry of the journal; `notes`: who, and what else is said."""

    number: int
    document: str
    notes: str | None


def told_of(note: Mapping[str, object]) -> set[str]:
    """What is mentioned by a note on an instant as a whole."""
    return {_mention(str(note["tenant"]))} if "tenant" in note else set()


def _mention(tenant: str) -> str:
    """How entries are found that are about a tenant itself: ids of jobs are numbers, so this is none."""
    return f"tenant {tenant}"


class Named(NamedTuple):
    """Entries that name a job, or a tenant or a job of it; None: any."""

    job: str | None = None
    tenant: str | None = None

    def condition(self, beyond: str, number: int) -> tuple[str, tuple[str | int, ...]]:
        """Conditions, without any text that came from outside, and their values; `beyond`: how numbers are compared."""
        if self.job is not None:
            mentions = f"SELECT entry FROM mentions WHERE job = ? AND entry {beyond}"
            return f"number IN ({mentions})", (self.job, number)
        if self.tenant is not None:
            mine = "SELECT id FROM jobs WHERE tenant = ? UNION ALL SELECT ?"
            mentions = f"SELECT entry FROM mentions WHERE job IN ({mine}) AND entry {beyond}"
            return f"number IN ({mentions})", (self.tenant, _mention(self.tenant), number)
        return f"number {beyond}", (number,)


@dataclass(frozen=True, slots=True)
class Ended:
    """Which of the jobs that have ended: in one of these states; a tenant's, an app's; called so."""

    states: tuple[str, ...]
    tenant: str | None = None
    app: str | None = None
    name: str | None = None

    def condition(self) -> tuple[str, tuple[str, ...]]:
        """Conditions, without any text that came from outside, and their values."""
        given = {"tenant": self.tenant, "app": self.app, _NAME: self.name}
        chosen = {name: value for name, value in given.items() if value is not None}
        among = ", ".join("?" * len(self.states))
        conditions = ("ended IS NOT NULL", f"{_STATE} IN ({among})", *(f"{name} = ?" for name in chosen))
        return " AND ".join(conditions), (*self.states, *chosen.values())


def _each(db: sqlite3.Connection, statement: str, rows: Iterable[tuple[object, ...]]) -> None:
    """Do it for all rows, many at once: other threads run during each statement, and this one then waits for its turn."""
    left = iter(rows)
    while chunk := tuple(islice(left, ROWS_AT_ONCE)):
        row = f"({', '.join('?' * len(chunk[0]))})"
        db.execute(statement.format(", ".join([row] * len(chunk))), tuple(chain.from_iterable(chunk)))
