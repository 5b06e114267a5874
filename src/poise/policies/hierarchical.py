"""Fairness between tenants, and inside each of them fairness or arrival order (`hierarchical`; Gavel, OSDI'20 §4.3).

    τ_m = θ_m(x) / prop_m                             prop_m = Σ_j T_mj N_j / N
    every tenant e fills at the rate W_e, counted in g·τ, all at once:
        fair    its jobs rise in proportion to their weights; one that can rise no further passes its weight on
        fifo    its earliest job takes everything until it can rise no further, then the next one
    until no job can have more (water-filling, ALGORITHMS §2.3)

W is the tenant's weight times what `weights` says, in order of the tenants' first submission; both are 1 where nothing is
said. `solve/filling.py` is the method: a few programs whatever the number of jobs.
"""

from dataclasses import dataclass
from math import nan

import numpy as np

from poise.model.workload import Allocation, Workload
from poise.policies.shares import market_of, proportional
from poise.solve.filling import Group, Inside, fill

__all__ = ["Hierarchical", "Inside"]


@dataclass(frozen=True)
class Hierarchical:
    """Tenants as well off as their weights say. `objective` is the lowest g·τ/W among tenants."""

    inside: Inside = Inside.FAIR
    weights: tuple[float, ...] = (1.0,)

    def start(self) -> None:
        """It remembers nothing."""

    def allocate(self, workload: Workload, memory: None) -> tuple[Allocation, None]:
        """Shares by water-filling."""
        groups = [self._group(workload, tenant) for tenant in np.unique(workload.tenant).tolist()]
        norm = proportional(workload)
        filled = fill(market_of(workload), groups, norm)
        totals = [float((workload.gang * filled.levels)[group.members].sum()) / group.weight for group in groups]
        return Allocation(filled.x, filled.shared, min(totals, default=nan)), memory

    def _group(self, workload: Workload, tenant: int) -> Group:
        members = np.flatnonzero(workload.tenant == tenant)
        weight = self.weights[tenant] if tenant < len(self.weights) else 1.0
        if workload.tenant_weight is not None:
            weight *= float(workload.tenant_weight[tenant])
        return Group(weight, members, workload.weight[members], self.inside)
