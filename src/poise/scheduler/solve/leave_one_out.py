"""Proportional fairness without one: what all other rows would have if one member of a class of rows were gone.

For every class i of alike rows, with n_k members each and one of class i gone:

    maximise  Σ_k n_k weight_k ln θ_k     over shares x as in `program.py`, without pairs

These programs differ by one row, so they are solved all at once, by an interior-point method whose arrays have one more
axis, starting from a point on the way to the answer of the whole program. As in `interior_point.py` all unknowns of a row
are eliminated in closed form, and the linear system that is left has as many unknowns as there are resources.

    y, z     (programs, rows, columns + 1): shares, the last column being idleness, and their dual slacks
    w, zw    (programs, resources): what is left of a resource, and its price
    u, b     (programs, rows): price of a row's time, and worth of its throughput: b θ = n weight at the answer. With b as an
             unknown of its own, only products are nonlinear, as everywhere else
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from poise.scheduler.model.arithmetic import Bools, Floats, Ints, cube, solved
from poise.scheduler.model.errors import GaveUpError
from poise.scheduler.solve.program import GpuMarket

GOOD = 1e-9
"""Relative gap, and relative error of all constraints, at which to stop."""
ACCEPTED = 1e-8
"""The same where rounding stops progress."""
HALF_WAY = 0.1
"""Relative gap of the whole program at which the others start from it: still far enough from the boundary to turn."""
MOST_STEPS = 80
NEARLY = 0.9995
"""Fraction of the way to the boundary that a step may go."""
SHORT = 0.1
"""A step shorter than this fraction of its full length is not worth taking."""
MOST_CELLS = 60_000
"""Numbers in one array; larger problems are solved in several batches of programs."""


class _LeaveOnePoint(NamedTuple):
    """A strictly interior point, or a direction."""

    y: Floats
    z: Floats
    w: Floats
    zw: Floats
    u: Floats
    b: Floats

    def along(self, step: "_LeaveOnePoint", far: Floats) -> "_LeaveOnePoint":
        """The point this far along a direction, by program."""
        pairs = zip(self, step, strict=True)
        return _LeaveOnePoint(*(at + far.reshape(-1, *[1] * (at.ndim - 1)) * way for at, way in pairs))

    def where(self, chosen: Bools, other: "_LeaveOnePoint") -> "_LeaveOnePoint":
        """This point for the chosen programs, the other one for the rest."""
        pairs = zip(self, other, strict=True)
        return _LeaveOnePoint(*(np.where(chosen.reshape(-1, *[1] * (one.ndim - 1)), one, two) for one, two in pairs))

    def of(self, chosen: Bools) -> "_LeaveOnePoint":
        """Some of the programs."""
        return _LeaveOnePoint(*(each[chosen] for each in self))


def without_one(market: GpuMarket, weight: Floats) -> Iterator[tuple[int, Floats]]:
    """For each row in turn, its index and the throughputs of all rows if one of its members were gone.

    The throughput of a row that has no member left has no meaning. Every row must have a speed somewhere, every column
    capacity. Raises GaveUpError where rounding leaves no answer.
    """
    count = np.ones(market.rows) if market.count is None else market.count
    whole = _LeaveOnePrograms(market, weight, count[None, :])
    start = whole.run(whole.start(), HALF_WAY)
    most = max(1, MOST_CELLS // max(market.speed.size, 1))
    for first in range(0, market.rows, most):
        members = np.arange(first, min(first + most, market.rows))
        counts = np.repeat(count[None, :], len(members), axis=0)
        counts[np.arange(len(members)), members] -= 1.0
        programs = _LeaveOnePrograms(market, weight, counts)
        at = programs.run(_left(programs, start, members, count[members]), GOOD)
        yield from zip(members.tolist(), programs.throughput(at), strict=True)


def _left(programs: "_LeaveOnePrograms", whole: _LeaveOnePoint, members: Ints, count: Floats) -> _LeaveOnePoint:
    """Starting points of programs that one member of a row each has left: the row's prices shrink in proportion.

    A row of which nothing is left has nothing to pay for any more.
    """
    at = _LeaveOnePoint(*(np.repeat(each, len(members), axis=0) for each in whole))
    which = np.arange(len(members))
    part = (count - 1.0) / count
    is_gone = part <= 0
    at.b[which, members] *= np.where(is_gone, 1.0, part)
    gain = at.b[which, members, None] * programs.speed[members]
    slack = gain.max(axis=1) + 0.5 * whole.z[0, members].mean(axis=1)
    at.u[which, members] = np.where(is_gone, slack, part * at.u[which, members])
    alone = np.where(programs.able[members], slack[:, None] - gain, 1.0)
    at.z[which, members] = np.where(is_gone[:, None], alone, part[:, None] * at.z[which, members])
    return at


class _LeaveOnePrograms:
    """Programs of one market that differ in how many members rows have: `counts` is (programs, rows)."""

    def __init__(self, market: GpuMarket, weight: Floats, counts: Floats) -> None:
        self.fastest = market.fastest
        speed = market.speed / self.fastest[:, None]
        self.speed = np.hstack([speed, np.zeros((market.rows, 1))])
        self.able = self.speed > 0
        self.able[:, -1] = True
        self.capacity = market.capacity
        self.size = counts * market.size
        # A row without members occupies nothing and is as well off as it can be, so it disturbs no other row.
        self.log = np.where(counts > 0, counts, 1.0) * weight / float(weight.mean())
        self.gather = (np.arange(len(market.capacity))[:, None] == market.resource).astype(float)
        self.pairs = int(self.able.sum()) + len(market.capacity)

    def only(self, chosen: Bools) -> "_LeaveOnePrograms":
        """Some of the programs."""
        some = object.__new__(_LeaveOnePrograms)
        some.__dict__.update(self.__dict__, size=self.size[chosen], log=self.log[chosen])
        return some

    def start(self) -> _LeaveOnePoint:
        """A start: each row gets an equal part of half of everything, and prices satisfy the dual constraints."""
        able, columns = self.able[:, :-1], self.speed.shape[1] - 1
        use = np.einsum("rc,mc,pm->pr", self.gather, able.astype(float), self.size)
        part = 0.5 * self.capacity / np.maximum(use, 1e-300)
        x = np.minimum(np.einsum("rc,pr->pc", self.gather, part)[:, None, :], 0.5 / columns) * able
        y = np.concatenate([x, 1.0 - x.sum(axis=2, keepdims=True)], axis=2)
        w = self.capacity - np.einsum("rc,pmc,pm->pr", self.gather, x, self.size)
        b = self.log / self.theta(y)
        gain = b[:, :, None] * self.speed
        u = gain.max(axis=2)
        u += np.maximum(u.mean(axis=1, keepdims=True), 1e-6)
        zw = np.repeat((u / np.maximum(self.size, 1e-9)).mean(axis=1, keepdims=True), len(self.capacity), axis=1)
        z = u[:, :, None] - gain + self._prices(zw)
        return _LeaveOnePoint(y, np.where(self.able, z, 1.0), w, zw, u, b)

    def throughput(self, at: _LeaveOnePoint) -> Floats:
        """(programs, rows), in the units of the market."""
        return self.theta(at.y) * self.fastest

    def run(self, at: _LeaveOnePoint, good: float) -> _LeaveOnePoint:
        """Take steps until all programs are good, or as good as rounding allows. Programs that are done are set aside."""
        done, best, programs = at, at, self
        left = np.arange(len(self.size))
        least = np.full(len(left), np.inf)
        for _ in range(MOST_STEPS):
            with np.errstate(all="ignore"):  # a program spoilt by rounding gives nan, which is never better
                error = programs.error(at)
                is_better = error < least
                least, best = np.where(is_better, error, least), at.where(is_better, best)
                is_done = (least <= good) | ((least <= ACCEPTED) & ~is_better)
                if is_done.any():
                    done = _LeaveOnePoint(*(each.copy() for each in done))
                    for array, part in zip(done, best.of(is_done), strict=True):
                        array[left[is_done]] = part
                    left, least, programs = left[~is_done], least[~is_done], programs.only(~is_done)
                    at, best = at.of(~is_done), best.of(~is_done)
                if not len(left):
                    return done
                at = programs.stepped(at)
        raise GaveUpError(f"a gap of {float(least.max()):.1e} is left after {MOST_STEPS} steps")

    def error(self, at: _LeaveOnePoint) -> Floats:
        """By program, the largest of the relative gap and the errors of its constraints."""
        dual, time, room = self._residuals(at)
        gap = self._mean(at) * self.pairs / self.log.sum(axis=1)
        scale = self.log.max(axis=1)
        off = np.abs(at.b * self.theta(at.y) - self.log).max(axis=1) / scale
        wrong = np.abs(dual).max(axis=(1, 2)) / scale, np.abs(time).max(axis=1), np.abs(room / self.capacity).max(axis=1)
        worst: Floats = np.maximum.reduce([gap, off, *wrong])
        return worst

    def stepped(self, at: _LeaveOnePoint) -> _LeaveOnePoint:
        """The point after a predictor and a corrector, or after a step away from the boundary where that is in the way."""
        mean = self._mean(at)
        self._factor(at)
        ahead = self._direction(at, np.zeros_like(mean))
        reach = np.minimum(1.0, _room(at, ahead))
        least = 0.1 * GOOD * self.log.sum(axis=1) / self.pairs  # nearer to the boundary rounding is all there is
        step = self._direction(at, np.maximum(cube(1.0 - reach) * mean, least), ahead)
        is_short = _room(at, step) < SHORT
        if is_short.any():
            step = step.where(~is_short, self._direction(at, 0.5 * mean))
        return at.along(step, np.minimum(1.0, NEARLY * _room(at, step)))

    def theta(self, y: Floats) -> Floats:
        """(programs, rows): throughput relative to the fastest."""
        theta: Floats = np.einsum("mc,pmc->pm", self.speed, y)
        return theta

    def _prices(self, zw: Floats) -> Floats:
        """(programs, rows, columns + 1): the price of all of a row's time there."""
        by_column = np.einsum("rc,pr->pc", self.gather, zw)
        free = np.concatenate([by_column, np.zeros((len(zw), 1))], axis=1)
        prices: Floats = self.size[:, :, None] * free[:, None, :]
        return prices

    def _mean(self, at: _LeaveOnePoint) -> Floats:
        """Mean complementarity product of each program."""
        total = np.einsum("pmc,pmc,mc->p", at.y, at.z, self.able.astype(float)) + np.einsum("pr,pr->p", at.w, at.zw)
        mean: Floats = total / self.pairs
        return mean

    def _residuals(self, at: _LeaveOnePoint) -> tuple[Floats, Floats, Floats]:
        """Errors of the dual constraints, of rows' time, and of resources."""
        gain = at.b[:, :, None] * self.speed
        dual = np.where(self.able, at.u[:, :, None] + self._prices(at.zw) - gain - at.z, 0.0)
        used = np.einsum("rc,pmc,pm->pr", self.gather, at.y[:, :, :-1], self.size)
        return dual, 1.0 - at.y.sum(axis=2), self.capacity - at.w - used

    def _factor(self, at: _LeaveOnePoint) -> None:
        """Eliminate the unknowns of every row; leaves `_schur` for the resources (see `interior_point.py`).

        `_d` is y/z; speeds are taken relative to their weighted mean (`_off`); `_curve` is the curvature of the objective
        along a row's throughput, relative to what resists a change of it.
        """
        self._d = np.where(self.able, at.y / at.z, 0.0)
        self._all = self._d.sum(axis=2)
        self._at_mean = np.einsum("pmc,mc->pm", self._d, self.speed) / self._all
        self._off = self.speed - self._at_mean[:, :, None]
        bend = at.b / self.theta(at.y)
        self._curve = bend / (1.0 + bend * np.einsum("pmc,pmc,pmc->pm", self._d, self._off, self._off))
        by = np.einsum("rc,pmc->prm", self.gather, self._d[:, :, :-1])
        leaning = np.einsum("rc,pmc->prm", self.gather, (self._d * self._off)[:, :, :-1])
        weight = self.size**2 / self._all
        schur = -np.einsum("prm,psm,pm->prs", by, by, weight)
        others = self._all[:, None, :] - by
        own = np.einsum("prm,prm,pm->pr", by, np.maximum(others, 0.0), weight) + at.w / at.zw
        resources = np.arange(len(self.capacity))
        schur[:, resources, resources] = own
        self._schur = schur - np.einsum("prm,psm,pm->prs", leaning, leaning, self.size**2 * self._curve)
        self._left = self._residuals(at)

    def _direction(self, at: _LeaveOnePoint, aim: Floats, ahead: _LeaveOnePoint | None = None) -> _LeaveOnePoint:
        """The Newton step to where every product is `aim`, corrected for the second-order error of the predictor `ahead`."""
        dual, time, room = self._left
        second = 0.0 if ahead is None else ahead.y * ahead.z
        second_w = 0.0 if ahead is None else ahead.w * ahead.zw
        slack = np.where(self.able, (aim[:, None, None] - second) / np.where(self.able, at.y, 1.0) - at.z, 0.0)
        slack_w = (aim[:, None] - second_w) / at.zw - at.w
        theta = self.theta(at.y)
        second_b = 0.0 if ahead is None else ahead.b * self.theta(ahead.y)
        missing = (self.log - second_b) / theta - at.b
        wanted = slack - dual + missing[:, :, None] * self.speed
        moved = self._moved(wanted, time)
        right = np.einsum("rc,pmc,pm->pr", self.gather, moved[:, :, :-1], self.size) + slack_w - room
        zw = solved(self._schur, right[:, :, None])[:, :, 0]
        wanted = wanted - self._prices(zw)
        y = self._moved(wanted, time)
        mean, pull = self._pull(wanted, time)
        u = mean - pull * self._at_mean - time / self._all
        z = np.where(self.able, slack - at.z / np.where(self.able, at.y, 1.0) * y, 0.0)
        return _LeaveOnePoint(y, z, slack_w - at.w / at.zw * zw, zw, u, missing - at.b / theta * self.theta(y))

    def _pull(self, wanted: Floats, time: Floats) -> tuple[Floats, Floats]:
        """The weighted mean of what is wanted of a row, and the change of its throughput times its curvature."""
        mean = np.einsum("pmc,pmc->pm", self._d, wanted) / self._all
        change = np.einsum("pmc,pmc,pmc->pm", self._d, self._off, wanted) + self._at_mean * time
        return mean, change * self._curve

    def _moved(self, wanted: Floats, time: Floats) -> Floats:
        """How shares change."""
        mean, pull = self._pull(wanted, time)
        held = wanted - mean[:, :, None] - pull[:, :, None] * self._off + (time / self._all)[:, :, None]
        moved: Floats = self._d * held
        return moved


def _room(at: _LeaveOnePoint, step: _LeaveOnePoint) -> Floats:
    """By program, how far it may go before something is used up; the same on the primal and the dual side."""
    rooms = []
    for amount, change in ((at.y, step.y), (at.z, step.z), (at.w, step.w), (at.zw, step.zw), (at.b, step.b)):
        relative = np.divide(change, amount, out=np.zeros_like(change), where=amount > 0)
        most = -relative.reshape(len(relative), -1).min(axis=1)
        rooms.append(np.divide(1.0, most, out=np.full_like(most, np.inf), where=most > 0))
    room: Floats = np.minimum.reduce(rooms)
    return room
