"""Where records come from: a journal (`journal_subject`), or a trace or log (`trace_subject`).

A journal is read entry by entry into a `History`; `RecordReader` refuses entries that a history would take in and choke
on later, so that a damaged journal is studied as far as it is sound. A log that tells when jobs ran is taken at its word.
Otherwise a trace's attempts are those that it states, if it states any, and nothing is known of starts.
"""

import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import inf, isfinite, nan
from operator import attrgetter
from pathlib import Path

import numpy as np

from poise.engine.journal import LIVE, NAME, JournalReader
from poise.engine.loop import collector_paused
from poise.lab.analysis.history import History, JobHistory, RunEnd, RunInterval, cumulated, floats, ints
from poise.lab.analysis.overtaking import Supply, SupplyChange, harm
from poise.lab.analysis.records import (
    ENDS,
    FAILURES,
    FINALS,
    NO_TENANT,
    ClusterRecord,
    Covers,
    Final,
    Records,
    RunColumns,
    RunRow,
)
from poise.lab.analysis.summary import utilisation
from poise.lab.analysis.tables import ChartCurve, totals
from poise.lab.traces.reader import HEAD_BYTES
from poise.lab.traces.registry import recognise
from poise.lab.traces.schema import JobOutcome, Trace, TraceJob
from poise.scheduler.core.validation_pool import ValidationPool
from poise.scheduler.model.action import Action, Compute, JournalEntry, Launch
from poise.scheduler.model.arithmetic import Floats, Ints
from poise.scheduler.model.cluster import (
    LONGEST_SHOWN,
    MOST_GPUS,
    Cluster,
    Holding,
    Slots,
    gpu_count,
    parse_cluster,
)
from poise.scheduler.model.errors import JournalError, RequestError
from poise.scheduler.model.event import (
    Carried,
    Computed,
    Estimated,
    Event,
    Finished,
    NodeLost,
    NodeRestricted,
    NodeReturned,
    Revealed,
    Submitted,
)
from poise.scheduler.model.job import Job, Status
from poise.scheduler.model.topology import Topology
from poise.scheduler.throughput.speeds import Speeds
from poise.scheduler.throughput.table import Throughputs


class RecordSource(StrEnum):
    """Where records come from."""

    TRACE = "trace"
    JOURNAL = "journal"


@dataclass(frozen=True, eq=False)
class Subject:
    """What a study is about: records and their source.

    about     what else is known of the source, by name
    notes     what was left out or assumed
    problem   why it could not be read to its end, on one line; None if it could
    """

    source: RecordSource
    name: str
    records: Records
    about: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    problem: str | None = None


_HEADER = re.compile(rb'\s*\{\s*"journal"\s*:')
_GZIP = 16 + zlib.MAX_WBITS
"""What zlib calls a file with gzip's header."""


def journal_at(source: str) -> Path | None:
    """Return the journal that a user names by its file or by the folder that `--out` wrote; None if it is something else.

    It is known by its first bytes; one that has lost them, by its name, unless it is a trace.
    """
    path = Path(source)
    file = path / NAME if path.is_dir() else path
    if not file.is_file():
        return None
    try:  # a file may be cut off before it has this many bytes
        with file.open("rb") as stream:
            head = stream.read(HEAD_BYTES)
        if file.suffix == ".gz":
            head = zlib.decompressobj(_GZIP).decompress(head, HEAD_BYTES)
    except (OSError, zlib.error):
        head = b""
    return file if _HEADER.match(head) or (file.name == NAME and recognise(head) is None) else None


def journal_subject(path: str | Path) -> Subject:
    """Read a journal: all of it, or what comes before the first thing that is wrong.

    Raises JournalError if its header is damaged, RequestError if it is no journal.
    """
    reader = JournalReader(path)
    header = reader.header
    is_live = header.trace == LIVE
    found = RecordReader(header.cluster, header.settings.validation_gpus, name=str(path), is_live=is_live)
    with collector_paused():
        problem = reader.feed(found.take)
        records = found.records()
    about = (
        ("trace", header.trace),
        ("policy", header.policy),
        ("cluster", str(header.cluster)),
        ("placement", header.placement),
    )
    return Subject(RecordSource.JOURNAL, str(path), records, about, problem=None if problem is None else str(problem))


