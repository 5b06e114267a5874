"""Durations for people and machines."""

import math

import pytest

from poise.scheduler.model.units import counted, format_seconds, parse_seconds

GOOD = {
    "0": 0,
    "90": 90,
    "1e3": 1000,
    "1.5": 1.5,
    "90s": 90,
    "15m": 900,
    "1.5h": 5400,
    "1h30m": 5400,
    "7d": 604_800,
    "1w2d3h4m5s": 604_800 + 2 * 86_400 + 3 * 3600 + 4 * 60 + 5,
    "0.5m": 30,
}


@pytest.mark.parametrize("text", GOOD)
def test_a_duration_is_seconds_or_numbers_with_units(text: str) -> None:
    assert parse_seconds(text) == GOOD[text]


@pytest.mark.parametrize("text", ["", "s", "5x", "1h30", "1h 30m", "h1", "-5", "-5m", "1h-5m", "--", "1..5h", "5 m"])
def test_text_that_is_no_duration_is_refused_and_shown(text: str) -> None:
    with pytest.raises(ValueError, match="not a duration: ") as caught:
        parse_seconds(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e999", "9" * 400 + "d"])
def test_a_duration_is_finite(text: str) -> None:
    with pytest.raises(ValueError, match="it must be finite and not negative"):
        parse_seconds(text)


SHOWN = {
    0: "0s",
    0.25: "0.25s",
    9.4: "9.4s",
    45: "45s",
    59.4: "59s",
    60: "1m00s",
    61: "1m01s",
    3599: "59m59s",
    3600: "1h00m",
    11_520: "3h12m",
    86_400: "1d00h",
    187_200: "2d04h",
    8_640_000: "100d00h",
}


@pytest.mark.parametrize("seconds", SHOWN)
def test_the_two_largest_units_are_shown(seconds: float) -> None:
    assert format_seconds(seconds) == SHOWN[seconds]


@pytest.mark.parametrize("seconds", [math.inf, math.nan])
def test_an_infinite_duration_is_never(seconds: float) -> None:
    assert format_seconds(seconds) == "never"


def test_one_thing_is_singular() -> None:
    assert [counted(number, "GPU") for number in (0, 1, 2, 2_000)] == ["0 GPUs", "1 GPU", "2 GPUs", "2,000 GPUs"]
