"""`Table`: columns of equal length, for results that people look at and hand to other tools.

It needs nothing but numpy. pandas, Polars and pyarrow are imported where a table is turned into one of theirs; a missing one
is one line that says what to install.
"""

import csv
import html
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from os import PathLike
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np
from numpy.typing import NDArray

from poise.lab.arguments import file_of, items_of, refused
from poise.scheduler.model.errors import RequestError, UnknownNameError

if TYPE_CHECKING:
    import pandas
    import polars
    import pyarrow

Column = NDArray[Any] | list[Any]
"""Numbers as an array, with NaN where there is none; anything else as a list, with None."""
SHOWN = 8
"""Rows that the text of a table shows; in notebooks twice as many."""
_LONGEST = 24


class MissingPackageError(RequestError, ImportError):
    """A package that something optional needs is not installed."""


def required(module: str, package: str, what: str) -> Any:  # noqa: ANN401 - the module
    """Import an optional module, or say in one line what needs it and how to get it."""
    try:
        return import_module(module)
    except ImportError as error:
        if error.name is not None and error.name.partition(".")[0] != module.partition(".")[0]:
            raise
        raise MissingPackageError(f"{what} needs {package}; install it with: pip install {package}") from None


class Table:
    """Columns by name, all of one length: `table["jct"]`. Its length is the number of rows, and so it iterates over them."""

    __slots__ = ("_columns", "_rows")

    def __init__(self, columns: Mapping[str, Iterable[Any]]) -> None:
        if not isinstance(columns, Mapping):
            raise refused("columns", "a mapping of names to columns", columns)
        self._columns: dict[str, Column] = {name: _checked(name, values) for name, values in columns.items()}
        lengths = {len(values) for values in self._columns.values()}
        if len(lengths) > 1:
            raise RequestError(f"expected columns of one length, got {', '.join(map(str, sorted(lengths)))}")
        self._rows = lengths.pop() if lengths else 0

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns, in order."""
        return tuple(self._columns)

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401 - an array or a list
        try:
            return self._columns[name]
        except (KeyError, TypeError):
            raise UnknownKeyError("column", str(name), self._columns) from None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows())

    def __len__(self) -> int:
        return self._rows

    def __bool__(self) -> bool:
        return self._rows > 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Table):
            return NotImplemented
        return self.columns == other.columns and self.rows() == other.rows()

    __hash__ = None  # type: ignore[assignment]  # columns can be changed

    def rows(self) -> list[dict[str, Any]]:
        """Return one mapping per row, of plain Python values; None where there is no value."""
        values = [_plain(column) for column in self._columns.values()]
        return [dict(zip(self._columns, row, strict=True)) for row in zip(*values, strict=True)]

    def select(self, *names: str) -> "Table":
        """Return the table with these columns alone, in this order."""
        return Table({name: self[name] for name in names})

    def where(self, keep: Callable[[dict[str, Any]], bool]) -> "Table":
        """Return the rows of which `keep(row)` is true."""
        if not callable(keep):
            raise refused("keep", "a function of a row", keep)
        return self._taken([place for place, row in enumerate(self.rows()) if keep(row)])

    def _taken(self, places: Sequence[int]) -> "Table":
        found: dict[str, Column] = {}
        for name, column in self._columns.items():
            found[name] = column[list(places)] if isinstance(column, np.ndarray) else [column[place] for place in places]
        return Table(found)

    def to_pandas(self) -> "pandas.DataFrame":
        """Return a pandas.DataFrame."""
        pandas = required("pandas", "pandas", "to_pandas()")
        return pandas.DataFrame(dict(self._columns), columns=list(self._columns))

    def to_polars(self) -> "polars.DataFrame":
        """Return a polars.DataFrame; a number that is not there is null."""
        polars = required("polars", "polars", "to_polars()")
        texts = {name: polars.String for name, values in self._columns.items() if _has_no_value(values)}
        return polars.DataFrame(dict(self._columns), schema_overrides=texts, nan_to_null=True, strict=False)  # type: ignore[no-any-return]

    def to_arrow(self) -> "pyarrow.Table":
        """Return a pyarrow.Table; a number that is not there is null."""
        arrow = required("pyarrow", "pyarrow", "to_arrow()")
        arrays = [
            arrow.array(values, type=arrow.string() if _has_no_value(values) else None, from_pandas=True)
            for values in self._columns.values()
        ]
        return arrow.table(arrays, names=list(self._columns))

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """Hand the table to any library that reads Arrow streams; needs pyarrow."""
        return self.to_arrow().__arrow_c_stream__(requested_schema)

    def write(self, path: str | PathLike[str]) -> None:
        """Write a file, by its ending: .csv, .json (a list of objects) or .parquet (needs pyarrow)."""
        target = file_of(path)
        if target.suffix == ".parquet":
            required("pyarrow.parquet", "pyarrow", "writing .parquet").write_table(self.to_arrow(), target)
        elif target.suffix in (".csv", ".json"):
            with target.open("w", encoding="utf-8", newline="") as stream:
                (self.write_csv if target.suffix == ".csv" else self.write_json)(stream)
        else:
            raise RequestError(f"{target}: expected a file that ends in .csv, .json or .parquet")

    def write_csv(self, stream: TextIO) -> None:
        """Write a header and one line per row; nothing stands where there is no value."""
        writer = csv.DictWriter(stream, self.columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows())

    def write_json(self, stream: TextIO) -> None:
        """Write a list with one object per row."""
        json.dump(self.rows(), stream, allow_nan=False, indent=1)

    def __repr__(self) -> str:
        size = f"{self._rows:,} rows × {len(self._columns)} columns"
        shown = self._shown(SHOWN)
        names = list(self._columns)
        widths = [max(map(len, column)) for column in zip(names, *shown, strict=True)]
        lines: list[str] = []
        begin = 0
        while begin < len(names):  # as many columns side by side as fit into a line
            end, room = begin, 100
            while end < len(names) and (end == begin or room >= widths[end]):
                room -= widths[end] + 2
                end += 1
            lines += [
                "  ".join(
                    cell.rjust(width) for cell, width in zip(cells[begin:end], widths[begin:end], strict=True)
                ).rstrip()
                for cells in (names, *shown)
            ]
            begin = end
            if begin < len(names):
                lines.append("")
        return "\n".join([*lines, f"[{size}]"])

    def _repr_html_(self) -> str:
        def row(cells: Iterable[str], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

        body = "".join(row(cells, "td") for cells in self._shown(2 * SHOWN))
        size = f"<p>{self._rows:,} rows × {len(self._columns)} columns</p>"
        return f"<table><thead>{row(self._columns, 'th')}</thead><tbody>{body}</tbody></table>{size}"

    def _shown(self, most: int) -> list[list[str]]:
        """The cells of the first rows as text, and of the last ones where there are more than `most`."""
        places = list(range(self._rows))
        if self._rows > most:
            places = [*places[: most // 2], *places[-(most // 2) :]]
        cells = [[_cell(row[name]) for name in self._columns] for row in self._taken(places).rows()]
        if self._rows > most:
            cells.insert(most // 2, ["…"] * len(self._columns))
        return cells


class UnknownKeyError(UnknownNameError, KeyError):
    """A column or key that is not there."""

    __str__ = Exception.__str__  # a KeyError would quote the message


def _has_no_value(column: Column) -> bool:
    """Say whether a list holds no value: it is one of texts, and no library could tell."""
    return isinstance(column, list) and all(value is None for value in column)


def _checked(name: str, values: object) -> Column:
    if isinstance(values, np.ndarray) and values.ndim == 1:
        return values
    items = items_of(values)
    if items is None:
        raise refused("columns", f"several values in {name!r:.60}", values)
    return list(items)


def _plain(column: Column) -> list[Any]:
    if not isinstance(column, np.ndarray):
        return column
    values: list[Any] = column.tolist()
    if column.dtype.kind == "f" and not np.isfinite(column).all():
        return [value if known else None for value, known in zip(values, np.isfinite(column), strict=True)]
    return values


def _cell(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1e5 else f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.1f}"
    text = str(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
