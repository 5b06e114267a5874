"""What commands print: tables and notes; a progress bar that Ctrl-C ends cleanly."""

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import inf
from pathlib import Path
from types import FrameType

import click
from rich.box import SIMPLE
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from poise.lab.progress import Bar
from poise.lab.report.page import HtmlTable

_EDGE, _BETWEEN = 1, 3
"""Characters that a table takes besides its cells: in all, and per column."""
_PROSE = 40
"""Characters up to which a cell is kept in one line; the names of rows always are."""


def show_notes(notes: Sequence[str], *, quiet: bool = False) -> None:
    """Print what was assumed, left out or has no effect."""
    if not quiet:
        for note in notes:
            click.echo(f"note: {note}", err=True)


def console() -> Console:
    """Standard output, wide enough for a table even if it is no terminal."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=160)


def show_table(table: HtmlTable, title: str) -> None:
    """Print a table with a title. Words are aligned left and numbers right; the best of a column is bold.

    If a terminal is too narrow for all columns, they come in parts that each begin with the names of the rows: no number
    is ever cut off.
    """
    click.echo(title)
    screen = console()
    lengths = [max(map(cell_len, column)) for column in zip(table.columns, *table.rows, strict=True)]
    parts = [list(range(table.names))]
    width = screen.width if screen.is_terminal else inf
    for column in range(table.names, len(lengths)):
        if _width(lengths, (*parts[-1], column)) > width and len(parts[-1]) > table.names:
            parts.append(list(range(table.names)))
        parts[-1].append(column)
    for part in parts:
        shown = RichTable(box=SIMPLE)
        for column in part:
            heading, is_whole = escape(table.columns[column]), column == 0 or lengths[column] <= _PROSE
            shown.add_column(heading, justify="left" if table.holds_words(column) else "right", no_wrap=is_whole)
        for row, cells in enumerate(table.rows):
            texts = ((escape(cells[column]), (row, column) in table.best) for column in part)
            shown.add_row(*(f"[bold]{text}[/bold]" if is_best else text for text, is_best in texts))
        screen.width = max(screen.width, _width(lengths, part))
        screen.print(shown)


def _width(lengths: Sequence[int], columns: Sequence[int]) -> int:
    """Characters that these columns need side by side, prose broken into lines."""
    return _EDGE + sum((lengths[column] if column == 0 else min(lengths[column], _PROSE)) + _BETWEEN for column in columns)


# Progress on stderr for work that takes more than a second, and a clean stop on Ctrl-C.

EVERY = 512
"""Calls of a watch between two looks at the clock."""


class Watch:
    """Is called by a simulation with the number of ended jobs; returns whether to go on."""

    def __init__(self, bar: Bar) -> None:
        self.interrupted = False
        self._bar = bar
        self._calls = 0

    def __call__(self, ended: int) -> bool:
        """Whether to go on. Called very often, so that the bar is updated only now and then."""
        self._calls += 1
        if self._calls % EVERY == 0:
            self._bar.update(ended)
        return not self.interrupted

    def show(self, ended: int) -> None:
        """Update the bar now: for work that reports seldom."""
        self._bar.update(ended)


@contextmanager
def watching(title: str, total: int, *, quiet: bool) -> Iterator[Watch]:
    """A watch under which Ctrl-C stops the run between two decisions; a second Ctrl-C stops at once."""

    def stop(_signal: int, _frame: FrameType | None) -> None:
        if watch.interrupted:
            raise KeyboardInterrupt
        watch.interrupted = True

    with Bar(title, total, quiet=quiet) as bar:
        watch = Watch(bar)
        before = signal.signal(signal.SIGINT, stop)
        try:
            yield watch
        finally:
            signal.signal(signal.SIGINT, before)


def check_report(path: Path | None, *, force: bool, quiet: bool) -> None:
    """Check the file of --html, and say if it is replaced."""
    from poise.lab.output_files import OutputKind, check_file  # verbs of a live service print tables, and write no files

    show_notes(check_file("--html", path, OutputKind.REPORT, force=force), quiet=quiet)
