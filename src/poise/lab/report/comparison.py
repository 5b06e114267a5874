"""The comparison report: several runs of one trace side by side, as a table and as one page with figures.

`ComparedRun` holds what the report needs of a run, small enough to send between processes; `table` serves the terminal and
the page alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from poise.lab.analysis.history import History, cumulated
from poise.lab.analysis.summary import Measured, Summary
from poise.lab.report.axes import Unit, amount, nice_step, tick_labels
from poise.lab.report.figures import Goal, Series, averaged, bars, best_places, cdf, lines, scatter
from poise.lab.report.page import HtmlTable, Section, page
from poise.lab.report.timeline import Track, timeline
from poise.scheduler.model.arithmetic import Floats
from poise.scheduler.model.cluster import Cluster

MOST_CHANGES = 120
"""A line over time that changes more often is drawn as means: several that jump up and down cannot be told apart."""

TERMS = (
    "JCT is the time from submission to completion. ρ is a job's completion time divided by what it would take alone "
    "on a 1/N slice of the cluster; a job with ρ above 1.1 counts as treated unfairly."
)
"""What the headings of the tables mean."""

UNITS: dict[str, Unit] = {
    **dict.fromkeys(("avg_jct", "median_jct", "p99_jct", "makespan"), "seconds"),
    **dict.fromkeys(("utilisation", "unfair_fraction"), "percent"),
}
"""Units of a summary's values, by key; plain numbers are left out."""

COLUMNS: tuple[tuple[str, str, Goal | None], ...] = (
    ("policy", "policy", None),
    ("average JCT", "avg_jct", "lowest"),
    ("median JCT", "median_jct", "lowest"),
    ("p99 JCT", "p99_jct", "lowest"),
    ("makespan", "makespan", "lowest"),
    ("in use", "utilisation", "highest"),
    ("preemptions", "preemptions", "lowest"),
    ("worst ρ", "worst_rho", "lowest"),
    ("unfair", "unfair_fraction", "lowest"),
    ("finished", "finished", "highest"),
)
"""(heading, key of the summary, which value is best)."""


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """What is shown of one run.

    `used` (share of GPUs) and `waiting` (jobs) are times and levels: a level holds from its time on. Times are seconds since
    the first submission.
    """

    summary: Summary
    jcts: Floats
    rhos: Floats
    used: tuple[Floats, Floats]
    waiting: tuple[Floats, Floats]
    cluster: Cluster
    track: Track

    @staticmethod
    def of(summary: Summary, history: History, measured: Measured) -> "ComparedRun":
        """Extract it from a finished run."""
        first = min((life.submitted for life in history.jobs.values()), default=0.0)
        changes = (moment for each in (history.held, history.waiting) for moment, _ in each[-1:])
        end = max((*changes, *(run.end for run in history.runs[-1:])), default=first)  # open runs come last

        def levels_of(changes: list[tuple[float, int]], scale: float) -> tuple[Floats, Floats]:
            times, levels = cumulated([*changes, (end, 0)] if changes else changes)
            return times - first, levels.astype(np.float64) * scale

        return ComparedRun(
            summary,
            measured.jcts,
            measured.rhos[np.isfinite(measured.rhos)],
            levels_of(history.held, 1 / history.cluster.gpus),
            levels_of(history.waiting, 1.0),
            history.cluster,
            Track.of(history),
        )


def table(summaries: Sequence[Summary]) -> HtmlTable:
    """One row per run; the best of each column are marked if runs differ, all that are written the same."""
    rows = tuple(tuple(cell(summary, key) for _, key, _ in COLUMNS) for summary in summaries)
    best = {
        (row, column)
        for column, (_, key, goal) in enumerate(COLUMNS)
        if goal is not None
        for row in best_places([getattr(each, key) for each in summaries], [cells[column] for cells in rows], goal)
    }
    return HtmlTable(tuple(heading for heading, _, _ in COLUMNS), rows, frozenset(best), words=("policy",))


def cell(summary: Summary, key: str) -> str:
    """A value of a summary, written for people."""
    value = getattr(summary, key)
    if value is None:
        return "–"
    if key in UNITS:
        return amount(value, UNITS[key])
    if isinstance(value, float):
        return f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def comparison_page(title: str, intro: str, runs: Sequence[ComparedRun], *, footer: str = "") -> str:
    """The report as a whole document."""
    averages = {run.summary.policy: run.summary.avg_jct for run in runs if run.summary.avg_jct is not None}
    points = {
        run.summary.policy: (run.summary.avg_jct, run.summary.worst_rho)
        for run in runs
        if run.summary.avg_jct is not None and run.summary.worst_rho is not None
    }
    completion = (
        cdf({run.summary.policy: run.jcts for run in runs}, title="Completion times", x_label="completion time"),
        bars(averages, title="Average completion time", unit="seconds", best="lowest"),
    )
    fairness = (
        cdf({run.summary.policy: run.rhos for run in runs}, title="Finish-time fairness", x_label="ρ", unit="plain"),
        scatter(points, title="Speed against fairness", x_label="average JCT", y_label="worst ρ", x_unit="seconds"),
    )
    exhibit = timeline([(run.summary.policy, run.track) for run in runs], runs[0].cluster) if runs else None
    held = "A row is a GPU, a block a job on it. All policies share one view: zoom in under one, then look at the others."
    who = Section("Who held which GPU", held, exhibits=(exhibit,)) if exhibit else None
    sections = [
        Section("Summary", TERMS, table=table([run.summary for run in runs])),
        who or Section("Who held which GPU", "No job ever held a GPU."),
        Section("Completion times", figures=completion),
        Section("Fairness", figures=fairness),
        over_time(runs),
    ]
    return page(title, intro, sections, footer=footer)


def over_time(runs: Sequence[ComparedRun]) -> Section:
    """GPUs in use and waiting jobs of these runs."""
    used = [Series(run.summary.policy, *run.used) for run in runs]
    waiting = [Series(run.summary.policy, *run.waiting) for run in runs]
    text = ""
    span = max((float(each.x[-1]) for each in (*used, *waiting) if each.x.size), default=0.0)
    if span > 0 and max(each.x.size for each in (*used, *waiting)) > MOST_CHANGES:
        stretch = nice_step(span, "seconds", MOST_CHANGES)
        used, waiting = ([averaged(each, stretch) for each in series] for series in (used, waiting))
        text = f"Each step is the mean of {tick_labels([stretch], stretch, 'seconds')[0]}."

    def drawn(series: Sequence[Series], *, title: str, y_label: str, y_unit: Unit) -> str:
        time = "time since the first submission"
        return lines(series, title=title, x_label=time, y_label=y_label, shape="steps", x_unit="seconds", y_unit=y_unit)

    figures = (
        drawn(used, title="GPUs in use", y_label="share of GPUs", y_unit="percent"),
        drawn(waiting, title="Queue length", y_label="waiting jobs", y_unit="plain"),
    )
    return Section("The cluster over time", text, figures=figures)
