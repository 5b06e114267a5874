"""Water-filling: the level of every row rises along its group's path until no row can have more.

τ_m = θ_m / norm_m is the level of row m, g_m its size. A group e of weight W_e fills at the rate W_e, counted in g·τ:

    fair   its rows rise in proportion to their weights w_m; a row that can rise no further passes its weight on
    fifo   its earliest row takes everything until it can rise no further, then the next one

Rows stop rising for two reasons. A row's own ceiling (all of its time where it is fastest) is known beforehand, so the path
c -> r(c) of all levels up to these ceilings has a closed form (`Path`). And rows are blocked where resources run out: at the
largest c for which θ >= r(c)·norm is possible. That c is found from above. For some c, the program

    maximise t   subject to   θ_m >= t · norm_m · r_m(c)

gives prices, and prices bound everything that is possible (`Bound`). The largest c within the bound is tried next. This is
Newton's method, and a bound once known holds in all later passes. At the c that is reached, rows that would have to pay for
more than they have are blocked: they keep their levels. The paths of the others start anew, with ceilings lowered to the
bounds, because what has a price is out of reach of the rows that rise on. So each pass prices a resource that was free
before, and there are about as many passes as resources, whatever the number of rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol

import numpy as np

from poise.scheduler.model.arithmetic import Bools, Floats, Ints, dot, times
from poise.scheduler.model.errors import GaveUpError
from poise.scheduler.model.workload import Pairs
from poise.scheduler.solve.program import GpuMarket, ShareProblem, Solution
from poise.scheduler.solve.solver import maximise

CLOSE = 1e-9
"""Levels this near to each other, relative to a row's ceiling, are the same."""
FAIR = 2e-5
"""The same, where rounding stops progress."""
BETTER = 1e-4
"""What a row must be able to gain, relative to its fastest speed, to count as able to rise."""
MOST_SOLVES = 40
"""Programs per pass; two to four are usual."""
ROUNDING = 1e-12
"""By how much a bound by prices may seem exceeded, relatively."""
INEXACT = 1e-8
"""By how much a bound by pressures may be exceeded, relatively."""


class Inside(StrEnum):
    """How the rows of a group share what the group gets."""

    FAIR = "fair"
    FIFO = "fifo"


@dataclass(frozen=True)
class FillGroup:
    """Rows that fill together. One fair group of all rows gives lexicographic max-min of g·τ/w.

    weight    W_e > 0: how fast the group fills, relative to other groups
    members   rows, in order of arrival; a row is in at most one group
    weights   w_m > 0 of each member; not used if `inside` is FIFO
    """

    weight: float
    members: Ints
    weights: Floats
    inside: Inside = Inside.FAIR


@dataclass(frozen=True)
class Filled:
    """An answer in which no row of a group can have more unless a row that was blocked no later has less.

    x, shared    time alone and together
    throughput   (rows,): θ
    levels       (rows,): τ; 0 for a row that is in no group
    passes       how often rows were blocked
    solves       programs solved
    """

    x: Floats
    shared: Pairs
    throughput: Floats
    levels: Floats
    passes: int
    solves: int


def fill(market: GpuMarket, groups: Sequence[FillGroup], norm: Floats) -> Filled:
    """Fill until no row can have more. A row whose norm is 0 has no level, and nothing is asked for it."""
    rows = market.rows
    group, place, weight = np.full(rows, len(groups)), np.zeros(rows, dtype=np.int64), np.ones(rows)
    for index, one in enumerate(groups):
        group[one.members], weight[one.members] = index, one.weights
        place[one.members] = np.arange(len(one.members))
    fifo = np.array([*(one.inside is Inside.FIFO for one in groups), False])[group]
    pace = np.array([*(one.weight for one in groups), 1.0])
    able = (group < len(groups)) & (norm > 0)
    most = _most(market)
    ceiling = np.where(able, most / np.where(able, norm, 1.0), 0.0)
    return _Filling(market, Members(group, place, weight, market.size, ceiling, norm, fifo, pace), most).run()


