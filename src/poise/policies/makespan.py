"""Minimum makespan (`makespan`; Gavel, OSDI'20 §4.2).

    min_x max_m  R_m / θ_m(x)                          R_m steps left
    as           max λ   s.t.  θ_m >= λ R_m,  x feasible;   makespan = 1 / λ

One linear program, exact. The optimum fixes only the jobs that end last; among the best answers, that with the largest
Σ_m θ_m / fast_m is taken, so that the others do not wait for them (ALGORITHMS §2.2 c).

A job of unknown length is taken to be as long as the longest known one: as long, that is, on an isolated share. If no length
is known, all jobs are alike, and the answer is that of max-min over iso. Jobs that can run nowhere do not count.
"""

from dataclasses import dataclass
from math import inf

import numpy as np

from poise.model.arrays import Floats
from poise.model.workload import Allocation, Workload
from poise.policies.shares import Given, Second, allocation_of, inverse, isolated_throughput, market_of, second_aim
from poise.solve.levels import highest


@dataclass(frozen=True)
class Makespan:
    """All jobs done as early as can be. `objective` is the makespan in seconds from now; nan if no length is known."""

    then: Second = Second.THROUGHPUT

    def start(self) -> None:
        """It remembers nothing."""

    def allocate(self, workload: Workload, memory: None) -> tuple[Allocation, None]:
        """Shares that minimise the makespan."""
        steps, remarks = _lengths(workload)
        solution = highest(market_of(workload), steps, then=second_aim(workload, self.then))
        known = bool(np.isfinite(workload.steps_left).any())
        objective = 1.0 / solution.level if known and solution.level > 0 else float("nan")
        return allocation_of(workload, solution, objective, Given(remarks=remarks)), memory


def _lengths(workload: Workload) -> tuple[Floats, tuple[str, ...]]:
    """R, with a guess where it is unknown."""
    unknown = workload.steps_left == inf
    if not unknown.any():
        return workload.steps_left, ()
    isolated = isolated_throughput(workload)
    seconds = np.where(unknown, 0.0, workload.steps_left) * inverse(isolated)
    longest = float(seconds.max()) or 1.0
    remark = (
        f"makespan: length of {int(unknown.sum())} of {workload.jobs} jobs is unknown; taken as that of the longest known"
    )
    return np.where(unknown, longest * isolated, workload.steps_left), (remark,)
