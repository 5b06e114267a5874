"""A progress bar on stderr or in a notebook, for work that takes more than a second."""

import sys
from time import monotonic
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

PATIENCE = 1.0
"""Seconds before a bar appears."""


class Bar:
    """A progress bar that appears once the work has taken a second, on a terminal and in a notebook only."""

    def __init__(self, title: str, total: int, *, quiet: bool) -> None:
        console = Console(stderr=True)
        is_seen = console.is_jupyter or sys.stderr.isatty()
        self._progress = Progress(
            TextColumn(title),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=quiet or not is_seen,
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
