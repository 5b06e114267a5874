"""Replay of a service's journal, also while the service runs: all chapters are driven through the core again."""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from poise.engine.journal import INTERRUPTED, Header, read_entry, read_header
from poise.engine.loop import Replayed, replay
from poise.engine.outside import check_recorded
from poise.scheduler.model.action import JournalEntry
from poise.scheduler.model.errors import JournalError, RequestError
from poise.service.server.dependencies import core_of
from poise.service.server.storage import store
from poise.service.server.storage.damaged_jobs import DamagedRowError, read_record
from poise.service.server.storage.schema import (
    FILE,
    UNREADABLE,
    checksum,
    error_text,
    migrated_copy,
    version_of,
)
from poise.service.server.storage.sidecar import MARK, JournalEnd, read_mark
from poise.service.server.storage.store import remedy


class StoreReplay(NamedTuple):
    """Result of a replay; the header is the last chapter's; `missing`: entries that a repair could not save."""

    header: Header
    replayed: Replayed
    missing: tuple[str, ...]


def store_of(path: Path) -> Path | None:
    """The store that a path names: the file itself, or the state directory of a service; None if it names neither.

    A file that is gone counts too if its mark is still there.
    """
    file = path / FILE if path.is_dir() else path
    return file if file.name == FILE and (file.exists() or file.with_name(MARK).exists()) else None


def replay_store(file: Path) -> StoreReplay:
    """Read all that the service would read, and drive the core again from every chapter.

    Raises ReplayError where an action differs, JournalError for what is damaged.
    """
    with _opened(file) as (db, chapters):
        for row in store.unended_jobs(db):
            try:
                read_record(row)
            except DamagedRowError as error:
                raise JournalError(f"{file}: job {row.id}: {error}; the service would set it aside") from None
        store.tenant_totals(db, file)
        store.node_texts(db, file)
        missing: list[str] = []
        done: list[tuple[int, int, int]] = []
        ends = [later for _, (_, later) in pairwise(chapters)] + [1 << 62]
        for (header, first), end in zip(chapters, ends, strict=True):
            check_recorded(read_header(header).policy, str(file))
            found = replay(core_of(read_header(header)), _entries(db, file, first, end, missing))
            done.append((found.instants, found.events, found.actions))
    return StoreReplay(read_header(chapters[-1][0]), Replayed(*map(sum, zip(*done, strict=True))), tuple(missing))


def _entries(db: sqlite3.Connection, file: Path, first: int, end: int, missing: list[str]) -> Iterator[JournalEntry]:
    """Entries of one chapter, up to the first one that is missing, which is noted."""
    expected = first
    for entry in store.stored_entries(db, first, end):
        if entry.is_damaged:
            raise JournalError(f"{file}: damaged: entry {entry.number:,}; {remedy(file.parent)}")
        if entry.number != expected:
            missing.append(f"entry {expected:,} is missing; what followed in its chapter was not replayed")
            return
        yield read_entry(entry.document)
        expected += 1


def last_chapter(file: Path) -> Iterator[str]:
    """The lines of the last chapter, as a journal file that is interrupted here: the service goes on, or will."""
    with _opened(file) as (db, chapters):
        header, first = chapters[-1]
        yield header
        for (document,) in db.execute("SELECT document FROM entries WHERE number >= ? ORDER BY number", (first,)):
            yield document
    yield json.dumps({"end": INTERRUPTED})


@contextmanager
def _opened(file: Path) -> Iterator[tuple[sqlite3.Connection, list[tuple[str, int]]]]:
    """A store for reading, migrated in a copy if it is of an earlier version; header and first entry of each chapter."""
    mark = read_mark(file.parent)  # before the journal: a service that runs may commit in between
    nothing = RequestError(f"{file}: nothing has happened yet")
    if not file.exists():
        store.refuse_shorter(JournalEnd(0, 0), mark, file)
        raise nothing
    try:
        with closing(migrated_copy(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True), file)) as db:
            store.check_end(db, mark, file)
            if version_of(db, file) == 0:
                raise nothing
            chapters = []
            for header, asked, first, stored in db.execute("SELECT header, asked, first, sum FROM chapters ORDER BY number"):
                if checksum(first, header, asked) != stored:
                    problem = f"damaged: the header of the chapter of entry {first:,}"
                    raise JournalError(f"{file}: {problem}; {remedy(file.parent)}")
                chapters.append((header, first))
            if not chapters:
                raise nothing
            yield db, chapters
    except UNREADABLE as error:
        raise JournalError(f"{file}: cannot be read: {error_text(error)}; {remedy(file.parent)}") from None
