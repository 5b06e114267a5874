"""Least total completion time by matching jobs to places in the machines' queues (`allox`; AlloX, EuroSys'20).

p_ij seconds that waiting job i needs on machine j, r_j seconds until j is believed free (0 if it is). In the k-th place from
the end of j's queue a job is in the way of itself and of the k − 1 behind it, and waits r_j like all of them, so

    Σ_i C_i = Σ_i (k_i · p_{i,j(i)} + r_{j(i)}),     at most one job in each place (j, k)

is a matching. Machines of a type are alike but for r, so a type is a ladder, its places k are the rungs and its r_j the
charges (`scheduler/solve/matching.py`). Only the first job of each free machine starts; running jobs are never stopped;
all else is solved anew at the next event. For jobs of one gang size and α = 1 the plan is exact: no schedule without
preemption has a smaller sum, if what is believed is true and no other job comes.

α   only the first max(⌈α·|Q|⌉, |M|) of the waiting jobs Q are looked at, by arrival, M being the free machines: a smaller α
    lets the old pass the short

Gangs (ours; a heuristic, exact only if all are of one size). A machine is g GPUs of one type: sorted by the time at which
they are free, the first g of a type, the next g, and so on. One matching for each size, the largest first; what it plans is
booked, to the end of the queues, before the next size is looked at, so that no small job that starts now puts off a large
one that waits. A GPU kept for a gang which still lacks others goes meanwhile to jobs that end before, and before their own
planned end.

Refused, with a remark: a gang for which no type that it runs on has the GPUs alive. Jobs of unknown length cannot be
matched; they get what is not booked, last, by arrival; and what such a job holds is never counted on.
"""

from dataclasses import dataclass
from math import ceil, inf

import numpy as np

from poise.scheduler.model.arithmetic import Floats, Ints
from poise.scheduler.model.errors import RequestError
from poise.scheduler.model.workload import Allocation, Leftover, Workload
from poise.scheduler.policies import papers
from poise.scheduler.policies.listing import Capability, Parameter, PolicyProperty, fraction, share_listing
from poise.scheduler.policies.shares import Memoryless
from poise.scheduler.solve.matching import Matching, match


@dataclass(frozen=True, slots=True)
class AlloX(Memoryless):
    """Least total completion time, never preempting. 0 < alpha <= 1."""

    alpha: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.alpha <= 1:
            raise RequestError(f"alpha is {self.alpha:g}; it must be above 0 and at most 1")

    def allocate(self, workload: Workload, memory: None) -> tuple[Allocation, None]:
        """Share 1 for jobs that run now: running ones on the column that they hold, others on packed columns.

        The objective is Σ over the waiting jobs looked at of the seconds from now to their planned end.
        """
        plan = _Plan(workload)
        waiting = np.flatnonzero(workload.held < 0)
        able = np.isfinite(plan.seconds[waiting]).any(axis=1)
        known = waiting[able & np.isfinite(workload.steps_left[waiting])]
        for gang in np.unique(workload.gang[known])[::-1]:
            plan.book(known[workload.gang[known] == gang], int(gang), self.alpha)
        plan.fill_gaps()
        unknown = waiting[able & np.isinf(workload.steps_left[waiting])]
        plan.give_rest(unknown)
        remarks = (
            *_remark("of unknown length and served last", workload.rows[unknown]),
            *_remark("refused, for no GPU type that they run on has enough GPUs alive", workload.rows[waiting[~able]]),
        )
        return Allocation(plan.share, objective=plan.total, leftover=Leftover.IDLE, remarks=remarks), memory


LISTING = share_listing(
    "allox",
    "least average completion time by matching jobs to machines and positions",
    "Le et al., AlloX, EuroSys'20",
    (PolicyProperty.NO_PREEMPTION,),
    AlloX,
    (Parameter("alpha", "1", "part of the waiting jobs that is looked at, by arrival", fraction),),
    can=frozenset({Capability.SINGLE_GPUS}),
    optimises="average completion time, by matching",
    fairness="none, or arrival order by `alpha`",
    heterogeneity="chooses types by processing time and position",
    gang="whole; several GPUs count as one machine",
    verified="the worked matrix, exactly; the matching against brute force",
    url=papers.ALLOX,
)


def _remark(what: str, rows: Ints) -> tuple[str, ...]:
    return (f"jobs {what}: rows {', '.join(map(str, rows.tolist()))}",) if len(rows) else ()


