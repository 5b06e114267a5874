"""Figures: lines, distributions, bars and scatter plots, each one `<svg>` element as text.

Figures are styled by `style.FIGURE` and hold no ids, scripts or addresses. Values that are NaN or infinite are not drawn.
The same input gives the same bytes. Shares are numbers from 0 to 1 and are written as percent; durations are in seconds.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Literal

import numpy as np
import numpy.typing as npt

from poise.lab.report import frame as svg
from poise.lab.report import style
from poise.lab.report.axes import (
    Axis,
    FloatArray,
    Scale,
    Unit,
    amount,
    bare_axis,
    clipped,
    level_axis,
    log_axis,
    points_axis,
    span_axis,
)
from poise.lab.report.point_labels import Area, Point, label_spots
from poise.scheduler.model.errors import InvariantError

__all__ = ["FloatArray", "Series", "bars", "cdf", "lines", "scatter", "standalone"]

Goal = Literal["lowest", "highest"]
"""Which value of several is the best."""
Shape = Literal["line", "steps"]

MOST_POINTS = 600
"""Points of a series that are drawn; more are thinned."""
MOST_LABELS = 40
"""With more points than this in a scatter plot, the rest are named by their tooltips alone."""
_FEW_POINTS = 24
"""A line of up to this many points shows them as dots: they were measured, what lies between was not."""
_BAR_ROW = 25.0
_BAR = 15.0
_MOST_BAR_LABEL = 170.0
_GROUP_BAR, _GROUP_GAP = 13.0, 9.0
"""Height of each bar of a group, and the space between groups."""
_VALUE_ROOM = 52.0
"""Room to the right of the longest bar of a group, for its value."""
_DESCRIBED = 12
"""Groups that a screen reader is told of."""
_BORDER = 12
_ROW_ROOM = 0.1
"""How near two ticks of a logarithmic y may be, as a fraction of the axis."""
_OPENING = re.compile(r'<svg class="fig" viewBox="0 0 (?P<width>\d+) (?P<height>\d+)"(?P<rest>[^>]*)>')


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one line: `x` and `y` have equal length; the order of the points does not matter.

    note   what the tooltip of a line says, once it is drawn
    """

    label: str
    x: FloatArray
    y: FloatArray
    note: str = ""

    def __post_init__(self) -> None:
        if self.x.ndim != 1 or self.x.shape != self.y.shape:
            raise InvariantError(f"series {self.label!r}: x has shape {self.x.shape}, y {self.y.shape}; expected equal")

    def finite(self) -> "Series":
        """The finite points by ascending x; equal ones in the given order."""
        kept = np.isfinite(self.x) & np.isfinite(self.y)
        x, y = clipped(self.x[kept]), clipped(self.y[kept])
        order = np.argsort(x, kind="stable")
        return Series(self.label, x[order], y[order])


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
    x, y = (np.concatenate([np.empty(0), *columns]) for columns in ([s.x for s in finite], [s.y for s in finite]))
    x_axis = log_axis(x, x_unit, svg.room_for(x_unit)) if x_scale == "log" else span_axis(x, x_unit, 6)
    curves = []
    for each in finite:
        ends = [amount(float(end), y_unit) for end in (each.y.min(), each.y.max())] if each.y.size else ["no data"]
        curves.append(replace(each, note=" to ".join(ends)))
    return _chart(curves, x_axis, level_axis(y, y_unit, 5), svg.FigureLabels(title, x_label, y_label), shape)


def cdf(samples: Mapping[str, FloatArray], *, title: str, x_label: str, unit: Unit = "seconds") -> str:
    """The share of samples at or below each value, on a log axis; zeros count from its left end."""
    found = {label: distribution(each) for label, each in samples.items()}
    axis = log_axis(np.concatenate([np.empty(0), *(values for values, _ in found.values())]), unit, svg.room_for(unit))
    curves = []
    for label, (values, shares) in found.items():
        if not values.size:
            curves.append(Series(label, values, shares, "no data"))
            continue
        # From one end of the axis to the other; what the axis does not reach is in the share it starts with.
        inside = values > axis.low
        below = float(shares[~inside][-1]) if not inside.all() else 0.0
        median, late = (amount(float(values[np.searchsorted(shares, share)]), unit) for share in (0.5, 0.99))
        x = np.concatenate(([axis.low], values[inside], [axis.high]))
        y = np.concatenate(([below], shares[inside], [1.0]))
        curves.append(Series(label, x, y, f"median {median}, 99th percentile {late}"))
    labels = svg.FigureLabels(title, x_label, "share at or below")
    return _chart(curves, axis, level_axis(np.ones(1), "percent", 5), labels, "steps")