@dataclass
class _Filling:
    """The loop over passes. Bounds are kept across passes."""

    market: GpuMarket
    members: "Members"
    most: Floats
    bounds: list["Bound"] = field(default_factory=list)
    solves: int = 0

    def run(self) -> Filled:
        """Raise all levels until rows are blocked, again and again until none rises."""
        market = self.market
        towards = self._towards_together  # as much of given throughputs as possible, all in proportion, and a bound
        if market.beside is None:
            towards = _AlonePrograms(market).towards
            # Prices to begin with: a resource is worth the average relative speed that it gives.
            relative = market.speed / np.where(market.fastest > 0, market.fastest, 1.0)[:, None]
            price = np.full(len(market.capacity), 1e-3)
            np.maximum.at(price, market.resource, relative.mean(axis=0) if len(relative) else 0.0)
            self.bounds.append(PriceBound(market, price))
        levels, rising, passes = np.zeros(market.rows), self.members.ceiling > 0, 0
        expected, stalled = len(market.capacity) if market.beside is None else market.rows, 0
        solution = Solution(np.zeros_like(market.speed), levels, 0.0, levels)
        while rising.any():
            path = Path(self.members, levels, rising)
            c, solution = self._meet(path, towards)
            levels = np.minimum(path.at(c), self.members.levels(solution.throughput))
            passes += 1
            # Where the bounds are too coarse to tell which rows are blocked, they are read less strictly.
            coarser = max(passes - expected, 0) + stalled
            # Rows rise on that the bounds allow more; their ceilings come down to what the bounds allow.
            throughput = self.members.norm * levels
            reach = np.min([bound.reach(throughput, BETTER * 10.0**coarser) for bound in self.bounds], axis=0)
            still = path.rises(c)
            self.members = self.members.under(reach, still)
            rising = still & (reach > throughput)
            stalled = 0 if (path.rising & ~rising).any() else stalled + 1
        return Filled(solution.x, solution.shared, solution.throughput, levels, passes, self.solves)

    def _towards_together(self, throughput: Floats) -> tuple[Solution, "Bound"]:
        """The program of a market with pairs, and a bound by pressures."""
        solution = maximise(ShareProblem(self.market, slope=throughput, level=1.0))
        return solution, PressureBound(solution.pressure, solution.throughput, self.most)

    def _meet(self, path: "Path", towards: Callable[[Floats], tuple[Solution, "Bound"]]) -> tuple[float, Solution]:
        """The largest c that is possible, and an answer there."""
        c = min((path.furthest(bound) for bound in self.bounds), default=path.end)
        for _ in range(MOST_SOLVES):
            levels = path.at(c)
            solution, bound = towards(self.members.norm * levels)
            self.solves += 1
            self.bounds.append(bound)
            c = min(c, path.furthest(bound))
            missing = levels - self.members.levels(solution.throughput)
            settled = (levels - path.at(c) <= CLOSE * self.members.ceiling).all()
            if (missing <= (FAIR if settled else CLOSE) * self.members.ceiling).all():
                return c, solution
        raise GaveUpError(f"no common level of {self.market.rows} rows after {MOST_SOLVES} programs")


# Paths: how the levels of rows rise together while each is bounded by nothing but its own ceiling.


@dataclass(frozen=True)
class Members:
    """The groups by row.

    group     index of the group; the last one, of pace 1, for rows that are in none
    place     position in the group
    ceiling   highest τ of a row that has everything to itself; 0 for a row that is not to rise
    pace      W_e, by group
    """

    group: Ints
    place: Ints
    weight: Floats
    size: Floats
    ceiling: Floats
    norm: Floats
    fifo: Bools
    pace: Floats

    def under(self, throughput: Floats, rising: Bools) -> "Members":
        """The same with the ceilings of rising rows lowered to these throughputs."""
        lower = np.minimum(self.ceiling, self.levels(throughput))
        return replace(self, ceiling=np.where(rising, lower, self.ceiling))

    def levels(self, throughput: Floats) -> Floats:
        """τ; 0 for a row without a norm."""
        return np.divide(throughput, self.norm, out=np.zeros_like(self.norm), where=self.norm > 0)

    def summed(self, amounts: Floats) -> Floats:
        """Amounts by row, summed by group."""
        return np.bincount(self.group, amounts, len(self.pace)).astype(np.float64, copy=False)


