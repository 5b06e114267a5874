"""Jobs and GPU time: in all, by size, by exact gang, by how jobs ended, by tenant."""

import numpy as np

from poise.lab.analysis.exhibits import (
    ALL,
    HOUR,
    BarGroup,
    Chart,
    ChartCurve,
    ChartShape,
    Layout,
    Row,
    StudyPart,
    TableColumn,
    Value,
    ValueUnit,
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
from poise.lab.analysis.records import FINALS, Covers, Records
from poise.scheduler.model.arithmetic import Ints

WEEK = 7 * 24 * HOUR
RUN_TIMES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99)

_COUNTS = columns(
    ("jobs", "jobs", ValueUnit.COUNT),
    ("jobs_share", "of jobs", ValueUnit.SHARE),
    ("gpu_hours", "GPU-hours", ValueUnit.PLAIN),
    ("gpu_time_share", "of GPU time", ValueUnit.SHARE),
)
_BARS = ("jobs_share", "gpu_time_share")
_MEASURES = columns(
    ("jobs", "jobs", ValueUnit.COUNT),
    ("tenants", "tenants", ValueUnit.COUNT),
    ("span", "from first to last submission", ValueUnit.SECONDS),
    ("gpu_hours", "GPU-hours", ValueUnit.PLAIN),
    ("run_time_median", "median run time", ValueUnit.SECONDS),
    ("run_time_mean", "mean run time", ValueUnit.SECONDS),
    ("run_time_p90", "p90 run time", ValueUnit.SECONDS),
    ("run_time_p99", "p99 run time", ValueUnit.SECONDS),
    ("run_time_max", "longest run time", ValueUnit.SECONDS),
    ("longer_than_a_week", "ran longer than a week", ValueUnit.SHARE),
    ("delay_median", "median queueing delay", ValueUnit.SECONDS),
    ("delay_mean", "mean queueing delay", ValueUnit.SECONDS),
    ("delay_p90", "p90 queueing delay", ValueUnit.SECONDS),
    ("attempts_mean", "attempts a job", ValueUnit.PLAIN),
    ("gpus", "GPUs", ValueUnit.COUNT),
    ("utilisation", "GPUs in use", ValueUnit.SHARE),
)


def overview(records: Records) -> StudyPart:
    """Everything in a few numbers."""
    text = "Run time is the time with GPUs, all attempts added up; delay is the time from submission to the first start."
    unknown = int(np.isnan(records.gpu_seconds).sum())
    caveat = f"Jobs in no run time and no GPU time, as nobody knows how long they ran: {unknown:,}." if unknown else ""
    row, charts = _measures(records), _over_time(records)
    return StudyPart("overview", "Overview", text, _MEASURES, (row,), charts, layout=Layout.CARD, caveat=caveat)


def _measures(records: Records) -> Row:
    runs, delays = known(records.run_seconds), known(records.delays)
    room, attempts = records.room, records.attempts[records.attempts > 0]
    return (
        len(records.gpus),
        len(records.tenants) if Covers.TENANTS in records.covers else None,
        float(np.ptp(records.submitted)) if len(records.submitted) else None,
        records.gpu_hours,
        lower(runs, 0.5),
        mean(runs),
        lower(runs, 0.9),
        lower(runs, 0.99),
        float(runs[-1]) if len(runs) else None,
        ratio(float(np.sum(runs > WEEK)), len(runs)),
        nearest(delays, 0.5),
        mean(delays),
        nearest(delays, 0.9),
        mean(attempts.astype(np.float64)) if Covers.ATTEMPTS in records.covers else None,
        room.gpus if room else None,
        room.utilisation if room else None,
    )


def _over_time(records: Records) -> tuple[Chart, ...]:
    since = "time since the first submission"
    if records.room is None:
        day = np.sort(records.submitted) - records.submitted.min(initial=np.inf)
        arrived = ChartCurve("submitted", np.arange(1.0, len(day) + 1), day)
        return (Chart(ChartShape.STEPS, "Jobs submitted", since, "jobs", ValueUnit.COUNT, (arrived,)),)
    return (
        Chart(ChartShape.STEPS, "GPUs in use", since, "share of GPUs", ValueUnit.SHARE, (records.room.used,)),
        Chart(ChartShape.STEPS, "Waiting jobs", since, "jobs", ValueUnit.COUNT, (records.room.waiting,)),
    )


