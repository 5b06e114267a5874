"""Tables and charts of a study as data, for any renderer; groups of jobs and the figures that are taken of them.

`StudyPart` is one table with its text and charts. Units are seconds, GPU-hours and shares from 0 to 1.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from math import ceil
from typing import NamedTuple

import numpy as np

from poise.scheduler.model.arithmetic import Floats, Ints

Value = str | int | float | None
"""A cell; None is shown as empty."""
Row = tuple[Value, ...]

ALL = "all"
"""Label of the row about all jobs."""
HOUR = 3600.0
SLACK = 1e-9
"""Subtracted before rounding up a rank: 0.1·30 is a little more than 3 in floats."""


class ValueUnit(StrEnum):
    """Unit of a column; a SHARE is from 0 to 1."""

    TEXT = "text"
    COUNT = "count"
    PLAIN = "plain"
    SECONDS = "seconds"
    SHARE = "share"


TEXT, COUNT, PLAIN, SECONDS, SHARE = ValueUnit


class TableColumn(NamedTuple):
    """A column: its name for programs, its name for people, and its unit."""

    key: str
    heading: str
    unit: ValueUnit


def columns(*described: tuple[str, str, ValueUnit]) -> tuple[TableColumn, ...]:
    """Return columns from (key, heading, unit) each."""
    return tuple(TableColumn(*each) for each in described)


class ChartShape(Enum):
    """How a chart is drawn.

    CDF     the share of samples (`y` of a curve; it has no `x`) at or below each duration
    STEPS   levels that hold from a time on, SHAREs or COUNTs
    BARS    shares side by side: a group of bars per label, one bar per curve (`y`; it has no `x`)
    """

    CDF = auto()
    STEPS = auto()
    BARS = auto()


@dataclass(frozen=True, eq=False)
class ChartCurve:
    """One line of a chart, one set of samples, or one bar of each group."""

    label: str
    y: Floats
    x: Floats = field(default_factory=lambda: np.empty(0))


@dataclass(frozen=True, eq=False)
class Chart:
    """A figure."""

    shape: ChartShape
    title: str
    x_label: str = ""
    y_label: str = ""
    unit: ValueUnit = ValueUnit.SHARE
    curves: tuple[ChartCurve, ...] = ()
    labels: tuple[str, ...] = ()


class Layout(Enum):
    """TABLE: one row below the other. CARD: one row, its columns one below the other."""

    TABLE = auto()
    CARD = auto()


@dataclass(frozen=True, eq=False)
class StudyPart:
    """One part of a study.

    text      what it says, how it was computed and what it covers
    caveat    what must be known wherever its figures are shown, in a sentence or two
    bar       key of the column of shares that a terminal draws as bars; none if it is empty
    missing   why there is nothing, if the input does not cover it; then there are no rows
    """

    key: str
    title: str
    text: str
    columns: tuple[TableColumn, ...] = ()
    rows: tuple[Row, ...] = ()
    charts: tuple[Chart, ...] = ()
    layout: Layout = Layout.TABLE
    caveat: str = ""
    bar: str = ""
    missing: str = ""

    def records(self) -> list[dict[str, Value]]:
        """Return the rows as dicts by the keys of their columns."""
        keys = [column.key for column in self.columns]
        return [dict(zip(keys, row, strict=True)) for row in self.rows]


def bars(title: str, head: Sequence[TableColumn], rows: Sequence[Row], *keys: str) -> Chart:
    """Return a chart of some columns of shares. The first column has the labels; the row about all jobs is left out."""
    places = [place for place, column in enumerate(head) if column.key in keys]
    kept = [row for row in rows if row[0] != ALL]
    curves = []
    for place in places:
        shares = [value if isinstance(value := row[place], float) else np.nan for row in kept]
        curves.append(ChartCurve(head[place].heading, np.array(shares, dtype=np.float64)))
    return Chart(ChartShape.BARS, title, curves=tuple(curves), labels=tuple(str(row[0]) for row in kept))


class JobGroup(NamedTuple):
    """Some jobs under a name, by index."""

    label: str
    members: Ints


BUCKETS = (("1", 1, 1), ("2-4", 2, 4), ("5-8", 5, 8), (">8", 9, None))
"""Sizes of gangs as the Philly study groups them: label, least, most."""


def by_size(gpus: Ints) -> list[JobGroup]:
    """Return all jobs in the buckets of the Philly study, empty ones included."""
    return [
        JobGroup(label, np.flatnonzero((gpus >= least) & (gpus <= most if most else True))) for label, least, most in BUCKETS
    ]


def named(bucket: JobGroup) -> str:
    """Return the label of a bucket in a legend."""
    return f"{bucket.label} GPU" + ("" if bucket.label == "1" else "s")


def by_code(codes: Ints, names: Sequence[str]) -> list[JobGroup]:
    """Return members by name, the largest group first, equal ones by name; no empty ones."""
    order = np.argsort(codes, kind="stable")
    bounds = np.searchsorted(codes[order], np.arange(len(names) + 1))
    found = [JobGroup(name, order[bounds[place] : bounds[place + 1]]) for place, name in enumerate(names)]
    return sorted((each for each in found if len(each.members)), key=lambda each: (-len(each.members), each.label))


def by_value(values: Ints) -> Iterator[tuple[int, Ints]]:
    """Yield members by value, ascending."""
    order = np.argsort(values, kind="stable")
    distinct, starts = np.unique(values[order], return_index=True)
    if len(distinct):
        yield from zip(distinct.tolist(), np.split(order, starts[1:]), strict=True)


def totals(rows: Ints, values: Floats, count: int) -> Floats:
    """Return the sums of values by row, for `count` rows."""
    return np.bincount(rows, weights=values, minlength=count).astype(np.float64)


def known(values: Floats) -> Floats:
    """Return the values that are not NaN, ascending."""
    return np.sort(values[~np.isnan(values)])


def lower(ascending: Floats, share: float) -> float | None:
    """Return the quantile as the published tables of run times take it: sorted[int(p·(n − 1))]."""
    return float(ascending[int(share * (len(ascending) - 1))]) if len(ascending) else None


def nearest(ascending: Floats, share: float) -> float | None:
    """Return the quantile by nearest rank: the least value that is no less than this share of all of them."""
    return float(ascending[max(0, ceil(share * len(ascending) - SLACK) - 1)]) if len(ascending) else None


def mean(values: Floats) -> float | None:
    """Return the mean; None of no values."""
    return float(values.mean()) if len(values) else None


def ratio(part: float, whole: float) -> float | None:
    """Return part ÷ whole; None if the whole is 0."""
    return float(part / whole) if whole else None


DELAYS = columns(
    ("median", "median", SECONDS), ("mean", "mean", SECONDS), ("p90", "p90", SECONDS), ("p99", "p99", SECONDS),
    ("max", "longest", SECONDS),
)  # fmt: skip
"""Columns that describe many waiting times; see `delay_figures`."""


def delay_figures(ascending: Floats) -> Row:
    """Return the figures of `DELAYS`."""
    longest = float(ascending[-1]) if len(ascending) else None
    p50, p90, p99 = (nearest(ascending, share) for share in (0.5, 0.9, 0.99))
    return p50, mean(ascending), p90, p99, longest
