"""Water-filling: the level of every row rises along its group's path until nobody can have more.

τ_m = θ_m / norm_m is the level of row m, g_m its size. A group e of weight W_e fills at the rate W_e, counted in g·τ:

    fair   its rows rise in proportion to their weights w_m; one that can rise no further passes its weight on to the others
    fifo   its earliest row takes everything until it can rise no further, then the next one

Rows stop rising for two reasons. A row's own ceiling (all of its time where it is fastest) is known beforehand, so the path
c -> r(c) of all levels up to these ceilings has a closed form (`paths.py`). And rows are blocked where resources run out:
at the largest c for which θ >= r(c)·norm is possible. That c is found from above. For some c, the program

    maximise t   subject to   θ_m >= t · norm_m · r_m(c)

gives prices, prices are a bound on everything that is possible (`bounds.py`), and the largest c within the bound is tried
next. This is Newton's method, and a bound once known holds for every later pass too. At the c that is reached, rows that
would have to pay for more than they have are blocked: they keep their levels, and the paths of the others start anew, with
ceilings that are within the bounds, for what has a price is out of reach of those who rise on. So every pass prices a
resource that was free before, and there are about as many passes as resources, whatever the number of rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol

import numpy as np

from poise.scheduler.model.arithmetic import Floats, Ints, times
from poise.scheduler.model.errors import GaveUpError
from poise.scheduler.model.workload import Pairs
from poise.scheduler.solve.bounds import ROUNDING, Bound, Mask, PressureBound, PriceBound, crossing
from poise.scheduler.solve.program import GpuMarket, ShareProblem, Solution
from poise.scheduler.solve.solver import maximise

# How the levels of rows in groups rise together while each is bounded by nothing but its own ceiling (see `filling.py`).


@dataclass(frozen=True)
class Members:
    """The groups by row.

    group     which one; the last, of pace 1, for rows that are in none
    place     position in the group
    ceiling   highest τ of a row that had everything to itself; 0 for a row that is not to rise
    pace      W_e, by group
    """

    group: Ints
    place: Ints
    weight: Floats
    size: Floats
    ceiling: Floats
    norm: Floats
    fifo: Mask
    pace: Floats

    def under(self, throughput: Floats, rising: Mask) -> "Members":
        """The same, but those who rise are to rise to these throughputs at most."""
        lower = np.minimum(self.ceiling, self.levels(throughput))
        return replace(self, ceiling=np.where(rising, lower, self.ceiling))

    def levels(self, throughput: Floats) -> Floats:
        """τ; 0 for a row without a norm."""
        return np.divide(throughput, self.norm, out=np.zeros_like(self.norm), where=self.norm > 0)

    def summed(self, amounts: Floats) -> Floats:
        """Amounts by row, added up by group."""
        return np.bincount(self.group, amounts, len(self.pace)).astype(np.float64, copy=False)


class Path:
    """Everybody's level as a function of c >= 0, from given levels on, with no bound but each row's own ceiling."""

    def __init__(self, members: Members, levels: Floats, rising: Mask) -> None:
        self.members, self.levels, self.rising = members, levels, rising
        self.room = np.where(rising, members.size * (members.ceiling - levels), 0.0)
        self.weight = np.where(rising, members.weight, 0.0)
        self.pace = members.pace[members.group]
        self.before, self.full = self._fills()
        self.kinks = np.unique(np.append(self.full[rising], 0.0))

    def _fills(self) -> tuple[Floats, Floats]:
        """What goes to the rows that fill up before each one in its group, and the c at which it is full itself."""
        members, room, weight = self.members, self.room, self.weight
        until = room / np.where(self.rising, weight, 1.0)
        order = np.lexsort((np.where(members.fifo, members.place, until), members.group))
        before = _running(room, order, members.group)
        others = np.maximum(members.summed(weight)[members.group] - _running(weight, order, members.group), weight)
        return before, (before + np.where(members.fifo, room, until * others)) / self.pace

    @property
    def end(self) -> float:
        """Where everybody is at the ceiling."""
        return float(self.kinks[-1])

    def at(self, c: float) -> Floats:
        """The levels."""
        members, full = self.members, self.rising & (self.full <= c)
        left = members.pace * c - members.summed(np.where(full, self.room, 0.0))
        weight = members.summed(np.where(full, 0.0, self.weight))
        height = np.maximum(left, 0.0) / np.where(weight > 0, weight, 1.0)
        share = np.where(members.fifo, np.maximum(self.pace * c - self.before, 0.0), self.weight * height[members.group])
        return np.where(full, members.ceiling, self.levels + np.minimum(share, self.room) / members.size)

    def rises(self, c: float) -> Mask:
        """Rows that are below their ceilings at c."""
        return self.rising & (self.full > c)

    def furthest(self, bound: Bound) -> float:
        """The largest c that a bound allows."""
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
    """For each row, the sum over the rows of its group that come before it. The order goes group by group."""
    before = np.cumsum(amounts[order]) - amounts[order]
    of = group[order]
    result = np.empty_like(amounts)
    result[order] = np.maximum(before - before[np.searchsorted(of, of)], 0.0)
    return result


CLOSE = 1e-9
"""Levels this near to each other, relative to a row's ceiling, are the same."""
FAIR = 2e-5
"""The same, where rounding stops progress."""
BETTER = 1e-4
"""What a row must be able to gain, relative to its fastest speed, to count as able to rise."""
MOST_SOLVES = 40
"""For one pass; two to four are usual."""


