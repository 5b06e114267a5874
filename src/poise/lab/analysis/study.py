"""The Philly study (Jeon et al., ATC'19; docs/algorithms/philly.md) of any jobs: parts made of records.

`study` makes all parts in the order of `PARTS`. Here are those about jobs and GPU time, speed, attempts, failures and lost
work; `delays.py` has those about waiting. Columns of the tables come first, then one function per part.
"""

import numpy as np

from poise.lab.analysis.delays import causes, delays_by_size, delays_by_tenant, order, waits
from poise.lab.analysis.history import RunEnd
from poise.lab.analysis.records import ENDS, FINALS, Covers, Records
from poise.lab.analysis.tables import (
    ALL,
    COUNT,
    HOUR,
    PLAIN,
    SECONDS,
    SHARE,
    TEXT,
    Chart,
    ChartCurve,
    ChartShape,
    JobGroup,
    Layout,
    Row,
    StudyPart,
    TableColumn,
    bars,
    by_code,
    by_size,
    by_value,
    columns,
    known,
    lower,
    mean,
    named,
    nearest,
    ratio,
)
from poise.scheduler.model.arithmetic import Floats, Ints
from poise.scheduler.model.failures import category_of, verdict

WEEK = 7 * 24 * HOUR
RUN_TIMES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
"""Quantiles of run times that are shown."""
LARGE = 5
"""GPUs from which on the Philly study looks at the delay by locality."""
UNTOLD = "not told"
"""The category of failures whose cause the input does not name."""
MOST_CURVES = 5
"""Most categories whose run times to failure are drawn, that of all failures included."""
ROUNDING = 1e-9
"""A smaller share of a run is a rounding error of a division, not lost time."""

_COUNTS = columns(
    ("jobs", "jobs", COUNT), ("jobs_share", "of jobs", SHARE), ("gpu_hours", "GPU-hours", PLAIN),
    ("gpu_time_share", "of GPU time", SHARE),
)  # fmt: skip
_BARS = ("jobs_share", "gpu_time_share")
_MEASURES = columns(
    ("jobs", "jobs", COUNT), ("tenants", "tenants", COUNT), ("span", "from first to last submission", SECONDS),
    ("gpu_hours", "GPU-hours", PLAIN), ("run_time_median", "median run time", SECONDS),
    ("run_time_mean", "mean run time", SECONDS), ("run_time_p90", "p90 run time", SECONDS),
    ("run_time_p99", "p99 run time", SECONDS), ("run_time_max", "longest run time", SECONDS),
    ("longer_than_a_week", "ran longer than a week", SHARE), ("delay_median", "median queueing delay", SECONDS),
    ("delay_mean", "mean queueing delay", SECONDS), ("delay_p90", "p90 queueing delay", SECONDS),
    ("attempts_mean", "attempts a job", PLAIN), ("gpus", "GPUs", COUNT), ("utilisation", "GPUs in use", SHARE),
)  # fmt: skip
_NODES = columns(
    ("nodes", "nodes", COUNT), ("jobs", "jobs", COUNT), ("jobs_share", "of jobs", SHARE),
    ("large_jobs", f"jobs of {LARGE} GPUs or more", COUNT), ("large_delay_median", "their median delay", SECONDS),
    ("large_delay_mean", "their mean delay", SECONDS), ("large_delay_p90", "their p90 delay", SECONDS),
)  # fmt: skip
_SPEED = columns(
    ("runs", "runs", COUNT), ("gpu_hours", "GPU-hours", PLAIN), ("speed", "of packed speed", SHARE),
    ("speed_p10", "p10 of runs", SHARE), ("speed_p50", "p50 of runs", SHARE),
)  # fmt: skip
_FAILURES = columns(
    ("category", "category", TEXT), ("verdict", "again?", TEXT), ("trials", "trials", COUNT),
    ("jobs", "jobs", COUNT), ("tenants", "tenants", COUNT), ("retried", "retried", COUNT),
    ("rtf_p50", "RTF p50", SECONDS), ("rtf_p90", "RTF p90", SECONDS), ("rtf_p95", "RTF p95", SECONDS),
    ("rtf_share", "of all RTF", SHARE), ("gpu_hours", "GPU-hours", PLAIN), ("gpu_time_share", "of GPU time", SHARE),
    ("unkept_gpu_hours", "not kept", PLAIN),
)  # fmt: skip
_LOSSES = columns(
    ("end", "how runs ended", TEXT), ("runs", "runs", COUNT), ("jobs", "jobs", COUNT),
    ("gpu_hours", "GPU-hours", PLAIN), ("gpu_time_share", "of GPU time", SHARE),
    ("unkept_gpu_hours", "not kept", PLAIN),
)  # fmt: skip
_UNKEPT = (
    "Not kept is the GPU time of a run less the time in which a packed gang does the steps that the run added to its job, "
    "in a checkpoint or to the job's end"
)


