"""The report of one run: its summary, who held which GPU, completion times, fairness, and the cluster over time."""

from poise.lab.analysis.summary import Summary
from poise.lab.report.comparison import TERMS, ComparedRun, cell, over_time
from poise.lab.report.figures import cdf
from poise.lab.report.page import HtmlTable, Section, page
from poise.lab.report.timeline import timeline
from poise.scheduler.model.units import counted

CPU = "CPU seconds"
ROWS = (
    ("jobs", "jobs"), ("finished", "finished"), ("failed", "failed"), ("cancelled", "cancelled"), ("rejected", "rejected"),
    ("unfinished", "unfinished"), ("average JCT", "avg_jct"), ("median JCT", "median_jct"), ("p99 JCT", "p99_jct"),
    ("makespan", "makespan"), ("GPUs in use", "utilisation"), ("GPU-hours", "gpu_hours"), ("preemptions", "preemptions"),
    ("migrations", "migrations"), ("restarts", "restarts"), ("worst ρ", "worst_rho"), ("mean ρ", "mean_rho"),
    ("unfair jobs", "unfair_fraction"), ("Jain's index", "jain"), ("decisions", "decisions"), (CPU, "cpu_seconds"),
)  # fmt: skip
"""Headings of the summary, and its fields."""
_ONLY_IF_ANY = {"failed", "cancelled", "rejected", "unfinished", "restarts"}


def summary_rows(summary: Summary) -> list[tuple[str, str]]:
    """Return the headings and values of the summary, for people; counts that are usually 0 only where they are not."""
    return [(heading, cell(summary, key)) for heading, key in ROWS if key not in _ONLY_IF_ANY or getattr(summary, key)]


def simulation_page(run: ComparedRun) -> str:
    """Return the report as a whole document."""
    summary = run.summary
    jobs = f"{counted(summary.jobs, 'job')} of {summary.trace} on {summary.cluster}, seed {summary.seed}."
    intro = jobs + (" The run was interrupted: these results are partial." if summary.partial else "")
    exhibit = timeline([(summary.policy, run.track)], run.cluster)
    held = "A row is a GPU, a block a job on it." if exhibit else "No job ever held a GPU."
    name = summary.policy
    # CPU times stay out, so that equal runs make equal pages.
    rows = tuple(row for row in summary_rows(summary) if row[0] != CPU)
    sections = [
        Section("Summary", TERMS, table=HtmlTable(("", "value"), rows, words=("",))),
        Section("Who held which GPU", held, exhibits=(exhibit,) if exhibit else ()),
        Section(
            "Completion times and fairness",
            figures=(
                cdf({name: run.jcts}, title="Completion times", x_label="completion time"),
                cdf({name: run.rhos}, title="Finish-time fairness", x_label="ρ", unit="plain"),
            ),
        ),
        over_time([run]),
    ]
    return page(f"{name} on {summary.cluster}", intro, sections)
