"""What `poise bench solve` draws, and how it is timed."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.workloads import overdrawn

from poise.lab.bench import (
    CLASSES_OF_PAIRS,
    MOST_KINDS_OF_PAIRS,
    WorkloadDraw,
    allocator_of,
    draw_apps,
    draw_for,
    draw_workload,
    time_allocation,
    time_policy,
    with_defaults,
)
from poise.scheduler.model.errors import RequestError
from poise.scheduler.model.workload import Allocation, Workload
from poise.scheduler.policies.catalogue import POLICIES, Family, policy_named

SHARES = [name for name, listing in POLICIES.items() if listing.family is Family.SHARE]


def _same(one: Workload, other: Workload) -> bool:
    return all(np.array_equal(getattr(one, each.name), getattr(other, each.name)) for each in fields(Workload))


def _allocated(spec: str, draw: WorkloadDraw) -> tuple[Workload, Allocation]:
    policy = policy_named(spec)
    workload = draw_for(policy, draw)
    return workload, time_allocation(allocator_of(policy), workload, 1, lambda _done: None)[1]


@given(jobs=st.integers(1, 40), types=st.integers(1, 5), seed=st.integers(0, 2**32), classes=st.none() | st.integers(1, 9))
def test_a_draw_is_a_sound_workload_and_always_the_same(jobs: int, types: int, seed: int, classes: int | None) -> None:
    draw = WorkloadDraw(jobs, types, seed, classes)
    workload = draw_workload(draw)
    assert _same(workload, draw_workload(draw))
    assert (workload.jobs, workload.types, workload.speed.shape) == (jobs, types, (jobs, types))
    assert set(workload.gang.tolist()) <= {1, 2, 4, 8}
    assert (workload.speed >= 0).all()
    assert (workload.speed[:, 0] > 0).all()
    assert (workload.steps_left > 0).all()
    assert (np.diff(workload.submitted) >= 0).all()
    assert (workload.submitted <= workload.now).all()
    first_seen = list(dict.fromkeys(workload.tenant.tolist()))
    assert first_seen == sorted(first_seen) == list(range(len(first_seen)))


def test_another_seed_is_another_draw() -> None:
    assert not np.array_equal(draw_workload(WorkloadDraw(20, seed=0)).speed, draw_workload(WorkloadDraw(20, seed=1)).speed)


def test_a_draw_has_the_shares_of_gangs_and_weights_of_gavels_generator() -> None:
    workload = draw_workload(WorkloadDraw(20_000))
    gangs = [float((workload.gang == size).mean()) for size in (1, 2, 4, 8)]
    assert gangs == pytest.approx([0.7, 0.1, 0.15, 0.05], abs=0.02)
    assert float((workload.weight == 5).mean()) == pytest.approx(0.2, abs=0.02)
    assert set(workload.weight.tolist()) == {1.0, 5.0}


def test_a_draw_wants_four_gpus_for_each_that_there_is() -> None:
    workload = draw_workload(WorkloadDraw(2_000))
    assert workload.gang.sum() / workload.gpus.sum() == pytest.approx(4.0, rel=0.01)


def test_without_classes_no_two_jobs_are_equally_fast() -> None:
    workload = draw_workload(WorkloadDraw(500))
    assert len(np.unique(workload.speed, axis=0)) == len(np.unique(workload.kind)) == 500


def test_jobs_of_a_kind_have_equal_speeds_and_gangs() -> None:
    workload = draw_workload(WorkloadDraw(300, classes=4))
    for kind in range(int(workload.kind.max()) + 1):
        here = workload.kind == kind
        assert len(np.unique(workload.speed[here], axis=0)) == len(np.unique(workload.gang[here])) == 1


def test_jobs_differ_in_what_they_gain_from_a_fast_type() -> None:
    speed = draw_workload(WorkloadDraw(500)).speed
    gain = speed[:, 0] / np.where(speed[:, 2] > 0, speed[:, 2], np.nan)
    assert np.nanquantile(gain, 0.1) < 2
    assert np.nanquantile(gain, 0.9) > 5


def test_with_packed_some_pairs_gain_and_some_do_not() -> None:
    workload = draw_for(policy_named("max-min+packed"), WorkloadDraw(300))
    beside = workload.known_beside
    assert beside is not None
    of_kind = np.unique(workload.kind, return_index=True)[1]
    speed, gang = workload.speed[of_kind], workload.gang[of_kind]
    assert not beside[gang[:, None] != gang].any()
    both = (beside > 0) & (beside.transpose(1, 0, 2) > 0)
    alone = np.where(speed > 0, speed, np.inf)[:, None, :]
    part = beside / alone
    together = (part + part.transpose(1, 0, 2))[both]
    assert (together > 1.05).any()
    assert (together < 0.95).any()
    assert (beside <= speed[:, None, :]).all()


def test_what_a_draw_leaves_open_is_settled_by_the_policy() -> None:
    assert with_defaults(policy_named("max-min"), WorkloadDraw(5)) == WorkloadDraw(5, gangs="gavel")
    assert with_defaults(policy_named("max-min+packed"), WorkloadDraw(5)) == WorkloadDraw(
        5, gangs="gavel", classes=CLASSES_OF_PAIRS
    )
    assert (draw_for(policy_named("allox+fallback"), WorkloadDraw(300)).gang == 1).all()
    asked = WorkloadDraw(5, gangs="2:1", classes=3)
    assert with_defaults(policy_named("allox+packed"), asked) == asked


@pytest.mark.parametrize("spec", [*SHARES, "max-min+packed", "finish-time+agnostic"])
def test_every_share_policy_answers_a_draw_feasibly_and_twice_the_same(spec: str) -> None:
    workload, allocation = _allocated(spec, WorkloadDraw(60))
    _, again = _allocated(spec, WorkloadDraw(60))
    assert np.isfinite(allocation.share).all()
    assert overdrawn(replace(workload, beside=workload.known_beside), allocation) <= 1e-6
    assert np.array_equal(allocation.share, again.share)
    assert np.array_equal(allocation.pairs.share, again.pairs.share)


def test_an_auction_is_always_the_same_and_gives_out_what_can_be_used() -> None:
    policy = policy_named("themis")
    draw = with_defaults(policy, WorkloadDraw(80, seed=3))
    assert (draw.gpus, draw.types) == (40, 1)
    one, other = (time_policy(policy, draw, 1, lambda _done: None) for _ in range(2))
    assert one.objective == other.objective
    assert (one.gpus, one.types) == (40, 1)


def test_apps_of_an_auction_are_sweeps_of_up_to_eight_alike_jobs_that_all_wait() -> None:
    snapshot = draw_apps(WorkloadDraw(50, types=1, gpus=40))
    _, sizes = np.unique(snapshot.ints(snapshot.columns.app), return_counts=True)
    assert len(sizes) == 50
    assert 1 <= sizes.min() <= sizes.max() <= 8
    assert not snapshot.running.any()
    assert snapshot.idle == (40,)


def test_gpus_are_shared_out_evenly_over_the_types() -> None:
    assert draw_workload(WorkloadDraw(9, gpus=8)).gpus.tolist() == [3, 3, 2]


@pytest.mark.parametrize(
    ("draw", "said"),
    [
        (WorkloadDraw(5, gpus=2), "2 GPUs are too few for 3 types"),
        (WorkloadDraw(5, gangs="x"), "gangs: "),
        (WorkloadDraw(MOST_KINDS_OF_PAIRS * 4, classes=MOST_KINDS_OF_PAIRS * 4), "too many for pairs"),
    ],
)
def test_a_draw_that_cannot_be_is_refused(draw: WorkloadDraw, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        draw_for(policy_named("max-min+packed"), draw)


def test_each_repeat_is_timed_and_told_and_the_least_counts() -> None:
    policy, told = policy_named("isolated"), list[int]()
    timing, _ = time_allocation(allocator_of(policy), draw_for(policy, WorkloadDraw(10)), 4, told.append)
    assert told == [1, 2, 3, 4]
    assert len(timing.seconds) == 4
    assert timing.best == min(timing.seconds) >= 0


def test_a_policy_without_shares_is_refused() -> None:
    with pytest.raises(RequestError, match="not 'fifo'"):
        allocator_of(policy_named("fifo"))