class Inside(StrEnum):
    """How the rows of a group share what the group gets."""

    FAIR = "fair"
    FIFO = "fifo"


@dataclass(frozen=True)
class FillGroup:
    """Rows that fill together. One fair group of all rows: lexicographic max-min of g·τ/w.

    weight    W_e > 0: how fast the group fills, relative to other groups
    members   rows, in order of arrival; a row is in one group at most
    weights   w_m > 0 of each member; of no consequence if `inside` is FIFO
    """

    weight: float
    members: Ints
    weights: Floats
    inside: Inside = Inside.FAIR


@dataclass(frozen=True)
class Filled:
    """An answer in which no row of a group can have more unless one that was blocked no later has less.

    x, shared    time alone and together
    throughput   (rows,): θ
    levels       (rows,): τ; 0 for a row that is in no group
    passes       how often rows were blocked
    solves       programs that it took
    """

    x: Floats
    shared: Pairs
    throughput: Floats
    levels: Floats
    passes: int
    solves: int


def fill(market: GpuMarket, groups: Sequence[FillGroup], norm: Floats) -> Filled:
    """Fill until no row can have more. A row whose norm is 0 has no level, and is asked for nothing."""
    return _Filling(market, _members(market, groups, norm)).run()


def _members(market: GpuMarket, groups: Sequence[FillGroup], norm: Floats) -> Members:
    """The groups by row."""
    rows = market.rows
    group, place, weight = np.full(rows, len(groups)), np.zeros(rows, dtype=np.int64), np.ones(rows)
    for index, one in enumerate(groups):
        group[one.members], weight[one.members] = index, one.weights
        place[one.members] = np.arange(len(one.members))
    fifo = np.array([*(one.inside is Inside.FIFO for one in groups), False])[group]
    pace = np.array([*(one.weight for one in groups), 1.0])
    able = (group < len(groups)) & (norm > 0)
    ceiling = np.where(able, _most(market) / np.where(able, norm, 1.0), 0.0)
    return Members(group, place, weight, market.size, ceiling, norm, fifo, pace)


def _most(market: GpuMarket) -> Floats:
    """The throughput of each row if it had everything to itself: resources by its speed there, until its time is used up."""
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


