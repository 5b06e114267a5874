"""Fits with coefficients that cannot be negative: exact on data that follow the curve, unmoved by spikes."""

from itertools import pairwise
from math import nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls  # type: ignore[import-untyped,unused-ignore]

from poise.scheduler.solve.curve_fitting import (
    Convergence,
    Sample,
    SpeedCurve,
    Training,
    convergence,
    nonnegative,
    speed_curve,
    without_spikes,
)

numbers = st.integers(-6, 6).map(float)


@given(st.integers(1, 4), st.data())
def test_nonnegative_least_squares_miss_by_no_more_than_a_reference_solver(variables: int, data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 6))
    design = np.array(data.draw(st.lists(numbers, min_size=rows * variables, max_size=rows * variables)))
    design = design.reshape(rows, variables)
    target = np.array(data.draw(st.lists(numbers, min_size=rows, max_size=rows)))
    found = nonnegative(design, target)
    assert (found >= 0).all()
    assert np.linalg.norm(design @ found - target) <= nnls(design, target)[1] + 1e-9


def test_nonnegative_least_squares_leave_out_what_would_be_negative() -> None:
    assert nonnegative(np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([2.0, -3.0])).tolist() == [2.0, 0.0]


def test_too_many_variables_are_refused() -> None:
    with pytest.raises(ValueError, match="11 variables"):
        nonnegative(np.ones((1, 11)), np.ones(1))


CURVES = [(0.01, 0.5, 0.2), (0.002, 0.1, 0.0), (1.0, 1.0, 3.0), (0.0005, 2.0, 0.05)]


@pytest.mark.parametrize(("b0", "b1", "b2"), CURVES)
def test_a_fit_recovers_the_curve_that_noise_free_losses_follow(b0: float, b1: float, b2: float) -> None:
    steps = [float(each) for each in range(0, 2000, 100)]
    found = convergence(steps, [1 / (b0 * k + b1) + b2 for k in steps])
    assert found is not None
    assert (found.b0, found.b1, found.b2) == pytest.approx((b0, b1, b2), rel=1e-4, abs=1e-6)


def test_a_spike_does_not_move_the_curve() -> None:
    steps = [float(each) for each in range(0, 2000, 100)]
    losses = [1 / (0.01 * k + 0.5) + 0.2 for k in steps]
    losses[7] *= 4
    found = convergence(steps, losses)
    assert found is not None
    assert (found.b0, found.b1, found.b2) == pytest.approx((0.01, 0.5, 0.2), rel=1e-4)


@given(st.lists(st.floats(0.0, 1e6), max_size=12).map(lambda values: sorted(values, reverse=True)))
def test_losses_that_only_fall_have_no_spikes(losses: list[float]) -> None:
    assert len(without_spikes(np.array(losses))) == len(losses)


@pytest.mark.parametrize("losses", [[], [3.0, 2.0, 1.5], [1.0] * 9, [1.0, 2.0, -1.0, 0.5, 0.1], [2.0, nan, 1.0] * 3])
def test_there_is_no_curve_through_too_few_points_or_points_that_do_not_fall(losses: list[float]) -> None:
    assert convergence([float(k) for k in range(len(losses))], losses) is None


@given(st.lists(st.floats(0.01, 100.0), min_size=4, max_size=12))
def test_a_fitted_curve_never_rises_and_never_falls_below_zero(losses: list[float]) -> None:
    found = convergence([10.0 * k for k in range(len(losses))], losses)
    if found is not None:
        ahead = [found.at(10.0 * k) for k in range(1, 3 * len(losses))]
        assert all(later <= earlier for earlier, later in pairwise(ahead))
        assert ahead[-1] >= 0


def test_convergence_is_where_an_epoch_lowers_the_loss_by_less_than_delta() -> None:
    curve = Convergence(0.01, 0.5, 0.2, scale=2.2)
    step = curve.converged(epoch=100.0, delta=0.01)
    assert curve.at(step) - curve.at(step + 100.0) == pytest.approx(0.01 * 2.2)
    assert curve.at(step + 1) - curve.at(step + 101.0) < 0.01 * 2.2


def test_a_curve_that_is_flat_from_the_start_has_converged_at_once() -> None:
    assert Convergence(0.01, 50.0, 0.2, scale=1.0).converged(epoch=1.0, delta=0.01) == 0.0
    assert Convergence(0.0, 1.0, 0.2, scale=1.0).converged(epoch=1.0, delta=0.01) == 0.0


SPEEDS = [
    (Training.SYNCHRONOUS, (0.05, 0.1, 0.4, 0.01, 0.02), 32.0),
    (Training.ASYNCHRONOUS, (0.5, 0.2, 0.03, 0.01), 1.0),
    (Training.ALL_REDUCE, (0.05, 0.1, 0.02), 32.0),
    (Training.ALL_REDUCE, (0.05, 0.0, 0.02), 32.0),
]


@pytest.mark.parametrize(("training", "coefficients", "batch"), SPEEDS)
def test_a_fit_recovers_the_speeds_that_were_measured(
    training: Training, coefficients: tuple[float, ...], batch: float
) -> None:
    true = SpeedCurve(training, coefficients, batch)
    servers = (0,) if training is Training.ALL_REDUCE else (1, 2, 4)
    samples = [Sample(p, w, true.at(p, w)) for p in servers for w in (1, 2, 3, 5, 8)]
    found = speed_curve(training, samples, batch)
    assert found.coefficients == pytest.approx(coefficients, rel=1e-6, abs=1e-9)
    assert found.at(servers[-1], 16) == pytest.approx(true.at(servers[-1], 16))


def test_a_speed_curve_that_takes_no_time_is_infinitely_fast() -> None:
    assert SpeedCurve(Training.ALL_REDUCE, (0.0, 0.0, 0.0)).at(0, 4) == float("inf")
