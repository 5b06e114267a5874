"""The GPU timeline: which job held which GPUs when, run by run, to zoom into; without a script, a coarse picture per run.

Read from the top: `Track` is one run as columns, compact enough to send between processes. `timeline` puts several into one
interactive exhibit. `coarsened` thins a run that is too large for a page. `still` draws the picture for readers without
scripts.

GPUs are rows, node by node in the order of the cluster. A block is a hold of neighbouring rows by one job: a job that holds
GPUs that do not lie together is several blocks.

The script in `assets` draws from columns that are packed into the page, deflated and in base64, one element per run, so that
only the run on display need be unpacked:

    common    JSON: span in seconds, time units in it, nodes, tenants by GPU time (most first), jobs
    a run     six columns of blocks one after another: start (less that of the block before), length, first row, rows, job,
              end + 8·lane. Of a column all low bytes come first, then all middle, then all high ones. Starts and lengths are
              in time units, `UNITS` to the span
"""

import json
import zlib
from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

from poise.lab.analysis.history import History, RunEnd, RunInterval
from poise.lab.report import frame as svg
from poise.lab.report.axes import Axis, Tick, amount, span_axis
from poise.lab.report.page import Exhibit
from poise.lab.report.style import LIGHT_SERIES
from poise.scheduler.model.arithmetic import Floats
from poise.scheduler.model.cluster import Cluster, Holding
from poise.scheduler.model.errors import InvariantError

Int32s = NDArray[np.int32]
Rows = tuple[int, int]
"""First row, number of rows."""

UNITS = 1 << 22
"""Time units that a timeline tells apart; the deepest zoom shows some thousand of them side by side."""
MOST_BLOCKS = 600_000
"""Blocks of all runs together; each run gets its part of it."""
FEWEST_BLOCKS = 5_000
"""Blocks that a run may show at least, however many runs there are."""
COLOURS = len(LIGHT_SERIES)
"""Tenants with a colour of their own; the rest share a grey."""
ENDS = tuple(RunEnd)
"""How a block ended is an index into this."""
_END_INDEX = {end: place for place, end in enumerate(ENDS)}
_COLUMNS = ("job", "row", "rows", "start", "end", "ended", "lane")
_LOWER = 2
"""Lane of the lower half of a row."""
_FINEST = 1 << 18
"""Where there are too many blocks, those shorter than the span over this are put together first."""
_LIMIT = 1 << 24
_SCRIPTS = ("data.js", "view.js", "picture.js", "timeline.js")
"""One script, in the order in which its parts build on one another."""
_WITHOUT = (
    "Without its script, this page shows each run as a coarse picture: a cell is coloured by who held the GPU in its middle "
    "at that moment."
)
_KEYS = (
    "Zoom by wheel or pinch, by dragging across a part, or with + and −; arrows move, 0 shows the whole, "
    "Shift with ↑ and ↓ shows fewer or more GPUs. Rest on a block, or tap it, to read whose it is; choose an entry of the "
    "key to see it alone. Where several jobs fall into a pixel, their colours mix."
)
_BUTTONS = (
    *(("in", "+", "Zoom in"), ("out", "−", "Zoom out"), ("left", "←", "Earlier"), ("right", "→", "Later")),
    *(("fewer", "↕+", "Fewer GPUs"), ("more", "↕−", "More GPUs"), ("whole", "Whole", "Show the whole")),
)


