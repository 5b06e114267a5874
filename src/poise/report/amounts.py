"""Amounts for people: plain numbers, shares and durations, alone or as the labels of an axis."""

import math
from typing import Literal

from poise.model.units import format_seconds

Unit = Literal["plain", "seconds", "percent"]

HUGE = 1e300
"""Values beyond are shown as this, so that spans and percentages stay finite."""
MINUTE, HOUR, DAY, WEEK = 60.0, 3600.0, 86400.0, 604800.0
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_UNITS = ((DAY, "d"), (HOUR, "h"), (MINUTE, "min"), (1.0, "s"))


def amount(value: float, unit: Unit) -> str:
    """One value, about three digits of it: `1,234`, `3h12m`, `83.4%` (1 is 100%); `–` if it is not finite."""
    if not math.isfinite(value):
        return "–"
    value = min(max(value, -HUGE), HUGE)
    if unit == "seconds":
        return _duration(value)
    if unit == "percent" and abs(value) < 1e4:
        return f"{value * 100:,.1f}".removesuffix(".0").replace("-", "−") + "%"
    return plain(value * 100) + "%" if unit == "percent" else plain(value)


def plain(value: float) -> str:
    """A number with about three digits, thousands set apart, powers of ten where it is very large or very small."""
    size = abs(value)
    if size >= 1e9 or 0 < size < 1e-4:
        return _power(value, 2)
    if size >= 1e6:
        return f"{value / 1e6:.3g} M".replace("-", "−")
    decimals = 0 if size >= 100 or size == 0 else 2 - math.floor(math.log10(size))
    return _fixed(value, decimals, "drop")


def tick_labels(values: list[float], step: float, unit: Unit) -> list[str]:
    """Labels of equally spaced ticks: one unit and one number of decimals for all of them."""
    if unit == "percent":
        return [label + "%" for label in _even([value * 100 for value in values], step * 100)]
    if unit == "seconds":
        size, name = next((each for each in _UNITS if step >= each[0]), _UNITS[-1])
        labels = _even([value / size for value in values], step / size)
        return ["0" if label == "0" else f"{label} {name}" for label in labels]
    return _even(values, step)


def _duration(seconds: float) -> str:
    sign = "−" if seconds < 0 else ""
    size = abs(seconds)
    if size >= 1000 * DAY:
        return f"{sign}{plain(size / DAY)} d"
    return sign + (f"{plain(size)}s" if size < 10 else format_seconds(size))


def _even(values: list[float], step: float) -> list[str]:
    largest = max((abs(value) for value in values), default=0.0)
    if largest >= 1e9 or step < 1e-4:
        return ["0" if abs(value) < step / 2 else _power(value, _digits(value, step)) for value in values]
    if step >= 1e5 and largest >= 1e6:
        return [label if label == "0" else f"{label} M" for label in _even([v / 1e6 for v in values], step / 1e6)]
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return ["0" if abs(value) < step / 2 else _fixed(value, decimals, "keep") for value in values]


def _digits(value: float, step: float) -> int:
    """How many digits after the first a multiple of a step has."""
    return max(0, math.floor(math.log10(abs(value)) + 1e-9) - math.floor(math.log10(step) + 1e-9))


def _fixed(value: float, decimals: int, zeros: Literal["keep", "drop"]) -> str:
    text = f"{value:,.{decimals}f}"
    if zeros == "drop" and "." in text:
        text = text.rstrip("0").rstrip(".")
    return text.replace("-", "−")


def _power(value: float, digits: int) -> str:
    mantissa, _, exponent = f"{value:.{digits}e}".partition("e")
    if "." in mantissa:
        mantissa = mantissa.rstrip("0").rstrip(".")
    power = "10" + str(int(exponent)).translate(_SUPERSCRIPT)
    mantissa = mantissa.replace("-", "−")
    return {"1": power, "−1": f"−{power}"}.get(mantissa, f"{mantissa}×{power}")
