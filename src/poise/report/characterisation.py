"""A study as text, as tables and as one page."""

from collections.abc import Sequence
from math import isfinite

from poise.analysis.parts import Chart, Curve, Layout, Part, Shape, Unit, Value
from poise.report.amounts import amount
from poise.report.figures import Series, cdf, lines
from poise.report.groups import groups
from poise.report.page import Section, Table, page
from poise.report.series import averaged
from poise.report.ticks import nice_step

MOST_GROUPS = 12
"""Rows of a part that its bars show: the first ones."""
MOST_CHANGES = 200
"""A level that changes more often is drawn as means over stretches of time."""
NOTHING = "–"
_BLOCKS = " ▏▎▍▌▋▊▉█"


def cell(value: Value, unit: Unit) -> str:
    """A value for people: shares with two digits after the point, as published tables have them."""
    if value is None or (isinstance(value, float) and not isfinite(value)):
        return NOTHING
    if isinstance(value, str):
        return value
    if unit is Unit.COUNT:
        return f"{value:,}"
    if unit is Unit.SHARE:
        return f"{100 * value:.2f}%"
    return amount(value, "seconds" if unit is Unit.SECONDS else "plain")


def table(part: Part, most: int | None = None) -> Table:
    """The rows of a part, all or the first of them; one below the other where it is a card."""
    if part.layout is Layout.CARD:
        told = zip(part.columns, part.rows[0], strict=True)
        return Table(
            ("measure", "value"),
            tuple((column.heading, cell(value, column.unit)) for column, value in told if value is not None),
        )
    rows = part.rows if most is None or len(part.rows) <= most else part.rows[:most]
    units = [column.unit for column in part.columns]
    shown = tuple(tuple(cell(value, unit) for value, unit in zip(row, units, strict=True)) for row in rows)
    names = next((place for place, unit in enumerate(units) if unit is not Unit.TEXT), 1)
    words = tuple(column.heading for column in part.columns if column.unit is Unit.TEXT)
    return Table(tuple(column.heading for column in part.columns), shown, names=max(1, names), words=words)


def bar(share: Value, width: int = 16) -> str:
    """A share as a bar of block characters, filled up with dots to the width of a whole."""
    eighths = round(width * 8 * min(1.0, max(0.0, share))) if isinstance(share, float) and isfinite(share) else 0
    full, rest = divmod(eighths, 8)
    return ("█" * full + (_BLOCKS[rest] if rest else "")).ljust(width, "·")


def characterisation_page(title: str, intro: str, parts: Sequence[Part], *, footer: str = "") -> str:
    """A whole document; parts that the input does not cover come last, each with its reason."""
    there = [part for part in parts if not part.missing]
    sections = [_section(part) for part in there]
    reasons = [f"{part.title}: {part.missing}" for part in parts if part.missing]
    if reasons:
        sections.append(Section("Not covered by this input", "\n\n".join(reasons)))
    return page(title, intro, sections, footer=footer)


def _section(part: Part) -> Section:
    text = f"{part.text}\n\n{part.caveat}" if part.caveat else part.text
    figures = tuple(figure for chart in part.charts if (figure := _figure(chart)))
    return Section(part.title, text, figures, table(part) if part.rows else None)


def _figure(chart: Chart) -> str:
    match chart.shape:
        case Shape.BARS:
            return _bars(chart)
        case Shape.CDF:
            samples = {curve.label: curve.y for curve in chart.curves if curve.y.size}
            return cdf(samples, title=chart.title, x_label=chart.x_label) if samples else ""
        case Shape.STEPS:
            series = [_readable(curve) for curve in chart.curves]
            return lines(
                series,
                title=chart.title,
                x_label=chart.x_label,
                y_label=chart.y_label,
                shape="steps",
                x_unit="seconds",
                y_unit="percent" if chart.unit is Unit.SHARE else "plain",
            )


def _readable(curve: Curve) -> Series:
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