@dataclass(frozen=True, slots=True)
class Track:
    """One run. Times are seconds since the first submission; the columns of blocks are in ascending order of `start`.

    jobs     ids;  tenant: of each job, its index in `tenants`;  gpus: of each job, how many it asked for
    job      of each block its job's index in `jobs`; `len(jobs)` + a tenant's index stands for several jobs, see `coarsened`
    ended    of each block the index in ENDS;  lane: 0 if it has its rows alone, 1 or 2 if it shares them with another
    """

    jobs: tuple[str, ...]
    tenants: tuple[str, ...]
    tenant: Int32s
    gpus: Int32s
    job: Int32s
    row: Int32s
    rows: Int32s
    start: Floats
    end: Floats
    ended: Int32s
    lane: Int32s

    @staticmethod
    def of(history: History) -> "Track":
        """Read a run's history; holds that took no time are left out."""
        lives = list(history.jobs.values())
        tenants = {name: place for place, name in enumerate(dict.fromkeys(life.tenant for life in lives))}
        place = {life.id: index for index, life in enumerate(lives)}
        first = min((life.submitted for life in lives), default=0.0)
        runs = sorted((run for run in history.runs if run.end > run.start), key=lambda run: run.start)
        counts, row, rows = _blocks_of(runs, history.cluster)
        start = np.repeat(np.array([run.start for run in runs], dtype=np.float64), counts) - first
        end = np.repeat(np.array([run.end for run in runs], dtype=np.float64), counts) - first
        return Track(
            jobs=tuple(place),
            tenants=tuple(tenants),
            tenant=_int32s(tenants[life.tenant] for life in lives),
            gpus=_int32s(life.gpus for life in lives),
            job=np.repeat(_int32s(place[run.job] for run in runs), counts),
            row=row,
            rows=rows,
            start=start,
            end=end,
            ended=np.repeat(_int32s(_END_INDEX[run.ended] for run in runs), counts),
            lane=_lanes(row, start, end),
        )

    @property
    def owner(self) -> Int32s:
        """Of each block, its tenant's index in `tenants`."""
        return np.concatenate((self.tenant, np.arange(len(self.tenants), dtype=np.int32)))[self.job]

    @property
    def seconds(self) -> Floats:
        """Of each block, how long it lasts."""
        return self.end - self.start

    def chosen(self, blocks: NDArray[np.intp] | NDArray[np.bool_]) -> "Track":
        """The same with these blocks alone, in this order."""
        columns: dict[str, Any] = {name: getattr(self, name)[blocks] for name in _COLUMNS}
        return replace(self, **columns)

    def joined(self, other: "Track") -> "Track":
        """The same with blocks of another track of the same jobs, again by start."""
        columns: dict[str, Any] = {name: np.concatenate((getattr(self, name), getattr(other, name))) for name in _COLUMNS}
        whole = replace(self, **columns)
        return whole.chosen(np.lexsort((whole.row, whole.start)))


