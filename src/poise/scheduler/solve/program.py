"""The one family of programs behind all share policies: the market, what is asked of it, and the answer.

Rows m are jobs, columns c GPU types (perhaps at a locality), resources r the GPUs of a type. x_mc is the fraction of time
that row m spends on column c, and θ_m = Σ_c speed_mc x_mc its throughput:

    maximise    level · t  +  Σ value_mc x_mc  +  Σ log_m ln θ_m
    subject to  Σ_c x_mc <= 1                                      (a row does one thing at a time)
                Σ_m size_m Σ_{c of r} x_mc <= capacity_r           (resources)
                θ_m >= base_m + slope_m · t                        (what is asked for; t is free)
                x >= 0,   x_mc = 0 where speed_mc = 0

With `beside`, two rows of equal size may also share a column's resources: x_mm'c is time that both spend there together. It
counts in both rows, occupies the resource once, and gives row m throughput beside[kind_m, kind_m', c]. It is worth
value_mc · beside / speed_mc, in proportion to that throughput.
"""

from dataclasses import dataclass, field
from functools import cached_property
from math import nan

import numpy as np

from poise.scheduler.model.arithmetic import Floats, Ints
from poise.scheduler.model.workload import Pairs


@dataclass(frozen=True)
class PairThroughputs:
    """What rows do to each other when they share.

    kind         (rows,); rows of one kind have equal size and speed
    throughput   [a, b, c]: of a row of kind a beside one of kind b on column c; 0 where the two cannot share
    """

    kind: Ints
    throughput: Floats


@dataclass(frozen=True)
class GpuMarket:
    """What there is to choose from: rows that could use resources, and how fast they would be.

    speed       (rows, columns), >= 0
    size        (rows,), > 0: how much of a resource a row occupies
    capacity    (resources,), >= 0
    resource    (columns,): the resource that each column draws on
    beside      None if rows may not share
    count       (rows,): how many alike rows, its members, each row stands for; x_mc is then the share of each member.
                None: 1 each
    """

    speed: Floats
    size: Floats
    capacity: Floats
    resource: Ints
    beside: PairThroughputs | None = None
    count: Floats | None = None

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.size)

    @cached_property
    def is_even(self) -> bool:
        """Whether there are several columns, and each row has one speed wherever it has any."""
        is_level = (self.speed == self.fastest[:, None]) | (self.speed == 0)
        return self.speed.shape[1] > 1 and bool(is_level.all())

    @cached_property
    def fastest(self) -> Floats:
        """(rows,): the highest speed of each row."""
        fastest: Floats = self.speed.max(axis=1, initial=0.0)
        return fastest


@dataclass(frozen=True)
class ShareProblem:
    """What is asked of a market. None leaves a term or constraint out.

    base, slope   (rows,): θ >= base + slope · t, slope >= 0. A row with base <= 0 and slope 0 asks for nothing
    level         weight of t in the objective, >= 0; if 0 there is no t
    value         (rows, columns): worth of x per member
    log           (rows,): weight of ln θ (proportional fairness)
    """

    market: GpuMarket
    base: Floats | None = None
    slope: Floats | None = None
    level: float = 0.0
    value: Floats | None = None
    log: Floats | None = None

    def reached(self, throughput: Floats) -> float:
        """The highest t at which these throughputs are enough; nan if there is no t."""
        if not self.level or self.slope is None:
            return nan
        asks = self.slope > 0
        base = 0.0 if self.base is None else self.base[asks]
        return float(np.min((throughput[asks] - base) / self.slope[asks]))


class WarmStart:
    """Where a solver ended, for its next similar program to start from. Opaque to everyone else."""


@dataclass(frozen=True)
class Solution:
    """A feasible answer.

    x            (rows, columns): time alone
    throughput   (rows,): θ, time together included
    level        t; nan if the problem has none
    pressure     (rows,), >= 0: how much the objective would rise per unit less of throughput asked of a row. A row under
                 pressure gets exactly what is asked, and could not get more in any best answer. nan where a second aim
                 (both level and value) leaves it undetermined
    shared       time together
    effort       iterations taken
    start        where a similar program may start; None if that would not help
    """

    x: Floats
    throughput: Floats
    level: float
    pressure: Floats
    shared: Pairs = field(default_factory=Pairs.none)
    effort: int = 0
    start: WarmStart | None = None
