"""Programs of `program.py` without pairs, by an interior-point method that exploits their shape.

Why not a general solver: such a program has rows × columns unknowns, but only the few resources and the level t tie rows
together. A step of this method costs O(rows · columns) in whole-array operations, and ten to thirty steps are enough
whatever the number of rows. It also ends at the centre of the optimal face, not at a vertex: alike rows are treated alike,
and a row under pressure gets exactly what is asked in every best answer (`Solution.pressure`).

The method is Mehrotra's (1992): primal-dual, with a predictor and a corrector per step. In standard form, with slack
variables s (time a row does nothing), v (what it gets beyond what is asked) and w (what is left of a resource):

    minimise    Σ cost x − level · t − Σ log ln θ
    subject to  Σ_c x_mc + s_m = 1                          per row; multiplier α_m
                Σ_c speed_mc x_mc − v_m = base_m + slope_m t   per row; multiplier β_m = dual slack of v_m
                Σ size x + w = capacity                     per resource; multiplier −zw
                x, s, v, w >= 0

The primal amounts of a row stand in one column of `y`: its x by column of the market, then s, then v. `z` has their dual
slacks in the same places. At the answer every y·z is 0; on the way there they are driven down together.

A step solves Newton's equations for y·z = target. Let D = y/z. Once prices and t are given, each row has two unknowns, the
changes of α and β, and taking speeds relative to their D-weighted mean separates the two: their pivots are A = Σ D and
C = Σ D (speed − mean)² + D_v (`_factor`). Substituting them leaves a dense system with one unknown per resource, plus t; all
else follows in closed form (`_direction`).

Sums go through `einsum` (model/arithmetic.py), so neither the processor nor the number of threads changes a bit.
"""

from math import inf
from typing import NamedTuple

import numpy as np

from poise.scheduler.model.arithmetic import Floats, solved
from poise.scheduler.model.errors import GaveUpError, InfeasibleError
from poise.scheduler.solve.program import ShareProblem, Solution

MOST_STEPS = 100
GOOD = 1e-9
"""Relative duality gap at which to stop."""
GOOD_ENOUGH = 1e-7
"""The same for large programs with both a level and a value: the level is exact by then."""
MANY = 500
"""Rows above which a program is large."""
ACCEPTED = 1e-6
"""Relative gap that is accepted where rounding stops progress."""
NEARLY = 0.9995
"""Fraction of the way to the boundary that a step may go."""
SHORT = 0.1
"""A step shorter than this fraction of its full length is not worth taking."""
NOTHING = 1e-300
"""Practically 0, but can be divided by."""
CENTRING = 3
"""Further steps where columns are alike: there are then many best answers, and the very centre of them is wanted."""
PATIENCE = 8
"""Steps without progress after which rounding has stopped the method."""


def maximise_interior(problem: ShareProblem) -> Solution:
    """The best answer of a market without pairs in which every row has a speed somewhere."""
    with np.errstate(all="ignore"):
        return _Method(_Scaled(problem)).run(problem)


