"""A journal that was damaged, or has lost its end, made one that a service can go on with.

What can be read is kept, what cannot is named and set aside, and no number that was given out is given out again. The files
as they were found stay in a folder beside.
"""

import json
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from time import gmtime, strftime
from typing import Any

from poise.durable import sync_folder
from poise.engine.journal import read_entry, read_header
from poise.scheduler.model.errors import JournalError, RequestError
from poise.service.backends.local.state_dir import highest_number
from poise.service.server.storage.damaged_jobs import DamagedRowError, set_aside
from poise.service.server.storage.damaged_jobs import read as read_row
from poise.service.server.storage.mark import MARK, Reached, marked
from poise.service.server.storage.migrations import migrate, version_by_tables, version_of
from poise.service.server.storage.schema import (
    FILE,
    INDEXES,
    TABLES,
    UNREADABLE,
    check_writable,
    read_tolerantly,
    said_of,
    sum_of,
)
from poise.service.server.storage.store import (
    FROM_RECORDS,
    JOB_ROWS,
    LAST_ENTRY,
    LAST_JOB,
    NO_CHAPTERS,
    JobRowText,
    Written,
    has_lost_chapters,
)

# Whatever can still be read of a store, copied row by row into a new one.

WITH_NUMBERS = ("chapters", "entries", "jobs", "damaged")
BY_KEY = ("mentions", "submissions", "tenants", "floors")
MOST_PROBES = 20_000
"""Numbers that are tried one by one between rows that can be read."""

Row = Sequence[Any]


def salvage(source: Path, target: Path) -> str | None:
    """Copy what can be read of a store into a new one, of this version; what is wrong with its pages, if anything is."""
    target.touch(mode=0o600)
    with closing(sqlite3.connect(target, isolation_level=None)) as new:
        read_tolerantly(new)
        problem = _copied(source, new)
        migrate(new, source)
        gone = _completed(new)
        return problem or gone


def _copied(source: Path, new: sqlite3.Connection) -> str | None:
    try:
        with closing(sqlite3.connect(source, isolation_level=None)) as old:
            read_tolerantly(old)
            problem = _problem(old, source)
            # From now on a file that is too short can be read, and tables beside one whose definition is damaged.
            old.execute("PRAGMA writable_schema = ON")
            schema = _schema(old)
            new.execute("BEGIN")
            for statement in schema:
                new.execute(statement)
            for table in (*WITH_NUMBERS, *BY_KEY):
                _copy(old, new, table)
            new.execute(f"PRAGMA user_version = {version_by_tables(new)}")
            new.execute("COMMIT")
    except UNREADABLE as error:
        if new.in_transaction:
            new.execute("ROLLBACK")
        return said_of(error)
    return problem


def _completed(db: sqlite3.Connection) -> str | None:
    """Make tables that are gone anew; which, if any."""
    there = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
    gone = [name for name in (*WITH_NUMBERS, *BY_KEY) if name not in there]
    for statement in _statements(TABLES):
        db.execute(statement.replace("CREATE TABLE", "CREATE TABLE IF NOT EXISTS"))
    return f"no table {', '.join(gone)}" if gone else None


def _problem(db: sqlite3.Connection, path: Path) -> str | None:
    try:
        found = str(db.execute("PRAGMA integrity_check(1)").fetchone()[0])
        if found == "ok":
            version_of(db, path)
            check_writable(path)
    except UNREADABLE as error:
        return said_of(error)
    return None if found == "ok" else " ".join(found.split())


def _schema(db: sqlite3.Connection) -> list[str]:
    """Tables and indexes as they were made; those of this version where that cannot be read."""
    with suppress(*UNREADABLE):
        found = _schema_of(db)
        with closing(sqlite3.connect(":memory:")) as trial:
            for statement in found:
                trial.execute(statement)
        if found:
            return found
    return _statements(TABLES + INDEXES)


def _schema_of(db: sqlite3.Connection) -> list[str]:
    query = "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL AND name != 'room' ORDER BY type DESC, rowid"
    return [str(sql) for (sql,) in db.execute(query)]


def _statements(text: str) -> list[str]:
    return [each for each in text.split(";") if each.strip()]


def _copy(old: sqlite3.Connection, new: sqlite3.Connection, table: str) -> None:
    columns = new.execute(f"SELECT count(*) FROM pragma_table_info('{table}')").fetchone()[0]
    if not columns:
        return
    statement = f"INSERT OR IGNORE INTO {table} VALUES ({', '.join('?' * columns)})"
    for row in _rows(old, table):
        with suppress(*UNREADABLE):
            new.execute(statement, row)


def _rows(db: sqlite3.Connection, table: str) -> Iterator[Row]:
    """From the first on, then from the last on; and of those between that have numbers, each by itself."""
    low = high = None
    order = "number" if table in WITH_NUMBERS else "1"
    try:
        for row in db.execute(f"SELECT * FROM {table} ORDER BY {order}"):
            low = row[0]
            yield row
    except UNREADABLE:
        with suppress(*UNREADABLE):
            for row in db.execute(f"SELECT * FROM {table} ORDER BY {order} DESC"):
                if row[0] == low:
                    return
                high = row[0]
                yield row
        if table in WITH_NUMBERS:
            yield from _between(db, table, low, high)


