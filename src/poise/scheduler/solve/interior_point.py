"""Programs of `problem.py` without sharing, by an interior-point method that uses their shape.

Every row has its own two constraints (one thing at a time; what is asked of it), and only the few resources, and t, tie rows
together. So the linear system of each step falls apart: two unknowns a row are eliminated in closed form, and what is left
has as many unknowns as there are resources, plus t. A step costs O(rows · columns) in whole-array operations, and about
ten to thirty steps are needed whatever the number of rows.

Primal-dual, predictor and corrector (Mehrotra 1992). A row's amounts stand in one column of `y`: its x by column, then s,
the time it does nothing, then v, what it gets beyond what is asked; `z` has their dual slacks. The answer approached is the
centre of the optimal face: alike rows are treated alike, and a row whose v is nearer to 0 than its dual slack gets just what
is asked in every best answer (`Solution.pressure`).

Sums go through `einsum` (scheduler/model/arithmetic.py): neither the processor nor the number of threads changes the
last bit.
"""

from math import inf, nan
from typing import NamedTuple

import numpy as np

from poise.scheduler.model.arithmetic import Floats, solved
from poise.scheduler.model.errors import GaveUpError, InfeasibleError
from poise.scheduler.solve.program import ShareProblem, Solution

MOST_STEPS = 100
GOOD = 1e-9
"""Relative gap at which to stop."""
GOOD_ENOUGH = 1e-7
"""The same where a value rides along with a level in a large program: the level is exact by then."""
MANY = 500
"""Rows from which on a program is large."""
ACCEPTED = 1e-6
"""Relative gap that is still good enough where rounding stops progress."""
NEARLY = 0.9995
"""Part of the way to the boundary that a step may go."""
SHORT = 0.1
"""A step of less than this part of its length gets nowhere."""
NOTHING = 1e-300
"""As good as 0, and may be divided by."""
CENTRING = 3
"""Further steps where columns are alike: then best answers are many, and the very middle of them is wanted."""
PATIENCE = 8
"""Steps without progress after which rounding has won."""


class _Scaled:
    """A problem with columns first, every row's speed relative to its fastest, and t and the objective of order 1.

    speed   (columns + 1, rows): the last column is idleness, of speed 0
    """

    def __init__(self, problem: ShareProblem) -> None:
        market, rows = problem.market, problem.market.rows
        self.fastest = market.fastest
        self.count = np.ones(rows) if market.count is None else market.count
        self.columns = market.speed.shape[1]
        self.speed = np.vstack([(market.speed / self.fastest[:, None]).T, np.zeros((1, rows))])
        self.able = np.vstack([self.speed[:-1] > 0, np.ones((2, rows), dtype=bool)])
        self.all_able = bool(self.able.all())
        self.size = market.size * self.count
        self.capacity = market.capacity
        self.is_even = market.is_even
        self.resource = market.resource
        resources = np.arange(len(market.capacity))
        is_plain = len(market.resource) == len(resources) and bool((market.resource == resources).all())
        self.gather = None if is_plain else (resources[:, None] == market.resource).astype(float)
        self.base = np.zeros(rows) if problem.base is None else problem.base / self.fastest
        self._scale_level(problem)
        self._scale_worth(problem)

    def _scale_level(self, problem: ShareProblem) -> None:
        self.has_level = problem.level > 0
        slope = np.zeros(len(self.size)) if problem.slope is None else problem.slope / self.fastest
        unit = 1.0
        if self.has_level:
            if not (slope > 0).any():
                raise InfeasibleError("the level has no bound: nothing is asked of any row")
            unit = 1.0 / slope.max()
        self.slope, self.level = slope * unit, problem.level * unit

    def _scale_worth(self, problem: ShareProblem) -> None:
        value = None if problem.value is None else (problem.value * self.count[:, None]).T
        worth = max(self.level, 0.0 if value is None else float(np.abs(value).max(initial=0.0)))
        self.worth = worth if worth > 0 else 1.0
        self.level /= self.worth
        self.has_value = value is not None
        self.cost = np.zeros_like(self.speed)
        if value is not None:
            self.cost[:-1] = -value / self.worth
        self.log = None if problem.log is None else problem.log * self.count / self.worth

    def by_resource(self, amounts: Floats) -> Floats:
        """Amounts by column, added up by resource."""
        return amounts if self.gather is None else np.einsum("rc,cm->rm", self.gather, amounts)

    def by_column(self, amounts: Floats) -> Floats:
        """Amounts by resource, for each column."""
        return amounts if self.gather is None else amounts[self.resource]


