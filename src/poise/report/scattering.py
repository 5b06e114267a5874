"""Points with labels that do not cover one another, and the frontier of those that nothing beats."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from poise.report.frame import TEXT, WIDTH, Frame, text, tooltip
from poise.report.markup import BOLD, element, shorten, text_width
from poise.report.series import FloatArray

MOST_LABELS = 40
"""With more points than this the rest are named by their tooltips alone."""
_LONGEST = 200.0
_RADIUS = 5.5
_HALF_LINE = 7.0


class Area(NamedTuple):
    """A rectangle of the figure; one without width or height is a line."""

    left: float
    top: float
    right: float
    bottom: float

    def shared_with(self, other: "Area") -> float:
        """The area of what both cover."""
        across = min(self.right, other.right) - max(self.left, other.left)
        down = min(self.bottom, other.bottom) - max(self.top, other.top)
        return max(0.0, across) * max(0.0, down)

    def grown(self, by: float) -> "Area":
        """The same with a margin on every side."""
        return Area(self.left - by, self.top - by, self.right + by, self.bottom + by)


@dataclass(frozen=True, slots=True)
class Point:
    """A point where it is drawn, in units of the figure, and what its tooltip says."""

    name: str
    note: str
    x: float
    y: float
    kind: Literal["best", "other"]


@dataclass(frozen=True, slots=True)
class Spot:
    """A label: where on its middle line it starts, ends or is centred, and whether a line must lead to its point."""

    text: str
    x: float
    y: float
    anchor: Literal["", "middle", "end"]
    far: bool
    area: Area


def frontier(x: FloatArray, y: FloatArray) -> list[int]:
    """Indices, by ascending x, of the points that no other is at or below in both and below in one."""
    found: list[int] = []
    lowest = np.inf
    for index in np.lexsort((y, x)).tolist():
        twin = bool(found) and x[index] == x[found[-1]] and y[index] == y[found[-1]]
        if twin or y[index] < lowest:
            found.append(index)
            lowest = min(lowest, float(y[index]))
    return found


def draw_points(points: Sequence[Point], frame: Frame) -> str:
    """The frontier's edge, then the points, the best on top, then the labels, of which the best choose first.

    The best points come in the order of the frontier, by ascending x.
    """
    best = [point for point in points if point.kind == "best"]
    first = [*best, *(point for point in points if point.kind == "other")]
    edge = _edge(best, frame)
    bounds = Area(frame.left, frame.top, WIDTH - 2.0, frame.bottom)
    spots = label_spots(first[:MOST_LABELS], bounds, [piece.grown(2) for piece in edge])
    labelled = list(zip(first, spots, strict=False))
    path = "".join(f"M{each.left:.1f} {each.top:.1f}L{each.right:.1f} {each.bottom:.1f}" for each in edge)
    return "".join(
        [
            element("path", class_="frontier", d=path),
            *(_leader(point, spot) for point, spot in labelled if spot.far),
            *(_dot(point) for point in reversed(first)),
            *(_label(point, spot) for point, spot in labelled),
        ]
    )


def label_spots(points: Sequence[Point], bounds: Area, taken: Sequence[Area] = ()) -> list[Spot]:
    """A place for each label near its point where it covers least; earlier points choose first."""
    dots = [Area(each.x, each.y, each.x, each.y).grown(_RADIUS) for each in points]
    chosen: list[Spot] = []
    for point in points:
        covered = [*taken, *dots, *(spot.area for spot in chosen)]
        chosen.append(_cheapest(_choices(point), covered, bounds))
    return chosen


def _edge(best: Sequence[Point], frame: Frame) -> list[Area]:
    """The edge of what the frontier beats: down to each point and across to the next, open at the top and the right."""
    tops, ends = [frame.top, *(point.y for point in best)], [*(point.x for point in best), frame.right]
    pieces: list[Area] = []
    for top, point, end in zip(tops, best, ends[1:], strict=False):
        pieces += [Area(point.x, top, point.x, point.y), Area(point.x, point.y, end, point.y)]
    return pieces


def _choices(point: Point) -> Iterator[Spot]:
    """Right, left, above, below and the corners between, close by and then further off; the first are liked best."""
    label = shorten(point.name, _LONGEST, TEXT * BOLD)
    for ring, gap in enumerate((9.0, 24.0, 40.0)):
        over, slant = gap + _HALF_LINE, gap * 0.6
        sides = ((gap, 0.0), (-gap, 0.0), (0.0, -over), (0.0, over))
        corners = ((slant, -over), (slant, over), (-slant, -over), (-slant, over))
        for off in (*sides, *corners):
            yield _spot(label, point, off, ring)


def _spot(label: str, point: Point, off: tuple[float, float], ring: int) -> Spot:
    """A label off its point: it starts there if that is to the right, ends there if to the left, else is centred."""
    x, y = point.x + off[0], point.y + off[1]
    width = text_width(label, TEXT * BOLD if point.kind == "best" else TEXT)
    left = x - (width if off[0] < 0 else 0.0 if off[0] > 0 else width / 2)
    anchor: Literal["", "middle", "end"] = "end" if off[0] < 0 else "" if off[0] > 0 else "middle"
    return Spot(label, x, y, anchor, ring > 0, Area(left, y - _HALF_LINE, left + width, y + _HALF_LINE))


def _cheapest(choices: Iterable[Spot], covered: Sequence[Area], bounds: Area) -> Spot:
    return min(choices, key=lambda spot: _cost(spot.area, covered, bounds))


def _cost(area: Area, covered: Sequence[Area], bounds: Area) -> float:
    overlap = sum(area.shared_with(other) for other in covered)
    whole = (area.right - area.left) * (area.bottom - area.top)
    # Sticking out of the figure loses part of the text, which is worse than covering a neighbour.
    return overlap + 10 * (whole - area.shared_with(bounds))


def _leader(point: Point, spot: Spot) -> str:
    return element("path", class_="rule", d=f"M{point.x:.1f} {point.y:.1f}L{spot.x:.1f} {spot.y:.1f}")


def _dot(point: Point) -> str:
    dot = element("circle", class_="point", cx=point.x, cy=point.y, r="5")
    return element("g", tooltip(f"{point.name}: {point.note}"), dot, class_=point.kind)


def _label(point: Point, spot: Spot) -> str:
    weight = "strong" if point.kind == "best" else "soft"
    return text(spot.text, spot.x, spot.y + 4, f"halo {weight} {spot.anchor}".rstrip())
