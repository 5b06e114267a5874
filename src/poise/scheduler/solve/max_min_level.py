"""The highest level that all rows can reach together, with what is left over put to use.

`highest`          max t  s.t.  θ_m >= t · demand_m
`smallest_ratio`   min ρ  s.t.  θ_m >= rate_m / (ρ − offset_m)
`best_ratio`       max Σ gain x / Σ cost x  s.t.  θ_m >= base_m

The first two may have a second aim, `then`: among the best answers, the one with the largest Σ then_m θ_m. `highest` adds
it to the objective of the same solve, with a weight so small that the first aim loses at most `SECOND` of its value
(`_second`).
"""

from dataclasses import dataclass, replace
from math import inf, nan

import numpy as np

from poise.scheduler.model.arithmetic import Floats, dot
from poise.scheduler.model.errors import GaveUpError, SolveError
from poise.scheduler.solve import solver
from poise.scheduler.solve.program import GpuMarket, ShareProblem, Solution, WarmStart

SECOND = 1e-4
"""The most that the first aim may lose, relatively, to the second.

Below some weight of the second aim linear programs lose nothing at all, so in practice the loss is that of rounding.
"""

CLOSE = 1e-7
"""Relative distance of a ratio from its lower bound at which it counts as the smallest."""

LOSS = 1e-7
"""What the best ratio may lose, relatively, so that the rest is used."""

TIED = 1e-7
"""Relative difference of ratios that counts as none."""

MOST_TANGENTS, MOST_RATIOS = 60, 40


def highest(market: GpuMarket, demand: Floats, *, then: Floats | None = None, start: WarmStart | None = None) -> Solution:
    """The answer with the highest t. A row that demands 0, or can get nothing at all, does not bound it.

    `level` is t, nan if nothing is demanded; `pressure` is in terms of t
    """
    even = _even(market)
    demand = np.where(even > 0, demand, 0.0)
    if not demand.any():
        return _most(market, then)
    asks = demand > 0
    unit = float((even[asks] / demand[asks]).min())
    solution = solver.maximise(ShareProblem(market, slope=unit * demand, level=1.0, value=_second(market, then)), start)
    return replace(solution, level=unit * solution.level, pressure=unit * solution.pressure)


@dataclass(frozen=True)
class Ratio:
    """The best ratio, and an answer that attains it."""

    rho: float
    solution: Solution


def smallest_ratio(
    market: GpuMarket, rate: Floats, offset: Floats, *, hint: float | None = None, then: Floats | None = None
) -> Ratio:
    """The smallest ρ > offset with θ >= rate / (ρ − offset), to `CLOSE` (`LOSS` with a second aim).

    A row of rate 0, or that can get nothing, does not bound it; ρ is nan if no row does. `hint`: a ρ that is likely.

    In u = 1 / (ρ − c), c the least offset, what is asked for is k u / (1 − a u), a = offset − c: convex and rising. Its
    tangent at any u asks for less, so that the highest u under tangents is a bound on the best; the next tangents are taken
    there (Newton's method from one side). One step if all offsets are equal; each further one squares the error.

    All of it in terms of ρ − c: of jobs that are done but for rounding it is positive, and ρ is c as far as floats can tell.
    """
    even = _even(market)
    rate = np.where(even > 0, rate, 0.0)
    asks = rate > 0
    if not asks.any():
        return Ratio(nan, _most(market, then))
    least = float(offset[asks].min())
    curve = _Curve(rate, np.where(asks, offset - least, 0.0), least)
    bound = max(curve.excess(market.fastest * (1 if market.beside is None else 2)), (1.0 + CLOSE) * float(curve.above.max()))
    within = max(curve.excess(even), bound)
    excess = within if hint is None else min(max(hint - least, bound), within)
    best, answer = inf, _most(market, None)
    for _ in range(MOST_TANGENTS):
        solution = solver.maximise(curve.tangent(market, excess))
        bound = max(bound, excess / solution.level if solution.level > 0 else bound)
        best, answer = min((best, answer), (curve.excess(solution.throughput), solution), key=lambda found: found[0])
        if best < inf and best - bound <= CLOSE * (least + best):
            found = Ratio(least + best, answer)
            return found if then is None else _with_the_rest_used(market, curve, found, best, then)
        excess = bound
    raise GaveUpError(f"no ratio within {CLOSE} of its bound after {MOST_TANGENTS} solves: {least} + {best}, not {bound}")


def best_ratio(market: GpuMarket, gain: Floats, cost: Floats, *, base: Floats | None = None) -> Ratio:
    """The largest Σ gain x / Σ cost x (costs > 0), to `TIED`, and of those answers the one with the largest Σ gain x.

    If nothing is asked for, only what has the best ratio of all is used. Else by Dinkelbach's method: max Σ (gain − q cost)
    x for the ratio q of the answer before, until the ratio does not change. At a q that is lower than the best ratio by
    `TIED`, of all that has that ratio the most is used.
    """
    ratio = np.where(market.speed > 0, gain / cost, 0.0)
    q = float(ratio.max(initial=0.0))
    if base is None or not q > 0:
        only = replace(market, speed=np.where(ratio >= q * (1.0 - TIED), market.speed, 0.0))
        return Ratio(q, solver.maximise(ShareProblem(only, value=gain)))
    for _ in range(MOST_RATIOS):
        before, q = q, _ratio_at(market, gain, cost, base, q).rho
        if abs(q - before) <= TIED * q:
            return _ratio_at(market, gain, cost, base, q * (1.0 - TIED))
    raise GaveUpError(f"the ratio still changes after {MOST_RATIOS} solves: {before} to {q}")


