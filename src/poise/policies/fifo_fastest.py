"""First in, first out, each on its fastest free GPU type (`fifo-fastest`; Gavel's heterogeneity-aware FIFO, OSDI'20 §4.2).

n active jobs by arrival a_m, gang g_m, throughput T_mj on type j, N_j GPUs. Gavel's problem, with rank 0 for the earliest:

    max_x  Σ_m (n − rank_m) · θ_m(x) / max_j T_mj

is answered greedily, as Gavel's code does: in order of arrival, x_mj = 1 for the free type with the largest T_mj that holds
the gang; stop at the first job that fits nowhere. A running job stays where it is, unless `sticky` is off: then all start
from scratch, and a job may move to a faster type that has become free. O(n · types).
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from poise.model.arithmetic import dot
from poise.model.arrays import Floats
from poise.model.workload import Allocation, Leftover, Workload


class Sticky(StrEnum):
    """Whether a running job keeps its GPU type."""

    ON = "on"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class FifoFastest:
    """In order of arrival; nobody passes the head of the queue."""

    sticky: Sticky = Sticky.ON

    def start(self) -> None:
        """There is nothing to remember."""

    def allocate(self, workload: Workload, memory: None) -> tuple[Allocation, None]:
        """Share 1 for who is to run now, on packed columns; a running job that stays has it on the column that it holds."""
        share = np.zeros_like(workload.speed)
        free = workload.gpus.copy()
        running = np.flatnonzero(workload.held >= 0) if self.sticky is Sticky.ON else np.empty(0, dtype=np.int64)
        share[running, workload.held[running]] = 1.0
        np.subtract.at(free, workload.column_type[workload.held[running]], workload.gang[running])
        waiting = np.setdiff1d(np.arange(workload.jobs), running)
        blocked = _serve(workload, waiting.tolist(), free, share)
        remarks = () if blocked is None else _remarks(workload, blocked)
        return Allocation(share, objective=_worth(workload, share), leftover=Leftover.IDLE, remarks=remarks), memory


def _serve(workload: Workload, queue: list[int], free: Floats, share: Floats) -> int | None:
    """Fill in `share` and take from `free`, in the order of the queue. Who stopped it, if anybody did."""
    for job in queue:
        speed = np.where(free >= workload.gang[job], workload.speed[job, : workload.types], 0.0)
        fastest = int(speed.argmax())
        if speed[fastest] <= 0:
            return job
        share[job, fastest] = 1.0
        free[fastest] -= workload.gang[job]
    return None


def _worth(workload: Workload, share: Floats) -> float:
    """Gavel's objective."""
    fastest = workload.speed.max(axis=1, initial=0.0)
    reached = (workload.speed * share).sum(axis=1)
    relative = np.divide(reached, fastest, out=np.zeros_like(fastest), where=fastest > 0)
    return dot(relative, np.arange(workload.jobs, 0.0, -1.0))


def _remarks(workload: Workload, blocked: int) -> tuple[str, ...]:
    """A word if the head of the queue would not fit even if all GPUs were free."""
    gang = workload.gang[blocked]
    if np.any((workload.gpus >= gang) & (workload.speed[blocked, : workload.types] > 0)):
        return ()
    return (f"row {workload.rows[blocked]} holds up the queue: no GPU type that it runs on has {gang:g} GPUs alive",)
