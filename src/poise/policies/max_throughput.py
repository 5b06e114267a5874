"""Maximum total throughput (`max-throughput`; Gavel, OSDI'20 §4.2).

    max_x Σ_m c_m θ_m(x)          c_m = w_m g_m / prop_m (normalised)  or  1 (raw)

The authors add raw steps per second, so that jobs with many cheap steps starve all others; normalised, every job counts by
the GPU-time that its progress is worth. It promises no fairness in either form.
"""

from dataclasses import dataclass

from poise.model.arithmetic import dot
from poise.model.workload import Allocation, Workload
from poise.policies.shares import Count, allocation_of, market_of, nothing_for, worth
from poise.solve import engine
from poise.solve.problem import Problem


@dataclass(frozen=True)
class MaxThroughput:
    """The largest sum of throughputs. `objective` is that sum."""

    count: Count = Count.NORMALISED

    def start(self) -> None:
        """It remembers nothing."""

    def allocate(self, workload: Workload, memory: None) -> tuple[Allocation, None]:
        """Shares that maximise Σ c θ."""
        market, each = market_of(workload), worth(workload, self.count)
        if not (market.fastest > 0).any():
            return nothing_for(workload), memory
        solution = engine.maximise(Problem(market, value=each[:, None] * market.speed))
        return allocation_of(workload, solution, dot(each, solution.throughput)), memory
