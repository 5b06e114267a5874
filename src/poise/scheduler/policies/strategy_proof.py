"""Proportional fairness by partial allocation (`strategy-proof`; Gavel's variant of Cole, Gkatzelis and Goel, EC'13).

    x*     = argmax Σ_m w_m ln θ_m(x);      x^{-m} = the same without m
    c_m    = Π_{k≠m} ( θ_k(x*) / θ_k(x^{-m}) ) ^ (w_k / w_m)      in (0, 1]
    answer   x_m = c_m x*_m

What m takes from the others is what it pays, so that to report other speeds than one has gains nothing. Jobs that are equal
have equal discounts: one program for each class of equal jobs, and one more. Those of the classes are solved all at once
(`scheduler/solve/leave_one_out.py`), where jobs do not share GPUs. A pair's time together is cut to the smaller of its
two discounts.

The discounts leave GPUs idle, about 1 − 1/e of them among many alike jobs. They are left to the mechanism, which gives them
to jobs by how far they are behind their shares; the promise above is that of the shares alone (docs/algorithms/gavel.md).
The authors' code divides by the weight inside the logarithm, where it has no effect; here a larger weight is a larger share.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from poise.scheduler.model.arithmetic import Floats, Ints, dot, log
from poise.scheduler.model.errors import GaveUpError
from poise.scheduler.model.workload import Allocation, Pairs, Workload
from poise.scheduler.policies import papers
from poise.scheduler.policies.listing import PolicyProperty, share_listing
from poise.scheduler.policies.promises import among_jobs
from poise.scheduler.policies.shares import GAVEL, Memoryless, inverse, market_of, nothing_for, proportional, usable
from poise.scheduler.solve import solver
from poise.scheduler.solve.leave_one_out import without_one
from poise.scheduler.solve.program import ShareProblem, Solution


@dataclass(frozen=True)
class StrategyProof(Memoryless):
    """The Nash optimum, discounted. `objective` is Σ w ln(g θ / prop) before discounts."""

    def allocate(self, workload: Workload, memory: None) -> tuple[Allocation, None]:
        """Shares under which no job gains by misreporting its speeds."""
        able = np.flatnonzero(usable(workload).max(axis=1, initial=0.0) > 0)
        if not len(able):
            return nothing_for(workload), memory
        some = workload.only(able)
        best = _nash(some)
        discount = discounts(some, best.throughput)
        share = np.zeros(workload.speed.shape)
        share[able] = discount[:, None] * best.x
        objective = dot(some.weight, log(best.throughput * some.gang * inverse(proportional(some))))
        pairs = best.shared
        least = np.minimum(discount[pairs.first], discount[pairs.second])
        pairs = Pairs(able[pairs.first], able[pairs.second], pairs.column, least * pairs.share)
        return Allocation(share, pairs, objective), memory


LISTING = share_listing(
    "strategy-proof",
    "proportional fairness with discounts that make lying about speeds useless",
    f"Cole et al., EC'13; {GAVEL}'s code",
    (PolicyProperty.NO_DURATIONS, PolicyProperty.WORK_CONSERVING, PolicyProperty.NO_ENVY, PolicyProperty.NO_INFLATION),
    StrategyProof,
    promise=among_jobs,
    optimises="the product of throughputs, less a discount",
    fairness="proportional fairness; lying about speeds gains nothing",
    heterogeneity="chooses types by stated throughput",
    verified="the worked allocation and discounts, to 1e-3; no misreport on a grid gains",
    url=papers.COLE,
)


def discounts(workload: Workload, throughput: Floats) -> Floats:
    """c of each job, given the throughputs of the Nash optimum."""
    first, member = _classes(workload)
    if workload.beside is None and workload.jobs > 1:
        try:
            return _together(workload, throughput, first, member)[member]
        except GaveUpError:
            pass  # one by one is slower, but does not fail
    each = [_discount(workload, throughput, leaver) for leaver in first.tolist()]
    return np.array(each)[member]


def _together(workload: Workload, throughput: Floats, first: Ints, member: Ints) -> Floats:
    """c of each class, all at once."""
    market = market_of(workload)
    count = np.bincount(member, minlength=len(first)).astype(float)
    capacity = np.where(market.capacity > 0, market.capacity, 1.0)  # where there is none, no job has a speed
    classes = replace(market, speed=market.speed[first], size=market.size[first], capacity=capacity, count=count)
    weight = workload.weight[first]
    discount = np.empty(len(first))
    for leaver, without in without_one(classes, weight):
        left = count.copy()
        left[leaver] -= 1.0
        others = np.flatnonzero(left)
        lost = dot(left[others] * weight[others], log(without[others] / throughput[first[others]]))
        discount[leaver] = math.exp(-max(lost, 0.0) / float(weight[leaver]))
    return discount


def _discount(workload: Workload, throughput: Floats, leaver: int) -> float:
    """What the others have with the leaver there, over what they have without it; never more than 1."""
    others = np.flatnonzero(np.arange(workload.jobs) != leaver)
    if not len(others):
        return 1.0
    without = _nash(workload.only(others)).throughput
    lost = dot(workload.weight[others], log(without / throughput[others]))
    return math.exp(-max(lost, 0.0) / float(workload.weight[leaver]))


def _nash(workload: Workload) -> Solution:
    return solver.maximise(ShareProblem(market_of(workload), log=workload.weight))


def _classes(workload: Workload) -> tuple[Ints, Ints]:
    """The first job of each class of equal jobs, which have equal discounts, and the class of each job."""
    alike = [workload.speed, workload.gang[:, None], workload.weight[:, None]]
    if workload.beside is not None:
        alike.append(workload.kind[:, None].astype(float))
    _, first, member = np.unique(np.hstack(alike), axis=0, return_index=True, return_inverse=True)
    return first, member.reshape(-1)
