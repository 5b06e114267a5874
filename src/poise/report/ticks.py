"""Where an axis has ticks: at numbers that a reader would have chosen."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from poise.report.amounts import DAY, HOUR, MINUTE, WEEK, Unit, plain, tick_labels

_CLOCK_STEPS = (
    *(1.0, 2.0, 5.0, 10.0, 15.0, 30.0),
    *(MINUTE * n for n in (1, 2, 5, 10, 15, 30)),
    *(HOUR * n for n in (1, 2, 3, 6, 12)),
    DAY,
)
_FEW = 4
"""A logarithmic axis with fewer ticks than this gets finer ones."""


@dataclass(frozen=True, slots=True)
class Tick:
    """A value of the axis and the text that stands at it."""

    value: float
    label: str


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A tick that may be drawn; those of a lower tier are asked first."""

    tier: int
    tick: Tick


def nice_step(span: float, unit: Unit, most: int) -> float:
    """The least round step that divides a span into at most `most` parts: 1-2-5, or of the clock for seconds."""
    least = span / most
    if unit != "seconds" or least <= 1.0:
        return _round_up(least)
    if least > DAY:
        return DAY * _round_up(least / DAY)
    return next(step for step in _CLOCK_STEPS if step >= least * (1 - 1e-9))


def linear_ticks(low: float, high: float, unit: Unit, most: int) -> tuple[Tick, ...]:
    """Multiples of a round step inside [low, high], ascending, in at most `most` parts."""
    return spaced_ticks(low, high, unit, nice_step(high - low, unit, most))


def spaced_ticks(low: float, high: float, unit: Unit, step: float) -> tuple[Tick, ...]:
    """Multiples of `step` inside [low, high], ascending; an end that only rounding moved off a multiple is one."""
    first, last = math.ceil(low / step - 1e-6), math.floor(high / step + 1e-6)
    values = [min(max(count * step, low), high) for count in range(first, last + 1)]
    return tuple(Tick(value, label) for value, label in zip(values, tick_labels(values, step, unit), strict=True))


def log_ticks(low: float, high: float, unit: Unit, room: float) -> tuple[Tick, ...]:
    """Round numbers inside [low, high], ascending, no two nearer than `room`, a fraction of the logarithmic axis."""
    found: list[_Candidate] = []
    candidates = [each for each in _candidates(low, high, unit) if low <= each.tick.value <= high]
    apart = room * math.log(high / low)
    for each in sorted(candidates, key=lambda each: (each.tier, each.tick.value)):
        refines = each.tier >= 2 and sum(other.tier < each.tier for other in found) >= _FEW
        if not refines and all(abs(math.log(each.tick.value / other.tick.value)) >= apart for other in found):
            found.append(each)
    if len(found) < 2:
        return linear_ticks(low, high, unit, 5)
    return tuple(sorted((each.tick for each in found), key=lambda tick: tick.value))


def _candidates(low: float, high: float, unit: Unit) -> Iterator[_Candidate]:
    if unit == "seconds":
        yield from _clock_candidates(low, high)
        return
    factor, suffix = (100.0, "%") if unit == "percent" else (1.0, "")
    decades = range(math.floor(math.log10(low * factor)), math.ceil(math.log10(high * factor)) + 1)
    for exponent in decades:
        for digit, tier in ((1, 0), (2, 2), (5, 2), (3, 3)):
            value = float(f"{digit}e{exponent}")
            yield _Candidate(tier, Tick(value / factor, plain(value) + suffix))


def _clock_candidates(low: float, high: float) -> Iterator[_Candidate]:
    for exponent in range(max(-300, math.floor(math.log10(low))), 0):
        yield _Candidate(0 if exponent % 3 == 0 else 1, Tick(float(f"1e{exponent}"), _below_a_second(exponent)))
    for size, name, longest in ((1.0, "s", 59), (MINUTE, "min", 59), (HOUR, "h", 23), (DAY, "d", 6)):
        for count, tier in ((1, 0), (10, 1), (2, 2), (5, 2), (30, 2), (3, 3), (20, 3)):
            if count <= longest:
                yield _Candidate(tier, Tick(size * count, f"{count} {name}"))
    for exponent in range(max(1, math.ceil(math.log10(high / WEEK) + 1))):
        for digit, tier in ((1, 0), (2, 2), (5, 2)):
            weeks = float(f"{digit}e{exponent}")
            yield _Candidate(tier, Tick(WEEK * weeks, f"{plain(weeks)} w"))


def _below_a_second(exponent: int) -> str:
    for name, power in (("ms", -3), ("µs", -6), ("ns", -9)):
        if exponent >= power:
            return f"{10 ** (exponent - power)} {name}"
    return f"{plain(float(f'1e{exponent}'))} s"


def _round_up(least: float) -> float:
    """The least 1, 2 or 5 times a power of ten that is not below `least`."""
    exponent = math.floor(math.log10(least))
    steps = (float(f"{digit}e{exponent + shift}") for shift in (0, 1) for digit in (1, 2, 5))
    return next(step for step in steps if step >= least * (1 - 1e-9))
