"""Placement of point labels: close to their points, clear of one another, never nearer to another point than to their own.

A local search. Each label has some candidate positions around its point, each with a cost: for covering something, for
sticking out of the figure, for standing far off, for standing as near to another point. Labels choose in turn, the cheapest
position that is left. Then those that are not well placed move and make those in their way choose again, as long as the
total cost falls.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import hypot
from typing import Literal, NamedTuple

from poise.lab.report.frame import BOLD, TEXT, shorten, text_width

Anchor = Literal["", "middle", "end"]

RADIUS = 5.5
"""Radius of a point, with its edge."""
NEAR = 10.0
"""Units from the middle of a point to its label within which no line need lead from one to the other."""
_LONGEST = 200.0
_HALF_LINE = 7.0
_PASSES, _TRIED = 4, 12
"""Passes over all labels, and candidates tried per label and pass."""
_FEW = 16
"""Points up to which labels are moved: it takes long with more, and a crowd has no good positions to find."""
_ROUNDING = 1e-6
_FAR_OFF, _ASTRAY, _OUTSIDE, _ON_A_POINT, _ON_A_LABEL, _ON_A_LINE = 4.0, 150.0, 10.0, 3.0, 8.0, 0.3
"""What it costs: a unit beyond NEAR; another point as near; a square unit outside the figure; one on a point; one on another
label; one on a line, which shows through between letters."""
_MARGIN = 2.0
"""Units by which a label is nearer to its own point than to all others."""


class Area(NamedTuple):
    """A rectangle of the figure; one without width or height is a line."""

    left: float
    top: float
    right: float
    bottom: float

    def shared_with(self, other: "Area") -> float:
        """Area of the intersection."""
        across = min(self.right, other.right) - max(self.left, other.left)
        down = min(self.bottom, other.bottom) - max(self.top, other.top)
        return across * down if across > 0 and down > 0 else 0.0

    def grown(self, by: float) -> "Area":
        """The same with a margin on every side."""
        return Area(self.left - by, self.top - by, self.right + by, self.bottom + by)

    def nearest(self, x: float, y: float) -> tuple[float, float]:
        """The nearest place inside it to a point."""
        return min(max(x, self.left), self.right), min(max(y, self.top), self.bottom)

    def off(self, x: float, y: float) -> float:
        """Distance to a point."""
        a, b = self.nearest(x, y)
        return hypot(a - x, b - y)


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
    anchor: Anchor
    far: bool
    area: Area


def label_spots(points: Sequence[Point], bounds: Area, lines: Sequence[Area] = ()) -> list[Spot]:
    """A position for each label; where two want the same and no better is found, the earlier point has it."""
    search = _LabelSearch(points, bounds, lines)
    for _ in range(_PASSES if len(points) <= _FEW else 0):
        if not search.improve():
            break
    return [position.spot for position in search.chosen]


class _LabelPosition(NamedTuple):
    """A position for a label, and what it costs whatever the other labels do."""

    cost: float
    spot: Spot


class _LabelSearch:
    """The positions chosen so far. At first each label takes the cheapest that those before it leave."""

    def __init__(self, points: Sequence[Point], bounds: Area, lines: Sequence[Area]) -> None:
        self._points, self._bounds, self._lines = points, bounds, lines
        self._positions = [
            [_LabelPosition(self._fixed_cost(point, spot.area), spot) for spot in _spots_around(point)] for point in points
        ]
        self.chosen: list[_LabelPosition] = []
        for place in range(len(points)):
            self.chosen.append(self._cheapest(place))

    def improve(self) -> bool:
        """For each label that is not well placed, try whether moving it, and those in its way, lowers the total cost."""
        moved = False
        for place in range(len(self.chosen)):
            if self._cost(place, self.chosen[place]):
                moved |= self._move(place)
        return moved

    def _move(self, place: int) -> bool:
        before, least = list(self.chosen), sum(self._cost(each, taken) for each, taken in enumerate(self.chosen))
        best = before
        for position in sorted(self._positions[place], key=lambda position: position.cost)[:_TRIED]:
            self.chosen = list(before)
            self.chosen[place] = position
            for other, theirs in enumerate(before):
                if other != place and theirs.spot.area.shared_with(position.spot.area):
                    self.chosen[other] = self._cheapest(other)
            now = sum(self._cost(each, taken) for each, taken in enumerate(self.chosen))
            if now < least - _ROUNDING:
                best, least = self.chosen, now
        self.chosen = best
        return best is not before

    def _cheapest(self, place: int) -> _LabelPosition:
        return min(self._positions[place], key=lambda position: self._cost(place, position))

    def _cost(self, place: int, position: _LabelPosition) -> float:
        """What a position costs, with what it covers of other labels."""
        area = position.spot.area
        hidden = sum(area.shared_with(other.spot.area) for index, other in enumerate(self.chosen) if index != place)
        return position.cost + _ON_A_LABEL * hidden

    def _fixed_cost(self, mine: Point, area: Area) -> float:
        """What it costs to put the label of a point there, because of what does not move."""
        own = area.off(mine.x, mine.y)
        covered = sum(area.shared_with(Area(each.x, each.y, each.x, each.y).grown(RADIUS)) for each in self._points)
        lined = sum(area.shared_with(each) for each in self._lines)
        whole = (area.right - area.left) * (area.bottom - area.top)
        outside = whole - area.shared_with(self._bounds)
        astray = sum(
            area.off(other.x, other.y) < own + _MARGIN
            for other in self._points
            if (other.x, other.y) != (mine.x, mine.y)  # of points at one place, each is as near
        )
        far = _FAR_OFF * max(0.0, own - NEAR)
        return _ON_A_POINT * covered + _ON_A_LINE * lined + _OUTSIDE * outside + far + _ASTRAY * astray


def _spots_around(point: Point) -> Iterator[Spot]:
    """Beside the point, above and below it, slightly up or down or aside, near and then further off; the best first."""
    bold = BOLD if point.kind == "best" else 1.0
    label = shorten(point.name, _LONGEST, TEXT * BOLD)
    width = text_width(label, TEXT * bold)

    def spot(right: float, down: float, aside: float = 0.0) -> Spot:
        """A label off its point: it starts there if that is to the right, ends there if to the left, else is centred.

        One that is centred may be pushed aside by a part of its width.
        """
        x, y = point.x + right + aside * width, point.y + down
        anchor: Anchor = "end" if right < 0 else "" if right > 0 else "middle"
        left = x - {"end": width, "": 0.0, "middle": width / 2}[anchor]
        area = Area(left, y - _HALF_LINE, left + width, y + _HALF_LINE)
        return Spot(label, x, y, anchor, area.off(point.x, point.y) > NEAR, area)

    for gap in (9.0, 22.0, 36.0, 52.0):
        over = gap + _HALF_LINE
        for rise in (0.0, -5.0, 5.0, -9.0, 9.0):
            yield spot(gap, rise)
            yield spot(-gap, rise)
        for aside in (0.0, 0.25, -0.25, 0.45, -0.45):
            yield spot(0.0, -over, aside)
            yield spot(0.0, over, aside)
        for aside in (gap * 0.6, -gap * 0.6):
            yield spot(aside, -over)
            yield spot(aside, over)
