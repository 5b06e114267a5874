"""Bounds on what rows can have together, from the answers of programs: they hold whatever is asked for."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from poise.scheduler.model.arithmetic import Floats, dot
from poise.scheduler.solve.program import GpuMarket

Mask = NDArray[np.bool_]

ROUNDING = 1e-12
"""By how much a bound by prices may seem exceeded, relatively."""
INEXACT = 1e-8
"""By how much a bound by pressures may be exceeded, relatively."""


class Bound(Protocol):
    """A convex increasing function of throughputs that is <= 0 wherever they are possible."""

    def excess(self, throughput: Floats) -> float:
        """Its value, relative to what there is."""

    def growth(self, throughput: Floats, rise: Floats) -> float:
        """How fast it has been growing up to here, on the way along `rise`."""

    def reach(self, throughput: Floats, better: float) -> Floats:
        """The most that each row can have if nobody has less than this.

        Not exact: a row that could gain at most `better`, relative to its fastest speed, gains nothing
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
    """A bound by prices π of resources: to get θ costs row m at least e_m(θ), and everybody together has Σ π · capacity.

    e_m is convex: a row mixes the columns on the lower hull of the points (speed, cost). Valid for any prices, exact or not.
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
    """A bound by pressures of rows, Σ p θ <= most: as good as the solver is."""

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
