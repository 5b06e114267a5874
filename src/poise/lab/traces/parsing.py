"""What the readers of all formats share: a `TraceInput`, and how to take fields, rows and JSON objects from it.

A reader takes records from its input (`csv_rows`, `tsv_rows`, `objects`) and makes a job of each with the checks of
single values. A value that its column does not allow raises FieldError, which knows the field but not the place;
`TraceInput.jobs` knows the place and turns it into a TraceError. No input can make this use much memory or go on for
nothing: lines, objects, blanks and jobs are bounded.
"""

import codecs
import csv
import io
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from operator import itemgetter
from typing import Any, BinaryIO, TypeVar, cast

from poise.lab.traces.schema import TraceJob
from poise.scheduler.model.cluster import MOST_GPUS
from poise.scheduler.model.errors import TraceError, Where

MOST_JOBS = 10_000_000
MOST_BYTES = 1 << 20
"""Of one line, or of one JSON object."""
MOST_BLANK = 1000
"""Blank lines in a row."""

Line = tuple[int, str]
"""(number, text), numbered from 1."""
Cells = Sequence[str]
Record = dict[str, Any]
R = TypeVar("R")
V = TypeVar("V")


@dataclass(slots=True)
class TraceInput:
    """One file as every reader gets it.

    file     for messages
    stream   the unpacked bytes, not read yet
    prefix   goes before every job's id: `<file stem>/` where files are merged
    rows     records read before this one: the id of a job whose format has none
    tally    what was left out or assumed, and how often: for the notes of the trace
    """

    file: str
    stream: BinaryIO
    prefix: str = ""
    rows: int = 0
    tally: Counter[str] = field(default_factory=Counter)

    def is_json(self) -> bool:
        """Whether the input begins with a JSON object; what follows reads it from its beginning."""
        stream = io.BufferedReader(cast(io.RawIOBase, self.stream))
        self.stream = stream
        return stream.peek().removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"{")

    def lines(self) -> Iterator[Line]:
        """Return the lines that are not blank, each with its number."""
        return lines(self.stream, self.file)

    def objects(self) -> Iterator[tuple[int, Record]]:
        """Return the JSON objects, each with the line it starts on."""
        return objects(self.stream, self.file)

    def listed(self, key: str) -> Iterator[tuple[int, Record]]:
        """Return the objects in the lists of this key, each with the line it starts on."""
        return listed(self.stream, self.file, key)

    def count(self, what: str) -> None:
        """Count something that was left out or assumed."""
        self.tally[what] += 1

    def error(self, line: int, field: str | None, problem: str) -> TraceError:
        """Return an error at this place of the file."""
        return TraceError(Where(self.file, line, field), problem)

    def jobs(self, records: Iterable[tuple[int, R]], parse: Callable[[R, "TraceInput"], TraceJob | None]) -> list[TraceJob]:
        """Return every record's job, in order. `parse` returns None for what it leaves out. Ids must be unique."""
        jobs: list[TraceJob] = []
        seen: dict[str, int] = {}
        for line, record in records:
            try:
                job = parse(record, self)
            except FieldError as refused:
                raise self.error(line, refused.field, refused.problem) from None
            self.rows += 1
            if job is None:
                continue
            name = job.job.id
            if name in seen:
                raise self.error(line, None, f"expected a new job id, got {shown(name)}, as on line {seen[name]}")
            seen[name] = line
            jobs.append(job)
            if len(jobs) > MOST_JOBS:
                raise self.error(line, None, f"expected at most {MOST_JOBS:,} jobs, got more")
        return jobs


# Single values. The good case does as little as it can: a hundred thousand rows come this way.

_SHOWN = 60
_INFINITY = math.inf
_EPOCH = datetime.fromisoformat("1970-01-01")


class FieldError(Exception):
    """A value that its field does not allow; `field` is None where it is the whole record that is wrong."""

    def __init__(self, field: str | None, problem: str) -> None:
        super().__init__(problem)
        self.field, self.problem = field, problem


def field_refusal(field: str | None, expected: str, got: object) -> FieldError:
    """Return the error that says what was expected and what was there instead."""
    return FieldError(field, f"expected {expected}, got {shown(got)}")