def study(records: Records) -> tuple[StudyPart, ...]:
    """Return all parts; those that the input does not cover say so."""
    with np.errstate(over="ignore", invalid="ignore"):  # a sum that is beyond all floats is infinite, and shown as nothing
        return tuple(part(records) for part in PARTS)


def covered(records: Records) -> tuple[list[str], list[str]]:
    """Return what the input tells of its jobs, and what it does not."""
    return (
        [str(each) for each in Covers if each in records.covers],
        [str(each) for each in Covers if each not in records.covers],
    )


def overview(records: Records) -> StudyPart:
    """Show everything in a few numbers, and how it went over time."""
    times, delays = known(records.run_seconds), known(records.delays)
    cluster, tried = records.cluster, records.attempts[records.attempts > 0]
    row = (
        len(records.gpus),
        len(records.tenants) if Covers.TENANTS in records.covers else None,
        float(np.ptp(records.submitted)) if len(records.submitted) else None,
        records.gpu_hours,
        lower(times, 0.5),
        mean(times),
        lower(times, 0.9),
        lower(times, 0.99),
        float(times[-1]) if len(times) else None,
        ratio(float(np.sum(times > WEEK)), len(times)),
        nearest(delays, 0.5),
        mean(delays),
        nearest(delays, 0.9),
        mean(tried.astype(np.float64)) if Covers.ATTEMPTS in records.covers else None,
        cluster.gpus if cluster else None,
        cluster.utilisation if cluster else None,
    )
    since = "time since the first submission"
    if cluster is None:
        day = np.sort(records.submitted) - records.submitted.min(initial=np.inf)
        arrived = ChartCurve("submitted", np.arange(1.0, len(day) + 1), day)
        charts: tuple[Chart, ...] = (Chart(ChartShape.STEPS, "Jobs submitted", since, "jobs", COUNT, (arrived,)),)
    else:
        charts = (
            Chart(ChartShape.STEPS, "GPUs in use", since, "share of GPUs", SHARE, (cluster.used,)),
            Chart(ChartShape.STEPS, "Waiting jobs", since, "jobs", COUNT, (cluster.waiting,)),
        )
    text = "Run time is the time with GPUs, all attempts added up; delay is the time from submission to the first start."
    unknown = int(np.isnan(records.gpu_seconds).sum())
    caveat = f"Jobs left out of run time and GPU time because their length is not known: {unknown:,}." if unknown else ""
    return StudyPart("overview", "Overview", text, _MEASURES, (row,), charts, layout=Layout.CARD, caveat=caveat)


def _counts(records: Records, members: Ints) -> Row:
    """Return the figures of `_COUNTS`."""
    seconds = float(np.nansum(records.gpu_seconds[members]))
    shares = ratio(len(members), len(records.gpus)), ratio(seconds, records.gpu_hours * HOUR)
    return len(members), shares[0], seconds / HOUR, shares[1]


