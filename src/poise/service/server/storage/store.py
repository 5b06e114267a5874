"""The store: the journal of the service in one SQLite file, `journal.db` in the state directory.

**What is in it.** The journal (chapters and entries) is the truth: replaying the last chapter gives the scheduler's
state. Requests as they were submitted are in the table of jobs alone. Records of jobs, totals of tenants and mentions
follow from the journal; they are kept so that neither a restart nor a query reads all of it. `schema.py` lists the tables.

**What is committed together.** `Changes` holds all that one batch changes: its entry and all rows that follow from it. A
commit takes several batches and keeps all or none. It returns once SQLite has synced its log (WAL, `synchronous = FULL`).
Only then are commands answered and actions carried out, so nothing that a client was told can be lost by a crash.

**The mark** (`sidecar.py`) is written after each commit and says how far the journal came. A journal that ends before its
mark has lost entries that were answered. It is refused, as its numbers would be given out twice, until `poise repair` has
acknowledged the loss and left *floors*: numbers below which none is given out again.

**A full disk.** A commit that fails because the disk cannot be written (full, read-only, an I/O error) raises StorageError
and changes nothing; any other error of SQLite is a bug. The engine then gives up pieces of the reserve (`sidecar.py`),
with which cancellations and ends of runs can
still be committed.

**A damaged row** is recognised by its checksum. A job is set aside (`damaged_jobs.py`) and all others go on. An entry
makes the engine begin a new chapter from the records. A header, the totals of a tenant, or a node need `poise repair`.

**Threads and locks.** One thread, the engine's, writes. Any thread may read through a `Reader`, which has a connection of
its own; in WAL mode readers and the writer do not wait for each other. That only one process writes is ensured by the
lock on the state directory (`state_dir.py`), not by SQLite.
"""

import json
import os
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from poise.scheduler.model.errors import InvariantError, JournalError, PoiseError
from poise.service.server.quotas import SLOT, Sent
from poise.service.server.service_api import JobFilter, RefusalCode, RequestRefusedError
from poise.service.server.storage import schema
from poise.service.server.storage.schema import FILE, UNREADABLE, checksum, decode_leniently, error_text
from poise.service.server.storage.sidecar import JournalEnd, JournalMark, Reserve
from poise.service.server.storage.state_dir import open_private
from poise.service.wire.request import JobRequest, Submission
from poise.service.wire.views import Account, JobState

LARGEST_CHECKED = 512 << 20
"""Bytes of a journal whose pages are all checked before it is used, which takes about a second per 400 MB."""
BUSY_SECONDS = 10.0
ROWS_PER_STATEMENT = 128
"""Other threads run during each statement and this one then waits for its turn, so few large statements are faster."""
CACHED_STATEMENTS = 512  # prepared statements that are kept: one per statement and number of rows
LARGEST_LOG = 64 << 20  # bytes that the write-ahead log keeps once it has been carried over into the file
LAST_ENTRY, LAST_JOB = "entry", "job"  # names of floors: numbers that were given out before a repair
FROM_RECORDS = "from records"
"""Name of the floor that a repair leaves until a new chapter has begun with what the records say."""
NO_CHAPTERS = "no chapter is left, and so nothing that leads to where jobs stand"
ASIDE = "aside"  # key in the note on a batch as a whole: jobs that were set aside, and why
_NO_STORAGE = {
    sqlite3.SQLITE_BUSY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_PERM, sqlite3.SQLITE_READONLY,
}  # fmt: skip
"""Errors of a disk that cannot be written now and may be later. After any other it is useless to try again."""

