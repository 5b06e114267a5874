"""A progress bar on a terminal or in a notebook, for work that takes more than a second."""

import sys
from time import monotonic
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

PATIENCE = 1.0
"""Seconds before a bar appears."""
_OFTEN = 0.2
"""Seconds between two changes of a bar in a notebook."""


class Bar:
    """A progress bar that appears once the work has taken a second, if stderr is a terminal."""

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


class NotebookBar:
    """The same below the cell of a notebook. It is taken away when the work ends."""

    def __init__(self, title: str, total: int) -> None:
        self._title, self._total = title, total
        self._changes_from = monotonic() + PATIENCE
        self._handle: Any = None

    def update(self, done: int) -> None:
        """Show how much is done."""
        if monotonic() < self._changes_from:
            return
        self._changes_from = monotonic() + _OFTEN
        text = f"{self._title}: {done:,} of {self._total:,}"
        self._show({"text/plain": text, "text/html": f'<progress value="{done}" max="{self._total}"></progress> {text}'})

    def _show(self, shown: dict[str, str]) -> None:
        from IPython.display import display  # there is one where there is a notebook

        if self._handle is None:
            self._handle = display(shown, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(shown, raw=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._handle is not None:
            self._show({"text/plain": "", "text/html": ""})


def bar(title: str, total: int) -> Bar | NotebookBar:
    """Return the bar that suits where this program runs."""
    return NotebookBar(title, total) if _is_notebook() else Bar(title, total, quiet=False)


def _is_notebook() -> bool:
    """Whether this is the kernel of a notebook, rather than a terminal, of IPython or not."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and hasattr(shell, "kernel")
