"""The journal of a live service, handed to the core again: also while the service runs."""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path

from poise.engine.journal import INTERRUPTED, Header, read_entry, read_header
from poise.engine.replay import Replayed, replay
from poise.model.errors import JournalError, RequestError
from poise.server.cores import core_of
from poise.server.store import FILE


def store_of(path: Path) -> Path | None:
    """The store that a path names: the file itself, or the state directory of a service; None if it names neither."""
    file = path / FILE if path.is_dir() else path
    return file if file.name == FILE and file.exists() else None


def replay_store(file: Path) -> tuple[Header, Replayed]:
    """Re-drive the core from every chapter; raises ReplayError where an action differs. The header is the last one's."""
    with _opened(file) as (db, chapters):
        ends = [later[1] for _, later in pairwise(chapters)] + [1 << 62]
        done = [_chapter(db, header, first, end) for (header, first), end in zip(chapters, ends, strict=True)]
    return read_header(chapters[-1][0]), Replayed(*map(sum, zip(*done, strict=True)))


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
    """The store, for reading, and header and first entry of each chapter."""
    try:
        with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)) as db:
            chapters = list(db.execute("SELECT header, first FROM chapters ORDER BY number"))
            if not chapters:
                raise RequestError(f"{file}: nothing has happened yet")
            yield db, chapters
    except sqlite3.Error as error:
        raise JournalError(f"{file}: cannot be read: {error}") from None


def _chapter(db: sqlite3.Connection, header: str, first: int, end: int) -> tuple[int, int, int]:
    rows = db.execute("SELECT document FROM entries WHERE number >= ? AND number < ? ORDER BY number", (first, end))
    replayed = replay(core_of(read_header(header)), (read_entry(document) for (document,) in rows))
    return replayed.instants, replayed.events, replayed.actions
