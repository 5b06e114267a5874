"""Least total completion time by matching jobs to places in the machines' queues (`allox`; AlloX, EuroSys'20).

p_ij seconds that waiting job i needs on machine j, r_j seconds until j is believed free (0 if it is). In the k-th place from
the end of j's queue a job is in the way of itself and of the k − 1 behind it, and waits r_j like all of them, so

    Σ_i C_i = Σ_i (k_i · p_{i,j(i)} + r_{j(i)}),     at most one job in each place (j, k)

is a matching. Machines of a type are alike but for r, so a type is a ladder, its places k are the rungs and its r_j the
charges (`scheduler/solve/matching.py`). Only the first job of each free machine starts; running jobs are never stopped;
all else is
solved anew at the next event. For jobs of one gang size and α = 1 the plan is exact: no schedule without preemption has a
smaller sum, if what is believed is true and nobody else comes.

α   only the first max(⌈α·|Q|⌉, |M|) of the waiting jobs Q are looked at, by arrival, M being the free machines: a smaller α
    lets the old pass the short

Gangs (ours; a heuristic, exact only if all are of one size). A machine is g GPUs of one type: sorted by the time at which
they are free, the first g of a type, the next g, and so on. One matching for each size, the largest first; what it plans is
booked, to the end of the queues, before the next size is looked at, so that no small job that starts now puts off a large
one that waits. A GPU kept for a gang which still lacks others goes meanwhile to jobs that end before, and before their own
planned end.

Refused, with a remark: a gang for which no type that it runs on has the GPUs alive. Jobs of unknown length cannot be
matched; they get what nobody is booked on, last, by arrival; and what such a job holds is never counted on.
"""

from dataclasses import dataclass, field
from math import ceil, inf

import numpy as np

from poise.scheduler.model.arithmetic import Floats, Ints
from poise.scheduler.model.errors import RequestError
from poise.scheduler.model.workload import Allocation, Leftover, Workload
from poise.scheduler.policies.listing import Capability, Family, Listing, Parameter, PolicyClaim, Traits, fraction
from poise.scheduler.solve.matching import Matching, match


