"""The Philly study (Jeon et al., ATC'19; docs/algorithms/philly.md) of any jobs: parts made of records.

`study` makes all parts in the order of `PARTS`. Columns of the tables come first, then one function per part: jobs and GPU
time, waiting and its causes, locality and speed, attempts, failures and lost work. A log holds neither quotas nor the
cluster, so `inferred` takes the causes of waiting from what each tenant used.
"""

from collections.abc import Sequence

import numpy as np

from poise.lab.analysis.history import RunEnd, cumulated
from poise.lab.analysis.overtaking import out_of_order
from poise.lab.analysis.records import ENDS, FINALS, ClusterRecord, Covers, Records
from poise.lab.analysis.tables import (
    ALL,
    COUNT,
    DELAYS,
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
    delay_figures,
    known,
    lower,
    mean,
    named,
    nearest,
    ratio,
    totals,
)
from poise.scheduler.model.arithmetic import Bools, Floats, Ints
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
NO_STARTS = "The input says when jobs were submitted, not when they started."
INFERRED = ("fair share", "fragmentation or capacity")
"""The causes that can be told apart without quotas and without the cluster."""
_CAUSES_TITLE = "Causes of queueing delay"

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
_CAUSES = columns(
    ("size", "GPUs", TEXT), ("cause", "cause", TEXT), ("jobs", "jobs", COUNT),
    ("jobs_share", "of jobs that waited", SHARE), ("hours", "hours", PLAIN),
    ("time_share", "of waiting time", SHARE),
)  # fmt: skip
_ORDER = columns(
    ("among", "among", TEXT), ("starts", "first starts", COUNT), ("out_of_order", "out of order", COUNT),
    ("out_of_order_share", "of starts", SHARE), ("harmful", "harmful", COUNT),
    ("harmful_share", "of those out of order", SHARE), ("hurt_jobs", "jobs hurt", COUNT),
    ("hurt_seconds", "time in which one was hurt", SECONDS),
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
    told = [str(each) for each in Covers if each in records.covers]
    return told, [str(each) for each in Covers if each not in records.covers]


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


# Waiting: delay until the first start, all waiting, its causes, and starts out of order


def delays_by_size(records: Records) -> StudyPart:
    """Show the time from submission to first start, by bucket."""
    title = "Queueing delay by size"
    if Covers.STARTS not in records.covers:
        return StudyPart("delays_by_size", title, "", missing=NO_STARTS)
    groups = by_size(records.gpus)
    curves = tuple(ChartCurve(named(each), known(records.delays[each.members])) for each in groups)
    chart = Chart(ChartShape.CDF, title, "delay from submission to first start", curves=curves)
    column = TableColumn("size", "GPUs", TEXT)
    return _delays(records, "delays_by_size", title, column, [*groups, JobGroup(ALL, np.arange(len(records.gpus)))], chart)


def delays_by_tenant(records: Records) -> StudyPart:
    """Show the time from submission to first start, by tenant."""
    title = "Queueing delay by tenant"
    if missing := _why_no_tenants(records):
        return StudyPart("delays_by_tenant", title, "", missing=missing)
    column = TableColumn("tenant", "tenant", TEXT)
    return _delays(records, "delays_by_tenant", title, column, by_code(records.tenant, records.tenants))


def _delays(
    records: Records, key: str, title: str, column: TableColumn, groups: Sequence[JobGroup], *charts: Chart
) -> StudyPart:
    rows: list[Row] = []
    for each in groups:
        delays = known(records.delays[each.members])
        rows.append((each.label, len(delays), *delay_figures(delays)))
    started = int(np.sum(~np.isnan(records.delays)))
    text = (
        f"From submission to the first start, of the {started:,} of {len(records.gpus):,} jobs of which that is known. A "
        "quantile is the least delay that is no less than that share of all delays."
    )
    caveat = ""
    if records.cluster is None and records.attempts.max(initial=0) <= 1:  # a log may have kept only the last attempt
        caveat = "The input tells of one attempt a job; where that is not the first, the delay holds those before it."
    head = (column, TableColumn("jobs", "jobs that started", COUNT), *DELAYS)
    return StudyPart(key, title, text, head, tuple(rows), charts, caveat=caveat)


def _why_no_tenants(records: Records) -> str:
    if Covers.STARTS not in records.covers:
        return NO_STARTS
    return "" if Covers.TENANTS in records.covers else "The input names no tenants."


def waits(records: Records) -> StudyPart:
    """Show every interval of waiting that ended in a start, by size and by tenant."""
    title = "All intervals of waiting"
    if Covers.STARTS not in records.covers:
        return StudyPart("waits", title, "", missing=NO_STARTS)
    runs = records.runs
    waited = np.where(runs.firsts, runs.start - records.submitted[runs.job], runs.gaps)
    some = waited > 0  # NaN is not
    job, seconds = runs.job[some], waited[some]
    groups = [("all", JobGroup(ALL, np.arange(len(seconds))))]
    groups += (("size", each) for each in by_size(records.gpus[job]))
    if Covers.TENANTS in records.covers:
        groups += (("tenant", each) for each in by_code(records.tenant[job], records.tenants))
    rows = tuple((by, each.label, len(each.members), *delay_figures(np.sort(seconds[each.members]))) for by, each in groups)
    text = (
        "From submission to the first start, and from the end of each run to the next start of the same job: after a "
        "failure, a preemption, a lost node. Intervals of no length, and those of which an end is not known, do not count."
    )
    head = columns(("by", "by", TEXT), ("group", "group", TEXT), ("intervals", "intervals", COUNT))
    return StudyPart("waits", title, text, (*head, *DELAYS), rows)


def causes(records: Records) -> StudyPart:
    """Show what jobs waited for, by bucket: jobs by the cause that they waited for longest, and time."""
    if Covers.WAITING in records.covers:
        text = (
            "At every decision a waiting job waits for capacity if fewer GPUs are free than it needs, for fragmentation if "
            "enough are free, but not as close together as it insists on, and otherwise for its fair share: it would fit, "
            "but the policy puts others first. A job that is held back, because its tenant is over its quota, until a retry "
            "or for a trial, waits for its fair share whatever is free. The time is added up at each start, so that of jobs "
            "which never started is not in it."
        )
        caveat = "What is called fair share here holds the order of the policy too, and time before retries and trials."
        return _causes(records, text, caveat, records.waited, records.wait_causes)
    missing = _why_no_tenants(records)
    if missing:
        missing += " Causes are inferred from starts and from what each tenant uses."
        return StudyPart("causes", _CAUSES_TITLE, "", missing=missing)
    text = (
        "A job waits for its fair share while its tenant's GPUs in use and its own together exceed the tenant's quota, and "
        "otherwise for fragmentation or capacity, which the log does not tell apart."
    )
    caveat = (
        "The log holds no quotas: that of a tenant is taken to be the most GPUs that its jobs in this file ever held at "
        "once. Of jobs that the file leaves out, the use is left out too."
    )
    return _causes(records, text, caveat, inferred(records), INFERRED)


def _causes(records: Records, text: str, caveat: str, waited: Floats, kinds: tuple[str, ...]) -> StudyPart:
    """Return one row per bucket and cause; within a bucket, jobs and hours add up to those that waited at all."""
    rows: list[Row] = []
    time_shares: dict[str, list[float | None]] = {}  # by bucket: the share of each cause
    for each in (*by_size(records.gpus), JobGroup(ALL, np.arange(len(records.gpus)))):
        waiting = waited[each.members]
        waiting = waiting[waiting.sum(axis=1) > 0]
        longest = np.argmax(waiting, axis=1) if len(waiting) else np.empty(0, dtype=np.int64)
        counts = np.bincount(longest, minlength=len(kinds)).tolist()
        seconds = waiting.sum(axis=0).tolist()
        shares = time_shares[each.label] = [ratio(part, sum(seconds)) for part in seconds]
        for place, kind in enumerate(kinds):
            count = counts[place]
            rows.append((each.label, kind, count, ratio(count, sum(counts)), seconds[place] / HOUR, shares[place]))
    del time_shares[ALL]
    curves = tuple(
        ChartCurve(kind, np.array([shares[place] for shares in time_shares.values()], dtype=np.float64))
        for place, kind in enumerate(kinds)
    )
    charts = (Chart(ChartShape.BARS, "Waiting time by cause", curves=curves, labels=tuple(time_shares)),)
    text += " A job is counted under the cause that it waited for longest."
    return StudyPart("causes", _CAUSES_TITLE, text, _CAUSES, tuple(rows), charts, caveat=caveat, bar="time_share")


def inferred(records: Records) -> Floats:
    """Return (jobs, 2): seconds that jobs waited for their fair share by inferred quotas, and for anything else.

    A job waits before its first run and between its runs. It waits for its fair share while its tenant's GPUs in use and
    its own gang together exceed the quota: the most that the tenant ever used at once.
    """
    runs = records.runs
    since = np.where(runs.firsts, records.submitted[runs.job], runs.start - runs.gaps)
    waited = np.where(runs.start > since, runs.start - since, 0.0)  # NaN is not
    held = np.zeros(len(runs.job))
    tenant = records.tenant[runs.job]
    for each in by_code(tenant, records.tenants):
        rows = each.members[waited[each.members] > 0]
        held[rows] = np.clip(_over_quota(records, each.members, rows, since), 0.0, waited[rows])
    return np.stack([totals(runs.job, column, len(records.gpus)) for column in (held, waited - held)], axis=1)


def _over_quota(records: Records, members: Ints, waiting: Ints, since: Floats) -> Floats:
    """Return for how long, before each of these runs of one tenant, its use and the gang exceeded the quota."""
    runs = records.runs
    whole = members[~np.isnan(runs.start[members]) & ~np.isnan(runs.end[members])]
    gpus = runs.gpus[whole]
    begins = zip(runs.start[whole].tolist(), gpus.tolist(), strict=True)
    ends = zip(runs.end[whole].tolist(), (-gpus).tolist(), strict=True)
    times, used = cumulated([*begins, *ends])  # GPUs in use by runs of which start and end are known
    if not len(times):
        return np.zeros(len(waiting))
    quota, gang = int(used.max()), runs.gpus[waiting]
    found = np.zeros(len(waiting))
    for size, rows in by_value(gang):
        over = (used[:-1] + size > quota) * np.diff(times)
        clock = np.concatenate(([0.0], np.cumsum(over)))
        chosen = waiting[rows]
        found[rows] = np.interp(runs.start[chosen], times, clock) - np.interp(since[chosen], times, clock)
    return found


def order(records: Records) -> StudyPart:
    """Show first starts out of order, among all jobs and among those of one tenant."""
    title = "Starts out of order"
    if Covers.STARTS not in records.covers:
        return StudyPart("order", title, "", missing=NO_STARTS)
    text = (
        "A first start is out of order if a job that was submitted earlier still waits for its own; within tenants, if that "
        "is a job of the same tenant."
    )
    everything = out_of_order(records.submitted, records.started, records.left)
    rows = [_order_row("all jobs", records, everything, records.cluster)]
    if Covers.TENANTS in records.covers:
        within = np.zeros(len(records.gpus), dtype=bool)
        for each in by_code(records.tenant, records.tenants):
            own = each.members
            within[own] = out_of_order(records.submitted[own], records.started[own], records.left[own])
        rows.append(_order_row("jobs of the same tenant", records, within, None))
    if records.cluster is None:
        caveat = (
            "Whether that did harm cannot be told: the input does not describe the cluster. Jobs that it leaves out are not "
            "looked at."
        )
        return StudyPart("order", title, text, _ORDER, tuple(rows), caveat=caveat)
    text += (
        " It is harmful if, at some time while the job runs, the job that has waited longest for its first start was "
        "overtaken by it and would fit into the idle GPUs of a type that it can use together with those held by jobs which "
        "overtook it, but not into the idle ones alone. How close together GPUs are is not looked at."
    )
    return StudyPart("order", title, text, _ORDER, tuple(rows))


def _order_row(among: str, records: Records, late: Bools, cluster: ClusterRecord | None) -> Row:
    starts, count = int(np.sum(~np.isnan(records.started))), int(late.sum())
    if cluster is None:
        return among, starts, count, ratio(count, starts), None, None, None, None
    harmful = int(np.sum(cluster.harm.harmful & late))
    harm = cluster.harm
    return among, starts, count, ratio(count, starts), harmful, ratio(harmful, count), harm.heads, harm.seconds


# Locality and speed, attempts, failures, lost work


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
