"""Confidence intervals: Student's t against SciPy, what they promise, and the cases in which there is none."""

from math import inf, isclose, nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats  # type: ignore[import-untyped,unused-ignore]

from poise.lab.analysis.statistics import LEVEL, Mean, contrast, mean_of, t_quantile

NUMBERS = st.lists(st.floats(0.001, 1e6), min_size=2, max_size=8)


@pytest.mark.parametrize("degrees", [*range(1, 60), 99, 100, 999, 9999])
def test_t_quantile_is_that_of_scipy(degrees: int) -> None:
    assert t_quantile(degrees) == pytest.approx(stats.t.ppf(0.5 + LEVEL / 2, degrees), rel=1e-12)


@given(NUMBERS)
def test_interval_of_a_mean_is_that_of_scipy(values: list[float]) -> None:
    found = mean_of(values)
    if len(set(values)) == 1:
        assert found == Mean(values[0], None, len(values))
        return
    want = stats.t.interval(LEVEL, len(values) - 1, np.mean(values), stats.sem(values))
    assert found.value == pytest.approx(np.mean(values))
    assert found.interval == pytest.approx(want, rel=1e-9, abs=1e-9)


def test_interval_holds_the_true_mean_95_times_in_100() -> None:
    """Of 4,000 samples of 5, 3,800 ± 27 (two standard deviations) are to hold it."""
    drawn = np.random.default_rng(1).normal(10, 3, (4000, 5))
    intervals = [mean_of(sample).interval for sample in drawn.tolist()]
    held = sum(found is not None and found[0] <= 10 <= found[1] for found in intervals)
    assert abs(held - 3800) <= 28


@pytest.mark.slow
def test_interval_of_a_ratio_holds_the_true_one_95_times_in_100() -> None:
    """Two policies on traces of very different weight: y is 0.8·x but for noise of its own."""
    rng = np.random.default_rng(2)
    x = np.exp(rng.normal(8, 2, (4000, 5)))
    y = 0.8 * x * np.exp(rng.normal(0, 0.1, x.shape))
    found = [contrast(a, b).ratio_interval for a, b in zip(y.tolist(), x.tolist(), strict=True)]
    held = sum(each is not None and each[0] <= 0.8 <= each[1] for each in found)
    assert abs(held - 3800) <= 28


@pytest.mark.parametrize(
    ("values", "want"),
    [
        ([], Mean(None, None, 0)),
        ([None, nan, inf], Mean(None, None, 0)),
        ([7.0], Mean(7.0, None, 1)),
        ([None, 7.0, nan], Mean(7.0, None, 1)),
        ([0.1, 0.1, 0.1], Mean(0.1, None, 3)),
    ],
)
def test_one_value_and_equal_values_have_no_interval(values: list[float | None], want: Mean) -> None:
    assert mean_of(values) == want


def test_values_that_are_missing_do_not_count() -> None:
    assert mean_of([1.0, None, 3.0, nan]) == mean_of([1.0, 3.0])
    assert mean_of([1.0, None, 3.0]).runs == 2


def test_numbers_beyond_all_floats_give_no_interval_rather_than_an_error() -> None:
    assert mean_of([1e308, -1e308, 1e308]).interval is None
    assert contrast([1e300, 1e-300], [1e-300, 1e300]).ratio_interval is None


def test_pairing_tells_apart_what_means_do_not() -> None:
    """One policy is a tenth faster on every trace, whatever the trace."""
    slow = [10.0, 100.0, 1000.0, 10_000.0]
    fast = [each * factor for each, factor in zip(slow, (0.90, 0.91, 0.89, 0.90), strict=True)]
    mine, other = mean_of(fast).interval, mean_of(slow).interval
    assert mine is not None
    assert other is not None
    assert mine[1] > other[0]
    found = contrast(fast, slow)
    assert found.ratio == pytest.approx(0.9, abs=0.001)
    assert not found.is_open


@given(NUMBERS, st.data())
def test_contrast_turned_round_is_its_inverse(ours: list[float], data: st.DataObject) -> None:
    theirs = data.draw(st.lists(st.floats(0.001, 1e6), min_size=len(ours), max_size=len(ours)))
    there, back = contrast(ours, theirs), contrast(theirs, ours)
    assert there.difference.value == pytest.approx(-(back.difference.value or 0), abs=1e-9)
    assert there.ratio is not None
    assert back.ratio is not None
    assert isclose(there.ratio * back.ratio, 1)
    assert there.is_open == back.is_open


def test_contrast_with_zeros_goes_by_differences() -> None:
    found = contrast([3.0, 4.0, 5.0], [0.0, 0.0, 0.0])
    assert (found.ratio, found.ratio_interval) == (None, None)
    assert found.difference.value == 4
    assert not found.is_open
    assert contrast([0.0, 1.0], [1.0, 0.0]).is_open


def test_contrast_leaves_out_runs_of_which_one_side_is_missing() -> None:
    found = contrast([1.0, None, 3.0, 4.0], [2.0, 5.0, nan, 4.0])
    assert found.difference.runs == 2
    assert found.difference.value == -0.5
    assert contrast([None], [1.0]).difference == Mean(None, None, 0)