class _InteriorPoint(NamedTuple):
    """A strictly interior point, or a direction. Multipliers of resources are −zw, of what is asked the last row of z."""

    y: Floats
    z: Floats
    w: Floats
    zw: Floats
    t: float


def maximise_interior(problem: ShareProblem) -> Solution:
    """The best answer of a market without sharing in which every row has a speed somewhere."""
    with np.errstate(all="ignore"):
        return _Method(_Scaled(problem)).run(problem)


def _start(p: _Scaled) -> _InteriorPoint:
    """Everybody gets an equal part of half of everything; multipliers that satisfy the dual constraints."""
    rows, able = len(p.size), p.able[: p.columns]
    use = p.by_resource(able * p.size).sum(axis=1)
    part = 0.5 * p.capacity / np.maximum(use, NOTHING)
    x = np.minimum(p.by_column(part)[:, None], 0.5 / p.columns)
    x = np.where(able, x, NOTHING)
    w = p.capacity - p.by_resource(x * p.size).sum(axis=1)
    theta = (p.speed[:-1] * x).sum(axis=0)
    t, beta = _start_level(p, theta)
    if p.log is not None:
        beta = p.log / theta
    v = theta - p.base - p.slope * t
    v = np.where(v > 0, v, 0.1)
    need = np.maximum((p.speed * beta - p.cost).max(axis=0), 0.0)
    idle = need + max(float(need.mean()), 1e-6)
    zw = np.full(len(w), max(float((need / p.size).sum()) / rows, 1e-6))
    z = p.cost[:-1] + idle - p.speed[:-1] * beta + p.by_column(zw)[:, None] * p.size
    return _InteriorPoint(np.vstack([x, 1.0 - x.sum(axis=0), v]), np.vstack([np.where(able, z, 1.0), idle, beta]), w, zw, t)


def _start_level(p: _Scaled, theta: Floats) -> tuple[float, Floats]:
    """A level that is met with room to spare, and pressures that add up to its worth."""
    rows = len(p.size)
    if not p.has_level:
        return 0.0, np.full(rows, 1.0 / rows)
    asks = p.slope > 0
    t = float(np.min((0.1 * theta[asks] - p.base[asks]) / p.slope[asks]))
    even = p.level / asks.sum()
    beta = np.minimum(np.where(asks, even / np.where(asks, p.slope, 1.0), 1.0 / rows), 3.0 * even)
    return t, np.where(asks, beta * p.level / float((p.slope * beta).sum()), beta)


