"""Who held which GPUs when, as columns: what a GPU timeline is drawn from, compact enough to send between processes.

GPUs are rows, node by node in the order of the cluster. A block is a hold of neighbouring rows by one job: a stint on GPUs
that do not lie together is several blocks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from poise.analysis.history import History
from poise.analysis.stints import End, Stint
from poise.model.arrays import Floats
from poise.model.cluster import Cluster, Holding

Small = NDArray[np.int32]
Piece = tuple[int, int]
"""First row, number of rows."""

ENDS = tuple(End)
"""How a block ended is the place in here."""
_PLACES = {end: place for place, end in enumerate(ENDS)}
_COLUMNS = ("job", "row", "rows", "start", "end", "ended", "lane")
_LOWER = 2
"""Lane of the lower half of a row."""
_FINEST = 1 << 18
"""Where there are too many blocks, those shorter than the span over this are put together first."""


@dataclass(frozen=True, slots=True)
class Track:
    """One run. Moments are seconds since the first submission; the columns of blocks are in ascending order of `start`.

    jobs     ids;  tenant: of each job, its place in `tenants`;  gpus: of each job, how many it asked for
    job      of each block its job's place in `jobs`; `len(jobs)` + a tenant's place stands for several jobs, see `coarsened`
    ended    of each block the place in ENDS;  lane: 0 if it has its rows for itself, 1 or 2 if it shares them with another
    """

    jobs: tuple[str, ...]
    tenants: tuple[str, ...]
    tenant: Small
    gpus: Small
    job: Small
    row: Small
    rows: Small
    start: Floats
    end: Floats
    ended: Small
    lane: Small

    @staticmethod
    def of(history: History) -> "Track":
        """What a journal says; holds that took no time are left out."""
        lives = list(history.jobs.values())
        tenants = {name: place for place, name in enumerate(dict.fromkeys(life.tenant for life in lives))}
        place = {life.id: index for index, life in enumerate(lives)}
        first = min((life.submitted for life in lives), default=0.0)
        stints = sorted((stint for stint in history.stints if stint.end > stint.start), key=lambda stint: stint.start)
        counts, row, rows = _pieces_of(stints, history.cluster)
        start = np.repeat(np.array([stint.start for stint in stints], dtype=np.float64), counts) - first
        end = np.repeat(np.array([stint.end for stint in stints], dtype=np.float64), counts) - first
        return Track(
            jobs=tuple(place),
            tenants=tuple(tenants),
            tenant=_small(tenants[life.tenant] for life in lives),
            gpus=_small(life.gpus for life in lives),
            job=np.repeat(_small(place[stint.job] for stint in stints), counts),
            row=row,
            rows=rows,
            start=start,
            end=end,
            ended=np.repeat(_small(_PLACES[stint.ended] for stint in stints), counts),
            lane=_lanes(row, start, end),
        )

    @property
    def owner(self) -> Small:
        """Of each block, its tenant's place in `tenants`."""
        known = np.concatenate((self.tenant, np.arange(len(self.tenants), dtype=np.int32)))
        return known[self.job]

    def chosen(self, blocks: NDArray[np.intp] | NDArray[np.bool_]) -> "Track":
        """The same with these blocks alone, in this order."""
        return self._with({name: getattr(self, name)[blocks] for name in _COLUMNS})

    def joined(self, other: "Track") -> "Track":
        """The same with blocks of another track of the same jobs, again by start."""
        whole = self._with({name: np.concatenate((getattr(self, name), getattr(other, name))) for name in _COLUMNS})
        return whole.chosen(np.lexsort((whole.row, whole.start)))

    def _with(self, columns: dict[str, Any]) -> "Track":
        return replace(self, **columns)


def first_rows(cluster: Cluster) -> list[int]:
    """The first row of each node, and the number of rows."""
    return [0, *np.cumsum([node.gpus for node in cluster.nodes]).tolist()]


def coarsened(track: Track, most: int) -> tuple[Track, float]:
    """A track of about `most` blocks or fewer, and the length in seconds below which blocks were put together (0: none).

    Of the shorter holds of a row that begin within one such length, one stays: as long as all of them together, so that
    the time held stays what it was, of the tenant and with the end of the longest of them. Rows on which the same comes
    of it are one block. Nothing overlaps that did not.
    """
    if len(track.start) <= most:
        return track, 0.0
    rows, widest, span = _row_by_row(track), int(track.rows.max()), float(track.end.max())
    length = span / _FINEST
    while True:
        long, short = _lasting(track) >= length, _lasting(rows) < length
        heads = _heads(rows, short, length)
        if np.count_nonzero(long) + heads.size / widest <= most or length >= span:
            fewer = track.chosen(long).joined(_stacked(_pooled(rows.chosen(short), heads)))
            if len(fewer.start) <= most or length >= span:
                return fewer, length
        length *= 2


