"""The journal of a live service, for verbs that study journals."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from poise.engine.journal_file import NAME


@contextmanager
def as_journal(path: Path) -> Iterator[Path]:
    """A file or directory as it is; of a service's state directory, its last chapter as a journal file."""
    from poise.server.replaying import last_chapter, store_of  # most journals are none of a service

    store = store_of(path)
    if store is None:
        yield path
        return
    with TemporaryDirectory(prefix="poise-") as folder:
        file = Path(folder) / NAME
        with file.open("w") as stream:
            stream.writelines(f"{line}\n" for line in last_chapter(store))
        yield file
