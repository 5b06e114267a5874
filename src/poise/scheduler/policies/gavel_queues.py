"""Gavel's two queues, which know GPU types (OSDI'20 §4.2): `fifo-fastest` and `sjf`.

Both answer with shares of 1 or 0: they say themselves who runs now. T_mj is the throughput of job m on type j, N_j GPUs.
"""

import heapq
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from poise.scheduler.model.arithmetic import Floats, Ints, dot
from poise.scheduler.model.workload import Allocation, Leftover, Workload
from poise.scheduler.policies.listing import Parameter, PolicyProperty, choice, share_listing
from poise.scheduler.policies.shares import GAVEL, Memoryless


class Sticky(StrEnum):
    """Whether a running job keeps its GPU type."""

    ON = "on"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class FifoFastest(Memoryless):
    """In order of arrival, each job on its fastest free type; no job passes the head of the queue. O(n · types).

    Gavel's problem, with rank 0 for the earliest of n jobs,

        max_x  Σ_m (n − rank_m) · θ_m(x) / max_j T_mj

    is answered greedily, as Gavel's code does: in order of arrival, x_mj = 1 for the free type with the largest T_mj that
    holds the gang; stop at the first job that fits nowhere. A running job stays where it is, unless `sticky` is off: then
    all start from scratch, and a job may move to a faster type that has become free.
    """

    sticky: Sticky = Sticky.ON

    def allocate(self, workload: Workload, memory: None) -> tuple[Allocation, None]:
        """Share 1 for jobs that run now, on packed columns; a running job that stays has it on the column that it holds."""
        share = np.zeros_like(workload.speed)
        free = workload.gpus.copy()
        running = np.flatnonzero(workload.held >= 0) if self.sticky is Sticky.ON else np.empty(0, dtype=np.int64)
        share[running, workload.held[running]] = 1.0
        np.subtract.at(free, workload.column_type[workload.held[running]], workload.gang[running])
        remarks: tuple[str, ...] = ()
        for job in np.setdiff1d(np.arange(workload.jobs), running).tolist():
            gang, speeds = workload.gang[job], workload.speed[job, : workload.types]
            speed = np.where(free >= gang, speeds, 0.0)
            best = int(speed.argmax())
            if speed[best] <= 0:
                if not np.any((workload.gpus >= gang) & (speeds > 0)):  # nor would it fit if all GPUs were free
                    words = f"no GPU type that it runs on has {gang:g} GPUs alive"
                    remarks = (f"row {workload.rows[job]} holds up the queue: {words}",)
                break
            share[job, best] = 1.0
            free[best] -= gang
        fastest = workload.speed.max(axis=1, initial=0.0)
        reached = (workload.speed * share).sum(axis=1)
        relative = np.divide(reached, fastest, out=np.zeros_like(fastest), where=fastest > 0)
        objective = dot(relative, np.arange(workload.jobs, 0.0, -1.0))
        return Allocation(share, objective=objective, leftover=Leftover.IDLE, remarks=remarks), memory


FIFO_FASTEST = share_listing(
    "fifo-fastest",
    "arrival order, each job on its fastest free type; the head blocks",
    f"{GAVEL} §4.2",
    (PolicyProperty.NO_DURATIONS, PolicyProperty.IN_ORDER, PolicyProperty.NO_STARVATION),
    FifoFastest,
    (
        Parameter(
            "sticky",
            "on",
            "a running job stays where it is (on), or moves to what comes free",
            choice(Sticky),
        ),
    ),
    optimises="speed of the first jobs",
    fairness="order of arrival",
    heterogeneity="each job on its fastest free type",
    gang="whole; the head blocks",
    verified="the worked example; starts in order in random worlds",
)


_Offer = tuple[float, int, int]
"""Seconds to the end, the job, and the type on which it takes that long."""


@dataclass(frozen=True, slots=True)
class Sjf(Memoryless):
    """The least time to the end first, each job on its fastest free type.

    With R_m steps left, Gavel's problem min_x min_m R_m / θ_m(x) is taken lexicographically: the job with the least
    R_m / T_mj over types j that still hold its gang gets x_mj = 1 there; repeat with what is left. A gang that fits nowhere
    is passed over. Jobs of unknown length come last, by arrival; so do ties. Running jobs have no privilege.

    O(n log n): as GPUs go, a job's time can only rise, so each job waits in a heap at the best time it was last seen to
    have, and is looked at again only when it comes up.
    """

    def allocate(self, workload: Workload, memory: None) -> tuple[Allocation, None]:
        """Share 1 on a packed column for jobs that run now. The objective is the time of the first chosen, in seconds."""
        share = np.zeros_like(workload.speed)
        free = workload.gpus.copy()
        offers = _offers(workload, np.arange(workload.jobs), free)
        heapq.heapify(offers)
        soonest = offers[0][0] if offers else float("nan")
        while offers and free.max() > 0:
            _, job, kind = heapq.heappop(offers)
            if workload.gang[job] <= free[kind]:
                share[job, kind] = 1.0
                free[kind] -= workload.gang[job]
                continue
            for offer in _offers(workload, np.array([job]), free):
                heapq.heappush(offers, offer)
        return Allocation(share, objective=soonest), memory


SJF = share_listing(
    "sjf",
    "shortest job first, each on its fastest free type, preemptive",
    f"{GAVEL} §4.2",
    (PolicyProperty.WORK_CONSERVING,),
    Sjf,
    optimises="average completion time, with durations known",
    fairness="none: long jobs may starve",
    heterogeneity="each job on its fastest free type",
    gang="whole, shortest first",
    verified="no GPU idles that a gang could use, in random worlds",
)


def _offers(workload: Workload, jobs: Ints, free: Floats) -> list[_Offer]:
    """For each of these jobs the fastest type that holds its gang, and the time there; nothing if none does."""
    speed = np.where(free >= workload.gang[jobs, None], workload.speed[jobs, : workload.types], 0.0)
    kind = speed.argmax(axis=1)
    fastest = speed[np.arange(len(jobs)), kind]
    fits = fastest > 0
    seconds = workload.steps_left[jobs[fits]] / fastest[fits]
    return list(zip(seconds.tolist(), jobs[fits].tolist(), kind[fits].tolist(), strict=True))
