"""Starts out of order, and whether they did harm (Philly, ATC'19 §3.1; docs/algorithms/philly.md).

A first start is out of order if a job that was submitted earlier still waits for its own. Most of that is harmless: what
the later job got would not have let the earlier one start. At every time the head is the job that waits for its first
start and was submitted first. It is hurt while it fits into no type's idle GPUs, but would fit into some type's idle GPUs
together with those held by jobs that overtook it, that is, were submitted after it. A start out of order is harmful if
the job, at some time while it runs, is one of those that hurt a head. GPUs are counted; how close together they are is
not looked at.

Heads come in order of submission: a job that has started waits for its first start no more. So the GPUs of those who
overtook the head are kept up to date in one pass over all changes, in time linear in their number.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import inf
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from poise.lab.analysis.history import History, JobHistory, floats
from poise.scheduler.model.arithmetic import Bools, Floats, Ints
from poise.scheduler.model.cluster import Holding, Slots
from poise.scheduler.model.topology import Topology


class SupplyChange(NamedTuple):
    """From `time` on there are more GPUs of a type, or fewer."""

    time: float
    gpu_type: int
    gpus: int


@dataclass(frozen=True)
class Supply:
    """What a history does not say of the GPUs that jobs could have.

    changes    of their number, as nodes were lost and returned
    reserved   single GPUs of a validation pool: jobs are only tried on them
    """

    changes: tuple[SupplyChange, ...] = ()
    reserved: frozenset[Slots] = frozenset()


@dataclass(frozen=True, eq=False)
class Harm:
    """Which jobs hurt a head, for how many seconds some head was hurt, and how many heads were."""

    harmful: Bools
    seconds: float
    heads: int


def out_of_order(submitted: Floats, started: Floats, left: Floats) -> Bools:
    """Return which jobs first started while one that was submitted earlier had not left the queue yet.

    submitted   ascending;  started: NaN for those that never did;  left: time of the first start, or of an end without
    """
    latest = np.concatenate(([-np.inf], np.maximum.accumulate(np.nan_to_num(left, nan=-np.inf))))
    earlier = np.searchsorted(submitted, submitted, side="left")
    return latest[earlier] > started  # NaN compares false


def harm(history: History, jobs: Sequence[JobHistory], left: Sequence[float], supply: Supply) -> Harm:
    """Return what overtaking did. `jobs` are by submission; `left`: when each first left the queue, inf if never."""
    rank = {job.id: place for place, job in enumerate(jobs)}
    runs = [run for run in history.runs if run.gpus[0] not in supply.reserved]
    changes: list[_Change] = [(each.time, _SUPPLY, each.gpu_type, (), each.gpus) for each in supply.changes]
    for place, job in enumerate(jobs):
        changes.append((job.submitted, _ARRIVE, place, (), 0))
        if left[place] < inf:
            changes.append((left[place], _LEAVE, place, (), 0))
    for run in runs:
        changes.append((run.start, _HOLD, rank[run.job], run.gpus, 0))
        changes.append((run.end, _RELEASE, rank[run.job], run.gpus, 0))
    changes.sort(key=itemgetter(0, 1))
    spans = _hurt_spans(history, jobs, changes, supply)
    harmful = np.zeros(len(jobs), dtype=bool)
    if spans:
        # A run is harmful if it overlaps a span whose head was submitted before its job: look for the earliest such head.
        begun, ended, heads = (np.array(column) for column in zip(*spans, strict=True))
        owner = np.fromiter((rank[run.job] for run in runs), dtype=np.int64)
        start, end = floats(run.start for run in runs), floats(run.end for run in runs)
        first, after = np.searchsorted(ended, start, side="right"), np.searchsorted(begun, end, side="left")
        some = first < after
        later = _range_minima(heads, first[some], after[some]) < owner[some]
        harmful[owner[some][later]] = True
    return Harm(harmful, sum(end - start for start, end, _ in spans), len({head for _, _, head in spans}))


_SUPPLY, _ARRIVE, _HOLD, _RELEASE, _LEAVE = range(5)
"""Kinds of changes, in the order in which those of one time are read: a job gets GPUs before it gives others back."""

_Change = tuple[float, int, int, Holding, int]
"""(time, kind, rank of the job or type of GPUs, GPUs of a job, change of their number)."""


def _hurt_spans(
    history: History, jobs: Sequence[JobHistory], changes: Iterable[_Change], supply: Supply
) -> list[tuple[float, float, int]]:
    """Return all spans in which a head was hurt, as (from, until, rank of the head); disjoint and in order."""
    state = _ClusterState(Topology(history.cluster), supply.reserved, len(jobs))
    spans: list[tuple[float, float, int]] = []
    since, hurt = 0.0, -1
    for time, together in groupby(changes, key=itemgetter(0)):
        if hurt >= 0:
            spans.append((since, time, hurt))
        for change in together:
            state.take(change)
        since, hurt = time, -1
        if state.find_head():
            job = jobs[state.head]
            usable = [gpu_type for gpu_type, rate in enumerate(history.rates[job.kind]) if rate > 0]
            hurt = state.head if state.is_hurt(job.min_gpus, usable) else -1
    if hurt >= 0 and history.end > since:
        spans.append((since, history.end, hurt))
    return spans


class _ClusterState:
    """The queue and the GPUs at one time, by type: those idle, and those held by jobs that overtook the head.

    GPUs that two jobs share count once; they overtook the head only if both jobs did. A job's rank is its place by
    submission; the head is the first that has not left the queue.
    """

    def __init__(self, topology: Topology, reserved: Iterable[Slots], jobs: int) -> None:
        self._type_of = topology.type_of
        self.idle = list(topology.totals)
        for slots in reserved:
            self.idle[self._type_of[slots.node]] -= 1
        self.over = [0] * len(self.idle)
        self.head = 0
        self._arrived = bytearray(jobs)
        self._gone = bytearray(jobs)
        self._by_rank: dict[int, list[int]] = {}
        self._holders: dict[Holding, list[int]] = {}

    def take(self, change: _Change) -> None:
        """Read one change."""
        _, kind, which, gpus, count = change
        if kind == _SUPPLY:
            self.idle[which] += count
        elif kind == _ARRIVE:
            self._arrived[which] = 1
        elif kind == _LEAVE:
            self._gone[which] = 1
        else:
            # Shared GPUs are counted for the earliest of their holders, who may change.
            holders = self._holders.setdefault(gpus, [])
            if holders:
                self._count(gpus, min(holders), -1)
            if kind == _HOLD:
                holders.append(which)
            else:
                holders.remove(which)
            if holders:
                self._count(gpus, min(holders), 1)
            else:
                del self._holders[gpus]

    def _count(self, gpus: Holding, rank: int, sign: int) -> None:
        """Add GPUs to those held by the job of this rank, or take them away."""
        held = self._by_rank.get(rank)
        if held is None:
            held = self._by_rank[rank] = [0] * len(self.idle)
        for node, mask in gpus:
            gpu_type, count = self._type_of[node], sign * mask.bit_count()
            held[gpu_type] += count
            self.idle[gpu_type] -= count
            if rank > self.head:
                self.over[gpu_type] += count

    def find_head(self) -> bool:
        """Move on to the job that is the head now; return whether there is one."""
        while self.head < len(self._gone) and self._gone[self.head]:
            self.head += 1
            for gpu_type, count in enumerate(self._by_rank.get(self.head, ())):  # what it holds did not overtake it
                self.over[gpu_type] -= count
        return self.head < len(self._arrived) and bool(self._arrived[self.head])

    def is_hurt(self, need: int, types: Sequence[int]) -> bool:
        """Whether a head that needs this many GPUs of one of these types waits for GPUs of jobs that overtook it."""
        idle, over = self.idle, self.over
        return all(idle[each] < need for each in types) and any(idle[each] + over[each] >= need for each in types)


def _range_minima(values: Ints, first: Ints, after: Ints) -> Ints:
    """Return the least of values[first:after] for many such ranges, none of them empty, by a sparse table (2^k wide)."""
    tables = [values]
    while len(tables[-1]) > (half := 1 << (len(tables) - 1)):
        tables.append(np.minimum(tables[-1][:-half], tables[-1][half:]))
    level = np.frexp(after - first)[1] - 1
    found = np.empty(len(first), dtype=np.int64)
    for power, table in enumerate(tables):
        here = level == power
        found[here] = np.minimum(table[first[here]], table[after[here] - (1 << power)])
    return found
