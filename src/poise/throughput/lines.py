"""Lines of a small CSV file, each with its place, so that a wrong cell is refused by file, line and field."""

import csv
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from poise.model.errors import ThroughputError, Where
from poise.model.speed import Locality

LEAST_RATE, MOST_RATE = 1e-9, 1e15
MOST_GPUS = 1_000_000
RATE = f"0 or a number from {LEAST_RATE:g} to {MOST_RATE:g}"
_LEVELS = {level.name.lower(): level for level in Locality}


def is_rate(rate: float) -> bool:
    """Whether a speed can be meant: 0 or within bounds that no product of ours overflows."""
    return rate == 0 or LEAST_RATE <= rate <= MOST_RATE


def shown(value: object) -> str:
    """What stands there, on one line and not too long to read."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


@dataclass(frozen=True, slots=True)
class Line:
    """The cells of one line, by column; a column that the file does not have reads as empty."""

    file: str
    number: int
    cells: Mapping[str, str]

    def text(self, column: str) -> str:
        """The cell without surrounding spaces."""
        return self.cells.get(column, "")

    def refuse(self, column: str, expected: str) -> NoReturn:
        """Raise the error that names this cell and what it should have held."""
        got = shown(self.text(column)) if self.text(column) else "nothing"
        raise ThroughputError(f"{Where(self.file, self.number, column)}: expected {expected}, got {got}")

    def count(self, column: str, most: int = MOST_GPUS) -> int:
        """A whole number of at least 1."""
        text = self.text(column)
        number = int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else 0
        if not 1 <= number <= most:
            self.refuse(column, f"a whole number from 1 to {most:,}")
        return number

    def number_above_zero(self, column: str) -> float:
        """A finite number above 0."""
        number = self._float(column)
        if not (math.isfinite(number) and number > 0):
            self.refuse(column, "a finite number above 0")
        return number

    def rate(self, column: str) -> float:
        """Steps per second."""
        rate = self._float(column)
        if not is_rate(rate):
            self.refuse(column, f"steps per second: {RATE}")
        return abs(rate)

    def locality(self, column: str) -> Locality:
        """One of packed, rack, cluster."""
        level = _LEVELS.get(self.text(column).lower())
        if level is None:
            self.refuse(column, f"one of {', '.join(_LEVELS)}")
        return level

    def _float(self, column: str) -> float:
        text = self.text(column)
        try:
            return math.nan if "_" in text else float(text)
        except ValueError:
            return math.nan


def lines(text: str, file: str, required: Sequence[str], optional: Sequence[str] = ()) -> Iterator[Line]:
    """The lines below the header. Comments (`#`) and empty lines are skipped; columns may come in any order."""
    reader = csv.reader(_without_comments(io.StringIO(text, newline="")), strict=True)
    header: list[str] | None = None
    try:
        for cells in reader:
            stripped = [cell.strip() for cell in cells]
            if not any(stripped):
                continue
            if header is None:
                header = _header(stripped, Where(file, reader.line_num, "header"), required, optional)
            elif len(stripped) != len(header):
                where = Where(file, reader.line_num)
                raise ThroughputError(f"{where}: expected {len(header)} fields as in the header, got {len(stripped)}")
            else:
                yield Line(file, reader.line_num, dict(zip(header, stripped, strict=True)))
    except csv.Error as error:
        raise ThroughputError(f"{Where(file, reader.line_num)}: expected a line of CSV: {error}") from None
    if header is None:
        raise ThroughputError(f"{Where(file)}: expected a header {','.join(required)}, got an empty file")


def _without_comments(source: Iterable[str]) -> Iterator[str]:
    """Comments become empty lines, so that the lines after them keep their numbers."""
    return ("\n" if line.startswith("#") else line for line in source)


def _header(names: list[str], where: Where, required: Sequence[str], optional: Sequence[str]) -> list[str]:
    header = [name.lower() for name in names]
    missing = [name for name in required if name not in header]
    if missing:
        raise ThroughputError(f"{where}: expected the column {missing[0]!r}, got {shown(','.join(names))}")
    for index, name in enumerate(header):
        if name not in (*required, *optional):
            raise ThroughputError(f"{where}: unknown column {shown(name)}; known: {', '.join((*required, *optional))}")
        if name in header[:index]:
            raise ThroughputError(f"{where}: the column {name!r} stands there twice")
    return header
