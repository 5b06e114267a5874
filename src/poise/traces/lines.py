"""Lines of text from a stream of bytes, with bounds: no input can make this use much memory, or go on for nothing."""

import csv
from collections.abc import Iterator, Sequence
from functools import partial
from operator import itemgetter
from typing import BinaryIO

from poise.model.errors import TraceError, Where
from poise.traces.fields import shown

MOST_BYTES = 1 << 20
"""Of one line, or of one JSON object."""
MOST_BLANK = 1000
"""Blank lines in a row."""

Line = tuple[int, str]
Cells = Sequence[str]


def lines(stream: BinaryIO, file: str) -> Iterator[Line]:
    """Lines that are not blank, numbered from 1, without their ends. UTF-8, with or without a byte-order mark."""
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
    """The error for bytes that are no UTF-8 text."""
    byte = problem.object[problem.start]
    return TraceError(Where(file, line), f"expected UTF-8 text, got the byte 0x{byte:02x}")


def split_csv(text: str) -> list[str]:
    """The cells of one line of CSV; a quoted cell ends on the line on which it began. ValueError if it does not."""
    if '"' not in text:
        return text.split(",")
    try:
        return next(csv.reader([text], strict=True))
    except csv.Error as problem:
        raise ValueError(str(problem)) from None


def split_header(text: str) -> list[str]:
    """The column names of a CSV header; empty if it is none."""
    try:
        return [cell.strip() for cell in split_csv(text)]
    except ValueError:
        return []


def csv_rows(rows: Iterator[Line], file: str, columns: Sequence[str]) -> Iterator[tuple[int, Cells]]:
    """The cells of just these columns, in this order, of every row below a header that has them in any order."""
    number, text = next(rows, (1, ""))
    header = split_header(text)
    for column in columns:
        if header.count(column) != 1:
            raise TraceError(
                Where(file, number), f"expected a header with the columns {', '.join(columns)}, got {shown(text)}"
            )
    pick = itemgetter(*map(header.index, columns))
    for number, cells in csv_cells(rows, file, len(header)):
        yield number, pick(cells)


def csv_cells(rows: Iterator[Line], file: str, width: int) -> Iterator[tuple[int, list[str]]]:
    """The cells of every row, which must be `width` of them."""
    for number, text in rows:
        try:
            cells = text.split(",") if '"' not in text else split_csv(text)
        except ValueError as problem:
            raise TraceError(Where(file, number), f"expected CSV, got {shown(text)} ({problem})") from None
        if len(cells) != width:
            raise TraceError(Where(file, number), f"expected {width} cells, as in the header, got {len(cells)}")
        yield number, cells


def tsv_rows(rows: Iterator[Line]) -> Iterator[tuple[int, Cells]]:
    """The cells of every row of a file without header."""
    for number, text in rows:
        yield number, text.split("\t")
