"""Starts out of order, and whether they hurt (Philly, ATC'19 §3.1; ALGORITHMS §6.1).

A first start is out of order if a job that was submitted earlier still waits for its own. Most of that is harmless: what the
later job got would not have let the earlier one start. At every moment the head is the job that waits for its first start
and was submitted first. It is hurt while it fits into no type's idle GPUs, but would fit into some type's idle GPUs together
with those that are held by jobs which overtook it, that is, were submitted after it. A start out of order is harmful if the
job, at some moment while it runs, is one of those that hurt a head. GPUs are counted, how close together they are is not.

Heads come in order of submission: a job that has started waits for its first start no more. So the GPUs of those who
overtook the head are kept up to date in one pass over everything that happens, in time linear in that.
"""

from collections.abc import Iterable, Mapping, Sequence
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
    """At some moment there are more GPUs of a type, or fewer."""

    moment: float
    gpu_type: int
    gpus: int


@dataclass(frozen=True)
class Supply:
    """What a history does not say of the GPUs that jobs could have.

    changes    of their number, as nodes were lost and returned
    reserved   single GPUs on which jobs are tried, and do not run in earnest
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
    """Whether a job started (first) while one that was submitted earlier had not left the queue yet.

    submitted   ascending;  started: NaN for those that never did;  left: moment of the first start, or of an end without
    """
    latest = np.concatenate(([-np.inf], np.maximum.accumulate(np.nan_to_num(left, nan=-np.inf))))
    earlier = np.searchsorted(submitted, submitted, side="left")
    return latest[earlier] > started  # NaN compares false


class _Counter:
    """GPUs over time, by type: those there are, those held, and those held by jobs that overtook the head.

    GPUs that two jobs share count once; they overtook the head only if both jobs did.
    """

    def __init__(self, topology: Topology, reserved: Iterable[Slots]) -> None:
        self._type_of = topology.type_of
        self.idle = list(topology.totals)
        for slots in reserved:
            self.idle[self._type_of[slots.node]] -= 1
        self.over = [0] * len(self.idle)
        self.head = 0
        self._by_rank: dict[int, list[int]] = {}
        self._holders: dict[Holding, list[int]] = {}

    def hold(self, gpus: Holding, rank: int) -> None:
        """The job of this rank gets these GPUs."""
        holders = self._holders.setdefault(gpus, [])
        if holders:
            self._count(gpus, min(holders), -1)
        holders.append(rank)
        self._count(gpus, min(holders), 1)

    def release(self, gpus: Holding, rank: int) -> None:
        """And gives them back."""
        holders = self._holders[gpus]
        self._count(gpus, min(holders), -1)
        holders.remove(rank)
        if holders:
            self._count(gpus, min(holders), 1)
        else:
            del self._holders[gpus]

    def _count(self, gpus: Holding, rank: int, sign: int) -> None:
        """These GPUs are held by jobs of which the earliest has this rank, or no more."""
        held = self._by_rank.get(rank)
        if held is None:
            held = self._by_rank[rank] = [0] * len(self.idle)
        for node, mask in gpus:
            kind, count = self._type_of[node], sign * mask.bit_count()
            held[kind] += count
            self.idle[kind] -= count
            if rank > self.head:
                self.over[kind] += count

    def advance(self) -> None:
        """The next job is the head: who is no later than it did not overtake it."""
        self.head += 1
        for kind, count in enumerate(self._by_rank.get(self.head, ())):
            self.over[kind] -= count

    def is_hurt(self, need: int, types: Sequence[int]) -> bool:
        """Whether a head that needs so many GPUs of one of these types waits for those that overtook it."""
        idle, over = self.idle, self.over
        return all(idle[kind] < need for kind in types) and any(idle[kind] + over[kind] >= need for kind in types)


class _Queue:
    """Jobs by rank that wait for their first start: the first of them is the head."""

    def __init__(self, lives: Sequence[JobHistory]) -> None:
        self._here = bytearray(len(lives))
        self._gone = bytearray(len(lives))

    def arrive(self, rank: int) -> None:
        """A job was submitted."""
        self._here[rank] = 1

    def leave(self, rank: int) -> None:
        """It started, or came to an end before that."""
        self._gone[rank] = 1

    def is_gone(self, rank: int) -> bool:
        """It waits no more."""
        return rank < len(self._gone) and bool(self._gone[rank])

    def waits(self, rank: int) -> bool:
        """It waits."""
        return rank < len(self._here) and bool(self._here[rank]) and not self._gone[rank]


_SUPPLY, _ARRIVE, _HOLD, _RELEASE, _LEAVE = range(5)
"""What happens; at one moment all of it is read before what holds from then on is looked at."""

Happening = tuple[float, int, int, Holding, int]
"""(moment, what, rank of the job or type of GPUs, GPUs of a job, change of their number)."""
Span = tuple[float, float, int]
"""(from, until, rank of the head)."""


def harm(history: History, lives: Sequence[JobHistory], left: Sequence[float], supply: Supply) -> Harm:
    """What overtaking did on a cluster. `lives` are by submission; `left`: when each left the queue first, inf if never."""
    rank = {life.id: place for place, life in enumerate(lives)}
    spans = _hurt_spans(history, lives, _happenings(history, lives, left, rank, supply), supply)
    harmful = np.zeros(len(lives), dtype=bool)
    if spans:
        begun, ended, heads = (np.array(column) for column in zip(*spans, strict=True))
        stints = [stint for stint in history.stints if stint.gpus[0] not in supply.reserved]
        job = np.fromiter((rank[stint.job] for stint in stints), dtype=np.int64)
        start, end = floats(stint.start for stint in stints), floats(stint.end for stint in stints)
        first, after = np.searchsorted(ended, start, side="right"), np.searchsorted(begun, end, side="left")
        some = first < after
        later = _least(heads, first[some], after[some]) < job[some]
        harmful[job[some][later]] = True
    return Harm(harmful, sum(end - start for start, end, _ in spans), len({head for _, _, head in spans}))


def _least(values: Ints, first: Ints, after: Ints) -> Ints:
    """The least of values[first:after], for many such ranges, none of them empty: by tables of ranges of 2^k."""
    tables = [values]
    while len(tables[-1]) > (half := 1 << (len(tables) - 1)):
        tables.append(np.minimum(tables[-1][:-half], tables[-1][half:]))
    level = np.frexp(after - first)[1] - 1
    found = np.empty(len(first), dtype=np.int64)
    for power, table in enumerate(tables):
        here = level == power
        found[here] = np.minimum(table[first[here]], table[after[here] - (1 << power)])
    return found


def _hurt_spans(
    history: History, lives: Sequence[JobHistory], happenings: Iterable[Happening], supply: Supply
) -> list[Span]:
    """All spans in which a head was hurt; disjoint and in order."""
    counter, queue = _Counter(Topology(history.cluster), supply.reserved), _Queue(lives)
    spans: list[Span] = []
    since, hurt = 0.0, -1
    for moment, happened in groupby(happenings, key=itemgetter(0)):
        if hurt >= 0:
            spans.append((since, moment, hurt))
        for happening in happened:
            _read(counter, queue, happening)
        while queue.is_gone(counter.head):
            counter.advance()
        since, hurt = moment, -1
        if queue.waits(counter.head):
            life = lives[counter.head]
            hurt = counter.head if counter.is_hurt(life.least, _usable(history, life)) else -1
    if hurt >= 0 and history.end > since:
        spans.append((since, history.end, hurt))
    return spans


def _usable(history: History, life: JobHistory) -> list[int]:
    """Types on which a job can run."""
    return [kind for kind, rate in enumerate(history.rates[life.kind]) if rate > 0]


def _read(counter: _Counter, queue: _Queue, happening: Happening) -> None:
    _, what, which, gpus, count = happening
    if what == _HOLD:
        counter.hold(gpus, which)
    elif what == _RELEASE:
        counter.release(gpus, which)
    elif what == _ARRIVE:
        queue.arrive(which)
    elif what == _LEAVE:
        queue.leave(which)
    else:
        counter.idle[which] += count


def _happenings(
    history: History, lives: Sequence[JobHistory], left: Sequence[float], rank: Mapping[str, int], supply: Supply
) -> list[Happening]:
    """Everything, in order of time; a job gets GPUs before it gives others, or the same ones, back."""
    found: list[Happening] = [(change.moment, _SUPPLY, change.gpu_type, (), change.gpus) for change in supply.changes]
    for place, life in enumerate(lives):
        found.append((life.submitted, _ARRIVE, place, (), 0))
        if left[place] < inf:
            found.append((left[place], _LEAVE, place, (), 0))
    for stint in history.stints:
        if stint.gpus[0] not in supply.reserved:
            found.append((stint.start, _HOLD, rank[stint.job], stint.gpus, 0))
            found.append((stint.end, _RELEASE, rank[stint.job], stint.gpus, 0))
    found.sort(key=itemgetter(0, 1))
    return found
