"""What `poise top` draws: a screen of a given size from what was seen of the service. Nothing here asks or waits.

Every line fits into the width, and all lines into the height: what is not drawn is counted in words.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size

from poise.cli.live import clock_time, state_of
from poise.cli.queue import NONE, span
from poise.lab.report.axes import amount
from poise.scheduler.model.errors import plain
from poise.scheduler.model.units import counted
from poise.service.wire.views import JobRow, JobState, NodeCondition, NodeList, NodeRow, ServiceView, Shares

MOST_TYPES, MOST_TENANTS, NODE_LINES = 4, 5, 2
"""Lines that GPU types, tenants and nodes may take; jobs get the rest."""
HOLDING = (JobState.STARTING, JobState.RUNNING, JobState.CHECKPOINTING)
"""States of jobs on GPUs; all others wait, or have ended."""
BAR = 20
"""Characters of the bar of a GPU type."""


class SortOrder(StrEnum):
    """How running jobs are sorted."""

    QUEUE = "queue"
    GPUS = "GPUs"
    RAN = "time"

    def next(self) -> "SortOrder":
        """The one that a key press changes to."""
        return {SortOrder.QUEUE: SortOrder.GPUS, SortOrder.GPUS: SortOrder.RAN, SortOrder.RAN: SortOrder.QUEUE}[self]


_KEYS: dict[SortOrder, Callable[[JobRow], float]] = {
    SortOrder.GPUS: lambda row: -row.gpus,
    SortOrder.RAN: lambda row: -row.ran,
}


@dataclass(frozen=True)
class Seen:
    """The service at one moment.

    running, waiting, ended   the first jobs of each kind; `counts` has all, by state
    """

    service: ServiceView
    nodes: NodeList
    shares: Shares
    running: tuple[JobRow, ...]
    waiting: tuple[JobRow, ...]
    ended: tuple[JobRow, ...]
    counts: dict[str, int]


@dataclass(frozen=True)
class TopView:
    """What a person wants to see, and what is said about it at the bottom. ended: whether jobs that have ended are shown."""

    order: SortOrder = SortOrder.QUEUE
    ended: bool = False
    footer: str = ""
    trouble: str | None = None


class ScreenLine(NamedTuple):
    """A line of the screen, and how it is printed."""

    text: str
    style: str = ""


class Column(NamedTuple):
    """A column of a table: its heading and width; 0: what is left. Numbers stand to the right."""

    heading: str
    width: int
    is_number: bool = False


_RUNNING = (
    Column("ID", 6), Column("NAME", 0), Column("TENANT", 10), Column("GPUS", 9), Column("RAN", 7, is_number=True),
    Column("DONE", 9, is_number=True), Column("STEPS/S", 8, is_number=True), Column("LOSS", 8, is_number=True),
)  # fmt: skip
_WAITING = (
    Column("#", 5, is_number=True), Column("ID", 6), Column("NAME", 12), Column("TENANT", 10),
    Column("GPUS", 4, is_number=True), Column("WAITED", 7, is_number=True), Column("WHY", 0),
)  # fmt: skip
_ENDED = (
    Column("ID", 6),
    Column("NAME", 14),
    Column("TENANT", 10),
    Column("STATE", 10),
    Column("ENDED", 20),
    Column("WHY", 0),
)
_TENANTS = (
    Column("TENANT", 0), Column("HELD", 8, is_number=True), Column("ENTITLED", 9, is_number=True),
    Column("GPUS", 6, is_number=True), Column("RUNNING", 8, is_number=True), Column("WAITING", 8, is_number=True),
)  # fmt: skip


def frame(seen: Seen, view: TopView, width: int, height: int) -> list[ScreenLine]:
    """The screen: exactly what fits."""
    lines = [_head(seen, view), *_gpus(seen.nodes), *_nodes(seen.nodes, width), *_tenants(seen.shares, width)]
    footer = [ScreenLine(view.footer, "dim")] if view.footer else []
    left = height - len(lines) - len(footer)
    lines += _jobs(seen, view, width, left)
    drawn = lines[: max(0, height - len(footer))] + footer
    return [ScreenLine(set_cell_size(text, width).rstrip(), style) for text, style in drawn[:height]]


def _head(seen: Seen, view: TopView) -> ScreenLine:
    service = seen.service
    if view.trouble is not None:
        return ScreenLine(plain(f"as of {clock_time(service.now)}: {view.trouble}"), "bold reverse")
    if not service.ready:
        return ScreenLine(plain(f"the service cannot work: {service.problem}"), "bold reverse")
    return ScreenLine(f"poise {service.version} · {plain(service.policy)} · {clock_time(service.now)}", "bold")


def _gpus(nodes: NodeList) -> list[ScreenLine]:
    """A line per GPU type: how many there are, and how many are in use."""
    there: dict[str, list[int]] = {}
    for node in nodes.nodes:
        total = there.setdefault(node.gpu_type, [0, 0])
        total[0] += node.gpus
        total[1] += _used(node)
    longest = max(map(len, there), default=0)
    lines = []
    for kind, (gpus, used) in list(there.items())[:MOST_TYPES]:
        filled = round(BAR * used / gpus) if gpus else 0
        bar = "#" * filled + "." * (BAR - filled)
        lines.append(ScreenLine(f"{plain(kind):{longest}}  [{bar}] {used:,} of {counted(gpus, 'GPU')} in use"))
    if len(there) > MOST_TYPES:
        lines[-1] = ScreenLine(f"and {len(there) - MOST_TYPES + 1} more GPU types: poise nodes")
    return lines or [ScreenLine("no node has joined yet")]


def _used(node: NodeRow) -> int:
    return sum(job is not None for job in node.jobs)


def _nodes(nodes: NodeList, width: int) -> list[ScreenLine]:
    """The nodes side by side, those that are not well first."""
    rows = sorted(nodes.nodes, key=lambda node: node.state is NodeCondition.UP)
    texts = [
        plain(f"{node.name} {_used(node)}/{node.gpus}" + ("" if node.state is NodeCondition.UP else f" {node.state}"))
        for node in rows
    ]
    lines: list[str] = []
    for number, text in enumerate(texts):
        more = f"  and {len(texts) - number:,} more nodes"
        room = width - (cell_len(more) if len(lines) == NODE_LINES else 0)
        if lines and cell_len(lines[-1]) + 2 + cell_len(text) <= room:
            lines[-1] += f"  {text}"
        elif len(lines) < NODE_LINES:
            lines.append(text)
        else:
            lines[-1] += more
            break
    return [ScreenLine(line) for line in lines]


def _tenants(shares: Shares, width: int) -> list[ScreenLine]:
    """Those tenants that have jobs now, the largest first."""
    busy = sorted((each for each in shares.tenants if each.running or each.waiting), key=lambda each: -each.gpus)
    cells = [
        (
            each.tenant, amount(each.held, "percent"), NONE if each.entitled is None else amount(each.entitled, "percent"),
            f"{each.gpus:,}", f"{each.running:,}", f"{each.waiting:,}",
        )
        for each in busy[:MOST_TENANTS]
    ]  # fmt: skip
    lines = _table(_TENANTS, cells, width) if cells else []
    if len(busy) > MOST_TENANTS:
        lines[-1] = ScreenLine(f"and {len(busy) - MOST_TENANTS + 1:,} more tenants: poise shares")
    return lines


def _jobs(seen: Seen, view: TopView, width: int, height: int) -> list[ScreenLine]:
    """The tables of jobs, each with a line that counts them; they share the height as they need it."""
    running = sorted(seen.running, key=_KEYS[view.order]) if view.order in _KEYS else seen.running
    holding = sum(seen.counts.get(state, 0) for state in HOLDING)
    waiting = sum(seen.counts.get(state, 0) for state in (JobState.PENDING, JobState.PAUSED))
    tables = [
        (f"{counted(holding, 'job')} on GPUs", _RUNNING, [_running_cells(row) for row in running]),
        (f"{counted(waiting, 'job')} waiting", _WAITING, [_waiting_cells(row) for row in seen.waiting]),
    ]
    if view.ended:
        tables.append(("ended last", _ENDED, [_ended_cells(row) for row in seen.ended]))
    parts = _divided(height, [1 + bool(rows) + len(rows) for _, _, rows in tables])
    lines: list[ScreenLine] = []
    for (title, columns, rows), part in zip(tables, parts, strict=True):
        if part:
            lines.append(ScreenLine(title, "bold"))
            lines += _table(columns, rows[: max(0, part - 2)], width)[: part - 1]
    return lines


def _divided(height: int, wanted: Sequence[int]) -> list[int]:
    """A number of lines divided among tables: evenly, and what one does not need goes to the others."""
    parts = [0] * len(wanted)
    left = max(0, height)
    while left and any(part < most for part, most in zip(parts, wanted, strict=True)):
        for index, most in enumerate(wanted):
            if left and parts[index] < most:
                parts[index] += 1
                left -= 1
    return parts


def _running_cells(row: JobRow) -> tuple[str, ...]:
    done = NONE
    if row.steps is not None:
        done = amount(row.steps / row.total_steps, "percent") if row.total_steps else amount(row.steps, "plain")
    return (
        row.id, row.name, row.tenant, f"{row.gpus:,} {row.gpu_type or ''}", span(row.ran), done,
        _number(row.throughput), _number(row.loss),
    )  # fmt: skip


def _waiting_cells(row: JobRow) -> tuple[str, ...]:
    why = row.reason.text if not row.flags else f"{row.reason.text} ({'+'.join(row.flags)})"
    place = NONE if row.position is None else f"{row.position:,}"
    return place, row.id, row.name, row.tenant, f"{row.wanted:,}", span(row.waited), why


def _ended_cells(row: JobRow) -> tuple[str, ...]:
    ended = NONE if row.finished is None else clock_time(row.finished)
    return row.id, row.name, row.tenant, state_of(row), ended, row.reason.text


def _number(value: float | None) -> str:
    return NONE if value is None else amount(value, "plain")


def _table(columns: Sequence[Column], rows: Sequence[tuple[str, ...]], width: int) -> list[ScreenLine]:
    """Headings and rows; each cell cut to its column."""
    if not rows:
        return []
    fixed = sum(column.width + 1 for column in columns)
    widths = [column.width or max(8, width - fixed) for column in columns]
    headings = ScreenLine(_row(columns, widths, [column.heading for column in columns]), "underline")
    return [headings, *(ScreenLine(_row(columns, widths, row)) for row in rows)]


def _row(columns: Sequence[Column], widths: Sequence[int], cells: Sequence[str]) -> str:
    texts = []
    for column, width, cell in zip(columns, widths, map(plain, cells), strict=True):
        size = cell_len(cell)
        if size > width:
            cell = set_cell_size(cell, width - 1) + "…"
        texts.append(" " * max(0, width - size) + cell if column.is_number else set_cell_size(cell, width))
    return " ".join(texts)
