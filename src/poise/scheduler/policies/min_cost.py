"""Minimum cost, with deadlines where jobs have them (`min-cost`; Gavel, OSDI'20 §4.2).

    ratio    max_x  Σ_m c_m θ_m(x) / Σ_mj price_j g_m x_mj          s.t.  θ_m(x) >= R_m / s_m  for jobs with a deadline
    sum      max_x  Σ_mj (c_m T_mj / price_j) x_mj                   the same constraints (the authors' code)

s_m seconds to the deadline; c = 1 (raw steps, as in the paper) or w g / prop. A ratio does not change if everything is done
half as often, so that among the best answers the one with the largest Σ c θ is taken; GPUs that would make work dearer
stay idle. A type of price 0 counts as a millionth of the dearest; if no type has a price, all cost the same.

Deadlines that cannot all be met: the job that needs the most GPUs for its own (g R / (s fast)) gives up first, so that as
many as possible are met, and among equals the one whose deadline is latest; who gave up is remarked. Sharing of GPUs is not
used: what a pair costs is not the sum of what its members cost.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from poise.scheduler.model.arithmetic import Floats
from poise.scheduler.model.workload import Allocation, Leftover, Workload
from poise.scheduler.policies.listing import Capability, Parameter, PolicyProperty, choice, share_listing
from poise.scheduler.policies.shares import (
    GAVEL,
    Count,
    Given,
    Memoryless,
    allocation_of,
    fastest,
    inverse,
    market_of,
    nothing_for,
    rows_of,
    worth,
)
from poise.scheduler.solve import solver
from poise.scheduler.solve.max_min_level import best_ratio, highest
from poise.scheduler.solve.program import GpuMarket, ShareProblem

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
    """The most work for the money. `objective` is steps per second for each unit of price per hour."""

    form: CostForm = CostForm.RATIO
    count: Count = Count.RAW

    def allocate(self, workload: Workload, memory: None) -> tuple[Allocation, None]:
        """Shares that maximise work per price, and meet the deadlines that can be met."""
        market = replace(market_of(workload), beside=None)
        if not (market.fastest > 0).any():
            return nothing_for(workload), memory
        floor, remarks = _floors(workload, market)
        dearest = float(workload.price.max(initial=0.0))
        prices = np.maximum(workload.price, FREE * dearest) if dearest > 0 else np.ones(workload.types)
        price = prices[workload.column_type]
        gain = worth(workload, self.count)[:, None] * market.speed
        if self.form is CostForm.RATIO:
            ratio = best_ratio(market, gain, workload.gang[:, None] * price, base=floor)
            given = Given(leftover=Leftover.IDLE, remarks=remarks)
            return allocation_of(workload, ratio.solution, ratio.rho, given), memory
        solution = solver.maximise(ShareProblem(market, base=floor, value=gain / price))
        return allocation_of(workload, solution, float((gain / price * solution.x).sum()), Given(remarks=remarks)), memory


LISTING = share_listing(
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
)


def _floors(workload: Workload, market: GpuMarket) -> tuple[Floats | None, tuple[str, ...]]:
    """R / s of the jobs whose deadlines can be met together, and remarks on the others."""
    due = np.isfinite(workload.deadline) & (workload.steps_left > 0)
    left = workload.deadline - workload.now
    vague = due & np.isinf(workload.steps_left)
    floor = np.where(due & ~vague & (left > 0), workload.steps_left, 0.0) * inverse(
        np.where(due, np.maximum(left, 0.0), 0.0)
    )
    alone = due & ~vague & ((left <= 0) | (floor > market.fastest))
    floor[alone] = 0.0
    floor, together = _dropped(workload, market, floor)
    said = (
        (vague, "have a deadline but no known length, and cannot be held to it"),
        (alone, "cannot meet their deadlines on any GPU type"),
        (together, "cannot meet their deadlines beside the others'"),
    )
    remarks = tuple(f"min-cost: jobs in {rows_of(workload, who)} {what}" for who, what in said if who.any())
    return (floor if floor.any() else None), remarks


def _dropped(workload: Workload, market: GpuMarket, floor: Floats) -> tuple[Floats, NDArray[np.bool_]]:
    """Floors that can be met together, and the jobs whose deadline is given up."""
    floor, dropped = floor.copy(), np.zeros(workload.jobs, dtype=bool)
    need = workload.gang * floor * inverse(fastest(workload))
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
