"""An independent answer to any `ShareProblem`: the whole program as its definition says it, for a general
interior-point solver.

Nothing is put together, pruned or generated: alike rows are written out one by one, every pair of rows of equal size is
there, and logarithms are exponential cones. Slow and plain, so that what is fast can be held against it.
"""

from dataclasses import dataclass, replace
from math import nan

import clarabel  # type: ignore[import-not-found,import-untyped,unused-ignore]
import numpy as np
from scipy import sparse  # type: ignore[import-untyped,unused-ignore]

from poise.scheduler.model.arithmetic import Floats, Ints
from poise.scheduler.model.errors import GaveUpError, InfeasibleError
from poise.scheduler.model.workload import Pairs
from poise.scheduler.solve.program import GpuMarket, PairThroughputs, ShareProblem, Solution


@dataclass(frozen=True)
class Reference:
    """What the general solver found: the best objective, t (nan if there is none), and throughputs of rows written out."""

    objective: float
    level: float
    throughput: Floats


def reference(problem: ShareProblem) -> float:
    """The best objective."""
    return solve_reference(problem).objective


def solve_reference(problem: ShareProblem) -> Reference:
    """The best answer. Raises InfeasibleError if there is none."""
    return _Program(expanded(problem)).solve()


def expanded(problem: ShareProblem) -> ShareProblem:
    """The same problem with alike rows written out one by one, next to each other."""
    market, count = problem.market, problem.market.count
    if count is None:
        return problem
    of = np.repeat(np.arange(market.rows), count.astype(np.int64))
    beside = None if market.beside is None else PairThroughputs(market.beside.kind[of], market.beside.throughput)
    return ShareProblem(
        GpuMarket(market.speed[of], market.size[of], market.capacity, market.resource, beside),
        base=_of_each(problem.base, of),
        slope=_of_each(problem.slope, of),
        level=problem.level,
        value=_of_each(problem.value, of),
        log=_of_each(problem.log, of),
    )


def _of_each(asked: Floats | None, of: Ints) -> Floats | None:
    return None if asked is None else asked[of]


def objective_of(problem: ShareProblem, solution: Solution) -> float:
    """What an answer is worth, alike rows each counted; time together is worth in proportion to the throughput it gives."""
    market = problem.market
    count = np.ones(market.rows) if market.count is None else market.count
    worth = problem.level * solution.level if problem.level else 0.0
    if problem.value is not None:
        worth += float((count[:, None] * problem.value * solution.x).sum())
        worth += float(
            solution.shared.share @ (_worth(problem, solution.shared) + _worth(problem, _turned(solution.shared)))
        )
    if problem.log is not None:
        asked = problem.log > 0
        worth += float((count * problem.log)[asked] @ np.log(solution.throughput[asked]))
    return worth


def throughput_of(market: GpuMarket, solution: Solution) -> Floats:
    """Throughput of each row (of each one of the alike rows) from its times alone and together."""
    theta: Floats = (market.speed * solution.x).sum(axis=1)
    count = np.ones(market.rows) if market.count is None else market.count
    for shared in (solution.shared, _turned(solution.shared)):
        np.add.at(theta, shared.first, shared.share * _together(market, shared) / count[shared.first])
    return theta


def broken_by(problem: ShareProblem, solution: Solution) -> float:
    """By how much an answer breaks the worst kept rule: shares absolutely, capacities and throughputs relatively."""
    market, shared = problem.market, solution.shared
    count = np.ones(market.rows) if market.count is None else market.count
    busy = solution.x.sum(axis=1)
    for rows in (shared.first, shared.second):
        np.add.at(busy, rows, shared.share / count[rows])
    used = np.zeros(len(market.capacity))
    np.add.at(used, market.resource, (market.size * count) @ solution.x)
    np.add.at(used, market.resource[shared.column], market.size[shared.first] * shared.share)
    theta = throughput_of(market, solution)
    asked = _asked(problem, solution.level)
    scale = np.where(market.fastest > 0, market.fastest, 1.0)
    return float(
        max(
            (busy - 1.0).max(initial=0.0),
            ((used - market.capacity) / np.maximum(market.capacity, 1.0)).max(initial=0.0),
            ((asked - theta) / scale).max(initial=0.0),
            (abs(solution.throughput - theta) / scale).max(initial=0.0),
            (-solution.x).max(initial=0.0),
            (-shared.share).max(initial=0.0),
            np.where(market.speed > 0, 0.0, solution.x).max(initial=0.0),
            *_unfit(market, shared),
        )
    )


