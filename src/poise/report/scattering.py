"""Points with labels, and the frontier of those that nothing beats."""

from collections.abc import Sequence

import numpy as np

from poise.report.frame import WIDTH, Frame, text, tooltip
from poise.report.labelling import Area, Point, Spot, label_spots
from poise.report.markup import element
from poise.report.series import FloatArray

MOST_LABELS = 40
"""With more points than this the rest are named by their tooltips alone."""


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


def _edge(best: Sequence[Point], frame: Frame) -> list[Area]:
    """The edge of what the frontier beats: down to each point and across to the next, open at the top and the right."""
    tops, ends = [frame.top, *(point.y for point in best)], [*(point.x for point in best), frame.right]
    pieces: list[Area] = []
    for top, point, end in zip(tops, best, ends[1:], strict=False):
        pieces += [Area(point.x, top, point.x, point.y), Area(point.x, point.y, end, point.y)]
    return pieces


def _leader(point: Point, spot: Spot) -> str:
    x, y = spot.area.nearest(point.x, point.y)
    return element("path", class_="leader", d=f"M{point.x:.1f} {point.y:.1f}L{x:.1f} {y:.1f}")


def _dot(point: Point) -> str:
    dot = element("circle", class_="point", cx=point.x, cy=point.y, r="5")
    return element("g", tooltip(f"{point.name}: {point.note}"), dot, class_=point.kind)


def _label(point: Point, spot: Spot) -> str:
    weight = "strong" if point.kind == "best" else "soft"
    return text(spot.text, spot.x, spot.y + 4, f"halo {weight} {spot.anchor}".rstrip())
