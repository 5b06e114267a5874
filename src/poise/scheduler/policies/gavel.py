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
from math import inf, nan

import numpy as np

from poise.scheduler.model.arithmetic import Floats, dot
from poise.scheduler.model.workload import Allocation, Awareness, Workload
from poise.scheduler.policies.shares import (
    Count,
    Given,
    Norm,
    SecondAim,
    allocation_of,
    fastest,
    in_columns,
    inverse,
    isolated_shares,
    isolated_throughput,
    market_of,
    normaliser,
    nothing_for,
    packed,
    proportional,
    second_aim,
    worth,
)
from poise.scheduler.solve import solver
from poise.scheduler.solve.max_min_level import highest
from poise.scheduler.solve.program import ShareProblem, WarmStart
from poise.scheduler.solve.water_filling import FillGroup, Inside, fill


class SecondaryObjective(StrEnum):
    """What becomes of what the worst-off jobs cannot use."""

    THROUGHPUT = "throughput"
    WATER_FILLING = "water-filling"
    NOTHING = "nothing"


@dataclass(frozen=True)
class MaxMin:
    """The worst-off job as well off as can be. `objective` is λ."""

    norm: Norm = Norm.PROPORTIONAL
    then: SecondaryObjective = SecondaryObjective.THROUGHPUT

    def start(self) -> WarmStart | None:
        """There is nothing to start from."""
        return None

    def allocate(self, workload: Workload, memory: WarmStart | None) -> tuple[Allocation, WarmStart | None]:
        """Shares that maximise λ; the next ones are looked for from where these were found."""
        market = market_of(workload)
        demand = workload.weight * self._norm(workload) / workload.gang
        then = inverse(fastest(workload)) if self.then is SecondaryObjective.THROUGHPUT else None
        if self.then is SecondaryObjective.WATER_FILLING:
            return self._filled(workload, demand), memory
        solution = highest(market, demand, then=then, start=memory)
        return allocation_of(workload, solution, solution.level), solution.start

    def _norm(self, workload: Workload) -> Floats:
        """What g·θ is measured by; iso is the throughput of an n-th of the GPUs, which counts g already."""
        norm = normaliser(workload, self.norm)
        return norm * workload.gang if self.norm is Norm.ISOLATED else norm

    def _filled(self, workload: Workload, demand: Floats) -> Allocation:
        """The lexicographic optimum: one group of everybody, each rising by its weight."""
        everybody = FillGroup(1.0, np.arange(workload.jobs), workload.weight)
        filled = fill(market_of(workload), [everybody], self._norm(workload))
        asks = demand > 0
        level = float((filled.throughput[asks] / demand[asks]).min()) if asks.any() else nan
        return Allocation(filled.x, filled.shared, level)


# Fairness between tenants, and inside each of them fairness or arrival order (`hierarchical`; Gavel, OSDI'20 §4.3).
#
# τ_m = θ_m(x) / prop_m                             prop_m = Σ_j T_mj N_j / N
# every tenant e fills at the rate W_e, counted in g·τ, all at once:
# fair    its jobs rise in proportion to their weights; one that can rise no further passes its weight on
# fifo    its earliest job takes everything until it can rise no further, then the next one
# until no job can have more (water-filling, ALGORITHMS §2.3)
#
# W is the tenant's weight times what `weights` says, in order of the tenants' first submission; both are 1 where nothing is
# said. `scheduler/solve/water_filling.py` is the method: a few programs whatever the number of jobs.

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

    def _group(self, workload: Workload, tenant: int) -> FillGroup:
        members = np.flatnonzero(workload.tenant == tenant)
        weight = self.weights[tenant] if tenant < len(self.weights) else 1.0
        if workload.tenant_weight is not None:
            weight *= float(workload.tenant_weight[tenant])
        return FillGroup(weight, members, workload.weight[members], self.inside)


# Maximum total throughput (`max-throughput`; Gavel, OSDI'20 §4.2).
#
# max_x Σ_m c_m θ_m(x)          c_m = w_m g_m / prop_m (normalised)  or  1 (raw)
#
# The authors add raw steps per second, so that jobs with many cheap steps starve all others; normalised, every job counts by
# the GPU-time that its progress is worth. It promises no fairness in either form.


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
        solution = solver.maximise(ShareProblem(market, value=each[:, None] * market.speed))
        return allocation_of(workload, solution, dot(each, solution.throughput)), memory


# Minimum makespan (`makespan`; Gavel, OSDI'20 §4.2).
#
# min_x max_m  R_m / θ_m(x)                          R_m steps left
# as           max λ   s.t.  θ_m >= λ R_m,  x feasible;   makespan = 1 / λ
#
# One linear program, exact. The optimum fixes only the jobs that end last; among the best answers, that with the largest
# Σ_m θ_m / fast_m is taken, so that the others do not wait for them (ALGORITHMS §2.2 c).
#
# A job of unknown length is taken to be as long as the longest known one: as long, that is, on an isolated share. If no
# length
# is known, all jobs are alike, and the answer is that of max-min over iso. Jobs that can run nowhere do not count.


@dataclass(frozen=True)
class Makespan:
    """All jobs done as early as can be. `objective` is the makespan in seconds from now; nan if no length is known."""

    then: SecondAim = SecondAim.THROUGHPUT

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


# Everybody spreads its time over GPU types by how many there are (`proportional`; Gavel's baseline, ALGORITHMS §2.1).
#
# x_mj = s N_j / N,  s = min(1, N / Σ_m g_m)
#
# All jobs get the same wall time, whatever their gang: s is the part of it that there are GPUs for. No solver: never fails.


@dataclass(frozen=True)
class Proportional:
    """The same mix of GPU types for every job."""

    def start(self) -> None:
        """It remembers nothing."""

    def allocate(self, workload: Workload, memory: None) -> tuple[Allocation, None]:
        """The shares."""
        wanted = max(float(workload.gang.sum()), float(workload.gpus.sum()), 1.0)
        share = np.where(packed(workload) > 0, workload.gpus / wanted, 0.0)
        return Allocation(in_columns(workload, share), awareness=Awareness.BLIND), memory


# Everybody has an n-th of the cluster (`isolated`; Gavel's baseline, ALGORITHMS §2.1).
#
# x_mj = N_j / (n g_m),  each row divided by max(1, its sum)
#
# Shares do not depend on how fast a type is, only on whether the job can run there at all. No solver: never fails.


@dataclass(frozen=True)
class IsolatedShares:
    """An equal part of every GPU type for every job."""

    def start(self) -> None:
        """It remembers nothing."""

    def allocate(self, workload: Workload, memory: None) -> tuple[Allocation, None]:
        """The shares."""
        return Allocation(in_columns(workload, isolated_shares(workload)), awareness=Awareness.BLIND), memory
