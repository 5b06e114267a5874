"""Pairs of rows that share resources (`scheduler/solve/pairs.py`), against a worked example and an independent solver."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.reference import broken_by, expanded, objective_of, reference

from poise.scheduler.model.arithmetic import Floats, Ints
from poise.scheduler.model.errors import GaveUpError, InfeasibleError
from poise.scheduler.solve import pairs
from poise.scheduler.solve.pairs import crossed, divided, folded, maximise_with_pairs, missing
from poise.scheduler.solve.program import GpuMarket, PairThroughputs, ShareProblem, Solution

FEASIBLE = 1e-6
CLOSE = 1e-5


def together(*throughputs: float) -> ShareProblem:
    """docs/algorithms/gavel.md: one GPU, 10 and 20 steps/s alone, these together; maximise the least relative speed."""
    beside = np.zeros((2, 2, 1))
    beside[0, 1, 0], beside[1, 0, 0] = throughputs
    speed = np.array([[10.0], [20.0]])
    market = GpuMarket(speed, np.ones(2), np.ones(1), np.zeros(1, dtype=np.int64), PairThroughputs(np.arange(2), beside))
    return ShareProblem(market, slope=speed[:, 0], level=1.0)


@st.composite
def markets(draw: st.DrawFn) -> GpuMarket:
    """Few kinds, many rows of each; some columns draw on one resource; some speeds are zero; some kinds cannot share."""
    kinds, rows = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    columns, resources = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    speed = random.choice([0.0, 1.0, 1.0, 1.0], (kinds, columns)) * random.uniform(0.2, 5.0, (kinds, columns))
    speed *= 10.0 ** random.integers(-2, 3, kinds)[:, None]
    ratio = random.choice([0.0, 1.0, 1.0], (kinds, kinds, columns)) * random.uniform(0.2, 1.1, (kinds, kinds, columns))
    kind = random.integers(0, kinds, rows)
    size = random.choice([1.0, 1.0, 2.0, 4.0], kinds)[kind]
    capacity = random.integers(0, draw(st.sampled_from([3, 9])), resources).astype(np.float64)
    count = random.choice([1.0, 1.0, 2.0, 3.0], rows) if draw(st.booleans()) else None
    beside = PairThroughputs(kind, speed[:, None, :] * ratio)
    return GpuMarket(speed[kind], size, capacity, random.integers(0, resources, columns), beside, count)


@st.composite
def problems(draw: st.DrawFn) -> ShareProblem:
    """A level, a worth of time, or both; sometimes with what must be met whatever the level."""
    market = draw(markets())
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scale = np.where(market.fastest > 0, market.fastest, 1.0)
    wants = draw(st.sampled_from(["level", "value", "both"]))
    slope = random.choice([0.0, 0.5, 1.0, 1.0], market.rows) * random.uniform(0.5, 2.0, market.rows) * scale
    level = 0.0 if wants == "value" or not slope.any() else float(random.uniform(0.5, 5.0))
    value = None
    if wants != "level" or not level:
        value = (market.speed / scale[:, None]) * random.choice([0.5, 1.0, 2.0], market.rows)[:, None]
    base = random.choice([-0.05, 0.0, 0.0, 0.02, 0.1], market.rows) * scale if draw(st.booleans()) else None
    return ShareProblem(market, base, slope, level, value)


def solved(problem: ShareProblem) -> Solution | None:
    """The answer, None if there is none."""
    try:
        return maximise_with_pairs(problem)
    except InfeasibleError:
        return None


def near(one: float, other: float, within: float = CLOSE) -> bool:
    return abs(one - other) <= within * max(1.0, abs(one), abs(other))


def without_sharing(problem: ShareProblem) -> ShareProblem:
    return replace(problem, market=replace(problem.market, beside=None))


@pytest.mark.parametrize(("throughputs", "level"), [((8.0, 14.0), 8 / 11), ((4.0, 8.0), 0.5)])
def test_sharing_gives_the_levels_of_the_worked_example(throughputs: tuple[float, float], level: float) -> None:
    answer = maximise_with_pairs(together(*throughputs))
    assert answer.level == pytest.approx(level, rel=1e-9)


def test_sharing_gives_the_times_of_the_worked_example() -> None:
    answer = maximise_with_pairs(together(8.0, 14.0))
    assert answer.shared.share == pytest.approx([10 / 11])
    assert answer.x[:, 0] == pytest.approx([0.0, 1 / 11])


def test_sharing_is_left_alone_where_taking_turns_does_as_much() -> None:
    answer = maximise_with_pairs(together(4.0, 8.0))
    assert len(answer.shared.share) == 0
    assert answer.x[:, 0] == pytest.approx([0.5, 0.5])


def test_pressure_tells_what_a_unit_less_asked_would_bring() -> None:
    problem = together(8.0, 14.0)
    less = 1e-4
    for row in range(2):
        eased = replace(problem, base=np.where(np.arange(2) == row, -less, 0.0))
        gain = (maximise_with_pairs(eased).level - maximise_with_pairs(problem).level) / less
        assert maximise_with_pairs(problem).pressure[row] == pytest.approx(gain, rel=1e-6)


@given(problems())
def test_answers_are_feasible_and_as_good_as_the_general_solver_finds(problem: ShareProblem) -> None:
    answer = solved(problem)
    if answer is None:
        with pytest.raises((InfeasibleError, GaveUpError)):
            reference(problem)
        return
    assert broken_by(problem, answer) <= FEASIBLE
    assert near(objective_of(problem, answer), reference(problem))


@given(problems())
def test_sharing_is_never_worse_than_not_sharing(problem: ShareProblem) -> None:
    try:
        alone = reference(without_sharing(problem))
    except (InfeasibleError, GaveUpError):
        return
    assert objective_of(problem, maximise_with_pairs(problem)) >= alone - CLOSE * max(1.0, abs(alone))


@given(problems())
def test_alike_rows_written_out_give_the_same_objective(problem: ShareProblem) -> None:
    together, apart = solved(problem), solved(expanded(problem))
    assert (together is None) == (apart is None)
    if together is not None and apart is not None:
        assert near(objective_of(problem, together), objective_of(expanded(problem), apart), 1e-6)


@given(problems(), st.integers(0, 2**32 - 1))
def test_order_of_rows_does_not_matter_to_the_objective(problem: ShareProblem, seed: int) -> None:
    other = reordered(problem, np.random.default_rng(seed).permutation(problem.market.rows))
    one, two = solved(problem), solved(other)
    assert (one is None) == (two is None)
    if one is not None and two is not None:
        assert near(objective_of(problem, one), objective_of(other, two), 1e-6)


def reordered(problem: ShareProblem, order: Ints) -> ShareProblem:
    def pick(each: Floats | None) -> Floats | None:
        return None if each is None else each[order]

    market = problem.market
    assert market.beside is not None
    beside = replace(market.beside, kind=market.beside.kind[order])
    market = replace(market, speed=market.speed[order], size=market.size[order], beside=beside, count=pick(market.count))
    return replace(problem, market=market, base=pick(problem.base), slope=pick(problem.slope), value=pick(problem.value))


@given(problems())
def test_answers_are_the_same_bit_for_bit(problem: ShareProblem) -> None:
    one, other = solved(problem), solved(problem)
    if one is None or other is None:
        assert one is other
        return
    assert one.x.tobytes() == other.x.tobytes()
    assert one.shared.share.tobytes() == other.shared.share.tobytes()
    assert one.pressure.tobytes() == other.pressure.tobytes()


@given(problems())
def test_who_is_under_pressure_gets_just_what_is_asked(problem: ShareProblem) -> None:
    answer = solved(problem)
    if answer is None:
        return
    level = answer.level if problem.level else 0.0
    asked = (0.0 if problem.base is None else problem.base) + level * (problem.slope if problem.slope is not None else 0.0)
    scale = np.where(problem.market.fastest > 0, problem.market.fastest, 1.0)
    assert (answer.pressure >= 0).all()
    pressed = answer.pressure * scale > 1e-6 * max(1.0, abs(objective_of(problem, answer)))
    assert (abs(answer.throughput - asked) / scale)[pressed].max(initial=0.0) <= 1e-6


def test_what_cannot_be_met_is_infeasible() -> None:
    problem = replace(together(8.0, 14.0), base=np.array([9.0, 9.0]), slope=None, level=0.0)
    with pytest.raises(InfeasibleError, match="nothing meets"):
        maximise_with_pairs(problem)


def test_what_can_be_met_only_together_is_met() -> None:
    problem = replace(together(8.0, 14.0), base=np.array([7.0, 13.0]), slope=None, level=0.0)
    assert broken_by(problem, maximise_with_pairs(problem)) <= FEASIBLE


def test_a_level_without_bound_is_refused() -> None:
    with pytest.raises(InfeasibleError, match="no bound"):
        maximise_with_pairs(replace(together(8.0, 14.0), slope=np.zeros(2)))


def test_logarithms_are_refused_in_one_line() -> None:
    with pytest.raises(GaveUpError, match="logarithms with sharing"):
        maximise_with_pairs(replace(together(8.0, 14.0), log=np.ones(2)))


def test_alike_rows_share_with_each_other_and_the_time_of_all_is_told() -> None:
    """Three alike rows on one and a half GPUs, each at 0.9 beside another: one and a half pairs all the time."""
    beside = PairThroughputs(np.zeros(1, dtype=np.int64), np.full((1, 1, 1), 0.9))
    market = GpuMarket(np.ones((1, 1)), np.ones(1), np.full(1, 1.5), np.zeros(1, dtype=np.int64), beside, np.full(1, 3.0))
    answer = maximise_with_pairs(ShareProblem(market, slope=np.ones(1), level=1.0))
    assert answer.level == pytest.approx(0.9)
    assert (*answer.shared.first, *answer.shared.second) == (0, 0)
    assert answer.shared.share == pytest.approx([1.5])


def test_a_row_that_is_alone_never_shares_with_itself() -> None:
    beside = PairThroughputs(np.zeros(1, dtype=np.int64), np.full((1, 1, 1), 0.9))
    market = GpuMarket(np.ones((1, 1)), np.ones(1), np.ones(1), np.zeros(1, dtype=np.int64), beside)
    answer = maximise_with_pairs(ShareProblem(market, slope=np.ones(1), level=1.0))
    assert answer.level == pytest.approx(1.0)
    assert len(answer.shared.share) == 0


@given(problem=problems())
def test_pairs_found_by_their_price_are_as_good_as_all_of_them(problem: ShareProblem) -> None:
    at_once = solved(problem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pairs, "ALL_AT_ONCE", -1)
        patch.setattr(pairs, "BEST", 1)
        one_by_one = solved(problem)
    assert (at_once is None) == (one_by_one is None)
    if at_once is not None and one_by_one is not None:
        assert broken_by(problem, one_by_one) <= FEASIBLE
        assert near(objective_of(problem, at_once), objective_of(problem, one_by_one), 1e-6)


TIMES = st.lists(st.floats(0.0, 3.0), min_size=1, max_size=6).map(np.array)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_time_is_divided_so_that_all_get_what_they_want_if_that_can_be(rows: int, ways: int, seed: int) -> None:
    """Wants are made from a division, so that there is one; what is found must give as much to all."""
    random = np.random.default_rng(seed)
    count = random.choice([1.0, 2.0, 5.0], rows)
    speed = random.choice([0.25, 0.5, 1.0, 0.3], ways)
    parts = random.dirichlet(np.ones(ways + 1), rows)[:, :-1] * count[:, None]
    time, wants = parts.sum(axis=0), parts @ speed / count
    assert missing(0, np.arange(rows), (speed, time), wants, count, 1e-9) is None
    found = divided(speed, time, wants, count)
    assert (found >= 0).all()
    assert found.sum(axis=0) == pytest.approx(time)
    assert (found.sum(axis=1) <= count + 1e-9).all()
    assert (found @ speed / count >= wants - 1e-9).all()


@given(st.integers(2, 6), st.integers(0, 2**32 - 1))
def test_what_is_missing_cuts_off_the_time_that_misses_it(rows: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    speed, time, wants, count = random.uniform(0, 1, 3), random.uniform(0, 1, 3), random.uniform(0, 1, rows), np.ones(rows)
    time = time * min(1.0, rows / time.sum())
    cut = missing(0, np.arange(rows), (speed, time), wants, count, 1e-9)
    found = divided(speed, time, wants, count)
    if cut is None:
        assert (found @ speed >= wants - 1e-8).all()
    else:
        assert np.maximum(speed - cut.over, 0.0) @ time + cut.size * cut.over < wants[cut.rows].sum()


@given(TIMES)
def test_folded_pairs_give_each_its_time_and_none_itself_if_it_has_at_most_half(time: Floats) -> None:
    first, second, share = folded(time)
    spent = np.bincount(first, share, len(time)) + np.bincount(second, share, len(time))
    assert spent == pytest.approx(time, abs=1e-9)
    if time.max() <= time.sum() / 2:
        assert share[first == second].sum() == pytest.approx(0.0, abs=1e-9)


@given(TIMES, TIMES)
def test_crossed_pairs_give_both_sides_their_time(left: Floats, right: Floats) -> None:
    left, right = left + 0.1, right + 0.1
    right = right * (left.sum() / right.sum())
    first, second, share = crossed(left, right)
    assert np.bincount(first, share, len(left)) == pytest.approx(left)
    assert np.bincount(second, share, len(right)) == pytest.approx(right)
    assert len(share) <= len(left) + len(right)
