"""Lines and steps, each with its entry in the legend.

A series and its legend entry are one group, so that a pointer on either makes the others fade, without a script.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from poise.report.frame import MARGIN, ROW, TEXT, WIDTH, Frame, text, tooltip
from poise.report.markup import element, number, shorten, text_width
from poise.report.series import FloatArray, thinned
from poise.report.style import series_class

Shape = Literal["line", "steps"]

_SWATCH = 24.0
_GAP = 5.0
_BETWEEN = 14.0
_LONGEST = 190.0
_FEW_POINTS = 24
"""A line of up to this many points shows them as dots: they were measured, what lies between was not."""


@dataclass(frozen=True, slots=True)
class Curve:
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


def draw(curves: Sequence[Curve], frame: Frame, shape: Shape, legend: Legend) -> str:
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


def _key(curve: Curve, left: float, middle: float) -> str:
    swatch = element("path", class_="line", d=f"M{number(left)} {number(middle)}h{number(_SWATCH)}")
    label = shorten(curve.label, _LONGEST, TEXT)
    return swatch + text(label, left + _SWATCH + _GAP, middle + 4, "" if curve.x.size else "soft")


def _marks(curve: Curve, frame: Frame, shape: Shape) -> str:
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
