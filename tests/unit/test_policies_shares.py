"""Share policies on the worked examples of docs/algorithms/gavel.md."""

from dataclasses import replace
from math import exp, inf, isnan, log, nan
from typing import Any

import numpy as np
import pytest
from tests.workloads import a_workload, example_g, overdrawn, throughput

from poise.scheduler.model.workload import Allocation, Allocator, Awareness, Leftover, Workload
from poise.scheduler.policies.combinators import HeterogeneityAgnostic
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
from poise.scheduler.policies.shares import Count, Norm, fastest, isolated_throughput, packed, proportional
from poise.scheduler.policies.strategy_proof import StrategyProof


def shares(allocator: Allocator, workload: Workload, memory: Any = None) -> Allocation:
    allocation, _ = allocator.allocate(workload, allocator.start() if memory is None else memory)
    assert overdrawn(workload, allocation) < 1e-9
    return allocation


# Normalisers


def test_normalisers_of_the_running_example() -> None:
    workload = example_g()
    assert proportional(workload) == pytest.approx([25, 8, 75])
    assert isolated_throughput(workload) == pytest.approx([50 / 3, 16 / 3, 50])
    assert fastest(workload).tolist() == [40, 12, 100]


def test_normalisers_come_from_packed_columns_unless_the_job_can_only_run_spread() -> None:
    workload = a_workload([[4, 0, 3, 2]], [2, 2], gang=[2])
    assert packed(workload).tolist() == [[4, 2]]


def test_a_gang_larger_than_what_is_alive_of_a_type_cannot_run_there() -> None:
    workload = a_workload([[4, 1]], [2, 8], gang=[4])
    assert packed(workload).tolist() == [[0, 1]]
    assert shares(MaxMin(), workload).share == pytest.approx(np.array([[0, 1]]))


# Max-min


def test_max_min_over_iso_makes_every_job_of_the_example_nine_percent_faster_than_isolated() -> None:
    got = shares(MaxMin(Norm.ISOLATED), example_g())
    assert got.objective == pytest.approx(12 / 11, abs=1e-6)
    assert got.share == pytest.approx(np.array([[5, 0], [5, 1], [1, 10]]) / 11, abs=1e-6)


def test_max_min_over_prop_has_the_same_shares_on_another_scale() -> None:
    got = shares(MaxMin(), example_g())
    assert got.objective == pytest.approx(8 / 11, abs=1e-6)
    assert got.share == pytest.approx(np.array([[5, 0], [5, 1], [1, 10]]) / 11, abs=1e-6)


def test_blind_max_min_believes_in_two_thirds_and_says_that_it_is_blind() -> None:
    got = shares(HeterogeneityAgnostic(MaxMin()), example_g())
    assert got.objective == pytest.approx(2 / 3, abs=1e-6)
    assert got.awareness is Awareness.BLIND


def test_max_min_gives_gangs_of_unequal_size_the_same_gpu_time() -> None:
    got = shares(MaxMin(), a_workload([[1]] * 3, [3], gang=[1, 2, 3]))
    assert got.share[:, 0] == pytest.approx([1, 1 / 2, 1 / 3], abs=1e-6)
    with_spare = shares(MaxMin(), a_workload([[1]] * 3, [4], gang=[1, 2, 4]))
    assert with_spare.objective == pytest.approx(1, abs=1e-6)
    assert (with_spare.share[:, 0] >= np.array([1, 1 / 2, 1 / 4]) - 1e-6).all()


def test_max_min_gives_time_in_proportion_to_weight() -> None:
    got = shares(MaxMin(), a_workload([[1]] * 3, [1], weight=[1, 1, 2]))
    assert got.share[:, 0] == pytest.approx([0.25, 0.25, 0.5], abs=1e-6)


@pytest.mark.parametrize("then", [SecondaryObjective.THROUGHPUT, SecondaryObjective.WATER_FILLING])
def test_max_min_leaves_no_throughput_on_the_table(then: SecondaryObjective) -> None:
    workload = a_workload([[2, 1], [2, 1], [1, 1]], [1, 3])
    got = shares(MaxMin(then=then), workload)
    assert got.objective == pytest.approx(1, abs=1e-6)
    assert throughput(workload, got) / proportional(workload) == pytest.approx([1.2, 1.2, 1.0], abs=1e-4)


