"""Curve fits with nonnegative coefficients: how a loss falls with steps, how speed grows with workers.

    loss     l(k) = 1/(b0·k + b1) + b2                                               k steps
    speed    1/f  = c0·M/w + c1 + c2·w/p + c3·w + c4·p                               p parameter servers, w workers
             w/f  = c0 + c1·w/p + c2·w + c3·p                                        the same, each worker at its own pace
             1/f  = c0·M/w + c1 + c2·w                                               no parameter servers

All coefficients are >= 0; M is the global batch (Optimus, EuroSys'18 §3; docs/algorithms/optimus.md). Each curve is linear
in its coefficients once b2 is fixed, so a fit is a least-squares problem of a handful of variables. It is solved exactly:
its answer is the unconstrained answer on some subset of the variables, and there are few subsets.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations
from math import expm1, inf, log, sqrt

import numpy as np

from poise.scheduler.model.arithmetic import Floats, dot, solved, times

MOST_VARIABLES = 10
"""The number of subsets doubles with each variable."""
FEWEST_POINTS = 4
"""One more than the three coefficients of the curve."""
GRID = 64
"""Values of b2 tried at a time."""
ZOOMS = 10
"""How often the grid is refined around the best value, each time about thirty times as fine."""
NEAREST = 1e-9
"""How near b2 may come to the least loss, as a part of it."""
SPIKE = 3 * 1.4826
"""Median deviations (three standard ones, if noise is normal) from its neighbours' median that make a point a spike."""
REACH = 2
"""Neighbours on either side that a point is compared with."""


def nonnegative(design: Floats, target: Floats) -> Floats:
    """The x >= 0 that minimises |design·x − target|, exactly; of equals the one with the fewest variables above 0."""
    variables = design.shape[1]
    if variables > MOST_VARIABLES:
        raise ValueError(f"{variables} variables; at most {MOST_VARIABLES} are fitted")
    best, least = np.zeros(variables), dot(target, target)
    for size in range(1, variables + 1):
        for chosen in combinations(range(variables), size):
            length = np.sqrt((design[:, chosen] ** 2).sum(axis=0))
            scale = np.where(length > 0, length, 1.0)
            scaled = design[:, chosen] / scale
            found = solved(np.einsum("ij,ik->jk", scaled, scaled), times(scaled.T, target)[:, None])[:, 0] / scale
            if not np.isfinite(found).all():
                continue  # columns are dependent: fewer of them do as well
            missed = target - times(design[:, chosen], found)
            if (found >= 0).all() and dot(missed, missed) < least:
                best, least = np.zeros(variables), dot(missed, missed)
                best[list(chosen)] = found
    return best


@dataclass(frozen=True, slots=True)
class Convergence:
    """l(k) = 1/(b0·k + b1) + b2 with b >= 0; `scale` is the greatest loss that the curve was fitted to."""

    b0: float
    b1: float
    b2: float
    scale: float

    def at(self, steps: float) -> float:
        """The loss after this many steps."""
        below = self.b0 * steps + self.b1
        return (1.0 / below if below > 0 else inf) + self.b2

    def converged(self, epoch: float, delta: float) -> float:
        """The first step from which no epoch lowers the loss by as much as `delta` of its scale; 0 if none ever does.

        The curve is convex, so the drop over an epoch of E steps only falls: it is delta where, with u = b0·k + b1 and
        e = b0·E, e / (u·(u + e)) = delta·scale.
        """
        drop = self.b0 * epoch
        if drop <= 0:
            return 0.0
        height = (sqrt(drop * drop + 4.0 * drop / (delta * self.scale)) - drop) / 2.0
        return max(0.0, (height - self.b1) / self.b0)


def convergence(steps: Sequence[float], losses: Sequence[float]) -> Convergence | None:
    """The curve through these points, spikes left out; None if there are too few of them, or nothing falls."""
    k, loss = np.asarray(steps, dtype=np.float64), np.asarray(losses, dtype=np.float64)
    kept = without_spikes(loss)
    k, loss = k[kept], loss[kept]
    if len(loss) < FEWEST_POINTS or not (np.isfinite(loss).all() and loss.max() > loss.min() >= 0):
        return None
    reach, scale = max(float(k.max()), 1.0), float(loss.max())
    k, loss = k / reach, loss / scale
    # A grid of b2 below the least loss, then finer ones around the best. It is even in the logarithm of the distance from
    # the least loss, because a nearly flat curve is close to its b2.
    low, high = log(NEAREST), 0.0
    for _ in range(ZOOMS):
        grid = np.linspace(low, high, GRID)
        floors = np.array([max(-expm1(each), 0.0) for each in grid.tolist()]) * loss.min()
        b0, b1, missed = _lines(k, loss, floors)
        best = int(missed.argmin())
        low, high = float(grid[max(best - 1, 0)]), float(grid[min(best + 1, GRID - 1)])
    return Convergence(float(b0[best]) / reach / scale, float(b1[best]) / scale, float(floors[best]) * scale, scale)


