"""Laws that every share policy keeps on random workloads, and its objective against an independent solver."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.reference import reference
from tests.workloads import drawn, overdrawn, throughput, workloads

from poise.scheduler.model.arithmetic import Floats
from poise.scheduler.model.workload import Allocation, Allocator, Workload
from poise.scheduler.policies.combinators import Fallback, HeterogeneityAgnostic, Partitioned
from poise.scheduler.policies.gavel import (
    CostForm,
    FinishTime,
    FinishTimeLedger,
    Makespan,
    MaxMin,
    MaxThroughput,
    MinCost,
    SecondaryObjective,
)
from poise.scheduler.policies.gavel_baselines import IsolatedShares, Proportional
from poise.scheduler.policies.shares import (
    Count,
    Norm,
    fastest,
    inverse,
    isolated_throughput,
    market_of,
    normaliser,
    proportional,
    usable,
    worth,
)
from poise.scheduler.policies.strategy_proof import StrategyProof
from poise.scheduler.solve.program import GpuMarket, ShareProblem

SOLVED: tuple[Allocator, ...] = (
    MaxMin(),
    MaxMin(Norm.ISOLATED, SecondaryObjective.NOTHING),
    Makespan(),
    FinishTime(),
    MaxThroughput(),
    MinCost(CostForm.SUM),
    MinCost(),
)
EVERY: tuple[Allocator, ...] = (
    *SOLVED,
    MaxMin(then=SecondaryObjective.WATER_FILLING),
    StrategyProof(),
    IsolatedShares(),
    Proportional(),
    HeterogeneityAgnostic(FinishTime()),
    Partitioned(FinishTime(), 3),
    Partitioned(MaxMin(), 4),
    Fallback(Makespan(), Proportional(), "makespan", "proportional"),
)
NEAR = 1e-4


def answered(allocator: Allocator, workload: Workload) -> Allocation:
    return allocator.allocate(workload, allocator.start())[0]


def reached(allocator: Allocator, workload: Workload) -> Floats:
    return throughput(workload, answered(allocator, workload))


def due(workload: Workload, seed: int) -> Workload:
    """Some jobs with deadlines: loose, tight and impossible ones."""
    rng = np.random.default_rng(seed)
    alone = workload.steps_left * inverse(isolated_throughput(workload))
    slack = np.where(rng.random(workload.jobs) < 0.5, np.inf, 10.0 ** rng.uniform(-0.5, 2, workload.jobs))
    return replace(workload, deadline=np.where(alone > 0, workload.now + slack * np.maximum(alone, 1e-9), np.inf))


@given(policy=st.sampled_from(EVERY), workload=workloads(), seed=st.integers(0, 99))
def test_every_allocation_is_feasible(policy: Allocator, workload: Workload, seed: int) -> None:
    assert overdrawn(workload, answered(policy, due(workload, seed))) <= 1e-6


@given(policy=st.sampled_from(EVERY), workload=workloads(most=8), data=st.data())
def test_every_policy_answers_the_same_whatever_the_order_of_jobs(
    policy: Allocator, workload: Workload, data: st.DataObject
) -> None:
    order = np.array(data.draw(st.permutations(range(workload.jobs))))
    # Rows say who came first, and the kinds of equal jobs do not matter: only the places change.
    shuffled = replace(workload.only(order), rows=workload.rows)
    if isinstance(policy, Partitioned):
        shuffled = replace(shuffled, rows=workload.rows[order])
    got, want = answered(policy, shuffled), answered(policy, workload)
    assert got.objective == pytest.approx(want.objective, rel=1e-5, nan_ok=True)
    theta, other = throughput(shuffled, got), throughput(workload, want)[order]
    assert theta == pytest.approx(other, rel=2e-3, abs=1e-3 * float(other.max()))


@given(
    policy=st.sampled_from([*SOLVED, StrategyProof(), MaxMin(then=SecondaryObjective.WATER_FILLING)]),
    workload=workloads(most=6),
)
def test_equal_jobs_get_equal_throughput(policy: Allocator, workload: Workload) -> None:
    twice = workload.only(np.repeat(np.arange(workload.jobs), 2))
    twice = replace(twice, rows=np.arange(2 * workload.jobs))
    theta = reached(policy, twice)
    assert theta[::2] == pytest.approx(theta[1::2], rel=1e-6, abs=1e-9)


# Objectives against the reference


def level_of(market: GpuMarket, demand: Floats) -> float:
    return reference(ShareProblem(market, slope=np.where(market.fastest > 0, demand, 0.0), level=1.0))


def check_max_min(workload: Workload) -> None:
    market = market_of(workload)
    for norm in Norm:
        gang = 1.0 if norm is Norm.ISOLATED else workload.gang  # iso counts it already
        demand = workload.weight * normaliser(workload, norm) / gang
        got = answered(MaxMin(norm), workload)
        want = level_of(market, demand)
        theta, asks = throughput(workload, got), demand > 0
        assert got.objective == pytest.approx(want, rel=NEAR)
        assert (theta[asks] / demand[asks]).min() == pytest.approx(want, rel=NEAR)


def check_makespan(workload: Workload) -> None:
    market = market_of(workload)
    got = answered(Makespan(), workload)
    asks = market.fastest > 0
    assert got.objective == pytest.approx(1.0 / level_of(market, workload.steps_left), rel=NEAR)
    real = (workload.steps_left[asks] / throughput(workload, got)[asks]).max()
    assert real == pytest.approx(got.objective, rel=NEAR)


def aged(workload: Workload, seed: int) -> tuple[Workload, FinishTimeLedger]:
    """Jobs in the middle of their lives, of equal weight, and what finish-time remembers of them."""
    rng = np.random.default_rng(seed)
    isolated, done = isolated_throughput(workload), rng.uniform(0.0, 0.95, workload.jobs)
    alone = workload.steps_left * done * inverse(isolated)
    older = workload.now - alone * rng.uniform(0.5, 1.5, workload.jobs)
    old = replace(workload, steps_left=workload.steps_left * (1.0 - done), submitted=older)
    return old, FinishTimeLedger(old.rows, old.steps_left, isolated, alone, float("nan"))


def check_finish_time(workload: Workload, ledger: FinishTimeLedger) -> None:
    market = market_of(workload)
    got, _ = FinishTime().allocate(workload, ledger)
    isolated, asks = isolated_throughput(workload), market.fastest > 0
    weight = workload.weight / workload.weight.mean()
    ideal = (ledger.alone_now(workload) + workload.steps_left * inverse(isolated)) / weight
    spent = workload.now - workload.submitted

    def reach(rho: float) -> float:
        room = np.where(asks, rho * ideal - spent, 1.0)
        return level_of(market, workload.steps_left / room) if (room > 0).all() else 0.0

    theta = throughput(workload, got)
    real = ((spent + workload.steps_left * inverse(theta)) * inverse(ideal))[asks].max()
    assert real == pytest.approx(got.objective, rel=1e-6)
    assert reach(got.objective * (1 - NEAR)) < 1.0
    assert reach(got.objective * (1 + NEAR)) >= 1.0 - 1e-7


def check_throughput(workload: Workload) -> None:
    market = market_of(workload)
    for count in Count:
        value = worth(workload, count)[:, None] * market.speed
        got = answered(MaxThroughput(count), workload)
        assert got.objective == pytest.approx(reference(ShareProblem(market, value=value)), rel=NEAR)


def check_cost(workload: Workload) -> None:
    """Against the program with the floors that the answer meets: no other answer has a better ratio or sum."""
    market = market_of(workload)
    left = workload.deadline - workload.now
    floor = np.where(np.isfinite(left) & (left > 0), workload.steps_left * inverse(np.maximum(left, 0.0)), 0.0)
    price = workload.price[workload.column_type]
    for form in CostForm:
        got = answered(MinCost(form), workload)
        met = np.where(throughput(workload, got) >= floor * (1 - 1e-5), floor * (1 - 1e-5), 0.0)
        if form is CostForm.SUM:
            assert got.objective == pytest.approx(
                reference(ShareProblem(market, base=met, value=market.speed / price)), rel=NEAR
            )
            continue
        cost = workload.gang[:, None] * price
        assert (market.speed * got.share).sum() == pytest.approx(got.objective * (cost * got.share).sum(), rel=1e-6)
        dearer = market.speed - got.objective * (1 + NEAR) * cost
        most = got.objective * float(workload.price @ workload.gpus)
        assert reference(ShareProblem(market, base=met, value=np.where(market.speed > 0, dearer, 0.0))) <= 1e-6 * most


def check_nash(workload: Workload) -> None:
    some = workload.only(market_of(workload).fastest > 0)
    want = reference(ShareProblem(market_of(some), log=some.weight))
    want += float(some.weight @ np.log(some.gang / proportional(some)))
    assert answered(StrategyProof(), workload).objective == pytest.approx(want, abs=NEAR * float(some.weight.sum()))


def runnable(workload: Workload) -> bool:
    return bool((usable(workload) > 0).any())


@pytest.mark.slow
@given(workload=workloads(), seed=st.integers(0, 99))
def test_objectives_are_those_of_an_independent_solver(workload: Workload, seed: int) -> None:
    if not runnable(workload):
        return
    check_max_min(workload)
    check_makespan(workload)
    check_finish_time(workload, FinishTimeLedger.blank())
    check_finish_time(*aged(workload, seed))
    check_throughput(workload)
    check_cost(workload)
    check_cost(due(workload, seed))
    check_nash(workload)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_objectives_of_hundreds_of_jobs_are_those_of_an_independent_solver(seed: int) -> None:
    workload = drawn(seed, 300, 6, kinds=(6, 40, 300)[seed], spread=seed == 1)
    check_max_min(workload)
    check_makespan(workload)
    check_finish_time(*aged(workload, seed))
    check_throughput(workload)
    check_cost(due(workload, seed))


@given(workload=workloads(most=8, spread=False, together=True))
def test_sharing_of_gpus_lowers_no_objective(workload: Workload) -> None:
    alone = replace(workload, beside=None)
    assert overdrawn(workload, answered(MaxMin(), workload)) <= 1e-6
    if not runnable(workload):
        return
    for policy, sign in ((MaxMin(), 1), (Makespan(), -1), (MaxThroughput(), 1), (FinishTime(), -1)):
        packed, single = answered(policy, workload).objective, answered(policy, alone).objective
        assert sign * packed >= sign * single - 1e-5 * abs(single)


# What policies promise


@given(workload=workloads())
def test_to_know_gpu_types_never_makes_the_worst_off_worse_off(workload: Workload) -> None:
    asks = usable(workload).max(axis=1) > 0
    demand = workload.weight * proportional(workload) / workload.gang
    for policy, goal in ((MaxMin(), demand), (Makespan(), workload.steps_left)):
        aware, blind = (
            (reached(each, workload)[asks] / goal[asks]).min(initial=1e9) for each in (policy, HeterogeneityAgnostic(policy))
        )
        assert aware >= blind * (1 - 1e-5)


@given(workload=workloads())
def test_finish_time_of_fresh_jobs_of_equal_weight_is_no_worse_than_isolated(workload: Workload) -> None:
    fresh = replace(workload, submitted=np.full(workload.jobs, workload.now), weight=np.ones(workload.jobs))
    if runnable(fresh):
        assert answered(FinishTime(), fresh).objective <= 1 + 1e-5


@given(workload=workloads())
def test_max_min_leaves_nothing_that_somebody_could_use_at_nobodys_expense(workload: Workload) -> None:
    theta, fast = reached(MaxMin(), workload), fastest(workload)
    value = inverse(fast)[:, None] * usable(workload)
    if runnable(workload):
        best = reference(ShareProblem(market_of(workload), base=theta * (1 - 1e-6), value=value))
        assert float(inverse(fast) @ theta) >= best * (1 - 1e-3)


@given(seed=st.integers(0, 2**32 - 1))
def test_partitioned_leaves_nobody_far_behind_where_jobs_are_many(seed: int) -> None:
    workload = drawn(seed, 120, 3, kinds=3)
    workload = replace(workload, weight=np.ones(120), gpus=workload.gpus + 12)
    demand = proportional(workload) / workload.gang
    asks = demand > 0
    whole, parts = ((reached(each, workload)[asks] / demand[asks]) for each in (MaxMin(), Partitioned(MaxMin(), 3)))
    assert parts.min() >= 0.75 * whole.min()
