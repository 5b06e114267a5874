"""Combinators of share policies (fallback, blind, partitioned), and every share policy on the oddest of workloads."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from tests.workloads import a_workload, drawn, example_g, overdrawn, throughput

from poise.scheduler.model.errors import GaveUpError, RequestError
from poise.scheduler.model.workload import Allocation, Allocator, Workload
from poise.scheduler.policies.catalogue import POLICIES, Family, policy_named
from poise.scheduler.policies.combinators import (
    Fallback,
    HeterogeneityAgnostic,
    Partitioned,
    ShareCombinator,
    levelled,
    parted,
)
from poise.scheduler.policies.gavel import CostForm, FinishTime, Makespan, MaxMin, MaxThroughput, MinCost, SecondaryObjective
from poise.scheduler.policies.gavel_baselines import IsolatedShares, Proportional
from poise.scheduler.policies.shares import Count, Norm, isolated_throughput
from poise.scheduler.policies.strategy_proof import StrategyProof

EVERY = (
    MaxMin(),
    MaxMin(Norm.ISOLATED, SecondaryObjective.NOTHING),
    MaxMin(Norm.FASTEST),
    Makespan(),
    FinishTime(),
    MaxThroughput(),
    MaxThroughput(Count.RAW),
    MinCost(),
    MinCost(CostForm.SUM),
    StrategyProof(),
    IsolatedShares(),
    Proportional(),
    HeterogeneityAgnostic(MaxMin()),
    Partitioned(MaxMin(), 3),
    Fallback(FinishTime(), IsolatedShares(), "finish-time", "isolated"),
)


def shares(allocator: Allocator, workload: Workload, memory: Any = None) -> Allocation:
    allocation, _ = allocator.allocate(workload, allocator.start() if memory is None else memory)
    assert overdrawn(workload, allocation) < 1e-9
    return allocation


# Combinators


@dataclass(frozen=True)
class GivesUp:
    """An allocator that never has an answer."""

    def start(self) -> int:
        return 7

    def allocate(self, workload: Workload, memory: int) -> tuple[Allocation, int]:
        raise GaveUpError(f"a gap of {memory} is left")


def test_fallback_says_who_gave_up_why_and_who_answered() -> None:
    policy = Fallback(GivesUp(), IsolatedShares(), "gives-up", "isolated")
    got, memory = policy.allocate(example_g(), policy.start())
    assert got.remarks == ("gives-up gave up: a gap of 7 is left; shares by isolated instead",)
    assert got.share == pytest.approx(shares(IsolatedShares(), example_g()).share)
    assert memory == policy.start()


@pytest.mark.parametrize("name", [name for name, listing in POLICIES.items() if listing.family is Family.SHARE])
def test_fallback_calls_policies_as_the_catalogue_does_whatever_combinators_are_around_them(name: str) -> None:
    policy = policy_named(f"{name}+agnostic+fallback:to={name}+packed").answer
    assert isinstance(policy, ShareCombinator)
    assert isinstance(policy.allocator, Fallback)
    got = shares(replace(policy.allocator, allocator=GivesUp(), other=IsolatedShares()), example_g())
    assert got.remarks[-1] == f"{name} gave up: a gap of 7 is left; shares by {name} instead"


def test_fallback_is_not_noticed_where_the_policy_has_an_answer() -> None:
    got = shares(Fallback(MaxMin(), IsolatedShares(), "max-min", "isolated"), example_g())
    assert got.share.tolist() == shares(MaxMin(), example_g()).share.tolist()
    assert got.remarks == ()


def test_levelled_keeps_impossible_types_and_the_relation_of_pairs_to_singles() -> None:
    beside = np.array([[[2.0, 1.0]]])
    workload = a_workload([[8, 4, 0, 2]], [1, 1], beside=np.tile(beside, 2), kind=[0])
    level = levelled(workload)
    assert level.speed.tolist() == [[8, 8, 0, 2]]
    assert level.beside is not None
    assert level.beside[0, 0, :2].tolist() == [2, 2]


def test_partitioned_into_one_part_is_the_policy_itself() -> None:
    workload = drawn(3, 20, 3)
    policies: tuple[Allocator, ...] = (MaxMin(), Makespan(), FinishTime(), StrategyProof())
    for policy in policies:
        got, memory = Partitioned(policy, 1).allocate(workload, policy.start())
        want, remembered = policy.allocate(workload, policy.start())
        assert got.share.tolist() == want.share.tolist()
        assert got.objective == want.objective
        assert type(memory) is type(remembered)


def test_partitioned_loses_nothing_among_identical_jobs() -> None:
    workload = a_workload([[3, 1]] * 64, [10, 7])
    whole, parts = (throughput(workload, shares(p, workload)) for p in (MaxMin(), Partitioned(MaxMin(), 4)))
    assert parts.min() >= 0.95 * whole.min()


def test_partitioned_deals_out_every_gpu_and_every_job() -> None:
    workload = drawn(5, 40, 3)
    parts = parted(workload, 4)
    assert sum(part.gpus for part in parts).tolist() == workload.gpus.tolist()  # type: ignore[union-attr]
    assert sorted(np.concatenate([part.jobs for part in parts]).tolist()) == list(range(40))


def test_partitioned_gives_a_large_gang_a_part_that_holds_it() -> None:
    workload = a_workload([[1, 1]] * 9, [8, 4], gang=[6, *[1] * 8])
    parts = parted(workload, 4)
    home = next(part for part in parts if 0 in part.jobs)
    assert home.gpus[0] >= 6
    assert shares(Partitioned(MaxMin(), 4), workload).share[0].sum() > 0


def test_partitioned_has_no_part_without_a_job() -> None:
    assert len(parted(a_workload([[1]] * 2, [8]), 2)) == 2
    got = shares(Partitioned(MaxMin(), 5), a_workload([[1]] * 2, [8]))
    assert got.share[:, 0] == pytest.approx([1, 1], abs=1e-6)


def test_partitioned_remembers_jobs_that_move_to_another_part() -> None:
    policy, workload = Partitioned(Fallback(FinishTime(), IsolatedShares(), "finish-time", "isolated"), 2), drawn(1, 12, 2)
    _, memory = policy.allocate(workload, policy.start())
    assert memory.first.rows.tolist() == workload.rows.tolist()
    half = replace(workload, steps_left=workload.steps_left / 2).only(np.arange(1, 12))
    _, memory = policy.allocate(half, memory)
    assert memory.first.rows.tolist() == half.rows.tolist()
    assert (memory.first.alone[isolated_throughput(half) > 0] > 0).all()


def test_partitioned_into_no_parts_is_refused() -> None:
    with pytest.raises(RequestError, match="k=0"):
        Partitioned(MaxMin(), 0)


# Edges


@pytest.mark.parametrize("policy", EVERY, ids=repr)
def test_every_policy_answers_where_there_is_no_job(policy: Allocator) -> None:
    assert shares(policy, a_workload([], [1, 2])).share.shape == (0, 2)


@pytest.mark.parametrize("policy", EVERY, ids=repr)
def test_every_policy_gives_nothing_to_a_job_that_can_run_nowhere(policy: Allocator) -> None:
    got = shares(policy, a_workload([[0, 0], [2, 1], [9, 9]], [1, 2], gang=[1, 1, 4]))
    assert got.share[[0, 2]].max() == 0
    assert got.share[1].sum() == pytest.approx(1, abs=0.7)
    alone = shares(policy, a_workload([[0, 0]], [1, 2]))
    assert alone.share.tolist() == [[0, 0]]


@pytest.mark.parametrize("policy", EVERY, ids=repr)
def test_every_policy_answers_where_no_gpu_is_alive(policy: Allocator) -> None:
    assert shares(policy, a_workload([[2, 1]], [0, 0])).share.tolist() == [[0, 0]]