_NEW_JOBS = """INSERT INTO jobs (id, tenant, app, ended, state, job, request, record, job_sum, request_sum, record_sum)
VALUES {}"""
_UPDATE_RECORDS = """UPDATE jobs SET ended = given.column2, state = given.column3, record = given.column4,
record_sum = given.column5 FROM (VALUES {}) AS given WHERE jobs.id = given.column1"""
_UPDATE_JOBS = """UPDATE jobs SET job = given.column2, job_sum = given.column3
FROM (VALUES {}) AS given WHERE jobs.id = given.column1"""
# Damaged text may have become a blob, which JSON cannot hold: hence the casts.
_AS_TEXT = ", ".join(f"CAST({name} AS TEXT)" for name in ("tenant", "app", "ended", "job", "request", "record"))
_REMEMBER_DAMAGED = f"""INSERT INTO damaged (kind, name, found)
SELECT 'job', id, json_array({_AS_TEXT}) FROM jobs WHERE id = ?"""
_ENTRIES = "SELECT number, document, notes, sum FROM entries"
JOB_ROWS = "SELECT id, tenant, app, ended, state, job, request, record, job_sum, request_sum, record_sum FROM jobs"
# What is damaged is no JSON, and json_extract of one such row would fail the whole query.
_NAME = "CASE WHEN json_valid(record) THEN json_extract(record, '$.name') END"
_BY = "CASE WHEN json_valid(record) THEN json_extract(record, '$.by') END"
_SUBMITTED = "CASE WHEN json_valid(job) THEN json_extract(job, '$.submitted') END"
_SENT = f"""SELECT tenant, {_BY} AS by, CAST({_SUBMITTED} / ? AS INTEGER), count(*), sum(length(CAST(request AS BLOB)))
FROM jobs WHERE ended >= ? AND {_SUBMITTED} >= ? AND by IS NOT NULL GROUP BY 1, 2, 3"""


class DamageError(JournalError):
    """A part of the journal is not as it was written."""


class StorageError(PoiseError):
    """A commit failed because the disk is full, or refuses. Nothing of it was kept."""


