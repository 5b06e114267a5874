"""Thinning and distributions: what a figure leaves out must not show."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from poise.lab.report.axes import FloatArray
from poise.lab.report.figures import MOST_POINTS, Series, averaged, distribution, thinned
from poise.scheduler.model.errors import InvariantError

MOST = 16


@st.composite
def long_series(draw: st.DrawFn) -> tuple[FloatArray, FloatArray]:
    """More points than may stay: ascending places, some of them equal, and values of any shape."""
    count = draw(st.integers(MOST + 1, 80))
    gaps = draw(st.lists(st.sampled_from([0.0, 0.01, 1.0, 1e3]), min_size=count, max_size=count))
    values = draw(st.lists(st.floats(-1e6, 1e6), min_size=count, max_size=count))
    return np.cumsum(gaps), np.array(values)


@given(long_series())
def test_thinned_keeps_ends_and_extremes_within_the_bound(series: tuple[FloatArray, FloatArray]) -> None:
    places, values = series
    kept = thinned(places, values, MOST)
    assert kept.size <= MOST
    assert (np.diff(kept) > 0).all()
    assert (kept[0], kept[-1]) == (0, len(places) - 1)
    assert values[kept].min() == values.min()
    assert values[kept].max() == values.max()


@given(long_series())
def test_thinned_keeps_the_extremes_of_every_strip(series: tuple[FloatArray, FloatArray]) -> None:
    """So the band that a step series fills at each place of the figure stays as it was."""
    places, values = series
    kept = thinned(places, values, MOST)
    strip = np.zeros(len(places), dtype=int)
    if places[-1] > places[0]:
        strip = np.minimum((places - places[0]) / (places[-1] - places[0]) * (MOST // 4), MOST // 4 - 1).astype(int)
    for each in np.unique(strip):
        got, want = values[kept][strip[kept] == each], values[strip == each]
        assert (got.min(), got.max(), got[-1]) == (want.min(), want.max(), want[-1])


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=MOST))
def test_thinned_leaves_a_short_series_alone(values: list[float]) -> None:
    kept = thinned(np.arange(float(len(values))), np.array(values), MOST)
    assert kept.tolist() == list(range(len(values)))


def test_thinned_keeps_a_single_spike_among_a_hundred_thousand_points() -> None:
    values = np.zeros(100_000)
    values[77_777] = 1.0
    kept = thinned(np.arange(100_000.0), values)
    assert 77_777 in kept
    assert kept.size <= MOST_POINTS


def test_thinned_gives_rising_series_more_strips() -> None:
    rising = np.linspace(0, 1, 50_000)
    assert thinned(rising, rising).size > MOST_POINTS // 2


def test_series_of_unequal_lengths_is_refused_by_name() -> None:
    with pytest.raises(InvariantError, match="'las'"):
        Series("las", np.zeros(3), np.zeros(2))


def test_finite_drops_what_cannot_be_drawn_and_sorts_the_rest() -> None:
    got = Series("a", np.array([3.0, np.nan, 1.0, 2.0, np.inf]), np.array([30.0, 0.0, 10.0, -np.inf, 1.0])).finite()
    assert got.x.tolist() == [1.0, 3.0]
    assert got.y.tolist() == [10.0, 30.0]


def test_finite_keeps_the_given_order_of_equal_x() -> None:
    got = Series("a", np.array([1.0, 0.0, 1.0, 1.0]), np.array([5.0, 9.0, 4.0, 6.0])).finite()
    assert got.y.tolist() == [9.0, 5.0, 4.0, 6.0]


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=60))
def test_distribution_rises_to_one_over_distinct_values(samples: list[float]) -> None:
    values, shares = distribution(np.array(samples, dtype=np.float64))
    assert (np.diff(values) > 0).all()
    assert (np.diff(shares) > 0).all()
    assert values.size == 0 or (shares[0] > 0 and shares[-1] == 1.0)


def test_distribution_counts_repeated_samples() -> None:
    values, shares = distribution(np.array([2.0, 1.0, 1.0, 4.0, np.nan]))
    assert values.tolist() == [1.0, 2.0, 4.0]
    assert shares.tolist() == [0.5, 0.75, 1.0]


def area(series: Series) -> float:
    """Below steps."""
    return float(np.sum(series.y[:-1] * np.diff(series.x)))


@st.composite
def steps(draw: st.DrawFn) -> Series:
    gaps = draw(st.lists(st.sampled_from([0.1, 1.0, 7.0, 100.0]), min_size=1, max_size=40))
    values = draw(st.lists(st.floats(0, 100), min_size=len(gaps), max_size=len(gaps)))
    return Series("a", np.cumsum(gaps) - gaps[0] + draw(st.sampled_from([0.0, 3.0])), np.array(values))


@given(steps(), st.sampled_from([0.5, 5.0, 1000.0]))
def test_averaged_keeps_the_area_the_ends_and_the_bounds(series: Series, length: float) -> None:
    got = averaged(series, length)
    assert area(got) == pytest.approx(area(series), abs=1e-6)
    assert (got.x[0], got.x[-1], got.y[-1]) == (series.x[0], series.x[-1], series.y[-1])
    assert (np.diff(got.x) > 0).all()
    assert (np.diff(got.x) <= length * (1 + 1e-9)).all()
    assert got.y.min() >= series.y.min() - 1e-9
    assert got.y.max() <= series.y.max() + 1e-9


def test_averaged_takes_means_over_stretches_counted_from_zero() -> None:
    got = averaged(Series("a", np.array([0.0, 5.0, 15.0, 25.0]), np.array([1.0, 3.0, 1.0, 0.0])), 10.0)
    assert got.x.tolist() == [0, 10, 20, 25]
    assert got.y.tolist() == [2, 2, 1, 0]


def test_averaged_leaves_nothing_and_a_point_as_they_are() -> None:
    for series in (Series("a", np.empty(0), np.empty(0)), Series("a", np.ones(1), np.ones(1))):
        assert averaged(series, 10.0) is series
