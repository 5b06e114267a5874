"""Programs of `problem.py` in which rows may share (`Market.beside`): a linear program that grows as it is needed.

Rows of one kind are first taken together as a crowd (`crowds.py`), so that there are as many unknowns as there are kinds,
not rows. Two things are then added until nothing is missing, each time starting from the answer before (`master.py`):

    pairs    of crowds, on a column, that would pay at the prices of the moment (column generation)
    cuts     that tell what the rows of a crowd want one by one, where its time could not be divided to give it to them

A pair on a column is left out from the start if T/T_alone + T'/T'_alone <= 1 there: time slicing does as much (ALGORITHMS
§2.4; exact). At the end a crowd's time is divided among its rows. Should a row then have to be beside itself, it leaves its
crowd and the program is solved again: in the worst case every row is on its own, which is the program as it is defined.

Alike rows (`Market.count`) are as if written out: x, throughput and pressure are those of each one of them, and the
objective counts all. `Pairs.share` is the total time of a pair of rows over all their members: each one of row `first`
spends share / count[first] of its time in it (twice that where a row with count >= 2 shares with itself), and the resource
is occupied for size · share. first <= second. `value` is what time alone is worth; time together is worth in proportion to
its throughput.
"""

from dataclasses import dataclass
from math import nan

import numpy as np
from numpy.typing import NDArray

from poise.model.arrays import Floats, Ints
from poise.model.errors import GaveUpError
from poise.model.workload import Pairs
from poise.solve.crowds import crossed, divided, folded, in_proportion
from poise.solve.master import Crowds, Master, Scaled
from poise.solve.problem import Problem, Solution

NOTHING = 1e-12
"""Shares below this are rounding."""


def maximise_sharing(problem: Problem) -> Solution:
    """The best answer with time together: feasible to 1e-6, its objective within 1e-6 (relative) of the optimum.

    Deterministic. Raises InfeasibleError if nothing meets what is asked for, GaveUpError if the effort allowed is spent.
    """
    if problem.log is not None:
        raise GaveUpError("logarithms with sharing are not solved: leave out `log` or `beside`")
    scaled = Scaled(problem)
    crowd_of, effort = scaled.alike(), 0
    while True:
        crowds = Crowds(scaled, crowd_of)
        master = Master(scaled, crowds)
        master.solve()
        effort += master.effort
        division = _Division(scaled, crowds, master)
        if not len(division.lonely):
            return division.solution(problem, effort)
        crowd_of = _apart(crowd_of, division.lonely)


def _apart(crowd_of: Ints, rows: Ints) -> Ints:
    """Each of these rows in a crowd of its own."""
    after = crowd_of.copy()
    after[rows] = crowd_of.max() + 1 + np.arange(len(rows))
    return np.unique(after, return_inverse=True)[1]


@dataclass(frozen=True)
class _Part:
    """Who of a crowd runs in a way, and for how long."""

    rows: Ints
    time: Floats


class _Division:
    """The time of crowds divided among their rows. `lonely`: rows that would be beside themselves."""

    def __init__(self, scaled: Scaled, crowds: Crowds, master: Master) -> None:
        self.scaled, self.crowds, self.master = scaled, crowds, master
        self.wants = scaled.wants(master.level)
        self.parts: dict[tuple[int, int], _Part] = {}
        lonely = [self._divide(crowd) for crowd in range(crowds.many)]
        self.lonely = np.concatenate(lonely)

    def _divide(self, crowd: int) -> Ints:
        """Divide, and say who would be beside itself."""
        rows = self.crowds.rows[crowd]
        used, speed, time = self.master.ways(crowd)
        wants, count = self.wants[rows], self.scaled.count[rows]
        own = self.master.first[used] == self.master.second[used]
        parts = divided(speed, time, wants, count) if len(rows) > 1 else time[None, :]
        alone = _beside_itself(parts, own, count)
        if alone.any():
            even = in_proportion(time, wants, count)
            if (even.sum(axis=1) <= count).all() and not _beside_itself(even, own, count).any():
                parts, alone = even, np.zeros(len(rows), dtype=bool)
        for way, part in zip(used, parts.T, strict=True):
            self.parts[crowd, int(way)] = _Part(rows, part)
        lonely: Ints = rows[alone]
        return lonely

    def solution(self, problem: Problem, effort: int) -> Solution:
        """The answer in the problem's own units."""
        scaled, master = self.scaled, self.master
        x = np.zeros(problem.market.speed.shape)
        pairs: list[tuple[Ints, Ints, Ints, Floats]] = []
        for way in np.nonzero(master.time > 0)[0]:
            first, second, column = int(master.first[way]), int(master.second[way]), int(master.column[way])
            part = self.parts[first, int(way)]
            if second < 0:
                x[part.rows, column] += part.time / scaled.count[part.rows]
            else:
                pairs.append(self._paired(part, None if first == second else self.parts[second, int(way)], column))
        x[x < NOTHING] = 0.0
        shared = _sorted(pairs)
        throughput = _throughput(problem, scaled, x, shared)
        return Solution(
            x, throughput, master.level * scaled.unit if problem.level else nan, master.pressure(), shared, effort
        )

    def _paired(self, part: _Part, other: _Part | None, column: int) -> tuple[Ints, Ints, Ints, Floats]:
        """Pairs of rows (first <= second), from what each side spends in them."""
        if other is None:
            i, j, time = folded(part.time)
            first, second = part.rows[i], part.rows[j]
            real = (first != second) | (self.scaled.count[first] >= 2)
        else:
            i, j, time = crossed(part.time, other.time)
            first, second = part.rows[i], other.rows[j]
            real = np.ones(len(time), dtype=bool)
        real &= time > NOTHING
        low, high = np.minimum(first, second)[real], np.maximum(first, second)[real]
        return low, high, np.full(len(low), column, dtype=np.int64), time[real]


def _beside_itself(parts: Floats, own: NDArray[np.bool_], count: Floats) -> NDArray[np.bool_]:
    """Which single rows have more than half of the time that their crowd spends with itself."""
    half = parts[:, own].sum(axis=0) / 2.0
    greedy: NDArray[np.bool_] = (parts[:, own] > half + 1e-9).any(axis=1)
    return greedy & (count < 2)


def _sorted(pairs: list[tuple[Ints, Ints, Ints, Floats]]) -> Pairs:
    """By first, second, column."""
    if not pairs:
        return Pairs.none()
    first, second, column, time = (np.concatenate(each) for each in zip(*pairs, strict=True))
    order = np.lexsort((column, second, first))
    return Pairs(first[order], second[order], column[order], time[order])


def _throughput(problem: Problem, scaled: Scaled, x: Floats, shared: Pairs) -> Floats:
    """Of each one of every row's members."""
    market, kind = problem.market, scaled.kind
    theta: Floats = (market.speed * x).sum(axis=1)
    for one, other in ((shared.first, shared.second), (shared.second, shared.first)):
        rate = scaled.together[kind[one], kind[other], shared.column] * scaled.fastest[one]
        np.add.at(theta, one, rate * shared.share / scaled.count[one])
    return theta