class Path:
    """All levels as a function of c >= 0, starting from given levels, bounded only by each row's own ceiling."""

    def __init__(self, members: Members, levels: Floats, rising: Bools) -> None:
        self.members, self.levels, self.rising = members, levels, rising
        self.room = room = np.where(rising, members.size * (members.ceiling - levels), 0.0)
        self.weight = weight = np.where(rising, members.weight, 0.0)
        self.pace = members.pace[members.group]
        # `before`: what goes to the rows of its group that fill up before a row. `full`: the c at which it is full itself.
        until = room / np.where(rising, weight, 1.0)
        order = np.lexsort((np.where(members.fifo, members.place, until), members.group))
        self.before = _running(room, order, members.group)
        others = np.maximum(members.summed(weight)[members.group] - _running(weight, order, members.group), weight)
        self.full = (self.before + np.where(members.fifo, room, until * others)) / self.pace
        self.kinks = np.unique(np.append(self.full[rising], 0.0))

    @property
    def end(self) -> float:
        """The c at which all rows are at their ceilings."""
        return float(self.kinks[-1])

    def at(self, c: float) -> Floats:
        """The levels at c."""
        members, full = self.members, self.rising & (self.full <= c)
        left = members.pace * c - members.summed(np.where(full, self.room, 0.0))
        weight = members.summed(np.where(full, 0.0, self.weight))
        height = np.maximum(left, 0.0) / np.where(weight > 0, weight, 1.0)
        share = np.where(members.fifo, np.maximum(self.pace * c - self.before, 0.0), self.weight * height[members.group])
        return np.where(full, members.ceiling, self.levels + np.minimum(share, self.room) / members.size)

    def rises(self, c: float) -> Bools:
        """Rows that are below their ceilings at c."""
        return self.rising & (self.full > c)

    def furthest(self, bound: "Bound") -> float:
        """The largest c that a bound allows: bisection over the kinks, then Newton's method between two of them."""
        low, high = 0, len(self.kinks)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if bound.excess(self._throughput(middle)) > 0 else (middle, high)
        if high == len(self.kinks):
            return self.end
        start, stop = self._throughput(low), self._throughput(high)
        return float(self.kinks[low] + (self.kinks[high] - self.kinks[low]) * crossing(bound, start, stop - start))

    def _throughput(self, kink: int) -> Floats:
        return self.members.norm * self.at(float(self.kinks[kink]))


def _running(amounts: Floats, order: Ints, group: Ints) -> Floats:
    """For each row, the sum over the rows of its group that come before it in an order that goes group by group."""
    before = np.cumsum(amounts[order]) - amounts[order]
    of = group[order]
    result = np.empty_like(amounts)
    result[order] = np.maximum(before - before[np.searchsorted(of, of)], 0.0)
    return result


# Bounds on what rows can have together, from the answers of programs. They hold whatever is asked for.


class Bound(Protocol):
    """A convex increasing function of throughputs that is <= 0 wherever they are possible."""

    def excess(self, throughput: Floats) -> float:
        """Its value, relative to what there is."""

    def growth(self, throughput: Floats, rise: Floats) -> float:
        """Its one-sided derivative along `rise`, from below."""

    def reach(self, throughput: Floats, better: float) -> Floats:
        """The most that each row can have if no other row has less than this.

        A row that could gain at most `better`, relative to its fastest speed, counts as gaining nothing.
        """


def crossing(bound: Bound, start: Floats, rise: Floats) -> float:
    """The largest part of a rise that a bound allows, if it does not allow all of it. Newton's method from above."""
    part = 1.0
    for _ in range(100):
        here = start + part * rise
        excess, growth = bound.excess(here), bound.growth(here, rise)
        if excess <= 0 or growth <= 0 or part - excess / growth >= part:
            break
        part = max(part - excess / growth, 0.0)
    return part


