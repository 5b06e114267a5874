"""The journal of a live service, handed to the core again: also while the service runs."""

import sqlite3
from contextlib import closing
from itertools import pairwise
from pathlib import Path

from poise.engine.journal import Header, read_entry, read_header
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
    try:
        with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)) as db:
            chapters = list(db.execute("SELECT header, first FROM chapters ORDER BY number"))
            if not chapters:
                raise RequestError(f"{file}: nothing has happened yet")
            ends = [later[1] for _, later in pairwise(chapters)] + [1 << 62]
            done = [_chapter(db, header, first, end) for (header, first), end in zip(chapters, ends, strict=True)]
    except sqlite3.Error as error:
        raise JournalError(f"{file}: cannot be read: {error}") from None
    return read_header(chapters[-1][0]), Replayed(*map(sum, zip(*done, strict=True)))


def _chapter(db: sqlite3.Connection, header: str, first: int, end: int) -> tuple[int, int, int]:
    rows = db.execute("SELECT document FROM entries WHERE number >= ? AND number < ? ORDER BY number", (first, end))
    replayed = replay(core_of(read_header(header)), (read_entry(document) for (document,) in rows))
    return replayed.instants, replayed.events, replayed.actions
