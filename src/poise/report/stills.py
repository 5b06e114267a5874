"""A run of the GPU timeline as a coarse picture, for readers without scripts."""

import numpy as np
from numpy.typing import NDArray

from poise.model.cluster import Cluster
from poise.report.axis import Axis, span_axis
from poise.report.curves import legend_for
from poise.report.frame import TEXT, Frame, Labels, figure, framed, heading, height_of, surroundings, text
from poise.report.markup import element, number, shorten
from poise.report.style import LIGHT_SERIES
from poise.report.ticks import Tick
from poise.report.tracks import Track, first_rows

COLOURS = len(LIGHT_SERIES)
"""Tenants with a colour of their own; the rest share a grey."""
_ACROSS, _DOWN = 220, 48
_OTHERS = "others"
_SWATCH = 24.0


def still(name: str, track: Track, tenants: tuple[str, ...], cluster: Cluster, span: float) -> str:
    """The whole span, time across, GPUs down; a cell has the colour of who held its middle. Tenants: most GPU time first."""
    drawn_title, top = heading(name)
    words = [*tenants[:COLOURS], _OTHERS][: len(tenants)] if len(tenants) > 1 else []
    legend = legend_for(words, top)
    frame = framed(span_axis(np.array([0.0, span]), "seconds", 6), _rows_axis(cluster), legend.bottom)
    groups = _groups(track, tenants)
    shown = [_path(frame, cells, group) for group, cells in enumerate(_cells(track, groups, cluster.gpus, span))]
    keys = [_key(word, group, spot) for group, (word, spot) in enumerate(zip(words, legend.spots, strict=True))]
    around = surroundings(frame, Labels(name, "time since the first submission", ""))
    described = f"GPU timeline of {name}: who held which of {cluster.gpus:,} GPUs when, coarsely."
    return figure(described, height_of(frame), drawn_title, around, *keys, *shown)


def _rows_axis(cluster: Cluster) -> Axis:
    """Rows downwards, named by GPU type where its first node begins."""
    first, seen = first_rows(cluster), set()
    ticks: list[Tick] = []
    for node, row in zip(cluster.nodes, first, strict=False):
        if node.gpu_type not in seen:
            seen.add(node.gpu_type)
            ticks.append(Tick(float(first[-1] - row), shorten(node.gpu_type, 70.0, TEXT)))
    return Axis(0.0, float(first[-1]), "linear", tuple(ticks[:12]))


def _groups(track: Track, tenants: tuple[str, ...]) -> NDArray[np.int64]:
    """Of each block, its colour: by tenant, by job if there is but one tenant; COLOURS is the grey of the rest."""
    if len(tenants) == 1:
        return track.job.astype(np.int64) % COLOURS
    place = {name: min(index, COLOURS) for index, name in enumerate(tenants)}
    return np.array([place[name] for name in track.tenants], dtype=np.int64)[track.owner]


def _cells(track: Track, groups: NDArray[np.int64], gpus: int, span: float) -> list[NDArray[np.bool_]]:
    """Of each group the cells that it held: a row of cells is some rows of GPUs, of which the middle one counts."""
    down = min(_DOWN, gpus)
    picture = np.full((down, _ACROSS), -1)
    middles = (np.arange(down) + 0.5) * gpus / down
    left = np.ceil(track.start / span * _ACROSS - 0.5).astype(np.int64)
    right = np.ceil(track.end / span * _ACROSS - 0.5).astype(np.int64)
    top = np.searchsorted(middles, track.row)
    bottom = np.searchsorted(middles, track.row + track.rows)
    for block in np.flatnonzero((left < right) & (top < bottom)).tolist():
        picture[top[block] : bottom[block], left[block] : right[block]] = groups[block]
    return [picture == group for group in range(COLOURS + 1)]


def _path(frame: Frame, cells: NDArray[np.bool_], group: int) -> str:
    """Cells as rectangles, neighbours in a row as one."""
    wide, high = (frame.right - frame.left) / cells.shape[1], (frame.bottom - frame.top) / cells.shape[0]
    edges = np.diff(np.pad(cells, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    starts, ends = np.argwhere(edges == 1).tolist(), np.argwhere(edges == -1).tolist()
    pieces = [
        f"M{number(frame.left + left * wide)} {number(frame.top + row * high)}"
        f"h{number((right - left) * wide)}v{number(high * 0.92)}h{number((left - right) * wide)}z"
        for (row, left), (_, right) in zip(starts, ends, strict=True)
    ]
    return element("path", class_=f"cell c{group}", d="".join(pieces)) if pieces else ""


def _key(word: str, group: int, spot: tuple[float, float]) -> str:
    left, middle = spot
    swatch = element(
        "path", class_=f"cell c{group}", d=f"M{number(left)} {number(middle - 5)}h{number(_SWATCH - 6)}v10h-18z"
    )
    return swatch + text(shorten(word, 190.0, TEXT), left + _SWATCH + 5, middle + 4)
