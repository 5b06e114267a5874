"""Axes: a range of values, its ticks, and the labels at them.

Three layers, in this order: the constructors of `Axis`, one for each kind of figure; the choice of ticks, at numbers that a
reader would have chosen; and `amount`, which writes a number, a share or a duration for people.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import Literal

import numpy as np
import numpy.typing as npt

from poise.scheduler.model.units import format_seconds

FloatArray = npt.NDArray[np.float64]
Scale = Literal["linear", "log"]
Unit = Literal["plain", "seconds", "percent"]

HUGE = 1e300
"""Values beyond are shown as this, so that spans and percentages stay finite."""
_TINY = 1e-290
_MOST_DECADES = 8
"""A logarithmic axis reaches this far below its highest value; smaller values stand at its lower end."""
_DECADE = 10.0


@dataclass(frozen=True, slots=True)
class Tick:
    """A value of the axis and the text that stands at it."""

    value: float
    label: str


@dataclass(frozen=True, slots=True)
class Axis:
    """A range with ticks in it; low < high, and 0 < low on a logarithmic axis."""

    low: float
    high: float
    scale: Scale
    ticks: tuple[Tick, ...]

    def at(self, values: FloatArray) -> FloatArray:
        """Positions from 0 at `low` to 1 at `high`; values outside are put at the nearer end."""
        inside = np.clip(values, self.low, self.high)
        low, high = self.low, self.high
        if self.scale == "log":
            inside, low, high = np.log(inside), float(np.log(low)), float(np.log(high))
        return np.clip((inside - low) / (high - low), 0.0, 1.0)

    def place(self, value: float) -> float:
        """Position of a single value, as `at` gives it."""
        return float(self.at(np.array([value]))[0])

    def titled(self, label: str) -> str:
        """The label of the axis; a logarithmic one says that it is."""
        return f"{label} (log scale)" if self.scale == "log" else label


def clipped(values: FloatArray) -> FloatArray:
    """Values as floats of at most `HUGE`, whatever their type was."""
    return np.clip(values.astype(np.float64), -HUGE, HUGE)


def span_axis(values: FloatArray, unit: Unit, most: int) -> Axis:
    """Linear, from the least to the greatest value: for time along the bottom."""
    low, high = _range(values)
    return Axis(low, high, "linear", linear_ticks(low, high, unit, most))


def roomy_axis(values: FloatArray, unit: Unit, most: int) -> Axis:
    """Linear, with a margin around the values: for points that carry labels. The margin does not cross zero."""
    low, high = _range(values)
    margin = 0.12 * (high - low)
    lower, upper = low - margin, high + margin
    lower = 0.0 if lower < 0 <= low else lower
    upper = 0.0 if high <= 0 < upper else upper
    return Axis(lower, upper, "linear", linear_ticks(lower, upper, unit, most))


def points_axis(values: FloatArray, unit: Unit, most: int, room: float) -> Axis:
    """`roomy_axis`, but logarithmic where positive values span a decade: an outlier must not push the rest together."""
    kept = clipped(values)
    low, high = (float(kept.min()), float(kept.max())) if kept.size else (0.0, 0.0)
    if low <= 0 or high < _DECADE * low:
        return roomy_axis(values, unit, most)
    low = max(low, high / 10**_MOST_DECADES)
    margin = (high / low) ** 0.12
    return log_axis(np.array([low / margin, high * margin]), unit, room)


def level_axis(values: FloatArray, unit: Unit, most: int) -> Axis:
    """Linear, with zero on it and both ends on ticks: to compare heights. Shares above one half go to 100%."""
    low, high = _range_with_zero(values, unit)
    step = nice_step(high - low, unit, most)
    low, high = float(np.floor(low / step + 1e-9)) * step, float(np.ceil(high / step - 1e-9)) * step
    return Axis(low, high, "linear", spaced_ticks(low, high, unit, step))


def bare_axis(values: FloatArray, unit: Unit) -> Axis:
    """`level_axis` without ticks, ending at the greatest value: for bars that carry their values."""
    return Axis(*_range_with_zero(values, unit), "linear", ())


def log_axis(values: FloatArray, unit: Unit, room: float) -> Axis:
    """Logarithmic over the positive values; those at or below zero stand at its lower end. `room`: see `log_ticks`."""
    positive = np.clip(values[values > 0], 1 / HUGE, HUGE)
    high = float(positive.max(initial=1 / HUGE)) if positive.size else 10.0
    low = max(float(positive.min()), high / 10**_MOST_DECADES) if positive.size else 1.0
    if high / low < 1.1:
        low, high = low / 2, high * 2
    margin = (high / low) ** 0.02
    low, high = low / margin, high * margin
    return Axis(low, high, "log", log_ticks(low, high, unit, room))


def _range_with_zero(values: FloatArray, unit: Unit) -> tuple[float, float]:
    kept = clipped(values)
    low, high = float(kept.min(initial=0.0)), float(kept.max(initial=0.0))
    if unit == "percent" and 0.5 < high <= 1.0:
        high = 1.0
    return (low, high) if high - low > _TINY else (0.0, 1.0)


def _range(values: FloatArray) -> tuple[float, float]:
    """Least and greatest value; widened where they are too close to draw, 0 to 1 where there is none."""
    if not values.size:
        return 0.0, 1.0
    kept = clipped(values)
    low, high = float(kept.min()), float(kept.max())
    size = max(abs(low), abs(high))
    if high - low > max(1e-9 * size, _TINY):
        return low, high
    apart = 0.1 * size if size > _TINY else 0.5
    return low - apart, high + apart


# Ticks

MINUTE, HOUR, DAY, WEEK = 60.0, 3600.0, 86400.0, 604800.0
_CLOCK_STEPS = (
    *(1.0, 2.0, 5.0, 10.0, 15.0, 30.0),
    *(MINUTE * n for n in (1, 2, 5, 10, 15, 30)),
    *(HOUR * n for n in (1, 2, 3, 6, 12)),
    DAY,
)
_FEW = 4
"""A logarithmic axis with fewer ticks than this gets finer ones."""


def nice_step(span: float, unit: Unit, most: int) -> float:
    """The least round step that divides a span into at most `most` parts: 1-2-5, or of the clock for seconds."""
    least = span / most
    if unit != "seconds" or least <= 1.0:
        return _round_up(least)
    if least > DAY:
        return DAY * _round_up(least / DAY)
    return next(step for step in _CLOCK_STEPS if step >= least * (1 - 1e-9))


def _round_up(least: float) -> float:
    """The least 1, 2 or 5 times a power of ten that is not below `least`."""
    exponent = math.floor(math.log10(least))
    steps = (float(f"{digit}e{exponent + shift}") for shift in (0, 1) for digit in (1, 2, 5))
    return next(step for step in steps if step >= least * (1 - 1e-9))


def linear_ticks(low: float, high: float, unit: Unit, most: int) -> tuple[Tick, ...]:
    """Multiples of a round step inside [low, high], ascending, in at most `most` parts."""
    return spaced_ticks(low, high, unit, nice_step(high - low, unit, most))


def spaced_ticks(low: float, high: float, unit: Unit, step: float) -> tuple[Tick, ...]:
    """Multiples of `step` inside [low, high], ascending; an end that only rounding moved off a multiple is one."""
    first, last = math.ceil(low / step - 1e-6), math.floor(high / step + 1e-6)
    values = [min(max(count * step, low), high) for count in range(first, last + 1)]
    return tuple(Tick(value, label) for value, label in zip(values, tick_labels(values, step, unit), strict=True))


_TickCandidate = tuple[int, float, str]
"""(tier, value, label) of a tick that may be drawn. Lower tiers are placed first; finer ones fill what room is left."""


def log_ticks(low: float, high: float, unit: Unit, room: float) -> tuple[Tick, ...]:
    """Round numbers inside [low, high], ascending, no two nearer than `room`, a fraction of the logarithmic axis."""
    found: list[_TickCandidate] = []
    candidates = _clock_candidates(low, high) if unit == "seconds" else _decimal_candidates(low, high, unit)
    apart = room * math.log(high / low)
    for tier, value, label in sorted((each for each in candidates if low <= each[1] <= high), key=itemgetter(0, 1)):
        refines = tier >= 2 and sum(other < tier for other, _, _ in found) >= _FEW
        if not refines and all(abs(math.log(value / other)) >= apart for _, other, _ in found):
            found.append((tier, value, label))
    if len(found) < 2:
        return linear_ticks(low, high, unit, 5)
    return tuple(Tick(value, label) for _, value, label in sorted(found, key=itemgetter(1)))


def _decimal_candidates(low: float, high: float, unit: Unit) -> Iterator[_TickCandidate]:
    factor, suffix = (100.0, "%") if unit == "percent" else (1.0, "")
    for exponent in range(math.floor(math.log10(low * factor)), math.ceil(math.log10(high * factor)) + 1):
        for digit, tier in ((1, 0), (2, 2), (5, 2), (3, 3)):
            value = float(f"{digit}e{exponent}")
            yield tier, value / factor, plain(value) + suffix


def _clock_candidates(low: float, high: float) -> Iterator[_TickCandidate]:
    for exponent in range(max(-300, math.floor(math.log10(low))), 0):
        units = (("ms", -3), ("µs", -6), ("ns", -9))
        label = next((f"{10 ** (exponent - power)} {name}" for name, power in units if exponent >= power), "")
        label = label or f"{plain(float(f'1e{exponent}'))} s"
        yield 0 if exponent % 3 == 0 else 1, float(f"1e{exponent}"), label
    for size, name, longest in ((1.0, "s", 59), (MINUTE, "min", 59), (HOUR, "h", 23), (DAY, "d", 6)):
        for count, tier in ((1, 0), (10, 1), (2, 2), (5, 2), (30, 2), (3, 3), (20, 3)):
            if count <= longest:
                yield tier, size * count, f"{count} {name}"
    for exponent in range(max(1, math.ceil(math.log10(high / WEEK) + 1))):
        for digit, tier in ((1, 0), (2, 2), (5, 2)):
            weeks = float(f"{digit}e{exponent}")
            yield tier, WEEK * weeks, f"{plain(weeks)} w"


# Numbers for people

_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_UNITS = ((DAY, "d"), (HOUR, "h"), (MINUTE, "min"), (1.0, "s"))


def amount(value: float, unit: Unit) -> str:
    """A value with about three digits: `1,234`, `3h12m`, `83.4%` (1 is 100%); `–` if it is not finite."""
    if not math.isfinite(value):
        return "–"
    value = min(max(value, -HUGE), HUGE)
    if unit == "seconds":
        sign, size = "−" if value < 0 else "", abs(value)
        if size >= 1000 * DAY:
            return f"{sign}{plain(size / DAY)} d"
        return sign + (f"{plain(size)}s" if size < 10 else format_seconds(size))
    if unit == "percent" and abs(value) < 1e4:
        return f"{value * 100:,.1f}".removesuffix(".0").replace("-", "−") + "%"
    return plain(value * 100) + "%" if unit == "percent" else plain(value)


def plain(value: float) -> str:
    """A number with about three digits and thousands separators, as a power of ten if very large or very small."""
    size = abs(value)
    if size >= 1e9 or 0 < size < 1e-4:
        return _power(value, 2)
    if size >= 1e6:
        return f"{value / 1e6:.3g} M".replace("-", "−")
    decimals = 0 if size >= 100 or size == 0 else 2 - math.floor(math.log10(size))
    text = f"{value:,.{decimals}f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text).replace("-", "−")


def tick_labels(values: list[float], step: float, unit: Unit) -> list[str]:
    """Labels of equally spaced ticks: one unit and one number of decimals for all of them."""
    if unit == "percent":
        return [label + "%" for label in _even([value * 100 for value in values], step * 100)]
    if unit == "seconds":
        size, name = next((each for each in _UNITS if step >= each[0]), _UNITS[-1])
        labels = _even([value / size for value in values], step / size)
        return ["0" if label == "0" else f"{label} {name}" for label in labels]
    return _even(values, step)


def _even(values: list[float], step: float) -> list[str]:
    """Multiples of `step`, all with as many digits as the step needs."""
    largest = max((abs(value) for value in values), default=0.0)
    decade = math.floor(math.log10(step) + 1e-9)
    if largest >= 1e9 or step < 1e-4:
        return [
            "0" if abs(value) < step / 2 else _power(value, max(0, math.floor(math.log10(abs(value)) + 1e-9) - decade))
            for value in values
        ]
    if step >= 1e5 and largest >= 1e6:
        return [label if label == "0" else f"{label} M" for label in _even([v / 1e6 for v in values], step / 1e6)]
    decimals = max(0, -decade)
    return ["0" if abs(value) < step / 2 else f"{value:,.{decimals}f}".replace("-", "−") for value in values]


def _power(value: float, digits: int) -> str:
    mantissa, _, exponent = f"{value:.{digits}e}".partition("e")
    if "." in mantissa:
        mantissa = mantissa.rstrip("0").rstrip(".")
    power = "10" + str(int(exponent)).translate(_SUPERSCRIPT)
    mantissa = mantissa.replace("-", "−")
    return {"1": power, "−1": f"−{power}"}.get(mantissa, f"{mantissa}×{power}")
