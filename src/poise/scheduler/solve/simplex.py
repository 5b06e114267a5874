"""Small programs of `program.py` without pairs, by the simplex method of HiGHS, warm-started from a similar program.

For up to about a hundred rows it takes a fraction of the time of `interior_point.py`, and a program that differs little from
the last one takes a few pivots. The answer is a vertex: rows get few columns, so jobs are seldom moved. A vertex does not
tell which rows could still get more, so this method is not for programs whose caller wants to know that (`pressure`).
"""

from dataclasses import dataclass
from functools import cache, lru_cache
from math import nan

import highspy
import numpy as np
from highspy import HighsModelStatus

from poise.scheduler.model.arithmetic import Floats, Ints
from poise.scheduler.model.errors import GaveUpError, InfeasibleError
from poise.scheduler.solve.program import ShareProblem, Solution, WarmStart

INF = highspy.kHighsInf
SETTINGS = (
    ("output_flag", False),
    ("threads", 1),
    ("presolve", "off"),
    ("solver", "simplex"),
    ("simplex_iteration_limit", 100_000),
    ("primal_feasibility_tolerance", 1e-9),
    ("dual_feasibility_tolerance", 1e-9),
)


@dataclass(frozen=True)
class SimplexBasis(WarmStart):
    """A warm start: the rows of a program and the basis in which it ended."""

    speed: Floats
    size: Floats
    basis: highspy.HighsBasis

    def suits(self, problem: ShareProblem) -> bool:
        """Whether a problem has the same rows; its other numbers may differ."""
        market = problem.market
        return np.array_equal(self.speed, market.speed) and np.array_equal(self.size, market.size)


def maximise_vertex(problem: ShareProblem, start: WarmStart | None) -> Solution:
    """A best vertex of a market without pairs in which every row has a speed somewhere. `log` must be None."""
    model = _solver()
    model.clearSolver()
    model.passModel(_program(problem))
    if isinstance(start, SimplexBasis) and start.suits(problem):
        model.setBasis(start.basis)
    model.run()
    status = model.getModelStatus()
    if status in (HighsModelStatus.kInfeasible, HighsModelStatus.kUnboundedOrInfeasible):
        raise InfeasibleError("what is asked of the rows cannot be met")
    if status != HighsModelStatus.kOptimal:
        raise GaveUpError(f"the linear program ended as {model.modelStatusToString(status)!r}")
    # The answer in the units of the problem, scaled down where rounding uses more than there is.
    market, found = problem.market, model.getSolution()
    count = np.ones(market.rows) if market.count is None else market.count
    x: Floats = np.clip(np.array(found.col_value[:-1]).reshape(market.speed.shape), 0.0, 1.0)
    x /= np.maximum(x.sum(axis=1, keepdims=True), 1.0)
    by_column = (x * (market.size * count)[:, None]).sum(axis=0)
    used = np.bincount(market.resource, by_column, len(market.capacity))
    x *= np.minimum(1.0, market.capacity / np.maximum(used, 1e-300))[market.resource]
    throughput = (market.speed * x).sum(axis=1)
    corner = SimplexBasis(market.speed, market.size, model.getBasis())
    effort = max(int(model.getInfo().simplex_iteration_count), 0)
    return Solution(x, throughput, problem.reached(throughput), np.full(market.rows, nan), effort=effort, start=corner)


@cache
def _solver() -> highspy.Highs:
    """One solver for all programs, because making one takes as long as solving with it. Callers clear it first."""
    model = highspy.Highs()  # type: ignore[no-untyped-call]
    for name, setting in SETTINGS:
        model.setOptionValue(name, setting)
    return model


@lru_cache(maxsize=64)
def _shape(rows: int, columns: int, resource: tuple[int, ...], resources: int) -> tuple[Ints, Ints, Ints]:
    """What programs of one shape have in common: the row of each x, and the sparsity pattern of the matrix, by column."""
    of_row, of_column = np.divmod(np.arange(rows * columns), columns)
    places = np.stack([of_row, rows + np.array(resource)[of_column], rows + resources + of_row], axis=1)
    index = np.append(places.ravel(), rows + resources + np.arange(rows))
    return of_row, np.append(np.arange(rows * columns + 1) * 3, len(index)), index


def _program(problem: ShareProblem) -> highspy.HighsLp:
    """Variables: x by row and column, then t. Constraints: time, resources, what is asked; relative to the fastest speed."""
    market = problem.market
    rows, columns = market.speed.shape
    resources, cells = len(market.capacity), rows * columns
    count = np.ones(rows) if market.count is None else market.count
    fastest = market.fastest
    base = np.zeros(rows) if problem.base is None else problem.base / fastest
    slope = np.zeros(rows) if problem.slope is None else problem.slope / fastest
    unit = float(slope.max(initial=0.0)) or 1.0
    worth = np.zeros((rows, columns)) if problem.value is None else problem.value * count[:, None]
    scale = float(np.abs(worth).max(initial=0.0)) or 1.0  # keeps the smaller aim above the solver's tolerance
    of_row, starts, index = _shape(rows, columns, tuple(market.resource.tolist()), resources)
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = cells + 1, 2 * rows + resources
    lp.col_cost_ = np.append(-worth.ravel() / scale, -problem.level / unit / scale)
    lp.col_lower_ = np.append(np.zeros(cells), -INF if problem.level else 0.0)
    lp.col_upper_ = np.append(np.where(market.speed.ravel() > 0, 1.0, 0.0), INF if problem.level else 0.0)
    lp.row_lower_ = np.concatenate([np.full(rows + resources, -INF), base])
    lp.row_upper_ = np.concatenate([np.ones(rows), market.capacity, np.full(rows, INF)])
    numbers = np.ones((cells, 3))
    numbers[:, 1] = (market.size * count)[of_row]
    numbers[:, 2] = (market.speed / fastest[:, None]).ravel()
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    lp.a_matrix_.start_ = starts
    lp.a_matrix_.index_ = index
    lp.a_matrix_.value_ = np.append(numbers.ravel(), -slope / unit)
    return lp
