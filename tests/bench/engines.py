"""`python -m tests.bench.engines`: what max-min costs Poise's own method, HiGHS and Clarabel (docs/design/0005-solvers.md).

    maximise t   subject to   θ_m >= t · demand_m,   Σ_c x_mc <= 1,   Σ_m size_m x_mc <= capacity_c,   x >= 0

No two rows are alike, so that nothing can be put together before a solve. The general solvers are given the program as a
sparse matrix with all numbers of order 1; making that matrix is not counted. CPU seconds of all threads, the least of three.
All answers must agree.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import process_time

import clarabel  # type: ignore[import-not-found,import-untyped,unused-ignore]
import highspy
import numpy as np
from scipy import sparse  # type: ignore[import-untyped,unused-ignore]

from poise.scheduler.model.arithmetic import Floats
from poise.scheduler.solve.interior_point import maximise_interior
from poise.scheduler.solve.program import GpuMarket, ShareProblem

ROWS, COLUMNS, TIMES = (256, 2_048, 8_192), (3, 6), 3
AGREED = 1e-6
"""Relative difference of levels that counts as none."""
CROWDING = 4.0
"""Of a resource asked for, for each one that there is."""


@dataclass(frozen=True)
class Matrix:
    """Minimise −t so that lines · (x, t) <= bound and x >= 0: x by row and column, then t."""

    lines: sparse.csc_matrix
    bound: Floats


def main() -> int:
    """Measure, print as a table, and say by the exit code whether all engines agree."""
    engines: dict[str, Callable[[ShareProblem, Matrix], float]] = {
        "blocks.py": lambda problem, _: maximise_interior(problem).level,
        "HiGHS, simplex": lambda _, matrix: by_highs(matrix, "simplex"),
        "HiGHS, interior point": lambda _, matrix: by_highs(matrix, "ipm"),
        "Clarabel": lambda _, matrix: by_clarabel(matrix),
    }
    print(f"| rows | columns | {' | '.join(engines)} | steps |\n|---|---|{'---|' * len(engines)}---|")
    agreed = True
    for rows in ROWS:
        for columns in COLUMNS:
            problem = drawn(rows, columns, seed=0)
            matrix = written_out(problem)
            timed = [_timed(engine, problem, matrix) for engine in engines.values()]
            cells = [f"{seconds:.4f}" for seconds, _ in timed]
            print(f"| {rows:,} | {columns} | {' | '.join(cells)} | {maximise_interior(problem).effort} |", flush=True)
            agreed = _agree([level for _, level in timed]) and agreed
    return 0 if agreed else 1


def drawn(rows: int, columns: int, seed: int) -> ShareProblem:
    """A crowded market in which a row is up to ten times faster in one place than in another, and units differ widely."""
    rng = np.random.default_rng(seed)
    size = rng.choice([1.0, 2.0, 4.0, 8.0], rows, p=[0.7, 0.1, 0.15, 0.05])
    speed = 10.0 ** (3.0 * rng.random((rows, 1)) + rng.random((rows, columns)))
    capacity = np.full(columns, np.ceil(size.sum() / CROWDING / columns))
    market = GpuMarket(speed, size, capacity, np.arange(columns))
    demand = speed @ (capacity / capacity.sum()) / size
    return ShareProblem(market, slope=demand, level=1.0)


def written_out(problem: ShareProblem) -> Matrix:
    """The program as general solvers take it: speeds relative to the fastest, use relative to capacity."""
    market = problem.market
    rows, columns = market.speed.shape
    assert problem.slope is not None
    row, column = np.repeat(np.arange(rows), columns), np.tile(np.arange(columns), rows)
    at, ones = np.arange(rows * columns), np.ones(rows * columns)
    time = sparse.csc_matrix((ones, (row, at)), shape=(rows, len(at)))
    use = sparse.csc_matrix((market.size[row] / market.capacity[column], (column, at)), shape=(columns, len(at)))
    relative = (market.speed / market.fastest[:, None]).ravel()
    throughput = sparse.csc_matrix((-relative, (row, at)), shape=(rows, len(at)))
    slope = sparse.csc_matrix((problem.slope / market.fastest)[:, None])
    lines = sparse.bmat([[time, None], [use, None], [throughput, slope]]).tocsc()
    return Matrix(lines, np.concatenate([np.ones(rows + columns), np.zeros(rows)]))


def by_highs(matrix: Matrix, solver: str) -> float:
    """The level by HiGHS."""
    height, width = matrix.lines.shape
    program = highspy.HighsLp()
    program.num_col_, program.num_row_ = width, height
    program.col_cost_ = -np.eye(1, width, width - 1)[0]
    program.col_lower_ = np.append(np.zeros(width - 1), -np.inf)
    program.col_upper_ = np.full(width, np.inf)
    program.row_lower_, program.row_upper_ = np.full(height, -np.inf), matrix.bound
    program.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    program.a_matrix_.start_, program.a_matrix_.index_ = matrix.lines.indptr, matrix.lines.indices
    program.a_matrix_.value_ = matrix.lines.data
    model = highspy.Highs()  # type: ignore[no-untyped-call]
    for name, setting in (("output_flag", False), ("threads", 1), ("parallel", "off"), ("solver", solver)):
        model.setOptionValue(name, setting)
    model.passModel(program)
    model.run()
    return -float(model.getInfo().objective_function_value)


def by_clarabel(matrix: Matrix) -> float:
    """The level by Clarabel, set up as in tests/reference.py."""
    width = matrix.lines.shape[1]
    settings = clarabel.DefaultSettings()
    settings.verbose, settings.max_threads = False, 1
    settings.tol_gap_abs = settings.tol_gap_rel = settings.tol_feas = 1e-9
    lines = sparse.vstack([matrix.lines, -sparse.eye(width - 1, width)]).tocsc()
    bound = np.append(matrix.bound, np.zeros(width - 1))
    nothing = sparse.csc_matrix((width, width))
    cones = [clarabel.NonnegativeConeT(len(bound))]
    solver = clarabel.DefaultSolver(nothing, -np.eye(1, width, width - 1)[0], lines, bound, cones, settings)
    return float(solver.solve().x[width - 1])


def _timed(engine: Callable[[ShareProblem, Matrix], float], problem: ShareProblem, matrix: Matrix) -> tuple[float, float]:
    """CPU seconds and the level."""
    seconds, level = [], 0.0
    for _ in range(TIMES):
        before = process_time()
        level = engine(problem, matrix)
        seconds.append(process_time() - before)
    return min(seconds), level


def _agree(levels: Sequence[float]) -> bool:
    apart = max(levels) / min(levels) - 1.0
    if apart > AGREED:
        print(f"MISS  levels differ by {apart:.1e}: {levels}")
    return apart <= AGREED


if __name__ == "__main__":
    sys.exit(main())
