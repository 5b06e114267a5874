"""Max-min fairness over effective throughputs (`max-min`; heterogeneity-aware LAS of Gavel, OSDI'20 §4.1).

    max_x min_m  g_m θ_m(x) / (w_m norm_m)                                 θ_m = Σ_j T_mj x_mj
    as           max λ   s.t.  θ_m >= λ w_m norm_m / g_m,  x feasible

norm is prop (the authors' code) or iso (the paper's X^equal). A larger weight is a larger share. The factor g makes equal
GPU-time, not equal wall time, the ideal.

The optimum fixes only the jobs that are worst off. What is left over goes (`then`)
    throughput      where it gives the most Σ_m θ_m / fast_m: every job counts by how near it is to its best speed, which is
                    what completion times depend on, whatever its gang (ALGORITHMS §2.2 c)
    water-filling   to the next worst off, and so on (§2.3): lexicographic max-min
    nothing         nowhere in particular
"""

from dataclasses import dataclass
from enum import StrEnum
from math import nan

import numpy as np

from poise.model.arrays import Floats
from poise.model.workload import Allocation, Workload
from poise.policies.shares import Norm, allocation_of, fastest, inverse, market_of, normaliser
from poise.solve.filling import Group, fill
from poise.solve.levels import highest
from poise.solve.problem import Start


class Then(StrEnum):
    """What becomes of what the worst-off jobs cannot use."""

    THROUGHPUT = "throughput"
    WATER_FILLING = "water-filling"
    NOTHING = "nothing"


@dataclass(frozen=True)
class MaxMin:
    """The worst-off job as well off as can be. `objective` is λ."""

    norm: Norm = Norm.PROPORTIONAL
    then: Then = Then.THROUGHPUT

    def start(self) -> Start | None:
        """There is nothing to start from."""
        return None

    def allocate(self, workload: Workload, memory: Start | None) -> tuple[Allocation, Start | None]:
        """Shares that maximise λ; the next ones are looked for from where these were found."""
        market = market_of(workload)
        demand = workload.weight * self._norm(workload) / workload.gang
        then = inverse(fastest(workload)) if self.then is Then.THROUGHPUT else None
        if self.then is Then.WATER_FILLING:
            return self._filled(workload, demand), memory
        solution = highest(market, demand, then=then, start=memory)
        return allocation_of(workload, solution, solution.level), solution.start

    def _norm(self, workload: Workload) -> Floats:
        """What g·θ is measured by; iso is the throughput of an n-th of the GPUs, which counts g already."""
        norm = normaliser(workload, self.norm)
        return norm * workload.gang if self.norm is Norm.ISOLATED else norm

    def _filled(self, workload: Workload, demand: Floats) -> Allocation:
        """The lexicographic optimum: one group of everybody, each rising by its weight."""
        everybody = Group(1.0, np.arange(workload.jobs), workload.weight)
        filled = fill(market_of(workload), [everybody], self._norm(workload))
        asks = demand > 0
        level = float((filled.throughput[asks] / demand[asks]).min()) if asks.any() else nan
        return Allocation(filled.x, filled.shared, level)