class _Method:
    """The iterations."""

    def __init__(self, scaled: _Scaled) -> None:
        self.p = scaled
        self.at = _start(scaled)
        is_large = len(scaled.size) > MANY and scaled.has_level and bool(scaled.cost.any())
        self._good = GOOD_ENOUGH if is_large else GOOD
        self._others = 1.0 - np.eye(len(scaled.capacity))
        # With logs v·z goes to the weights and not to 0, and is no part of the gap.
        self._gapped = len(self.at.y) - (scaled.log is not None)
        self._pairs = int(scaled.able[: self._gapped].sum()) + len(scaled.capacity)

    def run(self, problem: ShareProblem) -> Solution:
        """Steps until the gap is small, or rounding has won."""
        best, least, since, step = None, inf, 0, 0
        while step < MOST_STEPS:
            gap = self._gap()
            error = max(gap, self._missed(gap))
            since = since + 1 if least <= ACCEPTED and error > 0.9 * least else 0
            if error < least:
                least = error
                best = self.at if error <= ACCEPTED else None
            if error <= self._good or since > PATIENCE or not self._step():
                break
            step += 1
        if best is None:
            if float(np.abs(self._short).max()) > 1e-5:
                raise InfeasibleError("what is asked of the rows cannot be met")
            raise GaveUpError(f"a gap of {least:.1e} is left after {step} steps")
        return _answer(problem, self.p, self._centred(best) if self.p.is_even else best, step)

    def _centred(self, best: _InteriorPoint) -> _InteriorPoint:
        """Nearer to the centre, as far as that costs nothing."""
        self.at = best
        for _ in range(CENTRING):
            if not self._recentre(1.0) or not np.maximum(self._gap(), self._missed(0.0)) <= 10.0 * GOOD:
                break  # also if rounding has left no numbers
            best = self.at
        return best

    def _complementarity(self) -> float:
        at = self.at
        return _product(at.y[: self._gapped], at.z[: self._gapped]) + float((at.w * at.zw).sum())

    def _gap(self) -> float:
        """Relative difference of the two objectives."""
        p, at = self.p, self.at
        objective = abs(p.level * at.t - (_product(p.cost[:-1], at.y[: p.columns]) if p.has_value else 0.0))
        if p.log is None:
            return self._complementarity() / (objective + 1e-12)
        off = float(np.abs(at.y[-1] * at.z[-1] - p.log).sum())
        return (self._complementarity() + off) / (float(p.log.sum()) + objective)

    def _missed(self, gap: float) -> float:
        """By how much the constraints are missed: a start may miss what is asked, and rounding drifts."""
        p, at = self.p, self.at
        self._short: Floats = p.base + p.slope * at.t + at.y[-1] - np.einsum("cm,cm->m", p.speed, at.y[:-1])
        self._over: Floats = 1.0 - at.y[:-1].sum(axis=0)
        used = np.einsum("rm,m->r", p.by_resource(at.y[: p.columns]), p.size)
        self._left: Floats = p.capacity - at.w - used
        if gap > ACCEPTED:  # nobody asks yet
            return 0.0
        relative = float((np.abs(self._left) / p.capacity).max())
        return max(float(np.abs(self._short).max()), float(np.abs(self._over).max()), relative)

    def _step(self) -> bool:
        """One predictor and one corrector; False if rounding leaves no direction."""
        p, at = self.p, self.at
        self._factor()
        product, product_w = at.y * at.z, at.w * at.zw
        now = float(product[: self._gapped].sum() + product_w.sum())
        residual = -product
        if p.log is not None:
            residual[-1] += p.log
        ahead = self._direction(residual, -product_w)
        if ahead is None:
            return False
        second, second_w = ahead.y * ahead.z, ahead.w * ahead.zw
        after = self._after(ahead, *self._reach(ahead, 1.0), now, float(second[: self._gapped].sum() + second_w.sum()))
        ratio = after / now
        aim = ratio * ratio * ratio * now / self._pairs
        residual = (aim - product) - second
        if not p.all_able:
            residual[~p.able] = 0.0
        if p.log is not None:
            residual[-1] += p.log - aim
        towards = self._direction(residual, aim - product_w - second_w)
        if towards is None:
            return False
        reach = self._reach(towards, NEARLY)
        if min(reach) < SHORT:
            return self._recentre(0.5)  # away from the boundary, which bars the way ahead
        self._move(towards, *reach)
        return True

    def _after(self, step: _InteriorPoint, primal: float, dual: float, now: float, second: float) -> float:
        """What would be left of the gap after a predictor step, which takes all of it away to first order."""
        first = _product(step.y[: self._gapped], self.at.z[: self._gapped]) + float((step.w * self.at.zw).sum())
        return now + primal * first + dual * (-now - first) + primal * dual * second

    def _recentre(self, part: float) -> bool:
        """A step to where everything is evenly complementary, at a part of the gap."""
        p, at = self.p, self.at
        self._factor()
        aim = part * self._complementarity() / self._pairs
        residual = aim * p.able - at.y * at.z
        if p.log is not None:
            residual[-1] += p.log - aim
        towards = self._direction(residual, aim - at.w * at.zw)
        if towards is None:
            return False
        self._move(towards, *self._reach(towards, NEARLY))
        return True

    def _factor(self) -> None:
        """The blocks of the rows, and what is left for resources and t.

        The multiplier of a row's time is eliminated first, then that of what is asked, in forms that subtract nothing large:
        speeds are taken relative to their weighted mean.
        """
        p, at = self.p, self.at
        self._per_y, self._per_z = 1.0 / at.y, 1.0 / at.z
        d = self._d = at.y * self._per_z
        taken, busy = d[:-1], d[: p.columns]
        by_resource = p.by_resource(busy)
        self._a = taken.sum(axis=0)
        self._mean = np.einsum("cm,cm->m", taken, p.speed) / self._a
        off = self._off = p.speed - self._mean
        weighted = taken * off
        self._c = np.einsum("cm,cm->m", weighted, off) + d[-1]
        self._use = by_resource * p.size
        self._gain = p.by_resource(weighted[:-1]) * p.size
        per_a, per_c = self._use / self._a, self._gain / self._c
        resources = len(p.capacity)
        schur = np.empty((resources + p.has_level,) * 2)
        schur[:resources, :resources] = -_products(per_a, self._use)
        others = np.einsum("rs,sm->rm", self._others, by_resource) + d[p.columns]
        own = np.einsum("rm,rm,m->r", per_a, others, p.size) + at.w / at.zw
        schur[range(resources), range(resources)] = own
        schur[:resources, :resources] -= _products(per_c, self._gain)
        if p.has_level:
            schur[:-1, -1] = (per_c * p.slope).sum(axis=1)
            schur[-1, :-1] = -schur[:-1, -1]
            schur[-1, -1] = (p.slope * p.slope / self._c).sum()
        self._schur = schur

    def _direction(self, residual: Floats, residual_w: Floats) -> _InteriorPoint | None:
        """The Newton step for these residuals of y·z and w·zw."""
        p, at = self.p, self.at
        xi, xi_w = residual * self._per_z, residual_w / at.zw
        second = xi[-1] - np.einsum("cm,cm->m", self._off, xi[:-1]) + self._short - self._mean * self._over
        first = (self._over - xi[:-1].sum(axis=0)) / self._a
        second /= self._c
        right = np.empty(len(self._schur))
        spent = np.einsum("rm,m->r", p.by_resource(xi[: p.columns]), p.size)
        spent += np.einsum("rm,m->r", self._use, first) + np.einsum("rm,m->r", self._gain, second)
        right[: len(xi_w)] = self._left - spent - xi_w
        if p.has_level:
            right[-1] = p.level - (p.slope * (at.z[-1] + second)).sum()
        found = solved(self._schur, right[:, None])[:, 0]
        if not np.isfinite(found).all():
            return None
        prices, t = (found[:-1], float(found[-1])) if p.has_level else (found, 0.0)
        beta = second + (p.slope * t - np.einsum("r,rm->m", prices, self._gain)) / self._c
        z = np.empty_like(at.z)
        np.multiply(self._off, beta, out=z[:-1])
        z[:-1] += first - np.einsum("r,rm->m", prices, self._use) / self._a
        z[: p.columns] += p.by_column(prices)[:, None] * p.size
        z[:-1] *= -1.0
        z[-1] = beta
        if not p.all_able:
            z[~p.able] = 0.0
        return _InteriorPoint(xi - self._d * z, z, xi_w + at.w / at.zw * prices, -prices, t)

    def _reach(self, step: _InteriorPoint, part: float) -> tuple[float, float]:
        """How far the step may go, on the primal and on the dual side."""
        at = self.at
        primal = min(_room(step.y * self._per_y), _room(step.w / at.w))
        dual = min(_room(step.z * self._per_z), _room(step.zw / at.zw))
        if self.p.log is not None:  # the objective is curved: both sides must go together
            primal = dual = min(primal, dual)
        return min(1.0, part * primal), min(1.0, part * dual)

    def _move(self, step: _InteriorPoint, primal: float, dual: float) -> None:
        at = self.at
        self.at = _InteriorPoint(
            at.y + primal * step.y,
            at.z + dual * step.z,
            at.w + primal * step.w,
            at.zw + dual * step.zw,
            at.t + primal * step.t,
        )


