"""Hare with lengths known (`hare`; Chen et al., HPDC'22; docs/algorithms/hare.md): least Σ w_n C_n of the active jobs.

The relaxation gives every round of every job a middle completion time H:

    all tasks long    the list algorithm to the letter: a timetable that says of every task when it starts on which node
    otherwise         GPUs are dealt out by rank (`rank_sharing.py`), short tasks under leases. There the unit of work is a
                      job: its rank is the mean H of the rounds that it had left when it was planned

Both are made anew when jobs arrive or nodes come and go: the timetable at once, and also when a job is gone before its end
or has lost a round; the relaxation at most every `recompute` seconds, and until then a new job has the rank of those that
have as much work for their weight. A gang is taken for as many tasks; a job of unknown length comes last. What no schedule
can be below, and how many times the optimum a list is at most, α (2 + α), goes into the journal with every plan.

Below: `Hare`, which chooses between timetable and ranking; the guarantee, the timetable, and the ranking by middles.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, floor, inf, isfinite
from typing import NamedTuple

import numpy as np

from poise.scheduler.model.action import Remark
from poise.scheduler.model.arithmetic import Floats
from poise.scheduler.model.cluster import NodeGpus
from poise.scheduler.model.job import Status
from poise.scheduler.model.job_table import Snapshot
from poise.scheduler.model.micro_batches import Mix
from poise.scheduler.model.plan import Claim, Grain, Plan
from poise.scheduler.policies import papers
from poise.scheduler.policies.hare.list_schedule import GpuPool, RoundWork, Schedule, middled, schedule
from poise.scheduler.policies.hare.rank_sharing import LEASES_ONLY, Dealer, DealerMemory, live_gpus
from poise.scheduler.policies.listing import (
    Capability,
    Family,
    Listing,
    Parameter,
    PolicyProperty,
    Traits,
    number,
    positive,
)


@dataclass(frozen=True, slots=True)
class Hare:
    """The planner: a timetable where that can be made, else GPUs by rank."""

    dealer: Dealer

    def start(self) -> "HareMemory":
        """The memory before the first plan."""
        return Timetable(), self.dealer.start()

    def plan(self, snapshot: Snapshot, memory: "HareMemory") -> tuple[Plan, "HareMemory"]:
        """Keep to the timetable, made anew where it is stale; or deal."""
        table, deal = memory
        remark = ""
        if not has_only_long_tasks(snapshot, self.dealer.long):
            known = deal.ranking
            plan, deal = self.dealer.plan(snapshot, deal)
            table, remark = Timetable(), "" if deal.ranking is known else deal.ranking.remark
        else:
            if is_stale(table, snapshot):
                table, schedule, jobs = made(snapshot, table)
                kinds = [kind for kind, gpus in enumerate(live_gpus(snapshot)) if gpus]
                remark = _said(jobs, kinds, f"{schedule.value:g} s planned, none below {schedule.bound:g} s is possible")
            plan, table = kept_to(snapshot, table)
        return replace(plan, notes=(Remark(remark),)) if remark else plan, (table, deal)


def hare(*, lease: float = 360.0, long: float = 30.0, recompute: float = 1800.0) -> Hare:
    """Least middle completion time first, on any mix of GPUs."""
    return Hare(Dealer(Middles(recompute), lease, long))


LISTING = Listing(
    "hare",
    Family.MARKET,
    "least sum of weighted completion times: tasks of jobs whose lengths are known, by middle completion time",
    "Chen et al., Hare, HPDC'22",
    (PolicyProperty.BOUND,),
    hare,
    (
        Parameter("lease", "360", "seconds after which GPUs are dealt out anew", positive),
        Parameter("long", "30", "tasks that take at least this many seconds are given GPUs one by one", positive),
        Parameter("recompute", "1800", "least seconds between two relaxations; newcomers are fitted in until then", number),
    ),
    can=frozenset({Capability.LISTS_TASKS}),
    live=LEASES_ONLY,
    traits=Traits(
        optimises="sum of weighted completion times, with lengths known",
        fairness="none: long jobs may wait long",
        heterogeneity="aware; one job may use several types at once",
        gang="needs none where rounds divide into micro-batches; whole gangs otherwise",
        elasticity="any number of GPUs up to the micro-batches of a round",
        verified="the worked example; within the bound of the optimum on 500 instances, 1.02 times it on average",
    ),
    url=papers.HARE,
)


@dataclass(frozen=True, slots=True)
class Guarantee:
    """How far Hare's list may be from the optimum: Σ w C <= α (2 + α) times the least possible.

    α = max over jobs of T_max / T_min over the types that the job can use, for compute and for synchronisation; 1 if all
    GPUs are alike to each job.
    """

    alpha: float

    @property
    def factor(self) -> float:
        """How many times the optimum the list's Σ w C is at most."""
        return self.alpha * (2.0 + self.alpha)