def _unfit(market: GpuMarket, shared: Pairs) -> list[float]:
    """Time together of rows that cannot share: of different size, or one that is all alone."""
    count = np.ones(market.rows) if market.count is None else market.count
    alone = (shared.first == shared.second) & (count[shared.first] < 2)
    apart = market.size[shared.first] != market.size[shared.second]
    still = np.zeros(0, dtype=bool)
    if len(shared.share):
        still = (_together(market, shared) <= 0) | (_together(market, _turned(shared)) <= 0)
        still |= (market.speed[shared.first, shared.column] <= 0) | (market.speed[shared.second, shared.column] <= 0)
    return [float(shared.share[bad].max(initial=0.0)) for bad in (alone, apart, still)]


def _asked(problem: ShareProblem, level: float) -> Floats:
    asked = np.zeros(problem.market.rows) if problem.base is None else problem.base.copy()
    return asked + level * problem.slope if problem.level and problem.slope is not None else asked


def _turned(shared: Pairs) -> Pairs:
    return replace(shared, first=shared.second, second=shared.first)


def _together(market: GpuMarket, shared: Pairs) -> Floats:
    """Throughput of each `first` beside its `second`."""
    if market.beside is None or not len(shared.share):
        return np.zeros(len(shared.share))
    kind = market.beside.kind
    return market.beside.throughput[kind[shared.first], kind[shared.second], shared.column]


def _worth(problem: ShareProblem, shared: Pairs) -> Floats:
    """Worth of time together to each `first`: that of its time alone, in proportion to the throughput."""
    if problem.value is None:
        return np.zeros(len(shared.first))
    alone = problem.market.speed[shared.first, shared.column]
    return problem.value[shared.first, shared.column] * _together(problem.market, shared) / np.where(alone > 0, alone, 1.0)


def _pairs(market: GpuMarket) -> Pairs:
    """Every way for two rows to share, with no time in it yet."""
    if market.beside is None:
        return Pairs.none()
    first, second = np.triu_indices(market.rows, 1)
    equal = market.size[first] == market.size[second]
    first, second = first[equal], second[equal]
    columns = market.speed.shape[1]
    column = np.tile(np.arange(columns), len(first))
    every = Pairs(np.repeat(first, columns), np.repeat(second, columns), column, np.zeros(len(column)))
    can = (_together(market, every) > 0) & (_together(market, _turned(every)) > 0)
    can &= (market.speed[every.first, every.column] > 0) & (market.speed[every.second, every.column] > 0)
    return Pairs(every.first[can], every.second[can], every.column[can], every.share[can])


