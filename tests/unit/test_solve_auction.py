"""The partial-allocation auction: the worked examples of docs/algorithms/themis.md, and divisible units by the solver."""

from collections.abc import Sequence
from math import log

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from poise.scheduler.model.arithmetic import Floats
from poise.scheduler.solve import solver
from poise.scheduler.solve.auction import BidTable, clear
from poise.scheduler.solve.program import GpuMarket, ShareProblem

NOTHING = 1e6


def a_table(rho: Sequence[float]) -> BidTable:
    """ρ with 1, 2, … units."""
    return BidTable(np.arange(len(rho) + 1), -np.log([NOTHING, *rho]))


def test_two_apps_on_four_gpus_share_them_and_pay_half_and_a_quarter() -> None:
    """(b): X slows down by 1.5 beyond 2 GPUs, Y does not."""
    cleared = clear([a_table([2, 1, 1, 0.75]), a_table([2, 1, 2 / 3, 0.5])], 4)
    assert cleared.units.tolist() == [2, 2]
    assert cleared.share == pytest.approx([0.5, 0.75], abs=1e-4)
    assert cleared.objective == pytest.approx(0.0)


def test_three_apps_on_eight_gpus() -> None:
    """(c)."""
    g = np.arange(1, 9)
    rhos = [80 / g / 30, (10 + 160 / g) / 60, (30 + 80 * np.where(g > 4, 1.3, 1.0) / g) / 30]
    cleared = clear([a_table(rho.tolist()) for rho in rhos], 8)
    assert cleared.units.tolist() == [3, 3, 2]
    assert cleared.share == pytest.approx([0.5368, 0.4857, 0.5921], abs=1e-4)
    got = [rho[units - 1] for rho, units in zip(rhos, cleared.units.tolist(), strict=True)]
    assert got == pytest.approx([0.8889, 1.0556, 2.3333], abs=1e-4)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 10, 50])
def test_payments_of_alike_linear_bidders_are_the_closed_form(n: int) -> None:
    """(a): with n·(n−1) units everybody has a whole number of them with and without each other."""
    supply = n * (n - 1)
    most = min(supply, 2 * n)
    cleared = clear([a_table([1 / units for units in range(1, most + 1)])] * n, supply)
    assert cleared.units.tolist() == [n - 1] * n
    assert cleared.share == pytest.approx([((n - 1) / n) ** (n - 1)] * n, abs=1e-9)


def test_one_bidder_takes_all_it_wants_and_pays_nothing() -> None:
    cleared = clear([a_table([3, 2, 1])], 2)
    assert (cleared.units.tolist(), cleared.share.tolist()) == ([2], [1.0])


def test_bidders_that_are_in_nobodys_way_pay_nothing() -> None:
    cleared = clear([a_table([3, 2]), a_table([5])], 3)
    assert (cleared.units.tolist(), cleared.share.tolist()) == ([2, 1], [1.0, 1.0])
    assert cleared.objective == pytest.approx(-log(2) - log(5))


def test_nobody_bids_for_nothing_or_has_nothing_to_bid_for() -> None:
    assert (clear([], 5).units.tolist(), clear([], 5).objective) == ([], 0.0)
    cleared = clear([a_table([1]), a_table([1])], 0)
    assert (cleared.units.tolist(), cleared.share.tolist()) == ([0, 0], [1.0, 1.0])


def test_more_units_than_there_are_cannot_be_won() -> None:
    cleared = clear([BidTable(np.array([0, 8]), np.log([1e-6, 1.0])), a_table([2])], 4)
    assert cleared.units.tolist() == [0, 1]


# Divisible units of two types: the engine of the shares, without limits on time


def nash(speed: Floats, supply: float = 0.01) -> Floats:
    """θ of the optimum on one unit of each type; a row's limit of time is out of reach because so little is supplied."""
    rows, types = speed.shape
    market = GpuMarket(speed, np.ones(rows), np.full(types, supply), np.arange(types))
    return solver.maximise(ShareProblem(market, log=np.ones(rows))).throughput / supply


def partial_allocation(speed: Floats) -> tuple[Floats, Floats]:
    """θ of the Nash optimum, and c."""
    best = nash(speed)
    rows = np.arange(len(speed))
    lost = [np.log(nash(speed[rows != row]) / best[rows != row]).sum() for row in rows]
    return best, np.exp(-np.array(lost))


TRUE = np.array([[1.0, 1.25], [1.0, 4.81], [1.0, 6.33]])
HONEST = np.prod(partial_allocation(TRUE), axis=0)
"""θ that each has if all report what is true."""


def test_two_divisible_types_have_the_published_optimum_and_payments() -> None:
    """(e)."""
    best, share = partial_allocation(TRUE)
    assert best == pytest.approx([1, 2.405, 3.165], abs=1e-3)
    assert share == pytest.approx([0.6854, 0.4938, 0.4938], abs=1e-3)
    assert best * share == pytest.approx([0.6854, 1.1877, 1.563], abs=1e-3)


@given(row=st.integers(0, 2), ratio=st.floats(1.0, 8.0))
def test_no_report_of_another_ratio_gains_anything(row: int, ratio: float) -> None:
    """θ of what the liar gets, at its true speeds, found from the split that its report leads to."""
    lied = TRUE.copy()
    lied[row, 1] = ratio
    market = GpuMarket(lied, np.ones(3), np.full(2, 0.01), np.arange(2))
    x = solver.maximise(ShareProblem(market, log=np.ones(3))).x / 0.01
    _, share = partial_allocation(lied)
    assert share[row] * float(TRUE[row] @ x[row]) <= HONEST[row] + 1e-6


def test_nobody_prefers_what_another_got() -> None:
    market = GpuMarket(TRUE, np.ones(3), np.full(2, 0.01), np.arange(2))
    x = solver.maximise(ShareProblem(market, log=np.ones(3))).x / 0.01
    _, share = partial_allocation(TRUE)
    got = share[:, None] * x
    worth = TRUE @ got.T
    assert (worth <= np.diag(worth)[:, None] + 1e-6).all()
