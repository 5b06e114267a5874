"""The store: the journal in SQLite, and what can be read off it, kept up to date in the same transactions.

Everything that a decision changes is committed at once, before any of it is carried out (docs/design/0009-live.md).
`schema.py` has the tables.
"""

import json
import os
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain, islice
from os import fdopen
from pathlib import Path
from typing import Any, NamedTuple

from poise.scheduler.model.errors import InvariantError, JournalError, PoiseError
from poise.service.server.engine_api import RefusalCode, RequestRefusedError
from poise.service.server.quotas import SLOT, Sent
from poise.service.server.storage.mark import JournalMark, Reached
from poise.service.server.storage.migrations import migrate, version_of
from poise.service.server.storage.schema import (
    FILE,
    UNREADABLE,
    VERSION,
    check_writable,
    read_tolerantly,
    said_of,
    sum_of,
)
from poise.service.server.storage.state_dir import open_private
from poise.service.wire.request import JobRequest, Submission
from poise.service.wire.views import Account

# Room on the disk that is kept for what frees room: given up piece by piece when nothing else is left, and made again.
#
# A file of its own beside the journal, with nothing in it. Whoever fills the disk meanwhile can take no more than the piece
# that was given up just now.

RESERVE = f"{FILE}-reserve"
LARGEST = 16 << 20
"""Bytes."""
PART = 16
"""Of a small file system it is no more than one in so many bytes."""
PIECES = 4


