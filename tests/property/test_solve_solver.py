"""The door to the solvers, `engine.maximise`, against an independent solver; alike rows, warm starts, and time dealt out."""

from dataclasses import replace
from math import isnan

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.reference import broken_by, objective_of, reference

from poise.scheduler.model.arithmetic import Floats
from poise.scheduler.model.errors import GaveUpError, InfeasibleError
from poise.scheduler.model.workload import Pairs
from poise.scheduler.solve.interior_point import maximise_interior
from poise.scheduler.solve.program import GpuMarket, ShareProblem, Solution
from poise.scheduler.solve.simplex import SimplexBasis, maximise_vertex
from poise.scheduler.solve.solver import FEW, alike, dealt, maximise

FEASIBLE = 1e-6
CLOSE = 1e-5
BLOCKS = ("level", "value", "value with base", "log")
VERTEX = ("level and value", "value with base")

seeds = st.integers(0, 2**32 - 1)


@st.composite
def markets(draw: st.DrawFn, most: int = 12) -> GpuMarket:
    """Speeds over three decades, some of them 0; gangs; several columns of one resource. Every row can run somewhere."""
    rows, columns = draw(st.integers(1, most)), draw(st.integers(1, 4))
    random = np.random.default_rng(draw(seeds))
    resources = int(random.integers(1, columns + 1))
    speed = 10.0 ** random.uniform(-1, 2, (rows, 1)) * random.uniform(0.1, 1.0, (rows, columns))
    speed[random.random(speed.shape) < 0.2] = 0.0
    speed[np.arange(rows), random.integers(0, columns, rows)] = 10.0 ** random.uniform(-1, 2, rows)
    size = random.choice([1.0, 1.0, 2.0, 4.0], rows)
    capacity = random.integers(1, 2 + rows, resources).astype(float)
    resource = np.concatenate([np.arange(resources), random.integers(0, resources, columns - resources)])
    if draw(st.booleans()):  # rows that are alike
        of = random.integers(0, rows, rows)
        speed, size = speed[of], size[of]
    return GpuMarket(speed, size, capacity, resource)


@st.composite
def problems(draw: st.DrawFn, wants: tuple[str, ...] = (*BLOCKS, *VERTEX)) -> ShareProblem:
    """What is asked depends on a row's speed and size alone, so that alike rows stay alike."""
    return a_problem(draw(markets()), draw(st.sampled_from(wants)), draw(st.sampled_from((0.01, 0.05, 0.3))))


def a_problem(market: GpuMarket, wants: str, part: float) -> ShareProblem:
    scale = market.fastest
    slope = scale / market.size
    value = market.speed / scale[:, None] / np.sqrt(market.size)[:, None]
    if wants == "level":
        return ShareProblem(market, slope=slope, level=2.0)
    if wants == "value":
        return ShareProblem(market, value=value)
    if wants == "value with base":
        return ShareProblem(market, base=part / market.rows * slope, value=value)
    if wants == "log":
        return ShareProblem(market, log=market.size)
    return ShareProblem(market, base=-part * slope, slope=slope, level=1.0, value=value * part / market.rows)


def near(one: float, other: float, within: float = CLOSE) -> bool:
    return abs(one - other) <= within * max(1.0, abs(one), abs(other))


def solved(problem: ShareProblem) -> Solution | None:
    try:
        return maximise(problem)
    except InfeasibleError:
        return None


def assert_best(problem: ShareProblem) -> None:
    answer = solved(problem)
    if answer is None:
        with pytest.raises((InfeasibleError, GaveUpError)):
            reference(problem)
        return
    assert broken_by(problem, answer) <= FEASIBLE
    assert near(objective_of(problem, answer), reference(problem))


# Against the general solver


@pytest.mark.parametrize("wants", sorted({*BLOCKS, *VERTEX}))
@given(market=markets(), part=st.sampled_from((0.01, 0.05, 0.3, 5.0)))
def test_answers_are_feasible_and_as_good_as_the_general_solver_finds(wants: str, market: GpuMarket, part: float) -> None:
    assert_best(a_problem(market, wants, part))


@pytest.mark.parametrize("wants", VERTEX)
@given(market=markets(), part=st.sampled_from((0.01, 0.05, 0.3)))
def test_few_rows_with_a_second_aim_go_to_the_simplex_method_and_get_a_vertex(
    wants: str, market: GpuMarket, part: float
) -> None:
    assume(not market.is_even)
    answer = maximise(a_problem(market, wants, part))
    assert isinstance(answer.start, SimplexBasis)
    first, _, _ = alike(a_problem(market, wants, part))
    # As many x are above 0 as there are constraints, at the most: time and level of each class, and resources.
    assert (answer.x[first] > 1e-9).sum() <= 2 * len(first) + len(market.capacity)


