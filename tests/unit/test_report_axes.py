"""Axes, their ticks, and amounts in words."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from poise.lab.report.axes import (
    Axis,
    FloatArray,
    Unit,
    amount,
    bare_axis,
    level_axis,
    log_axis,
    plain,
    points_axis,
    roomy_axis,
    span_axis,
)

UNITS: tuple[Unit, ...] = ("plain", "seconds", "percent")
units = st.sampled_from(UNITS)
any_values = st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=8).map(
    lambda values: np.array(values, dtype=np.float64)
)
HOUR, DAY = 3600.0, 86400.0


def labels(axis: Axis) -> list[str]:
    return [tick.label for tick in axis.ticks]


def assert_sound(axis: Axis) -> None:
    """Ticks ascend strictly inside the range, are labelled differently, and are few."""
    values = [tick.value for tick in axis.ticks]
    assert axis.low < axis.high
    assert math.isfinite(axis.high - axis.low)
    assert all(earlier < later for earlier, later in itertools.pairwise(values))
    assert all(axis.low <= value <= axis.high for value in values)
    assert len(values) <= 20


@given(any_values, units)
def test_linear_axes_have_ascending_ticks_within_range(values: FloatArray, unit: Unit) -> None:
    for axis in (span_axis(values, unit, 6), roomy_axis(values, unit, 7), level_axis(values, unit, 5)):
        assert_sound(axis)
        assert len(set(labels(axis))) == len(axis.ticks)


@given(any_values, units)
def test_log_axes_have_ascending_ticks_within_range(values: FloatArray, unit: Unit) -> None:
    axis = log_axis(values, unit, 0.1)
    assert_sound(axis)
    assert axis.low > 0
    assert axis.ticks
    assert len(set(labels(axis))) == len(axis.ticks)


@given(any_values, units)
def test_places_are_between_zero_and_one_and_keep_the_order(values: FloatArray, unit: Unit) -> None:
    ordered = np.sort(values)
    for axis in (span_axis(values, unit, 6), level_axis(values, unit, 5), log_axis(values, unit, 0.1)):
        places = axis.at(ordered)
        assert ((places >= 0) & (places <= 1)).all()
        assert (np.diff(places) >= 0).all()


@given(any_values, units)
def test_level_axis_holds_zero_and_ends_on_ticks(values: FloatArray, unit: Unit) -> None:
    axis = level_axis(values, unit, 5)
    assert axis.low <= 0 <= axis.high
    assert (axis.ticks[0].value, axis.ticks[-1].value) == (axis.low, axis.high)


@given(any_values, units)
def test_bare_axis_holds_zero_and_all_values(values: FloatArray, unit: Unit) -> None:
    """Save for what is too large or too small to tell from its neighbours."""
    kept = values[(np.abs(values) < 1e200) & ((np.abs(values) > 1e-200) | (values == 0))]
    axis = bare_axis(kept, unit)
    assert axis.low <= 0 <= axis.high
    assert axis.low < axis.high
    assert ((kept >= axis.low) & (kept <= axis.high)).all()


@pytest.mark.parametrize(
    ("high", "unit", "want"),
    [
        (9.0, "plain", ["0", "2", "4", "6", "8"]),
        (0.5, "plain", ["0", "0.1", "0.2", "0.3", "0.4", "0.5"]),
        (5e6, "plain", ["0", "1 M", "2 M", "3 M", "4 M", "5 M"]),
        (0.9, "percent", ["0%", "20%", "40%", "60%", "80%"]),
        (50.0, "seconds", ["0", "10 s", "20 s", "30 s", "40 s", "50 s"]),
        (90 * 60.0, "seconds", ["0", "15 min", "30 min", "45 min", "60 min", "75 min", "90 min"]),
        (20 * HOUR, "seconds", ["0", "6 h", "12 h", "18 h"]),
        (5 * DAY, "seconds", ["0", "1 d", "2 d", "3 d", "4 d", "5 d"]),
        (3000 * DAY, "seconds", ["0", "500 d", "1,000 d", "1,500 d", "2,000 d", "2,500 d", "3,000 d"]),
    ],
)
def test_linear_ticks_are_round_numbers_of_one_unit(high: float, unit: Unit, want: list[str]) -> None:
    assert labels(span_axis(np.array([0.0, high]), unit, 6)) == want


def test_log_ticks_of_seconds_are_those_of_the_clock() -> None:
    axis = log_axis(np.array([1.0, 8 * DAY]), "seconds", 0.01)
    assert labels(axis) == ["1 s", "10 s", "1 min", "10 min", "1 h", "10 h", "1 d", "1 w"]


def test_log_ticks_drop_the_lesser_where_room_is_short() -> None:
    axis = log_axis(np.array([1.0, 8 * DAY]), "seconds", 0.1)
    assert labels(axis) == ["1 s", "10 s", "1 min", "10 min", "1 h", "1 d", "1 w"]


@pytest.mark.parametrize(
    ("low", "high", "want"),
    [
        (1.0, 1e6, ["1", "10", "100", "1,000", "10,000", "100,000", "1 M"]),
        (1.0, 100.0, ["1", "2", "5", "10", "20", "50", "100"]),
        (3.1, 3.9, ["3.2", "3.4", "3.6", "3.8"]),
    ],
)
def test_log_ticks_of_plain_numbers_are_decades_or_finer(low: float, high: float, want: list[str]) -> None:
    assert labels(log_axis(np.array([low, high]), "plain", 0.08)) == want


def test_log_axis_puts_zero_and_less_at_its_lower_end() -> None:
    axis = log_axis(np.array([-1.0, 0.0, 1.0, 10.0]), "plain", 0.1)
    assert axis.at(np.array([-1.0, 0.0])).tolist() == [0.0, 0.0]
    assert axis.place(1.0) > 0


def test_log_axis_does_not_reach_without_end_for_a_tiny_value() -> None:
    axis = log_axis(np.array([1e-30, 1.0]), "plain", 0.1)
    assert axis.low > 1e-9


def test_level_axis_shows_a_high_share_against_the_whole_and_a_low_one_large() -> None:
    assert level_axis(np.array([0.83]), "percent", 5).high == 1.0
    assert level_axis(np.array([0.03]), "percent", 5).high == pytest.approx(0.03)


@pytest.mark.parametrize(("values", "want"), [([1.0, 9.0], "linear"), ([1.0, 15_000.0], "log"), ([0.0, 100.0], "linear")])
def test_points_axis_is_logarithmic_where_positive_values_span_a_decade(values: list[float], want: str) -> None:
    axis = points_axis(np.array(values), "plain", 7, 0.1)
    assert axis.scale == want
    assert all(0 < axis.place(value) < 1 for value in values if value > 0)
    assert len(axis.ticks) >= 3


@given(any_values, units)
def test_points_axis_is_sound_for_any_values(values: FloatArray, unit: Unit) -> None:
    assert_sound(points_axis(values, unit, 7, 0.1))


def test_roomy_axis_leaves_a_margin_but_does_not_cross_zero() -> None:
    axis = roomy_axis(np.array([0.0, 10.0]), "plain", 5)
    assert axis.low == 0.0
    assert axis.high > 10.0


@pytest.mark.parametrize(
    ("value", "unit", "want"),
    [
        (0.0, "plain", "0"),
        (1234.4, "plain", "1,234"),
        (-12.34, "plain", "−12.3"),
        (0.0123, "plain", "0.0123"),
        (12_345_678.0, "plain", "12.3 M"),
        (2.5e12, "plain", "2.5×10¹²"),
        (1e-7, "plain", "10⁻⁷"),
        (0.834, "percent", "83.4%"),
        (1.0, "percent", "100%"),
        (1.7e308, "percent", "10³⁰²%"),
        (0.0, "seconds", "0s"),
        (0.25, "seconds", "0.25s"),
        (11520.0, "seconds", "3h12m"),
        (-90.0, "seconds", "−1m30s"),
        (5000 * DAY, "seconds", "5,000 d"),
        (math.nan, "plain", "–"),
        (math.inf, "seconds", "–"),
    ],
)
def test_amount_is_written_for_people(value: float, unit: Unit, want: str) -> None:
    assert amount(value, unit) == want


@given(st.floats(-1e8, 1e8).filter(lambda value: abs(value) > 1e-3))
def test_plain_is_within_a_hundredth_of_the_value(value: float) -> None:
    text = plain(value).replace("−", "-").replace(",", "").replace(" M", "e6")
    assert float(text) == pytest.approx(value, rel=0.01)
