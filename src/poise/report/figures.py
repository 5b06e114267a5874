"""Figures: each is one `<svg>` element as text, styled by `style.FIGURE`, without ids, scripts or addresses.

Values that are NaN or infinite are not drawn. The same input gives the same bytes. Shares are numbers from 0 to 1 and
are written as percent; durations are in seconds.
"""

import re
from collections.abc import Mapping, Sequence

import numpy as np

from poise.model.errors import InvariantError
from poise.report import style
from poise.report.amounts import Unit, amount
from poise.report.axis import Axis, Scale, bare_axis, level_axis, log_axis, points_axis, span_axis
from poise.report.best import Kind, best_places
from poise.report.curves import Curve, Shape, draw, legend_for
from poise.report.frame import (
    MARGIN,
    TEXT,
    WIDTH,
    Labels,
    described,
    figure,
    framed,
    heading,
    height_of,
    nothing,
    room_for,
    surroundings,
    text,
    tooltip,
)
from poise.report.labelling import Point
from poise.report.markup import BOLD, element, shorten, text_width
from poise.report.scattering import draw_points, frontier
from poise.report.series import FloatArray, Series, clipped, distribution

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
    curves = [Curve(each.label, each.x, each.y, _extent(each.y, y_unit)) for each in finite]
    labels = Labels(title, x_label, y_label)
    return _chart(curves, x_axis, level_axis(y, y_unit, 5), labels, shape)


def cdf(samples: Mapping[str, FloatArray], *, title: str, x_label: str, unit: Unit = "seconds") -> str:
    """The share of samples at or below each value, on a log axis; zeros count from its left end."""
    found = {label: distribution(each) for label, each in samples.items()}
    x_axis = log_axis(_joined([values for values, _ in found.values()]), unit, room_for(unit))
    curves = [_cumulative(label, values, shares, x_axis, unit) for label, (values, shares) in found.items()]
    y_axis = level_axis(np.ones(1), "percent", 5)
    return _chart(curves, x_axis, y_axis, Labels(title, x_label, "share at or below"), "steps")


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
    labels = Labels(title, x_axis.titled(x_label), y_axis.titled(y_label))
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


def _chart(curves: Sequence[Curve], x: Axis, y: Axis, labels: Labels, shape: Shape) -> str:
    drawn_title, top = heading(labels.title)
    names = [curve.label for curve in curves]
    legend = legend_for(names, top)
    frame = framed(x, y, legend.bottom + 14)
    empty = not any(curve.x.size for curve in curves)
    body = [surroundings(frame, labels), nothing(frame) if empty else "", draw(curves, frame, shape, legend)]
    return figure(described("Line chart", labels, names), height_of(frame), drawn_title, *body)


def _cumulative(label: str, values: FloatArray, shares: FloatArray, axis: Axis, unit: Unit) -> Curve:
    """From the left end of the axis to the right one; what the axis does not reach is in the share it starts with."""
    if not values.size:
        return Curve(label, values, shares, "no data")
    inside = values > axis.low
    below = float(shares[~inside][-1]) if not inside.all() else 0.0
    median, late = (values[np.searchsorted(shares, share)] for share in (0.5, 0.99))
    note = f"median {amount(float(median), unit)}, 99th percentile {amount(float(late), unit)}"
    x, y = np.concatenate(([axis.low], values[inside], [axis.high])), np.concatenate(([below], shares[inside], [1.0]))
    return Curve(label, x, y, note)


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
