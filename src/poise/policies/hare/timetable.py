"""Hare's list as a timetable: which task starts when on which node, and how it is kept to as things happen.

GPUs of one node are alike, so that a task is given a node. A task starts once its moment has come, its round is ready and a
GPU of its node is free; if loading a model or a wrong estimate makes something late, what follows on that node is late too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, floor, inf
from typing import NamedTuple

from poise.model.cluster import Part
from poise.model.columns import Snapshot
from poise.model.job import Status
from poise.model.plan import Claim, Grain, Plan
from poise.policies.hare.schedule import Gpus, Schedule, Work, schedule

MOST_TASKS = 20_000
"""That a timetable is made for; of more only an order is."""
ALMOST = 1e-6
"""Part of a round that may be missing for rounding."""
AT_ONCE = 1e-9
"""Part of a moment, likewise."""


class Entry(NamedTuple):
    """A task that is to start: rounds are counted from the job's first one."""

    start: float
    row: int
    round: int
    node: int


class Started(NamedTuple):
    """A task that has been started, and when it should be done."""

    end: float
    node: int
    row: int


@dataclass(frozen=True, slots=True)
class Timetable:
    """Entries by their start, those before `at` gone or `late`.

    rows, gpus   the jobs that were there when it was last looked at, and the number of GPUs that it was made for
    begun        by job the round of which tasks were started last
    """

    entries: tuple[Entry, ...] = ()
    at: int = 0
    late: tuple[Entry, ...] = ()
    started: tuple[Started, ...] = ()
    rows: frozenset[int] = frozenset()
    gpus: int = 0
    begun: Mapping[int, int] = field(default_factory=dict)


def has_only_long_tasks(snapshot: Snapshot, long: float) -> bool:
    """Every active job is to be dealt with task by task, its length is known, and the tasks are not too many."""
    tasks = 0.0
    for row, left in zip(snapshot.active, snapshot.steps_left.tolist(), strict=True):
        divided = snapshot.estimate(row).tasks
        if divided is None or divided.best < long:
            return False
        tasks += (left + 1.0) * divided.count
    return tasks <= MOST_TASKS


def is_stale(table: Timetable, snapshot: Snapshot) -> bool:
    """Jobs have come, or gone with tasks left; GPUs have come or gone; or a round was lost. That jobs end was expected."""
    if snapshot.gpus != table.gpus or not table.rows.issuperset(snapshot.active):
        return True
    gone = table.rows.difference(snapshot.active)
    if gone and any(entry.row in gone for entry in (*table.late, *table.entries[table.at :])):
        return True
    status = snapshot.columns.status
    waiting = (row for row in snapshot.active if status[row] == Status.WAITING)
    return any(table.begun.get(row) == _round(snapshot, row) for row in waiting)


def made(snapshot: Snapshot, table: Timetable) -> tuple[Timetable, Schedule, list[Work]]:
    """A new timetable, for what is left of everything; and how good it is, in seconds from now."""
    now = snapshot.now
    started = tuple(each for each in table.started if each.end > now and snapshot.columns.gpus[each.row])
    nodes, free = _gpus(snapshot, started)
    rounds = {row: _round(snapshot, row) for row in snapshot.active}
    gpus = Gpus(tuple(snapshot.floor.topology.type_of[node] for node in nodes), tuple(free))
    found = {row: _under_way(snapshot, row, started) for row in snapshot.active}
    able = [row for row, job in found.items() if job.is_computable(gpus.kinds)]
    jobs = [found[row] for row in able]
    plan = schedule(jobs, gpus) if jobs else Schedule((), (), 0.0, 0.0)
    entries = [
        Entry(now + each.start, row := able[each.job], rounds[row] + each.round, nodes[each.gpu]) for each in plan.placed
    ]
    entries.sort(key=lambda entry: entry.start)  # of those that start at once, as they were listed
    begun = {row: at for row, at in rounds.items() if snapshot.columns.status[row] == Status.RUNNING}
    new = Timetable(tuple(entries), 0, (), started, frozenset(snapshot.active), snapshot.gpus, begun)
    return new, plan, jobs


