"""The journal of a live service, handed to the core again: also while the service runs."""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from poise.engine.journal import INTERRUPTED, Header, read_entry, read_header
from poise.engine.loop import Replayed, replay
from poise.scheduler.model.action import JournalEntry
from poise.scheduler.model.errors import JournalError, RequestError
from poise.service.server.dependencies import core_of
from poise.service.server.storage.damaged_jobs import DamagedRowError
from poise.service.server.storage.damaged_jobs import read as read_row
from poise.service.server.storage.mark import MARK, Reached, marked
from poise.service.server.storage.migrations import copied, version_of
from poise.service.server.storage.schema import FILE, UNREADABLE, said_of, sum_of
from poise.service.server.storage.store import (
    check_mark,
    refuse_shorter,
    remedy,
    tenant_books,
    unended_rows,
    written_entries,
)

_CHAPTERS = "SELECT header, asked, first, sum FROM chapters ORDER BY number"


def store_of(path: Path) -> Path | None:
    """The store that a path names: the file itself, or the state directory of a service; None if it names neither.

    A file that is gone is named too, if its mark is still there.
    """
    file = path / FILE if path.is_dir() else path
    return file if file.name == FILE and (file.exists() or file.with_name(MARK).exists()) else None


class Redriven(NamedTuple):
    """What came of a replay: the header is the last chapter's; `missing`: entries that a repair could not save."""

    header: Header
    replayed: Replayed
    missing: tuple[str, ...]


def replay_store(file: Path) -> Redriven:
    """Read all that the service would read, and re-drive the core from every chapter.

    Raises ReplayError where an action differs, JournalError for what is damaged.
    """
    with _opened(file) as (db, chapters):
        _check_rows(db, file)
        ends = [later[1] for _, later in pairwise(chapters)] + [1 << 62]
        lines = [_Chapter(db, header, first, end) for (header, first), end in zip(chapters, ends, strict=True)]
        done = [each.replay(file) for each in lines]
    missing = tuple(each.gap for each in lines if each.gap)
    return Redriven(read_header(chapters[-1][0]), Replayed(*map(sum, zip(*done, strict=True))), missing)


def last_chapter(file: Path) -> Iterator[str]:
    """The lines of the last chapter, as a journal that is interrupted here: the service goes on, or will."""
    with _opened(file) as (db, chapters):
        header, first = chapters[-1]
        yield header
        for (document,) in db.execute("SELECT document FROM entries WHERE number >= ? ORDER BY number", (first,)):
            yield document
    yield json.dumps({"end": INTERRUPTED})


@contextmanager
def _opened(file: Path) -> Iterator[tuple[sqlite3.Connection, list[tuple[str, int]]]]:
    """The store, for reading, and header and first entry of each chapter; one of an earlier version as it would be now."""
    reached = marked(file.parent)
    if not file.exists():
        refuse_shorter(Reached(0, 0), reached, file)
        raise RequestError(f"{file}: nothing has happened yet")
    try:
        with closing(copied(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True), file)) as db:
            check_mark(db, reached, file)
            if version_of(db, file) == 0:
                raise RequestError(f"{file}: nothing has happened yet")
            chapters = [_chapter(*row, file=file) for row in db.execute(_CHAPTERS)]
            if not chapters:
                raise RequestError(f"{file}: nothing has happened yet")
            yield db, chapters
    except UNREADABLE as error:
        raise JournalError(f"{file}: cannot be read: {said_of(error)}; {remedy(file.parent)}") from None


def _chapter(header: str, asked: str, first: int, sum_: int, *, file: Path) -> tuple[str, int]:
    if sum_of(first, header, asked) != sum_:
        raise JournalError(f"{file}: damaged: the header of the chapter of entry {first:,}; {remedy(file.parent)}")
    return header, first


def _check_rows(db: sqlite3.Connection, file: Path) -> None:
    """Jobs that have not ended, and the books of tenants."""
    for row in unended_rows(db):
        try:
            read_row(row)
        except DamagedRowError as error:
            raise JournalError(f"{file}: job {row.id}: {error}; the service would set it aside") from None
    tenant_books(db, file)


@dataclass
class _Chapter:
    """Entries of one chapter. `gap`: what is to be said if some are missing."""

    db: sqlite3.Connection
    header: str
    first: int
    end: int
    gap: str = ""

    def replay(self, file: Path) -> tuple[int, int, int]:
        """How much was reproduced."""
        replayed = replay(core_of(read_header(self.header)), self._entries(file))
        return replayed.instants, replayed.events, replayed.actions

    def _entries(self, file: Path) -> Iterator[JournalEntry]:
        """Up to the first one that is missing."""
        awaited = self.first
        for written in written_entries(self.db, self.first, self.end):
            if written.is_damaged:
                raise JournalError(f"{file}: damaged: entry {written.number:,}; {remedy(file.parent)}")
            if written.number != awaited:
                self.gap = f"entry {awaited:,} is missing; what followed in its chapter was not replayed"
                return
            yield read_entry(written.document)
            awaited += 1