class RecordReader:
    """The history of a journal so far, and what a history does not keep: which nodes were there when."""

    def __init__(self, cluster: Cluster, validation_gpus: int = 0, name: str = "journal", *, is_live: bool = False) -> None:
        self.history = History(cluster, is_live)
        self._name = name
        self._topology = Topology(cluster)
        self._pool: frozenset[Slots] = frozenset()
        if 0 < validation_gpus < sum(self._topology.totals):  # a damaged header may ask for what cannot be
            self._pool = frozenset(ValidationPool(self._topology, validation_gpus, 0.0).slots)
        self._alive = [True] * len(cluster.nodes)
        self._changes: list[SupplyChange] = []
        self._kinds: set[str] = set()
        self._carried: dict[str, int] = {}  # last runs of jobs that the entry carries over

    def take(self, entry: JournalEntry) -> None:
        """Read one more entry; raises KeyError or IndexError for names that are not there, JournalError for values."""
        self.history.end = entry.now  # so that what is read of a bad entry lies before the end
        self._carried.clear()
        try:
            for fact in (*entry.events, *entry.actions):
                self._check(fact, entry.now)
            self.history.take(entry)
        except ValueError as error:
            words = " ".join(str(error).split())[:LONGEST_SHOWN]
            raise JournalError(f"{self._name}: at {entry.now:g} s: a fact that cannot be: {words}") from None

    def records(self) -> Records:
        """End the journal here and return what it tells."""
        self.history.close()
        with np.errstate(over="ignore", invalid="ignore"):  # times may be anything that a float can be
            withheld = (
                SupplyChange(time, self._topology.type_of[slot.node], -more)
                for time, slot, more in self.history.withheld
                if slot not in self._pool
            )
            changes = sorted((*self._changes, *withheld), key=attrgetter("time"))
            return records_of(self.history, Supply(tuple(changes), self._pool))

    def _check(self, fact: Event | Action, now: float) -> None:  # noqa: C901 - one case per fact
        match fact:
            case Estimated():
                self._check_rates(fact.estimate.rates, repr(fact.kind))
                self._kinds.add(fact.kind)
            case Revealed():
                self._check_rates(fact.rates, f"job {fact.job!r}")
            case Submitted():
                self._check_job(fact.job, fact.kind)
            case Carried():
                self._carried[fact.job.id] = fact.epoch
                if fact.gpus:
                    self._check_gpus(fact.gpus)
            case Launch() | Compute():
                self._check_start(fact)
            case Computed():
                self._check_gpus(fact.gpus)
            case Finished() if fact.job in self.history.jobs and self.history.jobs[fact.job].status.is_final:
                raise ValueError(f"job {fact.job!r} ends a second time")
            case NodeLost() | NodeReturned():
                self._node_changed(fact, now)
            case NodeRestricted():
                self._check_node(fact.node)
                if fact.closed and fact.closed[-1] >= self.history.cluster.nodes[fact.node].gpus:
                    raise IndexError(f"node {fact.node}, slot {fact.closed[-1]}")

    def _check_job(self, job: Job, kind: str) -> None:
        if kind not in self._kinds:
            raise KeyError(kind)
        if not 1 <= job.gpus <= MOST_GPUS:
            raise ValueError(f"a job {job.id!r} of {job.gpus!r} GPUs")
        if job.id in self.history.jobs:
            raise ValueError(f"job {job.id!r} is submitted a second time")

    def _check_rates(self, rates: Sequence[object], owner: str) -> None:
        if len(rates) != len(self._topology.types):
            raise ValueError(f"{len(rates)} rates of {owner} on {len(self._topology.types)} GPU types")

    def _check_start(self, action: Launch | Compute) -> None:
        self._check_gpus(action.gpus)
        job = self.history.jobs.get(action.job)
        last = job.epoch if job else self._carried.get(action.job, 0)
        goes_on = isinstance(action, Compute) and action.epoch == last  # further tasks of the round under way
        if action.epoch != last + 1 and not goes_on:
            raise ValueError(f"run {action.epoch} of job {action.job!r} after run {last}")

    def _check_gpus(self, gpus: Holding) -> None:
        if not gpus:
            raise ValueError("a run without GPUs")
        for node, mask in gpus:
            if not (0 <= node < len(self._alive)) or not 0 < mask <= self._topology.full[node]:
                raise IndexError(f"node {node}, slots {mask}")

    def _check_node(self, node: int) -> None:
        if not 0 <= node < len(self._alive):
            raise IndexError(f"node {node}")

    def _node_changed(self, fact: NodeLost | NodeReturned, now: float) -> None:
        self._check_node(fact.node)
        is_back = isinstance(fact, NodeReturned)
        if self._alive[fact.node] is not is_back:
            self._alive[fact.node] = is_back
            reserved = sum(slots.node == fact.node for slots in self._pool)
            gpus = self.history.cluster.nodes[fact.node].gpus - reserved
            self._changes.append(SupplyChange(now, self._topology.type_of[fact.node], gpus if is_back else -gpus))


