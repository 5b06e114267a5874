"""Rounds that divide into tasks: the best split, the fewest GPUs that are as fast, against brute force."""

from functools import cache
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poise.scheduler.model.micro_batches import Mix, Tasks
from poise.scheduler.model.speed import Estimate, Locality

SLACK = 1e-9
"""By so much of it a float may differ from what it should be."""
AT_ONCE = ((0.0, 0.0, 0.0),)


def tasks(count: int, *seconds: float, sync: tuple[tuple[float, float, float], ...] | None = None) -> Tasks:
    return Tasks(count, seconds, sync or AT_ONCE * len(seconds))


@cache
def shortest(count: int, gpus: tuple[float, ...]) -> float:
    """Of all ways to give the tasks to these GPUs, each with its seconds a task, the one that is done first."""
    if not gpus:
        return float("inf") if count else 0.0
    ways = range(count + 1) if len(gpus) > 1 else (count,)
    return min(max(mine * gpus[0], shortest(count - mine, gpus[1:])) for mine in ways)


def brute(of: Tasks, mix: Mix) -> float:
    able = tuple(each for each, gpus in zip(of.seconds, mix, strict=True) for _ in range(gpus) if each > 0)
    return shortest(of.count, able)


SECONDS = st.integers(0, 12).map(float) | st.sampled_from([0.0, 0.1, 0.2, 0.3, 1 / 3, 0.7]) | st.floats(0.01, 10.0)
MIXES = st.lists(st.tuples(SECONDS, st.integers(0, 3)), min_size=1, max_size=3)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tasks, Mix]:
    kinds = draw(MIXES)
    syncs = tuple((sync, sync, sync) for sync in draw(st.lists(SECONDS, min_size=len(kinds), max_size=len(kinds))))
    return tasks(draw(st.integers(1, 9)), *(each for each, _ in kinds), sync=syncs), tuple(gpus for _, gpus in kinds)


@given(cases())
def test_split_is_as_short_as_the_best_of_all_ways_to_give_the_tasks_out(case: tuple[Tasks, Mix]) -> None:
    of, mix = case
    split, best = of.split(mix), brute(of, mix)
    assert (split is None) == (best == float("inf"))
    if split is not None:
        assert split.seconds == pytest.approx(best, rel=SLACK)


@given(cases())
def test_split_gives_every_task_to_a_gpu_that_does_it_in_time(case: tuple[Tasks, Mix]) -> None:
    of, mix = case
    split = of.split(mix)
    if split is None:
        return
    assert sum(quota * gpus for quota, gpus in zip(split.quota, mix, strict=True)) >= of.count
    for quota, each, gpus in zip(split.quota, of.seconds, mix, strict=True):
        assert quota * each <= split.seconds * (1 + SLACK)
        assert quota == 0 or (each > 0 and gpus > 0)
        assert each == 0 or gpus == 0 or (quota + 1) * each > split.seconds, "as many as fit"


@given(cases())
def test_fewest_is_as_fast_as_all_and_no_fewer_are(case: tuple[Tasks, Mix]) -> None:
    of, mix = case
    fewest, best = of.fewest(mix), brute(of, mix)
    if fewest is None:
        assert best == float("inf")
        return
    assert all(0 <= some <= gpus for some, gpus in zip(fewest, mix, strict=True))
    assert brute(of, fewest) == pytest.approx(best, rel=SLACK)
    fast = (part for part in product(*(range(gpus + 1) for gpus in mix)) if brute(of, part) <= best * (1 + SLACK))
    assert sum(fewest) == min(map(sum, fast))


@given(cases())
def test_fewest_of_the_fewest_is_itself(case: tuple[Tasks, Mix]) -> None:
    of, mix = case
    fewest = of.fewest(mix)
    assert fewest is None or sum(of.fewest(fewest) or ()) == sum(fewest)