class _Plan:
    """What is booked so far.

    share     as in the answer
    seconds   (jobs, types): to the end, if started now; inf if impossible; of jobs of unknown length only the ratios count
    free      (types,): GPUs that are free and not booked
    busy      for each type, in how many seconds each other GPU is free, rising; inf if unknown
    ends      planned end of each job that is booked but does not start now, in seconds from now
    gaps      (type, GPUs, seconds): GPUs that are free, but kept for a gang that starts in this many seconds
    """

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.total = 0.0
        self.ends: dict[int, float] = {}
        self.gaps: list[tuple[int, int, float]] = []
        self.share = np.zeros_like(workload.speed)
        # Unknown lengths count one step, for the ratios; a gang for which too few GPUs are alive cannot run.
        speeds = workload.speed[:, : workload.types]
        able = (speeds > 0) & (workload.gang[:, None] <= workload.gpus)
        steps = np.where(np.isinf(workload.steps_left), 1.0, workload.steps_left)
        self.seconds = np.full(speeds.shape, inf)
        np.divide(steps[:, None], speeds, out=self.seconds, where=able)
        self.free = workload.gpus.astype(np.int64)
        running = np.flatnonzero(workload.held >= 0)
        column, gang = workload.held[running], workload.gang[running].astype(np.int64)
        speed, left = workload.speed[running, column], workload.steps_left[running]
        end = np.divide(left, speed, out=np.full(len(running), inf), where=speed > 0)
        kind = workload.column_type[column]
        self.share[running, column] = 1.0
        np.subtract.at(self.free, kind, gang)
        self.free = np.maximum(self.free, 0)
        of_type = (kind == each for each in range(workload.types))
        self.busy: list[Floats] = [np.sort(np.repeat(end[here], gang[here])) for here in of_type]

    def book(self, queue: Ints, gang: int, alpha: float) -> None:
        """Match the waiting jobs of one gang size, start those that come first on free machines, and book the others."""
        # A machine is `gang` GPUs: when the first of them are all free, when the next; those that are free now come first.
        gpus = (np.append(np.zeros(self.free[kind]), self.busy[kind]) for kind in range(self.workload.types))
        machines: list[Floats] = [each[gang - 1 :: gang] for each in gpus]
        open_to = np.array([np.isfinite(release).any() for release in machines])
        most = max(ceil(alpha * len(queue)), int((self.free // gang).sum()))
        queue = queue[np.isfinite(self.seconds[queue][:, open_to]).any(axis=1)][:most]
        if not len(queue):
            return
        matching = match(self.seconds[queue], machines)
        self.total += matching.cost
        for kind, release in enumerate(machines):
            self._settle(kind, gang, release, _lines(matching, kind, queue, self.seconds[queue, kind]))

    def fill_gaps(self) -> None:
        """Start jobs, the shortest first, where they end before a gang needs the GPUs, and before their own planned end."""
        for kind, left, seconds in self.gaps:
            for job in sorted(self.ends, key=lambda job: (self.seconds[job, kind], job)):
                gang = int(self.workload.gang[job])
                if gang <= left and self.seconds[job, kind] <= min(seconds, self.ends[job]):
                    self.share[job, kind] = 1.0
                    left -= gang
                    del self.ends[job]

    def give_rest(self, queue: Ints) -> None:
        """Start jobs where nothing is booked, each on its fastest type, by arrival, passing over those that do not fit."""
        for job in queue.tolist():
            seconds = np.where(self.free >= self.workload.gang[job], self.seconds[job], inf)
            fastest = int(seconds.argmin())
            if seconds[fastest] < inf:
                self.share[job, fastest] = 1.0
                self.free[fastest] -= int(self.workload.gang[job])

    def _settle(self, kind: int, gang: int, release: Floats, lines: list[list[int]]) -> None:
        """Write down the queues of the first machines of a type: jobs that start, when jobs end, and GPUs that are busy."""
        free, taken = int(self.free[kind]), len(lines) * gang
        ends = []  # of the last job on each machine
        for start, line in zip(release, lines, strict=False):
            end = float(start)
            for job in line:
                end += self.seconds[job, kind]
                self.ends[job] = end
            ends.append(end)
        for machine, line in enumerate(lines):
            if (machine + 1) * gang <= free:
                self.share[line[0], kind] = 1.0
                del self.ends[line[0]]
            elif machine * gang < free:
                self.gaps.append((kind, free - machine * gang, float(release[machine])))
        self.free[kind] = max(0, free - taken)
        untouched = self.busy[kind][max(0, taken - free) :]
        self.busy[kind] = np.sort(np.append(untouched, np.repeat(ends, gang)))


def _lines(matching: Matching, kind: int, queue: Ints, seconds: Floats) -> list[list[int]]:
    """The queue of each machine of a type that has one, first to run first; machines in the order of their release.

    On every rung the machines that are free earliest are taken. Which job of a rung goes to which machine does not change
    the sum: the shortest go where they are first in line, so that as much as possible is done early.
    """
    lines: list[list[int]] = []
    for rung in np.unique(matching.rung[matching.ladder == kind])[::-1].tolist():
        here = np.flatnonzero((matching.ladder == kind) & (matching.rung == rung))
        jobs = queue[here[np.argsort(seconds[here], kind="stable")]].tolist()
        behind = min(len(lines), len(jobs))
        first = len(jobs) - behind
        for line, job in zip(lines, jobs[first:], strict=False):
            line.append(job)
        lines.extend([job] for job in jobs[:first])
    return lines
