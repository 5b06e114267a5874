"""The report of a sweep: means over load with confidence intervals, and how policies compare on the same traces.

A row is an `Average`: one policy at one load, over seeds. Each is compared, run by run, with its rival: the first policy.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from poise.lab.analysis.statistics import Average, Contrast, Mean
from poise.lab.report import frame as svg
from poise.lab.report.axes import Tick, amount, level_axis, points_axis
from poise.lab.report.comparison import TERMS, UNITS
from poise.lab.report.figures import Goal, best_places
from poise.lab.report.page import HtmlTable, Section, page
from poise.lab.report.style import series_class

LEGEND = "± and (low–high): 95 % confidence intervals. ≈: whether it is more or less than {rival} is left open."

_COLUMNS: tuple[tuple[str, str, Goal], ...] = (
    ("average JCT", "avg_jct", "lowest"),
    ("p99 JCT", "p99_jct", "lowest"),
    ("makespan", "makespan", "lowest"),
    ("in use", "utilisation", "highest"),
    ("worst ρ", "worst_rho", "lowest"),
    ("unfair", "unfair_fraction", "lowest"),
    ("preemptions", "preemptions", "lowest"),
)
"""(heading, key of the summary, which mean is best)."""
_RATIO_AT = 3
"""Column of the ratio of average JCTs, right behind the average JCT."""
_PAIRED = (
    ("average JCT", "avg_jct"),
    ("median JCT", "median_jct"),
    ("p99 JCT", "p99_jct"),
    ("makespan", "makespan"),
    ("in use", "utilisation"),
    ("worst ρ", "worst_rho"),
)
_FIGURES = (
    ("Average completion time", "average JCT", "avg_jct"),
    ("99th percentile of completion times", "p99 JCT", "p99_jct"),
    ("Worst ρ", "worst ρ", "worst_rho"),
    ("GPUs in use", "share of GPUs", "utilisation"),
)
_LONGEST_RIVAL = 12
_APART, _APART_ALONE = 4.0, 26.0
"""Units between the whiskers of two policies at one load, side by side; and where there is only one load."""
_ROOM, _ROOM_ALONE = 0.16, 0.9
"""Share of the width that all policies at one load take at most."""
_CAP, _THIN, _DOT, _SWATCH = 5.0, 1.2, 3.0, 20.0


def sweep_page(title: str, intro: str, rows: Sequence[Average]) -> str:
    """The report as a whole document."""
    summary = (
        f"{TERMS} Jobs arrive load times as fast as in the trace.\n\n"
        "Numbers are means over seeds, with 95 % confidence intervals by Student's t where there are several runs that "
        "differ. Marked are the best of a load and those that are not told apart from it on the same traces."
    )
    figures = tuple(over_load(rows, key, title=title, y_label=label) for title, label, key in _FIGURES)
    sections = [
        Section("Summary", summary, table=sweep_table(rows)),
        Section("Over load", "Whiskers are 95 % confidence intervals of the means.", figures=figures),
    ]
    others = [row for row in rows if row.against]
    if others:
        rival = others[0].rival
        text = (
            f"Ratios to {rival}, run by run on the same traces: geometric means with 95 % confidence intervals. What "
            "makes one trace harder than another drops out, and so they tell more than the means side by side. "
            f"≈: whether it is more or less than {rival} is left open."
        )
        cells = tuple((row.policy, f"{row.load:g}", *(_ratio(row.against[key]) for _, key in _PAIRED)) for row in others)
        columns = ("policy", "load", *(heading for heading, _ in _PAIRED))
        sections.append(Section(f"Against {rival}", text, table=HtmlTable(columns, cells, names=2, words=("policy",))))
    return page(title, intro, sections)


def sweep_table(rows: Sequence[Average]) -> HtmlTable:
    """One row per load and policy. The best means of each load are marked, and those not told apart from the best."""
    rival = next((row.rival for row in rows), "first")
    headings = [heading for heading, _, _ in _COLUMNS]
    headings.insert(1, f"÷ {rival if len(rival) <= _LONGEST_RIVAL else 'first'}")
    cells = []
    for row in rows:
        written = [_mean(row.means[key], key) for _, key, _ in _COLUMNS]
        written.insert(1, "1" if row.policy == row.rival else _ratio(row.against.get("avg_jct")))
        cells.append((row.policy, f"{row.load:g}", *written))
    best: set[tuple[int, int]] = set()
    for load in {row.load for row in rows}:
        places = [place for place, row in enumerate(rows) if row.load == load]
        for column, (_, key, goal) in enumerate(_COLUMNS):
            shown = column + 2 if column == 0 else column + _RATIO_AT
            best |= {(place, shown) for place in _best_of(rows, places, key, goal)}
    return HtmlTable(("policy", "load", *headings), tuple(cells), frozenset(best), names=2, words=("policy",))


def _best_of(rows: Sequence[Average], places: Sequence[int], key: str, goal: Goal) -> list[int]:
    """The best of these rows, those that are written the same, and those that may be as good; none if all are the same."""
    means = {place: value for place in places if (value := rows[place].means[key].value) is not None}
    same = best_places(list(means.values()), [_amount(value, key) for value in means.values()], goal)
    if not same:
        return []
    best = (min if goal == "lowest" else max)(means, key=lambda place: means[place])
    tied = {place for place in means if place != best and rows[place].than(rows[best], key).is_open}
    return [place for number, place in enumerate(means) if number in same or place in tied]


def _amount(value: float, key: str) -> str:
    return amount(value, UNITS.get(key, "plain"))


def _mean(mean: Mean, key: str) -> str:
    """`3h12m ±15m`."""
    if mean.value is None:
        return "–"
    return _amount(mean.value, key) + ("" if mean.margin is None else f" ±{_amount(mean.margin, key)}")


def _ratio(each: Contrast | None) -> str:
    """`≈ 0.97 (0.88–1.07)`."""
    if each is None or each.ratio is None:
        return "–"

    def short(ratio: float) -> str:
        return f"{ratio:.2f}" if 0.05 <= ratio < 100 else amount(ratio, "plain")

    bounds = "" if each.ratio_interval is None else f" ({'–'.join(map(short, each.ratio_interval))})"
    return ("≈ " if each.is_open else "") + short(each.ratio) + bounds


def over_load(rows: Sequence[Average], key: str, *, title: str, y_label: str) -> str:
    """A figure: the mean of a number of the summary over load, one line per policy, with intervals as whiskers."""
    drawn_title, top = svg.heading(title)
    policies = list(dict.fromkeys(row.policy for row in rows))
    legend = svg.legend_for(policies, top)
    known = [row for row in rows if row.means[key].value is not None]
    loads = np.unique([row.load for row in known])
    unit = UNITS.get(key, "plain")
    # An interval that reaches below 0, or a share's above 1, is cut off there.
    reach: list[float] = []
    for mean in (row.means[key] for row in known):
        low, high = mean.interval or (mean.value or 0.0, mean.value or 0.0)
        reach += [max(low, 0.0), min(high, 1.0) if unit == "percent" else high]
    axis = points_axis(loads, "plain", 6, svg.room_for("plain"))
    if len(loads) == 1:  # policies stand side by side: nothing but that load is written below them
        axis = replace(axis, ticks=(Tick(float(loads[0]), f"{loads[0]:g}"),))
    frame = svg.framed(axis, level_axis(np.array(reach, dtype=np.float64), unit, 5), legend.bottom + 14)
    labels = svg.FigureLabels(title, frame.x.titled("load"), y_label)
    apart, room = (_APART, _ROOM) if len(loads) > 1 else (_APART_ALONE, _ROOM_ALONE)
    step = min(apart, room * (frame.right - frame.left) / max(1, len(policies)))
    groups = []
    for place, name in enumerate(policies):
        marks = _marks([row for row in known if row.policy == name], key, frame, step * (place - (len(policies) - 1) / 2))
        groups.append(svg.element("g", marks, legend.line(place, length=_SWATCH), class_=series_class(place)))
    body = [svg.surroundings(frame, labels), "" if known else svg.no_data(frame), svg.element("g", *groups, class_="marks")]
    return svg.figure(svg.described("Line chart", labels, policies), frame.figure_height, drawn_title, *body)


def _marks(rows: Sequence[Average], key: str, frame: svg.Frame, aside: float) -> str:
    """Means joined by load, each with its whisker; all of it shifted to one side, so that policies do not overlap."""
    ordered = sorted(rows, key=lambda row: row.load)
    across = (frame.across(np.array([row.load for row in ordered])) + aside).tolist()
    down = frame.down(np.array([row.means[key].value for row in ordered], dtype=np.float64)).tolist()
    spots = [f"{svg.number(a)} {svg.number(b)}" for a, b in zip(across, down, strict=True)]
    line = svg.element("path", class_="line", d="M" + "L".join(spots)) if len(spots) > 1 else ""
    dots = [
        svg.element(
            "g",
            svg.tooltip(f"{row.policy}, load {row.load:g}: {_mean(row.means[key], key)}"),
            svg.element("circle", class_="dot", cx=a, cy=b, r=_DOT),
            _whisker(row.means[key], frame, a),
        )
        for row, a, b in zip(ordered, across, down, strict=True)
    ]
    return line + "".join(dots)


def _whisker(mean: Mean, frame: svg.Frame, at: float) -> str:
    """Filled shapes: strokes of a series may be dashed."""
    if mean.interval is None:
        return ""
    bottom, top = frame.down(np.array(mean.interval)).tolist()  # what is beyond the figure stands at its end
    caps = [
        svg.element("rect", class_="dot", x=at - _CAP / 2, y=level - _THIN / 2, width=_CAP, height=_THIN)
        for level in (bottom, top)
    ]
    stem = svg.element("rect", class_="dot", x=at - _THIN / 2, y=top, width=_THIN, height=max(0.0, bottom - top))
    return stem + "".join(caps)