class StoredJob(NamedTuple):
    """A job as it is stored; `job`, `request` and `record` are JSON. `ended`: a time, or None.

    damage   which of these three are not as they were written; None: all are
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
    def of(*row: Any) -> "StoredJob":  # noqa: ANN401 - as it is in the table
        """A row of JOB_ROWS, with its checksums compared."""
        *values, job_sum, request_sum, record_sum = row
        found = StoredJob(*values)
        sums = {"job": job_sum, "request": request_sum, "record": record_sum}
        damaged = [name for (name, stored), mine in zip(sums.items(), found.sums(), strict=True) if stored != mine]
        return found._replace(damage=" and ".join(damaged)) if damaged else found

    def sums(self) -> tuple[int, int, int]:
        """Checksums of the job, of what was submitted, and of its record."""
        request = checksum(self.id, self.tenant, self.app, self.request)
        return checksum(self.id, self.job), request, checksum(self.id, self.ended, self.state, self.record)


class StoredEntry(NamedTuple):
    """An entry of the journal; `notes`: who, and other remarks."""

    number: int
    document: str
    notes: str | None
    is_damaged: bool = False

    @staticmethod
    def of(number: int, document: str, notes: str | None, stored: int) -> "StoredEntry":
        """A row of the table of entries, with its checksum compared."""
        return StoredEntry(number, document, notes, checksum(number, document, notes) != stored)


@dataclass
class Changes:
    """What one batch changes, committed as a whole. No entry: nothing of it concerns the core."""

    now: float
    entry: str | None = None
    notes: str | None = None
    chapter: tuple[str, str] | None = None
    """If a chapter begins here: its header, and the one that the service was started with."""
    jobs: list[StoredJob] = field(default_factory=list)
    records: dict[str, tuple[float | None, str, str]] = field(default_factory=dict)
    """By job: time of its end or None, its state, its record."""
    aside: list[StoredJob] = field(default_factory=list)
    """Jobs of which something was damaged, as they are stored from now on; `records` has their state."""
    reweighed: dict[str, str] = field(default_factory=dict)  # jobs that are no longer as they were submitted
    mentions: set[str] = field(default_factory=set)
    keys: list[tuple[str, str, str]] = field(default_factory=list)
    """Of submissions: key, whose it is, ids of the jobs as JSON."""
    tenants: dict[str, tuple[float, float, int]] = field(default_factory=dict)
    """Weight, GPU-seconds received, preemptions suffered."""
    nodes: dict[str, str] = field(default_factory=dict)  # records of nodes as JSON, by name


class Store:
    """The writer's side of the journal, for the engine's thread.

    last      number of the last entry; 0: there is none
    highest   the highest number of a job that was ever given out
    """

    def __init__(self, directory: Path) -> None:
        """Open a store, or create it; raises JournalError, and changes nothing, if it is damaged or lost its end."""
        self.path = directory / FILE
        self._mark = JournalMark(directory)
        self.reserve = Reserve(directory)
        with self.reporting_damage():
            # The file is private from the moment it is created; SQLite gives its log and index the same mode.
            os.close(open_private(self.path, os.O_CREAT | os.O_RDWR))
            for other in ("-wal", "-shm"):
                with suppress(FileNotFoundError):
                    os.close(open_private(self.path.with_name(FILE + other), os.O_RDONLY))
            self.is_checked = self._check()
            with closing(self._connect()) as db:
                self.migrated_from = schema.migrate(db, self.path)
            self.lacks_mark = self.migrated_from == schema.VERSION and self._mark.read() is None
            self._db = self._connect()
            self.refresh()
        self._mark.write(JournalEnd(self.last, self.highest))
        self.submissions = Submissions(self._db)

    @contextmanager
    def reporting_damage(self) -> Iterator[None]:
        """Raise a JournalError with one line for whatever SQLite finds wrong with the file."""
        try:
            yield
        except UNREADABLE as error:
            raise JournalError(f"{self.path}: cannot be used: {error_text(error)}; {remedy(self.path.parent)}") from error

    def _check(self) -> bool:
        """Refuse a journal that is damaged, or ends before what was answered.

        Read-only, so that a journal which is refused stays as it was found. Returns whether its pages were checked too:
        those of a very large one are not.
        """
        schema.check_writable(self.path)
        with closing(sqlite3.connect(f"{self.path.absolute().as_uri()}?mode=ro", uri=True)) as db:
            decode_leniently(db)
            version = schema.version_of(db, self.path)
            is_small = self.path.stat().st_size <= LARGEST_CHECKED
            problem = str(db.execute("PRAGMA integrity_check(1)").fetchone()[0]) if is_small else "ok"
            if problem != "ok":
                text = " ".join(problem.split())
                raise JournalError(f"{self.path}: damaged: {text:.200}; {remedy(self.path.parent)}")
            check_end(db, self._mark.read(), self.path)
            if version and has_lost_chapters(db):
                raise JournalError(f"{self.path}: damaged: {NO_CHAPTERS}; {remedy(self.path.parent)}")
        return is_small

    def _connect(self) -> sqlite3.Connection:
        # Transactions are begun by hand; `check_same_thread` is off because a connection may be closed by another thread.
        db = sqlite3.connect(
            self.path, BUSY_SECONDS, isolation_level=None, check_same_thread=False, cached_statements=CACHED_STATEMENTS
        )
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")  # sync the log at each commit: what was answered survives a power failure
        db.execute(f"PRAGMA journal_size_limit = {LARGEST_LOG}")
        decode_leniently(db)
        return db

    def refresh(self) -> None:
        """Read the numbers again from the file, which counts, whatever was expected to be in it."""
        self.last, self.highest = end_of(self._db, self.path)
        self._first = int(self._db.execute("SELECT coalesce(max(first), 0) FROM chapters").fetchone()[0])

    @property
    def chapter_length(self) -> int:
        """Entries of the last chapter."""
        return self.last + 1 - self._first

    @property
    def is_repaired(self) -> bool:
        """The last chapter does not lead to the state of the jobs since a repair: a new one has to begin."""
        return bool(_floor(self._db, FROM_RECORDS))

    def commit(self, changes: Sequence[Changes]) -> None:
        """Keep these batches, all or none; raises StorageError if the disk has no space for them."""
        last = self.last
        try:
            self._db.execute("BEGIN IMMEDIATE")
            for each in changes:
                last += each.entry is not None
                self._write(last, each)
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            self._roll_back()
            if getattr(error, "sqlite_errorcode", 0) & 0xFF not in _NO_STORAGE:  # the low byte of an extended code
                raise InvariantError(f"{self.path}: {error}") from error
            raise StorageError(f"{self.path}: cannot be written: {error}") from error
        self.last = last
        self._first = last if any(each.chapter is not None for each in changes) else self._first
        new = next((each.jobs[-1].id for each in reversed(changes) if each.jobs), None)
        if new is not None:
            self.highest = int(new)
        self._mark.write(JournalEnd(last, self.highest))

    def _roll_back(self) -> None:
        if self._db.in_transaction:
            with suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")

    def _write(self, number: int, changes: Changes) -> None:
        """Write one batch, whose entry, if it has one, gets this number."""
        db = self._db
        if changes.chapter is not None:
            row = number, *changes.chapter
            db.execute("INSERT INTO chapters (first, header, asked, sum) VALUES (?, ?, ?, ?)", (*row, checksum(*row)))
            db.execute("DELETE FROM floors WHERE name = ?", (FROM_RECORDS,))
        if changes.entry is not None:
            texts = changes.entry, changes.notes
            values = number, changes.now, *texts, checksum(number, *texts)
            db.execute("INSERT INTO entries VALUES (?, ?, ?, ?, ?)", values)
        for each in changes.aside:
            db.execute(_REMEMBER_DAMAGED, (each.id,))
            db.execute(
                "UPDATE jobs SET tenant = ?, app = ?, request = ?, request_sum = ? WHERE id = ?",
                (each.tenant, each.app, each.request, each.sums()[1], each.id),
            )
        _for_rows(db, _NEW_JOBS, ((*job[:-1], *job.sums()) for job in changes.jobs))
        _for_rows(db, _UPDATE_RECORDS, ((job, *row, checksum(job, *row)) for job, row in changes.records.items()))
        _for_rows(db, _UPDATE_JOBS, ((job, text, checksum(job, text)) for job, text in changes.reweighed.items()))
        _for_rows(db, "INSERT OR IGNORE INTO mentions VALUES {}", ((job, number) for job in sorted(changes.mentions)))
        _for_rows(db, "INSERT INTO submissions VALUES {}", changes.keys)
        totals = ((name, *each, checksum(name, *each)) for name, each in changes.tenants.items())
        _for_rows(db, "INSERT OR REPLACE INTO tenants VALUES {}", totals)
        known = ((name, text, checksum(name, text)) for name, text in changes.nodes.items())
        _for_rows(db, "INSERT OR REPLACE INTO nodes VALUES {}", known)

    def checkpoint(self) -> None:
        """Carry the write-ahead log over into the file, so that what is written next needs no more space there."""
        with suppress(sqlite3.Error):
            self._db.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def has_room(self) -> bool:
        """Whether something can be written now. It is committed to find out: a rollback would not reach the disk."""
        try:
            self._db.execute("CREATE TABLE IF NOT EXISTS room (filler BLOB)")
            self._db.execute("INSERT INTO room VALUES (zeroblob(65536))")
            self._db.execute("DROP TABLE room")
            self.refresh()
        except sqlite3.Error:
            self._roll_back()
            return False
        return True

    def chapter(self) -> tuple[str, str, int] | None:
        """Header, header asked for, and number of the first entry of the last chapter; None if nothing was ever written."""
        row = self._db.execute("SELECT header, asked, first, sum FROM chapters ORDER BY number DESC LIMIT 1").fetchone()
        if row is not None and row[3] != checksum(row[2], row[0], row[1]):
            raise JournalError(f"{self.path}: damaged: the header of its last chapter; {remedy(self.path.parent)}")
        return None if row is None else (row[0], row[1], row[2])

    def chapters(self) -> list[tuple[str, int]]:
        """All chapters: header, number of the first entry."""
        return [(header, first) for header, first in self._db.execute("SELECT header, first FROM chapters ORDER BY number")]

    def entries(self, first: int, end: int | None = None) -> Iterator[str]:
        """Documents of the entries from a number on, before `end`; raises DamageError at a damaged one."""
        for entry in stored_entries(self._db, first, end or 1 << 62):
            if entry.is_damaged:
                raise DamageError(f"{self.path}: damaged: entry {entry.number:,} is not as it was written")
            yield entry.document

    def last_time(self) -> float:
        """Time of the last entry; 0 if there is none."""
        with self.reporting_damage():
            row = self._db.execute("SELECT now FROM entries WHERE number = ?", (self.last,)).fetchone()
        return 0.0 if row is None else float(row[0])

    def unended(self) -> Iterator[StoredJob]:
        """Jobs that have not ended, in order of submission."""
        return unended_jobs(self._db)

    def tenants(self) -> dict[str, tuple[float, float, int]]:
        """Weight, GPU-seconds received and preemptions suffered, by tenant."""
        return tenant_totals(self._db, self.path)

    def nodes(self) -> dict[str, str]:
        """Records of nodes as JSON, by name."""
        return node_texts(self._db, self.path)

    def ended(self) -> dict[str, int]:
        """Number of jobs that have ended, by their final state."""
        return dict(self._db.execute("SELECT state, count(*) FROM jobs WHERE ended IS NOT NULL GROUP BY 1"))

    def sent_since(self, time: float) -> Iterator[Sent]:
        """What was submitted since a time, of jobs that have ended, by account and minute."""
        return (Sent(*row) for row in self._db.execute(_SENT, (SLOT, time, time)))

    def final_state(self, job: str) -> str:
        """State of a job that has ended."""
        return str(self._db.execute("SELECT state FROM jobs WHERE id = ?", (job,)).fetchone()[0])

    def final_states(self, jobs: Sequence[str]) -> dict[str, JobState]:
        """Of these jobs, those that have ended, with their states."""
        found: dict[str, JobState] = {}
        for first in range(0, len(jobs), ROWS_PER_STATEMENT):
            some = jobs[first : first + ROWS_PER_STATEMENT]
            query = f"SELECT id, state FROM jobs WHERE ended IS NOT NULL AND id IN ({', '.join('?' * len(some))})"
            found |= {job: JobState(state) for job, state in self._db.execute(query, some)}
        return found

    def reader(self) -> "Reader":
        """A reader for another thread."""
        return Reader(self._connect())

    def close(self) -> None:
        """Close the file; nothing may be written after that."""
        self._db.close()
        self._mark.close()


def _for_rows(db: sqlite3.Connection, statement: str, rows: Iterable[tuple[object, ...]]) -> None:
    """Execute a statement, whose `{}` stands for values, for many rows at once."""
    left = iter(rows)
    while chunk := tuple(islice(left, ROWS_PER_STATEMENT)):
        row = f"({', '.join('?' * len(chunk[0]))})"
        db.execute(statement.format(", ".join([row] * len(chunk))), tuple(chain.from_iterable(chunk)))


# --- queries over any connection, also of `replay.py` and `repair.py` ---


def remedy(state: Path) -> str:
    """What to do about a damaged journal."""
    return f"run poise repair {state}"


def end_of(db: sqlite3.Connection, path: Path) -> JournalEnd:
    """Numbers of the last entry and of the highest job that were ever given out, as far as a journal knows."""
    last = int(db.execute("SELECT coalesce(max(number), 0) FROM entries").fetchone()[0])
    row = db.execute("SELECT id FROM jobs ORDER BY number DESC LIMIT 1").fetchone()
    if row is not None and not str(row[0]).isdecimal():
        raise JournalError(f"{path}: damaged: a job is called {row[0]!r:.100}; {remedy(path.parent)}")
    return JournalEnd(max(last, _floor(db, LAST_ENTRY)), max(0 if row is None else int(row[0]), _floor(db, LAST_JOB)))


def _floor(db: sqlite3.Connection, name: str) -> int:
    if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'floors'").fetchone():
        return 0  # a store of version 1 has no such table
    row = db.execute("SELECT value FROM floors WHERE name = ?", (name,)).fetchone()
    return 0 if row is None else int(row[0])


def check_end(db: sqlite3.Connection, mark: JournalEnd | None, path: Path) -> None:
    """Raise JournalError for a journal that ends before its mark."""
    refuse_shorter(end_of(db, path) if schema.version_of(db, path) else JournalEnd(0, 0), mark, path)


def refuse_shorter(found: JournalEnd, mark: JournalEnd | None, path: Path) -> None:
    """Raise JournalError if a journal that ends at `found` lacks what its mark says was answered."""
    if mark is not None and not mark.is_in(found):
        raise JournalError(f"{path}: {mark.missing(found)}; {remedy(path.parent)}")


def has_lost_chapters(db: sqlite3.Connection) -> bool:
    """Whether there are entries without any chapter to begin a replay with: all jobs would be forgotten."""
    is_there = db.execute("SELECT EXISTS (SELECT 1 FROM entries) AND NOT EXISTS (SELECT 1 FROM chapters)").fetchone()[0]
    return bool(is_there) and not _floor(db, FROM_RECORDS)


def unended_jobs(db: sqlite3.Connection) -> Iterator[StoredJob]:
    """Jobs that have not ended, in order of submission."""
    return (StoredJob.of(*row) for row in db.execute(f"{JOB_ROWS} WHERE ended IS NULL ORDER BY number"))


def stored_entries(db: sqlite3.Connection, first: int, end: int) -> Iterator[StoredEntry]:
    """Entries from a number on, before `end`."""
    rows = db.execute(f"{_ENTRIES} WHERE number >= ? AND number < ? ORDER BY number", (first, end))
    return (StoredEntry.of(*row) for row in rows)


def tenant_totals(db: sqlite3.Connection, path: Path) -> dict[str, tuple[float, float, int]]:
    """Weight, GPU-seconds received and preemptions suffered, by tenant; raises JournalError for a damaged row."""
    found = {}
    rows = db.execute("SELECT name, weight, gpu_seconds, preemptions, sum FROM tenants")
    for name, weight, seconds, preempted, stored in rows:
        if checksum(name, weight, seconds, preempted) != stored:
            raise JournalError(f"{path}: damaged: the books of tenant {name!r:.60}; {remedy(path.parent)}")
        found[name] = weight, seconds, preempted
    return found


def node_texts(db: sqlite3.Connection, path: Path) -> dict[str, str]:
    """Records of nodes as JSON, by name; raises JournalError for a damaged row."""
    found = {}
    for name, text, stored in db.execute("SELECT name, record, sum FROM nodes"):
        if checksum(name, text) != stored:
            raise JournalError(f"{path}: damaged: what is known of node {name!r:.60}; {remedy(path.parent)}")
        found[name] = text
    return found


# --- the readers' side ---


class Reader:
    """Queries of HTTP handlers; one per thread."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self.submissions = Submissions(db)

    def job(self, job: str) -> StoredJob | None:
        """A job, ended or not."""
        row = self._db.execute(f"{JOB_ROWS} WHERE id = ?", (job,)).fetchone()
        return None if row is None else StoredJob.of(*row)

    def first_unknown(self, jobs: Sequence[str]) -> str | None:
        """The first of these jobs that was never submitted; None: all were."""
        for first in range(0, len(jobs), ROWS_PER_STATEMENT):
            some = jobs[first : first + ROWS_PER_STATEMENT]
            query = f"SELECT id FROM jobs WHERE id IN ({', '.join('?' * len(some))})"
            known = {job for (job,) in self._db.execute(query, some)}
            if len(known) < len(some):
                return next(job for job in some if job not in known)
        return None

    def shipped_files(self) -> set[tuple[str, str]]:
        """Tenant and SHA-256 of the files and environments that jobs name which have not ended."""
        rows = self._db.execute(
            "SELECT tenant, json_extract(request, '$.files'), json_extract(request, '$.exported') FROM jobs"
            ' WHERE ended IS NULL AND (request LIKE \'%"files":"%\' OR request LIKE \'%"exported":"%\')'
            " AND json_valid(request)"
        )
        return {(str(tenant), str(sha256)) for tenant, *named in rows for sha256 in named if sha256 is not None}

    def ended(self, wanted: JobFilter, *, limit: int, offset: int) -> list[StoredJob]:
        """Jobs that have ended, the latest first."""
        where, values = _ended_condition(wanted)
        rows = self._db.execute(
            f"{JOB_ROWS} WHERE {where} ORDER BY ended DESC, number DESC LIMIT ? OFFSET ?", (*values, limit, offset)
        )
        return [StoredJob.of(*row) for row in rows]

    def ended_called(self, word: str, most: int) -> list[tuple[str, str, str, str]]:
        """Id, name, tenant and state of the jobs whose names begin so, among those that ended last; the latest first."""
        latest = f"SELECT id, {_NAME} AS name, tenant, state FROM jobs WHERE ended IS NOT NULL ORDER BY ended DESC LIMIT ?"
        rows = self._db.execute(f"SELECT * FROM ({latest}) WHERE substr(name, 1, ?) = ?", (most, len(word), word))
        # What is damaged may be anything.
        return [row for row in rows if all(isinstance(each, str) for each in row) and row[3] in JobState.__members__]

    def ended_counts(self, wanted: JobFilter) -> Counter[str]:
        """Number of jobs that have ended, by their final state."""
        where, values = _ended_condition(wanted)
        return Counter(dict(self._db.execute(f"SELECT state, count(*) FROM jobs WHERE {where} GROUP BY 1", values)))

    def entries(self, wanted: "EntryFilter", number: int, limit: int, *, back: bool = False) -> list[StoredEntry]:
        """Entries after a number, in order; or, going back, entries up to a number, the last one first."""
        where, values = wanted.condition("<= ?" if back else "> ?", number)
        order = "DESC" if back else "ASC"
        rows = self._db.execute(f"{_ENTRIES} WHERE {where} ORDER BY number {order} LIMIT ?", (*values, limit))
        return [StoredEntry.of(*row) for row in rows]

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
        """Tenants of jobs; a job that does not exist is left out."""
        found = {}
        for job in jobs:
            row = self._db.execute("SELECT tenant FROM jobs WHERE id = ?", (job,)).fetchone()
            if row is not None:
                found[job] = str(row[0])
        return found