def _between(db: sqlite3.Connection, table: str, low: object, high: object) -> Iterator[Row]:
    query = f"SELECT * FROM {table} WHERE number = ?"
    try:
        db.execute(f"EXPLAIN {query}", (0,))
    except UNREADABLE:
        return  # not even the table can be found: no number would be
    first = low + 1 if isinstance(low, int) else 1
    last = high if isinstance(high, int) else first + MOST_PROBES
    for number in range(first, min(last, first + MOST_PROBES)):
        with suppress(*UNREADABLE):
            yield from db.execute(query, (number,)).fetchall()


def remove(path: Path) -> None:
    """A store, with its other files."""
    for each in ("", "-wal", "-shm", "-journal"):
        with suppress(FileNotFoundError):
            os.unlink(path.with_name(path.name + each))


BACKUPS = "backups"
_FILES = (FILE, f"{FILE}-wal", MARK)
_REMEMBER = "INSERT INTO damaged (kind, name, found) VALUES (?, ?, ?)"
_FLOOR = "INSERT OR REPLACE INTO floors VALUES (?, ?)"
_KEEP = """UPDATE jobs SET tenant = ?, app = ?, ended = ?, state = ?, job = ?, request = ?, record = ?,
job_sum = ?, request_sum = ?, record_sum = ? WHERE id = ?"""


@dataclass
class Examined:
    """What is wrong with a journal, each on one line, and what there is in it. `jobs` counts those that can be read."""

    problems: list[str] = field(default_factory=list)
    entries: int = 0
    jobs: int = 0
    next_job: int = 1


@contextmanager
def examined(state: Path) -> Iterator[tuple[Examined, Callable[[], Path]]]:
    """Look at the journal of a service that does not run; and how to put the one in its place that is mended, if wanted.

    That returns the folder in which the files are kept as they were found. Raises JournalError for a journal of a later
    version and for one that cannot be mended, RequestError for a folder that has none.
    """
    if not (state / FILE).exists() and not (state / MARK).exists():
        raise RequestError(f"{state}: there is no journal of a service here; name its state directory")
    work = Path(mkdtemp(prefix="repair-", dir=state))
    try:
        for name in (each for each in _FILES if (state / each).exists()):
            shutil.copy(state / name, work / name)
        found, mended = Examined(), work / f"mended-{FILE}"
        _refuse_later(work / FILE, state / FILE)
        try:
            _mend(work / FILE, mended, state, found)
        except UNREADABLE as error:
            raise JournalError(f"{state / FILE}: cannot be repaired: {said_of(error)}; put a copy of it back") from error
        yield found, lambda: _exchange(state, mended)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _refuse_later(copy: Path, path: Path) -> None:
    try:
        with closing(sqlite3.connect(copy)) as db:
            version_of(db, path)
    except UNREADABLE:
        return  # its version is unknown


def _mend(source: Path, target: Path, state: Path, found: Examined) -> None:
    problem = salvage(source, target)
    if problem is not None:
        found.problems.append(f"pages of the file are damaged: {problem:.200}")
    with closing(sqlite3.connect(target, isolation_level=None)) as db:
        read_tolerantly(db)
        db.execute("BEGIN")
        _Mending(db, found).all(marked(state), highest_number(state))
        db.execute("COMMIT")
        db.execute("PRAGMA journal_mode = DELETE")


