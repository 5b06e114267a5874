"""Journals in files: written as a run goes on, read one instant after the other."""

import gzip
import zlib
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path
from typing import IO, Any

from poise.engine.journal import (
    COMPLETE,
    INTERRUPTED,
    MALFORMED,
    VERSION,
    Header,
    end_line,
    entry_line,
    entry_of,
    header_line,
    header_of,
    known_entry_of,
    known_header_of,
    parsed,
)
from poise.engine.journal_steps import entry_from
from poise.model.errors import JournalError, RequestError
from poise.model.journal import Entry

NAME = "journal.jsonl"
"""What a journal is called in a directory that a run wrote."""
MOST_HEADER = 1 << 26
"""Characters of a first line: a million nodes have room in it, and a file of another kind does not fill the memory."""


class JournalWriter:
    """Writes a journal to a text stream as it happens."""

    def __init__(self, stream: IO[str], header: Header) -> None:
        self._stream = stream
        self._stream.write(header_line(header) + "\n")

    def record(self, entry: Entry) -> None:
        """One instant."""
        self._stream.write(entry_line(entry) + "\n")

    def close(self, end: str) -> None:
        """The last line."""
        self._stream.write(end_line(end) + "\n")


class JournalReader:
    """Reads a journal from a file or from the directory that `--out` wrote: its header at once, its entries one by one.

    newer   of a journal in a version that is not known yet: what to say of that; None in all others
    """

    def __init__(self, path: str | Path) -> None:
        file = Path(path)
        self._path = file / NAME if file.is_dir() else file
        self._lines = self._numbered()
        self._number, first = next(self._lines)
        document = self._parsed(first) if first.startswith("{") else None
        if not isinstance(document, dict) or "journal" not in document:
            raise RequestError(f"{self._path}: not a journal: its first line is no header")
        self._version = document["journal"]
        self.newer = self._is_newer()
        self._skipped = 0
        try:
            self.header = known_header_of(document) if self.newer else header_of(document)
        except MALFORMED as error:
            raise JournalError(self.newer or f"{self._path}:1: not a header of a journal: {error}") from None

    def _is_newer(self) -> str | None:
        version = self._version
        problem = f"{self._path}: written in journal version {version!r}; this Poise reads version {VERSION}"
        if not isinstance(version, int) or isinstance(version, bool) or version < 1:
            raise JournalError(problem)
        return problem if version > VERSION else None

    def entries(self) -> Iterator[Entry]:
        """All instants; raises JournalError where the journal is damaged or cut off, after what could be read.

        Of a newer journal, facts and wishes that are not known here are left out; in the end it raises for that.
        """
        last = -inf
        for number, line in self._lines:
            self._number = number
            document = self._parsed(line)
            if isinstance(document, dict) and document.get("end") in (COMPLETE, INTERRUPTED):
                if next(self._lines, None) is not None:
                    raise JournalError(f"{self._path}:{self._number + 1}: something follows the end of the journal")
                if self.newer:
                    raise JournalError(
                        f"{self.newer}; {self._skipped:,} facts and wishes that it does not know are left out"
                    )
                return
            try:
                entry = self._read(document, last)
            except MALFORMED as error:
                raise JournalError(f"{self._path}:{self._number}: not an instant of a journal: {error}") from None
            last = entry.now
            yield entry
        raise JournalError(f"{self._path}:{self._number}: cut off here: the last line of a journal is missing")

    def feed(self, take: Callable[[Entry], None]) -> JournalError | None:
        """Hand over every instant that can be read, one by one; what there is to say if those are not all of them."""
        try:
            for entry in self.entries():
                take(entry)
        except JournalError as problem:
            return problem
        except (KeyError, IndexError) as error:
            return JournalError(f"{self._path}:{self._number}: names a job or a node that is not there: {error}")
        return None

    def _read(self, document: Any, last: float) -> Entry:  # noqa: ANN401
        if self.newer is None:
            return entry_of(document if self._version == VERSION else entry_from(self._version, document), last)
        entry, skipped = known_entry_of(document, last)
        self._skipped += skipped
        return entry

    def _parsed(self, line: str) -> Any:  # noqa: ANN401
        try:
            return parsed(line)
        except (ValueError, RecursionError):
            raise JournalError(f"{self._path}:{self._number}: not JSON") from None

    def _numbered(self) -> Iterator[tuple[int, str]]:
        number = 0
        try:
            packed = self._path.suffix == ".gz"
            with gzip.open(self._path, "rb") if packed else self._path.open("rb") as stream:
                number, first = 1, stream.readline(MOST_HEADER)
                yield 1, self._text(1, first)
                for number, line in enumerate(stream, start=2):
                    yield number, self._text(number, line)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
            raise RequestError(f"{self._path}: cannot be read: {error.strerror}") from None
        except EOFError:
            raise JournalError(f"{self._path}: cut off: the end of its compressed data is missing") from None
        except (gzip.BadGzipFile, zlib.error):
            if not number:
                raise RequestError(f"{self._path}: not a journal: expected gzip-compressed data, as its name says") from None
            raise JournalError(f"{self._path}: damaged: its compressed data cannot be unpacked") from None
        except OSError as error:
            raise JournalError(f"{self._path}: cannot be read: {error.strerror or error}") from None

    def _text(self, number: int, line: bytes) -> str:
        """A line as text. What is no text from its first line on is another kind of file, not a damaged journal."""
        try:
            return line.decode("utf-8")
        except UnicodeDecodeError:
            if number == 1:
                raise RequestError(f"{self._path}: not a journal: its first line is no text") from None
            raise JournalError(f"{self._path}:{number}: damaged: not UTF-8 text") from None
