"""The door to the solvers: rows that ask for nothing possible are set aside, alike rows are put together, and the program
goes to the method that is made for it.
"""

from dataclasses import replace
from math import nan

import numpy as np

from poise.scheduler.model.arithmetic import Floats, Ints
from poise.scheduler.model.workload import Pairs
from poise.scheduler.solve.interior_point import maximise_interior
from poise.scheduler.solve.pairs import maximise_with_pairs
from poise.scheduler.solve.program import GpuMarket, PairThroughputs, ShareProblem, Solution, WarmStart
from poise.scheduler.solve.simplex import maximise_vertex

# Time that classes of alike rows spend together, dealt out to their members: everybody gets an equal part of it.


def dealt(shared: Pairs, member: Ints, classes: int) -> Pairs:
    """Pairs of rows for pairs of classes; `member` says of each row which class it is in.

    Two classes are laid side by side, each member with an equal part of the time, and whoever lies beside whom shares (the
    north-west corner rule): as few pairs as members. Members of one class sit in a ring.
    """
    order = np.argsort(member, kind="stable")
    bounds = np.searchsorted(member[order], np.arange(classes + 1))
    parts = [
        _dealt_pair(order[bounds[a] : bounds[a + 1]], order[bounds[b] : bounds[b + 1]], share, column)
        for a, b, column, share in zip(
            shared.first.tolist(), shared.second.tolist(), shared.column.tolist(), shared.share.tolist(), strict=True
        )
    ]
    if not parts:
        return Pairs.none()
    first, second, column, share = (np.concatenate(each) for each in zip(*parts, strict=True))
    return Pairs(first, second, column, share)


def _dealt_pair(one: Ints, other: Ints, share: float, column: int) -> tuple[Ints, Ints, Ints, Floats]:
    if one[0] == other[0]:
        return _ring(one, share, column)
    edges = np.union1d(np.arange(1, len(one) + 1) / len(one), np.arange(1, len(other) + 1) / len(other))
    edges = edges[np.diff(edges, prepend=0.0) > 1e-12]  # the same edge twice, but for rounding
    middle = edges - np.diff(edges, prepend=0.0) / 2
    first = one[np.minimum((middle * len(one)).astype(np.int64), len(one) - 1)]
    second = other[np.minimum((middle * len(other)).astype(np.int64), len(other) - 1)]
    return first, second, np.full(len(edges), column), share * np.diff(edges, prepend=0.0)


def _ring(rows: Ints, share: float, column: int) -> tuple[Ints, Ints, Ints, Floats]:
    """Each beside the next; two rows are one pair."""
    if len(rows) == 2:
        return rows[:1], rows[1:], np.array([column]), np.array([share])
    return rows, np.roll(rows, -1), np.full(len(rows), column), np.full(len(rows), share / len(rows))


FEW = 120
"""Rows, once alike ones are put together, up to which the simplex method is the faster one."""


def maximise(problem: ShareProblem, start: WarmStart | None = None) -> Solution:
    """The best answer, feasible to 1e-6 and within 1e-6 (relative) of the optimum. Raises SolveError if there is none.

    `start` may be that of the answer to a similar program. A row that has no speed on any column with capacity gets nothing,
    and what is asked of it is dropped.
    """
    market = _without_empty_columns(problem.market)
    able = market.fastest > 0
    if not able.any():
        rows = market.rows
        return Solution(np.zeros_like(market.speed), np.zeros(rows), nan, np.zeros(rows))
    if able.all():
        return _aggregated(replace(problem, market=market), start)
    chosen = np.flatnonzero(able)
    solution = _aggregated(_chosen(replace(problem, market=market), chosen), start)
    shared = solution.shared
    shared = replace(shared, first=chosen[shared.first], second=chosen[shared.second])
    return replace(_spread(solution, np.cumsum(able) - 1, able), shared=shared)


def _without_empty_columns(market: GpuMarket) -> GpuMarket:
    empty = market.capacity[market.resource] <= 0
    if not empty.any():
        return market
    beside = market.beside
    if beside is not None:
        beside = PairThroughputs(beside.kind, np.where(empty, 0.0, beside.throughput))
    capacity = np.where(market.capacity > 0, market.capacity, 1.0)  # which nobody has a use for any more
    return replace(market, speed=np.where(empty, 0.0, market.speed), capacity=capacity, beside=beside)


def _aggregated(problem: ShareProblem, start: WarmStart | None) -> Solution:
    """Rows of equal coefficients share one row: by convexity their average is as good, and feasible."""
    first, member, count = alike(problem)
    chosen = _chosen(problem, first)
    classes = replace(chosen, market=replace(chosen.market, count=count))
    if problem.market.beside is None:
        solution = _unshared(classes, start)
    else:
        solution = maximise_with_pairs(classes)
        solution = replace(solution, shared=dealt(solution.shared, member, len(first)))
    return _spread(solution, member, np.ones(problem.market.rows, dtype=bool))


def _unshared(problem: ShareProblem, start: WarmStart | None) -> Solution:
    """A vertex will do where a second aim says which of the best answers is wanted; else the centre of them is.

    It says nothing where columns are alike.
    """
    market = problem.market
    has_second_aim = problem.value is not None and (problem.level > 0 or problem.base is not None)
    if has_second_aim and market.rows <= FEW and not market.is_even:
        return maximise_vertex(problem, start)
    return maximise_interior(problem)


def alike(problem: ShareProblem) -> tuple[Ints, Ints, Floats]:
    """Classes of rows with equal coefficients: the first row of each, each row's class, and how many there are of each."""
    market = problem.market
    columns = [market.speed, market.size[:, None]]
    columns += [each[:, None] for each in (problem.base, problem.slope, problem.log) if each is not None]
    columns += [problem.value] if problem.value is not None else []
    columns += [market.beside.kind[:, None].astype(float)] if market.beside is not None else []
    table = np.concatenate(columns, axis=1)
    # One number a row, so that sorting is cheap; equal rows have equal numbers, and that unequal ones do not is checked.
    # No BLAS: it rounds by where a row stands.
    key = np.einsum("ij,j->i", table, np.resize(_WEIGHTS, table.shape[1]))
    _, first, member = np.unique(key, return_index=True, return_inverse=True)
    if not (table == table[first][member]).all():
        _, first, member = np.unique(table, axis=0, return_index=True, return_inverse=True)
    count = np.bincount(member, weights=market.count, minlength=len(first)).astype(float)
    return first, member, count


_WEIGHTS = np.modf(np.arange(1, 513) * 0.6180339887498949)[0] + 0.5
"""Of the cells of a row in its key: spread evenly, none near 0."""


def _chosen(problem: ShareProblem, rows: Ints) -> ShareProblem:
    market = problem.market
    beside = None if market.beside is None else PairThroughputs(market.beside.kind[rows], market.beside.throughput)
    return ShareProblem(
        replace(market, speed=market.speed[rows], size=market.size[rows], beside=beside),
        base=_of(problem.base, rows),
        slope=_of(problem.slope, rows),
        level=problem.level,
        value=_of(problem.value, rows),
        log=_of(problem.log, rows),
    )


def _of(column: Floats | None, rows: Ints) -> Floats | None:
    return None if column is None else column[rows]


def _spread(solution: Solution, source: Ints, given: np.ndarray) -> Solution:
    """An answer for some rows or classes as one for all: row m has what `source[m]` has, where it is given anything."""
    x, throughput, pressure = (
        np.where(given if each.ndim == 1 else given[:, None], each[source], 0.0)
        for each in (solution.x, solution.throughput, solution.pressure)
    )
    return replace(solution, x=x, throughput=throughput, pressure=pressure)