# A history as records.

WAIT_CAUSES = ("fair share", "fragmentation", "capacity")
"""Causes of waiting, in the order of `Waited`."""
NODE_LOST = "node lost"

_FINAL_OF_STATUS = {
    Status.WAITING: Final.UNFINISHED,
    Status.RUNNING: Final.UNFINISHED,
    Status.FINISHED: Final.PASSED,
    Status.FAILED: Final.FAILED,
    Status.CANCELLED: Final.KILLED,
    Status.REJECTED: Final.REJECTED,
}
_END_CODE = {end: code for code, end in enumerate(ENDS)}
_TOLD = {RunEnd.FINISHED, RunEnd.PREEMPTED, RunEnd.TRIED, *FAILURES}
"""Ends after which the journal says how far the job has come."""


def records_of(history: History, supply: Supply | None = None) -> Records:
    """Return everything that a history tells; `supply` is what it leaves out of the GPUs that jobs could have."""
    supply = supply or Supply()
    jobs = sorted(history.jobs.values(), key=lambda job: job.submitted)
    place = {job.id: index for index, job in enumerate(jobs)}
    started = floats(job.started for job in jobs)
    if supply.reserved:  # a trial is no start
        started = np.full(len(jobs), inf)
        for run in history.runs:
            if run.gpus[0] not in supply.reserved:
                started[place[run.job]] = min(started[place[run.job]], run.start)
        started = np.where(np.isinf(started), nan, started)
    ended = floats(job.ended for job in jobs)
    left = np.where(np.isnan(started), np.nan_to_num(ended, nan=inf), started)
    final = ints(FINALS.index(_FINAL_OF_STATUS[job.status]) for job in jobs)
    runs = _run_columns(history, place, supply.reserved)
    # Time with GPUs of jobs that ran and came to an end; what a job held at once counts once.
    ran = np.bincount(runs.job, minlength=len(final)) > 0
    held = totals(runs.job, runs.new, len(final))
    names, codes = _tenants(job.tenant for job in jobs)
    first = min((job.submitted for job in jobs), default=0.0)
    last = max((job.ended for job in history.ended_jobs()), default=history.end)
    return Records(
        covers=frozenset(Covers) - ({Covers.TENANTS} if names == (NO_TENANT,) else set()),
        tenants=names,
        tenant=codes,
        gpus=ints(job.gpus for job in jobs),
        submitted=floats(job.submitted for job in jobs),
        started=started,
        left=left,
        run_seconds=np.where(ran & (final != FINALS.index(Final.UNFINISHED)), held, np.nan),
        gpu_seconds=floats(job.gpu_seconds for job in jobs),
        final=final,
        runs=runs,
        waited=np.array([job.waited for job in jobs], dtype=np.float64).reshape(-1, len(WAIT_CAUSES)),
        wait_causes=WAIT_CAUSES,
        cluster=ClusterRecord(
            history.cluster.gpus,
            utilisation(history, first, last),
            _level("in use", history.held, first, 1 / max(1, history.cluster.gpus)),
            _level("waiting", history.waiting, first, 1.0),
            harm(history, jobs, left.tolist(), supply),
        ),
    )