def guarantee(jobs: Iterable[RoundWork], kinds: Sequence[int]) -> Guarantee:
    """The guarantee for these jobs on GPUs of these types.

    For each job the largest of three ratios: compute, sync where there is any, and both together. The third is never the
    largest, unless some types need no synchronisation and others do.
    """
    alpha = 1.0
    for job in jobs:
        able = [kind for kind in sorted(set(kinds)) if job.seconds[kind] > 0]
        if able:
            compute, sync = [job.seconds[kind] for kind in able], [job.sync[kind] for kind in able]
            some = [each for each in sync if each > 0] or [1.0]
            both = (max(compute) + max(sync)) / (min(compute) + min(sync))
            alpha = max(alpha, max(compute) / min(compute), max(some) / min(some), both)
    return Guarantee(alpha)


MOST_TASKS = 20_000
"""Tasks up to which a timetable is made; beyond, jobs are only ranked."""
ALMOST = 1e-6
"""Part of a round that may be missing for rounding."""
AT_ONCE = 1e-9
"""Part of a time that may be missing, likewise."""


class TimetableEntry(NamedTuple):
    """When a task starts and on which node; rounds are counted from the job's first one."""

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
    """Hare's list as a timetable: which task starts when on which node.

    GPUs of one node are alike, so a task is given a node. It starts once its time has come, its round is ready and a GPU of
    its node is free; if loading a model or a wrong estimate makes something late, what follows on that node is late too.

    entries      by their start;  at: those before it are gone or `late`

    rows, gpus   the jobs that were there when it was last looked at, and the number of GPUs that it was made for
    begun        by job the round of which tasks were started last
    """

    entries: tuple[TimetableEntry, ...] = ()
    at: int = 0
    late: tuple[TimetableEntry, ...] = ()
    started: tuple[Started, ...] = ()
    rows: frozenset[int] = frozenset()
    gpus: int = 0
    begun: Mapping[int, int] = field(default_factory=dict)


HareMemory = tuple[Timetable, DealerMemory]


def has_only_long_tasks(snapshot: Snapshot, long: float) -> bool:
    """Whether all active jobs are dealt with task by task, their lengths are known, and the tasks are not too many."""
    tasks = 0.0
    for row, left in zip(snapshot.active, snapshot.steps_left.tolist(), strict=True):
        divided = snapshot.estimate(row).tasks
        if divided is None or divided.best < long:
            return False
        tasks += (left + 1.0) * divided.count
    return tasks <= MOST_TASKS


def is_stale(table: Timetable, snapshot: Snapshot) -> bool:
    """Whether jobs have come, or gone with tasks left, GPUs have come or gone, or a round was lost. Ends are expected."""
    if snapshot.gpus != table.gpus or not table.rows.issuperset(snapshot.active):
        return True
    gone = table.rows.difference(snapshot.active)
    if gone and any(entry.row in gone for entry in (*table.late, *table.entries[table.at :])):
        return True
    status = snapshot.columns.status
    waiting = (row for row in snapshot.active if status[row] == Status.WAITING)
    return any(table.begun.get(row) == _round(snapshot, row) for row in waiting)


