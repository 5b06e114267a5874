"""Shortest job first, each on its fastest free GPU type (`sjf`; Gavel, OSDI'20 §4.2).

R_m steps left, throughput T_mj of the gang on type j. Gavel's problem is

    min_x min_m  R_m / θ_m(x)

taken lexicographically: the job with the least R_m / T_mj over types j that still hold its gang gets x_mj = 1 there; repeat
with what is left. A gang that fits nowhere is passed over. Jobs of unknown length come last, by arrival; so do ties.
Running jobs have no privilege. O(n log n): as GPUs go, a job's time can only rise, so each job waits in a heap at the best
time it was last seen to have, and is looked at again only when it comes up.
"""

import heapq
from dataclasses import dataclass

import numpy as np

from poise.model.arrays import Floats, Ints
from poise.model.workload import Allocation, Workload

_Offer = tuple[float, int, int]
"""Seconds to the end, the job, the type on which it takes so long."""


@dataclass(frozen=True, slots=True)
class Sjf:
    """The least time to the end first."""

    def start(self) -> None:
        """There is nothing to remember."""

    def allocate(self, workload: Workload, memory: None) -> tuple[Allocation, None]:
        """Share 1 on a packed column for who is to run now. The objective is the time of the first chosen, in seconds."""
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


def _offers(workload: Workload, jobs: Ints, free: Floats) -> list[_Offer]:
    """For each of these jobs the fastest type that holds its gang, and the time there; nothing if none does."""
    speed = np.where(free >= workload.gang[jobs, None], workload.speed[jobs, : workload.types], 0.0)
    kind = speed.argmax(axis=1)
    fastest = speed[np.arange(len(jobs)), kind]
    fits = fastest > 0
    seconds = workload.steps_left[jobs[fits]] / fastest[fits]
    return list(zip(seconds.tolist(), jobs[fits].tolist(), kind[fits].tolist(), strict=True))
