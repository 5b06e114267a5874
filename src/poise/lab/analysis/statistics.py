"""Many runs in a few numbers: policies × loads × seeds, averaged over the seeds, with 95 % confidence intervals.

Runs of one load that differ in their seeds are a sample x₁ … xₙ. The interval of its mean is x̄ ± t·s/√n with Student's t
of n − 1 degrees of freedom. Policies that saw the very same traces are compared run by run, by yᵢ − xᵢ and by log yᵢ/xᵢ:
what makes one trace harder than another drops out. Completion times of heavy traces are many times those of others, and
so the ratios say more than the differences.

`averaged` turns the runs of a grid into one `Average` per policy and load; `mean_of` and `contrast` are the statistics.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import product
from math import cos, exp, isfinite, pi, sin, sqrt, tan
from typing import NamedTuple

import numpy as np

from poise.lab.analysis.summary import Summary
from poise.scheduler.model.arithmetic import Floats

LEVEL = 0.95
"""How often an interval holds the true value."""

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Mean:
    """The mean over the `runs` that have the number; None if none has.

    One run has no interval, nor have runs that all agree: they show no spread.
    """

    value: float | None
    interval: Interval | None
    runs: int

    @property
    def margin(self) -> float | None:
        """Return half the width of the interval."""
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

    def document(self) -> dict[str, object]:
        """Return a JSON document."""
        return {
            "difference": self.difference.value,
            "interval": self.difference.interval,
            "ratio": self.ratio,
            "ratio_interval": self.ratio_interval,
            "runs": self.difference.runs,
        }


def mean_of(values: Sequence[float | None]) -> Mean:
    """Return the mean of the finite numbers among these."""
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
    """Compare our values with theirs, run by run; runs in which either is not known do not count."""
    pairs = [pair for pair in zip(ours, theirs, strict=True) if _finite(pair).size == 2]
    y, x = (_finite([pair[side] for pair in pairs]) for side in (0, 1))
    difference = mean_of((y - x).tolist())
    if not (y.size and (y > 0).all() and (x > 0).all()):
        return Contrast(difference, None, None)
    logs = mean_of((np.log(y) - np.log(x)).tolist())
    low, high = map(_exp, logs.interval or (None, None))
    return Contrast(difference, _exp(logs.value), None if low is None or high is None else (low, high))


def _exp(value: float | None) -> float | None:
    """Return e^value; None if it is beyond all floats: two runs can differ that much."""
    try:
        return None if value is None else exp(value)
    except OverflowError:
        return None


def _finite(values: Sequence[float | None]) -> Floats:
    known = np.array([value for value in values if value is not None], dtype=np.float64)
    return known[np.isfinite(known)]


@cache
def t_quantile(degrees: int) -> float:
    """Return t with P(|T| ≤ t) = 95 % for Student's T of this many degrees of freedom, at least 1. Bisects an angle."""
    low, high = 0.0, pi / 2
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if _within(middle, degrees) < LEVEL else (low, middle)
    return sqrt(degrees) * tan(low)


def _within(angle: float, degrees: int) -> float:
    """Return P(|T| ≤ √degrees · tan(angle)), a finite sum for whole degrees (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    odd = degrees % 2
    term = cos(angle) if odd else 1.0
    total = 0.0 if degrees == 1 else term
    for place in range(2 + odd, degrees - 1, 2):
        term *= (place - 1) / place * cos(angle) ** 2
        total += term
    return 2 / pi * (angle + sin(angle) * total) if odd else sin(angle) * total


_LABELS = ("policy", "trace", "cluster", "seed", "partial")
_EFFORT = ("cpu_seconds", "policy_seconds")
KEYS = tuple(each.name for each in fields(Summary) if each.name not in (*_LABELS, *_EFFORT))
"""The numbers of a summary that the inputs alone decide: those with intervals."""


class Cell(NamedTuple):
    """A run's place in a grid."""

    policy: str
    load: float
    seed: int

    def __str__(self) -> str:
        return f"{self.policy} at load {self.load:g}, seed {self.seed}"


@dataclass(frozen=True, slots=True)
class Grid:
    """Every policy at every load with every seed. All policies see the same traces."""

    policies: tuple[str, ...]
    loads: tuple[float, ...]
    seeds: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.policies) * len(self.loads) * len(self.seeds)

    def cells(self) -> Iterator[Cell]:
        """Yield cells seed by seed, so that early results cover all policies and loads; slow heavy loads first."""
        for seed, load, policy in product(self.seeds, sorted(self.loads, reverse=True), self.policies):
            yield Cell(policy, load, seed)


@dataclass(frozen=True, slots=True)
class Average:
    """The runs of one policy at one load.

    labels     a summary, for its labels; its seed is the first of the grid
    runs       by seed; at least one
    partial    whether some seeds have not been run yet
    means      by key of the summary
    against    by key: against the runs of the `rival`, the first policy, with the same seeds; nothing for the rival itself
    """

    labels: Summary
    load: float
    runs: Mapping[int, Summary]
    partial: bool
    means: Mapping[str, Mean]
    rival: str
    against: Mapping[str, Contrast]

    @property
    def policy(self) -> str:
        """Return the name, as it was asked for."""
        return self.labels.policy

    @property
    def is_constant(self) -> bool:
        """Whether several runs agree in every number: then their seeds decide nothing."""
        return len(self.runs) > 1 and all(self.means[key].interval is None for key in KEYS)

    def than(self, other: "Average", key: str) -> Contrast:
        """Compare a number with that of other runs at the same load."""
        return _paired(self.runs, other.runs, key)

    def document(self) -> dict[str, object]:
        """Return a JSON document: the keys of a summary hold means."""
        means = {key: each.value for key, each in self.means.items()}
        for key, each in self.means.items():
            if each.value is not None and each.interval is None and isinstance(getattr(self.labels, key), int):
                means[key] = int(each.value)  # counts that all agree stay counts
        return {
            **self.labels.document(),
            **means,
            "partial": self.partial,
            "load": self.load,
            "seeds": list(self.runs),
            "runs": len(self.runs),
            "intervals": {key: self.means[key].interval for key in KEYS},
            "counts": {key: self.means[key].runs for key in KEYS},
            "against": {"policy": self.rival, **{key: each.document() for key, each in self.against.items()}}
            if self.against
            else None,
        }


def averaged(runs: Mapping[Cell, Summary], grid: Grid) -> list[Average]:
    """Return averages load by load, policies in the order of the grid, without those that have no run yet."""
    found: list[Average] = []
    for load in grid.loads:
        first: dict[int, Summary] | None = None  # runs of the first policy, the rival of all others
        for policy in grid.policies:
            row = {seed: runs[cell] for seed in grid.seeds if (cell := Cell(policy, load, seed)) in runs}
            against: dict[str, Contrast] = {}
            if first is None:
                first = row
            elif row.keys() & first.keys():
                against = {key: _paired(row, first, key) for key in KEYS}
            if row:
                means = {key: mean_of([getattr(run, key) for run in row.values()]) for key in (*KEYS, *_EFFORT)}
                labels = replace(next(iter(row.values())), seed=grid.seeds[0])
                partial = len(row) < len(grid.seeds)
                found.append(Average(labels, load, row, partial, means, grid.policies[0], against))
    return found


def _paired(ours: Mapping[int, Summary], theirs: Mapping[int, Summary], key: str) -> Contrast:
    shared = [seed for seed in ours if seed in theirs]
    return contrast([getattr(ours[seed], key) for seed in shared], [getattr(theirs[seed], key) for seed in shared])