def _tenants(owners: Iterable[str]) -> tuple[tuple[str, ...], Ints]:
    """Return the names of tenants in order of first submission, and each job's index into them."""
    codes: dict[str, int] = {}
    found = ints(codes.setdefault(name, len(codes)) for name in owners)
    return tuple(codes), found


def _level(label: str, changes: list[tuple[float, int]], first: float, scale: float) -> ChartCurve:
    times, levels = cumulated(changes)
    return ChartCurve(label, levels.astype(np.float64) * scale, times - first)


def _run_columns(history: History, place: dict[str, int], pool: frozenset[Slots]) -> RunColumns:
    """Return the runs of a history, by job and start. A new attempt begins with what starts at a failure or after it."""
    type_of = Topology(history.cluster).type_of
    divided = {run.job for run in history.runs if run.ended is RunEnd.COMPUTED}
    attempt, failed_at = [0] * len(place), [inf] * len(place)
    rows: list[RunRow] = []
    for run in history.runs:  # in the order in which they ended
        job = place[run.job]
        if run.start >= failed_at[job]:
            attempt[job] += 1
            failed_at[job] = inf
        if run.ended in FAILURES:
            failed_at[job] = run.end
        nodes = 0 if run.gpus[0] in pool else len(run.gpus)
        cause = NODE_LOST if run.ended is RunEnd.LOST else run.cause
        # Runs of jobs that ever computed tasks one by one do not tell steps.
        ideal = nan if run.job in divided else _ideal_seconds(history, run, history.jobs[run.job], type_of)
        span = (run.start, run.end, run.end - run.start)
        rows.append(RunRow(job, attempt[job], *span, gpu_count(run.gpus), nodes, _END_CODE[run.ended], cause, ideal))
    # Of equal starts, the run that ended first comes first.
    order = np.lexsort((floats(row.start for row in rows), ints(row.job for row in rows)))
    return RunColumns.of([rows[index] for index in order.tolist()])


def _ideal_seconds(history: History, run: RunInterval, job: JobHistory, type_of: Sequence[int]) -> float:
    """Return the seconds in which the whole gang, packed and alone, does the steps that a run added; NaN if unknown."""
    if run.ended not in _TOLD:
        return nan
    steps = run.steps_after - run.steps_before
    if steps <= 0:  # whatever it ran on: most trials are such runs
        return 0.0
    gpu_type = type_of[run.gpus[0].node]
    rate = history.rates_of(job)[gpu_type]
    if gpu_count(run.gpus) != job.gpus:  # of other sizes the history knows no speed
        return nan
    if rate <= 0 or not isfinite(steps) or any(type_of[slots.node] != gpu_type for slots in run.gpus):
        return nan
    return steps / rate


# A trace as records.

_CODES = {
    JobOutcome.PASSED: (FINALS.index(Final.PASSED), _END_CODE[RunEnd.FINISHED]),
    JobOutcome.FAILED: (FINALS.index(Final.FAILED), _END_CODE[RunEnd.FAILED]),
    JobOutcome.KILLED: (FINALS.index(Final.KILLED), _END_CODE[RunEnd.CANCELLED]),
}
"""By outcome: the codes of what became of the job, and of how its last run ended."""


