"""Whatever can still be read of a store, copied row by row into a new one."""

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from poise.server.migrations import migrate
from poise.server.schema import INDEXES, TABLES, VERSION, read_tolerantly

WITH_NUMBERS = ("chapters", "entries", "jobs", "damaged")
BY_KEY = ("mentions", "submissions", "tenants", "floors")
MOST_PROBES = 20_000
"""Numbers that are tried one by one between rows that can be read."""
_AT_VERSION = 60
"""Where the header of an SQLite file has the version of what is stored."""

Row = Sequence[Any]


def salvage(source: Path, target: Path) -> str | None:
    """Copy what can be read of a store into a new one, of this version; what is wrong with its pages, if anything is."""
    target.touch(mode=0o600)
    with closing(sqlite3.connect(target, isolation_level=None)) as new:
        read_tolerantly(new)
        problem = _copied(source, new)
        migrate(new, source)
        return problem


def _copied(source: Path, new: sqlite3.Connection) -> str | None:
    try:
        with closing(sqlite3.connect(source, isolation_level=None)) as old:
            read_tolerantly(old)
            problem = _problem(old)
            schema = _schema(old)
            new.execute("BEGIN")
            for statement in schema:
                new.execute(statement)
            for table in (*WITH_NUMBERS, *BY_KEY):
                _copy(old, new, table)
            new.execute(f"PRAGMA user_version = {_version(old, source)}")
            new.execute("COMMIT")
    except sqlite3.Error as error:
        if new.in_transaction:
            new.execute("ROLLBACK")
        return str(error)
    return problem


def _problem(db: sqlite3.Connection) -> str | None:
    try:
        found = str(db.execute("PRAGMA integrity_check(1)").fetchone()[0])
    except sqlite3.Error as error:
        return str(error)
    return None if found == "ok" else " ".join(found.split())


def _schema(db: sqlite3.Connection) -> list[str]:
    """Tables and indexes as they were made; those of this version where that cannot be read."""
    with suppress(sqlite3.Error):
        query = "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL AND name != 'room' ORDER BY type DESC, rowid"
        found = [str(sql) for (sql,) in db.execute(query)]
        if found:
            return found
    return [each for each in (TABLES + INDEXES).split(";") if each.strip()]


def _version(db: sqlite3.Connection, path: Path) -> int:
    with suppress(sqlite3.Error):
        return int(db.execute("PRAGMA user_version").fetchone()[0]) or VERSION
    with path.open("rb") as file:
        file.seek(_AT_VERSION)
        return int.from_bytes(file.read(4), "big") or VERSION


def _copy(old: sqlite3.Connection, new: sqlite3.Connection, table: str) -> None:
    columns = new.execute(f"SELECT count(*) FROM pragma_table_info('{table}')").fetchone()[0]
    if not columns:
        return
    statement = f"INSERT OR IGNORE INTO {table} VALUES ({', '.join('?' * columns)})"
    for row in _rows(old, table):
        with suppress(sqlite3.Error):
            new.execute(statement, row)


def _rows(db: sqlite3.Connection, table: str) -> Iterator[Row]:
    """From the first on, then from the last on; and of those between that have numbers, each by itself."""
    low = high = None
    order = "number" if table in WITH_NUMBERS else "1"
    try:
        for row in db.execute(f"SELECT * FROM {table} ORDER BY {order}"):
            low = row[0]
            yield row
    except sqlite3.Error:
        with suppress(sqlite3.Error):
            for row in db.execute(f"SELECT * FROM {table} ORDER BY {order} DESC"):
                if row[0] == low:
                    return
                high = row[0]
                yield row
        if table in WITH_NUMBERS:
            yield from _between(db, table, low, high)


def _between(db: sqlite3.Connection, table: str, low: object, high: object) -> Iterator[Row]:
    first = low + 1 if isinstance(low, int) else 1
    last = high if isinstance(high, int) else first + MOST_PROBES
    for number in range(first, min(last, first + MOST_PROBES)):
        with suppress(sqlite3.Error):
            yield from db.execute(f"SELECT * FROM {table} WHERE number = ?", (number,)).fetchall()


def remove(path: Path) -> None:
    """A store, with its other files."""
    for each in ("", "-wal", "-shm", "-journal"):
        with suppress(FileNotFoundError):
            os.unlink(path.with_name(path.name + each))