def _gpus(snapshot: Snapshot, started: Sequence[Started]) -> tuple[list[int], list[float]]:
    """By GPU its node, and in how many seconds it will be free."""
    floor, now = snapshot.floor, snapshot.now
    held = [0] * len(floor.masks)
    for holding in floor.holdings.values():
        for node, mask in holding:
            held[node] += mask.bit_count()
    nodes: list[int] = []
    free: list[float] = []
    for node, mask in enumerate(floor.masks):
        ends = sorted((each.end - now for each in started if each.node == node), reverse=True)[: held[node]]
        ends += [0.0] * (mask.bit_count() + held[node] - len(ends))
        nodes += [node] * len(ends)
        free += ends
    return nodes, free


def _done(snapshot: Snapshot, row: int) -> float:
    """The work that a job had done when its current round began, or is about to begin."""
    return snapshot.columns.done_before(row)


def _round(snapshot: Snapshot, row: int) -> int:
    """The round that a job is at. One that has run under leases may begin in the middle of a step; rounds are whole."""
    return floor(_done(snapshot, row) + ALMOST)


def _under_way(snapshot: Snapshot, row: int, started: Sequence[Started]) -> Work:
    """What is left of a job, which perhaps is in the middle of a round."""
    columns = snapshot.columns
    job = work(snapshot, row, max(1, ceil(columns.steps[row] - _done(snapshot, row) - ALMOST)))
    if columns.status[row] != Status.RUNNING:
        return job
    ends = [each.end - snapshot.now for each in started if each.row == row]
    until = max(ends) + max(job.sync) if ends else 0.0  # how far a synchronisation has come is not known
    return replace(job, left=columns.ready[row], until=until)


def work(snapshot: Snapshot, row: int, rounds: int) -> Work:
    """So many rounds of a job, from now on; a gang is as many tasks."""
    columns, estimate = snapshot.columns, snapshot.estimate(row)
    name, weight, tasks = columns.ids[row], columns.weight[row], estimate.tasks
    if tasks is not None:
        return Work(name, weight, 0.0, rounds, tasks.count, tasks.seconds, tuple(near for near, _, _ in tasks.sync))
    seconds = tuple(1.0 / packed if packed > 0 else 0.0 for packed, _, _ in estimate.rates)
    return Work(name, weight, 0.0, rounds, columns.gang[row], seconds, (0.0,) * len(seconds))


def kept_to(snapshot: Snapshot, table: Timetable) -> tuple[Plan, Timetable]:
    """Start what is due, and wake up for what is next."""
    soon = snapshot.now + AT_ONCE * max(1.0, abs(snapshot.now))
    at = table.at
    while at < len(table.entries) and table.entries[at].start <= soon:
        at += 1
    start = _Start(snapshot)
    late = tuple(entry for entry in (*table.late, *table.entries[table.at : at]) if not start.begin(entry))
    wake = table.entries[at].start if at < len(table.entries) else inf
    started = (*(each for each in table.started if each.end > snapshot.now), *start.started)
    begun = {**table.begun, **start.begun} if start.begun else table.begun
    kept = Timetable(table.entries, at, late, started, frozenset(snapshot.active), table.gpus, begun)
    return Plan.changing(tuple(start.claims), wake=wake), kept


class _Start:
    """Tasks that start now."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._free = snapshot.floor.free()
        self._ready: dict[int, int] = {}
        self.claims: list[Claim] = []
        self.started: list[Started] = []
        self.begun: dict[int, int] = {}

    def begin(self, entry: Entry) -> bool:
        """Start a task, if its round is ready and its node has a GPU for it."""
        columns, row = self._snapshot.columns, entry.row
        if not self._free[entry.node] or _round(self._snapshot, row) != entry.round:
            return False
        ready = self._ready.get(row, columns.ready[row])
        tasks = self._snapshot.estimate(row).tasks
        if not ready or tasks is None:
            return False
        self._ready[row] = ready - 1
        self._free[entry.node] -= 1
        seconds = tasks.seconds[self._snapshot.floor.topology.type_of[entry.node]]
        self.started.append(Started(self._snapshot.now + seconds, entry.node, row))
        self.begun[row] = entry.round
        self.claims.append(Claim(row, site=(Part(entry.node, 1),), grain=Grain.TASK))
        return True
