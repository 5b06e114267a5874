"""Hare with lengths known (`hare`; HPDC'22, ALGORITHMS §5.2): least Σ w_n C_n, of the jobs that are there.

The relaxation gives every round of every job a middle completion time H:

    all tasks long    the list algorithm to the letter: a timetable that says of every task when it starts on which node
    otherwise         GPUs are dealt out by rank (`dealing.py`), short tasks under leases. There the unit of work is a job:
                      its rank is the mean H of the rounds that it had left when it was planned

Both are made anew when jobs arrive or nodes come and go: the timetable at once, and also when a job is gone before its end
or has lost a round; the relaxation at most every `recompute` seconds, and until then a newcomer has the rank of those that
have as much work for their weight. A gang is taken for as many tasks; a job of unknown length comes last. What no schedule
can be below, and how many times the optimum a list is at most, α (2 + α), goes into the journal with every plan.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf, isfinite
from typing import NamedTuple

import numpy as np

from poise.model.action import Remark
from poise.model.arrays import Floats
from poise.model.columns import Snapshot
from poise.model.plan import Plan
from poise.model.tasks import Mix
from poise.policies.hare.bound import guarantee
from poise.policies.hare.dealing import Deal, Dealer, live_gpus
from poise.policies.hare.schedule import Gpus, Work, middled
from poise.policies.hare.timetable import ALMOST, Timetable, has_only_long_tasks, is_stale, kept_to, made, work

CHUNKS = 4
"""Parts that the rounds of a job are taken in where only an order is wanted; more would cost more and change little."""


class Middle(NamedTuple):
    """The moment by which half of what a job had left would be done, and how much that was for its weight."""

    moment: float
    ratio: float


LAST = Middle(inf, inf)
"""Of a job whose length nobody knows."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """What the relaxation said, by row; when, and for which GPUs. `remark` is to be told when the outlook is new."""

    middles: Mapping[int, Middle] = field(default_factory=dict)
    since: float = -inf
    gpus: Mix = ()
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Middles:
    """Least middle completion time first."""

    recompute: float

    def start(self) -> Outlook:
        """Nothing is planned."""
        return Outlook()

    def values(self, snapshot: Snapshot, memory: Outlook) -> tuple[Floats, Outlook]:
        """The middle of every active job."""
        gpus = live_gpus(snapshot)
        has_newcomers = any(row not in memory.middles for row in snapshot.active)
        if (has_newcomers or gpus != memory.gpus) and snapshot.now >= memory.since + self.recompute:
            memory = _planned(snapshot, gpus)
        elif has_newcomers:
            memory = _joined(snapshot, memory)
        return np.array([memory.middles[row].moment for row in snapshot.active]), memory


def _planned(snapshot: Snapshot, gpus: Mix) -> Outlook:
    """By the relaxation of all that is left."""
    left = zip(snapshot.active, snapshot.steps_left.tolist(), strict=True)
    kinds = tuple(kind for kind, count in enumerate(gpus) for _ in range(count))
    known = {
        row: job for row, steps in left if isfinite(steps) and (job := _rest(snapshot, row, steps)).is_computable(kinds)
    }
    middles = dict.fromkeys(snapshot.active, LAST)
    if not known:
        return Outlook(middles, snapshot.now, gpus)
    jobs = list(known.values())
    found = middled(jobs, Gpus(kinds, (0.0,) * len(kinds)), CHUNKS)
    for place, (row, job) in enumerate(known.items()):
        half = found.first[place] + found.step[place] * (job.rounds - 1) / 2.0
        middles[row] = Middle(snapshot.now + half, _ratio(job))
    return Outlook(middles, snapshot.now, gpus, _said(jobs, kinds, f"none below {found.bound:g} s is possible"))


def _joined(snapshot: Snapshot, memory: Outlook) -> Outlook:
    """With newcomers between two relaxations, and without those who have gone."""
    known = sorted((each.ratio, each.moment) for each in memory.middles.values() if isfinite(each.moment))
    ratios, moments = [ratio for ratio, _ in known], [moment for _, moment in known]
    middles: dict[int, Middle] = {}
    for row, steps in zip(snapshot.active, snapshot.steps_left.tolist(), strict=True):
        middle = memory.middles.get(row, LAST)
        if row not in memory.middles and isfinite(steps):
            ratio = _ratio(_rest(snapshot, row, steps))
            middle = Middle(float(np.interp(ratio, ratios, moments)) if known else snapshot.now, ratio)
        middles[row] = middle
    return replace(memory, middles=middles, remark="")


def _rest(snapshot: Snapshot, row: int, steps: float) -> Work:
    """What is left of a job, in rounds that are all a little shorter if they are not whole ones."""
    rounds = max(1, ceil(steps - ALMOST))
    job, part = work(snapshot, row, rounds), max(steps, ALMOST) / rounds
    seconds, sync = (tuple(each * part for each in times) for times in (job.seconds, job.sync))
    return replace(job, seconds=seconds, sync=sync)


def _ratio(job: Work) -> float:
    """GPU-seconds on its fastest type, for its weight."""
    return job.rounds * job.tasks * min(each for each in job.seconds if each > 0) / job.weight


def _said(jobs: Sequence[Work], kinds: Sequence[int], what: str) -> str:
    limit = guarantee(jobs, kinds)
    return (
        f"hare: {len(jobs)} job{'s' * (len(jobs) != 1)}, sum of weighted completion times from now on: {what};"
        f" a list of tasks is at most {limit.factor:g} times the optimum (alpha {limit.alpha:g})"
    )


@dataclass(frozen=True, slots=True)
class Hare:
    """The planner: a timetable where that can be made, else GPUs by rank."""

    dealer: Dealer

    def start(self) -> tuple[Timetable, Deal]:
        """Nothing is planned."""
        return Timetable(), self.dealer.start()

    def plan(self, snapshot: Snapshot, memory: tuple[Timetable, Deal]) -> tuple[Plan, tuple[Timetable, Deal]]:
        """Keep to the timetable, made anew where it is stale; or deal."""
        table, deal = memory
        if not has_only_long_tasks(snapshot, self.dealer.long):
            known = deal.ranking
            plan, deal = self.dealer.plan(snapshot, deal)
            return _remarking(plan, "" if deal.ranking is known else deal.ranking.remark), (Timetable(), deal)
        remark = ""
        if is_stale(table, snapshot):
            table, schedule, jobs = made(snapshot, table)
            kinds = [kind for kind, gpus in enumerate(live_gpus(snapshot)) if gpus]
            remark = _said(jobs, kinds, f"{schedule.value:g} s planned, none below {schedule.bound:g} s is possible")
        plan, table = kept_to(snapshot, table)
        return _remarking(plan, remark), (table, deal)


def _remarking(plan: Plan, remark: str) -> Plan:
    """The plan, with a remark if there is one."""
    return replace(plan, notes=(Remark(remark),)) if remark else plan


def hare(*, lease: float = 360.0, long: float = 30.0, recompute: float = 1800.0) -> Hare:
    """Least middle completion time first, on any mix of GPUs."""
    return Hare(Dealer(Middles(recompute), lease, long))
