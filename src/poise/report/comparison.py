"""Several runs of one trace side by side: table, figures, one page."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from poise.analysis.history import History, cumulated
from poise.analysis.summary import Measured, Summary
from poise.model.arrays import Floats
from poise.report.amounts import amount
from poise.report.figures import Series, bars, cdf, lines, scatter
from poise.report.page import Section, Table, page


@dataclass(frozen=True, slots=True)
class Run:
    """What is shown of one run. Levels hold from their moment on; moments are seconds since the first submission."""

    summary: Summary
    jcts: Floats
    rhos: Floats
    used: tuple[Floats, Floats]
    waiting: tuple[Floats, Floats]

    @staticmethod
    def of(summary: Summary, history: History, measured: Measured) -> "Run":
        """What a finished run shows."""
        first = min((life.submitted for life in history.jobs.values()), default=0.0)
        return Run(
            summary,
            measured.jcts,
            measured.rhos[np.isfinite(measured.rhos)],
            _since(history.held, first, 1 / history.cluster.gpus),
            _since(history.waiting, first, 1.0),
        )


def _since(changes: list[tuple[float, int]], first: float, scale: float) -> tuple[Floats, Floats]:
    moments, levels = cumulated(changes)
    return moments - first, levels.astype(np.float64) * scale


COLUMNS = (
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

_UNITS = {"avg_jct": "seconds", "median_jct": "seconds", "p99_jct": "seconds", "makespan": "seconds"}


def cell(summary: Summary, key: str) -> str:
    """A value of a summary for people."""
    value = getattr(summary, key)
    if value is None:
        return "–"
    if key in _UNITS:
        return amount(value, "seconds")
    if key in ("utilisation", "unfair_fraction"):
        return amount(value, "percent")
    if isinstance(value, float):
        return f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def table(summaries: Sequence[Summary]) -> Table:
    """One row a run; the best of each column is marked if runs differ."""
    rows = tuple(tuple(cell(summary, key) for _, key, _ in COLUMNS) for summary in summaries)
    best = {
        (row, column)
        for column, (_, key, kind) in enumerate(COLUMNS)
        if kind is not None
        for row in _best_rows([getattr(summary, key) for summary in summaries], kind)
    }
    return Table(tuple(heading for heading, _, _ in COLUMNS), rows, frozenset(best))


def _best_rows(values: list[float | None], kind: str) -> list[int]:
    known = [value for value in values if value is not None]
    if len(known) < 2 or min(known) == max(known):
        return []
    best = min(known) if kind == "lowest" else max(known)
    return [row for row, value in enumerate(values) if value == best]


def comparison_page(title: str, intro: str, runs: Sequence[Run], *, footer: str = "") -> str:
    """A whole document."""
    return page(title, intro, [_summary(runs), _completion(runs), _fairness(runs), _cluster(runs)], footer=footer)


def _summary(runs: Sequence[Run]) -> Section:
    text = (
        "JCT is the time from submission to completion. ρ is a job's completion time divided by what it would take alone "
        "on a 1/N slice of the cluster; a job with ρ above 1.1 counts as treated unfairly."
    )
    return Section("Summary", text, table=table([run.summary for run in runs]))


def _completion(runs: Sequence[Run]) -> Section:
    averages = {run.summary.policy: run.summary.avg_jct for run in runs if run.summary.avg_jct is not None}
    return Section(
        "Completion times",
        figures=(
            cdf({run.summary.policy: run.jcts for run in runs}, title="Completion times", x_label="completion time"),
            bars(averages, title="Average completion time", unit="seconds", best="lowest"),
        ),
    )


def _fairness(runs: Sequence[Run]) -> Section:
    points = {
        run.summary.policy: (run.summary.avg_jct, run.summary.worst_rho)
        for run in runs
        if run.summary.avg_jct is not None and run.summary.worst_rho is not None
    }
    shares = [Series(run.summary.policy, np.sort(run.rhos), _steps(len(run.rhos))) for run in runs]
    return Section(
        "Fairness",
        figures=(
            lines(
                shares,
                title="Finish-time fairness",
                x_label="ρ",
                y_label="share of jobs",
                x_scale="log",
                y_unit="percent",
            ),
            scatter(points, title="Speed against fairness", x_label="average JCT", y_label="worst ρ", x_unit="seconds"),
        ),
    )


def _steps(count: int) -> Floats:
    return np.arange(1, count + 1, dtype=np.float64) / max(count, 1)


def _cluster(runs: Sequence[Run]) -> Section:
    used = [Series(run.summary.policy, *run.used) for run in runs]
    waiting = [Series(run.summary.policy, *run.waiting) for run in runs]
    return Section(
        "The cluster over time",
        figures=(
            lines(
                used,
                title="GPUs in use",
                x_label="time since the first submission",
                y_label="share of GPUs",
                shape="steps",
                x_unit="seconds",
                y_unit="percent",
            ),
            lines(
                waiting,
                title="Waiting jobs",
                x_label="time since the first submission",
                y_label="jobs",
                shape="steps",
                x_unit="seconds",
            ),
        ),
    )
