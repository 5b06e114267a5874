"""A trace as records: what somebody's log says of its jobs, as far as it does.

A log that tells when jobs ran is taken at its word. Otherwise the attempts are those that the trace states, if it states
any, and nothing is known of starts.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import nan
from typing import NamedTuple

import numpy as np

from poise.analysis.history import floats
from poise.analysis.records import ENDS, FINALS, NOBODY, Covers, Final, Records, Spells
from poise.analysis.stints import End
from poise.model.arrays import Floats, Ints
from poise.model.cluster import parse_cluster
from poise.model.errors import RequestError
from poise.model.job import Job
from poise.studies.subject import Source, Subject
from poise.throughput.speeds import Speeds
from poise.throughput.table import Throughputs
from poise.traces.schema import Outcome, Trace, TraceJob

_FINAL = {Outcome.PASSED: Final.PASSED, Outcome.FAILED: Final.FAILED, Outcome.KILLED: Final.KILLED}
_END = {Outcome.PASSED: End.FINISHED, Outcome.FAILED: End.FAILED, Outcome.KILLED: End.CANCELLED}
_FINAL_CODE = {outcome: FINALS.index(final) for outcome, final in _FINAL.items()}
_END_CODE = {outcome: ENDS.index(end) for outcome, end in _END.items()}
_FAILED = ENDS.index(End.FAILED)


class _Run(NamedTuple):
    """A row of `Spells`, with the cause in words."""

    job: int
    attempt: int
    start: float
    end: float
    seconds: float
    nodes: int
    ended: int
    cause: str


def subject_of(trace: Trace, table: Throughputs) -> Subject:
    """Everything that a trace tells; `table` says how long jobs run that state steps and no duration."""
    jobs = trace.jobs
    seconds, notes = _run_seconds(jobs, table)
    gpus = np.fromiter((each.job.gpus for each in jobs), dtype=np.int64, count=len(jobs))
    names = tuple(dict.fromkeys(each.job.tenant for each in jobs))
    codes = {name: code for code, name in enumerate(names)}
    started = floats(each.observed[0].start if each.observed else nan for each in jobs)
    records = Records(
        covers=_covers(jobs, names, seconds),
        tenants=names,
        tenant=np.fromiter((codes[each.job.tenant] for each in jobs), dtype=np.int64, count=len(jobs)),
        gpus=gpus,
        submitted=floats(each.job.submitted for each in jobs),
        started=started,
        left=started,
        run_seconds=seconds,
        gpu_seconds=seconds * gpus,
        final=np.fromiter((_FINAL_CODE[each.outcome] for each in jobs), dtype=np.int64, count=len(jobs)),
        spells=_spells(jobs, seconds, gpus),
        waited=np.empty((len(jobs), 0)),
    )
    return Subject(Source.TRACE, trace.name, records, notes=(*trace.notes, *notes))


def _covers(jobs: Sequence[TraceJob], tenants: tuple[str, ...], seconds: Floats) -> frozenset[Covers]:
    told = {
        Covers.RUN_TIMES: not np.isnan(seconds).all(),
        Covers.TENANTS: tenants != (NOBODY,),
        Covers.OUTCOMES: any(each.outcome is not Outcome.PASSED for each in jobs),
        Covers.STARTS: any(each.observed for each in jobs),
        Covers.ATTEMPTS: any(each.observed or each.failures for each in jobs),
        Covers.NODES: any(attempt.nodes for each in jobs for attempt in each.observed),
        Covers.CAUSES: any(each.failures and not each.observed for each in jobs),
    }
    return frozenset(each for each, is_told in told.items() if is_told)


def _run_seconds(jobs: Sequence[TraceJob], table: Throughputs) -> tuple[Floats, list[str]]:
    """How long jobs run in all; of those that state steps alone, on the reference type of the table."""
    stated = floats(_stated(each) for each in jobs)
    untold = np.flatnonzero(np.isnan(stated)).tolist()
    if not untold:
        return stated, []
    most = max(each.job.gpus for each in jobs)
    speeds = Speeds(table, parse_cluster(f"{table.reference}:{most}@{most}"))
    stated[untold] = [_worked_out(jobs[index].job, speeds) for index in untold]
    left = int(np.isnan(stated).sum())
    notes = [f"jobs that state steps, which are taken to run as long as on {table.reference}s: {len(untold) - left:,}"]
    unknown = f"jobs that state steps of a model that the table {table.name!r} does not know (give --throughputs): {left:,}"
    return stated, notes + ([unknown] if left else [])


def _stated(each: TraceJob) -> float:
    if each.broken and not each.observed:  # it does not live to do its work
        return sum(failure.after for failure in each.failures)
    return nan if each.job.duration is None else each.job.duration


def _worked_out(job: Job, speeds: Speeds) -> float:
    try:
        _, estimate, steps = speeds.resolve(replace(job, gpu_types=()))
    except RequestError:  # a model that the table does not know
        return nan
    return steps / estimate.best() if estimate.best() > 0 else nan


def _spells(jobs: Sequence[TraceJob], seconds: Floats, gpus: Ints) -> Spells:
    lengths = seconds.tolist()
    runs = [run for index, each in enumerate(jobs) for run in _runs(index, each, lengths[index])]
    columns = zip(*runs, strict=True) if runs else ((),) * len(_Run._fields)
    job, attempt, start, end, length, nodes, ended, cause = columns
    names = dict.fromkeys(filter(None, cause))
    codes = {name: code for code, name in enumerate(names)} | {"": -1}
    whose = np.array(job, dtype=np.int64)
    return Spells(
        whose,
        np.array(attempt, dtype=np.int64),
        floats(start),
        floats(end),
        floats(length),
        gpus[whose],
        np.array(nodes, dtype=np.int64),
        np.array(ended, dtype=np.int64),
        np.array([codes[name] for name in cause], dtype=np.int64),
        np.full(len(whose), nan),
        tuple(names),
    )


def _runs(index: int, each: TraceJob, seconds: float) -> Iterable[_Run]:
    """The attempts of one job: all but the last one failed."""
    last = _END_CODE[each.outcome]
    if each.observed:
        return _observed(index, each, last)
    if not each.failures:
        return (_Run(index, 0, nan, nan, seconds, 0, last, ""),)
    return _foretold(index, each, seconds, last)


def _observed(index: int, each: TraceJob, last: int) -> Iterator[_Run]:
    for number, (start, end, nodes) in enumerate(each.observed, 1):
        until = nan if end is None else end
        ended = last if number == len(each.observed) else _FAILED
        yield _Run(index, number - 1, start, until, until - start, len(nodes), ended, "")


def _foretold(index: int, each: TraceJob, seconds: float, last: int) -> Iterator[_Run]:
    for number, (after, cause) in enumerate(each.failures):
        yield _Run(index, number, nan, nan, after, 0, _FAILED, cause)
    if not each.broken:
        rest = seconds - sum(failure.after for failure in each.failures)
        yield _Run(index, len(each.failures), nan, nan, max(0.0, rest), 0, last, "")