class Reserve:
    """The file. `size`: how large it is meant to be."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / RESERVE
        found = os.statvfs(directory)
        self.size = min(LARGEST, found.f_blocks * found.f_frsize // PART)

    def make(self) -> bool:
        """Have all of it, and leave as much again to others; False if there is no room for that."""
        try:
            with closing(fdopen(open_private(self._path, os.O_CREAT | os.O_RDWR), "rb+", buffering=0)) as file:
                missing = self.size - os.fstat(file.fileno()).st_size
                if missing <= 0:
                    return True
                if self._free() < missing + self.size:
                    return False
                try:
                    os.posix_fallocate(file.fileno(), 0, self.size)
                except OSError:
                    os.ftruncate(file.fileno(), self.size - missing)  # some of it may have been had
                    return False
        except OSError:
            return False
        return True

    def give(self) -> bool:
        """Give up a piece; False if there is none left."""
        with suppress(OSError):
            left = self._path.stat().st_size
            if left > 0:
                os.truncate(self._path, max(0, left - -(-self.size // PIECES)))
                return True
        return False

    def _free(self) -> int:
        found = os.statvfs(self._path.parent)
        return (found.f_bavail if os.geteuid() else found.f_bfree) * found.f_frsize


_NO_STORAGE = {
    sqlite3.SQLITE_BUSY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_PERM, sqlite3.SQLITE_READONLY,
}  # fmt: skip
"""Errors that pass once there is room again. With any other, to try again would be in vain."""
LAST_ENTRY, LAST_JOB = "entry", "job"
"""Names of numbers that were given out before a repair."""
FROM_RECORDS = "from records"
"""Name of the mark that a repair leaves: a new chapter has to begin with what the records say."""
NO_CHAPTERS = "no chapter is left, and so nothing that leads to where jobs stand"
ASIDE = "aside"
"""In the note on an instant as a whole: jobs that were set aside, and why."""
BUSY_SECONDS = 10.0
ROWS_AT_ONCE = 128
"""Rows that one statement writes."""
STATEMENTS = 512
"""That are kept ready: one for each number of rows."""
LARGEST_LOG = 64 << 20
"""Bytes that the write-ahead log keeps once it has been carried over."""

_STANDS = """UPDATE jobs SET ended = given.column2, state = given.column3, record = given.column4, record_sum = given.column5
FROM (VALUES {}) AS given WHERE jobs.id = given.column1"""
_REWEIGHED = """UPDATE jobs SET job = given.column2, job_sum = given.column3
FROM (VALUES {}) AS given WHERE jobs.id = given.column1"""
_NEW = """INSERT INTO jobs (id, tenant, app, ended, state, job, request, record, job_sum, request_sum, record_sum)
VALUES {}"""
_AS_TEXT = ", ".join(f"CAST({name} AS TEXT)" for name in ("tenant", "app", "ended", "job", "request", "record"))
"""What is damaged may have become bytes, which JSON cannot hold."""
_REMEMBERED = f"INSERT INTO damaged (kind, name, found) SELECT 'job', id, json_array({_AS_TEXT}) FROM jobs WHERE id = ?"
_SET_ASIDE = "UPDATE jobs SET tenant = ?, app = ?, request = ?, request_sum = ? WHERE id = ?"
_TENANTS = "SELECT name, weight, gpu_seconds, preemptions, sum FROM tenants"
_ENTRIES = "SELECT number, document, notes, sum FROM entries"
JOB_ROWS = "SELECT id, tenant, app, ended, state, job, request, record, job_sum, request_sum, record_sum FROM jobs"
# What is damaged is no JSON, and to ask SQLite for a part of it would fail for all rows.
_NAME = "CASE WHEN json_valid(record) THEN json_extract(record, '$.name') END"
_BY = "CASE WHEN json_valid(record) THEN json_extract(record, '$.by') END"
_SUBMITTED = "CASE WHEN json_valid(job) THEN json_extract(job, '$.submitted') END"
_SENT = f"""SELECT tenant, {_BY} AS by, CAST({_SUBMITTED} / ? AS INTEGER), count(*), sum(length(CAST(request AS BLOB)))
FROM jobs WHERE ended >= ? AND {_SUBMITTED} >= ? AND by IS NOT NULL GROUP BY 1, 2, 3"""
LARGEST_CHECKED = 512 << 20
"""Bytes of a journal that is looked through as a whole before it is used: about a second for each 400 MB."""


class DamageError(JournalError):
    """A part of the journal is not as it was written."""


class StorageError(PoiseError):
    """Something could not be kept: the disk is full, or refuses. Nothing of it was."""


class JobRowText(NamedTuple):
    """A job as it is kept; `job`, `request` and `record` are JSON. `ended`: moment, or None.

    damage   which of these are not as they were written; None: all are
    """

    id: str
    tenant: str
    app: str | None
    ended: float | None
    state: str
    job: str
    request: str
    record: str
    damage: str | None = None

    @staticmethod
    def of(*row: Any) -> "JobRowText":  # noqa: ANN401 - as it is in the table
        """A row of the table of jobs."""
        *kept, job_sum, request_sum, record_sum = row
        found = JobRowText(*kept)
        sums = {"job": job_sum, "request": request_sum, "record": record_sum}
        damaged = [name for (name, sum_), mine in zip(sums.items(), found.sums(), strict=True) if sum_ != mine]
        return found._replace(damage=" and ".join(damaged)) if damaged else found

    def sums(self) -> tuple[int, int, int]:
        """Of the job, of what was submitted, and of where it stands."""
        name = self.id
        mine = sum_of(name, self.tenant, self.app, self.request)
        return sum_of(name, self.job), mine, sum_of(name, self.ended, self.state, self.record)


@dataclass
class Changes:
    """What one instant changes, committed as a whole. No entry: nothing of it concerns the core."""

    now: float
    entry: str | None = None
    notes: str | None = None
    chapter: tuple[str, str] | None = None
    """If a chapter begins here: its header, and the one that the service was started with."""
    jobs: list[JobRowText] = field(default_factory=list)
    records: dict[str, tuple[float | None, str, str]] = field(default_factory=dict)
    """By job: moment of its end or None, its state, its record."""
    aside: list[JobRowText] = field(default_factory=list)
    """Jobs of which something was damaged, as they are to be kept from now on; `records` has where they stand."""
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
        self._mark = JournalMark(directory)
        self.reserve = Reserve(directory)
        with self.legible():
            self._require_private()
            self.is_checked = self._check()
            with closing(self._connect()) as db:
                self.migrated_from = migrate(db, self.path)
            self.lacks_mark = self.migrated_from == VERSION and self._mark.read() is None
            self._db = self._connect()
            self.look()
        self._mark.write(Reached(self.last, self.highest))
        self.submissions = Submissions(self._db)

    @contextmanager
    def legible(self) -> Iterator[None]:
        """Whatever is wrong with the file is said in one line, as a JournalError."""
        try:
            yield
        except UNREADABLE as error:
            raise JournalError(f"{self.path}: cannot be used: {said_of(error)}; {remedy(self.path.parent)}") from error

    def _check(self) -> bool:
        """Refuse a journal that is damaged, or ends before what was answered: those numbers would be given out again.

        It is only read here, so that one which is refused stays as it was found. Returns whether its pages were looked
        through too: those of a very large one are not.
        """
        check_writable(self.path)
        with closing(sqlite3.connect(f"{self.path.absolute().as_uri()}?mode=ro", uri=True)) as db:
            read_tolerantly(db)
            version_of(db, self.path)
            is_small = self.path.stat().st_size <= LARGEST_CHECKED
            problem = str(db.execute("PRAGMA integrity_check(1)").fetchone()[0]) if is_small else "ok"
            if problem != "ok":
                text = " ".join(problem.split())
                raise JournalError(f"{self.path}: damaged: {text:.200}; {remedy(self.path.parent)}")
            check_mark(db, self._mark.read(), self.path)
            if version_of(db, self.path) and has_lost_chapters(db):
                raise JournalError(f"{self.path}: damaged: {NO_CHAPTERS}; {remedy(self.path.parent)}")
        return is_small

    def look(self) -> None:
        """What is in the store is what counts, whatever was thought to be."""
        self.last, self.highest = reached_by(self._db, self.path)
        self._first = int(self._db.execute("SELECT coalesce(max(first), 0) FROM chapters").fetchone()[0])

    @property
    def chapter_length(self) -> int:
        """Entries of the last chapter."""
        return self.last + 1 - self._first

    def _require_private(self) -> None:
        """The file is its owner's alone from its first moment on; SQLite gives its other files the same rights.

        PoiseError for files that are there and others may read, and for links, as of accounts.
        """
        os.close(open_private(self.path, os.O_CREAT | os.O_RDWR))
        for other in ("-wal", "-shm"):
            with suppress(FileNotFoundError):
                os.close(open_private(self.path.with_name(FILE + other), os.O_RDONLY))

    def _connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(
            self.path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False, cached_statements=STATEMENTS
        )
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        db.execute(f"PRAGMA journal_size_limit = {LARGEST_LOG}")
        read_tolerantly(db)
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
        new = next((each.jobs[-1].id for each in reversed(changes) if each.jobs), None)
        if new is not None:
            self.highest = int(new)
        self._mark.write(Reached(last, self.highest))

    def _roll_back(self) -> None:
        if self._db.in_transaction:
            with suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")

    def _write(self, number: int, changes: Changes) -> None:
        db = self._db
        if changes.chapter is not None:
            row = number, *changes.chapter
            db.execute("INSERT INTO chapters (first, header, asked, sum) VALUES (?, ?, ?, ?)", (*row, sum_of(*row)))
            db.execute("DELETE FROM floors WHERE name = ?", (FROM_RECORDS,))
        if changes.entry is not None:
            said = changes.entry, changes.notes
            db.execute("INSERT INTO entries VALUES (?, ?, ?, ?, ?)", (number, changes.now, *said, sum_of(number, *said)))
        for each in changes.aside:
            db.execute(_REMEMBERED, (each.id,))
            db.execute(_SET_ASIDE, (each.tenant, each.app, each.request, each.sums()[1], each.id))
        _each(db, _NEW, ((*row[:-1], *row.sums()) for row in changes.jobs))
        _each(db, _STANDS, ((job, *state, sum_of(job, *state)) for job, state in changes.records.items()))
        _each(db, _REWEIGHED, ((job, text, sum_of(job, text)) for job, text in changes.reweighed.items()))
        _each(db, "INSERT OR IGNORE INTO mentions VALUES {}", ((job, number) for job in sorted(changes.mentions)))
        _each(db, "INSERT INTO submissions VALUES {}", changes.keys)
        books = ((name, *each, sum_of(name, *each)) for name, each in changes.tenants.items())
        _each(db, "INSERT OR REPLACE INTO tenants VALUES {}", books)

    def fold(self) -> None:
        """Carry the log over into the file, so that what is written next needs no more room there."""
        with suppress(sqlite3.Error):
            self._db.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def has_room(self) -> bool:
        """Something can be written now. It is tried: what is rolled back would never have reached the disk."""
        try:
            self._db.execute("CREATE TABLE IF NOT EXISTS room (filler BLOB)")
            self._db.execute("INSERT INTO room VALUES (zeroblob(65536))")
            self._db.execute("DROP TABLE room")
            self.look()
        except sqlite3.Error:
            self._roll_back()
            return False
        return True

    @property
    def is_to_be_restored(self) -> bool:
        """The journal was repaired: its last chapter does not lead to where jobs stand, and a new one has to begin."""
        return bool(_floor(self._db, FROM_RECORDS))

    def chapter(self) -> tuple[str, str, int] | None:
        """Header, header asked for, and number of the first entry of the last chapter; None if nothing was ever written."""
        row = self._db.execute("SELECT header, asked, first, sum FROM chapters ORDER BY number DESC LIMIT 1").fetchone()
        if row is not None and row[3] != sum_of(row[2], row[0], row[1]):
            raise JournalError(f"{self.path}: damaged: the header of its last chapter; {remedy(self.path.parent)}")
        return None if row is None else (row[0], row[1], row[2])

    def chapters(self) -> list[tuple[str, int]]:
        """All chapters: header, number of the first entry."""
        return [(header, first) for header, first in self._db.execute("SELECT header, first FROM chapters ORDER BY number")]

    def entries(self, first: int, end: int | None = None) -> Iterator[str]:
        """Documents of the entries from a number on, before `end`; DamageError at one that is not as it was written."""
        for written in written_entries(self._db, first, end or 1 << 62):
            if written.is_damaged:
                raise DamageError(f"{self.path}: damaged: entry {written.number:,} is not as it was written")
            yield written.document

    def last_moment(self) -> float:
        """The latest moment that the journal knows; 0 if it is empty."""
        with self.legible():
            row = self._db.execute("SELECT now FROM entries WHERE number = ?", (self.last,)).fetchone()
        return 0.0 if row is None else float(row[0])

    def unended(self) -> Iterator[JobRowText]:
        """Jobs that have not ended, in order of submission."""
        return unended_rows(self._db)

    def tenants(self) -> dict[str, tuple[float, float, int]]:
        """Weight, GPU-seconds received and preemptions suffered, by tenant."""
        return tenant_books(self._db, self.path)

    def ended(self) -> dict[str, int]:
        """How many jobs have ended, by their final state."""
        return dict(self._db.execute("SELECT state, count(*) FROM jobs WHERE ended IS NOT NULL GROUP BY 1"))

    def sent_since(self, moment: float) -> Iterator[Sent]:
        """What was submitted from a moment on, of jobs that have ended, by whom and minute by minute."""
        rows = self._db.execute(_SENT, (SLOT, moment, moment))
        return (Sent(*row) for row in rows)

    def final_state(self, job: str) -> str:
        """What became of a job that has ended."""
        return str(self._db.execute("SELECT state FROM jobs WHERE id = ?", (job,)).fetchone()[0])

    def reader(self) -> "Reader":
        """For another thread."""
        return Reader(self._connect())

    def close(self) -> None:
        """Nothing more will be written."""
        self._db.close()
        self._mark.close()


def reached_by(db: sqlite3.Connection, path: Path) -> Reached:
    """Numbers of the last entry and of the highest job that were ever given out, as far as a journal knows."""
    last = int(db.execute("SELECT coalesce(max(number), 0) FROM entries").fetchone()[0])
    row = db.execute("SELECT id FROM jobs ORDER BY number DESC LIMIT 1").fetchone()
    if row is not None and not str(row[0]).isdecimal():
        raise JournalError(f"{path}: damaged: a job is called {row[0]!r:.100}; {remedy(path.parent)}")
    return Reached(max(last, _floor(db, LAST_ENTRY)), max(0 if row is None else int(row[0]), _floor(db, LAST_JOB)))


def _floor(db: sqlite3.Connection, name: str) -> int:
    if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'floors'").fetchone():
        return 0  # a store of version 1 has no such table
    row = db.execute("SELECT value FROM floors WHERE name = ?", (name,)).fetchone()
    return 0 if row is None else int(row[0])


def check_mark(db: sqlite3.Connection, reached: Reached | None, path: Path) -> Reached:
    """How far a journal has come; JournalError if it was answered that it had come further."""
    found = reached_by(db, path) if version_of(db, path) else Reached(0, 0)
    refuse_shorter(found, reached, path)
    return found


def refuse_shorter(found: Reached, reached: Reached | None, path: Path) -> None:
    """JournalError for a journal that ends before what was answered."""
    if reached is not None and not reached.is_in(found):
        raise JournalError(f"{path}: {reached.missing(found)}; {remedy(path.parent)}")


def has_lost_chapters(db: sqlite3.Connection) -> bool:
    """There are entries, and it is not known how any of them began: without a repair all jobs would be forgotten."""
    is_there = db.execute("SELECT EXISTS (SELECT 1 FROM entries) AND NOT EXISTS (SELECT 1 FROM chapters)").fetchone()[0]
    return bool(is_there) and not _floor(db, FROM_RECORDS)


def unended_rows(db: sqlite3.Connection) -> Iterator[JobRowText]:
    """Jobs that have not ended, in order of submission."""
    return (JobRowText.of(*row) for row in db.execute(f"{JOB_ROWS} WHERE ended IS NULL ORDER BY number"))


def written_entries(db: sqlite3.Connection, first: int, end: int) -> Iterator["Written"]:
    """Entries from a number on, before `end`."""
    rows = db.execute(f"{_ENTRIES} WHERE number >= ? AND number < ? ORDER BY number", (first, end))
    return (Written.of(*row) for row in rows)


def tenant_books(db: sqlite3.Connection, path: Path) -> dict[str, tuple[float, float, int]]:
    """Weight, GPU-seconds received and preemptions suffered, by tenant; JournalError for what is not as it was written."""
    found = {}
    for name, weight, seconds, preempted, sum_ in db.execute(_TENANTS):
        if sum_of(name, weight, seconds, preempted) != sum_:
            raise JournalError(f"{path}: damaged: the books of tenant {name!r:.60}; {remedy(path.parent)}")
        found[name] = weight, seconds, preempted
    return found


class Reader:
    """What HTTP handlers ask of the store; one a thread."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self.submissions = Submissions(db)

    def job(self, job: str) -> JobRowText | None:
        """A job, ended or not."""
        row = self._db.execute(f"{JOB_ROWS} WHERE id = ?", (job,)).fetchone()
        return None if row is None else JobRowText.of(*row)

    def ended(self, wanted: "Ended", *, limit: int, offset: int) -> list[JobRowText]:
        """Jobs that have ended, the latest first."""
        where, values = wanted.condition()
        rows = self._db.execute(
            f"{JOB_ROWS} WHERE {where} ORDER BY ended DESC, number DESC LIMIT ? OFFSET ?", (*values, limit, offset)
        )
        return [JobRowText.of(*row) for row in rows]

    def ended_counts(self, wanted: "Ended") -> Counter[str]:
        """How many have, by their final state."""
        where, values = wanted.condition()
        return Counter(dict(self._db.execute(f"SELECT state, count(*) FROM jobs WHERE {where} GROUP BY 1", values)))

    def entries(self, named: "Named", *, after: int, limit: int) -> list["Written"]:
        """Entries after a number, in order."""
        where, values = named.condition("> ?", after)
        rows = self._db.execute(f"{_ENTRIES} WHERE {where} ORDER BY number LIMIT ?", (*values, limit))
        return [Written.of(*row) for row in rows]

    def entries_back(self, named: "Named", *, until: int, limit: int) -> list["Written"]:
        """Entries up to a number, the last one first."""
        where, values = named.condition("<= ?", until)
        rows = self._db.execute(f"{_ENTRIES} WHERE {where} ORDER BY number DESC LIMIT ?", (*values, limit))
        return [Written.of(*row) for row in rows]

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
    is_damaged: bool = False

    @staticmethod
    def of(number: int, document: str, notes: str | None, sum_: int) -> "Written":
        """A row of the table of entries."""
        return Written(number, document, notes, sum_of(number, document, notes) != sum_)


