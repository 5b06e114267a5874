"""Where results go: looked at before any work is done, so that no run is lost, and nothing else is written over.

What an earlier run wrote is replaced, and a note says so. Anything else that stands in the way is left alone, unless --force
says otherwise.
"""

import csv
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from math import inf, isfinite
from pathlib import Path
from time import monotonic
from types import FrameType

import click
from rich.box import SIMPLE
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table as RichTable

from poise.engine.journal import NAME
from poise.lab.experiment import SimulationResult
from poise.lab.report.page import GENERATOR, HtmlTable
from poise.scheduler.model.errors import RequestError

# Tables that a person likes to read.

_EDGE, _BETWEEN = 1, 3
"""Characters that a table takes besides its cells: in all, and with every column."""
_PROSE = 40
"""Characters of a cell that may be broken into lines; names of rows are not."""


def console() -> Console:
    """Standard output, wide enough for a table even where it is no terminal."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=160)


def show_table(table: HtmlTable, title: str) -> None:
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


def _part(table: HtmlTable, lengths: Sequence[int], columns: Sequence[int]) -> RichTable:
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


# Progress on stderr for work that takes more than a second, and a clean stop on Ctrl-C.

PATIENCE = 1.0
"""Seconds before a bar appears."""

EVERY = 512
"""Instants between two looks at the clock."""


class Bar:
    """A bar that appears once the work has taken a second. Nothing is drawn where nobody looks."""

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
        """So much is done."""
        if not self._shown and monotonic() >= self._shows_from:
            self._progress.start()
            self._shown = True
        if self._shown:
            self._progress.update(self._task, completed=done)

    def close(self) -> None:
        """Take the bar away."""
        if self._shown:
            self._progress.stop()


class Watch:
    """Told between instants how many jobs have ended; says whether to go on."""

    def __init__(self, bar: Bar) -> None:
        self.interrupted = False
        self._bar = bar
        self._calls = 0

    def __call__(self, ended: int) -> bool:
        """Whether to go on."""
        self._calls += 1
        if self._calls % EVERY == 0:
            self._bar.update(ended)
        return not self.interrupted

    def show(self, ended: int) -> None:
        """Look at the clock now: for work that seldom reports."""
        self._bar.update(ended)


@contextmanager
def watching(title: str, total: int, *, quiet: bool) -> Iterator[Watch]:
    """A watch under which Ctrl-C stops the run between two instants; a second Ctrl-C stops at once."""
    bar = Bar(title, total, quiet=quiet)
    watch = Watch(bar)

    def stop(_signal: int, _frame: FrameType | None) -> None:
        if watch.interrupted:
            raise KeyboardInterrupt
        watch.interrupted = True

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield watch
    finally:
        signal.signal(signal.SIGINT, before)
        bar.close()


# One row a job, as CSV or JSON by the ending of the file.

COLUMNS = (
    "job", "tenant", "gpus", "submitted", "started", "finished", "jct", "rho", "preemptions",
    "gpu_seconds", "wait_fair_share", "wait_fragmentation", "wait_capacity", "status",
)  # fmt: skip
FIRST_COLUMNS = COLUMNS[:6]
"""Enough of them to know a file of ours by."""


def rows(outcome: SimulationResult) -> list[dict[str, object]]:
    """All jobs of the trace in order of submission; what never came about is None."""
    ends = {life.id: place for place, life in enumerate(outcome.measured.jobs)}
    found: list[dict[str, object]] = []
    for life in outcome.history.jobs.values():
        place = ends.get(life.id)
        jct = None if place is None else float(outcome.measured.jcts[place])
        rho = None if place is None else float(outcome.measured.rhos[place])
        order, fragmentation, capacity = life.waited
        values = (
            life.id, life.tenant, life.gpus, life.submitted, _known(life.started), None if place is None else life.ended,
            jct, _known(rho), life.preemptions, life.gpu_seconds, order, fragmentation, capacity, life.status.name.lower(),
        )  # fmt: skip
        found.append(dict(zip(COLUMNS, values, strict=True)))
    return found


def _known(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None


def write_per_job(path: Path, outcome: SimulationResult) -> None:
    """Write the rows."""
    with path.open("w", encoding="utf-8", newline="") as stream:
        if path.suffix == ".json":
            json.dump(rows(outcome), stream, allow_nan=False, indent=1)
            return
        writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows(outcome))


_LOOKED_AT = 4096
"""Bytes of a file that say what kind it is."""


class Over(Enum):
    """What may be written over: what earlier runs wrote, or anything."""

    OWN = auto()
    ANYTHING = auto()


class OutputKind(Enum):
    """Files that commands write, each with the bytes that give it away."""

    REPORT = f'name="generator" content="{GENERATOR}"'.encode()
    ROWS_CSV = ",".join(FIRST_COLUMNS).encode()
    ROWS_JSON = f'[\n {{\n  "{FIRST_COLUMNS[0]}":'.encode()
    JOURNAL = b'{"journal":'


force_option = click.option("--force", is_flag=True, help="Write over files and folders of other kinds too.")


def over(*, force: bool) -> Over:
    """What the option says."""
    return Over.ANYTHING if force else Over.OWN


def check_writable(option: str, path: Path | None) -> None:
    """Refuse a file that cannot be written: its folder must be there, and allow it."""
    if path is None:
        return
    if not os.path.isdir(path.parent):
        raise RequestError(f"{option} {path}: there is no folder {path.parent}")
    if not os.access(path if os.path.exists(path) else path.parent, os.W_OK):
        raise RequestError(f"{option} {path}: cannot be written: permission denied")


def check_file(option: str, path: Path | None, kind: OutputKind, allowed: Over) -> list[str]:
    """Refuse a file that cannot be written, or that is there and of another kind; what to say of one that is replaced."""
    check_writable(option, path)
    if path is None or not path.is_file() or not (begin := _beginning(path)):  # a device, a pipe, nothing, or an empty file
        return []
    if kind.value in begin:
        return [f"{option} {path}: replaces what an earlier run wrote"]
    if allowed is Over.OWN:
        raise RequestError(f"{option} {path}: there is a file of another kind; name another one, or add --force")
    return [f"{option} {path}: replaces a file of another kind"]


def check_ending(path: Path | None) -> None:
    """Refuse a file for rows of jobs whose ending does not say how to write them."""
    if path is not None and path.suffix not in (".csv", ".json"):
        raise RequestError(f"--per-job {path}: expected a file that ends in .csv or .json")


def check_rows(path: Path | None, allowed: Over) -> list[str]:
    """As `check_file`, for rows of jobs."""
    kind = OutputKind.ROWS_JSON if path is not None and path.suffix == ".json" else OutputKind.ROWS_CSV
    return check_file("--per-job", path, kind, allowed)


def check_folder(option: str, path: Path | None, allowed: Over) -> list[str]:
    """Refuse a folder that holds something, but no run; what to say of one whose run is replaced."""
    if path is None or not path.is_dir():
        return []
    try:
        names = sorted(os.listdir(path))
        is_run = NAME in names and (path / NAME).is_file() and _beginning(path / NAME).startswith(OutputKind.JOURNAL.value)
    except OSError as error:
        raise RequestError(f"{option} {path}: cannot be read: {error.strerror or error}") from None
    if not names:
        return []
    if is_run:
        return [f"{option} {path}: replaces what an earlier run wrote"]
    if allowed is Over.OWN:
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
        return file.read(_LOOKED_AT)