def bars(values: Mapping[str, float], *, title: str, unit: Unit, best: Goal) -> str:
    """Horizontal bars from zero with their values; the best are marked if bars differ, all that are written the same."""
    drawn_title, top = svg.heading(title)
    axis = bare_axis(np.array([value for value in values.values() if np.isfinite(value)]), unit)
    words = [amount(value, unit) for value in values.values()]
    marked = set(best_places(list(values.values()), words, best))
    left = _room_for_labels(values, svg.TEXT * svg.BOLD)
    room = svg.WIDTH - svg.MARGIN - left - 108  # the value and the mark stand to the right of the longest bar
    rows = []
    for place, (name, value) in enumerate(values.items()):
        written, mark = words[place], "◂ best" if place in marked else ""
        row = top + 4 + _BAR_ROW * place
        zero, end = (left + axis.place(each) * room for each in (0.0, value if np.isfinite(value) else 0.0))
        start, stop, line = min(zero, end), max(zero, end), row + _BAR / 2 + 4.5
        width = max(1.0, stop - start) if np.isfinite(value) else 0.0
        label = svg.shorten(name, left - svg.MARGIN - 8, svg.TEXT * svg.BOLD)
        parts = [
            svg.tooltip(f"{name}: {written}{', best' if mark else ''}"),
            svg.text(label, left - 8, line, "end strong" if mark else "end"),
            svg.element("rect", class_="bar", x=start, y=row, width=width, height=_BAR, rx="2"),
            svg.text(written, stop + 6, line, "strong" if mark else "soft", mark),
        ]
        rows.append(svg.element("g", *parts, class_="best" if mark else "other"))
    height = top + 12 + _BAR_ROW * max(1, len(rows))
    spoken = ", ".join(f"{name} {written}" for name, written in list(zip(values, words, strict=True))[:20])
    shown = rows or [svg.text("no data", svg.WIDTH / 2, top + 18, "soft middle")]
    return svg.figure(f"Bar chart: {title}; {best} is best. {spoken or 'No data'}.", height, drawn_title, *shown)


def _room_for_labels(names: Iterable[str], size: float) -> float:
    """Where bars begin, to the right of their labels."""
    return svg.MARGIN + min(_MOST_BAR_LABEL, max((svg.text_width(name, size) for name in names), default=0.0)) + 8


def groups(rows: Mapping[str, Sequence[float]], names: Sequence[str], *, title: str) -> str:
    """Horizontal bars in groups: rows of shares from 0 to 1, one bar per series; a value that is NaN has none."""
    drawn_title, top = svg.heading(title)
    legend = svg.legend_for(names, top)
    axis = bare_axis(np.array([each for row in rows.values() for each in row if isfinite(each)]), "percent")
    left = _room_for_labels(rows, svg.TEXT)
    longest = svg.WIDTH - svg.MARGIN - left - _VALUE_ROOM
    first, height = legend.bottom + 8, len(names) * _GROUP_BAR + _GROUP_GAP
    series = []
    for place, name in enumerate(names):
        across, middle = legend.spots[place]
        swatch = svg.element("rect", class_="dot", x=across, y=middle - 4, width=svg.SWATCH, height=8.0, rx="1.5")
        drawn = [legend.entry(place, swatch)]
        for row, (label, values) in enumerate(rows.items()):
            value, upper = values[place], first + height * row + _GROUP_BAR * place
            written, length = amount(value, "percent"), axis.place(value) * longest if isfinite(value) else 0.0
            box = {"x": left, "y": upper, "width": max(0.5, length), "height": _GROUP_BAR - 2}
            rect = svg.element("rect", class_="dot", **box, rx="1.5")
            said = svg.text(written, left + length + 5, upper + _GROUP_BAR - 3, "soft")
            drawn.append(svg.element("g", svg.tooltip(f"{label}, {name}: {written}"), rect if isfinite(value) else "", said))
        series.append(svg.element("g", *drawn, class_=style.series_class(place)))
    labels = []
    for row, name in enumerate(rows):
        middle = first + height * row + (len(names) * _GROUP_BAR / 2 + 4)
        labels.append(svg.text(svg.shorten(name, left - svg.MARGIN - 8, svg.TEXT), left - 8, middle, "end"))
    spoken = (
        f"{row}: " + ", ".join(f"{name} {amount(value, 'percent')}" for name, value in zip(names, values, strict=True))
        for row, values in list(rows.items())[:_DESCRIBED]
    )
    description = f"Bar chart: {title}. {'; '.join(spoken) or 'No data'}."
    marks = svg.element("g", *series, class_="marks")
    return svg.figure(description, first + height * len(rows), drawn_title, *labels, marks)


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
    drawn_title, top = svg.heading(title)
    x_axis, y_axis = points_axis(x, x_unit, 7, svg.room_for(x_unit)), points_axis(y, y_unit, 8, _ROW_ROOM)
    frame = svg.framed(x_axis, y_axis, top + 14)
    notes = [f"{amount(float(a), x_unit)}, {amount(float(b), y_unit)}" for a, b in zip(x, y, strict=True)]
    spots = [*zip(finite, notes, frame.across(x).tolist(), frame.down(y).tolist(), strict=True)]
    best = frontier(x, y)
    first = {notes[index] for index in best}  # what reads the same and stands at the same place is as good
    best = sorted((index for index, note in enumerate(notes) if note in first), key=lambda index: (x[index], -y[index]))
    others = [index for index in range(len(spots)) if index not in set(best)]
    labels = svg.FigureLabels(title, x_axis.titled(x_label), y_axis.titled(y_label))
    body = [svg.no_data(frame)]
    if spots:
        key = svg.text("filled: on the frontier, none better both ways", svg.WIDTH - svg.MARGIN, frame.top - 12, "soft end")
        marks = ([Point(*spots[index], "best") for index in best], [Point(*spots[index], "other") for index in others])
        body = [key, _draw_points(*marks, frame)]
    spoken = svg.described("Scatter plot", labels, [f"{name} {note}" for name, note, *_ in spots])
    return svg.figure(spoken, frame.figure_height, drawn_title, svg.surroundings(frame, labels), *body)