def test_max_min_with_spread_columns_uses_them_for_throughput_but_not_for_what_is_fair() -> None:
    workload = a_workload([[4, 2], [4, 2]], [4], gang=[4, 4])
    got = shares(MaxMin(), workload)
    assert got.objective == pytest.approx(2.0, abs=1e-6)
    assert got.share == pytest.approx(np.array([[0.5, 0], [0.5, 0]]), abs=1e-6)


@pytest.mark.parametrize(("together", "level"), [((8, 14), 8 / 11), ((4, 8), 1 / 2)])
def test_max_min_packs_a_pair_only_if_that_pays(together: tuple[float, float], level: float) -> None:
    beside = [[[0], [together[0]]], [[together[1]], [0]]]
    workload = a_workload([[10], [20]], [1], beside=beside, kind=[0, 1])
    got = shares(MaxMin(), workload)
    assert got.objective == pytest.approx(level, abs=1e-6)
    if level > 0.5:
        assert got.pairs.share == pytest.approx([10 / 11], abs=1e-5)
        assert got.share[1, 0] == pytest.approx(1 / 11, abs=1e-5)


def test_pairs_keep_their_places_beside_a_job_that_can_run_nowhere() -> None:
    beside = [[[8.0], [0.0]], [[0.0], [0.0]]]
    workload = a_workload([[0.0], [10.0], [10.0]], [1], beside=beside, kind=[1, 0, 0])
    got = shares(MaxMin(), workload)
    assert {(one, other) for one, other in zip(got.pairs.first, got.pairs.second, strict=True)} == {(1, 2)}
    assert throughput(workload, got) == pytest.approx([0, 8, 8], rel=1e-5)


# Finish-time fairness


def test_finish_time_of_fresh_jobs_is_max_min_over_iso() -> None:
    got = shares(FinishTime(), example_g())
    assert got.objective == pytest.approx(11 / 12, abs=1e-6)
    assert got.share == pytest.approx(np.array([[5, 0], [5, 1], [1, 10]]) / 11, abs=1e-6)


def test_finish_time_counts_age_and_what_was_done_before() -> None:
    workload = example_g(submitted=(0, -100, -50))
    ledger = FinishTimeLedger(workload.rows, workload.steps_left, np.ones(3), np.array([0.0, 40.0, 30.0]), nan)
    got = shares(FinishTime(), workload, ledger)
    assert got.objective == pytest.approx(0.98131, abs=1e-5)
    assert got.share == pytest.approx(np.array([[0.4246, 0], [0.5, 0.0754], [0.0754, 0.9246]]), abs=1e-4)


def test_finish_time_remembers_by_row_what_work_would_have_taken_alone() -> None:
    policy, first = FinishTime(), example_g(rows=(3, 5, 9))
    _, ledger = policy.allocate(first, policy.start())
    later = replace(first.only(np.array([0, 2])), now=100.0, steps_left=np.array([4000.0, 15000.0]))
    assert ledger.alone_now(later) == pytest.approx([0, 5000 / 50])
    _, after = policy.allocate(later, ledger)
    assert after.rows.tolist() == [3, 9]
    assert after.alone == pytest.approx([0, 100])
    newcomer = replace(later, rows=np.array([9, 11]), steps_left=np.array([15000.0, 10.0]))
    assert after.alone_now(newcomer) == pytest.approx([100, 0])


def test_finish_time_promise_does_not_change_while_everybody_gets_its_share() -> None:
    policy, workload = FinishTime(), example_g()
    allocation, ledger = policy.allocate(workload, policy.start())
    for now in (60.0, 120.0, 180.0):
        left = workload.steps_left - now * throughput(workload, allocation)
        again, ledger = policy.allocate(replace(workload, now=now, steps_left=left), ledger)
        assert again.objective == pytest.approx(allocation.objective, rel=1e-6)


def test_finish_time_gives_a_heavier_job_a_smaller_ratio() -> None:
    workload = a_workload([[1], [1]], [1], weight=[1, 3])
    got = shares(FinishTime(), workload)
    assert got.share[:, 0] == pytest.approx([0.25, 0.75], abs=1e-6)
    assert got.objective == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("left", [1e-14, 1e-16, 1e-200])