def timeline(tracks: Sequence[tuple[str, Track]], cluster: Cluster) -> Exhibit | None:
    """Runs of one cluster by name, in one view with one zoom; None if no job ever held a GPU."""
    if not any(len(track.start) for _, track in tracks):
        return None
    most = max(FEWEST_BLOCKS, MOST_BLOCKS // len(tracks))
    span = max(float(track.end.max(initial=0.0)) for _, track in tracks)
    drawn, remarks = [], []
    for name, track in tracks:
        fewer, length = coarsened(track, most)
        drawn.append(fewer)
        if length:
            remarks.append(
                f"{name}: {len(track.start):,} blocks are drawn as {len(fewer.start):,}. Those shorter than "
                f"{amount(length, 'seconds')} that follow one another on a GPU are put together, in the colour of the "
                "longest; the time that GPUs were held is kept."
            )
    names = [name for name, _ in tracks]
    tenants, runs, common = _packed(drawn, cluster, span)
    stills = [still(name, track, tenants, cluster, span) for name, track in zip(names, runs, strict=True)]
    pictures = svg.element("div", *(svg.element("figure", each) for each in stills), class_="figures")
    markup = svg.element(
        "div",
        _controls(names, remarks),
        _held_data("common", json.dumps(common, separators=(",", ":")).encode()),
        *(_held_data("run", _block_columns(track, span)) for track in runs),
        svg.element("noscript", svg.element("p", svg.escape(_WITHOUT)), pictures),
        class_="timeline",
        role="group",
        aria_label="GPU timeline",
    )
    parts = "\n".join(_asset(name) for name in _SCRIPTS)
    return Exhibit(markup, _asset("timeline.css"), f'"use strict";\n{{\n{parts}}}')


def _controls(names: Sequence[str], remarks: Sequence[str]) -> str:
    """What the script brings to life; hidden until it has."""
    choices = []
    for place, name in enumerate(names):
        checked = {} if place else {"checked": "checked"}
        button = svg.element("input", type="radio", name="run", value=str(place), **checked)
        choices.append(svg.element("label", button, svg.element("span", svg.escape(name))))
    tools = [
        svg.element("button", svg.escape(text), type="button", data_do=do, aria_label=name, title=name)
        for do, text, name in _BUTTONS
    ]
    fine = [svg.element("p", svg.escape(remark), class_="fine") for remark in remarks]
    return (
        '<div class="live" hidden="hidden">'
        f'<div class="runs" role="radiogroup" aria-label="Policy">{"".join(choices)}</div>'
        f'<div class="tools">{"".join(tools)}<label>Colour by <select aria-label="Colour by"></select></label></div>'
        '<div class="stage" tabindex="0" role="application" aria-label="GPU timeline: rows are GPUs, time runs to the '
        'right. Plus and minus zoom, arrows move, 0 resets.">'
        '<canvas></canvas><div class="part" hidden="hidden"></div><div class="tip" hidden="hidden"></div></div>'
        '<p class="shown" role="status"></p><div class="key" role="group" aria-label="Key"></div>'
        f'{"".join(fine)}<p class="fine help">{svg.escape(_KEYS)}</p></div>'
    )


def _held_data(kind: str, data: bytes) -> str:
    """Data that no browser runs: a script of no language."""
    return svg.element("script", b64encode(zlib.compress(data, 6)).decode("ascii"), type="text/plain", data_holds=kind)


def _asset(name: str) -> str:
    return resources.files("poise.lab.report").joinpath("assets", name).read_text(encoding="utf-8")


# Packing for the script


def _packed(tracks: Sequence[Track], cluster: Cluster, span: float) -> tuple[list[str], list[Track], dict[str, object]]:
    """Number jobs and tenants alike in all runs; tenants by the GPU time of all runs, the largest first.

    Returns the tenants, the runs in terms of those numbers, and what is common to all runs, for the script.
    """
    held: dict[str, float] = {}
    jobs: dict[str, tuple[str, int]] = {}
    for track in tracks:
        time = np.bincount(track.owner, track.seconds * track.rows, minlength=len(track.tenants))
        for name, more in zip(track.tenants, time.tolist(), strict=True):
            held[name] = held.get(name, 0.0) + more
        owners = (track.tenants[place] for place in track.tenant.tolist())
        jobs.update(zip(track.jobs, zip(owners, track.gpus.tolist(), strict=True), strict=True))
    tenants = sorted(held, key=lambda name: (-held[name], name))
    tenant_index = {name: index for index, name in enumerate(tenants)}
    job_index = {name: index for index, name in enumerate(jobs)}
    renumbered = []
    for track in tracks:
        new = [job_index[name] for name in track.jobs] + [len(jobs) + tenant_index[name] for name in track.tenants]
        renumbered.append(replace(track, job=np.array(new, dtype=np.int32)[track.job]))
    common = {
        "span": span,
        "units": UNITS,
        "ends": [str(end) for end in ENDS],
        "colours": COLOURS,
        "nodes": [[svg.fit(node.name), node.gpus, svg.fit(node.gpu_type)] for node in cluster.nodes],
        "tenants": [svg.fit(name) for name in tenants],
        "jobs": [svg.fit(name) for name in jobs],
        "tenant": [tenant_index[tenant] for tenant, _ in jobs.values()],
        "gpus": [gpus for _, gpus in jobs.values()],
    }
    return tenants, renumbered, common


def _block_columns(track: Track, span: float) -> bytes:
    """The columns of the module's docstring. Low, middle and high bytes stand apart: bytes of a kind deflate better."""
    start = np.floor(track.start * (UNITS / span)).astype(np.int64)
    length = np.maximum(1, np.ceil(track.end * (UNITS / span)).astype(np.int64) - start)
    ending = track.ended + 8 * track.lane
    parts = []
    for column in (np.diff(start, prepend=0), length, track.row, track.rows, track.job, ending):
        low, high = column.min(initial=0), column.max(initial=0)
        if low < 0 or high >= _LIMIT:
            raise InvariantError(f"a column of the timeline holds {low} to {high}; expected 0 to {_LIMIT - 1}")
        parts += [(column >> shift & 255).astype(np.uint8).tobytes() for shift in (0, 8, 16)]
    return b"".join(parts)


# From holdings to blocks


def first_rows(cluster: Cluster) -> list[int]:
    """The first row of each node, and the number of rows."""
    return [0, *np.cumsum([node.gpus for node in cluster.nodes]).tolist()]


def _int32s(values: Iterable[int]) -> Int32s:
    return np.fromiter(values, dtype=np.int32)


def _blocks_of(runs: Sequence[RunInterval], cluster: Cluster) -> tuple[Int32s, Int32s, Int32s]:
    """How many blocks each run is, and the first row and the number of rows of each block."""
    first = first_rows(cluster)
    known: dict[Holding, list[Rows]] = {}  # few holdings recur in many runs
    found: list[list[Rows]] = []
    for run in runs:
        pieces = known.get(run.gpus)
        if pieces is None:
            pieces = known[run.gpus] = _neighbours(run.gpus, first)
        found.append(pieces)
    flat = np.array([piece for pieces in found for piece in pieces], dtype=np.int32).reshape(-1, 2)
    return _int32s(map(len, found)), flat[:, 0].copy(), flat[:, 1].copy()


def _neighbours(holding: Holding, first: Sequence[int]) -> list[Rows]:
    """Stretches of neighbouring rows, of one node or of several that lie side by side."""
    found: list[Rows] = []
    for node, mask in holding:
        row, left = first[node], mask
        while left:
            gap = (left & -left).bit_length() - 1
            left >>= gap
            length = (~left & (left + 1)).bit_length() - 1
            row += gap
            if found and sum(found[-1]) == row:
                found[-1] = (found[-1][0], found[-1][1] + length)
            else:
                found.append((row, length))
            left >>= length
            row += length
    return found


def _lanes(row: Int32s, start: Floats, end: Floats) -> Int32s:
    """1 and 2 for blocks that are on the same rows at the same time; 0 for all others."""
    lanes = np.zeros(len(row), dtype=np.int32)
    order = np.lexsort((start, row))
    shared = order[_overlapping(row[order], start[order], end[order])]
    free: dict[int, float] = {}
    for block in shared.tolist():  # few: sharing is rare, and only blocks that share come here
        place, begins = int(row[block]), float(start[block])
        lanes[block] = 2 if free.get(place, begins) > begins else 1
        if lanes[block] == 1:
            free[place] = float(end[block])
    return lanes


def _overlapping(row: Int32s, start: Floats, end: Floats) -> NDArray[np.bool_]:
    """Which blocks, in order of row and start, are at some time on the same row as another."""
    count = len(row)
    if not count:
        return np.zeros(0, dtype=np.bool_)
    # The latest end so far on the same row: ranks of ends, lifted row by row, so that a running maximum does not cross rows.
    by_end = np.argsort(end, kind="stable")
    rank = np.empty(count, dtype=np.int64)
    rank[by_end] = np.arange(count)
    lift = row.astype(np.int64) * count
    latest = end[by_end[np.maximum.accumulate(rank + lift) - lift]]
    same = row[1:] == row[:-1]
    after, before = np.zeros(count, dtype=np.bool_), np.zeros(count, dtype=np.bool_)
    after[1:] = same & (start[1:] < latest[:-1])
    before[:-1] = same & (start[1:] < end[:-1])
    return after | before


# Fewer blocks


def coarsened(track: Track, most: int) -> tuple[Track, float]:
    """A track of about `most` blocks or fewer, and the length in seconds below which blocks were put together (0: none).

    Of the shorter holds of a row that begin within one such length, one stays: as long as all of them together, so that
    the time held stays what it was, with the tenant and the end of the longest of them. Neighbouring rows on which the same
    comes of it are one block. Nothing overlaps that did not.
    """
    if len(track.start) <= most:
        return track, 0.0
    # One block for each row of each block, by row and start; those in the lower lane come last.
    source = np.repeat(np.arange(len(track.start)), track.rows)
    offset = np.arange(len(source)) - np.repeat(np.cumsum(track.rows) - track.rows, track.rows)
    single = track.chosen(source)
    single = replace(single, row=(single.row + offset).astype(np.int32), rows=np.ones_like(single.rows))
    single = single.chosen(np.lexsort((single.start, single.row, single.lane == _LOWER)))

    widest, span = int(track.rows.max()), float(track.end.max())
    length = span / _FINEST
    while True:
        long, short = track.seconds >= length, single.chosen(single.seconds < length)
        # Where a short block begins on another row, or in another cell of time.
        heads = _changes(short.lane == _LOWER, short.row, np.floor(short.start / length))
        if np.count_nonzero(long) + heads.size / widest <= most or length >= span:
            fewer = track.chosen(long).joined(_stacked(_pooled(short, heads)))
            if len(fewer.start) <= most or length >= span:
                return fewer, length
        length *= 2


def _changes(*columns: NDArray[Any]) -> NDArray[np.intp]:
    """Indices at which a column has another value than one before, and the first index."""
    differ = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    return np.flatnonzero(np.append(True, differ)) if columns[0].size else np.empty(0, dtype=np.intp)


def _pooled(rows: Track, heads: NDArray[np.intp]) -> Track:
    """One block for all from each head up to the next one."""
    if not heads.size:
        return rows
    counts = np.diff(np.append(heads, len(rows.start)))
    longest = rows.chosen(np.lexsort((-rows.seconds, np.repeat(np.arange(len(heads)), counts)))[heads])
    job = np.where(counts > 1, len(rows.jobs) + longest.owner, longest.job).astype(np.int32)
    start, lane = rows.start[heads], np.maximum.reduceat(rows.lane, heads)  # a whole row would lie on the lower lane's half
    return replace(longest, job=job, start=start, end=start + np.add.reduceat(rows.seconds, heads), lane=lane)


def _stacked(rows: Track) -> Track:
    """Blocks of one row each that are alike and lie one below the other, as one."""
    found = rows.chosen(np.lexsort((rows.row, rows.lane, rows.ended, rows.job, rows.end, rows.start)))
    below = (found.row - np.arange(len(found.row))).astype(np.int32)  # the same as long as rows follow one another
    heads = _changes(found.start, found.end, found.job, found.ended, found.lane, below)
    return replace(found.chosen(heads), rows=np.diff(np.append(heads, len(found.row))).astype(np.int32))


# The coarse picture

_ACROSS, _DOWN = 220, 48
_OTHERS = "others"


def still(name: str, track: Track, tenants: Sequence[str], cluster: Cluster, span: float) -> str:
    """The whole span, time across, GPUs down; a cell has the colour of the tenant that held its middle.

    `tenants` come with the most GPU time first; those without a colour of their own are grey. With one tenant only, colours
    are by job.
    """
    drawn_title, top = svg.heading(name)
    words = [*tenants[:COLOURS], _OTHERS][: len(tenants)] if len(tenants) > 1 else []
    legend = svg.legend_for(words, top)
    keys = []
    for group, (left, middle) in enumerate(legend.spots):
        outline = f"M{svg.number(left)} {svg.number(middle - 5)}h{svg.number(svg.SWATCH - 6)}v10h-18z"
        keys.append(legend.entry(group, svg.element("path", class_=f"cell c{group}", d=outline)))
    if len(tenants) == 1:
        groups = track.job.astype(np.int64) % COLOURS
    else:
        colour = {name: min(index, COLOURS) for index, name in enumerate(tenants)}
        groups = np.array([colour[name] for name in track.tenants], dtype=np.int64)[track.owner]
    frame = svg.framed(span_axis(np.array([0.0, span]), "seconds", 6), _rows_axis(cluster), legend.bottom)
    picture = _picture(track, groups, cluster.gpus, span)
    shown = [_cells(frame, picture == group, group) for group in range(COLOURS + 1)]
    around = svg.surroundings(frame, svg.FigureLabels(name, "time since the first submission", ""))
    described = f"GPU timeline of {name}: who held which of {cluster.gpus:,} GPUs when, coarsely."
    return svg.figure(described, frame.figure_height, drawn_title, around, *keys, *shown)


def _rows_axis(cluster: Cluster) -> Axis:
    """Rows downwards, named by GPU type where its first node begins."""
    first, seen = first_rows(cluster), set()
    ticks: list[Tick] = []
    for node, row in zip(cluster.nodes, first, strict=False):
        if node.gpu_type not in seen:
            seen.add(node.gpu_type)
            ticks.append(Tick(float(first[-1] - row), svg.shorten(node.gpu_type, 70.0, svg.TEXT)))
    return Axis(0.0, float(first[-1]), "linear", tuple(ticks[:12]))


def _picture(track: Track, groups: NDArray[np.int64], gpus: int, span: float) -> NDArray[np.int64]:
    """The group of each cell, -1 for none. A row of cells is several rows of GPUs, of which the middle one counts."""
    down = min(_DOWN, gpus)
    picture = np.full((down, _ACROSS), -1)
    middles = (np.arange(down) + 0.5) * gpus / down
    left = np.ceil(track.start / span * _ACROSS - 0.5).astype(np.int64)
    right = np.ceil(track.end / span * _ACROSS - 0.5).astype(np.int64)
    top = np.searchsorted(middles, track.row)
    bottom = np.searchsorted(middles, track.row + track.rows)
    for block in np.flatnonzero((left < right) & (top < bottom)).tolist():
        picture[top[block] : bottom[block], left[block] : right[block]] = groups[block]
    return picture


def _cells(frame: svg.Frame, cells: NDArray[np.bool_], group: int) -> str:
    """Cells as rectangles, neighbours in a row as one."""
    wide, high = (frame.right - frame.left) / cells.shape[1], (frame.bottom - frame.top) / cells.shape[0]
    edges = np.diff(np.pad(cells, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    starts, ends = np.argwhere(edges == 1).tolist(), np.argwhere(edges == -1).tolist()
    pieces = [
        f"M{svg.number(frame.left + left * wide)} {svg.number(frame.top + row * high)}"
        f"h{svg.number((right - left) * wide)}v{svg.number(high * 0.92)}h{svg.number((left - right) * wide)}z"
        for (row, left), (_, right) in zip(starts, ends, strict=True)
    ]
    return svg.element("path", class_=f"cell c{group}", d="".join(pieces)) if pieces else ""