def _counts(records: Records, members: Ints) -> Row:
    """The figures of `_COUNTS`."""
    seconds = float(np.nansum(records.gpu_seconds[members]))
    shares = ratio(len(members), len(records.gpus)), ratio(seconds, records.gpu_hours * HOUR)
    return len(members), shares[0], seconds / HOUR, shares[1]


def sizes(records: Records) -> StudyPart:
    """By the buckets of the Philly study, with the run times of their jobs."""
    runs = [
        TableColumn(f"run_time_p{round(100 * share)}", f"p{round(100 * share)}", ValueUnit.SECONDS) for share in RUN_TIMES
    ]
    everything = BarGroup(ALL, np.arange(len(records.gpus)))
    rows = tuple(
        (each.label, *_counts(records, each.members), *_run_times(records, each.members))
        for each in (*by_size(records.gpus), everything)
    )
    text = (
        "By GPUs that a job asks for at once. A quantile of run times is the value at place int(p·(n − 1)) of the ascending "
        "list, counted from 0, as in the published tables of Philly."
    )
    head = (
        TableColumn("size", "GPUs", ValueUnit.TEXT),
        *_COUNTS,
        *runs,
        TableColumn("run_time_mean", "mean", ValueUnit.SECONDS),
    )
    curves = tuple(ChartCurve(named(each), known(records.run_seconds[each.members])) for each in by_size(records.gpus))
    charts = (
        bars("Jobs and GPU time by size", head, rows, *_BARS),
        Chart(ChartShape.CDF, "Run times by size", "run time", curves=curves),
    )
    return StudyPart("sizes", "Jobs and GPU time by size", text, head, rows, charts, bar=_BARS[-1])


def _run_times(records: Records, members: Ints) -> tuple[Value, ...]:
    runs = known(records.run_seconds[members])
    return *(lower(runs, share) for share in RUN_TIMES), mean(runs)


def gangs(records: Records) -> StudyPart:
    """By exact number of GPUs."""
    head = (TableColumn("gpus", "GPUs", ValueUnit.COUNT), *_COUNTS)
    rows = tuple((gpus, *_counts(records, members)) for gpus, members in by_value(records.gpus))
    return StudyPart("gangs", "Jobs by exact number of GPUs", "By GPUs that a job asks for at once.", head, rows)


def statuses(records: Records) -> StudyPart:
    """By what became of jobs."""
    head = (TableColumn("status", "status", ValueUnit.TEXT), *_COUNTS)
    rows = tuple((str(FINALS[code]), *_counts(records, members)) for code, members in by_value(records.final))
    text = "Killed jobs were cancelled by their owners; failed ones are those that Philly calls unsuccessful."
    untold = "All jobs count as passed: they did, or the input does not say how they ended."
    caveat = "" if Covers.OUTCOMES in records.covers else untold
    charts = (bars("Jobs and GPU time by status", head, rows, *_BARS),)
    return StudyPart("statuses", "Jobs and GPU time by status", text, head, rows, charts, caveat=caveat, bar=_BARS[-1])


def tenants(records: Records) -> StudyPart:
    """By who submitted."""
    title = "Jobs and GPU time by tenant"
    if Covers.TENANTS not in records.covers:
        return StudyPart("tenants", title, "", missing="The input names no tenants.")
    head = (TableColumn("tenant", "tenant", ValueUnit.TEXT), *_COUNTS)
    groups = by_code(records.tenant, records.tenants)
    rows = tuple((each.label, *_counts(records, each.members)) for each in groups)
    text = f"{len(rows):,} tenants, those with most jobs first."
    return StudyPart("tenants", title, text, head, rows, (bars(title, head, rows, *_BARS),), bar=_BARS[-1])