@pytest.mark.parametrize("age", [(200, 200), (200, 200 * (1 + 1e-12)), (200, 300)])
def test_finish_time_of_jobs_that_are_done_but_for_rounding_is_that_of_now(left: float, age: tuple[float, float]) -> None:
    workload = a_workload([[1], [1]], [1], steps=[left, 3 * left], submitted=[-each for each in age])
    ledger = FinishTimeLedger(workload.rows, workload.steps_left, np.ones(2), np.full(2, 100.0), nan)
    got = shares(FinishTime(), workload, ledger)
    assert got.objective == pytest.approx(max(age) / 100)
    assert (got.share > 0).all()


def test_finish_time_takes_a_job_of_unknown_length_for_endless() -> None:
    got = shares(FinishTime(), a_workload([[1], [2]], [1], steps=[inf, 100]))
    assert got.objective == pytest.approx(1.0, abs=1e-6)
    assert got.share[:, 0] == pytest.approx([0.5, 0.5], abs=1e-6)


def test_ledgers_of_parts_join_by_row() -> None:
    one = FinishTimeLedger(np.array([1, 7]), np.array([10.0, 70.0]), np.ones(2), np.array([1.0, 7.0]), 0.5)
    two = FinishTimeLedger(np.array([3]), np.array([30.0]), np.ones(1), np.array([3.0]), 0.9)
    both = one.joined([two])
    assert both.rows.tolist() == [1, 3, 7]
    assert both.alone.tolist() == [1, 3, 7]
    assert both.steps_left.tolist() == [10, 30, 70]
    assert both.rho == 0.9
    assert isnan(FinishTimeLedger.blank().joined([FinishTimeLedger.blank()]).rho)


# Makespan


def test_makespan_of_the_example_is_340_seconds() -> None:
    got = shares(Makespan(), example_g())
    assert got.objective == pytest.approx(340, rel=1e-6)
    assert got.share == pytest.approx(np.array([[5, 0], [9, 3], [3, 14]]) / 17, abs=1e-6)
    assert shares(HeterogeneityAgnostic(Makespan()), example_g()).objective == pytest.approx(250, rel=1e-6)


def test_makespan_does_not_hold_up_jobs_that_end_sooner() -> None:
    workload = a_workload([[1], [1]], [2], steps=[100, 1000])
    assert throughput(workload, shares(Makespan(), workload)) == pytest.approx([1, 1], abs=1e-4)


def test_makespan_takes_unknown_lengths_for_the_longest_known_and_says_so() -> None:
    workload = a_workload([[1], [1], [1]], [1], steps=[100, 300, inf])
    got = shares(Makespan(), workload)
    assert got.objective == pytest.approx(700, rel=1e-6)
    assert "1 of 3 jobs is unknown" in got.remarks[0]


def test_makespan_of_unknown_lengths_only_treats_all_alike() -> None:
    got = shares(Makespan(), a_workload([[1], [5]], [1], steps=[inf, inf]))
    assert isnan(got.objective)
    assert got.share[:, 0] == pytest.approx([0.5, 0.5], abs=1e-6)


# Throughput and cost


@pytest.mark.parametrize(("count", "want"), [(Count.RAW, 110), (Count.NORMALISED, 2.2666667)])
def test_max_throughput_of_the_example(count: Count, want: float) -> None:
    got = shares(MaxThroughput(count), example_g())
    assert got.objective == pytest.approx(want, rel=1e-6)
    assert got.share[1] == pytest.approx([0, 0], abs=1e-6)


@pytest.mark.parametrize(
    ("form", "deadline", "objective", "share"),
    [
        (CostForm.RATIO, inf, 111.1111, [[0, 0], [0, 0], [0, 1]]),
        (CostForm.RATIO, 600, 42.29765, [[0, 0], [1 / 3, 0], [0, 1]]),
        (CostForm.SUM, inf, 127.2401, [[1, 0], [0, 0], [0, 1]]),
        (CostForm.SUM, 600, 123.4767, [[2 / 3, 0], [1 / 3, 0], [0, 1]]),
    ],
)
def test_min_cost_of_the_example(form: CostForm, deadline: float, objective: float, share: list[list[float]]) -> None:
    got = shares(MinCost(form), example_g(deadline=(inf, deadline, inf)))
    assert got.objective == pytest.approx(objective, rel=1e-6)
    assert got.share == pytest.approx(np.array(share), abs=1e-5)
    assert got.remarks == ()
    assert (got.leftover is Leftover.IDLE) == (form is CostForm.RATIO)