def standalone(figure: str) -> str:
    """A figure as a file of its own: with the SVG namespace, its colours, a background and a size in pixels."""
    found = _OPENING.match(figure)
    if found is None:
        raise InvariantError(f"not a figure of ours: {figure[:40]!r}")
    width, height = int(found["width"]) + 2 * _BORDER, int(found["height"]) + 2 * _BORDER
    box = f'viewBox="{-_BORDER} {-_BORDER} {width} {height}" width="{width * 3 // 2}" height="{height * 3 // 2}"'
    paper = svg.element("rect", class_="paper", x=-_BORDER, y=-_BORDER, width=width, height=height)
    inside = svg.element("style", style.COLOURS, style.FIGURE) + paper + figure[found.end() :]
    return f'<svg xmlns="http://www.w3.org/2000/svg" class="fig" {box}{found["rest"]}>{inside}\n'


# Points and their frontier


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


def _draw_points(best: Sequence[Point], others: Sequence[Point], frame: svg.Frame) -> str:
    """The frontier's edge, then the points, the best on top, then the labels, of which the best choose first.

    The best points come in the order of the frontier, by ascending x.
    """
    # The edge of what the frontier beats: down to each point and across to the next, open at the top and the right.
    tops, ends = [frame.top, *(point.y for point in best)], [*(point.x for point in best), frame.right]
    edge: list[Area] = []
    for top, point, end in zip(tops, best, ends[1:], strict=False):
        edge += [Area(point.x, top, point.x, point.y), Area(point.x, point.y, end, point.y)]
    path = "".join(f"M{each.left:.1f} {each.top:.1f}L{each.right:.1f} {each.bottom:.1f}" for each in edge)

    points = [*best, *others]
    bounds = Area(frame.left, frame.top, svg.WIDTH - 2.0, frame.bottom)
    spots = label_spots(points[:MOST_LABELS], bounds, [piece.grown(2) for piece in edge])
    leaders, labels = [], []
    for point, spot in zip(points, spots, strict=False):
        if spot.far:
            x, y = spot.area.nearest(point.x, point.y)
            leaders.append(svg.element("path", class_="leader", d=f"M{point.x:.1f} {point.y:.1f}L{x:.1f} {y:.1f}"))
        weight = "strong" if point.kind == "best" else "soft"
        labels.append(svg.text(spot.text, spot.x, spot.y + 4, f"halo {weight} {spot.anchor}".rstrip()))
    dots = [
        svg.element(
            "g",
            svg.tooltip(f"{point.name}: {point.note}"),
            svg.element("circle", class_="point", cx=point.x, cy=point.y, r="5"),
            class_=point.kind,
        )
        for point in reversed(points)
    ]
    return "".join([svg.element("path", class_="frontier", d=path), *leaders, *dots, *labels])


# Lines and steps


def _chart(curves: Sequence[Series], x: Axis, y: Axis, labels: svg.FigureLabels, shape: Shape) -> str:
    """Curves of finite points by ascending x; one without points keeps its place in the legend and in the order of colours.

    A curve and its legend entry are one group, so that a pointer on either makes the others fade, without a script.
    """
    drawn_title, top = svg.heading(labels.title)
    names = [curve.label for curve in curves]
    legend = svg.legend_for(names, top)
    frame = svg.framed(x, y, legend.bottom + 14)
    drawn = [
        svg.element(
            "g",
            svg.tooltip(f"{curve.label}: {curve.note}"),
            _curve(curve, frame, shape),
            legend.line(place, "" if curve.x.size else "soft"),
            class_=style.series_class(place),
        )
        for place, curve in enumerate(curves)
    ]
    empty = not any(curve.x.size for curve in curves)
    body = [svg.surroundings(frame, labels), svg.no_data(frame) if empty else "", svg.element("g", *drawn, class_="marks")]
    return svg.figure(svg.described("Line chart", labels, names), frame.figure_height, drawn_title, *body)