def _ratio_at(market: GpuMarket, gain: Floats, cost: Floats, base: Floats, q: float) -> Ratio:
    """The answer with the largest Σ (gain − q cost) x, and its ratio.

    An extra row is added that is always worth as much as all resources cost. Without it the sum would be near 0 where q is
    near the best ratio, and the solver cannot close a gap relative to 0.
    """
    rows, columns = market.speed.shape
    speed, resource = np.pad(market.speed, ((0, 1), (0, 1))), np.append(market.resource, len(market.capacity))
    speed[rows, columns] = 1.0
    anchored = GpuMarket(speed, np.append(market.size, 1.0), np.append(market.capacity, 1.0), resource)
    value = np.pad(np.where(market.speed > 0, gain - q * cost, 0.0), ((0, 1), (0, 1)))
    value[rows, columns] = q * float(((cost / market.size[:, None]).max(axis=0) * market.capacity[market.resource]).sum())
    solution = solver.maximise(ShareProblem(anchored, base=np.append(base, 0.0), value=value))
    x = solution.x[:rows, :columns]
    answer = replace(solution, x=x, throughput=solution.throughput[:rows], pressure=solution.pressure[:rows])
    return Ratio(float((gain * x).sum() / (cost * x).sum()), answer)


def _with_the_rest_used(market: GpuMarket, curve: "_Curve", best: Ratio, excess: float, then: Floats) -> Ratio:
    """The largest Σ then θ among answers whose ratio is the best up to `LOSS`, in a solve of its own.

    It cannot be part of the same objective as in `highest`: for a row that has waited long, ρ hardly depends on its speed.
    """
    floor = curve.asked((1.0 + LOSS) * excess)
    value = _second(market, then)
    try:
        solution = solver.maximise(ShareProblem(market, base=floor, value=None if value is None else value / SECOND))
    except SolveError:
        return best
    rho = curve.least + curve.excess(solution.throughput)
    return Ratio(rho, solution) if rho <= best.rho * (1.0 + 10.0 * LOSS) else best


@dataclass(frozen=True)
class _Curve:
    """θ >= rate / (excess − above), with above >= 0 and 0 for some row; the excess is ρ − least."""

    rate: Floats
    above: Floats
    least: float

    def excess(self, throughput: Floats) -> float:
        """What these throughputs attain."""
        asks = self.rate > 0
        with np.errstate(divide="ignore"):
            return float((self.above[asks] + self.rate[asks] / throughput[asks]).max())

    def asked(self, excess: float) -> Floats:
        """Throughputs that attain it."""
        asked: Floats = self.rate / (excess - self.above)
        return asked

    def tangent(self, market: GpuMarket, excess: float) -> ShareProblem:
        """The highest t with θ above the tangents in u at this excess; t = 1 is there, and u = t / excess."""
        u = 1.0 / excess
        steep = 1.0 / (1.0 - self.above * u)
        slope = self.rate * u * steep**2
        return ShareProblem(market, base=-slope * (self.above * u), slope=slope, level=1.0)


def _even(market: GpuMarket) -> Floats:
    """Throughput of an equal part of every resource. All rows can have it at once, so no best level is below it."""
    rows = float(market.rows if market.count is None else market.count.sum())
    columns = np.bincount(market.resource, minlength=len(market.capacity))
    part = (market.capacity / columns)[market.resource] / (max(rows, 1.0) * market.size[:, None])
    part /= np.maximum(part.sum(axis=1, keepdims=True), 1.0)
    even: Floats = (market.speed * part).sum(axis=1)
    return even


def _most(market: GpuMarket, then: Floats | None) -> Solution:
    """Without a first aim: the largest Σ then θ."""
    value = _second(market, then)
    if value is None or not (value > 0).any():
        return Solution(np.zeros_like(market.speed), np.zeros(market.rows), nan, np.zeros(market.rows))
    return solver.maximise(ShareProblem(market, value=value / SECOND))


def _second(market: GpuMarket, then: Floats | None) -> Floats | None:
    """Worth of x so that Σ then θ, divided by more than it can be, weighs `SECOND` against a level of at least 1.

    It is at most that of all rows at full speed, and of every resource used by its best row; twice that with pairs.
    """
    if then is None:
        return None
    count = np.ones(market.rows) if market.count is None else market.count
    value = then[:, None] * market.speed
    best = (value / market.size[:, None]).max(axis=0, initial=0.0)
    by_resource = np.zeros(len(market.capacity))
    np.maximum.at(by_resource, market.resource, best)
    most = min(dot(count, value.max(axis=1, initial=0.0)), dot(by_resource, market.capacity))
    most *= 1.0 if market.beside is None else 2.0
    return value * (SECOND / most) if most > 0 else value