def without_spikes(values: Floats) -> Floats:
    """Indices of points that are near the median of their neighbours. A curve that only falls loses none."""
    kept = []
    for index, value in enumerate(values.tolist()):
        reach = min(REACH, index, len(values) - 1 - index)
        near = values[index - reach : index + reach + 1]
        middle = float(np.median(near))
        if abs(value - middle) <= SPIKE * float(np.median(np.abs(near - middle))):
            kept.append(index)
    return np.array(kept, dtype=np.int64)


def _lines(k: Floats, loss: Floats, floors: Floats) -> tuple[Floats, Floats, Floats]:
    """For each b2 the b0, b1 >= 0 that fit 1/(l − b2) best, and the squares by which the losses themselves are missed.

    An error e of the loss is one of e/(l − b2)² of what is fitted, so points count by (l − b2)⁴: otherwise the last ones,
    where the loss is all but flat, would count for everything.
    """
    above = loss[None, :] - floors[:, None]
    inverse, weight = 1.0 / above, (above**2) ** 2
    weight /= weight.sum(axis=1, keepdims=True)
    mean_k, mean = times(weight, k), (weight * inverse).sum(axis=1)
    off = k[None, :] - mean_k[:, None]
    slope = _ratio((weight * off * inverse).sum(axis=1), (weight * off**2).sum(axis=1))
    level = mean - slope * mean_k
    # The best of level 0; a falling line is best of slope 0.
    through_zero = _ratio(times(weight * inverse, k), times(weight, k**2))
    b0 = np.where(level < 0, through_zero, np.maximum(slope, 0.0))
    b1 = np.where(slope < 0, mean, np.maximum(level, 0.0))
    below = b0[:, None] * k[None, :] + b1[:, None]
    predicted = np.divide(1.0, below, out=np.full(below.shape, inf), where=below > 0) + floors[:, None]
    return b0, b1, ((predicted - loss[None, :]) ** 2).sum(axis=1)


def _ratio(above: Floats, below: Floats) -> Floats:
    """0 where there is nothing to divide by: all points at one step, or all but one too light to count."""
    return np.divide(above, below, out=np.zeros_like(above), where=below > 0)


class Training(StrEnum):
    """How workers keep in step: all wait for each other, none does, or they reduce among themselves."""

    SYNCHRONOUS = "synchronous"
    ASYNCHRONOUS = "asynchronous"
    ALL_REDUCE = "all-reduce"


@dataclass(frozen=True, slots=True)
class Sample:
    """A measurement: steps per second with these numbers of parameter servers and workers."""

    servers: int
    workers: int
    speed: float


@dataclass(frozen=True, slots=True)
class SpeedCurve:
    """Steps per second as a function of parameter servers and workers; `batch` is the global one."""

    training: Training
    coefficients: tuple[float, ...]
    batch: float = 1.0

    def at(self, servers: int, workers: int) -> float:
        """Steps per second; inf if nothing takes time."""
        terms = zip(_terms(self.training, servers, workers, self.batch), self.coefficients, strict=True)
        seconds = sum(term * coefficient for term, coefficient in terms)
        steps = workers if self.training is Training.ASYNCHRONOUS else 1
        return steps / seconds if seconds > 0 else inf


def _terms(training: Training, servers: int, workers: int, batch: float) -> tuple[float, ...]:
    """The terms that the coefficients are multiplied with."""
    if training is Training.ALL_REDUCE:
        return batch / workers, 1.0, float(workers)
    if training is Training.ASYNCHRONOUS:
        return 1.0, workers / servers, float(workers), float(servers)
    return batch / workers, 1.0, workers / servers, float(workers), float(servers)


def speed_curve(training: Training, samples: Sequence[Sample], batch: float = 1.0) -> SpeedCurve:
    """The curve through these measurements, by least squares on the time of a step. All speeds above 0."""
    design = np.array([_terms(training, each.servers, each.workers, batch) for each in samples])
    steps = [each.workers if training is Training.ASYNCHRONOUS else 1 for each in samples]
    seconds = np.array([step / each.speed for step, each in zip(steps, samples, strict=True)])
    return SpeedCurve(training, tuple(nonnegative(design, seconds).tolist()), batch)