class _Alone:
    """Programs of a market without sharing."""

    def __init__(self, market: GpuMarket) -> None:
        self.market = market
        self.top = market.fastest
        # Rows that are fastest on one column only: at their ceilings nothing is left to choose for them.
        self.sure = (market.speed >= self.top[:, None] * (1.0 - 1e-9)).sum(axis=1) == 1
        self.column = market.speed.argmax(axis=1)
        self.columns = np.flatnonzero(market.capacity[market.resource] > 0)
        self.resources, self.first, self.resource = np.unique(
            market.resource[self.columns], return_index=True, return_inverse=True
        )

    def towards(self, throughput: Floats) -> tuple[Solution, Bound]:
        """As much of these throughputs as possible; rows that are to have all that they could have get it first.

        Rows that are to have nothing, or as good as nothing, are left out.
        """
        market = self.market
        full = self.sure & (throughput >= self.top * (1.0 - ROUNDING)) & (throughput > 0)
        left = self._left(full)
        if (left < 1e-3 * market.capacity).any():
            full, left = np.zeros_like(full), market.capacity
        rest = np.flatnonzero(~full & (throughput > CLOSE * self.top))
        x = np.zeros_like(market.speed)
        x[full, self.column[full]] = 1.0
        level, price = 1.0, np.ones(len(left))
        if len(rest):
            x[rest], level, price = self._probed(rest, left, throughput[rest])
        solution = Solution(x, (market.speed * x).sum(axis=1), level, np.zeros(market.rows))
        return solution, PriceBound(market, price)

    def _left(self, full: Mask) -> Floats:
        """What rows that have their way leave of each resource."""
        resource = self.market.resource[self.column[full]]
        return self.market.capacity - np.bincount(resource, self.market.size[full], len(self.market.capacity))

    def _probed(self, rows: Ints, limit: Floats, throughput: Floats) -> tuple[Floats, float, Floats]:
        """Times, level and prices for some rows.

        A probe on each resource needs a little of it, which is added to the resource: its pressure is the resource's price.
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
        # What was added for the probes is not there for anybody else, not even by a rounding error.
        x *= np.minimum(1.0, limit / np.maximum(used, 1e-300))[market.resource]
        return x, solution.level, price


class _Together:
    """Programs of a market with sharing."""

    def __init__(self, market: GpuMarket) -> None:
        self.market, self.top = market, _most(market)

    def towards(self, throughput: Floats) -> tuple[Solution, Bound]:
        """As much of these throughputs as possible."""
        solution = maximise(ShareProblem(self.market, slope=throughput, level=1.0))
        return solution, PressureBound(solution.pressure, solution.throughput, self.top)


class _FillPrograms(Protocol):
    """Programs of one market."""

    def towards(self, throughput: Floats) -> tuple[Solution, Bound]:
        """As much of these throughputs as possible, and a bound."""


@dataclass
class _Filling:
    """The loop."""

    market: GpuMarket
    members: Members
    bounds: list[Bound] = field(default_factory=list)
    solves: int = 0

    def run(self) -> Filled:
        """Rise and block until nobody rises."""
        programs = self._programs()
        levels, rising, passes = np.zeros(self.market.rows), self.members.ceiling > 0, 0
        expected, stalled = len(self.market.capacity) if self.market.beside is None else self.market.rows, 0
        solution = Solution(np.zeros_like(self.market.speed), levels, 0.0, levels)
        while rising.any():
            path = Path(self.members, levels, rising)
            c, solution = self._meet(path, programs)
            levels = np.minimum(path.at(c), self.members.levels(solution.throughput))
            passes += 1
            # Where the bounds are too coarse to tell who is blocked, they are read less strictly.
            coarser = max(passes - expected, 0) + stalled
            rising = self._able(levels, path.rises(c), BETTER * 10.0**coarser)
            stalled = 0 if (path.rising & ~rising).any() else stalled + 1
        return Filled(solution.x, solution.shared, solution.throughput, levels, passes, self.solves)

    def _programs(self) -> _FillPrograms:
        if self.market.beside is not None:
            return _Together(self.market)
        # Prices to begin with: resources are worth how fast they are, on average.
        relative = self.market.speed / np.where(self.market.fastest > 0, self.market.fastest, 1.0)[:, None]
        price = np.full(len(self.market.capacity), 1e-3)
        np.maximum.at(price, self.market.resource, relative.mean(axis=0) if len(relative) else 0.0)
        self.bounds.append(PriceBound(self.market, price))
        return _Alone(self.market)

    def _able(self, levels: Floats, rising: Mask, better: float) -> Mask:
        """Of the rows that are to rise, those that can; their ceilings come down to what the bounds allow."""
        throughput = self.members.norm * levels
        reach = np.min([bound.reach(throughput, better) for bound in self.bounds], axis=0)
        self.members = self.members.under(reach, rising)
        able: Mask = rising & (reach > throughput)
        return able

    def _meet(self, path: Path, programs: _FillPrograms) -> tuple[float, Solution]:
        """The largest c that is possible, and an answer there."""
        c = min((path.furthest(bound) for bound in self.bounds), default=path.end)
        for _ in range(MOST_SOLVES):
            levels = path.at(c)
            solution, bound = programs.towards(self.members.norm * levels)
            self.solves += 1
            self.bounds.append(bound)
            c = min(c, path.furthest(bound))
            missing = levels - self.members.levels(solution.throughput)
            settled = (levels - path.at(c) <= CLOSE * self.members.ceiling).all()
            if (missing <= (FAIR if settled else CLOSE) * self.members.ceiling).all():
                return c, solution
        raise GaveUpError(f"no common level of {self.market.rows} rows after {MOST_SOLVES} programs")