def sizes(records: Records) -> StudyPart:
    """Show jobs by the buckets of the Philly study, with their run times."""
    rows: list[Row] = []
    groups = by_size(records.gpus)
    for each in (*groups, JobGroup(ALL, np.arange(len(records.gpus)))):
        times = known(records.run_seconds[each.members])
        figures = (lower(times, share) for share in RUN_TIMES)
        rows.append((each.label, *_counts(records, each.members), *figures, mean(times)))
    text = (
        "By GPUs that a job asks for at once. A quantile of run times is the value at place int(p·(n − 1)) of the ascending "
        "list, counted from 0, as in the published tables of Philly."
    )
    quantiles = [f"p{round(100 * share)}" for share in RUN_TIMES]
    head = (
        TableColumn("size", "GPUs", TEXT),
        *_COUNTS,
        *(TableColumn(f"run_time_{name}", name, SECONDS) for name in quantiles),
        TableColumn("run_time_mean", "mean", SECONDS),
    )
    curves = tuple(ChartCurve(named(each), known(records.run_seconds[each.members])) for each in groups)
    charts = (
        bars("Jobs and GPU time by size", head, rows, *_BARS),
        Chart(ChartShape.CDF, "Run times by size", "run time", curves=curves),
    )
    return StudyPart("sizes", "Jobs and GPU time by size", text, head, tuple(rows), charts, bar=_BARS[-1])


def gangs(records: Records) -> StudyPart:
    """Show jobs by exact number of GPUs."""
    head = (TableColumn("gpus", "GPUs", COUNT), *_COUNTS)
    rows = tuple((gpus, *_counts(records, members)) for gpus, members in by_value(records.gpus))
    return StudyPart("gangs", "Jobs by exact number of GPUs", "By GPUs that a job asks for at once.", head, rows)


def statuses(records: Records) -> StudyPart:
    """Show jobs by what became of them."""
    head = (TableColumn("status", "status", TEXT), *_COUNTS)
    rows = tuple((str(FINALS[code]), *_counts(records, members)) for code, members in by_value(records.final))
    text = "Killed jobs were cancelled by their owners; failed ones are those that Philly calls unsuccessful."
    untold = "All jobs count as passed: they did, or the input does not say how they ended."
    caveat = "" if Covers.OUTCOMES in records.covers else untold
    charts = (bars("Jobs and GPU time by status", head, rows, *_BARS),)
    return StudyPart("statuses", "Jobs and GPU time by status", text, head, rows, charts, caveat=caveat, bar=_BARS[-1])


def tenants(records: Records) -> StudyPart:
    """Show jobs by who submitted them."""
    title = "Jobs and GPU time by tenant"
    if Covers.TENANTS not in records.covers:
        return StudyPart("tenants", title, "", missing="The input names no tenants.")
    head = (TableColumn("tenant", "tenant", TEXT), *_COUNTS)
    groups = by_code(records.tenant, records.tenants)
    rows = tuple((each.label, *_counts(records, each.members)) for each in groups)
    text = f"{len(rows):,} tenants, those with most jobs first."
    return StudyPart("tenants", title, text, head, rows, (bars(title, head, rows, *_BARS),), bar=_BARS[-1])


def nodes(records: Records) -> StudyPart:
    """Show jobs by the number of nodes of their first attempt, and the delay of large ones."""
    title = "Jobs and delay by number of nodes"
    if Covers.NODES not in records.covers:
        return StudyPart("nodes", title, "", missing="The input does not say on which nodes jobs ran.")
    told = int(np.sum(records.first_nodes > 0))
    rows: list[Row] = []
    for count, members in by_value(records.first_nodes):
        if count:
            large = members[records.gpus[members] >= LARGE]
            delays = known(records.delays[large])
            figures = (nearest(delays, 0.5), mean(delays), nearest(delays, 0.9))
            rows.append((count, len(members), ratio(len(members), told), len(large), *figures))
    text = (
        f"Nodes of a job's first attempt, of the {told:,} of {len(records.gpus):,} jobs of which they are known. The "
        f"delay is that from submission to first start, of jobs of {LARGE} GPUs or more, as in the Philly study."
    )
    charts = (bars("Jobs by number of nodes", _NODES, rows, "jobs_share"),)
    return StudyPart("nodes", title, text, _NODES, tuple(rows), charts, bar="jobs_share")