def _product(one: Floats, other: Floats) -> float:
    return float(np.einsum("cm,cm->", one, other))


def _products(one: Floats, other: Floats) -> Floats:
    """Inner products of all rows of one with all rows of the other."""
    products: Floats = np.einsum("rm,sm->rs", one, other)
    return products


def _room(change: Floats) -> float:
    """How many times a change, relative to amounts, can be made before one of them is used up."""
    most = -float(change.min())
    return 1.0 / most if most > 0 else inf


def _answer(problem: ShareProblem, p: _Scaled, at: _InteriorPoint, steps: int) -> Solution:
    """In the units of the problem, with rounding never beyond what there is."""
    x = at.y[: p.columns]
    x = np.where(p.able[: p.columns], x, 0.0)
    x /= np.maximum(x.sum(axis=0), 1.0)
    used = p.by_resource(x * p.size).sum(axis=1)
    x *= p.by_column(np.minimum(1.0, p.capacity / np.maximum(used, NOTHING)))[:, None]
    throughput = (p.speed[:-1] * x).sum(axis=0) * p.fastest
    level = nan
    if p.has_level and problem.slope is not None:
        asks = problem.slope > 0
        base = 0.0 if problem.base is None else problem.base[asks]
        level = float(np.min((throughput[asks] - base) / problem.slope[asks]))
    pressure = at.z[-1] * p.worth / (p.fastest * p.count)
    return Solution(np.ascontiguousarray(x.T), throughput, level, pressure, effort=steps)
