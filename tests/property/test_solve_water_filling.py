"""Water-filling against the loop that its definition is, one program after another, by a general solver."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import sparse  # type: ignore[import-untyped,unused-ignore]
from scipy.optimize import linprog  # type: ignore[import-untyped,unused-ignore]

from poise.scheduler.model.arithmetic import Floats
from poise.scheduler.solve.program import GpuMarket, PairThroughputs
from poise.scheduler.solve.water_filling import Filled, FillGroup, Inside, fill

Mask = NDArray[np.bool_]

WITHIN = 1e-6


class Plain:
    """Programs of a small market, with one variable for every row and column, and one more."""

    def __init__(self, market: GpuMarket, norm: Floats) -> None:
        rows, columns = market.speed.shape
        self.shape, self.norm = (rows, columns), norm
        self.levels = np.zeros((rows, rows * columns))
        time, use = np.zeros((rows, rows * columns)), np.zeros((len(market.capacity), rows * columns))
        for m in range(rows):
            here = slice(m * columns, (m + 1) * columns)
            self.levels[m, here] = market.speed[m] / (norm[m] or 1.0)
            time[m, here] = 1.0
            for c in range(columns):
                use[market.resource[c], m * columns + c] = market.size[m]
        self.matrix = np.vstack((time, use))
        self.limit = np.concatenate((np.ones(rows), market.capacity))

    def most(self, base: Floats, rates: Floats) -> float:
        """Largest c such that τ >= base + c·rates."""
        _, _ = self.shape
        wide = np.zeros((len(self.matrix), 1))
        matrix = np.vstack((np.hstack((self.matrix, wide)), np.hstack((-self.levels, rates[:, None]))))
        cost = np.append(np.zeros(self.matrix.shape[1]), -1.0)
        answer = linprog(cost, matrix, np.concatenate((self.limit, -base + 1e-11)), method="highs")
        assert answer.status == 0, answer.message
        return float(-answer.fun)

    def gain(self, base: Floats, row: int) -> float:
        """By how much one row can rise if nobody falls."""
        matrix = np.vstack((self.matrix, -self.levels))
        answer = linprog(-self.levels[row], matrix, np.concatenate((self.limit, -base + 1e-11)), method="highs")
        assert answer.status == 0, answer.message
        return float(-answer.fun - base[row])


def rates(market: GpuMarket, groups: Sequence[FillGroup], rising: Mask) -> Floats:
    rate = np.zeros(market.rows)
    for group in groups:
        able = [at for at, m in enumerate(group.members) if rising[m]]
        if group.inside is Inside.FIFO:
            able = able[:1]
        weights = np.ones(len(able)) if group.inside is Inside.FIFO else group.weights[able]
        for at, weight in zip(able, weights, strict=True):
            rate[group.members[at]] = group.weight * weight / weights.sum()
    return rate / market.size


def naive(market: GpuMarket, groups: Sequence[FillGroup], norm: Floats) -> Floats:
    """One program a pass, and one a row to see whether it can rise."""
    plain, levels = Plain(market, norm), np.zeros(market.rows)
    member = np.isin(np.arange(market.rows), np.concatenate([group.members for group in groups]))
    rising = member & np.array([norm[m] > 0 and plain.gain(levels, m) > WITHIN for m in range(market.rows)])
    while rising.any():
        rate = rates(market, groups, rising)
        levels = levels + max(plain.most(levels, rate), 0.0) * rate
        rising &= np.array([rate[m] == 0 or plain.gain(levels, m) > WITHIN for m in range(market.rows)])
    return levels


def check_feasible(market: GpuMarket, filled: Filled, norm: Floats) -> None:
    used = np.bincount(market.resource, market.size @ filled.x, len(market.capacity))
    assert (filled.x >= 0).all()
    assert (filled.x.sum(axis=1) <= 1 + 1e-6).all()
    assert (used <= market.capacity + 1e-6).all()
    assert filled.throughput == pytest.approx((market.speed * filled.x).sum(axis=1))
    assert (filled.throughput >= filled.levels * norm * (1 - 1e-6) - 1e-9).all()


def proportional(market: GpuMarket) -> Floats:
    prop: Floats = market.speed @ market.capacity[market.resource] / max(market.capacity.sum(), 1.0)
    return prop


@st.composite
def markets(draw: st.DrawFn) -> GpuMarket:
    rows, types = draw(st.integers(1, 7)), draw(st.integers(1, 3))
    speeds = st.sampled_from((0.0, 1.0, 1.0, 2.0, 3.0, 5.5))
    speed = np.array(draw(st.lists(st.lists(speeds, min_size=types, max_size=types), min_size=rows, max_size=rows)))
    size = np.array(draw(st.lists(st.sampled_from((1.0, 1.0, 2.0, 4.0)), min_size=rows, max_size=rows)))
    capacity = np.array(draw(st.lists(st.sampled_from((0.0, 1.0, 2.0, 3.0, 5.0)), min_size=types, max_size=types)))
    return GpuMarket(speed, size, capacity, np.arange(types))


@st.composite
def parted(draw: st.DrawFn, rows: int) -> list[FillGroup]:
    of = np.array(draw(st.lists(st.integers(0, 2), min_size=rows, max_size=rows)))
    weights = np.array(draw(st.lists(st.sampled_from((1.0, 1.0, 2.0, 3.0)), min_size=rows, max_size=rows)))
    return [
        FillGroup(draw(st.sampled_from((1.0, 2.0))), members, weights[members], draw(st.sampled_from(Inside)))
        for tenant in range(3)
        if len(members := np.flatnonzero(of == tenant))
    ]


@given(st.data())
def test_filling_is_what_the_loop_of_its_definition_gives(data: st.DataObject) -> None:
    market = data.draw(markets())
    groups = data.draw(parted(market.rows))
    norm = proportional(market)
    filled = fill(market, groups, norm)
    assert filled.levels == pytest.approx(naive(market, groups, norm), abs=1e-5)
    check_feasible(market, filled, norm)


@given(st.data())
def test_filling_leaves_nobody_who_could_have_more(data: st.DataObject) -> None:
    market = data.draw(markets())
    norm = proportional(market)
    groups = data.draw(parted(market.rows))
    filled, plain = fill(market, groups, norm), Plain(market, norm)
    assert all(
        plain.gain(filled.levels, m) < 1e-4 * max(market.fastest[m] / norm[m], 1.0)
        for m in np.flatnonzero(norm > 0).tolist()
    )


@given(st.data())
def test_filling_does_not_depend_on_the_order_of_rows_in_a_fair_group(data: st.DataObject) -> None:
    market = data.draw(markets())
    norm, weights = proportional(market), np.array(data.draw(st.lists(st.sampled_from((1.0, 2.0)), min_size=7, max_size=7)))
    order = np.array(data.draw(st.permutations(range(market.rows))))
    turned = GpuMarket(market.speed[order], market.size[order], market.capacity, market.resource)
    group = FillGroup(1.0, np.arange(market.rows), weights[: market.rows])
    levels = fill(market, [group], norm).levels
    again = fill(turned, [FillGroup(1.0, group.members, group.weights[order])], norm[order]).levels
    assert again == pytest.approx(levels[order], abs=1e-5)


@given(st.data())
def test_one_fair_group_is_lexicographic_max_min(data: st.DataObject) -> None:
    """No other feasible levels, of random ones, have a larger sorted g·τ/w."""
    market = data.draw(markets())
    norm = proportional(market)
    weights = np.array(data.draw(st.lists(st.sampled_from((1.0, 2.0)), min_size=market.rows, max_size=market.rows)))
    able = norm > 0
    best = np.sort(
        (market.size * fill(market, [FillGroup(1.0, np.arange(market.rows), weights)], norm).levels / weights)[able]
    )
    noise = np.random.default_rng(data.draw(st.integers(0, 99)))
    for _ in range(20):
        x = noise.dirichlet(np.ones(market.speed.shape[1] + 1), market.rows)[:, :-1]
        used = market.size @ x
        x *= np.minimum(1.0, market.capacity / np.where(used > 0, used, 1.0))
        other = np.sort((market.size * (market.speed * x).sum(axis=1) / np.where(able, norm, 1.0) / weights)[able])
        differs = np.flatnonzero(np.abs(other - best) > 1e-5)
        assert not len(differs) or other[differs[0]] < best[differs[0]]


@given(st.data())
def test_tenants_have_their_weights_while_none_of_them_is_full(data: st.DataObject) -> None:
    rows = data.draw(st.integers(4, 12))
    speed = np.array(data.draw(st.lists(st.floats(0.5, 4.0), min_size=rows * 2, max_size=rows * 2))).reshape(rows, 2)
    market = GpuMarket(speed, np.ones(rows), np.ones(2), np.arange(2))
    norm, half = proportional(market), rows // 2
    groups = [FillGroup(1.0, np.arange(half), np.ones(half)), FillGroup(2.0, np.arange(half, rows), np.ones(rows - half))]
    levels = fill(market, groups, norm).levels
    ceiling = market.fastest / norm
    if (levels < ceiling * (1 - 1e-3)).all():
        assert levels[half:].sum() == pytest.approx(2 * levels[:half].sum(), rel=1e-5)


@pytest.mark.parametrize("inside", Inside)
def test_filling_a_thousand_different_rows_takes_few_programs_and_leaves_nobody(inside: Inside) -> None:
    """Gavel's own loop stops here after two passes, with almost all rows still able to rise (docs/algorithms/gavel.md)."""
    noise = np.random.default_rng(3)
    rows = 1024
    market = GpuMarket(
        noise.uniform(0.1, 1.0, (rows, 3)) * (4.0, 2.0, 1.0), np.ones(rows), np.array([40.0, 30, 60]), np.arange(3)
    )
    of, weights, norm = noise.integers(0, 5, rows), noise.uniform(0.5, 2.0, rows), proportional(market)
    groups = [FillGroup(1.0 + e, np.flatnonzero(of == e), weights[of == e], inside) for e in range(5)]
    filled = fill(market, groups, norm)
    check_feasible(market, filled, norm)
    assert filled.passes <= 6
    assert filled.solves <= 30
    assert most_gained(market, norm, filled.levels) < 1e-3


