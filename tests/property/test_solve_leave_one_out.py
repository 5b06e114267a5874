"""What all the others have without one: all programs at once give what each gives by itself."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from tests.workloads import a_workload

from poise.lab.bench import WorkloadDraw, draw_for
from poise.scheduler.model.arithmetic import Floats
from poise.scheduler.model.workload import Workload
from poise.scheduler.policies import strategy_proof
from poise.scheduler.policies.catalogue import policy_named
from poise.scheduler.policies.shares import usable
from poise.scheduler.policies.strategy_proof import _classes, _discount, _nash, discounts


def one_by_one(workload: Workload, throughput: Floats) -> Floats:
    """Discounts by a program of its own for each class of equal jobs."""
    first, member = _classes(workload)
    return np.array([_discount(workload, throughput, leaver) for leaver in first.tolist()])[member]


@given(
    jobs=st.integers(1, 20),
    seed=st.integers(0, 10_000),
    types=st.integers(1, 4),
    classes=st.sampled_from((None, 2, 6)),
    holes=st.booleans(),
)
def test_discounts_of_all_at_once_are_those_of_one_by_one(
    jobs: int, seed: int, types: int, classes: int | None, holes: bool
) -> None:
    drawn = draw_for(policy_named("strategy-proof"), WorkloadDraw(jobs, types=types, seed=seed, classes=classes))
    if holes:
        random = np.random.default_rng(seed)
        drawn = replace(drawn, speed=np.where(random.random(drawn.speed.shape) < 0.3, 0.0, drawn.speed))
    workload = drawn.only(np.flatnonzero(usable(drawn).max(axis=1, initial=0.0) > 0))
    if not workload.jobs:
        return
    throughput = _nash(workload).throughput
    assert discounts(workload, throughput) == pytest.approx(one_by_one(workload, throughput), abs=1e-6)
    event(f"{len(_classes(workload)[0])} classes of {workload.jobs} jobs"[:12])


def test_all_at_once_needs_no_program_of_its_own_for_anybody(monkeypatch: pytest.MonkeyPatch) -> None:
    """One program for the optimum, and none one by one: those took minutes for a trace of 300 jobs."""
    solved: list[int] = []
    alone = strategy_proof._nash

    def counted(workload: Workload) -> object:
        solved.append(workload.jobs)
        return alone(workload)

    monkeypatch.setattr(strategy_proof, "_nash", counted)
    policy = policy_named("strategy-proof")
    workload = draw_for(policy, WorkloadDraw(120, seed=1))
    strategy_proof.StrategyProof().allocate(workload, None)
    assert solved == [120]


def test_a_gpu_type_of_which_nothing_is_left_is_of_no_consequence() -> None:
    workload = a_workload([[4.0, 2.0], [3.0, 1.0], [5.0, 5.0]], [2, 0])
    throughput = _nash(workload).throughput
    assert discounts(workload, throughput) == pytest.approx(one_by_one(workload, throughput), abs=1e-6)