class _Scaled:
    """The problem with columns first, each row's speed relative to its fastest, and t and the objective of order 1.

    speed    (columns + 1, rows): the last column is idleness, of speed 0
    able     (columns + 2, rows): which entries of `y` may be above 0; all of s and v are
    gather   (resources, columns): which columns draw on a resource; None if each column has its own
    worth    what the objective was divided by
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
        self.has_level = problem.level > 0
        slope = np.zeros(rows) if problem.slope is None else problem.slope / self.fastest
        unit = 1.0
        if self.has_level:
            if not (slope > 0).any():
                raise InfeasibleError("the level has no bound: nothing is asked of any row")
            unit = 1.0 / slope.max()
        self.slope, self.level = slope * unit, problem.level * unit
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
        """Amounts by column, summed by resource."""
        return amounts if self.gather is None else np.einsum("rc,cm->rm", self.gather, amounts)

    def by_column(self, amounts: Floats) -> Floats:
        """Amounts by resource, for each column."""
        return amounts if self.gather is None else amounts[self.resource]


class _InteriorPoint(NamedTuple):
    """A strictly interior point, or a direction.

    y, z    (columns + 2, rows): amounts and their dual slacks
    w, zw   (resources,): what is left of a resource, and its price
    """

    y: Floats
    z: Floats
    w: Floats
    zw: Floats
    t: float


def _start(p: _Scaled) -> _InteriorPoint:
    """A start: each row gets an equal part of half of everything, and multipliers satisfy the dual constraints.

    It may miss what is asked of rows (`v` is then not what is left of it); steps make that up.
    """
    rows, able = len(p.size), p.able[: p.columns]
    use = p.by_resource(able * p.size).sum(axis=1)
    part = 0.5 * p.capacity / np.maximum(use, NOTHING)
    x = np.minimum(p.by_column(part)[:, None], 0.5 / p.columns)
    x = np.where(able, x, NOTHING)
    w = p.capacity - p.by_resource(x * p.size).sum(axis=1)
    theta = (p.speed[:-1] * x).sum(axis=0)
    t, beta = 0.0, np.full(rows, 1.0 / rows)
    if p.has_level:  # a level that is met with room to spare, and multipliers that add up to its worth
        asks = p.slope > 0
        t = float(np.min((0.1 * theta[asks] - p.base[asks]) / p.slope[asks]))
        even = p.level / asks.sum()
        beta = np.minimum(np.where(asks, even / np.where(asks, p.slope, 1.0), 1.0 / rows), 3.0 * even)
        beta = np.where(asks, beta * p.level / float((p.slope * beta).sum()), beta)
    if p.log is not None:
        beta = p.log / theta
    v = theta - p.base - p.slope * t
    v = np.where(v > 0, v, 0.1)
    need = np.maximum((p.speed * beta - p.cost).max(axis=0), 0.0)
    idle = need + max(float(need.mean()), 1e-6)
    zw = np.full(len(w), max(float((need / p.size).sum()) / rows, 1e-6))
    z = p.cost[:-1] + idle - p.speed[:-1] * beta + p.by_column(zw)[:, None] * p.size
    return _InteriorPoint(np.vstack([x, 1.0 - x.sum(axis=0), v]), np.vstack([np.where(able, z, 1.0), idle, beta]), w, zw, t)


class _Method:
    """The iterations. `at` is where they stand."""

    def __init__(self, scaled: _Scaled) -> None:
        self.p = scaled
        self.at = _start(scaled)
        is_large = len(scaled.size) > MANY and scaled.has_level and bool(scaled.cost.any())
        self._good = GOOD_ENOUGH if is_large else GOOD
        self._others = 1.0 - np.eye(len(scaled.capacity))
        # With logarithms v·z tends to the weight of the row instead of 0, and is no part of the gap.
        self._gapped = len(self.at.y) - (scaled.log is not None)
        self._pairs = int(scaled.able[: self._gapped].sum()) + len(scaled.capacity)

    def run(self, problem: ShareProblem) -> Solution:
        """Take steps until the gap is small, or rounding stops progress; then read off the answer."""
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
        self.at = best
        for _ in range(CENTRING if self.p.is_even else 0):  # nearer to the centre, as far as that costs nothing
            if not self._recentre(1.0) or not np.maximum(self._gap(), self._missed(0.0)) <= 10.0 * GOOD:
                break  # also if rounding has left nan
            best = self.at
        # The answer in the units of the problem, scaled down where rounding uses more than there is.
        p = self.p
        x = np.where(p.able[: p.columns], best.y[: p.columns], 0.0)
        x /= np.maximum(x.sum(axis=0), 1.0)
        used = p.by_resource(x * p.size).sum(axis=1)
        x *= p.by_column(np.minimum(1.0, p.capacity / np.maximum(used, NOTHING)))[:, None]
        throughput = (p.speed[:-1] * x).sum(axis=0) * p.fastest
        pressure = best.z[-1] * p.worth / (p.fastest * p.count)
        return Solution(np.ascontiguousarray(x.T), throughput, problem.reached(throughput), pressure, effort=step)

    def _complementarity(self) -> float:
        """Σ y·z: the absolute gap between the primal and the dual objective."""
        at = self.at
        return _product(at.y[: self._gapped], at.z[: self._gapped]) + float((at.w * at.zw).sum())

    def _gap(self) -> float:
        """The relative gap between the primal and the dual objective."""
        p, at = self.p, self.at
        objective = abs(p.level * at.t - (_product(p.cost[:-1], at.y[: p.columns]) if p.has_value else 0.0))
        if p.log is None:
            return self._complementarity() / (objective + 1e-12)
        off = float(np.abs(at.y[-1] * at.z[-1] - p.log).sum())
        return (self._complementarity() + off) / (float(p.log.sum()) + objective)

    def _missed(self, gap: float) -> float:
        """The largest error of the primal constraints, which the start may have and rounding adds; 0 while the gap is large.

        As a side effect it keeps the errors themselves, which the next direction needs.
        """
        p, at = self.p, self.at
        self._short: Floats = p.base + p.slope * at.t + at.y[-1] - np.einsum("cm,cm->m", p.speed, at.y[:-1])
        self._over: Floats = 1.0 - at.y[:-1].sum(axis=0)
        used = np.einsum("rm,m->r", p.by_resource(at.y[: p.columns]), p.size)
        self._left: Floats = p.capacity - at.w - used
        if gap > ACCEPTED:  # another step is due anyway
            return 0.0
        relative = float((np.abs(self._left) / p.capacity).max())
        return max(float(np.abs(self._short).max()), float(np.abs(self._over).max()), relative)

    def _step(self) -> bool:
        """Move by one predictor and corrector; False if rounding leaves no direction."""
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
        # The gap after the predictor, which removes all of it to first order and leaves `second`.
        second, second_w = ahead.y * ahead.z, ahead.w * ahead.zw
        left_over = float(second[: self._gapped].sum() + second_w.sum())
        primal, dual = self._reach(ahead, 1.0)
        first = _product(ahead.y[: self._gapped], at.z[: self._gapped]) + float((ahead.w * at.zw).sum())
        after = now + primal * first + dual * (-now - first) + primal * dual * left_over
        # The corrector aims at the cube of the ratio (Mehrotra's rule) and makes up for the second-order rest.
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
            return self._recentre(0.5)  # the boundary is in the way: get away from it first
        self._move(towards, *reach)
        return True

    def _recentre(self, part: float) -> bool:
        """Step towards the point where all y·z are equal, at this part of the gap; False if rounding leaves no direction."""
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
        """Eliminate the two unknowns of every row; leaves the matrix `_schur` for resources and t.

        All forms are chosen so that no two large numbers are subtracted. In particular the diagonal, Σ D size² − use²/A, is
        computed as a sum of positive terms: use times what the *other* columns add to A.
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
        schur[:resources, :resources] = -np.einsum("rm,sm->rs", per_a, self._use)
        others = np.einsum("rs,sm->rm", self._others, by_resource) + d[p.columns]
        own = np.einsum("rm,rm,m->r", per_a, others, p.size) + at.w / at.zw
        schur[range(resources), range(resources)] = own
        schur[:resources, :resources] -= np.einsum("rm,sm->rs", per_c, self._gain)
        if p.has_level:
            schur[:-1, -1] = (per_c * p.slope).sum(axis=1)
            schur[-1, :-1] = -schur[:-1, -1]
            schur[-1, -1] = (p.slope * p.slope / self._c).sum()
        self._schur = schur

    def _direction(self, residual: Floats, residual_w: Floats) -> _InteriorPoint | None:
        """The Newton step for these residuals of y·z and w·zw; None if rounding leaves none."""
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
        """How far a step may go on the primal and on the dual side, times `part`; at most 1."""
        at = self.at
        primal = min(_room(step.y * self._per_y), _room(step.w / at.w))
        dual = min(_room(step.z * self._per_z), _room(step.zw / at.zw))
        if self.p.log is not None:  # the objective is curved, so both sides must move together
            primal = dual = min(primal, dual)
        return min(1.0, part * primal), min(1.0, part * dual)

    def _move(self, step: _InteriorPoint, primal: float, dual: float) -> None:
        at = self.at
        y, z, w, zw = at.y + primal * step.y, at.z + dual * step.z, at.w + primal * step.w, at.zw + dual * step.zw
        self.at = _InteriorPoint(y, z, w, zw, at.t + primal * step.t)


def _product(one: Floats, other: Floats) -> float:
    return float(np.einsum("cm,cm->", one, other))


def _room(change: Floats) -> float:
    """How often a change, relative to positive amounts, can be made before one of them is 0."""
    most = -float(change.min())
    return 1.0 / most if most > 0 else inf
