"""The entry point to the solvers: `maximise` reduces a program and passes it to the method made for it.

1. Rows that have no speed on any column with capacity are set aside; they get nothing.
2. Rows with equal coefficients become one row with a `count`. By convexity the average of their answers is as good as any.
3. The program goes to one of three methods: `pairs.py` if rows may share, `simplex.py` for a small program with a second
   aim, `interior_point.py` for all others.
4. The answer is copied back to all rows; time together is dealt out to the members of each class (`dealt`).
"""

from dataclasses import replace
from math import nan

import numpy as np

from poise.scheduler.model.arithmetic import Bools, Floats, Ints
from poise.scheduler.model.workload import Pairs
from poise.scheduler.solve.interior_point import maximise_interior
from poise.scheduler.solve.pairs import maximise_with_pairs
from poise.scheduler.solve.program import PairThroughputs, ShareProblem, Solution, WarmStart
from poise.scheduler.solve.simplex import maximise_vertex

FEW = 120
"""Rows, once alike ones are put together, up to which the simplex method is faster than the interior-point method."""


def maximise(problem: ShareProblem, start: WarmStart | None = None) -> Solution:
    """The best answer, feasible to 1e-6 and within 1e-6 (relative) of the optimum. Raises SolveError if there is none.

    `start` may be that of the answer to a similar program. A row that has no speed on any column with capacity gets nothing,
    and what is asked of it is dropped.
    """
    market = problem.market
    empty = market.capacity[market.resource] <= 0
    if empty.any():
        beside = market.beside
        if beside is not None:
            beside = PairThroughputs(beside.kind, np.where(empty, 0.0, beside.throughput))
        # No row has a use for an empty resource any more, so its capacity may be anything that can be divided by.
        capacity = np.where(market.capacity > 0, market.capacity, 1.0)
        market = replace(market, speed=np.where(empty, 0.0, market.speed), capacity=capacity, beside=beside)
        problem = replace(problem, market=market)
    able = market.fastest > 0
    if not able.any():
        rows = market.rows
        return Solution(np.zeros_like(market.speed), np.zeros(rows), nan, np.zeros(rows))
    if able.all():
        return _aggregated(problem, start)
    chosen = np.flatnonzero(able)
    solution = _aggregated(_chosen(problem, chosen), start)
    shared = solution.shared
    shared = replace(shared, first=chosen[shared.first], second=chosen[shared.second])
    return replace(_spread(solution, np.cumsum(able) - 1, able), shared=shared)


def _aggregated(problem: ShareProblem, start: WarmStart | None) -> Solution:
    """Solve with one row per class of alike rows."""
    first, member, count = alike(problem)
    classes = _chosen(problem, first)
    market = replace(classes.market, count=count)
    classes = replace(classes, market=market)
    # A second aim says which of the best answers is wanted, so that any vertex will do; it says nothing where columns are
    # alike. Without a second aim the centre of the best answers is wanted.
    has_second_aim = problem.value is not None and (problem.level > 0 or problem.base is not None)
    if market.beside is not None:
        solution = maximise_with_pairs(classes)
        solution = replace(solution, shared=dealt(solution.shared, member, len(first)))
    elif has_second_aim and market.rows <= FEW and not market.is_even:
        solution = maximise_vertex(classes, start)
    else:
        solution = maximise_interior(classes)
    return _spread(solution, member, np.ones(problem.market.rows, dtype=bool))


def alike(problem: ShareProblem) -> tuple[Ints, Ints, Floats]:
    """Classes of rows with equal coefficients: the first row of each, the class of each row, and the size of each class."""
    market = problem.market
    columns = [market.speed, market.size[:, None]]
    columns += [each[:, None] for each in (problem.base, problem.slope, problem.log) if each is not None]
    columns += [problem.value] if problem.value is not None else []
    columns += [market.beside.kind[:, None].astype(float)] if market.beside is not None else []
    table = np.concatenate(columns, axis=1)
    # One number per row makes sorting cheap. Equal rows have equal numbers (no BLAS: it rounds by where a row stands); that
    # unequal rows have unequal ones is checked.
    key = np.einsum("ij,j->i", table, np.resize(_WEIGHTS, table.shape[1]))
    _, first, member = np.unique(key, return_index=True, return_inverse=True)
    if not (table == table[first][member]).all():
        _, first, member = np.unique(table, axis=0, return_index=True, return_inverse=True)
    count = np.bincount(member, weights=market.count, minlength=len(first)).astype(float)
    return first, member, count


_WEIGHTS = np.modf(np.arange(1, 513) * 0.6180339887498949)[0] + 0.5
"""Weights of the cells of a row in its key: evenly spread, none near 0."""


def _chosen(problem: ShareProblem, rows: Ints) -> ShareProblem:
    """The program of some rows."""
    market = problem.market
    beside = None if market.beside is None else PairThroughputs(market.beside.kind[rows], market.beside.throughput)
    terms = (problem.base, problem.slope, problem.value, problem.log)
    base, slope, value, log = (None if each is None else each[rows] for each in terms)
    market = replace(market, speed=market.speed[rows], size=market.size[rows], beside=beside)
    return ShareProblem(market, base, slope, problem.level, value, log)


def _spread(solution: Solution, source: Ints, given: Bools) -> Solution:
    """An answer for classes as one for all rows: row m gets what `source[m]` gets, or nothing where `given` is False."""
    x = np.where(given[:, None], solution.x[source], 0.0)
    throughput, pressure = (np.where(given, each[source], 0.0) for each in (solution.throughput, solution.pressure))
    return replace(solution, x=x, throughput=throughput, pressure=pressure)


def dealt(shared: Pairs, member: Ints, classes: int) -> Pairs:
    """Pairs of rows for pairs of classes, so that all members of a class get equal parts; `member` is the class of each row.

    Two classes are laid side by side, each member with an equal part of the time, and rows that lie side by side share (the
    north-west corner rule): about as many pairs as members. The members of one class sit in a ring, each beside the next.
    """
    order = np.argsort(member, kind="stable")
    bounds = np.searchsorted(member[order], np.arange(classes + 1))
    parts: list[tuple[Ints, Ints, Ints, Floats]] = []
    for a, b, column, share in zip(
        shared.first.tolist(), shared.second.tolist(), shared.column.tolist(), shared.share.tolist(), strict=True
    ):
        one, other = order[bounds[a] : bounds[a + 1]], order[bounds[b] : bounds[b + 1]]
        if a != b:
            edges = np.union1d(np.arange(1, len(one) + 1) / len(one), np.arange(1, len(other) + 1) / len(other))
            edges = edges[np.diff(edges, prepend=0.0) > 1e-12]  # the same edge twice, but for rounding
            middle = edges - np.diff(edges, prepend=0.0) / 2
            first = one[np.minimum((middle * len(one)).astype(np.int64), len(one) - 1)]
            second = other[np.minimum((middle * len(other)).astype(np.int64), len(other) - 1)]
            parts.append((first, second, np.full(len(edges), column), share * np.diff(edges, prepend=0.0)))
        elif len(one) == 2:  # two in a ring are one pair
            parts.append((one[:1], one[1:], np.array([column]), np.array([share])))
        else:
            parts.append((one, np.roll(one, -1), np.full(len(one), column), np.full(len(one), share / len(one))))
    if not parts:
        return Pairs.none()
    return Pairs(*(np.concatenate(each) for each in zip(*parts, strict=True)))
