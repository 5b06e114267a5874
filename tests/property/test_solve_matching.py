"""The matching of rows to rungs against an independent solver, and what it refuses."""

from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment  # type: ignore[import-untyped,unused-ignore]

from poise.scheduler.model.errors import InfeasibleError
from poise.scheduler.solve.matching import Matching, match

Floats = NDArray[np.float64]

WEIGHTS = st.one_of(st.integers(0, 6).map(float), st.floats(0.01, 1e4), st.just(inf))


@st.composite
def problems(draw: st.DrawFn) -> tuple[Floats, list[Floats]]:
    """Up to 12 rows and 3 ladders of up to 4 rooms; ties, zeros and forbidden places; every row may be somewhere."""
    rows, ladders = draw(st.integers(1, 12)), draw(st.integers(1, 3))
    weight = np.array(draw(st.lists(st.lists(WEIGHTS, min_size=ladders, max_size=ladders), min_size=rows, max_size=rows)))
    weight[np.isinf(weight).all(axis=1), 0] = 5.0
    rooms = st.lists(st.one_of(st.just(0.0), st.floats(0, 1e3)), min_size=1, max_size=4).map(lambda r: np.array(sorted(r)))
    return weight, draw(st.lists(rooms, min_size=ladders, max_size=ladders))


def dense(weight: Floats, charge: list[Floats], rungs: int) -> Floats:
    """(rows, rooms): every room of every rung as a place of its own."""
    places = [
        (k * weight[:, ladder] + room) for ladder, rooms in enumerate(charge) for k in range(1, rungs + 1) for room in rooms
    ]
    return np.stack(places, axis=1)


def least(weight: Floats, charge: list[Floats], rungs: int) -> float:
    cost = dense(weight, charge, rungs)
    rows, places = linear_sum_assignment(cost)
    return float(cost[rows, places].sum())


def recount(weight: Floats, charge: list[Floats], matching: Matching) -> float:
    """The cost of a matching, from its places alone; no rung has more rows than rooms."""
    places = list(zip(matching.ladder.tolist(), matching.rung.tolist(), strict=True))
    total = sum(rung * weight[row, ladder] for row, (ladder, rung) in enumerate(places))
    for ladder, rung in set(places):
        used = places.count((ladder, rung))
        assert used <= len(charge[ladder])
        total += charge[ladder][:used].sum()
    return float(total)


@given(problems())
def test_match_costs_no_more_than_the_optimum_over_all_rungs(problem: tuple[Floats, list[Floats]]) -> None:
    weight, charge = problem
    matching = match(weight, charge)
    assert matching.cost == pytest.approx(least(weight, charge, len(weight)), rel=1e-9)
    assert matching.cost == pytest.approx(recount(weight, charge, matching), rel=1e-9)


@given(problems(), st.integers(1, 3))
def test_match_keeps_to_the_rungs_there_are(problem: tuple[Floats, list[Floats]], rungs: int) -> None:
    weight, charge = problem
    try:
        expected = least(weight, charge, rungs)
        enough = sum(map(len, charge)) * rungs >= len(weight)
    except ValueError:
        enough = False
    if not enough:
        with pytest.raises(InfeasibleError):
            match(weight, charge, rungs)
        return
    matching = match(weight, charge, rungs)
    assert matching.rung.max() <= rungs
    assert matching.cost == pytest.approx(expected, rel=1e-9)


@given(problems())
def test_match_gives_the_same_answer_to_the_same_question(problem: tuple[Floats, list[Floats]]) -> None:
    first, again = match(*problem), match(*problem)
    assert first.cost == again.cost
    assert first.ladder.tolist() == again.ladder.tolist()
    assert first.rung.tolist() == again.rung.tolist()


@pytest.mark.parametrize("seed", range(3))
def test_match_is_exact_for_a_queue_of_a_hundred(seed: int) -> None:
    random = np.random.default_rng(seed)
    weight = random.lognormal(6, 2, (100, 1)) * random.uniform(1, 10, (100, 4))
    weight[random.random(weight.shape) < 0.2] = inf
    weight[:, 0] = np.where(np.isinf(weight).all(axis=1), 1.0, weight[:, 0])
    charge = [np.sort(random.lognormal(6, 2, rooms)) for rooms in (6, 3, 1, 4)]
    matching = match(weight, charge)
    assert matching.cost == pytest.approx(least(weight, charge, 40 if matching.rung.max() < 40 else 100), rel=1e-9)


def test_match_passes_over_rooms_that_never_come_free() -> None:
    matching = match(np.array([[1.0, 9.0], [1.0, 9.0]]), [np.array([inf]), np.array([0.0, 1.0])])
    assert matching.ladder.tolist() == [1, 1]
    assert matching.cost == 19.0


def test_match_of_nobody_costs_nothing() -> None:
    assert match(np.empty((0, 2)), [np.zeros(1), np.zeros(1)]).cost == 0.0


@pytest.mark.parametrize(
    ("weight", "charge"),
    [([[inf, inf]], [[0.0], [0.0]]), ([[1.0]], [[]]), ([[1.0]], [[inf]]), ([[]], [])],
    ids=["forbidden everywhere", "no rooms", "a room that never comes free", "no ladder"],
)
def test_match_refuses_a_row_that_can_be_nowhere(weight: list[list[float]], charge: list[list[float]]) -> None:
    with pytest.raises(InfeasibleError, match="row 0"):
        match(np.array(weight), [np.array(rooms, dtype=np.float64) for rooms in charge])
