"""The report of `poise analyze`: the parts of a workload study as tables, as bars of text, and as one page with figures."""

from collections.abc import Sequence
from functools import partial
from math import isfinite

from poise.lab.analysis.tables import Chart, ChartShape, Layout, StudyPart, Value, ValueUnit
from poise.lab.report.axes import Unit, amount, nice_step
from poise.lab.report.figures import Series, averaged, cdf, groups, lines
from poise.lab.report.page import HtmlTable, Section, page

MOST_GROUPS = 12
"""Rows of a part that its bars show: the first ones."""
MOST_CHANGES = 200
"""A level that changes more often is drawn as means over stretches of time."""
NOTHING = "–"
_BLOCKS = " ▏▎▍▌▋▊▉█"


def characterisation_page(title: str, intro: str, parts: Sequence[StudyPart], *, footer: str = "") -> str:
    """The report as a whole document; parts that the input does not cover come last, each with its reason."""
    sections = []
    for part in parts:
        if not part.missing:
            words = f"{part.text}\n\n{part.caveat}" if part.caveat else part.text
            figures = tuple(drawn for chart in part.charts if (drawn := _figure(chart)))
            sections.append(Section(part.title, words, figures, table(part) if part.rows else None))
    reasons = [f"{part.title}: {part.missing}" for part in parts if part.missing]
    if reasons:
        sections.append(Section("Not covered by this input", "\n\n".join(reasons)))
    return page(title, intro, sections, footer=footer)


def table(part: StudyPart, most: int | None = None) -> HtmlTable:
    """The rows of a part, all or the first of them; one below the other where it is a card."""
    if part.layout is Layout.CARD:
        values = zip(part.columns, part.rows[0], strict=True)
        return HtmlTable(
            ("measure", "value"),
            tuple((column.heading, cell(value, column.unit)) for column, value in values if value is not None),
        )
    rows = part.rows if most is None or len(part.rows) <= most else part.rows[:most]
    units = [column.unit for column in part.columns]
    shown = tuple(tuple(cell(value, unit) for value, unit in zip(row, units, strict=True)) for row in rows)
    names = next((place for place, unit in enumerate(units) if unit is not ValueUnit.TEXT), 1)
    words = tuple(column.heading for column in part.columns if column.unit is ValueUnit.TEXT)
    return HtmlTable(tuple(column.heading for column in part.columns), shown, names=max(1, names), words=words)


def cell(value: Value, unit: ValueUnit) -> str:
    """A value, written for people: shares with two digits after the point, as published tables have them."""
    if value is None or (isinstance(value, float) and not isfinite(value)):
        return NOTHING
    if isinstance(value, str):
        return value
    if unit is ValueUnit.COUNT:
        return f"{value:,}"
    if unit is ValueUnit.SHARE:
        return f"{100 * value:.2f}%"
    return amount(value, "seconds" if unit is ValueUnit.SECONDS else "plain")


def bar(share: Value, width: int = 16) -> str:
    """A share as a bar of block characters, filled up with dots to the width of a whole."""
    eighths = round(width * 8 * min(1.0, max(0.0, share))) if isinstance(share, float) and isfinite(share) else 0
    full, rest = divmod(eighths, 8)
    return ("█" * full + (_BLOCKS[rest] if rest else "")).ljust(width, "·")


def _figure(chart: Chart) -> str:
    """The figure of a chart; empty if it has no data."""
    match chart.shape:
        case ChartShape.BARS:
            values = zip(*(curve.y.tolist() for curve in chart.curves), strict=True)
            rows = dict(list(zip(chart.labels, values, strict=True))[:MOST_GROUPS])
            return groups(rows, [curve.label for curve in chart.curves], title=chart.title) if rows else ""
        case ChartShape.CDF:
            samples = {curve.label: curve.y for curve in chart.curves if curve.y.size}
            return cdf(samples, title=chart.title, x_label=chart.x_label) if samples else ""
        case ChartShape.STEPS:
            series = [Series(curve.label, curve.x, curve.y) for curve in chart.curves]
            spans = [float(each.x[-1]) if each.x.size > MOST_CHANGES else 0.0 for each in series]
            drawn = [
                averaged(each, nice_step(span, "seconds", MOST_CHANGES)) if span > 0 else each
                for each, span in zip(series, spans, strict=True)
            ]
            unit: Unit = "percent" if chart.unit is ValueUnit.SHARE else "plain"
            draw = partial(lines, drawn, shape="steps", x_unit="seconds", y_unit=unit)
            return draw(title=chart.title, x_label=chart.x_label, y_label=chart.y_label)
