"""`poise repair`: make a damaged journal, or one that lost its end, one that a service can go on with.

What can be read is kept, what cannot is named and set aside, and no number that was given out is given out again. The
work is done on a copy in three steps: copy all rows that SQLite can still read (`salvage`), check each row (`_Repair`),
and exchange the files (`_exchange`). The files as they were found stay in a folder beside.
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
from poise.service.server.storage import schema, store
from poise.service.server.storage.damaged_jobs import DamagedRowError, read_record, set_aside
from poise.service.server.storage.schema import FILE, UNREADABLE, checksum, decode_leniently, error_text
from poise.service.server.storage.sidecar import MARK, JournalEnd, read_mark
from poise.service.server.storage.store import JOB_ROWS, StoredJob

BACKUPS = "backups"
_FILES = (FILE, f"{FILE}-wal", MARK)
NUMBERED = ("chapters", "entries", "jobs", "damaged")
KEYED = ("mentions", "submissions", "tenants", "nodes", "floors")
MOST_PROBES = 20_000  # numbers that are tried one by one between rows that can be read


@dataclass
class RepairFindings:
    """What is wrong with a journal, one line each, and what is in it. `jobs` counts those that can be read."""

    problems: list[str] = field(default_factory=list)
    entries: int = 0
    jobs: int = 0
    next_job: int = 1


@contextmanager
def examined(state: Path) -> Iterator[tuple[RepairFindings, Callable[[], Path]]]:
    """Examine the journal of a service that does not run; yields the findings, and a function that repairs it.

    That function returns the folder in which the files are kept as they were found. Raises JournalError for a journal of a
    later version and for one that cannot be repaired, RequestError for a folder that has none.
    """
    if not (state / FILE).exists() and not (state / MARK).exists():
        raise RequestError(f"{state}: there is no journal of a service here; name its state directory")
    work = Path(mkdtemp(prefix="repair-", dir=state))
    try:
        for name in (each for each in _FILES if (state / each).exists()):
            shutil.copy(state / name, work / name)
        with suppress(*UNREADABLE), closing(sqlite3.connect(work / FILE)) as db:
            schema.version_of(db, state / FILE)  # refuses a later version; one that cannot be read is damage
        found, repaired = RepairFindings(), work / f"mended-{FILE}"
        try:
            problem = salvage(work / FILE, repaired)
            if problem is not None:
                found.problems.append(f"pages of the file are damaged: {problem:.200}")
            with closing(sqlite3.connect(repaired, isolation_level=None)) as db:
                decode_leniently(db)
                db.execute("BEGIN")
                _Repair(db, found).all(read_mark(state), highest_number(state))
                db.execute("COMMIT")
                db.execute("PRAGMA journal_mode = DELETE")  # one file, without a log beside it, to be moved
        except UNREADABLE as error:
            text = f"cannot be repaired: {error_text(error)}; put a copy of it back"
            raise JournalError(f"{state / FILE}: {text}") from error
        yield found, lambda: _exchange(state, repaired)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _exchange(state: Path, repaired: Path) -> Path:
    """Keep the files as they were found, and put the repaired journal in their place; returns the backup.

    A crash leaves the old journal, or no journal with its mark beside it, which a service refuses: then repair it again.
    """
    (state / BACKUPS).mkdir(mode=0o700, exist_ok=True)
    backup = Path(mkdtemp(prefix=strftime("journal-%Y%m%dT%H%M%SZ-", gmtime()), dir=state / BACKUPS))
    for name in (each for each in _FILES if (state / each).exists()):
        shutil.copy2(state / name, backup / name)
    with repaired.open("rb") as file:
        os.fsync(file.fileno())
    for other in ("", "-wal", "-shm", "-journal"):  # the log belongs to the old journal
        (state / (FILE + other)).unlink(missing_ok=True)
    os.replace(repaired, state / FILE)
    sync_folder(state)
    return backup


# --- step 1: copy all rows that SQLite can still read into a new file ---


def salvage(source: Path, target: Path) -> str | None:
    """Copy what can be read of a store into a new one of the current version; returns what is wrong with its pages."""
    target.touch(mode=0o600)
    with closing(sqlite3.connect(target, isolation_level=None)) as new:
        decode_leniently(new)
        try:
            with closing(sqlite3.connect(source, isolation_level=None)) as old:
                decode_leniently(old)
                problem = _page_problem(old, source)
                # Lets SQLite read a file that is too short, and the other tables if the definition of one is damaged.
                old.execute("PRAGMA writable_schema = ON")
                statements = _schema(old)
                new.execute("BEGIN")
                for statement in statements:
                    new.execute(statement)
                for table in (*NUMBERED, *KEYED):
                    columns = new.execute(f"SELECT count(*) FROM pragma_table_info('{table}')").fetchone()[0]
                    for row in _readable_rows(old, table) if columns else ():
                        with suppress(*UNREADABLE):
                            new.execute(f"INSERT OR IGNORE INTO {table} VALUES ({', '.join('?' * columns)})", row)
                new.execute(f"PRAGMA user_version = {schema.version_by_tables(new)}")
                new.execute("COMMIT")
        except UNREADABLE as error:
            if new.in_transaction:
                new.execute("ROLLBACK")
            problem = error_text(error)
        schema.migrate(new, source)
        there = {name for (name,) in new.execute("SELECT name FROM sqlite_master")}
        gone = [name for name in (*NUMBERED, *KEYED) if name not in there]
        for statement in _statements(schema.TABLES):
            new.execute(statement.replace("CREATE TABLE", "CREATE TABLE IF NOT EXISTS"))
        return problem or (f"no table {', '.join(gone)}" if gone else None)


def _page_problem(db: sqlite3.Connection, path: Path) -> str | None:
    try:
        found = str(db.execute("PRAGMA integrity_check(1)").fetchone()[0])
        if found == "ok":
            schema.version_of(db, path)
            schema.check_writable(path)
    except UNREADABLE as error:
        return error_text(error)
    return None if found == "ok" else " ".join(found.split())


def _schema(db: sqlite3.Connection) -> list[str]:
    """Statements that create tables and indexes as they were; those of this version if they cannot be read."""
    query = "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL AND name != 'room' ORDER BY type DESC, rowid"
    with suppress(*UNREADABLE):
        found = [str(sql) for (sql,) in db.execute(query)]
        with closing(sqlite3.connect(":memory:")) as trial:
            for statement in found:
                trial.execute(statement)
        if found:
            return found
    return _statements(schema.TABLES + schema.INDEXES)


def _statements(text: str) -> list[str]:
    return [each for each in text.split(";") if each.strip()]


def _readable_rows(db: sqlite3.Connection, table: str) -> Iterator[Sequence[Any]]:
    """Rows from the first on, then from the last back; those in between, if they have numbers, one by one."""
    low = high = None
    order = "number" if table in NUMBERED else "1"
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
    else:
        return
    if table not in NUMBERED:
        return
    query = f"SELECT * FROM {table} WHERE number = ?"
    try:
        db.execute(f"EXPLAIN {query}", (0,))
    except UNREADABLE:
        return  # the table itself cannot be found
    first = low + 1 if isinstance(low, int) else 1
    last = high if isinstance(high, int) else first + MOST_PROBES
    for number in range(first, min(last, first + MOST_PROBES)):
        with suppress(*UNREADABLE):
            yield from db.execute(query, (number,)).fetchall()


# --- step 2: check each row of the copy ---


class _Repair:
    """Sets aside, in a copy of a journal, each row that cannot be understood."""

    def __init__(self, db: sqlite3.Connection, found: RepairFindings) -> None:
        self._db = db
        self._problems = found.problems
        self._found = found

    def all(self, mark: JournalEnd | None, highest: int) -> None:
        """Check every row; `highest`: the highest number of a job that has a directory."""
        for first, *texts, stored in self._rows("SELECT first, header, asked, sum FROM chapters ORDER BY number"):
            is_whole = checksum(first, *texts) == stored
            problem = _parse_problem(read_header, *texts) if is_whole else "its header is damaged"
            if problem is not None:
                self._problems.append(f"chapter of entry {first}: {problem}")
                self._remember("chapter", first, [*texts, stored])
                self._db.execute("DELETE FROM chapters WHERE first IS ?", (first,))
        if store.has_lost_chapters(self._db):
            self._problems.append(store.NO_CHAPTERS)
        for number, *texts, stored in self._rows("SELECT number, document, notes, sum FROM entries ORDER BY number"):
            is_whole = checksum(number, *texts) == stored
            problem = _parse_problem(read_entry, texts[0]) if is_whole else "not as it was written"
            if problem is not None:
                self._problems.append(f"entry {number}: {problem}")
                self._remember("entry", number, [*texts, stored])
                self._db.execute("DELETE FROM entries WHERE number IS ?", (number,))
        self._jobs()
        self._tenants()
        self._nodes()
        self._numbers(mark or JournalEnd(0, 0), highest)
        if self._problems:
            self._set_floor(store.FROM_RECORDS, 1)

    def _rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        return self._db.execute(query, values).fetchall()

    def _remember(self, kind: str, name: object, row: Sequence[object]) -> None:
        """Keep a row as it was found, as far as it could be read."""
        values = kind, str(name), json.dumps([*row], default=str)
        self._db.execute("INSERT INTO damaged (kind, name, found) VALUES (?, ?, ?)", values)

    def _set_floor(self, name: str, value: int) -> None:
        self._db.execute("INSERT OR REPLACE INTO floors VALUES (?, ?)", (name, value))

    def _jobs(self) -> None:
        now = float(self._rows("SELECT coalesce(max(now), 0) FROM entries")[0][0])
        for values in self._rows(JOB_ROWS):
            row = StoredJob.of(*values)
            if not str(row.id).isdecimal():
                self._problems.append(f"a job whose number cannot be read: {row.id!r:.60}")
                self._remember("job", row.id, values)
                self._db.execute("DELETE FROM jobs WHERE id IS ?", (row.id,))
                continue
            try:
                read_record(row)
                self._found.jobs += 1
            except DamagedRowError as error:
                self._problems.append(f"job {row.id}: {error}")
                self._remember("job", row.id, values)
                kept = set_aside(row, str(error), row.ended if isinstance(row.ended, float) else now).row
                self._db.execute(
                    "UPDATE jobs SET tenant = ?, app = ?, ended = ?, state = ?, job = ?, request = ?, record = ?,"
                    " job_sum = ?, request_sum = ?, record_sum = ? WHERE id = ?",
                    (*kept[1:-1], *kept.sums(), kept.id),
                )

    def _tenants(self) -> None:
        """Compute damaged totals again from the records of the tenant's jobs."""
        for name, *totals, stored in self._rows("SELECT * FROM tenants"):
            if checksum(name, *totals) == stored:
                continue
            self._problems.append(f"tenant {name!r:.60}: its books are damaged; they are made anew from its jobs")
            self._remember("tenant", name, totals)
            self._db.execute("DELETE FROM tenants WHERE name IS ?", (name,))
            query = "SELECT job, record FROM jobs WHERE tenant IS ? ORDER BY number"
            jobs = [(json.loads(job), json.loads(record)) for job, record in self._rows(query, name)]
            if jobs:
                seconds = float(sum(record["gpu_seconds"] for _, record in jobs))
                preempted = sum(record["preemptions"] for _, record in jobs)
                made = (name, float(jobs[-1][0].get("tenant_weight", 1.0)), seconds, preempted)
                self._db.execute("INSERT INTO tenants VALUES (?, ?, ?, ?, ?)", (*made, checksum(*made)))

    def _nodes(self) -> None:
        """Forget what cannot be read of a node: the back end reports anew how it is, and an operator may drain it again."""
        for name, text, stored in self._rows("SELECT * FROM nodes"):
            if checksum(name, text) != stored:
                self._problems.append(f"node {name!r:.60}: its record is damaged; if it was drained, drain it again")
                self._remember("node", name, [text, stored])
                self._db.execute("DELETE FROM nodes WHERE name IS ?", (name,))

    def _numbers(self, mark: JournalEnd, highest: int) -> None:
        """Report what is missing, and see to it that no number is given out again, be it in the journal or not."""
        there = {int(job) for (job,) in self._rows("SELECT id FROM jobs")}
        [(entries, last)] = self._rows("SELECT count(*), coalesce(max(number), 0) FROM entries")
        floors = dict(self._rows("SELECT name, value FROM floors"))
        known = int(floors.get(store.LAST_JOB, 0))
        found = JournalEnd(max(last, floors.get(store.LAST_ENTRY, 0)), max(*there, known, 0))
        if not mark.is_in(found):
            self._problems.insert(0, mark.missing(found))
        named = {int(job) for (job,) in self._rows("SELECT DISTINCT job FROM mentions") if str(job).isdecimal()}
        lost = sorted(job for job in named - there if job > known)  # earlier ones were reported by an earlier repair
        if lost:
            some = ", ".join(map(str, lost[:20])) + ", …" * (len(lost) > 20)
            self._problems.append(f"nothing can be read of job{'s' * (len(lost) > 1)} {some}")
        end = JournalEnd(max(found.entry, mark.entry), max(found.job, mark.job, highest))
        self._found.entries, self._found.next_job = entries, end.job + 1
        if self._problems:
            self._set_floor(store.LAST_ENTRY, end.entry)
            self._set_floor(store.LAST_JOB, end.job)


def _parse_problem(parse: Callable[[str], object], *texts: str) -> str | None:
    try:
        for text in texts:
            parse(text)
    except JournalError as error:
        return str(error)
    return None