class EntryFilter(NamedTuple):
    """Entries that mention a job; or a tenant, or a job of it; None: any."""

    job: str | None = None
    tenant: str | None = None

    def condition(self, beyond: str, number: int) -> tuple[str, tuple[str | int, ...]]:
        """SQL without any text from outside, and its values; `beyond`: how numbers are compared."""
        if self.job is not None:
            mentions = f"SELECT entry FROM mentions WHERE job = ? AND entry {beyond}"
            return f"number IN ({mentions})", (self.job, number)
        if self.tenant is not None:
            mine = "SELECT id FROM jobs WHERE tenant = ? UNION ALL SELECT ?"
            mentions = f"SELECT entry FROM mentions WHERE job IN ({mine}) AND entry {beyond}"
            return f"number IN ({mentions})", (self.tenant, _tenant_mention(self.tenant), number)
        return f"number {beyond}", (number,)


def _ended_condition(wanted: JobFilter) -> tuple[str, tuple[str, ...]]:
    """SQL for the wanted jobs that have ended, without any text from outside, and its values."""
    states = tuple(sorted(state.value for state in wanted.states))
    given = {"tenant": wanted.tenant, "app": wanted.app, _NAME: wanted.name}
    chosen = {name: value for name, value in given.items() if value is not None}
    among = ", ".join("?" * len(states))
    conditions = ("ended IS NOT NULL", f"state IN ({among})", *(f"{name} = ?" for name in chosen))
    return " AND ".join(conditions), (*states, *chosen.values())


