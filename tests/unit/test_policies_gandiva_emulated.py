"""Gavel's emulation of Gandiva (docs/algorithms/gandiva.md): pairs by chance, only under overload, only where they gain."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.workloads import a_workload, overdrawn, workloads

from poise.scheduler.model.workload import Workload
from poise.scheduler.policies.gavel_baselines import GandivaEmulated

EMULATED = GandivaEmulated()


def known(workload: Workload) -> Workload:
    return replace(workload, known_beside=workload.beside, beside=None)


def crowd(jobs: int, each: float, gpus: float = 1.0) -> Workload:
    """Alike jobs of speed 10 that do `each` beside each other."""
    return known(a_workload([[10.0]] * jobs, [gpus], beside=[[[each]]], kind=[0] * jobs))


def test_nobody_is_paired_while_demand_is_no_more_than_capacity() -> None:
    allocation, memory = EMULATED.allocate(crowd(3, 9.0, gpus=3.0), EMULATED.start())
    assert allocation.share.tolist() == [[1.0]] * 3
    assert not len(allocation.pairs.share)
    assert not memory


def test_combinations_have_equal_time() -> None:
    allocation, memory = EMULATED.allocate(crowd(3, 9.0), EMULATED.start())
    assert allocation.pairs.share.tolist() == [0.5]
    assert sorted(allocation.share.ravel().tolist()) == [0.0, 0.0, 0.5]
    assert len(memory) == 2


@pytest.mark.parametrize("each", [0.0, 4.0, 5.0])
def test_two_that_do_no_more_together_than_in_turns_are_no_pair(each: float) -> None:
    allocation, _ = EMULATED.allocate(crowd(4, each), EMULATED.start())
    assert not len(allocation.pairs.share)
    assert allocation.share.tolist() == [[0.25]] * 4


def test_a_pair_stays_until_one_of_its_jobs_ends() -> None:
    workload = crowd(6, 9.0)
    _, before = EMULATED.allocate(workload, EMULATED.start())
    gone = next(iter(before))
    _, after = EMULATED.allocate(workload.only(workload.rows != gone), before)
    kept = {row: other for row, other in before.items() if gone not in (row, other)}
    assert kept.items() <= after.items()
    assert len(kept) == len(before) - 2


def test_a_pair_shares_only_the_types_on_which_it_gains() -> None:
    workload = known(a_workload([[10.0, 10.0]] * 3, [1.0, 1.0], beside=[[[9.0, 2.0]]], kind=[0] * 3))
    allocation, _ = EMULATED.allocate(workload, EMULATED.start())
    assert allocation.pairs.column.tolist() == [0]
    assert sorted(allocation.share[:, 1].tolist()) == [0.25, 0.25, 0.5]


def test_another_seed_draws_other_pairs() -> None:
    drawn = {tuple(sorted(GandivaEmulated(seed).allocate(crowd(8, 9.0), EMULATED.start())[1].items())) for seed in range(8)}
    assert len(drawn) > 1


@given(workloads(together=True), st.integers(0, 3))
def test_shares_are_feasible_and_every_pair_gains(workload: Workload, seed: int) -> None:
    allocation, memory = GandivaEmulated(seed).allocate(known(workload), EMULATED.start())
    assert overdrawn(workload, allocation) < 1e-9
    assert (allocation.share >= 0).all()
    pairs = allocation.pairs
    assert (workload.gang[pairs.first] == workload.gang[pairs.second]).all()
    assert len(np.unique(np.concatenate((pairs.first, pairs.second)))) <= len(memory)