def _curve(curve: Series, frame: svg.Frame, shape: Shape) -> str:
    x, y = frame.across(curve.x), frame.down(curve.y)
    kept = thinned(x, y)
    places = [(svg.number(a), svg.number(b)) for a, b in zip(x[kept].tolist(), y[kept].tolist(), strict=True)]
    dotted = len(places) == 1 or (shape == "line" and len(places) <= _FEW_POINTS)
    dots = [svg.element("circle", class_="dot", cx=a, cy=b, r="2.6") for a, b in places] if dotted else []
    if len(places) < 2:
        return "".join(dots)
    if shape == "steps":
        path = _stepped(places)
    else:
        different = [place for place, before in zip(places, [None, *places], strict=False) if place != before]
        path = "M" + "L".join(f"{a} {b}" for a, b in different)
    return svg.element("path", class_="line", d=path) + "".join(dots)


def _stepped(places: list[tuple[str, str]]) -> str:
    """Each value held until the next; a value that repeats adds nothing to the path."""
    (at, level), parts = places[0], [f"M{places[0][0]} {places[0][1]}"]
    for a, b in places[1:]:
        if b != level:
            parts.append(f"H{a}V{b}" if a != at else f"V{b}")
            at, level = a, b
    if places[-1][0] != at:
        parts.append(f"H{places[-1][0]}")
    return "".join(parts)


# Data: few enough points for a page, and which values are best


def thinned(places: FloatArray, values: FloatArray, most: int = MOST_POINTS) -> npt.NDArray[np.intp]:
    """Ascending indices of at most `most` points (itself at least 8) that look like all of them.

    `places` ascend and are where the points stand along the axis as drawn. The axis is cut into at least `most // 4`
    strips of a few pixels; a strip keeps its first, lowest, highest and last point. So every extreme stays, and so does
    the value that a step carries from one strip to the next.
    """
    count = len(places)
    if count <= most:
        return np.arange(count)
    span = places[-1] - places[0]
    along = (places - places[0]) / span if span > 0 else np.zeros_like(places)

    def kept(strips: int) -> npt.NDArray[np.intp]:
        strip = np.minimum((along * strips).astype(np.intp), strips - 1)
        starts = np.flatnonzero(np.diff(strip, prepend=-1))
        ends = np.append(starts[1:], len(strip)) - 1
        ranks = np.lexsort((values, strip))  # within a strip by value: its lowest stands first, its highest last
        return np.unique(np.concatenate((starts, ends, ranks[starts], ranks[ends])))

    # Where the values only rise, a strip keeps two points instead of four, and there can be twice as many strips.
    tries = (kept(most // 4 * finer) for finer in (4, 2, 1))
    return next(indices for indices in tries if indices.size <= most)


def averaged(series: Series, length: float) -> Series:
    """Steps as their means over stretches of a length, counted from zero; the last stretch ends with the series.

    `x` ascends. The last point has the last value, which nothing follows. So the area below the steps stays what it was.
    """
    times, levels = series.x, series.y
    inner = np.arange(np.floor(times[0] / length) + 1, np.ceil(times[-1] / length)) * length if times.size else times
    edges = np.unique(np.concatenate((times[:1], inner, times[-1:])))
    if edges.size < 2:
        return series
    area = np.concatenate(([0.0], np.cumsum(levels[:-1] * np.diff(times))))
    means = np.diff(np.interp(edges, times, area)) / np.diff(edges)
    return Series(series.label, edges, np.append(means, levels[-1]))


def distribution(samples: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The distinct finite samples, ascending, and the share of finite samples at or below each."""
    kept = clipped(samples[np.isfinite(samples)])
    values, counts = np.unique(kept, return_counts=True)
    return values, np.cumsum(counts) / max(1, kept.size)


def best_places(values: Sequence[float | None], written: Sequence[str], goal: Goal) -> list[int]:
    """Indices of the best value and of all that are written as it is: a reader could not say why one is marked alone.

    Empty where fewer than two are known, or where all known ones are written the same: then there is nothing to choose.
    """
    known = {place: value for place, value in enumerate(values) if value is not None and isfinite(value)}
    if len({written[place] for place in known}) < 2:
        return []
    best = (min if goal == "lowest" else max)(known, key=lambda place: known[place])
    return [place for place in known if written[place] == written[best]]
