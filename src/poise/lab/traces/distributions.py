"""Columns of a synthetic trace: sizes, durations, tenants and more, each drawn from uniform numbers in [0, 1) of its own.

Everything is an inverse distribution of `Generator.random`, whose stream numpy keeps from version to version: so a
specification means the same trace for ever. Numbers that overflow are found in the result, not warned of on the way.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from poise.lab.traces import philly_shape
from poise.lab.traces.parsing import amount, field_refusal, label, number, positive, whole
from poise.lab.traces.schema import LossCurve
from poise.scheduler.model.arithmetic import Floats, Ints, exp
from poise.scheduler.model.cluster import MOST_GPUS
from poise.scheduler.model.errors import UnknownNameError

PHILLY = "philly"
GAVEL = "gavel"
GAVEL_SIZES = "1:0.7/2:0.1/4:0.15/8:0.05"
ARRIVALS = ("poisson", "uniform", "daily", "bursty", "at-once")
DURATIONS = (PHILLY, GAVEL, "lognormal:MEDIAN:SIGMA", "exponential:MEAN", "fixed:SECONDS")
BURST = 8
"""Jobs of a burst, on average; the gaps in it are a twentieth of the average gap."""
MOST_TENANTS = 10_000
SWEEP, MOST_SWEEP = 8, 10_000
"""Jobs of a sweep, unless said otherwise, and at most."""
_DAY = 86_400.0
_SWING, _NIGHT = 0.8, 2 * 3600.0


class Mixture(NamedTuple):
    """Values and the shares with which they are drawn."""

    values: Floats
    shares: Floats

    def draw(self, uniform: Floats) -> Floats:
        """Return the value of each job."""
        return self.values[pick(self.shares, uniform)]


def pick(shares: Floats, uniform: Floats) -> NDArray[np.intp]:
    """Return an index for each uniform number, in proportion to the shares."""
    edges = np.cumsum(shares)
    return np.searchsorted(edges[:-1] / edges[-1], uniform, side="right")


def mixture(text: str, knob: str) -> Mixture:
    """Read `1:0.7/2:0.3`: values above 0 and their shares, which need not add up to 1; `1/2/4` has equal shares."""
    parts = [part.partition(":") for part in text.split("/")]
    values = np.array([positive(value, knob) for value, _, _ in parts])
    shares = np.array([amount(share, knob) if colon else 1.0 for _, colon, share in parts])
    if not 0 < shares.sum() < math.inf:
        raise field_refusal(knob, "shares with a sum above 0", text)
    return Mixture(values, shares)


def hourly(text: str) -> float:
    """Return jobs per hour."""
    return philly_shape.JOBS / philly_shape.SPAN * 3600 if text == PHILLY else positive(text, "rate")


def submissions(kind: str, jobs: int, rate: float, uniform: Floats) -> Floats:
    """Return seconds at which jobs arrive, ascending, rounded to 1 ms; `uniform` has two numbers per job."""
    gap, waits = 3600 / rate, -np.log1p(-uniform[:, 0])
    waits[0] = 0.0
    match kind:
        case "poisson":
            times = np.cumsum(waits) * gap
        case "uniform":
            times = np.sort(uniform[:, 0]) * jobs * gap
        case "daily":
            times = _daily(np.cumsum(waits) * gap)
        case "bursty":
            inside = gap / 20
            between = (gap - inside * (1 - 1 / BURST)) * BURST
            times = np.cumsum(waits * np.where(uniform[:, 1] < 1 / BURST, between, inside))
        case "at-once":
            times = np.zeros(jobs)
        case _:
            raise UnknownNameError("kind of arrivals", kind, ARRIVALS)
    if not np.isfinite(times).all():
        raise field_refusal("rate", "jobs an hour that give finite times", f"{rate:g}")
    return np.round(times, 3)


def sizes(text: str, uniform: Floats) -> Ints:
    """Return the GPUs of each job."""
    if text == PHILLY:
        known = Mixture(np.array(list(philly_shape.GPUS), float), np.array(list(philly_shape.GPUS.values()), float))
        return known.draw(uniform).astype(np.int64)
    chosen = mixture(GAVEL_SIZES if text == GAVEL else text, "sizes")
    for value in chosen.values:
        if not value.is_integer() or value > MOST_GPUS:
            raise field_refusal("sizes", f"whole numbers of GPUs from 1 to {MOST_GPUS:,}", text)
    return chosen.draw(uniform).astype(np.int64)


def durations(text: str, gpus: Ints, uniform: Floats) -> Floats:
    """Return seconds of each job, rounded to 1 ms and no less; `uniform` has two numbers per job."""
    kind, *numbers = text.split(":")
    first = uniform[:, 0]
    match kind, numbers:
        case "philly", []:
            seconds = philly_shape.durations(gpus, first)
        case "gavel", []:
            seconds = 60 * 10 ** np.where(first < 0.8, 1.5 + 1.5 * first / 0.8, 3 + (first - 0.8) / 0.2)
        case "lognormal", [median, sigma]:
            # Standard normal numbers by Box and Muller's transform.
            normal = np.sqrt(-2 * np.log1p(-first)) * np.cos(2 * math.pi * uniform[:, 1])
            seconds = positive(median, "durations") * np.exp(amount(sigma, "durations") * normal)
        case "exponential", [mean]:
            seconds = -positive(mean, "durations") * np.log1p(-first)
        case "fixed", [each]:
            seconds = np.full(len(first), positive(each, "durations"))
        case _:
            raise field_refusal("durations", f"one of {', '.join(DURATIONS)}", text)
    if not np.isfinite(seconds).all():
        raise field_refusal("durations", "numbers that give finite durations", text)
    return np.maximum(np.round(seconds, 3), 0.001)


def tenants(text: str, uniform: Floats) -> list[str]:
    """Return the owner of each job."""
    if text == PHILLY:
        shares = np.array(philly_shape.TENANTS, float)
        names = [f"vc-{index:02d}" for index in range(1, len(shares) + 1)]
    else:
        count = whole(text, "tenants", 1, MOST_TENANTS)
        shares = 1 / np.arange(1, count + 1)
        names = [f"tenant-{index}" for index in range(1, count + 1)]
    return [names[index] for index in pick(shares, uniform).tolist()]


def models(text: str, uniform: Floats) -> list[str | None]:
    """Return the model of each job; all names are equally likely."""
    if text == "none":
        return [None] * len(uniform)
    names = [label(name, "models") for name in text.split("/")]
    return [names[index] for index in (uniform * len(names)).astype(int).tolist()]


def sweeps(text: str, uniform: Floats) -> tuple[Ints, NDArray[np.bool_]]:
    """Return the first job of each job's submission, and whether that is a sweep. `0.3:8`: 3 of 10 are, of 8 jobs each.

    Jobs of a sweep stand behind each other. The last sweep of a trace may be cut short.
    """
    fraction, _, size = text.partition(":")
    part, many = number(fraction, "apps"), whole(size or str(SWEEP), "apps", 2, MOST_SWEEP)
    if not 0 <= part <= 1:
        raise field_refusal("apps", "a fraction from 0 to 1", text)
    first, is_sweep = np.arange(len(uniform)), uniform < part
    if not is_sweep.any():
        return first, is_sweep
    starts, job, jobs = [], 0, len(uniform)
    while job < jobs:
        starts.append(job)
        job += many if is_sweep[job] else 1
    begins = np.zeros(jobs, dtype=bool)
    begins[starts] = True
    first = np.maximum.accumulate(np.where(begins, first, 0))
    return first, is_sweep[first]


def curves(seconds: Floats, uniform: Floats) -> list[LossCurve]:
    """Return how the loss of each job falls with its steps, which are its seconds; `uniform` has three numbers per job.

    It begins at 1 to 5 above where it would end, and comes within 0.01 to 0.3 of that.
    """
    start, floor = 0.2 + 0.8 * uniform[:, 0], 0.05 + 0.5 * uniform[:, 1]
    speed = exp(math.log(10) * (0.5 + 1.5 * uniform[:, 2])) / seconds
    return [LossCurve(*each) for each in zip(speed.tolist(), start.tolist(), floor.tolist(), strict=True)]


def _daily(even: Floats) -> Floats:
    """Move times at a steady rate so that the rate swings by 80 % over a day, least at 2 h and most at 14 h."""
    clock = np.linspace(0, _DAY, 1441)
    turn = 2 * math.pi / _DAY
    passed = clock - _SWING / turn * (np.sin(turn * (clock - _NIGHT)) + math.sin(turn * _NIGHT))
    days, rest = np.divmod(even, _DAY)
    moved: Floats = days * _DAY + np.interp(rest, passed, clock)
    return moved