@pytest.mark.parametrize("wants", ["level", "value", "log"])
@given(market=markets())
def test_one_aim_alone_goes_to_the_interior_point_method_and_tells_of_pressure(wants: str, market: GpuMarket) -> None:
    answer = maximise(a_problem(market, wants, 0.05))
    assert answer.start is None
    assert not np.isnan(answer.pressure).any()


@pytest.mark.parametrize("wants", VERTEX)
@given(market=markets(), part=st.sampled_from((0.01, 0.05, 0.3)))
def test_both_methods_find_the_same_objective(wants: str, market: GpuMarket, part: float) -> None:
    problem = a_problem(market, wants, part)
    one, other = maximise_vertex(problem, None), maximise_interior(problem)
    assert broken_by(problem, one) <= FEASIBLE
    assert broken_by(problem, other) <= FEASIBLE
    assert near(objective_of(problem, one), objective_of(problem, other), 1e-6)


@pytest.mark.parametrize("rows", [FEW, FEW + 1])
def test_a_second_aim_is_served_alike_on_both_sides_of_the_limit(rows: int) -> None:
    random = np.random.default_rng(7)
    speed = random.uniform(0.1, 5.0, (rows, 3))
    market = GpuMarket(speed, random.choice([1.0, 2.0], rows), np.array([20.0, 30.0, 9.0]), np.arange(3))
    problem = a_problem(market, "level and value", 0.05)
    answer = maximise(problem)
    assert isinstance(answer.start, SimplexBasis) == (rows == FEW)
    assert broken_by(problem, answer) <= FEASIBLE
    assert near(objective_of(problem, answer), reference(problem))


def test_what_cannot_be_met_is_infeasible() -> None:
    market = GpuMarket(np.ones((2, 1)), np.ones(2), np.ones(1), np.zeros(1, dtype=np.int64))
    for value in (None, np.ones((2, 1))):
        with pytest.raises(InfeasibleError):
            maximise(ShareProblem(market, base=np.array([0.6, 0.6]), value=value))


def test_a_row_that_can_run_nowhere_gets_nothing_and_bounds_nobody() -> None:
    speed = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 3.0]])
    market = GpuMarket(speed, np.ones(3), np.array([1.0, 0.0]), np.arange(2))
    answer = maximise(ShareProblem(market, slope=np.ones(3), level=1.0))
    assert answer.level == pytest.approx(1.0)
    assert answer.x == pytest.approx(np.array([[0, 0], [1, 0], [0, 0]]))
    nobody = maximise(ShareProblem(replace(market, capacity=np.zeros(2)), slope=np.ones(3), level=1.0))
    assert not nobody.x.any()
    assert isnan(nobody.level)


# Alike rows


@given(problem=problems(), times=st.integers(2, 4))
def test_alike_rows_have_exactly_the_same(problem: ShareProblem, times: int) -> None:
    many = repeated(problem, times)
    answer = solved(many)
    assume(answer is not None)
    assert answer is not None
    first, member, _ = alike(many)
    assert np.array_equal(answer.x, answer.x[first][member])
    assert np.array_equal(answer.throughput, answer.throughput[first][member])


@given(problem=problems(), times=st.integers(2, 4))
def test_many_alike_rows_are_as_well_off_as_written_out_one_by_one(problem: ShareProblem, times: int) -> None:
    assert_best(repeated(problem, times))


def repeated(problem: ShareProblem, times: int) -> ShareProblem:
    """Every row so many times over."""
    market = problem.market
    of = np.tile(np.arange(market.rows), times)

    def each(asked: Floats | None) -> Floats | None:
        return None if asked is None else asked[of]

    return replace(
        problem,
        market=replace(market, speed=market.speed[of], size=market.size[of]),
        base=each(problem.base),
        slope=each(problem.slope),
        value=each(problem.value),
        log=each(problem.log),
    )


@given(problem=problems())
def test_rows_of_a_class_are_equal_and_counted(problem: ShareProblem) -> None:
    first, member, count = alike(problem)
    market = problem.market
    assert np.array_equal(market.speed, market.speed[first][member])  # all else that is asked follows from these
    assert np.array_equal(market.size, market.size[first][member])
    assert np.array_equal(np.bincount(member), count)
    assert np.array_equal(member[first], np.arange(len(first)))


