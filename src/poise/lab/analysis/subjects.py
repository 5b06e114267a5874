"""What a study is about."""

import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import inf, isfinite, nan
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from poise.engine.journal import NAME, JournalReader
from poise.engine.loop import collector_paused
from poise.lab.analysis.exhibits import ChartCurve, totals
from poise.lab.analysis.history import History, JobHistory, RunEnd, RunInterval, cumulated, floats
from poise.lab.analysis.overtaking import Harm, Supply, SupplyChange, harm
from poise.lab.analysis.records import (
    ENDS,
    FAILURES,
    FINALS,
    NOBODY,
    ClusterCapacity,
    Covers,
    Final,
    Records,
    Spells,
)
from poise.lab.analysis.summary import utilisation
from poise.lab.traces.reader import HEAD_BYTES
from poise.lab.traces.registry import recognise
from poise.lab.traces.schema import JobOutcome, Trace, TraceJob
from poise.scheduler.core.validation_pool import ValidationPool
from poise.scheduler.model.action import Compute, JournalEntry, Launch
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
    Computed,
    Estimated,
    Finished,
    NodeLost,
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
    """Records and their source.

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


# A trace as records: what somebody's log says of its jobs, as far as it does.
#
# A log that tells when jobs ran is taken at its word. Otherwise the attempts are those that the trace states, if it states
# any, and nothing is known of starts.

_FINAL = {JobOutcome.PASSED: Final.PASSED, JobOutcome.FAILED: Final.FAILED, JobOutcome.KILLED: Final.KILLED}
_END = {JobOutcome.PASSED: RunEnd.FINISHED, JobOutcome.FAILED: RunEnd.FAILED, JobOutcome.KILLED: RunEnd.CANCELLED}
_FINAL_CODE = {outcome: FINALS.index(final) for outcome, final in _FINAL.items()}
_END_CODE = {outcome: ENDS.index(end) for outcome, end in _END.items()}
_FAILED = ENDS.index(RunEnd.FAILED)


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


def log_subject(trace: Trace, table: Throughputs) -> Subject:
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
    return Subject(RecordSource.TRACE, trace.name, records, notes=(*trace.notes, *notes))


def _covers(jobs: Sequence[TraceJob], tenants: tuple[str, ...], seconds: Floats) -> frozenset[Covers]:
    told = {
        Covers.RUN_TIMES: not np.isnan(seconds).all(),
        Covers.TENANTS: tenants != (NOBODY,),
        Covers.OUTCOMES: any(each.outcome is not JobOutcome.PASSED for each in jobs),
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


# A history as records: what a journal says of jobs, spells and the cluster.

WAITING = ("fair share", "fragmentation", "capacity")
"""Causes of waiting, in the order of `Waited`."""

_FINAL_OF_STATUS = {
    Status.WAITING: Final.UNFINISHED,
    Status.RUNNING: Final.UNFINISHED,
    Status.FINISHED: Final.PASSED,
    Status.FAILED: Final.FAILED,
    Status.CANCELLED: Final.KILLED,
    Status.REJECTED: Final.REJECTED,
}
_CODE = {end: code for code, end in enumerate(ENDS)}
_KEPT = {RunEnd.FINISHED, RunEnd.PREEMPTED, RunEnd.TRIED, *FAILURES}
"""Ends after which the journal says how far the job has come."""
NODE_LOST = "node lost"


def records_of(history: History, supply: Supply | None = None) -> Records:
    """Everything that a journal tells; `supply` is what its history leaves out of the GPUs that jobs could have."""
    supply = supply or Supply()
    lives = sorted(history.jobs.values(), key=lambda life: life.submitted)
    place = {life.id: index for index, life in enumerate(lives)}
    started = _starts(history, lives, place, supply.reserved)
    ended = floats(life.ended for life in lives)
    left = np.where(np.isnan(started), np.nan_to_num(ended, nan=inf), started)
    spells = _recording_spells(history, lives, place, supply.reserved)
    tenants = tuple(dict.fromkeys(life.tenant for life in lives))
    codes = {name: code for code, name in enumerate(tenants)}
    final = _ints(FINALS.index(_FINAL_OF_STATUS[life.status]) for life in lives)
    return Records(
        covers=frozenset(Covers) - ({Covers.TENANTS} if tenants == (NOBODY,) else set()),
        tenants=tenants,
        tenant=_ints(codes[life.tenant] for life in lives),
        gpus=_ints(life.gpus for life in lives),
        submitted=floats(life.submitted for life in lives),
        started=started,
        left=left,
        run_seconds=_recording_run_seconds(spells, final),
        gpu_seconds=floats(life.gpu_seconds for life in lives),
        final=final,
        spells=spells,
        waited=np.array([life.waited for life in lives], dtype=np.float64).reshape(-1, len(WAITING)),
        kinds=WAITING,
        room=_room(history, lives, harm(history, lives, left.tolist(), supply)),
    )


def _ints(values: Iterable[int]) -> Ints:
    return np.fromiter(values, dtype=np.int64)


def _starts(history: History, lives: Sequence[JobHistory], place: dict[str, int], pool: frozenset[Slots]) -> Floats:
    """When jobs first started in earnest: a trial is none."""
    if not pool:
        return floats(life.started for life in lives)
    started = np.full(len(lives), inf)
    for stint in history.stints:
        if stint.gpus[0] not in pool:
            started[place[stint.job]] = min(started[place[stint.job]], stint.start)
    return np.where(np.isinf(started), nan, started)


def _recording_run_seconds(spells: Spells, final: Ints) -> Floats:
    """Time with GPUs of jobs that ran and came to an end; what they held at once counts once."""
    total = totals(spells.job, spells.new, len(final))
    ran = np.bincount(spells.job, minlength=len(final)) > 0
    return np.where(ran & (final != FINALS.index(Final.UNFINISHED)), total, np.nan)


class _Attempts:
    """Counts the attempts of each job: a new one begins with what starts at its failure or after."""

    def __init__(self, jobs: int) -> None:
        self._number = [0] * jobs
        self._failed = [inf] * jobs

    def of(self, job: int, stint: RunInterval) -> int:
        """The attempt that a stint belongs to. To be asked in the order in which stints ended."""
        if stint.start >= self._failed[job]:
            self._number[job] += 1
            self._failed[job] = inf
        if stint.ended in FAILURES:
            self._failed[job] = stint.end
        return self._number[job]


def _recording_spells(
    history: History, lives: Sequence[JobHistory], place: dict[str, int], pool: frozenset[Slots]
) -> Spells:
    stints = history.stints
    job = _ints(place[stint.job] for stint in stints)
    attempts = _Attempts(len(lives))
    numbers = _ints(attempts.of(index, stint) for index, stint in zip(job.tolist(), stints, strict=True))
    start, end = floats(stint.start for stint in stints), floats(stint.end for stint in stints)
    order = np.lexsort((start, job))  # of equal starts the one that ended first comes first
    causes: dict[str, int] = {}
    return Spells(
        job[order],
        numbers[order],
        start[order],
        end[order],
        (end - start)[order],
        _ints(gpu_count(stint.gpus) for stint in stints)[order],
        _ints(0 if stint.gpus[0] in pool else len(stint.gpus) for stint in stints)[order],
        _ints(_CODE[stint.ended] for stint in stints)[order],
        _ints(_cause(stint, causes) for stint in stints)[order],
        _ideals(history, stints)[order],
        tuple(causes),
    )


def _cause(stint: RunInterval, causes: dict[str, int]) -> int:
    """The index of a cause, new ones included; a lost node is one too."""
    cause = NODE_LOST if stint.ended is RunEnd.LOST else stint.cause
    return causes.setdefault(cause, len(causes)) if cause else -1


def _ideals(history: History, stints: Sequence[RunInterval]) -> Floats:
    """Seconds that the steps which stints left would take at the speed of the whole gang, packed and alone.

    Of jobs that ever computed tasks one by one, stints do not tell steps.
    """
    type_of = Topology(history.cluster).type_of
    divided = {stint.job for stint in stints if stint.ended is RunEnd.COMPUTED}
    return floats(
        nan if stint.job in divided else _ideal(history, stint, history.jobs[stint.job], type_of) for stint in stints
    )


def _ideal(history: History, stint: RunInterval, life: JobHistory, type_of: Sequence[int]) -> float:
    if stint.ended not in _KEPT:
        return nan
    steps = stint.kept - stint.begun
    if steps <= 0:  # whatever it ran on: most trials are such runs
        return 0.0
    kind = type_of[stint.gpus[0].node]
    rate = history.rates_of(life)[kind]
    if gpu_count(stint.gpus) != life.gpus:  # of other sizes the history knows no speed
        return nan
    if rate <= 0 or not isfinite(steps) or any(type_of[slots.node] != kind for slots in stint.gpus):
        return nan
    return steps / rate


def _room(history: History, lives: Sequence[JobHistory], hurt: Harm) -> ClusterCapacity:
    first = min((life.submitted for life in lives), default=0.0)
    last = max((life.ended for life in history.ran()), default=history.end)
    return ClusterCapacity(
        history.cluster.gpus,
        utilisation(history, first, last),
        _level("in use", history.held, first, 1 / history.cluster.gpus),
        _level("waiting", history.waiting, first, 1.0),
        hurt,
    )


def _level(label: str, changes: list[tuple[float, int]], first: float, scale: float) -> ChartCurve:
    moments, levels = cumulated(changes)
    return ChartCurve(label, levels.astype(np.float64) * scale, moments - first)


# A journal as records, as far as it can be read.

_HEADER = re.compile(rb'\s*\{\s*"journal"\s*:')
_GZIP = 16 + zlib.MAX_WBITS
"""What zlib calls a file with gzip's header."""


