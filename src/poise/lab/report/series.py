"""What is drawn: points in order, finite, and few enough for a page."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Literal

import numpy as np
import numpy.typing as npt

from poise.scheduler.model.errors import InvariantError

HUGE = 1e300
"""Values beyond are shown as this, so that spans and percentages stay finite."""
FloatArray = npt.NDArray[np.float64]

MOST_POINTS = 600


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one line: `x` and `y` have equal length; the order of the points does not matter."""

    label: str
    x: FloatArray
    y: FloatArray

    def __post_init__(self) -> None:
        if self.x.ndim != 1 or self.x.shape != self.y.shape:
            raise InvariantError(f"series {self.label!r}: x has shape {self.x.shape}, y {self.y.shape}; expected equal")

    def finite(self) -> "Series":
        """Its points by ascending x (equal ones in the given order), without those that are NaN or infinite."""
        kept = np.isfinite(self.x) & np.isfinite(self.y)
        x, y = clipped(self.x[kept]), clipped(self.y[kept])
        order = np.argsort(x, kind="stable")
        return Series(self.label, x[order], y[order])


def clipped(values: FloatArray) -> FloatArray:
    """Values of at most `HUGE`, as floats whatever they were."""
    return np.clip(values.astype(np.float64), -HUGE, HUGE)


def thinned(places: FloatArray, values: FloatArray, most: int = MOST_POINTS) -> npt.NDArray[np.intp]:
    """Ascending indices of at most `most` points (itself at least 8) that look like all of them.

    `places` ascend and are where the points stand along the axis as drawn. The axis is cut into at least `most // 4`
    strips of a few pixels; a strip keeps its first, lowest, highest and last point. So every extreme stays, and so does
    the value that a step carries from one strip to the next.
    """
    count = len(places)
    if count <= most:
        return np.arange(count)
    # Where the values only rise, a strip keeps two points instead of four, and there can be twice as many strips.
    tries = (_kept(places, values, most // 4 * finer) for finer in (4, 2, 1))
    return next(kept for kept in tries if kept.size <= most)


def _kept(places: FloatArray, values: FloatArray, strips: int) -> npt.NDArray[np.intp]:
    """The first, lowest, highest and last point of each of so many strips of equal width."""
    span = places[-1] - places[0]
    along = (places - places[0]) / span if span > 0 else np.zeros_like(places)
    strip = np.minimum((along * strips).astype(np.intp), strips - 1)
    starts = np.flatnonzero(np.diff(strip, prepend=-1))
    ends = np.append(starts[1:], len(strip)) - 1
    ranks = np.lexsort((values, strip))  # within a strip by value: its lowest stands first, its highest last
    return np.unique(np.concatenate((starts, ends, ranks[starts], ranks[ends])))


def averaged(series: Series, length: float) -> Series:
    """Steps as their means over stretches of a length, counted from zero; the last stretch ends with the series.

    `x` ascends. The last point has the last value, which nothing follows. So the area below the steps stays what it was.
    """
    moments, levels = series.x, series.y
    inner = np.arange(np.floor(moments[0] / length) + 1, np.ceil(moments[-1] / length)) * length if moments.size else moments
    edges = np.unique(np.concatenate((moments[:1], inner, moments[-1:])))
    if edges.size < 2:
        return series
    area = np.concatenate(([0.0], np.cumsum(levels[:-1] * np.diff(moments))))
    means = np.diff(np.interp(edges, moments, area)) / np.diff(edges)
    return Series(series.label, edges, np.append(means, levels[-1]))


def distribution(samples: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The distinct finite samples, ascending, and the share of finite samples at or below each."""
    kept = clipped(samples[np.isfinite(samples)])
    values, counts = np.unique(kept, return_counts=True)
    return values, np.cumsum(counts) / max(1, kept.size)


# Which of several values are the best, to a reader who sees them as they are written.

Kind = Literal["lowest", "highest"]


def best_places(values: Sequence[float | None], written: Sequence[str], kind: Kind) -> list[int]:
    """Places of the best value and of all that are written as it is: a reader could not say why one is marked alone.

    None where fewer than two are known, or where all known ones are written the same: then there is nothing to choose.
    """
    known = {place: value for place, value in enumerate(values) if value is not None and isfinite(value)}
    if len({written[place] for place in known}) < 2:
        return []
    best = (min if kind == "lowest" else max)(known, key=lambda place: known[place])
    return [place for place in known if written[place] == written[best]]