@dataclass(frozen=True, slots=True)
class AlloX:
    """Least total completion time, never preempting. 0 < alpha <= 1."""

    alpha: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.alpha <= 1:
            raise RequestError(f"alpha is {self.alpha:g}; it must be above 0 and at most 1")

    def start(self) -> None:
        """There is nothing to remember."""

    def allocate(self, workload: Workload, memory: None) -> tuple[Allocation, None]:
        """Share 1 for who is to run now: running jobs on the column that they hold, others on packed columns.

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


LISTING = Listing(
    "allox",
    Family.SHARE,
    "least average completion time by matching jobs to machines and positions",
    "Le et al., AlloX, EuroSys'20",
    (PolicyClaim.NO_PREEMPTION,),
    AlloX,
    (Parameter("alpha", "1", "part of the waiting jobs that is looked at, by arrival", fraction),),
    can=frozenset({Capability.SINGLE_GPUS}),
    traits=Traits(
        optimises="average completion time, by matching",
        fairness="none, or arrival order by `alpha`",
        heterogeneity="chooses types by processing time and position",
        gang="whole; several GPUs count as one machine",
        verified="the worked matrix, exactly; the matching against brute force",
    ),
)


def _remark(what: str, rows: Ints) -> tuple[str, ...]:
    return (f"jobs {what}: rows {', '.join(map(str, rows.tolist()))}",) if len(rows) else ()


@dataclass(frozen=True, slots=True)
class _Gap:
    """GPUs of a type that are free, but kept for a gang that starts in so many seconds."""

    kind: int
    gpus: int
    seconds: float


@dataclass
class _Plan:
    """What is booked so far.

    share     as in the answer
    seconds   (jobs, types): to the end, if started now; inf if impossible; of jobs of unknown length only the ratios count
    free      (types,): GPUs that are free and not booked
    busy      for each type, in how many seconds each other GPU is free, rising; inf if nobody knows
    ends      planned end of each job that is booked but does not start now, in seconds from now
    """

    workload: Workload
    total: float = 0.0
    share: Floats = field(init=False)
    seconds: Floats = field(init=False)
    free: Ints = field(init=False)
    busy: list[Floats] = field(init=False)
    ends: dict[int, float] = field(default_factory=dict)
    gaps: list[_Gap] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.share = np.zeros_like(self.workload.speed)
        self.seconds = _seconds(self.workload)
        self.free = self.workload.gpus.astype(np.int64)
        running = np.flatnonzero(self.workload.held >= 0)
        column, gang = self.workload.held[running], self.workload.gang[running].astype(np.int64)
        speed, left = self.workload.speed[running, column], self.workload.steps_left[running]
        end = np.divide(left, speed, out=np.full(len(running), inf), where=speed > 0)
        kind = self.workload.column_type[column]
        self.share[running, column] = 1.0
        np.subtract.at(self.free, kind, gang)
        self.free = np.maximum(self.free, 0)
        self.busy = [np.sort(np.repeat(end[kind == each], gang[kind == each])) for each in range(self.workload.types)]

    def book(self, queue: Ints, gang: int, alpha: float) -> None:
        """Match the waiting jobs of one gang size, start those that come first on free machines, and book the others."""
        machines = [self._machines(kind, gang) for kind in range(self.workload.types)]
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
        for gap in self.gaps:
            left = gap.gpus
            for job in sorted(self.ends, key=lambda job: (self.seconds[job, gap.kind], job)):
                gang = int(self.workload.gang[job])
                if gang <= left and self.seconds[job, gap.kind] <= min(gap.seconds, self.ends[job]):
                    self.share[job, gap.kind] = 1.0
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

    def _machines(self, kind: int, gang: int) -> Floats:
        """When the first `gang` GPUs are free, when the next; rising. Machines that are free come first."""
        gpus: Floats = np.append(np.zeros(self.free[kind]), self.busy[kind])
        return gpus[gang - 1 :: gang]

    def _settle(self, kind: int, gang: int, release: Floats, lines: list[list[int]]) -> None:
        """Write down the queues of the first machines of a type: who starts, who ends when, and what is busy until when."""
        free, taken = int(self.free[kind]), len(lines) * gang
        ends = [self._queue(kind, float(start), line) for start, line in zip(release, lines, strict=False)]
        for machine, line in enumerate(lines):
            if (machine + 1) * gang <= free:
                self.share[line[0], kind] = 1.0
                del self.ends[line[0]]
            elif machine * gang < free:
                self.gaps.append(_Gap(kind, free - machine * gang, float(release[machine])))
        self.free[kind] = max(0, free - taken)
        untouched = self.busy[kind][max(0, taken - free) :]
        self.busy[kind] = np.sort(np.append(untouched, np.repeat(ends, gang)))

    def _queue(self, kind: int, end: float, line: list[int]) -> float:
        """Note when each job of a machine's queue ends if the first starts at `end`; the end of the last."""
        for job in line:
            end += self.seconds[job, kind]
            self.ends[job] = end
        return end


def _seconds(workload: Workload) -> Floats:
    """Time to the end on each type; inf where a job cannot run or its gang does not fit. Unknown lengths count one step."""
    speed = workload.speed[:, : workload.types]
    able = (speed > 0) & (workload.gang[:, None] <= workload.gpus)
    left = np.where(np.isinf(workload.steps_left), 1.0, workload.steps_left)
    seconds: Floats = np.full(speed.shape, inf)
    np.divide(left[:, None], speed, out=seconds, where=able)
    return seconds


def _lines(matching: Matching, kind: int, queue: Ints, seconds: Floats) -> list[list[int]]:
    """The queue of each machine of a type that has one, first to run first; machines in the order of their release.

    On every rung the machines that are free earliest are taken. Who of a rung goes to which machine is all one for the sum:
    the shortest go where they are first in line, so that as much as possible is done early.
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