def mentioned_by(note: Mapping[str, object]) -> set[str]:
    """What the note on a batch as a whole mentions: jobs that were set aside, and a tenant."""
    aside = note.get(ASIDE)
    jobs = set(aside) if isinstance(aside, Mapping) else set()
    return jobs | ({_tenant_mention(str(note["tenant"]))} if "tenant" in note else set())


def _tenant_mention(tenant: str) -> str:
    """What the table of mentions has in the place of a job for a tenant itself; ids of jobs are numbers."""
    return f"tenant {tenant}"


class Submissions:
    """Requests as they were submitted, over one connection. What is sent twice under one key is accepted once."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def taken(self, by: Account, submission: Submission) -> tuple[str, ...] | None:
        """Ids of the jobs of a submission that was accepted before; raises if its key was another submission's."""
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

    def known(self, key: str, by: Account) -> tuple[str, ...]:
        """Ids of the jobs that this account has submitted under a key, whatever they were; none if it has not."""
        query = "SELECT jobs FROM submissions WHERE key = ? AND account = ?"
        row = self._db.execute(query, (key, holder(by))).fetchone()
        return () if row is None else tuple(json.loads(row[0]))

    def by(self, name: str) -> Iterator[tuple[str, str]]:
        """Keys that accounts of this name have submitted under, of whatever tenants, each with its jobs."""
        query = "SELECT key, jobs FROM submissions WHERE substr(account, 1, ?) = ?"
        for key, jobs in self._db.execute(query, (len(name) + 1, f"{name}@")):
            for job in json.loads(jobs):
                yield key, job

    def requests(self, jobs: Sequence[str]) -> dict[str, str]:
        """Requests as JSON, by job."""
        found: dict[str, str] = {}
        for first in range(0, len(jobs), ROWS_PER_STATEMENT):
            some = jobs[first : first + ROWS_PER_STATEMENT]
            query = f"SELECT id, request FROM jobs WHERE id IN ({', '.join('?' * len(some))})"
            found.update(self._db.execute(query, some).fetchall())
        return found


def holder(by: Account) -> str:
    """Whose a key is. With the tenant: the name of a token may later be given to another one, who must not find these."""
    return f"{by.name}@{by.tenant}"


def check_same(submission: Submission, before: tuple[JobRequest, ...]) -> None:
    """Raise RequestRefusedError if other jobs were accepted under the key of a submission.

    They are the same from another shell, too: what came along the first time counts.
    """
    now, then = ([each.model_copy(update={"exported": None}) for each in jobs] for jobs in (submission.jobs, before))
    if now != then:
        text = f"key {submission.key!r}: other jobs were submitted under it; a new submission needs a new key"
        raise RequestRefusedError(RefusalCode.CONFLICT, text)
