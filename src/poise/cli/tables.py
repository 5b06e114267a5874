"""Tables that a person likes to read."""

from collections.abc import Sequence
from math import inf

import click
from rich.box import SIMPLE
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from poise.report.page import Table

_EDGE, _BETWEEN = 1, 3
"""Characters that a table takes besides its cells: in all, and with every column."""
_PROSE = 40
"""Characters of a cell that may be broken into lines; names of rows are not."""


def console() -> Console:
    """Standard output, wide enough for a table even where it is no terminal."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=160)


def show_table(table: Table, title: str) -> None:
    """A table with a title. Words are set to the left and numbers to the right; the best of a column is bold.

    Where a terminal is too narrow for all columns, they come in parts that each begin with the names of the rows: no
    number is ever cut off.
    """
    click.echo(title)
    screen = console()
    lengths = [max(map(cell_len, column)) for column in zip(table.columns, *table.rows, strict=True)]
    for part in _parts(lengths, table.names, screen.width if screen.is_terminal else inf):
        screen.width = max(screen.width, _width(lengths, part))
        screen.print(_part(table, lengths, part))


def _parts(lengths: Sequence[int], names: int, width: float) -> list[list[int]]:
    """Columns, the first `names` of them in every part, so that each part is within the width if that can be."""
    parts = [list(range(names))]
    for column in range(names, len(lengths)):
        if _width(lengths, (*parts[-1], column)) > width and len(parts[-1]) > names:
            parts.append(list(range(names)))
        parts[-1].append(column)
    return parts


def _width(lengths: Sequence[int], columns: Sequence[int]) -> int:
    """Characters that these columns need side by side; what is longer than numbers are can be broken into lines."""
    return _EDGE + sum((lengths[column] if column == 0 else min(lengths[column], _PROSE)) + _BETWEEN for column in columns)


def _part(table: Table, lengths: Sequence[int], columns: Sequence[int]) -> RichTable:
    shown = RichTable(box=SIMPLE)
    for column in columns:
        heading, is_whole = escape(table.columns[column]), column == 0 or lengths[column] <= _PROSE
        shown.add_column(heading, justify="left" if table.holds_words(column) else "right", no_wrap=is_whole)
    for row, cells in enumerate(table.rows):
        texts = ((escape(cells[column]), (row, column) in table.best) for column in columns)
        shown.add_row(*(f"[bold]{text}[/bold]" if is_best else text for text, is_best in texts))
    return shown


def show_notes(notes: Sequence[str], *, quiet: bool) -> None:
    """What a reader left out or assumed."""
    if not quiet:
        for note in notes:
            click.echo(f"note: {note}", err=True)