def test_equal_rows_are_one_class_wherever_they_stand() -> None:
    for seed in range(300):
        random = np.random.default_rng(seed)
        speed = np.repeat(random.uniform(0.1, 50.0, (2, 4)), (5, 1), axis=0)
        market = GpuMarket(speed, np.ones(6), np.ones(4), np.arange(4))
        _, member, _ = alike(a_problem(market, "level and value", 0.05))
        assert len(set(member[:5].tolist())) == 1


# Warm starts


@given(problem=problems(VERTEX), seed=seeds)
def test_a_warm_start_finds_the_objective_of_a_cold_one(problem: ShareProblem, seed: int) -> None:
    random = np.random.default_rng(seed)
    start = maximise(problem).start
    changed = problem
    if problem.value is not None:
        changed = replace(problem, value=problem.value * random.uniform(0.5, 2.0, problem.value.shape))
    market = changed.market
    changed = replace(
        changed, market=replace(market, capacity=market.capacity + random.integers(0, 2, len(market.capacity)))
    )
    warm, cold = maximise(changed, start), maximise(changed)
    assert broken_by(changed, warm) <= FEASIBLE
    assert near(objective_of(changed, warm), objective_of(changed, cold), 1e-9)


@given(one=problems(VERTEX), other=problems(VERTEX))
def test_a_start_of_another_program_does_no_harm(one: ShareProblem, other: ShareProblem) -> None:
    answer = maximise(other, maximise(one).start)
    assert near(objective_of(other, answer), objective_of(other, maximise(other)), 1e-9)


@given(problem=problems(VERTEX))
def test_a_program_that_has_just_been_solved_takes_no_further_step(problem: ShareProblem) -> None:
    answer = maximise(problem)
    assume(answer.start is not None)
    assert maximise(problem, answer.start).effort == 0


@given(problem=problems())
def test_answers_are_the_same_bit_for_bit(problem: ShareProblem) -> None:
    one, other = solved(problem), solved(problem)
    assume(one is not None)
    assert one is not None
    assert other is not None
    assert one.x.tobytes() == other.x.tobytes()


# Time together, dealt out


@st.composite
def dealings(draw: st.DrawFn) -> tuple[Pairs, list[int], int]:
    """Pairs of classes with their time, and the members of each class."""
    sizes = draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    random = np.random.default_rng(draw(seeds))
    member = random.permutation(np.repeat(np.arange(len(sizes)), sizes))
    pairs = [(a, b) for a in range(len(sizes)) for b in range(a, len(sizes)) if a != b or sizes[a] > 1]
    chosen = [pair for pair in pairs if random.random() < 0.7]
    first, second = (np.array([pair[side] for pair in chosen], dtype=np.int64) for side in (0, 1))
    shared = Pairs(first, second, random.integers(0, 3, len(chosen)), random.uniform(0.1, 2.0, len(chosen)))
    return shared, member.tolist(), len(sizes)


@given(dealings())
def test_time_dealt_out_keeps_totals_in_equal_parts_and_puts_nobody_beside_itself(
    dealing: tuple[Pairs, list[int], int],
) -> None:
    shared, members, classes = dealing
    member = np.array(members, dtype=np.int64)
    got = dealt(shared, member, classes)
    assert (got.first != got.second).all()
    assert (got.share > 0).all()
    for a, b, column, share in zip(shared.first, shared.second, shared.column, shared.share, strict=True):
        alone = Pairs(*(np.array([each]) for each in (a, b, column, share)))
        part = dealt(alone, member, classes)
        assert part.share.sum() == pytest.approx(share)
        assert (part.column == column).all()
        assert set(member[part.first]) | set(member[part.second]) == {a, b}
        time = np.bincount(part.first, part.share, len(member)) + np.bincount(part.second, part.share, len(member))
        for each in {int(a), int(b)}:
            inside = time[member == each]
            assert inside == pytest.approx(np.full(len(inside), share * (2 if a == b else 1) / len(inside)))
        assert len(part.share) <= (member == a).sum() + (member == b).sum()
    assert got.share.sum() == pytest.approx(shared.share.sum())


def test_nothing_is_dealt_out_of_nothing() -> None:
    assert len(dealt(Pairs.none(), np.array([0, 0, 1]), 2).share) == 0
