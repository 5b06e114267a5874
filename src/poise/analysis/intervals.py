"""How far a mean over a few runs can be trusted: 95 % confidence intervals by Student's t, alone and paired.

Runs of one load that differ in their seeds are a sample x₁ … xₙ. The interval of its mean is x̄ ± t·s/√n with t of n − 1
degrees of freedom. Policies that saw the very same traces are compared run by run, by yᵢ − xᵢ and by log yᵢ/xᵢ: what
makes one trace harder than another drops out. Completion times of heavy traces are many times those of others, and so
the ratios say more than the differences.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import cos, exp, isfinite, pi, sin, sqrt, tan

import numpy as np

from poise.model.arrays import Floats

LEVEL = 0.95
"""How often an interval is to hold the true value."""

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Mean:
    """The mean over the `runs` that have the number at all; None if none has.

    There is no interval of one run, nor of runs that all have the same value: no spread was seen from which to tell.
    """

    value: float | None
    interval: Interval | None
    runs: int

    @property
    def margin(self) -> float | None:
        """Half the width of the interval."""
        return None if self.interval is None else (self.interval[1] - self.interval[0]) / 2


@dataclass(frozen=True, slots=True)
class Contrast:
    """A number under two policies on the same traces.

    difference   the mean of the differences
    ratio        the geometric mean of the ratios, with its interval; None where a value is not above 0
    """

    difference: Mean
    ratio: float | None
    ratio_interval: Interval | None

    @property
    def is_open(self) -> bool:
        """Whether the runs leave open which of the two is the larger: by the ratios where there are some."""
        if self.ratio_interval is not None:
            return self.ratio_interval[0] <= 1 <= self.ratio_interval[1]
        interval = self.difference.interval
        return interval is not None and interval[0] <= 0 <= interval[1]


def mean_of(values: Sequence[float | None]) -> Mean:
    """The mean of those that are numbers and finite."""
    known = _finite(values)
    if not known.size:
        return Mean(None, None, 0)
    if (known == known[0]).all():  # the value itself: adding up and dividing might round
        return Mean(known[0].item(), None, len(known))
    with np.errstate(all="ignore"):
        middle = float(known.mean())
        margin = t_quantile(len(known) - 1) * float(known.std(ddof=1)) / sqrt(len(known))
    interval = (middle - margin, middle + margin)
    return Mean(middle if isfinite(middle) else None, interval if isfinite(margin) else None, len(known))


def contrast(ours: Sequence[float | None], theirs: Sequence[float | None]) -> Contrast:
    """Our values against theirs, run by run; runs in which either is not known do not count."""
    pairs = [pair for pair in zip(ours, theirs, strict=True) if _finite(pair).size == 2]
    y, x = (_finite([pair[side] for pair in pairs]) for side in (0, 1))
    difference = mean_of((y - x).tolist())
    if not (y.size and (y > 0).all() and (x > 0).all()):
        return Contrast(difference, None, None)
    logs = mean_of((np.log(y) - np.log(x)).tolist())
    return Contrast(difference, _exp(logs.value), _exp_of(logs.interval))


def _exp_of(interval: Interval | None) -> Interval | None:
    """None if an end is beyond all floats: two runs can be so different."""
    low, high = map(_exp, interval or (None, None))
    return None if low is None or high is None else (low, high)


def _exp(value: float | None) -> float | None:
    try:
        return None if value is None else exp(value)
    except OverflowError:
        return None


def _finite(values: Sequence[float | None]) -> Floats:
    known = np.array([value for value in values if value is not None], dtype=np.float64)
    return known[np.isfinite(known)]


@cache
def t_quantile(degrees: int) -> float:
    """The t with P(|T| ≤ t) = 95 % for Student's T of so many degrees of freedom, at least 1; by halving an angle."""
    low, high = 0.0, pi / 2
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if _within(middle, degrees) < LEVEL else (low, middle)
    return sqrt(degrees) * tan(low)


def _within(angle: float, degrees: int) -> float:
    """P(|T| ≤ √degrees · tan(angle)): a finite sum where the degrees are whole (Abramowitz and Stegun, 26.7.3 and 4)."""
    odd = degrees % 2
    term = cos(angle) if odd else 1.0
    total = 0.0 if degrees == 1 else term
    for place in range(2 + odd, degrees - 1, 2):
        term *= (place - 1) / place * cos(angle) ** 2
        total += term
    return 2 / pi * (angle + sin(angle) * total) if odd else sin(angle) * total
