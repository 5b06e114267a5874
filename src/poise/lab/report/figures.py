"""Figures: each is one `<svg>` element as text, styled by `style.FIGURE`, without ids, scripts or addresses.

Values that are NaN or infinite are not drawn. The same input gives the same bytes. Shares are numbers from 0 to 1 and
are written as percent; durations are in seconds.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from poise.lab.report import style
from poise.lab.report.axes import Axis, Scale, Unit, amount, bare_axis, level_axis, log_axis, points_axis, span_axis
from poise.lab.report.frame import (
    BOLD,
    MARGIN,
    ROW,
    TEXT,
    WIDTH,
    FigureLabels,
    Frame,
    described,
    element,
    figure,
    framed,
    heading,
    height_of,
    nothing,
    number,
    room_for,
    shorten,
    surroundings,
    text,
    text_width,
    tooltip,
)
from poise.lab.report.point_labels import Area, Point, Spot, label_spots
from poise.lab.report.series import FloatArray, Kind, Series, best_places, clipped, distribution, thinned
from poise.lab.report.style import series_class
from poise.scheduler.model.errors import InvariantError

# Points with labels, and the frontier of those that nothing beats.

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


# Lines and steps, each with its entry in the legend.
#
# A series and its legend entry are one group, so that a pointer on either makes the others fade, without a script.

Shape = Literal["line", "steps"]

_SWATCH = 24.0
_GAP = 5.0
_BETWEEN = 14.0
_LONGEST = 190.0
_FEW_POINTS = 24
"""A line of up to this many points shows them as dots: they were measured, what lies between was not."""


@dataclass(frozen=True, slots=True)
class DrawnCurve:
    """A series as drawn: finite points by ascending x, and what its tooltip says."""

    label: str
    x: FloatArray
    y: FloatArray
    note: str


@dataclass(frozen=True, slots=True)
class Legend:
    """Entries one after another in rows; `spots` are their left ends and middle lines, `bottom` ends the last row."""

    spots: tuple[tuple[float, float], ...]
    bottom: float


def legend_for(labels: Sequence[str], top: float) -> Legend:
    """As many entries in a row as fit."""
    spots: list[tuple[float, float]] = []
    left, row = MARGIN, 0
    for label in labels:
        width = _SWATCH + _GAP + min(_LONGEST, text_width(label, TEXT))
        if left > MARGIN and left + width > WIDTH - MARGIN:
            left, row = MARGIN, row + 1
        spots.append((left, top + ROW * row + ROW / 2))
        left += width + _BETWEEN
    return Legend(tuple(spots), top + (ROW * (row + 1) if labels else 0.0))


def draw(curves: Sequence[DrawnCurve], frame: Frame, shape: Shape, legend: Legend) -> str:
    """All curves; one without points keeps its place in the legend and in the order of colours."""
    drawn = [
        element(
            "g",
            tooltip(f"{curve.label}: {curve.note}"),
            _marks(curve, frame, shape),
            _key(curve, *legend.spots[index]),
            class_=series_class(index),
        )
        for index, curve in enumerate(curves)
    ]
    return element("g", *drawn, class_="marks")


def _key(curve: DrawnCurve, left: float, middle: float) -> str:
    swatch = element("path", class_="line", d=f"M{number(left)} {number(middle)}h{number(_SWATCH)}")
    label = shorten(curve.label, _LONGEST, TEXT)
    return swatch + text(label, left + _SWATCH + _GAP, middle + 4, "" if curve.x.size else "soft")


def _marks(curve: DrawnCurve, frame: Frame, shape: Shape) -> str:
    x, y = frame.across(curve.x), frame.down(curve.y)
    kept = thinned(x, y)
    places = [(number(a), number(b)) for a, b in zip(x[kept].tolist(), y[kept].tolist(), strict=True)]
    dotted = len(places) == 1 or (shape == "line" and len(places) <= _FEW_POINTS)
    dots = [element("circle", class_="dot", cx=a, cy=b, r="2.6") for a, b in places] if dotted else []
    path = _stepped(places) if shape == "steps" else _straight(places)
    return (element("path", class_="line", d=path) if len(places) > 1 else "") + "".join(dots)


def _straight(places: list[tuple[str, str]]) -> str:
    different = [place for place, before in zip(places, [None, *places], strict=False) if place != before]
    return "M" + "L".join(f"{a} {b}" for a, b in different)


def _stepped(places: list[tuple[str, str]]) -> str:
    """Each value held until the next; a value that repeats adds nothing to the path."""
    if not places:
        return ""
    (at, level), parts = places[0], [f"M{places[0][0]} {places[0][1]}"]
    for a, b in places[1:]:
        if b != level:
            parts.append(f"H{a}V{b}" if a != at else f"V{b}")
            at, level = a, b
    if places[-1][0] != at:
        parts.append(f"H{places[-1][0]}")
    return "".join(parts)


__all__ = ["FloatArray", "Series", "bars", "cdf", "lines", "scatter", "standalone"]

_BAR_ROW = 25.0
_BAR = 15.0
_MOST_BAR_LABEL = 170.0
_BORDER = 12
_ROW_ROOM = 0.1
"""How near two ticks of a logarithmic y may be, as a fraction of the axis."""
_OPENING = re.compile(r'<svg class="fig" viewBox="0 0 (?P<width>\d+) (?P<height>\d+)"(?P<rest>[^>]*)>')


def lines(  # noqa: PLR0913 - the words, scales and units of two axes
    series: Sequence[Series],
    *,
    title: str,
    x_label: str,
    y_label: str,
    x_scale: Scale = "linear",
    shape: Shape = "line",
    x_unit: Unit = "plain",
    y_unit: Unit = "plain",
) -> str:
    """Series over a common x; `steps` hold each value until the next. On a log axis x = 0 stands at the left end."""
    finite = [each.finite() for each in series]
    if x_scale == "log":
        finite = [Series(each.label, each.x[each.x >= 0], each.y[each.x >= 0]) for each in finite]
    x, y = _joined([each.x for each in finite]), _joined([each.y for each in finite])
    x_axis = log_axis(x, x_unit, room_for(x_unit)) if x_scale == "log" else span_axis(x, x_unit, 6)
    curves = [DrawnCurve(each.label, each.x, each.y, _extent(each.y, y_unit)) for each in finite]
    labels = FigureLabels(title, x_label, y_label)
    return _chart(curves, x_axis, level_axis(y, y_unit, 5), labels, shape)


def cdf(samples: Mapping[str, FloatArray], *, title: str, x_label: str, unit: Unit = "seconds") -> str:
    """The share of samples at or below each value, on a log axis; zeros count from its left end."""
    found = {label: distribution(each) for label, each in samples.items()}
    x_axis = log_axis(_joined([values for values, _ in found.values()]), unit, room_for(unit))
    curves = [_cumulative(label, values, shares, x_axis, unit) for label, (values, shares) in found.items()]
    y_axis = level_axis(np.ones(1), "percent", 5)
    return _chart(curves, x_axis, y_axis, FigureLabels(title, x_label, "share at or below"), "steps")


def bars(values: Mapping[str, float], *, title: str, unit: Unit, best: Kind) -> str:
    """Horizontal bars from zero with their values; the best are marked if bars differ, all that are written the same."""
    drawn_title, top = heading(title)
    axis = bare_axis(np.array([value for value in values.values() if np.isfinite(value)]), unit)
    words = [amount(value, unit) for value in values.values()]
    goals = set(best_places(list(values.values()), words, best))
    left = MARGIN + min(_MOST_BAR_LABEL, max((text_width(name, TEXT * BOLD) for name in values), default=0.0)) + 8
    rows = [
        _bar(name, value, (left, top + 4 + _BAR_ROW * place), axis, (words[place], "◂ best" if place in goals else ""))
        for place, (name, value) in enumerate(values.items())
    ]
    height = top + 12 + _BAR_ROW * max(1, len(rows))
    described_rows = ", ".join(f"{name} {amount(value, unit)}" for name, value in list(values.items())[:20])
    shown = rows or [text("no data", WIDTH / 2, top + 18, "soft middle")]
    return figure(f"Bar chart: {title}; {best} is best. {described_rows or 'No data'}.", height, drawn_title, *shown)


def scatter(
    points: Mapping[str, tuple[float, float]],
    *,
    title: str,
    x_label: str,
    y_label: str,
    x_unit: Unit = "plain",
    y_unit: Unit = "plain",
) -> str:
    """Named points of which lower is better both ways; those that no other beats are filled and joined.

    An axis is logarithmic, and says so, where its values span more than a decade.
    """
    finite = {name: xy for name, xy in points.items() if np.isfinite(xy).all()}
    x, y = (clipped(np.array([xy[side] for xy in finite.values()], dtype=np.float64)) for side in (0, 1))
    drawn_title, top = heading(title)
    x_axis, y_axis = points_axis(x, x_unit, 7, room_for(x_unit)), points_axis(y, y_unit, 8, _ROW_ROOM)
    frame = framed(x_axis, y_axis, top + 14)
    notes = [f"{amount(float(a), x_unit)}, {amount(float(b), y_unit)}" for a, b in zip(x, y, strict=True)]
    spots = [*zip(finite, notes, frame.across(x).tolist(), frame.down(y).tolist(), strict=True)]
    best = frontier(x, y)
    first = {notes[index] for index in best}  # what reads the same and stands at the same place is as good
    best = sorted((index for index, note in enumerate(notes) if note in first), key=lambda index: (x[index], -y[index]))
    others = [index for index in range(len(spots)) if index not in set(best)]
    marks = [Point(*spots[index], "best") for index in best] + [Point(*spots[index], "other") for index in others]
    labels = FigureLabels(title, x_axis.titled(x_label), y_axis.titled(y_label))
    key = text("filled: on the frontier, none better both ways", WIDTH - MARGIN, frame.top - 12, "soft end")
    body = [key, draw_points(marks, frame)] if marks else [nothing(frame)]
    described_points = described("Scatter plot", labels, [f"{name} {note}" for name, note, *_ in spots])
    return figure(described_points, height_of(frame), drawn_title, surroundings(frame, labels), *body)


def standalone(svg: str) -> str:
    """A figure as a file of its own: with the SVG namespace, its colours, a background and a size in pixels."""
    found = _OPENING.match(svg)
    if found is None:
        raise InvariantError(f"not a figure of ours: {svg[:40]!r}")
    width, height = int(found["width"]) + 2 * _BORDER, int(found["height"]) + 2 * _BORDER
    box = f'viewBox="{-_BORDER} {-_BORDER} {width} {height}" width="{width * 3 // 2}" height="{height * 3 // 2}"'
    paper = element("rect", class_="paper", x=-_BORDER, y=-_BORDER, width=width, height=height)
    inside = element("style", style.COLOURS, style.FIGURE) + paper + svg[found.end() :]
    return f'<svg xmlns="http://www.w3.org/2000/svg" class="fig" {box}{found["rest"]}>{inside}\n'


def _chart(curves: Sequence[DrawnCurve], x: Axis, y: Axis, labels: FigureLabels, shape: Shape) -> str:
    drawn_title, top = heading(labels.title)
    names = [curve.label for curve in curves]
    legend = legend_for(names, top)
    frame = framed(x, y, legend.bottom + 14)
    empty = not any(curve.x.size for curve in curves)
    body = [surroundings(frame, labels), nothing(frame) if empty else "", draw(curves, frame, shape, legend)]
    return figure(described("Line chart", labels, names), height_of(frame), drawn_title, *body)


def _cumulative(label: str, values: FloatArray, shares: FloatArray, axis: Axis, unit: Unit) -> DrawnCurve:
    """From the left end of the axis to the right one; what the axis does not reach is in the share it starts with."""
    if not values.size:
        return DrawnCurve(label, values, shares, "no data")
    inside = values > axis.low
    below = float(shares[~inside][-1]) if not inside.all() else 0.0
    median, late = (values[np.searchsorted(shares, share)] for share in (0.5, 0.99))
    note = f"median {amount(float(median), unit)}, 99th percentile {amount(float(late), unit)}"
    x, y = np.concatenate(([axis.low], values[inside], [axis.high])), np.concatenate(([below], shares[inside], [1.0]))
    return DrawnCurve(label, x, y, note)


def _joined(columns: Sequence[FloatArray]) -> FloatArray:
    return np.concatenate([np.empty(0), *columns])


def _extent(values: FloatArray, unit: Unit) -> str:
    if not values.size:
        return "no data"
    return f"{amount(float(values.min()), unit)} to {amount(float(values.max()), unit)}"


def _bar(name: str, value: float, corner: tuple[float, float], axis: Axis, words: tuple[str, str]) -> str:
    left, top = corner
    written, mark = words
    room = WIDTH - MARGIN - left - 108  # the value and the mark stand to the right of the longest bar
    zero, end = (left + axis.place(each) * room for each in (0.0, value if np.isfinite(value) else 0.0))
    start, stop, line = min(zero, end), max(zero, end), top + _BAR / 2 + 4.5
    width = max(1.0, stop - start) if np.isfinite(value) else 0.0
    parts = [
        tooltip(f"{name}: {written}{', best' if mark else ''}"),
        text(shorten(name, left - MARGIN - 8, TEXT * BOLD), left - 8, line, "end strong" if mark else "end"),
        element("rect", class_="bar", x=start, y=top, width=width, height=_BAR, rx="2"),
        text(written, stop + 6, line, "strong" if mark else "soft", mark),
    ]
    return element("g", *parts, class_="best" if mark else "other")
