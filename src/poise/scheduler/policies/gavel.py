"""Gavel's policies that are one program each (OSDI'20 §4), and its baselines.

`max-min`, `hierarchical`, `max-throughput`, `makespan`; `proportional` and `isolated`, which solve nothing. `finish_time.py`
and `min_cost.py` hold the other two programs, `gavel_queues.py` the queues.

Symbols are those of `shares.py`: x_mj is the share of time of job m on GPU type j, θ_m = Σ_j T_mj x_mj its throughput.

A program fixes only the jobs that matter to its objective. What is left over goes where it gives the most Σ_m θ_m / fast_m:
every job counts by how near it is to its best speed, which is what completion times depend on, whatever its gang. This
second aim is ours; `+plain` takes it away.
"""

from dataclasses import dataclass
from enum import StrEnum
from math import inf, nan
from typing import Any

import numpy as np

from poise.scheduler.model.arithmetic import Floats, dot
from poise.scheduler.model.workload import Allocation, Awareness, Workload
from poise.scheduler.policies.listing import Parameter, PolicyProperty, choice, positives, share_listing
from poise.scheduler.policies.promises import AmongTenants, Promise, among_jobs, among_jobs_alike
from poise.scheduler.policies.shares import (
    GAVEL,
    SECOND_AIM,
    Count,
    Given,
    Memoryless,
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

_FAIR = (PolicyProperty.NO_DURATIONS, PolicyProperty.WORK_CONSERVING, PolicyProperty.SHARING_INCENTIVE)
"""Claims that the fair policies have in common."""


class SecondaryObjective(StrEnum):
    """Where what the worst-off jobs cannot use goes under `max-min`.

    throughput      where it gives the most Σ_m θ_m / fast_m
    water-filling   to the next worst off, and so on: lexicographic max-min
    nothing         nowhere in particular
    """

    THROUGHPUT = "throughput"
    WATER_FILLING = "water-filling"
    NOTHING = "nothing"


@dataclass(frozen=True)
class MaxMin:
    """Max-min fairness over effective throughputs, the heterogeneity-aware LAS of Gavel (§4.1). `objective` is λ.

        max_x min_m  g_m θ_m(x) / (w_m norm_m)     as     max λ   s.t.  θ_m >= λ w_m norm_m / g_m,  x feasible

    norm is prop (the authors' code) or iso (the paper's X^equal). A larger weight is a larger share. The factor g makes
    equal GPU-time, not equal wall time, the ideal.
    """

    norm: Norm = Norm.PROPORTIONAL
    then: SecondaryObjective = SecondaryObjective.THROUGHPUT

    def start(self) -> WarmStart | None:
        """There is nothing to start from."""
        return None

    def allocate(self, workload: Workload, memory: WarmStart | None) -> tuple[Allocation, WarmStart | None]:
        """Shares that maximise λ. The memory is where they were found: the next search starts there."""
        norm = normaliser(workload, self.norm)
        if self.norm is Norm.ISOLATED:
            norm = norm * workload.gang  # iso is the throughput of an n-th of the GPUs, which counts g already
        demand = workload.weight * norm / workload.gang
        if self.then is SecondaryObjective.WATER_FILLING:
            # One group of all jobs, each rising by its weight, is the lexicographic optimum.
            filled = fill(market_of(workload), [FillGroup(1.0, np.arange(workload.jobs), workload.weight)], norm)
            asks = demand > 0
            level = float((filled.throughput[asks] / demand[asks]).min()) if asks.any() else nan
            return Allocation(filled.x, filled.shared, level), memory
        then = inverse(fastest(workload)) if self.then is SecondaryObjective.THROUGHPUT else None
        solution = highest(market_of(workload), demand, then=then, start=memory)
        return allocation_of(workload, solution, solution.level), solution.start


MAX_MIN = share_listing(
    "max-min",
    "the worst-off job as well off as can be, by effective throughput",
    f"{GAVEL} §4.1",
    (*_FAIR, PolicyProperty.PARETO, PolicyProperty.NO_STARVATION),
    MaxMin,
    (
        Parameter("norm", "proportional", "what a job's throughput is measured by", choice(Norm)),
        Parameter(
            "then",
            "throughput",
            "what becomes of what the worst-off jobs cannot use: throughput, water-filling or nothing",
            choice(SecondaryObjective),
        ),
    ),
    promise=among_jobs,
    plain={"then": SecondaryObjective.NOTHING},
    optimises="the least effective throughput over jobs",
    fairness="max-min over throughput relative to a fair share",
    verified="the worked examples, to 1e-6; the numbers of Gavel's code on its traces, within 5 %",
)


@dataclass(frozen=True)
class Hierarchical(Memoryless):
    """Fairness between tenants, and inside each of them fairness or arrival order (§4.3), by water-filling.

    With τ_m = θ_m(x) / prop_m, all tenants e fill at once, each at the rate W_e counted in g·τ, until no job can have more:
        fair    its jobs rise in proportion to their weights; one that can rise no further passes its weight on
        fifo    its earliest job takes everything until it can rise no further, then the next one

    W is the tenant's weight times what `weights` says, in order of the tenants' first submission; both are 1 where nothing
    is said. `objective` is the lowest g·τ/W among tenants. `scheduler/solve/water_filling.py` is the method: a few
    programs whatever the number of jobs.
    """

    inside: Inside = Inside.FAIR
    weights: tuple[float, ...] = (1.0,)

    def allocate(self, workload: Workload, memory: None) -> tuple[Allocation, None]:
        """Shares by water-filling."""
        groups = [self._group(workload, tenant) for tenant in np.unique(workload.tenant).tolist()]
        filled = fill(market_of(workload), groups, proportional(workload))
        totals = [float((workload.gang * filled.levels)[group.members].sum()) / group.weight for group in groups]
        return Allocation(filled.x, filled.shared, min(totals, default=nan)), memory

    def _group(self, workload: Workload, tenant: int) -> FillGroup:
        members = np.flatnonzero(workload.tenant == tenant)
        weight = self.weights[tenant] if tenant < len(self.weights) else 1.0
        if workload.tenant_weight is not None:
            weight *= float(workload.tenant_weight[tenant])
        return FillGroup(weight, members, workload.weight[members], self.inside)


def _among_tenants(weights: tuple[float, ...] = (), **_parameters: Any) -> Promise:  # noqa: ANN401 - all that it takes
    return AmongTenants(listed=weights)


HIERARCHICAL = share_listing(
    "hierarchical",
    "fair between tenants, and inside each by fairness or arrival: water-filling",
    f"{GAVEL} §4.3",
    (*_FAIR, PolicyProperty.PARETO, PolicyProperty.NO_STARVATION),
    Hierarchical,
    (
        Parameter("inside", "fair", "fair or fifo among the jobs of a tenant", choice(Inside)),
        Parameter("weights", "1", "of the tenants in order of first submission; 1 for those not listed", positives),
    ),
    promise=_among_tenants,
    optimises="the least share over tenants, then over their jobs",
    fairness="weighted max-min over tenants; fair or by arrival inside",
    verified="the worked example in three variants; one tenant is lexicographic max-min",
)


@dataclass(frozen=True)
class MaxThroughput(Memoryless):
    """Maximum total throughput (§4.2). `objective` is that sum. It promises no fairness.

        max_x Σ_m c_m θ_m(x)          c_m = w_m g_m / prop_m (normalised)  or  1 (raw)

    The authors add raw steps per second, so jobs with many cheap steps starve all others. Normalised, every job counts by
    the GPU-time that its progress is worth.
    """

    count: Count = Count.NORMALISED

    def allocate(self, workload: Workload, memory: None) -> tuple[Allocation, None]:
        """Shares that maximise Σ c θ."""
        market, each = market_of(workload), worth(workload, self.count)
        if not (market.fastest > 0).any():
            return nothing_for(workload), memory
        solution = solver.maximise(ShareProblem(market, value=each[:, None] * market.speed))
        return allocation_of(workload, solution, dot(each, solution.throughput)), memory


MAX_THROUGHPUT = share_listing(
    "max-throughput",
    "the most throughput in total; promises nobody anything",
    f"{GAVEL} §4.2",
    (PolicyProperty.NO_DURATIONS, PolicyProperty.WORK_CONSERVING, PolicyProperty.PARETO),
    MaxThroughput,
    (Parameter("count", "normalised", "steps relative to a fair share (normalised), or raw steps", choice(Count)),),
    plain={"count": Count.RAW},  # as the authors count steps
    optimises="throughput in total",
    fairness="none",
    verified="the worked example, raw and normalised; the numbers of Gavel's code on its traces, within 5 %",
)


@dataclass(frozen=True)
class Makespan(Memoryless):
    """Minimum makespan (§4.2). `objective` is the makespan in seconds from now; nan if no length is known.

        min_x max_m  R_m / θ_m(x)     as     max λ   s.t.  θ_m >= λ R_m,  x feasible;   makespan = 1 / λ       R_m steps left

    One linear program, exact. A job of unknown length is taken to be as long, on an isolated share, as the longest known
    one. If no length is known, all jobs are alike, and the answer is that of max-min over iso. Jobs that can run nowhere
    do not count.
    """

    then: SecondAim = SecondAim.THROUGHPUT

    def allocate(self, workload: Workload, memory: None) -> tuple[Allocation, None]:
        """Shares that minimise the makespan."""
        steps, remarks = _lengths(workload)
        solution = highest(market_of(workload), steps, then=second_aim(workload, self.then))
        known = bool(np.isfinite(workload.steps_left).any())
        objective = 1.0 / solution.level if known and solution.level > 0 else nan
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


MAKESPAN = share_listing(
    "makespan",
    "the last job ends as early as can be",
    f"{GAVEL} §4.2",
    (PolicyProperty.WORK_CONSERVING, PolicyProperty.PARETO),
    Makespan,
    (SECOND_AIM,),
    plain={"then": SecondAim.NOTHING},
    optimises="the moment at which the last job ends",
    fairness="none: whoever ends last counts",
    verified="the worked example, to 1e-6; the makespans of Gavel's code on its traces, within 1 %",
)


@dataclass(frozen=True)
class Proportional(Memoryless):
    """The same mix of GPU types for every job, by how many there are of each: x_mj = s N_j / N, s = min(1, N / Σ_m g_m).

    All jobs get the same wall time, whatever their gang: s is the part of it that there are GPUs for. No solver, so it
    never fails.
    """

    def allocate(self, workload: Workload, memory: None) -> tuple[Allocation, None]:
        """Shares that do not depend on speeds, only on where a job can run."""
        wanted = max(float(workload.gang.sum()), float(workload.gpus.sum()), 1.0)
        share = np.where(packed(workload) > 0, workload.gpus / wanted, 0.0)
        return Allocation(in_columns(workload, share), awareness=Awareness.BLIND), memory


PROPORTIONAL = share_listing(
    "proportional",
    "time on every type in proportion to how many GPUs there are of it",
    f"{GAVEL}: the normaliser of its code",
    (*_FAIR, PolicyProperty.NO_ENVY, PolicyProperty.NO_STARVATION),
    Proportional,
    promise=among_jobs_alike,
    optimises="nothing: the normaliser",
    fairness="time on every type by how many GPUs there are of it",
    heterogeneity="gives everybody the same mix of types",
    verified="allocations are feasible in random worlds and do not look at speeds",
)


@dataclass(frozen=True)
class IsolatedShares(Memoryless):
    """An n-th of the cluster for each of n jobs: x_mj = N_j / (n g_m), each row divided by max(1, its sum).

    Shares do not depend on how fast a type is, only on whether the job can run there at all. No solver, so it never fails.
    """

    def allocate(self, workload: Workload, memory: None) -> tuple[Allocation, None]:
        """An equal part of every GPU type for every job."""
        return Allocation(in_columns(workload, isolated_shares(workload)), awareness=Awareness.BLIND), memory


ISOLATED = share_listing(
    "isolated",
    "an n-th of every GPU type for each of n jobs",
    f"{GAVEL}: the baseline of sharing incentive",
    (*_FAIR, PolicyProperty.NO_ENVY, PolicyProperty.NO_STARVATION),
    IsolatedShares,
    promise=among_jobs_alike,
    optimises="nothing: the baseline of sharing incentive",
    fairness="an n-th of every type for each job",
    heterogeneity="gives everybody the same mix of types",
    verified="the same least share as max-min blind to types; the numbers of Gavel's code, within 0.5 %",
)
