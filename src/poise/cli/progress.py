"""Progress on stderr for work that takes more than a second, and a clean stop on Ctrl-C."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

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
