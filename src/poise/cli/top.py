"""`poise top`: the service on the whole screen. One thread asks the service, and the main one draws and reads keys.

What is asked for is what is drawn: the first jobs of each kind, however many there are.
"""

import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from threading import Event, Thread
from types import FrameType

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

from poise.cli import INTERRUPTED
from poise.cli.live import connected, document
from poise.cli.options import examples, json_option, print_json
from poise.cli.output import console
from poise.cli.top_frame import HOLDING, Seen, TopView, frame
from poise.scheduler.model.errors import PoiseError, RequestError
from poise.service.client import Client
from poise.service.wire.views import JobState, NodeList

EVERY = 2.0
ANSWER_SECONDS = 5.0
"""Seconds for which one answer is waited for, before the screen says that it is old."""
MOST_ROWS = 500
"""Jobs of one kind that are asked for, at most: more than any screen has lines."""
NODES_AT_ONCE = 500
"""Nodes per look beyond which they are asked for less often."""
LOOK = 0.2
"""Seconds between two looks at the keyboard and the size of the window."""
ONCE_HEIGHT = 200
_ENDED = tuple(state for state in JobState if state.is_final)


class Watcher:
    """Asks the service how it is."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._nodes: NodeList | None = None
        self._looks = 0

    def look(self, rows: int, *, ended: bool) -> Seen:
        """The service now, with so many jobs of each kind."""
        page = self._client.queue(limit=rows)
        running = tuple(row for row in page.jobs if row.state in HOLDING)
        waiting = tuple(row for row in page.jobs if row.state not in HOLDING)
        holding = sum(page.counts.get(state, 0) for state in HOLDING)
        if len(waiting) < min(rows, page.total - holding):
            waiting = self._client.queue(limit=rows, offset=holding).jobs
        return Seen(
            self._client.service(), self._all_nodes(), self._client.shares(), running, waiting,
            self._client.queue(states=_ENDED, limit=rows).jobs if ended else (), page.counts,
        )  # fmt: skip

    def _all_nodes(self) -> NodeList:
        """The nodes: of a large cluster not at every look, as they come all at once."""
        if self._nodes is None or self._looks % (1 + len(self._nodes.nodes) // NODES_AT_ONCE) == 0:
            self._nodes = self._client.nodes()
        self._looks += 1
        return self._nodes


class Background:
    """Looks again and again in a thread of its own, so that keys are obeyed while an answer is awaited.

    seen      what was seen last;  trouble: why that is old; None: it is not
    refusal   why nothing will be seen any more
    """

    def __init__(self, watcher: Watcher, seen: Seen, every: float) -> None:
        self.seen = seen
        self.trouble: str | None = None
        self.refusal: RequestError | None = None
        self.ended = False
        self.rows = 50
        self.changed = Event()
        self._wanted = Event()
        self._watcher = watcher
        self._every = every
        self._thread = Thread(target=self._work, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def hurry(self) -> None:
        """Look at once."""
        self._wanted.set()

    def _work(self) -> None:
        while self.refusal is None:
            self._wanted.wait(self._every)
            self._wanted.clear()
            try:
                seen = self._watcher.look(self.rows, ended=self.ended)
            except RequestError as error:
                self.refusal = error
            except PoiseError as error:
                self.trouble = str(error)
            else:
                self.seen, self.trouble = seen, None
            self.changed.set()


@click.command(epilog=examples("poise top", "poise top --once", "poise top --json"))
@click.option(
    "--every",
    type=click.FloatRange(0.5, 3600),
    default=EVERY,
    show_default=True,
    metavar="SECONDS",
    help="Time between two looks.",
)
@click.option("--once", is_flag=True, help="Print it once and end, as without a terminal.")
@json_option
def top(every: float, once: bool, as_json: bool) -> int:
    """Watch GPUs, tenants and jobs on the whole screen: nodes in use, shares, progress of jobs, and why others wait.

    Keys: q or Ctrl-C ends it, s sorts running jobs (as in the queue, by GPUs, by time), e shows those that ended last, the
    space bar looks at once. While the server is away the last that was seen is shown, and said to be old.
    """
    screen = console()
    is_live = not once and not as_json and screen.is_terminal and not screen.is_dumb_terminal
    with connected() as client:
        watcher = Watcher(client)
        seen = watcher.look(min(MOST_ROWS, max(50, screen.height)), ended=False)
        if as_json:
            print_json(_document(seen))
            return 0
        if not is_live:
            for line in frame(seen, TopView(), screen.width, ONCE_HEIGHT):
                click.echo(line.text)
            return 0
    with Client.from_config(timeout=ANSWER_SECONDS, patience=1.0) as client:
        return _watch(Background(Watcher(client), seen, every), screen)


def _document(seen: Seen) -> dict[str, object]:
    """All of it as JSON."""
    views = {"service": seen.service, "nodes": seen.nodes, "shares": seen.shares}
    rows = {"running": seen.running, "waiting": seen.waiting}
    return {
        **{name: document(view) for name, view in views.items()},
        **{name: [document(row) for row in found] for name, found in rows.items()},
        "counts": seen.counts,
    }


def _watch(background: Background, screen: Console) -> int:
    """Draw until a key, or a signal, ends it; the exit code."""
    view = TopView()
    size = (0, 0)
    with _keyboard() as keys, Live(console=screen, screen=True, auto_refresh=False, transient=True) as live:
        background.start()
        try:
            while background.refusal is None:
                if background.changed.is_set() or size != (screen.width, screen.height):
                    background.changed.clear()
                    size = (screen.width, screen.height)
                    background.rows = min(MOST_ROWS, max(50, screen.height))
                    live.update(_drawn(background, view, size), refresh=True)
                key = _key(keys)
                if key in ("q", "Q"):
                    return 0
                if key == "s":
                    view = replace(view, order=view.order.next())
                elif key == "e":
                    view = replace(view, ended=not view.ended)
                    background.ended = view.ended
                if key in ("e", " "):
                    background.hurry()
                if key:
                    background.changed.set()
        except KeyboardInterrupt:
            return INTERRUPTED
    raise background.refusal


def _drawn(background: Background, view: TopView, size: tuple[int, int]) -> Text:
    footer = f"q quit · s sort: {view.order} · e {'hide' if view.ended else 'show'} ended · space look now"
    lines = frame(background.seen, replace(view, footer=footer, trouble=background.trouble), *size)
    return Text("\n").join(Text(line.text, line.style, no_wrap=True, overflow="crop") for line in lines)


@contextmanager
def _keyboard() -> Iterator[int | None]:
    """Standard input, key by key, if it is a terminal; and signals that end the command leave that as it was."""

    def end(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {each: signal.signal(each, end) for each in (signal.SIGTERM, signal.SIGHUP)}
    before[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # the screen would stay as it is
    is_terminal = sys.stdin.isatty()
    settings = termios.tcgetattr(sys.stdin) if is_terminal else None
    try:
        if is_terminal:
            tty.setcbreak(sys.stdin)
        yield sys.stdin.fileno() if is_terminal else None
    finally:
        if settings is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, settings)
        for number, handler in before.items():
            signal.signal(number, handler)


def _key(keys: int | None) -> str:
    """The next key, if one is pressed soon; "": none."""
    if not select.select([] if keys is None else [keys], [], [], LOOK)[0] or keys is None:
        return ""
    return os.read(keys, 1).decode(errors="replace") or "q"  # the terminal has gone
