"""A study as text, as tables and as one page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np

from poise.lab.analysis.exhibits import Chart, ChartCurve, ChartShape, Layout, StudyPart, Value, ValueUnit
from poise.lab.report.axes import Axis, amount, bare_axis, nice_step
from poise.lab.report.figures import Series, cdf, legend_for, lines
from poise.lab.report.frame import MARGIN, TEXT, WIDTH, element, figure, heading, shorten, text, text_width, tooltip
from poise.lab.report.page import HtmlTable, Section, page
from poise.lab.report.series import averaged
from poise.lab.report.style import series_class

# Shares side by side: a group of horizontal bars for each of some rows, one bar a series.

_BAR = 13.0
_BETWEEN = 9.0
_MOST_LABEL = 170.0
_VALUE = 52.0
"""Room to the right of the longest bar, for its value."""
_SWATCH = 24.0
_DESCRIBED = 12
"""Rows that a screen reader is told of."""


@dataclass(frozen=True, slots=True)
class _Grid:
    """Where bars stand: their left end, the top of the first one, the height of a group, and how long a share is."""

    left: float
    top: float
    height: float
    axis: Axis

    def at(self, row: int, series: int) -> float:
        """The upper edge of a bar."""
        return self.top + self.height * row + _BAR * series

    def length(self, value: float) -> float:
        """Of the bar of a value."""
        return self.axis.place(value) * (WIDTH - MARGIN - self.left - _VALUE) if isfinite(value) else 0.0


def groups(rows: Mapping[str, Sequence[float]], names: Sequence[str], *, title: str) -> str:
    """Rows of shares from 0 to 1, a bar for each series; a value that is NaN has none. Styled as all figures are."""
    drawn_title, top = heading(title)
    legend = legend_for(names, top)
    axis = bare_axis(np.array([each for row in rows.values() for each in row if isfinite(each)]), "percent")
    left = MARGIN + min(_MOST_LABEL, max((text_width(name, TEXT) for name in rows), default=0.0)) + 8
    grid = _Grid(left, legend.bottom + 8, len(names) * _BAR + _BETWEEN, axis)
    series = [
        element("g", _key(name, *legend.spots[place]), *_group_bars(rows, place, name, grid), class_=series_class(place))
        for place, name in enumerate(names)
    ]
    middle = len(names) * _BAR / 2 + 4
    labels = [
        text(shorten(name, left - MARGIN - 8, TEXT), left - 8, grid.at(row, 0) + middle, "end")
        for row, name in enumerate(rows)
    ]
    marks = element("g", *series, class_="marks")
    return figure(_described(rows, names, title), grid.at(len(rows), 0), drawn_title, *labels, marks)


def _group_bars(rows: Mapping[str, Sequence[float]], place: int, name: str, grid: _Grid) -> list[str]:
    """The bars of one series."""
    return [
        _bar(f"{label}, {name}", values[place], grid.at(row, place), grid)
        for row, (label, values) in enumerate(rows.items())
    ]


def _bar(what: str, value: float, top: float, grid: _Grid) -> str:
    written, length = amount(value, "percent"), grid.length(value)
    drawn = element("rect", class_="dot", x=grid.left, y=top, width=max(0.5, length), height=_BAR - 2, rx="1.5")
    said = text(written, grid.left + length + 5, top + _BAR - 3, "soft")
    return element("g", tooltip(f"{what}: {written}"), drawn if isfinite(value) else "", said)


def _key(name: str, left: float, middle: float) -> str:
    swatch = element("rect", class_="dot", x=left, y=middle - 4, width=_SWATCH, height=8.0, rx="1.5")
    return swatch + text(name, left + _SWATCH + 5, middle + 4)


def _described(rows: Mapping[str, Sequence[float]], names: Sequence[str], title: str) -> str:
    told = (
        f"{row}: " + ", ".join(f"{name} {amount(value, 'percent')}" for name, value in zip(names, values, strict=True))
        for row, values in list(rows.items())[:_DESCRIBED]
    )
    return f"Bar chart: {title}. {'; '.join(told) or 'No data'}."


MOST_GROUPS = 12
"""Rows of a part that its bars show: the first ones."""
MOST_CHANGES = 200
"""A level that changes more often is drawn as means over stretches of time."""
NOTHING = "–"
_BLOCKS = " ▏▎▍▌▋▊▉█"


def cell(value: Value, unit: ValueUnit) -> str:
    """A value for people: shares with two digits after the point, as published tables have them."""
    if value is None or (isinstance(value, float) and not isfinite(value)):
        return NOTHING
    if isinstance(value, str):
        return value
    if unit is ValueUnit.COUNT:
        return f"{value:,}"
    if unit is ValueUnit.SHARE:
        return f"{100 * value:.2f}%"
    return amount(value, "seconds" if unit is ValueUnit.SECONDS else "plain")


def table(part: StudyPart, most: int | None = None) -> HtmlTable:
    """The rows of a part, all or the first of them; one below the other where it is a card."""
    if part.layout is Layout.CARD:
        told = zip(part.columns, part.rows[0], strict=True)
        return HtmlTable(
            ("measure", "value"),
            tuple((column.heading, cell(value, column.unit)) for column, value in told if value is not None),
        )
    rows = part.rows if most is None or len(part.rows) <= most else part.rows[:most]
    units = [column.unit for column in part.columns]
    shown = tuple(tuple(cell(value, unit) for value, unit in zip(row, units, strict=True)) for row in rows)
    names = next((place for place, unit in enumerate(units) if unit is not ValueUnit.TEXT), 1)
    words = tuple(column.heading for column in part.columns if column.unit is ValueUnit.TEXT)
    return HtmlTable(tuple(column.heading for column in part.columns), shown, names=max(1, names), words=words)


def bar(share: Value, width: int = 16) -> str:
    """A share as a bar of block characters, filled up with dots to the width of a whole."""
    eighths = round(width * 8 * min(1.0, max(0.0, share))) if isinstance(share, float) and isfinite(share) else 0
    full, rest = divmod(eighths, 8)
    return ("█" * full + (_BLOCKS[rest] if rest else "")).ljust(width, "·")


def characterisation_page(title: str, intro: str, parts: Sequence[StudyPart], *, footer: str = "") -> str:
    """A whole document; parts that the input does not cover come last, each with its reason."""
    there = [part for part in parts if not part.missing]
    sections = [_section(part) for part in there]
    reasons = [f"{part.title}: {part.missing}" for part in parts if part.missing]
    if reasons:
        sections.append(Section("Not covered by this input", "\n\n".join(reasons)))
    return page(title, intro, sections, footer=footer)


def _section(part: StudyPart) -> Section:
    text = f"{part.text}\n\n{part.caveat}" if part.caveat else part.text
    figures = tuple(figure for chart in part.charts if (figure := _figure(chart)))
    return Section(part.title, text, figures, table(part) if part.rows else None)


def _figure(chart: Chart) -> str:
    match chart.shape:
        case ChartShape.BARS:
            return _bars(chart)
        case ChartShape.CDF:
            samples = {curve.label: curve.y for curve in chart.curves if curve.y.size}
            return cdf(samples, title=chart.title, x_label=chart.x_label) if samples else ""
        case ChartShape.STEPS:
            series = [_readable(curve) for curve in chart.curves]
            return lines(
                series,
                title=chart.title,
                x_label=chart.x_label,
                y_label=chart.y_label,
                shape="steps",
                x_unit="seconds",
                y_unit="percent" if chart.unit is ValueUnit.SHARE else "plain",
            )


def _readable(curve: ChartCurve) -> Series:
    series = Series(curve.label, curve.x, curve.y)
    span = float(curve.x[-1]) if curve.x.size else 0.0
    if span <= 0 or curve.x.size <= MOST_CHANGES:
        return series
    return averaged(series, nice_step(span, "seconds", MOST_CHANGES))


def _bars(chart: Chart) -> str:
    names = [curve.label for curve in chart.curves]
    values = zip(*(curve.y.tolist() for curve in chart.curves), strict=True)
    rows = dict(list(zip(chart.labels, values, strict=True))[:MOST_GROUPS])
    return groups(rows, names, title=chart.title) if rows else ""