def _lasting(track: Track) -> Floats:
    return track.end - track.start


def _row_by_row(track: Track) -> Track:
    """A block for every row of every block, by row and start; those in the lower lane come last."""
    source = np.repeat(np.arange(len(track.start)), track.rows)
    offset = np.arange(len(source)) - np.repeat(np.cumsum(track.rows) - track.rows, track.rows)
    single = track.chosen(source)
    single = replace(single, row=(single.row + offset).astype(np.int32), rows=np.ones_like(single.rows))
    return single.chosen(np.lexsort((single.start, single.row, single.lane == _LOWER)))


def _heads(rows: Track, short: NDArray[np.bool_], length: float) -> NDArray[np.intp]:
    """Places among the short of these blocks at which one begins on another row, or in another cell of time."""
    return _changes(rows.lane[short] == _LOWER, rows.row[short], np.floor(rows.start[short] / length))


def _changes(*columns: NDArray[Any]) -> NDArray[np.intp]:
    """Where a column has another value than one place before, and the first place."""
    differ = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    return np.flatnonzero(np.append(True, differ)) if columns[0].size else np.empty(0, dtype=np.intp)


def _pooled(rows: Track, heads: NDArray[np.intp]) -> Track:
    """One block for all that the head of a cell stands for, up to the next head."""
    if not heads.size:
        return rows
    counts = np.diff(np.append(heads, len(rows.start)))
    time = _lasting(rows)
    longest = rows.chosen(np.lexsort((-time, np.repeat(np.arange(len(heads)), counts)))[heads])
    job = np.where(counts > 1, len(rows.jobs) + longest.owner, longest.job).astype(np.int32)
    start, lane = rows.start[heads], np.maximum.reduceat(rows.lane, heads)  # a whole row would lie on the lower lane's half
    return replace(longest, job=job, start=start, end=start + np.add.reduceat(time, heads), lane=lane)


def _stacked(rows: Track) -> Track:
    """Blocks of one row each that are alike and lie one below the other, as one."""
    found = rows.chosen(np.lexsort((rows.row, rows.lane, rows.ended, rows.job, rows.end, rows.start)))
    below = (found.row - np.arange(len(found.row))).astype(np.int32)  # the same as long as rows follow one another
    heads = _changes(found.start, found.end, found.job, found.ended, found.lane, below)
    return replace(found.chosen(heads), rows=np.diff(np.append(heads, len(found.row))).astype(np.int32))


def _small(values: Iterable[int]) -> Small:
    return np.fromiter(values, dtype=np.int32)


def _pieces_of(stints: Sequence[Stint], cluster: Cluster) -> tuple[Small, Small, Small]:
    """How many blocks each stint is, and the first row and the number of rows of each block."""
    first = first_rows(cluster)
    known: dict[Holding, list[Piece]] = {}
    found: list[list[Piece]] = []
    for stint in stints:
        pieces = known.get(stint.gpus)
        if pieces is None:
            pieces = known[stint.gpus] = _pieces(stint.gpus, first)
        found.append(pieces)
    flat = np.array([piece for pieces in found for piece in pieces], dtype=np.int32).reshape(-1, 2)
    return _small(map(len, found)), flat[:, 0].copy(), flat[:, 1].copy()


def _pieces(holding: Holding, first: Sequence[int]) -> list[Piece]:
    """Runs of neighbouring rows, of one node or of several that lie side by side."""
    found: list[Piece] = []
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


def _lanes(row: Small, start: Floats, end: Floats) -> Small:
    """1 and 2 for blocks that are on the same rows at the same time; 0 for all others."""
    lanes = np.zeros(len(row), dtype=np.int32)
    order = np.lexsort((start, row))
    shared = order[_overlapping(row[order], start[order], end[order])]
    free: dict[int, float] = {}
    for block in shared.tolist():  # few: sharing is rare, and only what shares comes here
        place, begins = int(row[block]), float(start[block])
        lanes[block] = 2 if free.get(place, begins) > begins else 1
        if lanes[block] == 1:
            free[place] = float(end[block])
    return lanes


def _overlapping(row: Small, start: Floats, end: Floats) -> NDArray[np.bool_]:
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
