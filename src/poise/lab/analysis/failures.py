"""Parts of a study about attempts, failures by category, and GPU time that led to nothing."""

import numpy as np

from poise.lab.analysis.records import ENDS, Covers, Records
from poise.lab.analysis.tables import (
    ALL,
    HOUR,
    Chart,
    ChartCurve,
    ChartShape,
    JobGroup,
    Row,
    StudyPart,
    ValueUnit,
    bars,
    by_code,
    by_value,
    columns,
    known,
    nearest,
    ratio,
)
from poise.scheduler.model.arithmetic import Floats, Ints
from poise.scheduler.model.failures import category_of, verdict

UNTOLD = "not told"
"""The category of failures whose cause the input does not name."""
MOST_CURVES = 5
"""Most categories whose run times to failure are drawn, that of all failures included."""

_FAILURES = columns(
    ("category", "category", ValueUnit.TEXT),
    ("verdict", "again?", ValueUnit.TEXT),
    ("trials", "trials", ValueUnit.COUNT),
    ("jobs", "jobs", ValueUnit.COUNT),
    ("tenants", "tenants", ValueUnit.COUNT),
    ("retried", "retried", ValueUnit.COUNT),
    ("rtf_p50", "RTF p50", ValueUnit.SECONDS),
    ("rtf_p90", "RTF p90", ValueUnit.SECONDS),
    ("rtf_p95", "RTF p95", ValueUnit.SECONDS),
    ("rtf_share", "of all RTF", ValueUnit.SHARE),
    ("gpu_hours", "GPU-hours", ValueUnit.PLAIN),
    ("gpu_time_share", "of GPU time", ValueUnit.SHARE),
    ("unkept_gpu_hours", "not kept", ValueUnit.PLAIN),
)
_LOSSES = columns(
    ("end", "how runs ended", ValueUnit.TEXT),
    ("runs", "runs", ValueUnit.COUNT),
    ("jobs", "jobs", ValueUnit.COUNT),
    ("gpu_hours", "GPU-hours", ValueUnit.PLAIN),
    ("gpu_time_share", "of GPU time", ValueUnit.SHARE),
    ("unkept_gpu_hours", "not kept", ValueUnit.PLAIN),
)
_UNKEPT = (
    "Not kept is the GPU time of a run less the time in which a packed gang does the steps that the run added to its job, "
    "in a checkpoint or to the job's end"
)


def attempts(records: Records) -> StudyPart:
    """Show how often jobs were tried."""
    title = "Attempts and retries"
    if Covers.ATTEMPTS not in records.covers:
        return StudyPart("attempts", title, "", missing="The input says nothing of attempts.")
    told = records.attempts > 0
    rows = tuple((count, count - 1, len(of), ratio(len(of), told.sum())) for count, of in by_value(records.attempts[told]))
    head = columns(
        ("attempts", "attempts", ValueUnit.COUNT),
        ("retries", "retries", ValueUnit.COUNT),
        ("jobs", "jobs", ValueUnit.COUNT),
        ("jobs_share", "of jobs", ValueUnit.SHARE),
    )
    average = ratio(float(records.attempts.sum()), float(told.sum()))
    text = (
        "An attempt ends with a failure, of the job or of a node under it, or with the job; runs that a preemption "
        "set apart belong to one. "
    ) + ("" if average is None else f"Jobs that ran had {average:.2f} attempts on average.")
    caveat = ""
    if records.cluster is None and records.attempts.max(initial=0) <= 1:
        caveat = "The input tells of one attempt a job, which need not have been the only one."
    charts = (bars("Jobs by attempts", head, rows, "jobs_share"),)
    return StudyPart("attempts", title, text, head, rows, charts, caveat=caveat, bar="jobs_share")