def remedy(state: Path) -> str:
    """What to do about a journal that is damaged."""
    return f"run poise repair {state}"


def told_of(note: Mapping[str, object]) -> set[str]:
    """What is mentioned by a note on an instant as a whole."""
    aside = note.get(ASIDE)
    jobs = set(aside) if isinstance(aside, Mapping) else set()
    return jobs | ({_mention(str(note["tenant"]))} if "tenant" in note else set())


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
        conditions = ("ended IS NOT NULL", f"state IN ({among})", *(f"{name} = ?" for name in chosen))
        return " AND ".join(conditions), (*self.states, *chosen.values())


def _each(db: sqlite3.Connection, statement: str, rows: Iterable[tuple[object, ...]]) -> None:
    """Do it for all rows, many at once: other threads run during each statement, and this one then waits for its turn."""
    left = iter(rows)
    while chunk := tuple(islice(left, ROWS_AT_ONCE)):
        row = f"({', '.join('?' * len(chunk[0]))})"
        db.execute(statement.format(", ".join([row] * len(chunk))), tuple(chain.from_iterable(chunk)))


# Submissions that were taken, by their keys: what is sent twice under one key is taken once.

REQUESTS_AT_ONCE = 128
"""Jobs that one statement asks for."""


class Submissions:
    """What was submitted, over one connection to the store."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def taken(self, by: Account, submission: Submission) -> tuple[str, ...] | None:
        """Ids of its jobs, if it was taken before; RefusedError if its key was that of another submission."""
        if submission.key is None:
            return None
        query = "SELECT jobs FROM submissions WHERE key = ? AND account = ?"
        row = self._db.execute(query, (submission.key, holder(by))).fetchone()
        if row is None:
            return None
        jobs = tuple(json.loads(row[0]))
        kept = self.requests(jobs)
        check_same(submission, tuple(JobRequest.model_validate_json(kept[job]) for job in jobs))
        return jobs

    def requests(self, jobs: Sequence[str]) -> dict[str, str]:
        """What was submitted, as JSON, by job."""
        found: dict[str, str] = {}
        for first in range(0, len(jobs), REQUESTS_AT_ONCE):
            some = jobs[first : first + REQUESTS_AT_ONCE]
            query = f"SELECT id, request FROM jobs WHERE id IN ({', '.join('?' * len(some))})"
            found.update(self._db.execute(query, some).fetchall())
        return found


def holder(by: Account) -> str:
    """Whose a key is: a token's name may be given to another tenant later, who is not to find the jobs of this one."""
    return f"{by.name}@{by.tenant}"


def check_same(submission: Submission, before: tuple[JobRequest, ...]) -> None:
    """Raise RefusedError if other jobs were taken under the key of a submission."""
    if submission.jobs != before:
        text = f"key {submission.key!r}: other jobs were submitted under it; a new submission needs a new key"
        raise RequestRefusedError(RefusalCode.CONFLICT, text)