def journal_subject(path: str | Path) -> Subject:
    """What can be read of a journal: all of it, or what comes before the first thing that is wrong.

    Raises JournalError if its header is damaged, RequestError if it is no journal.
    """
    reader = JournalReader(path)
    header = reader.header
    reading = Reading(header.cluster, header.settings.validation_gpus, name=str(path))
    with collector_paused():
        problem = reader.feed(reading.take)
        records = reading.records()
    about = (
        ("trace", header.trace),
        ("policy", header.policy),
        ("cluster", str(header.cluster)),
        ("placement", header.placement),
    )
    return Subject(RecordSource.JOURNAL, str(path), records, about, problem=None if problem is None else str(problem))


class Reading:
    """The history so far, and what it does not keep: which nodes were there when."""

    def __init__(self, cluster: Cluster, validation_gpus: int = 0, name: str = "journal") -> None:
        self.history = History(cluster)
        self._name = name
        self._topology = Topology(cluster)
        self._pool = _pool(self._topology, validation_gpus)
        self._alive = [True] * len(cluster.nodes)
        self._changes: list[SupplyChange] = []
        self._kinds: set[str] = set()

    def take(self, entry: JournalEntry) -> None:
        """Take in one more instant; raises KeyError or IndexError for names that are not there, JournalError for values."""
        self.history.end = entry.now  # so that what is read of a bad instant lies before the end
        try:
            self._check(entry)
            self.history.take(entry)
        except ValueError as error:
            words = " ".join(str(error).split())[:LONGEST_SHOWN]
            raise JournalError(f"{self._name}: at {entry.now:g} s: a fact that cannot be: {words}") from None

    def records(self) -> Records:
        """The journal ends here; what it tells."""
        self.history.close()
        with np.errstate(over="ignore", invalid="ignore"):  # moments may be anything that a float can be
            return records_of(self.history, Supply(tuple(self._changes), self._pool))

    def _check(self, entry: JournalEntry) -> None:
        """Raise for what a history would take in and choke on later."""
        for fact in (*entry.events, *entry.actions):
            check = _CHECKS.get(type(fact))
            if check is not None:
                check(self, fact, entry.now)

    def _estimated(self, fact: Estimated, _now: float) -> None:
        if len(fact.estimate.rates) != len(self._topology.types):
            raise ValueError(f"{len(fact.estimate.rates)} rates of {fact.kind!r} on {len(self._topology.types)} GPU types")
        self._kinds.add(fact.kind)

    def _submitted(self, fact: Submitted, _now: float) -> None:
        if fact.kind not in self._kinds:
            raise KeyError(fact.kind)
        if not 1 <= fact.job.gpus <= MOST_GPUS:
            raise ValueError(f"a job {fact.job.id!r} of {fact.job.gpus!r} GPUs")
        if fact.job.id in self.history.jobs:
            raise ValueError(f"job {fact.job.id!r} is submitted a second time")

    def _revealed(self, fact: Revealed, _now: float) -> None:
        if len(fact.rates) != len(self._topology.types):
            raise ValueError(f"{len(fact.rates)} rates of job {fact.job!r} on {len(self._topology.types)} GPU types")

    def _started(self, fact: Launch | Compute, _now: float) -> None:
        self._check_gpus(fact.gpus)
        life = self.history.jobs.get(fact.job)
        last = life.epoch if life else 0
        goes_on = isinstance(fact, Compute) and fact.epoch == last  # further tasks of the round under way
        if fact.epoch != last + 1 and not goes_on:
            raise ValueError(f"run {fact.epoch} of job {fact.job!r} after run {last}")

    def _computed(self, fact: Computed, _now: float) -> None:
        self._check_gpus(fact.gpus)

    def _finished(self, fact: Finished, _now: float) -> None:
        if self.history.jobs[fact.job].status.is_final:
            raise ValueError(f"job {fact.job!r} ends a second time")

    def _check_gpus(self, gpus: Holding) -> None:
        if not gpus:
            raise ValueError("a run without GPUs")
        for node, mask in gpus:
            if not (0 <= node < len(self._alive)) or not 0 < mask <= self._topology.full[node]:
                raise IndexError(f"node {node}, slots {mask}")

    def _node_changed(self, fact: NodeLost | NodeReturned, now: float) -> None:
        if not 0 <= fact.node < len(self._alive):
            raise IndexError(f"node {fact.node}")
        is_back = isinstance(fact, NodeReturned)
        if self._alive[fact.node] is not is_back:
            self._alive[fact.node] = is_back
            reserved = sum(slots.node == fact.node for slots in self._pool)
            gpus = self.history.cluster.nodes[fact.node].gpus - reserved
            self._changes.append(SupplyChange(now, self._topology.type_of[fact.node], gpus if is_back else -gpus))