class PriceBound:
    """A bound by prices π of resources: θ costs row m at least e_m(θ), and all rows together have Σ π · capacity.

    e_m is convex: a row mixes the columns on the lower hull of the points (speed, cost). Valid for any prices, exact or not.

    pieces   of the hulls: from throughput, to throughput, and cost per unit in between, by row
    """

    def __init__(self, market: GpuMarket, price: Floats) -> None:
        self.most = dot(price, market.capacity)
        cost = price[market.resource] * market.size[:, None]
        speed = np.where(market.capacity[market.resource] > 0, market.speed, 0.0)
        at, paid, rows = np.zeros(market.rows), np.zeros(market.rows), np.arange(market.rows)
        self.pieces: list[tuple[Floats, Floats, Floats]] = []
        while (further := speed > at[:, None]).any():
            with np.errstate(divide="ignore", invalid="ignore"):
                rate = np.where(further, (cost - paid[:, None]) / (speed - at[:, None]), np.inf)
            best = rate.argmin(axis=1)
            more = further.any(axis=1)
            to = np.where(more, speed[rows, best], at)
            self.pieces.append((at, to, np.where(more, np.maximum(rate[rows, best], 0.0), 0.0)))
            at, paid = to, np.where(more, cost[rows, best], paid)
        self.top = at

    def excess(self, throughput: Floats) -> float:
        """By how much the cheapest way costs too much."""
        cost = sum(dot(rate, np.clip(throughput, at, to) - at) for at, to, rate in self.pieces)
        return cost / self.most - 1.0 - ROUNDING if self.most else -1.0

    def growth(self, throughput: Floats, rise: Floats) -> float:
        """What more throughput costs."""
        here = np.minimum(throughput, self.top)
        return sum(float((rate * rise)[(here > at) & (here <= to)].sum()) for at, to, rate in self.pieces) / self.most

    def reach(self, throughput: Floats, better: float) -> Floats:
        """What each row can buy with all that is left over; corners of the hull count as exact."""
        here = np.minimum(throughput, self.top)
        corner = here
        purse = np.full(len(here), max(-self.excess(throughput), 0.0) * self.most)
        for at, to, rate in self.pieces:
            price = rate * np.maximum(to - np.maximum(here, at), 0.0)
            whole = (price <= purse) & (here >= at)
            part = np.where(here >= at, purse / np.where(rate > 0, rate, 1.0), 0.0)
            here = np.where(whole, np.maximum(here, to), np.minimum(here + part, np.maximum(here, to)))
            corner = np.where(whole, here, corner)
            purse = np.where(whole, purse - price, 0.0)
        return np.where(here - corner <= better * self.top, corner, here)


class PressureBound:
    """A bound by pressures of rows, Σ p θ <= most: as exact as the solver is."""

    def __init__(self, pressure: Floats, throughput: Floats, top: Floats) -> None:
        self.pressure, self.most, self.top = pressure, dot(pressure, throughput) * (1.0 + INEXACT), top

    def excess(self, throughput: Floats) -> float:
        """By how much it is exceeded."""
        return dot(self.pressure, throughput) / self.most - 1.0 if self.most else -1.0

    def growth(self, _: Floats, rise: Floats) -> float:
        """The same everywhere."""
        return dot(self.pressure, rise) / self.most

    def reach(self, throughput: Floats, better: float) -> Floats:
        """What each row can have of all that is left over."""
        left = max(-self.excess(throughput), 0.0) * self.most
        gain = np.divide(left, self.pressure, out=np.full(len(throughput), np.inf), where=self.pressure > 0)
        return throughput + np.where(gain <= better * self.top, 0.0, gain)


# Programs: as much of given throughputs as possible, and a bound from the answer.


