"""What commands print and write: tables and notes; a progress bar that Ctrl-C ends cleanly; files of results.

Where results go is checked before any work is done, so that no run is lost and nothing else is overwritten: what an earlier
run wrote is replaced, and a note says so; anything else that is in the way is left alone, unless --force is given.
"""

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from math import inf
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import Self

import click
from rich.box import SIMPLE
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table as RichTable

from poise.lab.report.page import GENERATOR, HtmlTable
from poise.scheduler.model.errors import RequestError

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

PATIENCE = 1.0
"""Seconds before a bar appears."""
EVERY = 512
"""Calls of a watch between two looks at the clock."""


class Bar:
    """A progress bar that appears once the work has taken a second. Nothing is drawn if stderr is no terminal."""

    def __init__(self, title: str, total: int, *, quiet: bool) -> None:
        self._progress = Progress(
            TextColumn(title),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=quiet or not sys.stderr.isatty(),
        )
        self._task = self._progress.add_task(title, total=total)
        self._shows_from = monotonic() + PATIENCE
        self._shown = False

    def update(self, done: int) -> None:
        """Show how much is done."""
        if not self._shown and monotonic() >= self._shows_from:
            self._progress.start()
            self._shown = True
        if self._shown:
            self._progress.update(self._task, completed=done)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._shown:
            self._progress.stop()


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


# Files of results.

COLUMNS = (
    "job", "tenant", "gpus", "submitted", "started", "finished", "jct", "rho", "preemptions",
    "gpu_seconds", "wait_fair_share", "wait_fragmentation", "wait_capacity", "status",
)  # fmt: skip
"""Columns of --per-job."""
_RECOGNISED = 4096
"""Bytes of a file by which its kind is recognised."""


class OutputKind(Enum):
    """Files that commands write, each with the bytes by which it is recognised."""

    REPORT = f'name="generator" content="{GENERATOR}"'.encode()
    ROWS_CSV = ",".join(COLUMNS[:6]).encode()
    ROWS_JSON = f'[\n {{\n  "{COLUMNS[0]}":'.encode()
    JOURNAL = b'{"journal":'


def check_writable(option: str, path: Path | None) -> None:
    """Refuse a file that cannot be written: its folder must be there, and allow it."""
    if path is None:
        return
    if not os.path.isdir(path.parent):
        raise RequestError(f"{option} {path}: there is no folder {path.parent}")
    if not os.access(path if os.path.exists(path) else path.parent, os.W_OK):
        raise RequestError(f"{option} {path}: cannot be written: permission denied")


def check_file(option: str, path: Path | None, kind: OutputKind, *, force: bool) -> list[str]:
    """Refuse a file that cannot be written, or that is there and of another kind; the notes on one that is replaced."""
    check_writable(option, path)
    if path is None or not path.is_file() or not (begin := _beginning(path)):  # a device, a pipe, nothing, or an empty file
        return []
    if kind.value in begin:
        return [f"{option} {path}: replaces what an earlier run wrote"]
    if not force:
        raise RequestError(f"{option} {path}: there is a file of another kind; name another one, or add --force")
    return [f"{option} {path}: replaces a file of another kind"]


def check_report(path: Path | None, *, force: bool, quiet: bool) -> None:
    """Check the file of --html, and say if it is replaced."""
    show_notes(check_file("--html", path, OutputKind.REPORT, force=force), quiet=quiet)


def check_folder(option: str, path: Path | None, *, force: bool) -> list[str]:
    """Refuse a folder that holds something, but no run; the notes on one whose run is replaced."""
    if path is None or not path.is_dir():
        return []
    from poise.engine.journal import NAME  # most verbs print, and need no journal

    journal = path / NAME
    try:
        names = sorted(os.listdir(path))
        is_run = journal.is_file() and _beginning(journal).startswith(OutputKind.JOURNAL.value)
    except OSError as error:
        raise RequestError(f"{option} {path}: cannot be read: {error.strerror or error}") from None
    if not names:
        return []
    if is_run:
        return [f"{option} {path}: replaces what an earlier run wrote"]
    if not force:
        raise RequestError(f"{option} {path}: holds {names[0]} and no run; name a new folder, or add --force")
    return [f"{option} {path}: writes into a folder that holds other things"]


def make_folder(option: str, path: Path | None) -> None:
    """Make a folder, and those above it, unless it is there."""
    if path is None:
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"{option} {path}: cannot be made: {error.strerror or error}") from None
    if not os.access(path, os.W_OK):
        raise RequestError(f"{option} {path}: cannot be written: permission denied")


def _beginning(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_RECOGNISED)
