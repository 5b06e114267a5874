"""Finish-time fairness (`finish-time`; Gavel, OSDI'20 §4.2, after Themis, NSDI'20).

    min_x max_m  w_m ρ_m        ρ_m = ( e_m + R_m / θ_m(x) ) / D_m        D_m = cum_m + R_m / iso_m
    e_m = now − submitted;   R_m steps left;   cum_m += steps done since the previous call / iso_m of the previous call
    as           min ρ   s.t.  θ_m >= (w_m R_m / D_m) / (ρ − w_m e_m / D_m),  x feasible

ρ_m is the time to finish here over that on an n-th of the cluster for the whole of the job's life; cum is the memory of how
that n-th changed as jobs came and went. Not a conic program but a few linear ones (`smallest_ratio`). Among the best
answers, that with the largest Σ_m θ_m / fast_m is taken.

Weights are ours: w is relative to the mean weight of the active jobs, so that equal weights change nothing; a larger
weight means a smaller ρ, that is a larger share. A job of unknown length counts as endless: R → ∞ gives ρ_m = iso_m / θ_m.
Jobs that can run nowhere do not count.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan

import numpy as np

from poise.scheduler.model.arithmetic import Floats, Ints
from poise.scheduler.model.workload import Allocation, Workload
from poise.scheduler.policies.listing import PolicyProperty, share_listing
from poise.scheduler.policies.promises import among_jobs
from poise.scheduler.policies.shares import (
    GAVEL,
    SECOND_AIM,
    SecondAim,
    allocation_of,
    inverse,
    isolated_throughput,
    market_of,
    second_aim,
)
from poise.scheduler.solve.max_min_level import smallest_ratio


@dataclass(frozen=True)
class FinishTimeLedger:
    """What was known of each job at the last call, by ascending row; ρ* of that call, nan before the first one.

    alone   cum: seconds that the work done so far would have taken on isolated shares
    """

    rows: Ints
    steps_left: Floats
    isolated: Floats
    alone: Floats
    rho: float

    @staticmethod
    def blank() -> "FinishTimeLedger":
        """Before any job has been seen."""
        none = np.empty(0)
        return FinishTimeLedger(np.empty(0, dtype=np.int64), none, none, none, nan)

    def joined(self, others: Sequence["FinishTimeLedger"]) -> "FinishTimeLedger":
        """One ledger of several that know different jobs."""
        ledgers = [self, *others]
        rows = np.concatenate([ledger.rows for ledger in ledgers])
        order = np.argsort(rows, kind="stable")
        steps_left, isolated, alone = (
            np.concatenate([getattr(ledger, name) for ledger in ledgers])[order]
            for name in ("steps_left", "isolated", "alone")
        )
        return FinishTimeLedger(
            rows[order], steps_left, isolated, alone, float(np.fmax.reduce([ledger.rho for ledger in ledgers]))
        )

    def alone_now(self, workload: Workload) -> Floats:
        """cum of each job of the workload; 0 for a new one."""
        if not len(self.rows):
            return np.zeros(workload.jobs)
        at = np.minimum(np.searchsorted(self.rows, workload.rows), len(self.rows) - 1)
        before, now = self.steps_left[at], workload.steps_left
        done = np.subtract(before, now, out=np.zeros(workload.jobs), where=np.isfinite(before) & np.isfinite(now))
        alone = self.alone[at] + np.maximum(done, 0.0) * inverse(self.isolated[at])
        return np.where(self.rows[at] == workload.rows, alone, 0.0)


@dataclass(frozen=True)
class FinishTime:
    """The job that is worst off against a cluster of its own as well off as can be. `objective` is ρ*."""

    then: SecondAim = SecondAim.THROUGHPUT

    def start(self) -> FinishTimeLedger:
        """Before any job has been seen."""
        return FinishTimeLedger.blank()

    def allocate(self, workload: Workload, memory: FinishTimeLedger) -> tuple[Allocation, FinishTimeLedger]:
        """Shares that minimise the largest ρ."""
        isolated, alone = isolated_throughput(workload), memory.alone_now(workload)
        # w R / D and w e / D; nothing of a job that has no step left or can run nowhere.
        weight = workload.weight / workload.weight.mean() if workload.jobs else workload.weight
        endless = np.isinf(workload.steps_left)
        steps = np.where(endless, 0.0, workload.steps_left)
        per_second = inverse(alone + steps * inverse(isolated))
        rate = weight * np.where(endless, isolated, np.where(isolated > 0, steps * per_second, 0.0))
        offset = weight * np.where(endless, 0.0, (workload.now - workload.submitted) * per_second)
        hint = None if np.isnan(memory.rho) else memory.rho
        ratio = smallest_ratio(market_of(workload), rate, offset, hint=hint, then=second_aim(workload, self.then))
        ledger = FinishTimeLedger(workload.rows, workload.steps_left, isolated, alone, ratio.rho)
        return allocation_of(workload, ratio.solution, ratio.rho), ledger


LISTING = share_listing(
    "finish-time",
    "the smallest worst ratio of finish time to finish time on an n-th of the cluster",
    f"Mahajan et al., Themis, NSDI'20; as a program: {GAVEL} §4.2",
    (PolicyProperty.WORK_CONSERVING, PolicyProperty.SHARING_INCENTIVE, PolicyProperty.PARETO, PolicyProperty.NO_STARVATION),
    FinishTime,
    (SECOND_AIM,),
    promise=among_jobs,
    plain={"then": SecondAim.NOTHING},
    optimises="the worst finish-time ratio",
    fairness="max-min over finish time against an n-th of the cluster",
    verified="the worked examples, to 1e-5; the numbers of Gavel's code on its traces, within 5 %",
)
