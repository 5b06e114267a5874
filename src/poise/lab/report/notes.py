"""What people should know of results besides the numbers: jobs that never ran, means that leave some out."""

from collections.abc import Iterator, Sequence

from poise.lab.analysis.history import History
from poise.lab.analysis.statistics import KEYS, Average
from poise.lab.analysis.summary import Summary
from poise.scheduler.model.units import counted

SHOWN = 3
"""Rejections and remarks that are shown; the others are counted."""


def run_notes(
    history: History,
    summary: Summary,
    rejections: str = "--per-job lists them",
    remarks: str = "--out DIR writes them into the journal",
) -> list[str]:
    """Jobs that can never run here, remarks of the policy (the first few of each), and jobs that are in no mean.

    rejections, remarks   where to find the others
    """
    notes = [f"job {job!r} was rejected: it {reason}" for job, reason in history.rejections[:SHOWN]]
    if len(history.rejections) > SHOWN:
        notes.append(f"and {counted(len(history.rejections) - SHOWN, 'more rejection')}; {rejections}")
    notes += [f"at {time:g} s: {text}" for time, text in history.remarks[:SHOWN]]
    if len(history.remarks) > SHOWN:
        notes.append(f"and {counted(len(history.remarks) - SHOWN, 'more remark')}; {remarks}")
    if summary.unfinished and not summary.partial:
        notes.append(f"{counted(summary.unfinished, 'job')} had not ended when the run did; means leave them out")
    return notes


def comparison_notes(summaries: Sequence[Summary]) -> Iterator[str]:
    """Jobs that some run rejected or left unfinished."""
    rejected = max((summary.rejected for summary in summaries), default=0)
    if rejected:
        yield f"jobs that can never run here were rejected, {rejected:,} of them; `poise simulate` says why"
    unfinished = max((summary.unfinished for summary in summaries if not summary.partial), default=0)
    if unfinished:
        yield f"jobs had not ended when their run did, up to {unfinished:,} in a run; means leave them out"


def sweep_notes(rows: Sequence[Average]) -> Iterator[str]:
    """The same of sweeps, seeds that change nothing, and means over some runs only."""
    rejected = max((run.rejected for row in rows for run in row.runs.values()), default=0)
    if rejected:
        yield f"jobs that can never run here were rejected, up to {rejected:,} in a run; `poise simulate` says why"
    unfinished = max((run.unfinished for row in rows for run in row.runs.values()), default=0)
    if unfinished:
        yield f"jobs had not ended when their run did, up to {unfinished:,} in a run; means leave them out"
    policies = {row.policy: None for row in rows}
    same = [name for name in policies if all(row.is_constant for row in rows if row.policy == name)]
    if same:
        who = "any policy" if len(same) == len(policies) else ", ".join(same)
        yield f"seeds changed nothing under {who}: runs with different seeds came out the same, and have no intervals"
    for row in rows:
        counts = {key: row.means[key].runs for key in KEYS}
        absent = [key for key in KEYS if not counts[key]]
        if absent:
            yield f"{row.policy} at load {row.load:g}: no run has {', '.join(absent)}"
        short = [key for key in KEYS if 0 < counts[key] < len(row.runs)]
        if short:
            some = f"only {min(counts[key] for key in short):,} of {len(row.runs):,} runs"
            yield f"{row.policy} at load {row.load:g}: {some} have {', '.join(short)}; means are over those"