def shown(value: object) -> str:
    """Return a value for a message: quoted, on one line, and short."""
    if value is None or (isinstance(value, str) and not value):
        return "nothing"
    if isinstance(value, list | dict):  # which may be huge, or too deep to be written
        return "a list" if isinstance(value, list) else "an object"
    text = repr(value[: _SHOWN + 1] if isinstance(value, str) else value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def number(text: str, field: str, least: float = -sys.float_info.max, expected: str = "a finite number") -> float:
    """Return a finite number of at least `least`, written as text."""
    try:
        value = float(text)
    except ValueError:
        raise field_refusal(field, "a number", text) from None
    if not least <= value < _INFINITY or "_" in text or not text.isascii():
        raise field_refusal(field, expected, text)
    return value


def amount(text: str, field: str) -> float:
    """Return a finite number of at least 0, written as text: seconds or steps."""
    return number(text, field, 0.0, "a finite number of at least 0")


def positive(text: str, field: str) -> float:
    """Return a finite number above 0, written as text."""
    value = number(text, field)
    if value <= 0:
        raise field_refusal(field, "a number above 0", text)
    return value


def whole(text: str, field: str, least: int = 1, most: int = MOST_GPUS) -> int:
    """Return a whole number in [least, most], written as text; `4.0` is whole too. By default the size of a gang."""
    try:
        value = int(text)
    except ValueError:
        try:
            real = float(text)
        except ValueError:
            real = math.nan
        value = int(real) if math.isfinite(real) and real.is_integer() else least - 1
    if not least <= value <= most or "_" in text or not text.isascii():
        raise field_refusal(field, f"a whole number from {least:,} to {most:,}", text)
    return value


def label(text: str, field: str) -> str:
    """Return a name: at least one character, all of them printable."""
    if not text or not text.isprintable():
        raise field_refusal(field, "a name of printable characters", text)
    return text


def timestamp(text: str, field: str) -> float:
    """Return seconds since 1970-01-01 of a time such as `2017-10-09 07:01:55`; UTC unless it names its zone."""
    try:
        when = datetime.fromisoformat(text)
        seconds = when.timestamp() if when.tzinfo else (when - _EPOCH).total_seconds()
    except (ValueError, OverflowError):
        raise field_refusal(field, "a time such as 2017-10-09 07:01:55", text) from None
    if seconds < 0:
        raise field_refusal(field, "a time after 1970", text)
    return seconds


# Values of a JSON object, where null is the same as nothing.


def object_in(record: Record, key: str) -> Record:
    """Return the object of this key; an empty one where there is none."""
    value = record.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise field_refusal(key, "an object", value)
    return value


def objects_in(record: Record, key: str) -> list[Record]:
    """Return the list of objects of this key; an empty one where there is none."""
    value = record.get(key)
    if value is None:
        return []
    if not isinstance(value, list):
        raise field_refusal(key, "a list", value)
    for part in value:
        if not isinstance(part, dict):
            raise field_refusal(key, "a list of objects", part)
    return value


def text_in(record: Record, key: str) -> str:
    """Return the text of this key; an empty one where there is none."""
    value = record.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise field_refusal(key, "text", value)
    return value


# Lines and rows.


def lines(stream: BinaryIO, file: str) -> Iterator[Line]:
    """Yield lines that are not blank, without their ends. UTF-8, with or without a byte-order mark."""
    blank = 0
    for number, raw in enumerate(iter(partial(stream.readline, MOST_BYTES + 1), b""), 1):
        if len(raw) > MOST_BYTES:
            raise TraceError(Where(file, number), f"expected lines of at most {MOST_BYTES:,} bytes, got a longer one")
        try:
            text = raw.decode().rstrip("\r\n")
        except UnicodeDecodeError as problem:
            raise not_text(file, number, problem) from None
        if number == 1:
            text = text.removeprefix("\ufeff")
        if text and not text.isspace():
            blank = 0
            yield number, text
            continue
        blank += 1
        if blank > MOST_BLANK:
            raise TraceError(Where(file, number), f"expected jobs, got more than {MOST_BLANK:,} blank lines in a row")


def not_text(file: str, line: int, problem: UnicodeDecodeError) -> TraceError:
    """Return the error for bytes that are no UTF-8 text."""
    byte = problem.object[problem.start]
    return TraceError(Where(file, line), f"expected UTF-8 text, got the byte 0x{byte:02x}")


def split_csv(text: str) -> list[str]:
    """Return the cells of one line of CSV; a quoted cell ends on the line on which it began. ValueError if it does not."""
    if '"' not in text:
        return text.split(",")
    try:
        return next(csv.reader([text], strict=True))
    except csv.Error as problem:
        raise ValueError(str(problem)) from None


def split_header(text: str) -> list[str]:
    """Return the column names of a CSV header; empty if it is none."""
    try:
        return [cell.strip() for cell in split_csv(text)]
    except ValueError:
        return []


def csv_rows(rows: Iterator[Line], file: str, *choices: Sequence[str]) -> Iterator[tuple[int, Cells]]:
    """Yield just these columns, in this order, of every row below a header that has them in any order.

    Of several choices of columns the first that the header has counts; the last is the one that a message asks for.
    """
    number, text = next(rows, (1, ""))
    header = split_header(text)
    columns = next((each for each in choices if all(header.count(name) == 1 for name in each)), None)
    if columns is None:
        wanted = ", ".join(choices[-1])
        raise TraceError(Where(file, number), f"expected a header with the columns {wanted}, got {shown(text)}")
    pick = itemgetter(*map(header.index, columns))
    for number, cells in csv_cells(rows, file, len(header)):
        yield number, pick(cells)


def csv_cells(rows: Iterator[Line], file: str, width: int) -> Iterator[tuple[int, list[str]]]:
    """Yield the cells of every row, which must be `width` of them."""
    for number, text in rows:
        try:
            cells = text.split(",") if '"' not in text else split_csv(text)
        except ValueError as problem:
            raise TraceError(Where(file, number), f"expected CSV, got {shown(text)} ({problem})") from None
        if len(cells) != width:
            raise TraceError(Where(file, number), f"expected {width} cells, as in the header, got {len(cells)}")
        yield number, cells


def tsv_rows(rows: Iterator[Line]) -> Iterator[tuple[int, Cells]]:
    """Yield the cells of every row of a file without header."""
    for number, text in rows:
        yield number, text.split("\t")


# JSON objects from a stream of bytes: a list of them, or one after another.

_CHUNK = 1 << 16
_BLANK = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()


def objects(stream: BinaryIO, file: str) -> Iterator[tuple[int, Record]]:
    """Yield every object with the line on which it starts. A list must be complete and nothing may follow it."""
    window = _Window(stream, file)
    if window.peek() != "[":
        while window.peek():
            yield window.take_object()
        return
    yield from window.take_list()
    window.expect("", "nothing after the end of the list")


def listed(stream: BinaryIO, file: str, key: str) -> Iterator[tuple[int, Record]]:
    """Yield the objects in the list `key` of every object of the file, with their lines; an object without it, itself.

    Objects may stand one after another. What they hold beside the list is skipped.
    """
    window = _Window(stream, file)
    while window.peek():
        yield from _members(window, key)


def _members(window: "_Window", key: str) -> Iterator[tuple[int, Record]]:
    window.expect("{", "a JSON object")
    line, beside, found = window.line, {}, False
    begun = window.taken
    more = window.peek() != "}"
    while more:
        name = window.take_value("a name", str)
        window.expect(":", "a colon")
        if name == key and window.peek() == "[":
            found = True
            yield from window.take_list()
            begun = window.taken
        else:
            beside[name] = window.take_value("a JSON value", object)
            window.check_length(begun)
        more = window.peek() == ","
        if more:
            window.skip()
    window.expect("}", "a comma or the end of the object")
    if not found:
        yield line, beside


def parse_object(text: str) -> Record:
    """Return the one object that this text is; ValueError says what it is instead."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None
    except json.JSONDecodeError as problem:
        raise ValueError(f"{shown(text)} ({problem.msg} at column {problem.colno})") from None
    except ValueError:
        raise ValueError(f"{shown(text)} with a number of too many digits") from None
    if not isinstance(value, dict):
        raise ValueError(shown(text))  # noqa: TRY004  a wrong value of the input, not a wrong type of ours
    return value


class _Window:
    """The unread text that is in memory, the number of the line on which it starts, and how many characters were taken.

    A list is never held as one document: the window is at most about two objects long.
    """

    def __init__(self, stream: BinaryIO, file: str) -> None:
        self._stream, self._file = stream, file
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._text, self._at, self.line, self.taken = "", 0, 1, 0

    def peek(self) -> str:
        """Return the next character that is not blank without taking it; empty at the end."""
        skipped = 0
        while True:
            match = _BLANK.match(self._text, self._at)
            end = self._at if match is None else match.end()
            skipped += end - self._at
            self._advance(end)
            if end < len(self._text):
                return self._text[end]
            if skipped > MOST_BYTES:
                raise self._error(f"expected jobs, got more than {MOST_BYTES:,} blank characters")
            if not self._more():
                return ""

    def skip(self) -> None:
        """Take the character that `peek` showed."""
        self._advance(self._at + 1)

    def expect(self, character: str, what: str) -> None:
        """Take this character, or stand at the end if it is empty."""
        got = self.peek()
        if got != character:
            raise self._error(f"expected {what}, got {shown(got) if got else 'the end of the file'}")
        self.skip()

    def take_list(self) -> Iterator[tuple[int, Record]]:
        """Yield the objects of the list that starts here, each with its line."""
        self.skip()
        if self.peek() != "]":
            yield self.take_object()
        while self.peek() == ",":
            self.skip()
            yield self.take_object()
        self.expect("]", "a comma or the end of the list")

    def take_object(self) -> tuple[int, Record]:
        """Return the object that starts here and its line; read no further than one may be long."""
        self.peek()
        line = self.line
        return line, self.take_value("a JSON object", dict)

    def take_value(self, expected: str, kind: type[V]) -> V:
        """Return the JSON value of this kind that starts here; read no further than one may be long."""
        start = self.peek()
        if not start or (kind is dict and start != "{") or (kind is str and start != '"'):
            raise self._error(f"expected {expected}, got {shown(self._text[self._at : self._at + 80])}")
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
                if end == len(self._text) and start not in '{["' and self._more():
                    continue  # a number may go on
            except json.JSONDecodeError as problem:
                # It may only be cut off: read on, unless it is too long or the file ends.
                if len(self._text) - self._at > MOST_BYTES:
                    raise self._too_long() from None
                if not self._more():
                    line = self.line + self._text.count("\n", self._at, problem.pos)
                    problem_here = f"expected a whole JSON object, got a broken one ({problem.msg})"
                    raise TraceError(Where(self._file, line), problem_here) from None
                continue
            except (RecursionError, ValueError):
                raise self._error("expected a JSON object, got one nested too deeply or a number too long") from None
            if end - self._at > MOST_BYTES:
                raise self._too_long()
            self._advance(end)
            return cast(V, value)

    def check_length(self, begun: int) -> None:
        """Raise unless what was taken since `taken` had this value is no longer than one object may be."""
        if self.taken - begun > MOST_BYTES:
            raise self._too_long()

    def _more(self) -> bool:
        """Read on, as much as is there already, so that an object is parsed few times; return False at the end."""
        rest = self._text[self._at :]
        chunk = self._stream.read(max(_CHUNK, len(rest)))
        try:
            text = self._decoder.decode(chunk, not chunk)
        except UnicodeDecodeError as problem:
            line = self.line + rest.count("\n") + problem.object.count(b"\n", 0, problem.start)
            raise not_text(self._file, line, problem) from None
        self._text, self._at = rest + text, 0
        return bool(chunk)

    def _advance(self, end: int) -> None:
        self.line += self._text.count("\n", self._at, end)
        self.taken += end - self._at
        self._at = end

    def _too_long(self) -> TraceError:
        return self._error(f"expected JSON objects of at most {MOST_BYTES:,} bytes, got a longer or a broken one")

    def _error(self, problem: str) -> TraceError:
        return TraceError(Where(self._file, self.line), problem)
