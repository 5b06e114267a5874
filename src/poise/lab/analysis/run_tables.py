"""A run as tables: one row per job, one per hold of GPUs, one per moment at which something changed.

Times are seconds on the trace's clock. What never happened is NaN among numbers, None among texts.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from poise.lab.analysis.history import Changes, History, RunInterval, cumulated
from poise.lab.analysis.summary import Measured
from poise.lab.columns import Column, Table
from poise.lab.traces.schema import Trace
from poise.scheduler.model.arithmetic import Floats, Ints
from poise.scheduler.model.cluster import Cluster, Holding, bits

PER_JOB_COLUMNS = (
    "job", "tenant", "gpus", "submitted", "started", "finished", "jct", "rho", "preemptions",
    "gpu_seconds", "wait_fair_share", "wait_fragmentation", "wait_capacity", "status",
)  # fmt: skip
"""Columns of --per-job."""
_FROM_TRACE = ("name", "app", "model", "batch_size", "weight", "priority", "deadline")
"""What the owner said of a job, besides."""
INTERVALS = ("job", "node", "gpu_type", "gpus", "slots", "start", "end", "ended", "cause")
"""Columns of `interval_table`."""


def per_job_table(history: History, measured: Measured) -> Table:
    """Return one row for each job of the trace in order of submission, with the columns of --per-job."""
    lives = list(history.jobs.values())
    place = {life.id: index for index, life in enumerate(measured.jobs)}
    jct, rho, finished = (np.full(len(lives), np.nan) for _ in range(3))
    for row, life in enumerate(lives):
        if life.id in place:
            jct[row], rho[row] = measured.jcts[place[life.id]], measured.rhos[place[life.id]]
            finished[row] = life.ended
    waited = np.array([life.waited for life in lives], dtype=np.float64).reshape(-1, 3)
    columns: tuple[Column, ...] = (
        [life.id for life in lives],
        [life.tenant for life in lives],
        _ints(life.gpus for life in lives),
        _floats(life.submitted for life in lives),
        _known(_floats(life.started for life in lives)),
        finished,
        jct,
        _known(rho),
        _ints(life.preemptions for life in lives),
        _floats(life.gpu_seconds for life in lives),
        *(waited[:, cause] for cause in range(3)),
        [life.status.name.lower() for life in lives],
    )
    return Table(dict(zip(PER_JOB_COLUMNS, columns, strict=True)))


def job_table(history: History, measured: Measured, trace: Trace) -> Table:
    """Return the same with migrations, restarts, and what the owner said of each job."""
    lives = history.jobs.values()
    table = per_job_table(history, measured)
    columns: dict[str, Column] = {name: table[name] for name in table.columns}
    columns["migrations"] = _ints(life.migrations for life in lives)
    columns["restarts"] = _ints(life.restarts for life in lives)
    jobs = {each.job.id: each.job for each in trace.jobs}
    stated = [jobs[life.id] for life in lives]
    for name in _FROM_TRACE:
        values = [getattr(job, name) for job in stated]
        columns[name] = values if name in ("name", "app", "model") else _numbers(values)
    return Table(columns)


def interval_table(history: History) -> Table:
    """Return one row for each node on which a job held GPUs from `start` to `end`, by start; `slots` names the GPUs."""
    nodes = history.cluster.nodes
    runs = sorted(history.runs, key=lambda run: run.start)
    rows = [(run, nodes[slots.node], slots.mask) for run in runs for slots in run.gpus]
    named: dict[int, str] = {}
    columns: tuple[Column, ...] = (
        [run.job for run, _, _ in rows],
        [node.name for _, node, _ in rows],
        [node.gpu_type for _, node, _ in rows],
        _ints(mask.bit_count() for _, _, mask in rows),
        [named.get(mask) or named.setdefault(mask, _slots(mask)) for _, _, mask in rows],
        _floats(run.start for run, _, _ in rows),
        _floats(run.end for run, _, _ in rows),
        [str(run.ended) for run, _, _ in rows],
        [run.cause or None for run, _, _ in rows],
    )
    return Table(dict(zip(INTERVALS, columns, strict=True)))


def _slots(mask: int) -> str:
    """`0/1/3`: the slots of a mask, from 0."""
    return "/".join(str(bit.bit_length() - 1) for bit in bits(mask))


def timeline_table(history: History) -> Table:
    """Return one row for each moment at which one of its numbers changed; a number holds until the next row.

    Columns: `time`; `running` and `waiting` jobs; `gpus`: those there are; `in_use`: those that are held; and as
    `in_use_TYPE` those of each GPU type.
    """
    first = min((life.submitted for life in history.jobs.values()), default=0.0)
    by_type = _use_by_type(history.runs, history.cluster)
    changes: dict[str, Changes] = {
        "running": _running(history.runs),
        "waiting": history.waiting,
        "gpus": [(first, history.cluster.gpus), *history.live],
        "in_use": sorted(change for each in by_type.values() for change in each),
        **{f"in_use_{gpu_type}": each for gpu_type, each in by_type.items()},
    }
    levels = {name: cumulated(sorted(each)) for name, each in changes.items()}
    times = np.unique(np.concatenate([_steps(*each) for each in levels.values()])) if history.jobs else np.empty(0)
    return Table({"time": times, **{name: _at(times, *each) for name, each in levels.items()}})


def _steps(times: Floats, levels: Ints) -> Floats:
    """The times at which a level really changes."""
    return times[np.diff(levels, prepend=0) != 0] if len(times) else times


def _at(moments: Floats, times: Floats, levels: Ints) -> Ints:
    """The level at each of some moments; 0 before the first change."""
    return np.concatenate((np.zeros(1, np.int64), levels))[np.searchsorted(times, moments, side="right")]


def _use_by_type(runs: Iterable[RunInterval], cluster: Cluster) -> Mapping[str, Changes]:
    """Changes of the number of GPUs of each type that are held. Two jobs that share GPUs hold all of each other's."""
    spans: defaultdict[Holding, list[tuple[float, float]]] = defaultdict(list)
    for run in runs:
        spans[run.gpus].append((run.start, run.end))
    changes: dict[str, Changes] = {gpu_type: [] for gpu_type in cluster.gpu_types}
    for holding, held in spans.items():
        counts = [(changes[cluster.nodes[slots.node].gpu_type], slots.mask.bit_count()) for slots in holding]
        for start, end in _united(held):
            for into, gpus in counts:
                into += ((start, gpus), (end, -gpus))
    return changes


def _running(runs: Iterable[RunInterval]) -> Changes:
    """Changes of the number of jobs that hold GPUs, however many tasks of a job there are."""
    spans: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for run in runs:
        spans[run.job].append((run.start, run.end))
    return [change for held in spans.values() for start, end in _united(held) for change in ((start, 1), (end, -1))]


def _united(spans: list[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """The union of some spans of time, as spans that do not touch."""
    begin = last = None
    for start, end in sorted(spans):
        if begin is None or last is None or start > last:
            if begin is not None and last is not None:
                yield begin, last
            begin, last = start, end
        else:
            last = max(last, end)
    if begin is not None and last is not None:
        yield begin, last


def _ints(values: Iterable[int]) -> Ints:
    return np.fromiter(values, dtype=np.int64)


def _floats(values: Iterable[float]) -> Floats:
    return np.fromiter(values, dtype=np.float64)


def _numbers(values: list[float | None]) -> Column:
    """Whole numbers where all are, else floats with NaN for what is not there."""
    if values and all(isinstance(value, int) for value in values):
        return np.array(values, dtype=np.int64)
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _known(values: Floats) -> Floats:
    """The values, with NaN for those that are not finite."""
    return np.where(np.isfinite(values), values, np.nan)