@given(cases(), st.data())
def test_more_gpus_never_compute_a_round_more_slowly_nor_do_fewer_tasks(
    case: tuple[Tasks, Mix], data: st.DataObject
) -> None:
    of, mix = case
    kind = data.draw(st.integers(0, len(mix) - 1))
    more = (*mix[:kind], mix[kind] + 1, *mix[kind + 1 :])
    less, split = of.split(mix), of.split(more)
    if less is not None:
        assert split is not None
        assert split.seconds <= less.seconds * (1 + SLACK)
        fewer = Tasks(max(1, of.count - 1), of.seconds, of.sync).split(mix)
        assert fewer is not None
        assert fewer.seconds <= less.seconds * (1 + SLACK)


@given(st.integers(1, 1_000_000), st.integers(1, 10_000), st.floats(1e-9, 1e9))
def test_gpus_of_one_type_compute_in_turn(count: int, gpus: int, each: float) -> None:
    """To the last bit, whatever the numbers: rates with GPUs of one type are made by this rule."""
    of = tasks(count, each)
    in_turn = -(-count // gpus)
    assert of.split((gpus,)) == (in_turn * each, (in_turn,))
    assert of.fewest((gpus,)) == (-(-count // in_turn),)


@given(st.integers(1, 1_000_000), st.lists(st.tuples(st.floats(1e-3, 1e3), st.integers(1, 500)), min_size=1, max_size=5))
def test_large_rounds_are_as_short_as_counting_says(count: int, kinds: list[tuple[float, int]]) -> None:
    """No shorter round would do: a hair before its end, the GPUs have not done enough tasks."""
    of, mix = tasks(count, *(each for each, _ in kinds)), tuple(gpus for _, gpus in kinds)
    split = of.split(mix)
    assert split is not None
    done = [sum(int(split.seconds * hair / each) * gpus for each, gpus in kinds) for hair in (1 - SLACK, 1 + SLACK)]
    assert done[0] < count <= done[1]


@given(cases(), st.sampled_from(Locality))
def test_round_is_the_split_and_the_longest_synchronisation_of_those_that_compute(
    case: tuple[Tasks, Mix], locality: Locality
) -> None:
    of, mix = case
    split, seconds = of.split(mix), of.step_seconds(mix, locality)
    rate = Estimate(rates=(), tasks=of).on(mix, locality)
    if split is None or seconds is None:
        assert split is None
        assert seconds is None
        assert rate == 0.0
        return
    syncs = [of.sync[kind][locality] for kind, quota in enumerate(split.quota) if quota]
    assert seconds == split.seconds + max(syncs)
    assert rate == 1 / seconds


def test_split_of_the_worked_example() -> None:
    """V100 and K80: a task takes 1 s and 3 s; of two tasks the V100 does both."""
    of = tasks(2, 1.0, 3.0, sync=((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)))
    assert of.split((1, 1)) == (2.0, (2, 0))
    assert of.fewest((1, 1)) == (1, 0)
    assert of.step_seconds((1, 1), Locality.PACKED) == 2.5
    assert of.step_seconds((0, 1), Locality.PACKED) == 6.5


def test_fewest_leaves_out_those_that_have_nothing_to_do_and_prefers_slow_ones_that_will_do() -> None:
    assert tasks(2, 1.0, 3.0).fewest((8, 8)) == (2, 0)
    assert tasks(3, 1.0, 2.0).fewest((1, 2)) == (1, 1)
    assert tasks(5, 1.0, 2.0).fewest((2, 4)) == (2, 1)


def test_gpus_of_no_use_count_for_nothing() -> None:
    of = tasks(4, 1.0, 0.0, 2.0)
    assert of.split((0, 5, 0)) is None
    assert of.fewest((0, 5, 0)) is None
    assert of.step_seconds((0, 5, 0), 0) is None
    assert of.split((2, 5, 0)) == of.split((2, 0, 0))
    assert of.best == 1.0
    assert tasks(4, 0.0).best == 0.0
