"""Shares side by side: a group of horizontal bars for each of some rows, one bar a series."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np

from poise.report.amounts import amount
from poise.report.axis import Axis, bare_axis
from poise.report.curves import legend_for
from poise.report.frame import MARGIN, TEXT, WIDTH, figure, heading, text, tooltip
from poise.report.markup import element, shorten, text_width
from poise.report.style import series_class

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
        element("g", _key(name, *legend.spots[place]), *_bars(rows, place, name, grid), class_=series_class(place))
        for place, name in enumerate(names)
    ]
    middle = len(names) * _BAR / 2 + 4
    labels = [
        text(shorten(name, left - MARGIN - 8, TEXT), left - 8, grid.at(row, 0) + middle, "end")
        for row, name in enumerate(rows)
    ]
    marks = element("g", *series, class_="marks")
    return figure(_described(rows, names, title), grid.at(len(rows), 0), drawn_title, *labels, marks)


def _bars(rows: Mapping[str, Sequence[float]], place: int, name: str, grid: _Grid) -> list[str]:
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
