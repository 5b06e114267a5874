"""Gavel's policies that are one program each (OSDI'20 §4).

`max-min`, `hierarchical`, `max-throughput`, `makespan`, `finish-time`, `min-cost`. `gavel_baselines.py` holds what Gavel
compares them with, and `strategy_proof.py` its variant of partial allocation.

Symbols are those of `shares.py`: x_mj is the share of time of job m on GPU type j, θ_m = Σ_j T_mj x_mj its throughput.

A program fixes only the jobs that matter to its objective. What is left over goes where it gives the most Σ_m θ_m / fast_m:
every job counts by how near it is to its best speed, which is what completion times depend on, whatever its gang. This
second aim is ours; `+plain` takes it away.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import inf, nan

import numpy as np
from numpy.typing import NDArray

from poise.scheduler.model.arithmetic import Floats, Ints, dot
from poise.scheduler.model.workload import Allocation, Leftover, Workload
from poise.scheduler.policies import papers, shares
from poise.scheduler.policies.listing import Capability, Parameter, PolicyProperty, choice, positives, share_listing
from poise.scheduler.policies.promises import AmongTenants, among_jobs
from poise.scheduler.policies.shares import GAVEL, SECOND_AIM, Count, Memoryless, Norm, SecondAim
from poise.scheduler.solve import solver
from poise.scheduler.solve.max_min_level import best_ratio, highest, smallest_ratio
from poise.scheduler.solve.program import GpuMarket, ShareProblem, WarmStart
from poise.scheduler.solve.water_filling import FillGroup, Inside, fill

_FAIR = (
    PolicyProperty.NO_DURATIONS,
    PolicyProperty.WORK_CONSERVING,
    PolicyProperty.SHARING_INCENTIVE,
    PolicyProperty.PARETO,
    PolicyProperty.NO_STARVATION,
)


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
        norm = shares.normaliser(workload, self.norm)
        if self.norm is Norm.ISOLATED:
            norm = norm * workload.gang  # iso is the throughput of an n-th of the GPUs, which counts g already
        demand = workload.weight * norm / workload.gang
        if self.then is SecondaryObjective.WATER_FILLING:
            # One group of all jobs, each rising by its weight, is the lexicographic optimum.
            filled = fill(shares.market_of(workload), [FillGroup(1.0, np.arange(workload.jobs), workload.weight)], norm)
            asks = demand > 0
            level = float((filled.throughput[asks] / demand[asks]).min()) if asks.any() else nan
            return Allocation(filled.x, filled.shared, level), memory
        then = shares.inverse(shares.fastest(workload)) if self.then is SecondaryObjective.THROUGHPUT else None
        solution = highest(shares.market_of(workload), demand, then=then, start=memory)
        return shares.allocation_of(workload, solution, solution.level), solution.start


MAX_MIN = share_listing(
    "max-min",
    "the worst-off job as well off as can be, by effective throughput",
    f"{GAVEL} §4.1",
    _FAIR,
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
    url=papers.GAVEL,
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
        groups = []
        for tenant in np.unique(workload.tenant).tolist():
            members = np.flatnonzero(workload.tenant == tenant)
            weight = self.weights[tenant] if tenant < len(self.weights) else 1.0
            if workload.tenant_weight is not None:
                weight *= float(workload.tenant_weight[tenant])
            groups.append(FillGroup(weight, members, workload.weight[members], self.inside))
        filled = fill(shares.market_of(workload), groups, shares.proportional(workload))
        totals = [float((workload.gang * filled.levels)[group.members].sum()) / group.weight for group in groups]
        return Allocation(filled.x, filled.shared, min(totals, default=nan)), memory


HIERARCHICAL = share_listing(
    "hierarchical",
    "fair between tenants, and inside each by fairness or arrival: water-filling",
    f"{GAVEL} §4.3",
    _FAIR,
    Hierarchical,
    (
        Parameter("inside", "fair", "fair or fifo among the jobs of a tenant", choice(Inside)),
        Parameter("weights", "1", "of the tenants in order of first submission; 1 for those not listed", positives),
    ),
    can=frozenset({Capability.TENANTS}),
    promise=lambda weights=(), **_parameters: AmongTenants(listed=weights),
    optimises="the least share over tenants, then over their jobs",
    fairness="weighted max-min over tenants; fair or by arrival inside",
    verified="the worked example in three variants; one tenant is lexicographic max-min",
    url=papers.GAVEL,
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
        market, each = shares.market_of(workload), shares.worth(workload, self.count)
        if not (market.fastest > 0).any():
            return shares.nothing_for(workload), memory
        solution = solver.maximise(ShareProblem(market, value=each[:, None] * market.speed))
        return shares.allocation_of(workload, solution, dot(each, solution.throughput)), memory


MAX_THROUGHPUT = share_listing(
    "max-throughput",
    "the most throughput in total; promises no job anything",
    f"{GAVEL} §4.2",
    (PolicyProperty.NO_DURATIONS, PolicyProperty.WORK_CONSERVING, PolicyProperty.PARETO),
    MaxThroughput,
    (Parameter("count", "normalised", "steps relative to a fair share (normalised), or raw steps", choice(Count)),),
    plain={"count": Count.RAW},  # as the authors count steps
    optimises="throughput in total",
    fairness="none",
    verified="the worked example, raw and normalised; the numbers of Gavel's code on its traces, within 5 %",
    url=papers.GAVEL,
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
        steps = workload.steps_left
        remarks: tuple[str, ...] = ()
        unknown = steps == inf
        if unknown.any():
            isolated = shares.isolated_throughput(workload)
            seconds = np.where(unknown, 0.0, steps) * shares.inverse(isolated)
            longest = float(seconds.max()) or 1.0
            which = f"length of {int(unknown.sum())} of {workload.jobs} jobs is unknown"
            steps = np.where(unknown, longest * isolated, steps)
            remarks = (f"makespan: {which}; taken as that of the longest known",)
        solution = highest(shares.market_of(workload), steps, then=shares.second_aim(workload, self.then))
        known = bool(np.isfinite(workload.steps_left).any())
        objective = 1.0 / solution.level if known and solution.level > 0 else nan
        return shares.allocation_of(workload, solution, objective, remarks), memory


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
    url=papers.GAVEL,
)


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
        rho = float(np.fmax.reduce([ledger.rho for ledger in ledgers]))
        return FinishTimeLedger(rows[order], steps_left, isolated, alone, rho)

    def alone_now(self, workload: Workload) -> Floats:
        """cum of each job of the workload; 0 for a new one."""
        if not len(self.rows):
            return np.zeros(workload.jobs)
        at = np.minimum(np.searchsorted(self.rows, workload.rows), len(self.rows) - 1)
        before, now = self.steps_left[at], workload.steps_left
        done = np.subtract(before, now, out=np.zeros(workload.jobs), where=np.isfinite(before) & np.isfinite(now))
        alone = self.alone[at] + np.maximum(done, 0.0) * shares.inverse(self.isolated[at])
        return np.where(self.rows[at] == workload.rows, alone, 0.0)


@dataclass(frozen=True)
class FinishTime:
    """Finish-time fairness (§4.2, after Themis, NSDI'20). `objective` is ρ*, the least worst ratio.

        min_x max_m  w_m ρ_m        ρ_m = ( e_m + R_m / θ_m(x) ) / D_m        D_m = cum_m + R_m / iso_m
        e_m = now − submitted;   R_m steps left;   cum_m += steps done since the previous call / iso_m of the previous call
        as           min ρ   s.t.  θ_m >= (w_m R_m / D_m) / (ρ − w_m e_m / D_m),  x feasible

    ρ_m is the time to finish here over that on an n-th of the cluster for the whole of the job's life; cum is the memory of
    how that n-th changed as jobs came and went. Not a conic program but a few linear ones (`smallest_ratio`).

    Weights are ours: w is relative to the mean weight of the active jobs, so that equal weights change nothing; a larger
    weight means a smaller ρ, that is a larger share. A job of unknown length counts as endless: R → ∞ gives
    ρ_m = iso_m / θ_m. Jobs that can run nowhere do not count.
    """

    then: SecondAim = SecondAim.THROUGHPUT

    def start(self) -> FinishTimeLedger:
        """Before any job has been seen."""
        return FinishTimeLedger.blank()

    def allocate(self, workload: Workload, memory: FinishTimeLedger) -> tuple[Allocation, FinishTimeLedger]:
        """Shares that minimise the largest ρ."""
        isolated, alone = shares.isolated_throughput(workload), memory.alone_now(workload)
        # w R / D and w e / D; nothing of a job that has no step left or can run nowhere.
        weight = workload.weight / workload.weight.mean() if workload.jobs else workload.weight
        endless = np.isinf(workload.steps_left)
        steps = np.where(endless, 0.0, workload.steps_left)
        per_second = shares.inverse(alone + steps * shares.inverse(isolated))
        rate = weight * np.where(endless, isolated, np.where(isolated > 0, steps * per_second, 0.0))
        offset = weight * np.where(endless, 0.0, (workload.now - workload.submitted) * per_second)
        hint = None if np.isnan(memory.rho) else memory.rho
        market, then = shares.market_of(workload), shares.second_aim(workload, self.then)
        ratio = smallest_ratio(market, rate, offset, hint=hint, then=then)
        ledger = FinishTimeLedger(workload.rows, workload.steps_left, isolated, alone, ratio.rho)
        return shares.allocation_of(workload, ratio.solution, ratio.rho), ledger


FINISH_TIME = share_listing(
    "finish-time",
    "the smallest worst ratio of finish time to finish time on an n-th of the cluster",
    f"Mahajan et al., Themis, NSDI'20; as a program: {GAVEL} §4.2",
    _FAIR[1:],  # it needs to know how long jobs are
    FinishTime,
    (SECOND_AIM,),
    promise=among_jobs,
    plain={"then": SecondAim.NOTHING},
    optimises="the worst finish-time ratio",
    fairness="max-min over finish time against an n-th of the cluster",
    verified="the worked examples, to 1e-5; the numbers of Gavel's code on its traces, within 5 %",
    url=papers.THEMIS,
)


FREE = 1e-6
"""Price of a type that has none, relative to the dearest: a ratio needs a cost."""

SPARE = 1e-6
"""How far below the highest that all can reach deadlines are asked for, relatively, so that there is an answer at all."""


class CostForm(StrEnum):
    """What is maximised."""

    RATIO = "ratio"
    SUM = "sum"


@dataclass(frozen=True)
class MinCost(Memoryless):
    """Minimum cost, with deadlines where jobs have them (§4.2). `objective` is steps per second per unit of price per hour.

        ratio    max_x  Σ_m c_m θ_m(x) / Σ_mj price_j g_m x_mj        s.t.  θ_m(x) >= R_m / s_m  for jobs with a deadline
        sum      max_x  Σ_mj (c_m T_mj / price_j) x_mj                 the same constraints (the authors' code)

    s_m seconds to the deadline; c = 1 (raw steps, as in the paper) or w g / prop. A ratio does not change if everything is
    done half as often, so that among the best answers the one with the largest Σ c θ is taken; GPUs that would make work
    dearer stay idle. A type of price 0 counts as a millionth of the dearest; if no type has a price, all cost the same.

    Deadlines that cannot all be met: the job that needs the most GPUs for its own (g R / (s fast)) gives up first, so that
    as many as possible are met, and among equals the one whose deadline is latest; who gave up is remarked. Sharing of GPUs
    is not used: what a pair costs is not the sum of what its members cost.
    """

    form: CostForm = CostForm.RATIO
    count: Count = Count.RAW

    def allocate(self, workload: Workload, memory: None) -> tuple[Allocation, None]:
        """Shares that maximise work per price, and meet the deadlines that can be met."""
        market = replace(shares.market_of(workload), beside=None)
        if not (market.fastest > 0).any():
            return shares.nothing_for(workload), memory
        floor, remarks = _floors(workload, market)
        dearest = float(workload.price.max(initial=0.0))
        prices = np.maximum(workload.price, FREE * dearest) if dearest > 0 else np.ones(workload.types)
        price = prices[workload.column_type]
        gain = shares.worth(workload, self.count)[:, None] * market.speed
        if self.form is CostForm.RATIO:
            ratio = best_ratio(market, gain, workload.gang[:, None] * price, base=floor)
            allocation = shares.allocation_of(workload, ratio.solution, ratio.rho, remarks)
            return replace(allocation, leftover=Leftover.IDLE), memory
        solution = solver.maximise(ShareProblem(market, base=floor, value=gain / price))
        return shares.allocation_of(workload, solution, float((gain / price * solution.x).sum()), remarks), memory


MIN_COST = share_listing(
    "min-cost",
    "the most throughput for the money, deadlines kept",
    f"{GAVEL} §4.2",
    (PolicyProperty.DEADLINES,),
    MinCost,
    (
        Parameter("form", "ratio", "ratio: throughput ÷ cost; sum: Σ throughput ÷ price", choice(CostForm)),
        Parameter("count", "raw", "raw steps, or normalised", choice(Count)),
    ),
    can=frozenset({Capability.DEADLINES}),
    optimises="throughput for the money",
    fairness="none; deadlines are kept where they can be",
    heterogeneity="chooses types by throughput and price",
    verified="the worked ratios, to 1e-4; says so when a deadline cannot be met",
    url=papers.GAVEL,
)


def _floors(workload: Workload, market: GpuMarket) -> tuple[Floats | None, tuple[str, ...]]:
    """R / s of the jobs whose deadlines can be met together, and remarks on the others."""
    due = np.isfinite(workload.deadline) & (workload.steps_left > 0)
    left = workload.deadline - workload.now
    vague = due & np.isinf(workload.steps_left)
    seconds = np.where(due, np.maximum(left, 0.0), 0.0)
    floor = np.where(due & ~vague & (left > 0), workload.steps_left, 0.0) * shares.inverse(seconds)
    alone = due & ~vague & ((left <= 0) | (floor > market.fastest))
    floor[alone] = 0.0
    floor, together = _dropped(workload, market, floor)
    said = (
        (vague, "have a deadline but no known length, and cannot be held to it"),
        (alone, "cannot meet their deadlines on any GPU type"),
        (together, "cannot meet their deadlines beside the others'"),
    )
    remarks = tuple(f"min-cost: jobs in {shares.rows_of(workload, who)} {what}" for who, what in said if who.any())
    return (floor if floor.any() else None), remarks


def _dropped(workload: Workload, market: GpuMarket, floor: Floats) -> tuple[Floats, NDArray[np.bool_]]:
    """Floors that can be met together, and the jobs whose deadline is given up."""
    floor, dropped = floor.copy(), np.zeros(workload.jobs, dtype=bool)
    need = workload.gang * floor * shares.inverse(shares.fastest(workload))
    while floor.any():
        solution = highest(market, floor)
        if solution.level * (1.0 - SPARE) >= 1.0:
            break
        if solution.level >= 1.0 - SPARE:
            floor = floor * (solution.level * (1.0 - SPARE))
            break
        pressed = floor * solution.pressure
        contending = np.flatnonzero(pressed > 1e-6 * pressed.max())
        hungriest = contending[np.lexsort((-workload.rows[contending], -workload.deadline[contending], -need[contending]))]
        # Half of the excess at a time: few solves when many are too many, and hardly one too many gives up.
        excess = 0.5 * (1.0 - solution.level) * float(need[contending].sum())
        leavers = hungriest[: 1 + int(np.searchsorted(np.cumsum(need[hungriest]), excess))]
        floor[leavers], dropped[leavers] = 0.0, True
    return floor, dropped