def most_gained(market: GpuMarket, norm: Floats, levels: Floats) -> float:
    """The most that any row, relative to its fastest speed, has to gain where their sum is as large as can be."""
    rows, columns = market.speed.shape
    of, every = np.repeat(np.arange(rows), columns), np.arange(rows * columns)
    relative = market.speed / market.fastest[:, None]
    time = sparse.csr_matrix((np.ones(rows * columns), (of, every)))
    use = sparse.csr_matrix((np.repeat(market.size, columns), (np.tile(market.resource, rows), every)))
    gives = sparse.csr_matrix((relative.ravel(), (of, every)))
    base = levels * norm / market.fastest * (1 - 1e-9)
    limit = np.concatenate((np.ones(rows), market.capacity, -base))
    answer = linprog(-relative.ravel(), sparse.vstack((time, use, -gives)), limit, method="highs")
    assert answer.status == 0, answer.message
    return float((gives @ answer.x - base).max())


FAIR, FIFO = Inside.FAIR, Inside.FIFO


@pytest.mark.parametrize(
    ("first", "second", "levels"),
    [
        ((1.0, (1.0, 1.0), FAIR), (2.0, FAIR), (1 / 2, 1 / 2, 2 / 3, 2 / 3, 2 / 3)),
        ((1.0, (1.0, 1.0), FAIR), (2.0, FIFO), (1 / 2, 1 / 2, 1, 1, 0)),
        ((2.0, (1.0, 3.0), FAIR), (1.0, FAIR), (1, 1, 1 / 3, 1 / 3, 1 / 3)),
    ],
)
def test_two_tenants_with_five_jobs_on_three_gpus(
    first: tuple[float, Sequence[float], Inside], second: tuple[float, Inside], levels: Sequence[float]
) -> None:
    """The three variants in docs/algorithms/gavel.md."""
    market = GpuMarket(np.ones((5, 1)), np.ones(5), np.array([3.0]), np.zeros(1, dtype=np.int64))
    weight, weights, inside = first
    groups = [
        FillGroup(weight, np.arange(2), np.array(weights), inside),
        FillGroup(second[0], np.arange(2, 5), np.ones(3), second[1]),
    ]
    assert fill(market, groups, np.ones(5)).levels == pytest.approx(levels, abs=1e-6)


