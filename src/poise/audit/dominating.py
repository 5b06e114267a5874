"""Whether all could be as well off and some better: by trying everything, by an integer program, or over shares of time.

Rows are jobs (or agents) with speeds by GPU type and a gang; θ* is what each has now. A better answer leaves nobody below
θ*, and what it gains is counted in parts of everybody's fastest speed:

    gain = max Σ_m (θ_m − θ*_m) / fastest_m          subject to  θ_m >= θ*_m  and the GPUs there are
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

import highspy
import numpy as np
from highspy import HighsModelStatus

from poise.model.arrays import Floats, Ints
from poise.model.errors import GaveUpError
from poise.solve.engine import maximise
from poise.solve.problem import Market, Problem

MOST_TRIED = 20_000
"""Assignments up to which all of them are tried."""

NOISE = 1e-6
"""Parts of the fastest speed: gains below are the rounding of a solver."""

WAITS = -1
"""Instead of a type: holds none."""


@dataclass(frozen=True)
class Moment:
    """Who holds GPUs of which type at a moment; `WAITS` of those who hold none.

    speed   (jobs, types): of the whole gang;  gang, gpus: GPUs that each needs, and that there are of each type
    """

    speed: Floats
    gang: Ints
    gpus: Ints
    held: Ints

    @cached_property
    def now(self) -> Floats:
        """How fast each is."""
        return self.after(self.held)

    @cached_property
    def worth(self) -> Floats:
        """(jobs, types): speeds as parts of the fastest."""
        fastest = self.speed.max(axis=1, keepdims=True)
        parts: Floats = self.speed / np.where(fastest > 0, fastest, 1.0)
        return parts

    def after(self, assignment: Ints) -> Floats:
        """How fast each would be; 0 where it waits."""
        found: Floats = np.where(assignment >= 0, self.speed[np.arange(len(assignment)), assignment], 0.0)
        return found

    def better(self) -> tuple[float, Ints]:
        """The most that could be gained without anybody being slower, and who would hold what."""
        options = [self._options(job) for job in range(len(self.held))]
        are_few = prod(map(len, options)) <= MOST_TRIED
        assignment = _tried(self, options) if are_few else _programmed(self, options)
        return float(self._value(assignment) - self._value(self.held)), assignment

    def _options(self, job: int) -> list[int]:
        """Types on which a job is no slower; those who wait may go on waiting."""
        now = self.now[job]
        types = [kind for kind, speed in enumerate(self.speed[job]) if speed > 0 and speed >= now]
        return types if self.held[job] >= 0 else [WAITS, *types]

    def _value(self, assignment: Ints) -> float:
        placed = np.flatnonzero(assignment >= 0)
        return float(self.worth[placed, assignment[placed]].sum())


def _tried(moment: Moment, options: Sequence[Sequence[int]]) -> Ints:
    """Every assignment is looked at; the first of the best is taken."""
    best, found = -1.0, moment.held
    for each in product(*options):
        assignment = np.array(each, dtype=np.int64)
        used = np.bincount(assignment[assignment >= 0], moment.gang[assignment >= 0], len(moment.gpus))
        if (used <= moment.gpus).all() and (value := moment._value(assignment)) > best + 1e-12:
            best, found = value, assignment
    return found


def _programmed(moment: Moment, options: Sequence[Sequence[int]]) -> Ints:
    """An integer program: one variable for each job and type on which it is no slower."""
    cells = [(job, kind) for job, kinds in enumerate(options) for kind in kinds if kind != WAITS]
    model = highspy.Highs()  # type: ignore[no-untyped-call]
    for name, value in (("output_flag", False), ("threads", 1), ("mip_rel_gap", 0.0), ("random_seed", 0)):
        model.setOptionValue(name, value)
    model.passModel(_program(moment, cells, {job for job, kinds in enumerate(options) if WAITS not in kinds}))
    model.run()
    if model.getModelStatus() != HighsModelStatus.kOptimal:
        raise GaveUpError(f"the integer program ended as {model.modelStatusToString(model.getModelStatus())!r}")
    found = np.full(len(moment.held), WAITS)
    for (job, kind), value in zip(cells, model.getSolution().col_value, strict=True):
        if value > 0.5:
            found[job] = kind
    return found


def _program(moment: Moment, cells: Sequence[tuple[int, int]], running: set[int]) -> highspy.HighsLp:
    """Rows: each job has one type, or none if it waits; the GPUs of each type."""
    jobs, types = len(moment.held), len(moment.gpus)
    worth = moment.worth
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(cells), jobs + types
    lp.col_cost_ = np.array([-worth[cell] for cell in cells])
    lp.col_lower_, lp.col_upper_ = np.zeros(len(cells)), np.ones(len(cells))
    lp.row_lower_ = np.array([1.0 if job in running else 0.0 for job in range(jobs)] + [0.0] * types)
    lp.row_upper_ = np.concatenate([np.ones(jobs), moment.gpus.astype(np.float64)])
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    lp.a_matrix_.start_ = np.arange(len(cells) + 1) * 2
    lp.a_matrix_.index_ = np.array([place for job, kind in cells for place in (job, jobs + kind)])
    lp.a_matrix_.value_ = np.array([value for job, _ in cells for value in (1.0, float(moment.gang[job]))])
    lp.integrality_ = [highspy.HighsVarType.kInteger] * len(cells)
    return lp


@dataclass(frozen=True)
class Lasting:
    """Agents over a long time: their speeds by type if all their jobs run at once, the GPUs that takes, and what each had.

    speed   (agents, types);  size, had: (agents,);  gpus: (types,)
    """

    speed: Floats
    size: Floats
    gpus: Floats
    had: Floats

    def better(self) -> tuple[float, Floats]:
        """The most that other shares of time could gain without anybody being slower, and everybody's speed under them."""
        fastest = self.speed.max(axis=1)
        market = Market(self.speed, self.size, self.gpus, np.arange(len(self.gpus)))
        asked = self.had * (1 - 1e-9)  # what was had can be had again, but for the last bits
        found = maximise(Problem(market, base=asked, value=self.speed / fastest[:, None])).throughput
        gains = (found - self.had) / fastest
        return float(gains[gains > NOISE].sum()), found