def trace_subject(trace: Trace, table: Throughputs) -> Subject:
    """Return everything that a trace tells; `table` says how long jobs run that state steps and no duration."""
    jobs = trace.jobs
    seconds, notes = _run_seconds(jobs, table)
    gpus = ints(each.job.gpus for each in jobs)
    names, codes = _tenants(each.job.tenant for each in jobs)
    started = floats(each.observed[0].start if each.observed else nan for each in jobs)
    told = {
        Covers.RUN_TIMES: not np.isnan(seconds).all(),
        Covers.TENANTS: names != (NO_TENANT,),
        Covers.OUTCOMES: any(each.outcome is not JobOutcome.PASSED for each in jobs),
        Covers.STARTS: any(each.observed for each in jobs),
        Covers.ATTEMPTS: any(each.observed or each.failures for each in jobs),
        Covers.NODES: any(attempt.nodes for each in jobs for attempt in each.observed),
        Covers.CAUSES: any(each.failures and not each.observed for each in jobs),
    }
    lengths = seconds.tolist()
    records = Records(
        covers=frozenset(each for each, is_told in told.items() if is_told),
        tenants=names,
        tenant=codes,
        gpus=gpus,
        submitted=floats(each.job.submitted for each in jobs),
        started=started,
        left=started,
        run_seconds=seconds,
        gpu_seconds=seconds * gpus,
        final=ints(_CODES[each.outcome][0] for each in jobs),
        runs=RunColumns.of([run for index, each in enumerate(jobs) for run in _attempts(index, each, lengths[index])]),
        waited=np.empty((len(jobs), 0)),
    )
    return Subject(RecordSource.TRACE, trace.name, records, notes=(*trace.notes, *notes))


def _run_seconds(jobs: Sequence[TraceJob], table: Throughputs) -> tuple[Floats, list[str]]:
    """Return how long jobs run in all; those that state steps alone, on the reference type of the table."""
    stated = floats(
        sum(failure.after for failure in each.failures)
        if each.broken and not each.observed  # it does not live to do its work
        else nan if each.job.duration is None else each.job.duration
        for each in jobs
    )  # fmt: skip
    untold = np.flatnonzero(np.isnan(stated)).tolist()
    if not untold:
        return stated, []
    most = max(each.job.gpus for each in jobs)
    speeds = Speeds(table, parse_cluster(f"{table.reference}:{most}@{most}"))
    for index in untold:
        try:
            _, estimate, steps = speeds.resolve(replace(jobs[index].job, gpu_types=()))
        except RequestError:  # a model that the table does not know
            continue
        if estimate.best() > 0:
            stated[index] = steps / estimate.best()
    left = int(np.isnan(stated).sum())
    notes = [f"jobs that state steps, which are taken to run as long as on {table.reference}s: {len(untold) - left:,}"]
    unknown = f"jobs that state steps of a model that the table {table.name!r} does not know (give --throughputs): {left:,}"
    return stated, notes + ([unknown] if left else [])


def _attempts(index: int, each: TraceJob, seconds: float) -> Iterator[RunRow]:
    """Yield the attempts of one job, observed or stated: all but the last one failed."""
    gpus, failed, last = each.job.gpus, _END_CODE[RunEnd.FAILED], _CODES[each.outcome][1]
    for number, (start, end, nodes) in enumerate(each.observed, 1):
        until = nan if end is None else end
        ended = last if number == len(each.observed) else failed
        yield RunRow(index, number - 1, start, until, until - start, gpus, len(nodes), ended, "", nan)
    if each.observed:
        return
    for number, (after, cause) in enumerate(each.failures):
        yield RunRow(index, number, nan, nan, after, gpus, 0, failed, cause, nan)
    if not (each.broken and each.failures):
        rest = max(0.0, seconds - sum(failure.after for failure in each.failures)) if each.failures else seconds
        yield RunRow(index, len(each.failures), nan, nan, rest, gpus, 0, last, "", nan)