def test_alike_rows_have_exactly_the_same() -> None:
    market = GpuMarket(np.array([[3.0, 1.0]] * 3 + [[1.0, 2.0]] * 3), np.ones(6), np.array([1.0, 1.0]), np.arange(2))
    levels = fill(market, [FillGroup(1.0, np.arange(6), np.ones(6))], proportional(market)).levels
    assert len(set(levels[:3])) == len(set(levels[3:])) == 1


def test_a_row_in_no_group_or_without_a_norm_is_asked_for_nothing() -> None:
    market = GpuMarket(np.array([[1.0], [1.0], [0.0]]), np.ones(3), np.ones(1), np.zeros(1, dtype=np.int64))
    filled = fill(market, [FillGroup(1.0, np.array([1, 2]), np.ones(2))], np.array([1.0, 1.0, 0.0]))
    assert filled.levels == pytest.approx([0, 1, 0])


def test_nobody_fills_nothing() -> None:
    market = GpuMarket(np.zeros((0, 2)), np.zeros(0), np.ones(2), np.arange(2))
    filled = fill(market, [], np.zeros(0))
    assert (filled.x.shape, filled.passes, filled.solves) == ((0, 2), 0, 0)


def test_rows_that_share_fill_together() -> None:
    """Singles 10 and 20 steps/s, together 8 and 14: λ = 8/11 (docs/algorithms/gavel.md)."""
    beside = PairThroughputs(np.array([0, 1]), np.array([[[0.0], [8.0]], [[14.0], [0.0]]]))
    market = GpuMarket(np.array([[10.0], [20.0]]), np.ones(2), np.ones(1), np.zeros(1, dtype=np.int64), beside)
    filled = fill(market, [FillGroup(1.0, np.arange(2), np.ones(2))], np.array([10.0, 20.0]))
    assert filled.levels == pytest.approx([8 / 11, 8 / 11], abs=1e-6)
    assert filled.shared.share == pytest.approx([10 / 11], abs=1e-6)
