"""Labels close to their points, clear of one another, and never nearer to another point than to their own.

Each label takes the cheapest of some places around its point. Covering something, sticking out of the figure, standing far
off and standing as near to another point all cost. Labels choose in turn. Then those that are not well placed move, and
make those in their way choose again, as long as all together become better off.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import hypot
from typing import Literal, NamedTuple

from poise.lab.report.frame import BOLD, TEXT, shorten, text_width

Anchor = Literal["", "middle", "end"]

RADIUS = 5.5
"""Of a point, with its edge."""
NEAR = 10.0
"""Units from the middle of a point to its label within which no line need lead from one to the other."""
_LONGEST = 200.0
_HALF_LINE = 7.0
_PASSES, _TRIED = 4, 12
"""How often all labels are looked at again, and how many places are tried for one of them."""
_FEW = 16
"""Points up to which that is done: it takes long with more, and a crowd has no good places to find."""
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
        """The area of what both cover."""
        across = min(self.right, other.right) - max(self.left, other.left)
        down = min(self.bottom, other.bottom) - max(self.top, other.top)
        return across * down if across > 0 and down > 0 else 0.0

    def grown(self, by: float) -> "Area":
        """The same with a margin on every side."""
        return Area(self.left - by, self.top - by, self.right + by, self.bottom + by)

    def nearest(self, x: float, y: float) -> tuple[float, float]:
        """Where in it one is nearest to a point."""
        return min(max(x, self.left), self.right), min(max(y, self.top), self.bottom)

    def off(self, x: float, y: float) -> float:
        """How far it is from a point."""
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
    """A place for each label; where two want the same and no better is found, the earlier point has it."""
    table = _LabelGrid(points, bounds, lines)
    for _ in range(_PASSES if len(points) <= _FEW else 0):
        if not table.improve():
            break
    return [seat.spot for seat in table.seats]


class _Seat(NamedTuple):
    """A place for a label, and what it costs whatever the other labels do."""

    cost: float
    spot: Spot


class _LabelGrid:
    """Where the labels are so far. At first each takes the cheapest place that those before it leave."""

    def __init__(self, points: Sequence[Point], bounds: Area, lines: Sequence[Area]) -> None:
        around = _Around(points, bounds, lines)
        self._choices = [[_Seat(around.cost(point, spot.area), spot) for spot in _choices(point)] for point in points]
        self.seats: list[_Seat] = []
        for place in range(len(points)):
            self.seats.append(self._cheapest(place))

    def improve(self) -> bool:
        """Try for every label that is not well placed whether all are better off if it moves, and those in its way."""
        moved = False
        for place in range(len(self.seats)):
            if self._cost(place, self.seats[place]):
                moved |= self._move(place)
        return moved

    def _move(self, place: int) -> bool:
        before, least = list(self.seats), sum(self._cost(each, seat) for each, seat in enumerate(self.seats))
        best = before
        for seat in sorted(self._choices[place], key=lambda seat: seat.cost)[:_TRIED]:
            self.seats = list(before)
            self.seats[place] = seat
            for other, theirs in enumerate(before):
                if other != place and theirs.spot.area.shared_with(seat.spot.area):
                    self.seats[other] = self._cheapest(other)
            now = sum(self._cost(each, seat) for each, seat in enumerate(self.seats))
            if now < least - _ROUNDING:
                best, least = self.seats, now
        self.seats = best
        return best is not before

    def _cheapest(self, place: int) -> _Seat:
        return min(self._choices[place], key=lambda seat: self._cost(place, seat))

    def _cost(self, place: int, seat: _Seat) -> float:
        """What a seat costs, with what it covers of other labels."""
        area = seat.spot.area
        hidden = sum(area.shared_with(other.spot.area) for index, other in enumerate(self.seats) if index != place)
        return seat.cost + _ON_A_LABEL * hidden


class _Around(NamedTuple):
    """What stays where it is."""

    points: Sequence[Point]
    bounds: Area
    lines: Sequence[Area]

    def cost(self, mine: Point, area: Area) -> float:
        """What it costs to put the label of a point there."""
        own = area.off(mine.x, mine.y)
        covered = sum(area.shared_with(Area(each.x, each.y, each.x, each.y).grown(RADIUS)) for each in self.points)
        lined = sum(area.shared_with(each) for each in self.lines)
        whole = (area.right - area.left) * (area.bottom - area.top)
        outside = whole - area.shared_with(self.bounds)
        astray = sum(
            area.off(other.x, other.y) < own + _MARGIN
            for other in self.points
            if (other.x, other.y) != (mine.x, mine.y)  # of points at one place, each is as near
        )
        far = _FAR_OFF * max(0.0, own - NEAR)
        return _ON_A_POINT * covered + _ON_A_LINE * lined + _OUTSIDE * outside + far + _ASTRAY * astray


def _choices(point: Point) -> Iterator[Spot]:
    """Beside it, above and below it, a little up or down or aside, close by and then further off; the first are liked."""
    bold = BOLD if point.kind == "best" else 1.0
    label = shorten(point.name, _LONGEST, TEXT * BOLD)
    width = text_width(label, TEXT * bold)
    for gap in (9.0, 22.0, 36.0, 52.0):
        over = gap + _HALF_LINE
        for rise in (0.0, -5.0, 5.0, -9.0, 9.0):
            yield _spot(label, width, point, (gap, rise))
            yield _spot(label, width, point, (-gap, rise))
        for aside in (0.0, 0.25, -0.25, 0.45, -0.45):
            yield _spot(label, width, point, (0.0, -over), aside)
            yield _spot(label, width, point, (0.0, over), aside)
        for aside in (gap * 0.6, -gap * 0.6):
            yield _spot(label, width, point, (aside, -over))
            yield _spot(label, width, point, (aside, over))


def _spot(label: str, width: float, point: Point, off: tuple[float, float], aside: float = 0.0) -> Spot:
    """A label off its point: it starts there if that is to the right, ends there if to the left, else is centred.

    One that is centred may be pushed aside by a part of its width.
    """
    x, y = point.x + off[0] + aside * width, point.y + off[1]
    anchor: Anchor = "end" if off[0] < 0 else "" if off[0] > 0 else "middle"
    left = x - {"end": width, "": 0.0, "middle": width / 2}[anchor]
    area = Area(left, y - _HALF_LINE, left + width, y + _HALF_LINE)
    return Spot(label, x, y, anchor, area.off(point.x, point.y) > NEAR, area)