class _Program:
    """One conic program: minimise q·z so that b - A z is in the cones. z = times alone, times together, t, ln θ."""

    def __init__(self, problem: ShareProblem) -> None:
        self.problem = problem
        market = problem.market
        self.row, self.column = np.nonzero(market.speed > 0)
        self.pairs = _pairs(market)
        self.alone, self.together = len(self.row), len(self.pairs.share)
        self.has_level = problem.level != 0.0
        self.logs = np.zeros(0, dtype=np.int64) if problem.log is None else np.nonzero(problem.log > 0)[0]
        self.scale = np.where(market.fastest > 0, market.fastest, 1.0)
        self.width = self.alone + self.together + int(self.has_level) + len(self.logs)

    def solve(self) -> Reference:
        blocks, bounds, cones = self._linear()
        settings = clarabel.DefaultSettings()
        settings.verbose = False
        settings.max_threads = 1
        settings.tol_gap_abs = settings.tol_gap_rel = settings.tol_feas = 1e-9
        matrix = sparse.vstack([*blocks, *self._logarithms()]).tocsc()
        bound = np.concatenate([bounds, np.tile([0.0, 1.0, 0.0], len(self.logs))])
        cones += [clarabel.ExponentialConeT()] * len(self.logs)
        nothing = sparse.csc_matrix((self.width, self.width))
        answer = clarabel.DefaultSolver(nothing, -self._objective(), matrix, bound, cones, settings).solve()
        return self._read(answer)

    def _read(self, answer: "clarabel.DefaultSolution") -> Reference:
        status = str(answer.status)
        if "PrimalInfeasible" in status:
            raise InfeasibleError(f"the reference solver says {status}")
        if status not in ("Solved", "AlmostSolved"):
            raise GaveUpError(f"the reference solver says {status}")
        z = np.array(answer.x)
        worth = float(self._objective() @ z)
        if len(self.logs) and self.problem.log is not None:
            worth += float(self.problem.log[self.logs] @ np.log(self.scale[self.logs]))
        level = float(z[self.alone + self.together]) if self.has_level else nan
        return Reference(worth, level, np.asarray(self._throughputs() @ z) * self.scale)

    def _objective(self) -> Floats:
        q = np.zeros(self.width)
        value, times = self.problem.value, self.alone + self.together
        if value is not None:
            q[: self.alone] = value[self.row, self.column]
            q[self.alone : times] = _worth(self.problem, self.pairs) + _worth(self.problem, _turned(self.pairs))
        if self.has_level:
            q[times] = self.problem.level
        if self.problem.log is not None and len(self.logs):
            q[self.width - len(self.logs) :] = self.problem.log[self.logs]
        return q

    def _entries(self, height: int, rows: list[Ints], values: list[Floats]) -> sparse.csr_matrix:
        """A matrix over the times from three lists: of times alone, of firsts and of seconds."""
        pair = self.alone + np.arange(self.together)
        at = np.concatenate([np.arange(self.alone), pair, pair])
        return sparse.csr_matrix((np.concatenate(values), (np.concatenate(rows), at)), shape=(height, self.width))

    def _throughputs(self) -> sparse.csr_matrix:
        """θ as part of the fastest."""
        market, pairs = self.problem.market, self.pairs
        values = [
            market.speed[self.row, self.column] / self.scale[self.row],
            _together(market, pairs) / self.scale[pairs.first],
            _together(market, _turned(pairs)) / self.scale[pairs.second],
        ]
        return self._entries(market.rows, [self.row, pairs.first, pairs.second], values)

    def _linear(self) -> tuple[list[sparse.csr_matrix], Floats, list["clarabel.NonnegativeConeT"]]:
        """Time, resources, what is asked for, and no time below zero."""
        market, pairs, problem = self.problem.market, self.pairs, self.problem
        ones = [np.ones(self.alone), np.ones(self.together), np.ones(self.together)]
        time = self._entries(market.rows, [self.row, pairs.first, pairs.second], ones)
        where = [market.resource[self.column], market.resource[pairs.column], market.resource[pairs.column]]
        sizes = [market.size[self.row], market.size[pairs.first], np.zeros(self.together)]
        capacity = np.maximum(market.capacity, 1.0)
        use = sparse.diags(1.0 / capacity) @ self._entries(len(market.capacity), where, sizes)
        blocks = [time, use, -sparse.eye(self.alone + self.together, self.width, format="csr")]
        bounds = [np.ones(market.rows), market.capacity / capacity, np.zeros(self.alone + self.together)]
        if problem.base is not None or (problem.slope is not None and self.has_level):
            slope = sparse.lil_matrix((market.rows, self.width))
            if problem.slope is not None and self.has_level:
                slope[:, self.alone + self.together] = (problem.slope / self.scale)[:, None]
            blocks.append(slope.tocsr() - self._throughputs())
            bounds.append(np.zeros(market.rows) if problem.base is None else -problem.base / self.scale)
        bound = np.concatenate(bounds)
        return blocks, bound, [clarabel.NonnegativeConeT(len(bound))]

    def _logarithms(self) -> list[sparse.csr_matrix]:
        """Three lines for each logarithm: (u, 1, θ) in the exponential cone, so u <= ln θ."""
        if not len(self.logs):
            return []
        picked, first = self._throughputs()[self.logs], self.width - len(self.logs)
        lines = sparse.lil_matrix((3 * len(self.logs), self.width))
        for i in range(len(self.logs)):
            lines[3 * i, first + i] = -1.0
            lines[3 * i + 2] = -picked[i]
        return [lines.tocsr()]