class _AlonePrograms:
    """Programs of a market without pairs. They give prices, which bound more tightly than pressures."""

    def __init__(self, market: GpuMarket) -> None:
        self.market = market
        self.top = market.fastest
        # Rows that are fastest on one column only: at their ceilings nothing is left to choose for them.
        self.sure = (market.speed >= self.top[:, None] * (1.0 - 1e-9)).sum(axis=1) == 1
        self.column = market.speed.argmax(axis=1)
        self.columns = np.flatnonzero(market.capacity[market.resource] > 0)
        used = market.resource[self.columns]
        self.resources, self.first, self.resource = np.unique(used, return_index=True, return_inverse=True)

    def towards(self, throughput: Floats) -> tuple[Solution, Bound]:
        """As much of these throughputs as possible; rows that are to have all that they could have get it first.

        Rows that are to have nothing, or practically nothing, are left out.
        """
        market = self.market
        full = self.sure & (throughput >= self.top * (1.0 - ROUNDING)) & (throughput > 0)
        taken = np.bincount(market.resource[self.column[full]], market.size[full], len(market.capacity))
        left = market.capacity - taken
        if (left < 1e-3 * market.capacity).any():
            full, left = np.zeros_like(full), market.capacity
        rest = np.flatnonzero(~full & (throughput > CLOSE * self.top))
        x = np.zeros_like(market.speed)
        x[full, self.column[full]] = 1.0
        level, price = 1.0, np.ones(len(left))
        if len(rest):
            x[rest], level, price = self._priced(rest, left, throughput[rest])
        solution = Solution(x, (market.speed * x).sum(axis=1), level, np.zeros(market.rows))
        return solution, PriceBound(market, price)

    def _priced(self, rows: Ints, limit: Floats, throughput: Floats) -> tuple[Floats, float, Floats]:
        """Times, level and prices of resources, for some rows.

        Solvers report pressures of rows, not prices of resources. So a probe is added per resource: a row that needs a
        little of it, which is added to the resource. The probe's pressure is the resource's price.
        """
        market, capacity, probes = self.market, limit[self.resources], len(self.resources)
        size = capacity / 100.0
        speed = np.zeros((len(rows) + probes, len(self.columns)))
        speed[: len(rows)] = market.speed[np.ix_(rows, self.columns)]
        speed[len(rows) + np.arange(probes), self.first] = 1.0
        probed = GpuMarket(speed, np.append(market.size[rows], size), capacity + 0.5 * size, self.resource)
        base, slope = np.zeros((2, len(rows) + probes))
        base[len(rows) :], slope[: len(rows)] = 0.5, throughput
        solution = maximise(ShareProblem(probed, base=base, slope=slope, level=1.0))
        x, price = np.zeros((len(rows), len(market.resource))), np.zeros(len(market.capacity))
        x[:, self.columns], price[self.resources] = solution.x[: len(rows)], solution.pressure[len(rows) :] / size
        used = np.bincount(market.resource, times(x.T, market.size[rows]), len(limit))
        # What was added for the probes must not go to other rows, not even by a rounding error.
        x *= np.minimum(1.0, limit / np.maximum(used, 1e-300))[market.resource]
        return x, solution.level, price


def _most(market: GpuMarket) -> Floats:
    """The throughput of each row if it had everything to itself: its fastest resources first, until its time is used up."""
    speed = market.speed
    if market.beside is not None:
        beside = market.beside.throughput.max(axis=1, initial=0.0)[market.beside.kind]
        speed = np.where(speed > 0, np.maximum(speed, beside), 0.0)
    best = np.zeros((market.rows, len(market.capacity)))
    for column, resource in enumerate(market.resource):
        best[:, resource] = np.maximum(best[:, resource], speed[:, column])
    order = np.argsort(-best, axis=1, kind="stable")
    possible = np.take_along_axis(market.capacity / market.size[:, None], order, axis=1)
    time = np.diff(np.minimum(np.cumsum(possible, axis=1), 1.0), axis=1, prepend=0.0)
    total: Floats = (np.take_along_axis(best, order, axis=1) * time).sum(axis=1)
    return total