def made(snapshot: Snapshot, table: Timetable) -> tuple[Timetable, Schedule, list[RoundWork]]:
    """A new timetable, for what is left of everything; and how good it is, in seconds from now."""
    floor, now = snapshot.placement, snapshot.now
    started = tuple(each for each in table.started if each.end > now and snapshot.columns.gpus[each.row])
    held = [0] * len(floor.masks)
    for holding in floor.holdings.values():
        for node, mask in holding:
            held[node] += mask.bit_count()
    nodes, free = list[int](), list[float]()  # by GPU its node, and in how many seconds it will be free
    for node, mask in enumerate(floor.masks):
        ends = sorted((each.end - now for each in started if each.node == node), reverse=True)[: held[node]]
        ends += [0.0] * (mask.bit_count() + held[node] - len(ends))
        nodes += [node] * len(ends)
        free += ends
    rounds = {row: _round(snapshot, row) for row in snapshot.active}
    gpus = GpuPool(tuple(floor.topology.type_of[node] for node in nodes), tuple(free))
    found = {row: _under_way(snapshot, row, started) for row in snapshot.active}
    able = [row for row, job in found.items() if job.is_computable(gpus.kinds)]
    jobs = [found[row] for row in able]
    plan = schedule(jobs, gpus) if jobs else Schedule((), (), 0.0, 0.0)
    entries = [
        TimetableEntry(now + each.start, row := able[each.job], rounds[row] + each.round, nodes[each.gpu])
        for each in plan.placed
    ]
    entries.sort(key=lambda entry: entry.start)  # of those that start at once, as they were listed
    begun = {row: at for row, at in rounds.items() if snapshot.columns.status[row] == Status.RUNNING}
    new = Timetable(tuple(entries), 0, (), started, frozenset(snapshot.active), snapshot.gpus, begun)
    return new, plan, jobs


def _round(snapshot: Snapshot, row: int) -> int:
    """The round that a job is at. One that has run under leases may begin in the middle of a step; rounds are whole."""
    return floor(snapshot.columns.done_before(row) + ALMOST)


def _under_way(snapshot: Snapshot, row: int, started: Sequence[Started]) -> RoundWork:
    """What is left of a job, which perhaps is in the middle of a round."""
    columns = snapshot.columns
    job = work(snapshot, row, max(1, ceil(columns.steps[row] - columns.done_before(row) - ALMOST)))
    if columns.status[row] != Status.RUNNING:
        return job
    ends = [each.end - snapshot.now for each in started if each.row == row]
    until = max(ends) + max(job.sync) if ends else 0.0  # how far a synchronisation has come is not known
    return replace(job, left=columns.ready[row], until=until)


def work(snapshot: Snapshot, row: int, rounds: int) -> RoundWork:
    """The next `rounds` rounds of a job; a gang is as many tasks."""
    columns, estimate = snapshot.columns, snapshot.estimate(row)
    name, weight, tasks = columns.ids[row], columns.weight[row], estimate.tasks
    if tasks is not None:
        return RoundWork(name, weight, 0.0, rounds, tasks.count, tasks.seconds, tuple(near for near, _, _ in tasks.sync))
    seconds = tuple(1.0 / packed if packed > 0 else 0.0 for packed, _, _ in estimate.rates)
    return RoundWork(name, weight, 0.0, rounds, columns.gang[row], seconds, (0.0,) * len(seconds))


def kept_to(snapshot: Snapshot, table: Timetable) -> tuple[Plan, Timetable]:
    """Start what is due, and wake up for what is next."""
    soon = snapshot.now + AT_ONCE * max(1.0, abs(snapshot.now))
    at = table.at
    while at < len(table.entries) and table.entries[at].start <= soon:
        at += 1
    free, ready = snapshot.placement.free(), dict[int, int]()
    claims, late = list[Claim](), list[TimetableEntry]()
    started, begun = [each for each in table.started if each.end > snapshot.now], dict(table.begun)
    for entry in (*table.late, *table.entries[table.at : at]):
        # A task starts if its round is ready and its node has a GPU for it; else it is late.
        row, tasks = entry.row, snapshot.estimate(entry.row).tasks
        is_ready = ready.setdefault(row, snapshot.columns.ready[row]) and _round(snapshot, row) == entry.round
        if not (free[entry.node] and is_ready) or tasks is None:
            late.append(entry)
            continue
        ready[row] -= 1
        free[entry.node] -= 1
        seconds = tasks.seconds[snapshot.placement.topology.type_of[entry.node]]
        started.append(Started(snapshot.now + seconds, entry.node, row))
        begun[row] = entry.round
        claims.append(Claim(row, site=(NodeGpus(entry.node, 1),), grain=Grain.TASK))
    wake = table.entries[at].start if at < len(table.entries) else inf
    kept = Timetable(table.entries, at, tuple(late), tuple(started), frozenset(snapshot.active), table.gpus, begun)
    return Plan.changing(tuple(claims), wake=wake), kept