class _Mending:
    """What is done to a copy of a journal."""

    def __init__(self, db: sqlite3.Connection, found: Examined) -> None:
        self._db = db
        self._found = found

    def all(self, reached: Reached | None, highest: int) -> None:
        """Look at every row; set aside what makes no sense."""
        self._each("chapter", "SELECT first, header, asked, sum FROM chapters ORDER BY number", _bad_chapter)
        if has_lost_chapters(self._db):
            self._found.problems.append(NO_CHAPTERS)
        self._each("entry", "SELECT number, document, notes, sum FROM entries ORDER BY number", _bad_entry)
        self._jobs()
        self._tenants()
        self._number(reached or Reached(0, 0), highest)
        if self._found.problems:
            self._db.execute(_FLOOR, (FROM_RECORDS, 1))

    def _each(self, kind: str, query: str, problem_of: Callable[[Any], str | None]) -> None:
        """Chapters and entries: one that cannot be read is set aside."""
        column, table = ("first", "chapters") if kind == "chapter" else ("number", "entries")
        for row in self._db.execute(query).fetchall():
            problem = problem_of(row)
            if problem is not None:
                self._found.problems.append(f"{kind} {'of entry ' * (kind == 'chapter')}{row[0]}: {problem}")
                self._db.execute(_REMEMBER, (kind, str(row[0]), json.dumps(row[1:], default=str)))
                self._db.execute(f"DELETE FROM {table} WHERE {column} IS ?", (row[0],))

    def _jobs(self) -> None:
        now = float(self._db.execute("SELECT coalesce(max(now), 0) FROM entries").fetchone()[0])
        for values in self._db.execute(JOB_ROWS).fetchall():
            row = JobRowText.of(*values)
            if not str(row.id).isdecimal():
                self._found.problems.append(f"a job whose number cannot be read: {row.id!r:.60}")
                self._db.execute(_REMEMBER, ("job", str(row.id), json.dumps(values, default=str)))
                self._db.execute("DELETE FROM jobs WHERE id IS ?", (row.id,))
                continue
            self._found.jobs += 1
            try:
                read_row(row)
            except DamagedRowError as error:
                self._found.problems.append(f"job {row.id}: {error}")
                self._found.jobs -= 1
                self._db.execute(_REMEMBER, ("job", row.id, json.dumps(values, default=str)))
                ended = row.ended if isinstance(row.ended, float) else now
                kept = set_aside(row, str(error), ended).row
                self._db.execute(_KEEP, (*kept[1:-1], *kept.sums(), kept.id))

    def _tenants(self) -> None:
        """Books that are damaged are made anew from the records of the tenant's jobs."""
        for name, *books, sum_ in self._db.execute("SELECT * FROM tenants").fetchall():
            if sum_of(name, *books) == sum_:
                continue
            self._found.problems.append(f"tenant {name!r:.60}: its books are damaged; they are made anew from its jobs")
            self._db.execute(_REMEMBER, ("tenant", str(name), json.dumps([*books], default=str)))
            self._db.execute("DELETE FROM tenants WHERE name IS ?", (name,))
            query = "SELECT job, record FROM jobs WHERE tenant IS ? ORDER BY number"
            rows = [(json.loads(job), json.loads(record)) for job, record in self._db.execute(query, (name,))]
            if rows:
                seconds = float(sum(record["gpu_seconds"] for _, record in rows))
                preempted = sum(record["preemptions"] for _, record in rows)
                made = (name, float(rows[-1][0].get("tenant_weight", 1.0)), seconds, preempted)
                self._db.execute("INSERT INTO tenants VALUES (?, ?, ?, ?, ?)", (*made, sum_of(*made)))

    def _number(self, reached: Reached, highest: int) -> None:
        """What was given out is not given out again, be it in the journal or not."""
        numbers = [int(job) for (job,) in self._db.execute("SELECT id FROM jobs")]
        entries, last = self._db.execute("SELECT count(*), coalesce(max(number), 0) FROM entries").fetchone()
        floors = dict(self._db.execute("SELECT name, value FROM floors").fetchall())
        found = Reached(max(last, floors.get(LAST_ENTRY, 0)), max((*numbers, floors.get(LAST_JOB, 0))))
        if not reached.is_in(found):
            self._found.problems.insert(0, reached.missing(found))
        self._name_lost({*map(str, numbers)}, int(floors.get(LAST_JOB, 0)))
        most = Reached(max(found.entry, reached.entry), max(found.job, reached.job, highest))
        self._found.entries, self._found.next_job = entries, most.job + 1
        if self._found.problems:
            self._db.execute(_FLOOR, (LAST_ENTRY, most.entry))
            self._db.execute(_FLOOR, (LAST_JOB, most.job))

    def _name_lost(self, there: set[str], known: int) -> None:
        """Jobs that entries name and of which there is nothing."""
        named = {str(job) for (job,) in self._db.execute("SELECT DISTINCT job FROM mentions") if str(job).isdecimal()}
        lost = sorted((int(job) for job in named - there if int(job) > known), key=int)
        if lost:
            some = ", ".join(map(str, lost[:20])) + ", …" * (len(lost) > 20)
            self._found.problems.append(f"nothing can be read of job{'s' * (len(lost) > 1)} {some}")


def _bad_chapter(row: tuple[int, str, str, int]) -> str | None:
    first, header, asked, sum_ = row
    if sum_of(first, header, asked) != sum_:
        return "its header is damaged"
    try:
        read_header(header), read_header(asked)
    except JournalError as error:
        return str(error)
    return None


def _bad_entry(row: tuple[int, str, str | None, int]) -> str | None:
    written = Written.of(*row)
    if written.is_damaged:
        return "not as it was written"
    try:
        read_entry(written.document)
    except JournalError as error:
        return str(error)
    return None


def _exchange(state: Path, mended: Path) -> Path:
    """Keep the files as they were found, and put the mended journal in their place."""
    (state / BACKUPS).mkdir(mode=0o700, exist_ok=True)
    kept = Path(mkdtemp(prefix=strftime("journal-%Y%m%dT%H%M%SZ-", gmtime()), dir=state / BACKUPS))
    for name in (each for each in _FILES if (state / each).exists()):
        shutil.copy2(state / name, kept / name)
    with mended.open("rb") as file:
        os.fsync(file.fileno())
    remove(state / FILE)  # its log too: it is of the journal that was
    os.replace(mended, state / FILE)
    sync_folder(state)
    return kept
