"""Parts of a study about waiting: delay until the first start, all waiting, its causes, and starts out of order.

A log holds neither quotas nor the cluster, so `inferred` takes the causes of waiting from what each tenant used.
"""

from collections.abc import Sequence

import numpy as np

from poise.lab.analysis.history import cumulated
from poise.lab.analysis.overtaking import out_of_order
from poise.lab.analysis.records import ClusterRecord, Covers, Records
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
    Row,
    StudyPart,
    TableColumn,
    by_code,
    by_size,
    by_value,
    columns,
    delay_figures,
    known,
    named,
    ratio,
    totals,
)
from poise.scheduler.model.arithmetic import Bools, Floats, Ints

NO_STARTS = "The input says when jobs were submitted, not when they started."
INFERRED = ("fair share", "fragmentation or capacity")
"""The causes that can be told apart without quotas and without the cluster."""
_CAUSES_TITLE = "Causes of queueing delay"
_CAUSES = columns(
    ("size", "GPUs", TEXT), ("cause", "cause", TEXT), ("jobs", "jobs", COUNT),
    ("jobs_share", "of jobs that waited", SHARE), ("hours", "hours", PLAIN),
    ("time_share", "of waiting time", SHARE),
)  # fmt: skip


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


_ORDER = columns(
    ("among", "among", TEXT), ("starts", "first starts", COUNT), ("out_of_order", "out of order", COUNT),
    ("out_of_order_share", "of starts", SHARE), ("harmful", "harmful", COUNT),
    ("harmful_share", "of those out of order", SHARE), ("hurt_jobs", "jobs hurt", COUNT),
    ("hurt_seconds", "time in which one was hurt", SECONDS),
)  # fmt: skip


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
    rows = [_row("all jobs", records, everything, records.cluster)]
    if Covers.TENANTS in records.covers:
        within = np.zeros(len(records.gpus), dtype=bool)
        for each in by_code(records.tenant, records.tenants):
            own = each.members
            within[own] = out_of_order(records.submitted[own], records.started[own], records.left[own])
        rows.append(_row("jobs of the same tenant", records, within, None))
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


def _row(among: str, records: Records, late: Bools, cluster: ClusterRecord | None) -> Row:
    starts, count = int(np.sum(~np.isnan(records.started))), int(late.sum())
    if cluster is None:
        return among, starts, count, ratio(count, starts), None, None, None, None
    harmful = int(np.sum(cluster.harm.harmful & late))
    harm = cluster.harm
    return among, starts, count, ratio(count, starts), harmful, ratio(harmful, count), harm.heads, harm.seconds