def failures(records: Records) -> StudyPart:
    """Show failed attempts by category, as in the Philly study."""
    title = "Failures by category"
    tried = records.runs.attempts
    failed = np.flatnonzero(tried.failed)
    if Covers.ATTEMPTS not in records.covers:
        return StudyPart("failures", title, "", missing="The input says nothing of attempts, and so nothing of failed ones.")
    text = (
        "RTF is the run time to failure: time with GPUs of an attempt that failed. GPU-hours are those of failed attempts. "
        "Again? says whether another attempt is worth it: a hopeless cause stays, a transient one passes."
    )
    if Covers.CLUSTER in records.covers:
        text += (
            f" {_UNKEPT}; here of the runs that failed: work since their last checkpoint, restart overhead, being spread."
        )
    # A cause that belongs to no category is one by itself; an attempt without a cause has the code -1: the last.
    causes = records.runs.causes
    categories = [found.name if (found := category_of(cause)) else cause for cause in causes] + [UNTOLD]
    names = list(dict.fromkeys(categories))
    codes = np.array([names.index(each) for each in categories], dtype=np.int64)[tried.cause[failed]]
    groups = [JobGroup(ALL, np.arange(len(failed))), *by_code(codes, names)] if len(failed) else []
    rows = tuple(_failure_row(records, each.label, failed[each.members], failed) for each in groups)
    text += "" if rows else " No attempt failed, as far as the input says."
    curves = tuple(ChartCurve(each.label, known(tried.seconds[failed[each.members]])) for each in groups[:MOST_CURVES])
    charts = (
        bars(title, _FAILURES, rows, "rtf_share", "gpu_time_share"),
        Chart(ChartShape.CDF, "Run time to failure", "run time to failure", curves=curves),
    )
    return StudyPart("failures", title, text, _FAILURES, rows, charts if rows else ())


def _failure_row(records: Records, category: str, rows: Ints, failed: Ints) -> Row:
    tried = records.runs.attempts
    seconds = known(tried.seconds[rows])
    held = float(np.nansum(tried.gpu_seconds[rows]))
    jobs = np.unique(tried.job[rows])
    unkept = None
    if Covers.CLUSTER in records.covers:
        unkept = _unkept(records, np.flatnonzero(records.runs.failing & np.isin(records.runs.attempt_row, rows)))
    return (
        category,
        "" if category in (ALL, UNTOLD) else str(verdict(category)),
        len(rows),
        len(jobs),
        len(np.unique(records.tenant[jobs])) if Covers.TENANTS in records.covers else None,
        int(tried.retried[rows].sum()),
        *(nearest(seconds, share) for share in (0.5, 0.9, 0.95)),
        ratio(float(np.sum(seconds)), float(np.nansum(tried.seconds[failed]))),
        held / HOUR,
        ratio(held, records.gpu_hours * HOUR),
        unkept,
    )


ROUNDING = 1e-9
"""A smaller share of a run is a rounding error of a division, not lost time."""


def _unkept(records: Records, rows: Ints) -> float:
    """Return GPU-hours of runs less those that their kept steps take packed; 0 where that is not known."""
    runs = records.runs
    seconds = runs.seconds[rows]
    lost: Floats = np.nan_to_num(seconds - runs.ideal[rows], nan=0.0)
    lost[lost <= ROUNDING * seconds] = 0.0
    return float(np.sum(lost * runs.gpus[rows])) / HOUR


def losses(records: Records) -> StudyPart:
    """Show GPU time by how runs ended: what preemptions, lost nodes and trials cost."""
    title = "GPU time by how runs ended"
    if Covers.CLUSTER not in records.covers:
        missing = "The input does not say what ended each run, nor how far its job had come."
        return StudyPart("losses", title, "", missing=missing)
    rows: list[Row] = []
    for code, members in by_value(records.runs.ended):
        held = float(records.runs.gpu_seconds[members].sum())
        jobs = len(np.unique(records.runs.job[members]))
        share = ratio(held, records.gpu_hours * HOUR)
        rows.append((str(ENDS[code]), len(members), jobs, held / HOUR, share, _unkept(records, members)))
    text = (
        f"A run is a stretch of time in which a job holds its GPUs. {_UNKEPT}: lost work, restart overhead, being spread. "
        "Where the journal does not say how fast a packed gang would have been (tasks, cancelled runs, other numbers of "
        "GPUs than the job asks for), nothing counts as not kept. Trials are those of a validation pool."
    )
    return StudyPart("losses", title, text, _LOSSES, tuple(rows))
