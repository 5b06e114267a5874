"""What a person is shown of one run."""

from collections.abc import Sequence

import click
from rich.box import SIMPLE
from rich.table import Table as RichTable

from poise.analysis.summary import Summary
from poise.cli.tables import console, show_notes
from poise.model.units import counted
from poise.report.comparison import cell

_ROWS = (
    ("jobs", "jobs"),
    ("finished", "finished"),
    ("failed", "failed"),
    ("cancelled", "cancelled"),
    ("rejected", "rejected"),
    ("unfinished", "unfinished"),
    ("average JCT", "avg_jct"),
    ("median JCT", "median_jct"),
    ("p99 JCT", "p99_jct"),
    ("makespan", "makespan"),
    ("GPUs in use", "utilisation"),
    ("GPU-hours", "gpu_hours"),
    ("preemptions", "preemptions"),
    ("migrations", "migrations"),
    ("restarts", "restarts"),
    ("worst ρ", "worst_rho"),
    ("mean ρ", "mean_rho"),
    ("unfair jobs", "unfair_fraction"),
    ("Jain's index", "jain"),
    ("decisions", "decisions"),
    ("CPU seconds", "cpu_seconds"),
)
SHOWN = 3
"""Rejections that are told one by one."""

_ONLY_IF_ANY = {"failed", "cancelled", "rejected", "unfinished", "restarts"}


def show_summary(summary: Summary) -> None:
    """One run, a row a number."""
    click.echo(f"{summary.policy} on {summary.cluster}: {summary.trace}")
    table = RichTable(show_header=False, box=SIMPLE)
    table.add_column(style="bold")
    table.add_column(justify="right")
    for heading, key in _ROWS:
        if key not in _ONLY_IF_ANY or getattr(summary, key):
            table.add_row(heading, cell(summary, key))
    console().print(table)
    if summary.partial:
        click.echo("These results are partial: the run was interrupted.", err=True)


def show_unfinished(summary: Summary, *, quiet: bool) -> None:
    """Jobs that had not ended when the run did, and so are in no mean."""
    if summary.unfinished and not summary.partial:
        show_notes(
            [f"{counted(summary.unfinished, 'job')} had not ended when the run did; means leave them out"], quiet=quiet
        )


def show_rejections(rejections: Sequence[tuple[str, str]], *, quiet: bool) -> None:
    """Which jobs can never run here, and why; the first few of them."""
    notes = [f"job {job!r} was rejected: it {reason}" for job, reason in rejections[:SHOWN]]
    if len(rejections) > SHOWN:
        notes.append(f"and {counted(len(rejections) - SHOWN, 'more rejection')}; --per-job lists them")
    show_notes(notes, quiet=quiet)


def show_remarks(remarks: Sequence[tuple[float, str]], *, quiet: bool) -> None:
    """What the policy had to say of its decisions; the first few of them."""
    notes = [f"at {moment:g} s: {text}" for moment, text in remarks[:SHOWN]]
    if len(remarks) > SHOWN:
        notes.append(f"and {counted(len(remarks) - SHOWN, 'more remark')}; --out DIR writes them into the journal")
    show_notes(notes, quiet=quiet)