_CHECKS: dict[type, Callable[[Reading, Any, float], None]] = {
    Estimated: Reading._estimated,
    Submitted: Reading._submitted,
    Revealed: Reading._revealed,
    Finished: Reading._finished,
    Launch: Reading._started,
    Compute: Reading._started,
    Computed: Reading._computed,
    NodeLost: Reading._node_changed,
    NodeReturned: Reading._node_changed,
}


def _pool(topology: Topology, gpus: int) -> frozenset[Slots]:
    """GPUs on which jobs are tried; none if the header asks for what cannot be."""
    return frozenset(ValidationPool(topology, gpus, 0.0).slots) if 0 < gpus < sum(topology.totals) else frozenset()


def journal_at(source: str) -> Path | None:
    """The journal that a user names by its file or by the folder that `--out` wrote; None if it is something else.

    It is known by its first bytes; one that has lost them, by its name, unless it is a trace.
    """
    path = Path(source)
    file = path / NAME if path.is_dir() else path
    if not file.is_file():
        return None
    head = _head(file)
    if _HEADER.match(head) or (file.name == NAME and recognise(head) is None):
        return file
    return None


def _head(file: Path) -> bytes:
    """The first bytes, unpacked, as far as they can be had: a file may be cut off before there are so many."""
    try:
        with file.open("rb") as stream:
            head = stream.read(HEAD_BYTES)
        return zlib.decompressobj(_GZIP).decompress(head, HEAD_BYTES) if file.suffix == ".gz" else head
    except (OSError, zlib.error):
        return b""