CHUNKS = 4
"""Parts that the rounds of a job are taken in where only a rank is wanted; more would cost more and change little."""


class Middle(NamedTuple):
    """When half of what a job had left would be done, and how much that was for its weight."""

    time: float
    ratio: float


LAST = Middle(inf, inf)
"""The middle of a job of unknown length."""


@dataclass(frozen=True, slots=True)
class RemainingWork:
    """What the relaxation said, by row; when, and for which GPUs. `remark` is for the journal, once."""

    middles: Mapping[int, Middle] = field(default_factory=dict)
    since: float = -inf
    gpus: Mix = ()
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Middles:
    """Least middle completion time first."""

    recompute: float

    def start(self) -> RemainingWork:
        """The memory before the first plan."""
        return RemainingWork()

    def values(self, snapshot: Snapshot, memory: RemainingWork) -> tuple[Floats, RemainingWork]:
        """The middle of every active job."""
        gpus = live_gpus(snapshot)
        has_newcomers = any(row not in memory.middles for row in snapshot.active)
        if (has_newcomers or gpus != memory.gpus) and snapshot.now >= memory.since + self.recompute:
            memory = _planned(snapshot, gpus)
        elif has_newcomers:
            memory = _joined(snapshot, memory)
        return np.array([memory.middles[row].time for row in snapshot.active]), memory


def _planned(snapshot: Snapshot, gpus: Mix) -> RemainingWork:
    """Middles by the relaxation of all that is left."""
    left = zip(snapshot.active, snapshot.steps_left.tolist(), strict=True)
    kinds = tuple(kind for kind, count in enumerate(gpus) for _ in range(count))
    known = {
        row: job for row, steps in left if isfinite(steps) and (job := _rest(snapshot, row, steps)).is_computable(kinds)
    }
    middles = dict.fromkeys(snapshot.active, LAST)
    if not known:
        return RemainingWork(middles, snapshot.now, gpus)
    jobs = list(known.values())
    found = middled(jobs, GpuPool(kinds, (0.0,) * len(kinds)), CHUNKS)
    for place, (row, job) in enumerate(known.items()):
        half = found.first[place] + found.step[place] * (job.rounds - 1) / 2.0
        middles[row] = Middle(snapshot.now + half, _ratio(job))
    return RemainingWork(middles, snapshot.now, gpus, _said(jobs, kinds, f"none below {found.bound:g} s is possible"))


def _joined(snapshot: Snapshot, memory: RemainingWork) -> RemainingWork:
    """With jobs that came between two relaxations, and without those that have gone."""
    known = sorted((each.ratio, each.time) for each in memory.middles.values() if isfinite(each.time))
    ratios, moments = [ratio for ratio, _ in known], [moment for _, moment in known]
    middles: dict[int, Middle] = {}
    for row, steps in zip(snapshot.active, snapshot.steps_left.tolist(), strict=True):
        middle = memory.middles.get(row, LAST)
        if row not in memory.middles and isfinite(steps):
            ratio = _ratio(_rest(snapshot, row, steps))
            middle = Middle(float(np.interp(ratio, ratios, moments)) if known else snapshot.now, ratio)
        middles[row] = middle
    return replace(memory, middles=middles, remark="")


def _rest(snapshot: Snapshot, row: int, steps: float) -> RoundWork:
    """What is left of a job, in rounds that are all a little shorter if they are not whole ones."""
    rounds = max(1, ceil(steps - ALMOST))
    job, part = work(snapshot, row, rounds), max(steps, ALMOST) / rounds
    seconds, sync = (tuple(each * part for each in times) for times in (job.seconds, job.sync))
    return replace(job, seconds=seconds, sync=sync)


def _ratio(job: RoundWork) -> float:
    """GPU-seconds on its fastest type, for its weight."""
    return job.rounds * job.tasks * min(each for each in job.seconds if each > 0) / job.weight


def _said(jobs: Sequence[RoundWork], kinds: Sequence[int], what: str) -> str:
    limit = guarantee(jobs, kinds)
    return (
        f"hare: {len(jobs)} job{'s' * (len(jobs) != 1)}, sum of weighted completion times from now on: {what};"
        f" a list of tasks is at most {limit.factor:g} times the optimum (alpha {limit.alpha:g})"
    )