def test_min_cost_meets_as_many_deadlines_as_it_can_and_names_the_others() -> None:
    steps, deadline = [600, 500, 100, 5000, 10, inf], [1000, 1000, 1000, 1000, -5, 70]
    workload = a_workload([[1]] * 6, [1], steps=steps, deadline=deadline, rows=[2, 3, 5, 7, 11, 13])
    got = shares(MinCost(), workload)
    met = throughput(workload, got)[:4] * 1000 >= np.array(steps[:4]) * (1 - 1e-5)
    assert met.tolist() == [False, True, True, False]
    assert got.remarks == (
        "min-cost: jobs in row 13 have a deadline but no known length, and cannot be held to it",
        "min-cost: jobs in rows 7, 11 cannot meet their deadlines on any GPU type",
        "min-cost: jobs in row 2 cannot meet their deadlines beside the others'",
    )


def test_min_cost_meets_deadlines_that_just_fit() -> None:
    workload = a_workload([[1]] * 2, [1], steps=[500, 500], deadline=[1000, 1000])
    got = shares(MinCost(), workload)
    assert throughput(workload, got) == pytest.approx([0.5, 0.5], rel=1e-5)
    assert got.remarks == ()


def test_min_cost_without_prices_takes_all_types_for_equally_dear() -> None:
    got = shares(MinCost(), example_g(price=(0, 0)))
    assert got.objective == pytest.approx(100)
    free = shares(MinCost(), example_g(price=(1, 0)))
    assert free.share == pytest.approx(np.array([[0, 0], [0, 0], [0, 1]]), abs=1e-6)


# Strategy-proof


def test_strategy_proof_discounts_the_nash_optimum_of_the_example() -> None:
    workload = example_g()
    got = shares(StrategyProof(), workload)
    assert got.objective == pytest.approx(log(0.4), abs=1e-6)
    want = np.array([0.48, 0.489796, 0.595041]) * [0.8, 0.75, 2 / 3]
    assert throughput(workload, got) / proportional(workload) == pytest.approx(want, abs=1e-5)


def test_strategy_proof_gives_equal_jobs_the_discount_of_their_number() -> None:
    for n in (1, 2, 3, 10):
        got = shares(StrategyProof(), a_workload([[3.0]] * n, [1]))
        want = ((n - 1) / n) ** (n - 1) if n > 1 else 1.0
        assert got.share.sum() == pytest.approx(want, rel=1e-5)


def test_strategy_proof_gives_a_heavier_job_more() -> None:
    got = shares(StrategyProof(), a_workload([[1], [1]], [1], weight=[1, 2]))
    # without the light job the heavy one has 1 in place of 2/3, and the other way round
    want = [exp(2 * log(2 / 3)) / 3, exp(log(1 / 3) / 2) * 2 / 3]
    assert got.share[:, 0] == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("factors", [(2, 1), (0.5, 1), (1, 2), (1, 0.5), (0, 1), (1, 0)])
def test_strategy_proof_rewards_no_false_report_of_speed(factors: tuple[float, float]) -> None:
    truth = example_g()
    honest = throughput(truth, shares(StrategyProof(), truth))
    for job in range(3):
        lied = truth.speed.copy()
        lied[job] *= factors
        got = shares(StrategyProof(), replace(truth, speed=lied))
        assert throughput(truth, got)[job] <= honest[job] * (1 + 1e-6)


# Baselines


def test_isolated_gives_the_worst_off_as_many_gpus_as_blind_max_min() -> None:
    workload = a_workload([[3, 1], [1, 2], [5, 5], [2, 1]], [3, 2], gang=[1, 2, 1, 2])
    one, other = (
        workload.gang * shares(p, workload).share.sum(axis=1) for p in (IsolatedShares(), HeterogeneityAgnostic(MaxMin()))
    )
    assert one.min() == pytest.approx(other.min(), abs=1e-6)


def test_isolated_and_proportional_do_not_look_at_speeds() -> None:
    workload = a_workload([[3, 1], [1, 9]], [1, 3], gang=[1, 3])
    iso, prop = shares(IsolatedShares(), workload), shares(Proportional(), workload)
    assert iso.share == pytest.approx(np.array([[1 / 4, 3 / 4], [0, 1 / 2]]))
    assert prop.share == pytest.approx(np.array([[1 / 4, 3 / 4], [0, 3 / 4]]))
    assert iso.awareness is prop.awareness is Awareness.BLIND
    assert isnan(iso.objective)
