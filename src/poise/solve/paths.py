"""How the levels of rows in groups rise together while each is bounded by nothing but its own ceiling (see `filling.py`)."""

from dataclasses import dataclass, replace

import numpy as np

from poise.model.arrays import Floats, Ints
from poise.solve.bounds import Bound, Mask, crossing


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
