"""Hierarchical fairness on the worked examples of docs/algorithms/gavel.md."""

from collections.abc import Sequence
from dataclasses import replace
from math import isnan

import numpy as np
import pytest
from tests.workloads import a_workload, drawn, overdrawn, throughput

from poise.scheduler.model.arithmetic import Floats
from poise.scheduler.model.workload import Workload
from poise.scheduler.policies.gavel import Hierarchical
from poise.scheduler.policies.shares import proportional
from poise.scheduler.solve.water_filling import Inside


def levels(policy: Hierarchical, workload: Workload) -> Floats:
    allocation, _ = policy.allocate(workload, None)
    assert overdrawn(workload, allocation) < 1e-9
    return throughput(workload, allocation) / proportional(workload)


def of_tenants(workload: Workload, tenant: Sequence[int]) -> Workload:
    return replace(workload, tenant=np.array(tenant))


def five_jobs(weight: Sequence[float] = (1, 1, 1, 1, 1)) -> Workload:
    """a1 a2 | b1 b2 b3 on three GPUs of one type."""
    return of_tenants(a_workload([[1]] * 5, [3], weight=weight), (0, 0, 1, 1, 1))


def test_one_tenant_is_lexicographic_max_min() -> None:
    workload = a_workload([[2, 1], [2, 1], [1, 1]], [1, 3])
    got, _ = Hierarchical().allocate(workload, None)
    assert levels(Hierarchical(), workload) == pytest.approx([1.2, 1.2, 1.0], abs=1e-6)
    assert got.share == pytest.approx(np.array([[0.5, 0.5], [0.5, 0.5], [0, 1]]), abs=1e-5)


def test_tenants_get_what_their_weights_say() -> None:
    got = levels(Hierarchical(weights=(1, 2)), five_jobs())
    assert got == pytest.approx([1 / 2, 1 / 2, 2 / 3, 2 / 3, 2 / 3], abs=1e-6)


def test_fifo_inside_serves_the_earliest_jobs_in_full() -> None:
    got = levels(Hierarchical(Inside.FIFO, (1, 2)), five_jobs())
    assert got == pytest.approx([1, 0, 1, 1, 0], abs=1e-6)


def test_a_job_at_its_ceiling_passes_its_weight_on_inside_the_tenant() -> None:
    got = levels(Hierarchical(weights=(2, 1)), five_jobs(weight=(1, 3, 1, 1, 1)))
    assert got == pytest.approx([1, 1, 1 / 3, 1 / 3, 1 / 3], abs=1e-6)


def test_a_tenant_that_is_not_listed_weighs_one() -> None:
    assert levels(Hierarchical(weights=(2,)), five_jobs()) == pytest.approx(
        levels(Hierarchical(weights=(2, 1)), five_jobs()), abs=1e-9
    )


def test_a_tenant_s_own_weight_is_multiplied_by_the_listed_one() -> None:
    weighted = replace(five_jobs(), tenant_weight=np.array([3.0, 2.0]))
    for listed, together in (((1.0,), (3, 2)), ((2, 3), (6, 6)), ((1, 3), (1, 2))):
        assert levels(Hierarchical(weights=listed), weighted) == pytest.approx(
            levels(Hierarchical(weights=together), five_jobs()), abs=1e-9
        )


def test_a_tenant_without_jobs_takes_no_part() -> None:
    workload = of_tenants(a_workload([[1]] * 2, [1]), (0, 2))
    assert levels(Hierarchical(weights=(1, 50, 3)), workload) == pytest.approx([1 / 4, 3 / 4], abs=1e-6)


def test_a_gang_gets_the_gpu_time_of_a_single_job() -> None:
    workload = of_tenants(a_workload([[1]] * 3, [4], gang=[1, 2, 4]), (0, 1, 2))
    got, _ = Hierarchical().allocate(workload, None)
    assert got.share[:, 0] == pytest.approx([1, 3 / 4, 3 / 8], abs=1e-6)
    assert got.objective == pytest.approx(1, abs=1e-6)


def test_spread_columns_count_in_throughput_and_not_in_the_norm() -> None:
    workload = a_workload([[2, 1]], [4], gang=[2])
    assert levels(Hierarchical(), workload) == pytest.approx([1.0])


def test_a_job_that_can_run_nowhere_gets_nothing_and_takes_nothing() -> None:
    workload = of_tenants(a_workload([[1], [0], [1]], [1]), (0, 0, 1))
    got, _ = Hierarchical().allocate(workload, None)
    assert got.share[:, 0] == pytest.approx([1 / 2, 0, 1 / 2], abs=1e-6)


def test_rounding_that_leaves_the_solver_without_numbers_is_noticed() -> None:
    workload = of_tenants(drawn(165, 15, 2), (3, 2, 2, 3, 0, 3, 3, 3, 1, 0, 1, 0, 1, 3, 3))
    got, _ = Hierarchical().allocate(workload, None)
    assert np.isfinite(got.share).all()


def test_no_jobs_no_shares() -> None:
    got, _ = Hierarchical().allocate(a_workload([], [2, 2]), None)
    assert got.share.shape == (0, 2)
    assert isnan(got.objective)


def test_the_same_workload_has_the_same_shares_bit_for_bit() -> None:
    noise = np.random.default_rng(5)
    workload = of_tenants(a_workload(noise.uniform(0.5, 4, (40, 3)).tolist(), [4, 4, 4]), noise.integers(0, 4, 40).tolist())
    first, again = (Hierarchical().allocate(workload, None)[0].share for _ in range(2))
    assert (first == again).all()
