"""Whatever can still be read of a store, copied row by row into a new one."""

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from poise.server.migrations import migrate, version_by_tables, version_of
from poise.server.schema import INDEXES, TABLES, UNREADABLE, check_writable, read_tolerantly, said_of

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