def speed_by_size(records: Records) -> StudyPart:
    """Show the share of packed speed by size of the gang."""
    title = "Utilisation by size"
    if Covers.CLUSTER not in records.covers:
        return StudyPart("speed_by_size", title, "", missing=_NO_SPEED)
    measured = _measured(records)
    groups = by_value(records.runs.gpus[measured])
    rows = tuple((gpus, *_speed_figures(records, measured[members])) for gpus, members in groups)
    head = (TableColumn("gpus", "GPUs", COUNT), *_SPEED)
    charts = (bars(title, head, rows, "speed"),)
    return StudyPart("speed_by_size", title, _speed_text(records), head, rows, charts, bar="speed")


def speed_by_nodes(records: Records) -> StudyPart:
    """Show the share of packed speed by size of the gang and number of nodes."""
    title = "Utilisation by size and number of nodes"
    if Covers.CLUSTER not in records.covers:
        return StudyPart("speed_by_nodes", title, "", missing=_NO_SPEED)
    runs, measured = records.runs, _measured(records)
    rows: list[Row] = []
    for gpus, members in by_value(runs.gpus[measured]):
        of_size = measured[members]
        for count, spread in by_value(runs.nodes[of_size]):
            rows.append((gpus, count, *_speed_figures(records, of_size[spread])))
    head = columns(("gpus", "GPUs", COUNT), ("nodes", "nodes", COUNT))
    return StudyPart("speed_by_nodes", title, _speed_text(records), (*head, *_SPEED), tuple(rows))


_NO_SPEED = "The input does not say how fast jobs ran, nor how busy their GPUs were."
_DONE = tuple(ENDS.index(each) for each in (RunEnd.FINISHED, RunEnd.PREEMPTED))
"""Ends at which no work is lost, so that the work done says how fast the job was."""


def _measured(records: Records) -> Ints:
    """Return the runs of whole gangs that tell how fast their jobs were."""
    runs = records.runs
    told = np.isin(runs.ended, _DONE) & ~np.isnan(runs.ideal) & (runs.seconds > 0)
    return np.flatnonzero(told & (runs.gpus == records.gpus[runs.job]))


def _speed_text(records: Records) -> str:
    text = (
        "How fast jobs were on the GPUs they held, as a share of the believed speed of a packed gang alone on that type: "
        "being spread, sharing GPUs and restart overhead make it less. Weighted by GPU time; of runs of the whole gang that "
        "finished or were preempted, since of others the journal does not say what they did."
    )
    if records.cluster is None:
        return text
    return f"{text} In all, {records.cluster.utilisation:.1%} of the GPU time of the cluster was held by jobs."


def _speed_figures(records: Records, rows: Ints) -> Row:
    """Return the figures of `_SPEED`."""
    runs = records.runs
    ideal, seconds, gpus = runs.ideal[rows], runs.seconds[rows], runs.gpus[rows]
    shares = np.sort(ideal / seconds)
    held = float(np.sum(seconds * gpus))
    speed = ratio(float(np.sum(ideal * gpus)), held)
    return len(rows), held / HOUR, speed, nearest(shares, 0.1), nearest(shares, 0.5)


def attempts(records: Records) -> StudyPart:
    """Show how often jobs were tried."""
    title = "Attempts and retries"
    if Covers.ATTEMPTS not in records.covers:
        return StudyPart("attempts", title, "", missing="The input says nothing of attempts.")
    told = records.attempts > 0
    rows = tuple((count, count - 1, len(of), ratio(len(of), told.sum())) for count, of in by_value(records.attempts[told]))
    head = columns(
        ("attempts", "attempts", COUNT), ("retries", "retries", COUNT), ("jobs", "jobs", COUNT),
        ("jobs_share", "of jobs", SHARE),
    )  # fmt: skip
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


PARTS = (
    overview, sizes, gangs, statuses, tenants, delays_by_size, delays_by_tenant, waits, causes, order, nodes, speed_by_size,
    speed_by_nodes, attempts, failures, losses,
)  # fmt: skip
"""All parts in the order in which they are shown. The name of each function is the key of its part."""

KEYS = tuple(part.__name__ for part in PARTS)
