"""Axes: a range of values, its ticks, and where a value stands between the two ends."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from poise.report.amounts import HUGE, Unit
from poise.report.series import FloatArray, clipped
from poise.report.ticks import Tick, linear_ticks, log_ticks, nice_step, spaced_ticks

Scale = Literal["linear", "log"]

_MOST_DECADES = 8
"""A logarithmic axis reaches this far below its highest value; what is smaller stands at its lower end."""
_TINY = 1e-290
_DECADE = 10.0


@dataclass(frozen=True, slots=True)
class Axis:
    """A range with ticks in it; low < high, and 0 < low on a logarithmic axis."""

    low: float
    high: float
    scale: Scale
    ticks: tuple[Tick, ...]

    def at(self, values: FloatArray) -> FloatArray:
        """Places from 0 at `low` to 1 at `high`; what lies outside is put at the nearer end."""
        inside = np.clip(values, self.low, self.high)
        low, high = self.low, self.high
        if self.scale == "log":
            inside, low, high = np.log(inside), float(np.log(low)), float(np.log(high))
        return np.clip((inside - low) / (high - low), 0.0, 1.0)

    def titled(self, label: str) -> str:
        """What stands at the axis: a logarithmic one says so."""
        return f"{label} (log scale)" if self.scale == "log" else label

    def place(self, value: float) -> float:
        """As `at`, of one value."""
        return float(self.at(np.array([value]))[0])


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
    """As `roomy_axis`, but logarithmic where positive values span a decade: one far off must not push the rest together."""
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
    """As `level_axis`, but without ticks and ending at the greatest value: for bars that carry their values."""
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
    """Least and greatest; set apart where they are too close to draw, 0 to 1 where there is nothing."""
    if not values.size:
        return 0.0, 1.0
    kept = clipped(values)
    low, high = float(kept.min()), float(kept.max())
    size = max(abs(low), abs(high))
    if high - low > max(1e-9 * size, _TINY):
        return low, high
    apart = 0.1 * size if size > _TINY else 0.5
    return low - apart, high + apart
