"""What a study is made of: parts that are data, for any renderer. Seconds, GPU-hours, shares from 0 to 1."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from math import ceil
from typing import NamedTuple

import numpy as np

from poise.scheduler.model.arithmetic import Floats, Ints

Value = str | int | float | None
"""A cell: None where there is nothing to say."""
Row = tuple[Value, ...]

ALL = "all"
"""The row that is about everything."""
HOUR = 3600.0
SLACK = 1e-9
"""0.1·30 is a little more than 3 in floats, and its place is 3 all the same."""


class ValueUnit(StrEnum):
    """What a column holds; a SHARE is from 0 to 1."""

    TEXT = "text"
    COUNT = "count"
    PLAIN = "plain"
    SECONDS = "seconds"
    SHARE = "share"


class TableColumn(NamedTuple):
    """A column: its name for programs, its name for people, and what it holds."""

    key: str
    heading: str
    unit: ValueUnit


def columns(*described: tuple[str, str, ValueUnit]) -> tuple[TableColumn, ...]:
    """Columns from their descriptions."""
    return tuple(TableColumn(*each) for each in described)


class ChartShape(Enum):
    """How a chart is drawn.

    CDF     the share of samples (`y` of a curve; it has no `x`) at or below each duration
    STEPS   levels that hold from a moment on, SHAREs or COUNTs
    BARS    shares side by side: a group of bars for each of the labels, one bar a curve (`y`; it has no `x`)
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
    """TABLE: a row below the other. CARD: one row, its columns one below the other."""

    TABLE = auto()
    CARD = auto()


@dataclass(frozen=True, eq=False)
class StudyPart:
    """One part of a study.

    text      what it says, how it was reckoned and what it covers
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
        """The rows by the keys of their columns."""
        keys = [column.key for column in self.columns]
        return [dict(zip(keys, row, strict=True)) for row in self.rows]


def bars(title: str, head: Sequence[TableColumn], rows: Sequence[Row], *keys: str) -> Chart:
    """Some columns of shares of a table as bars; its first column has the labels, and the row of everything is left out."""
    places = [place for place, column in enumerate(head) if column.key in keys]
    kept = [row for row in rows if row[0] != ALL]
    curves = tuple(ChartCurve(head[place].heading, _shares([row[place] for row in kept])) for place in places)
    return Chart(ChartShape.BARS, title, curves=curves, labels=tuple(str(row[0]) for row in kept))


def _shares(values: Iterable[Value]) -> Floats:
    return np.array([value if isinstance(value, float) else np.nan for value in values], dtype=np.float64)


class BarGroup(NamedTuple):
    """Some jobs under a name, by their index."""

    label: str
    members: Ints


BUCKETS = (("1", 1, 1), ("2-4", 2, 4), ("5-8", 5, 8), (">8", 9, None))
"""Sizes of gangs as the Philly study groups them."""


def by_size(gpus: Ints) -> list[BarGroup]:
    """All jobs in the buckets of the Philly study, also those that are empty."""
    return [
        BarGroup(label, np.flatnonzero((gpus >= least) & (gpus <= most if most else True))) for label, least, most in BUCKETS
    ]


def named(bucket: BarGroup) -> str:
    """The label of a bucket in a legend."""
    return f"{bucket.label} GPU" + ("" if bucket.label == "1" else "s")


def by_code(codes: Ints, names: Sequence[str]) -> list[BarGroup]:
    """Members by name, the largest group first, equal ones by name; none that is empty."""
    order = np.argsort(codes, kind="stable")
    bounds = np.searchsorted(codes[order], np.arange(len(names) + 1))
    found = [BarGroup(name, order[bounds[place] : bounds[place + 1]]) for place, name in enumerate(names)]
    return sorted((each for each in found if len(each.members)), key=lambda each: (-len(each.members), each.label))


def by_value(values: Ints) -> Iterator[tuple[int, Ints]]:
    """Members by value, ascending."""
    order = np.argsort(values, kind="stable")
    distinct, starts = np.unique(values[order], return_index=True)
    if len(distinct):
        yield from zip(distinct.tolist(), np.split(order, starts[1:]), strict=True)


def totals(rows: Ints, values: Floats, count: int) -> Floats:
    """Values added up by row, of so many rows."""
    return np.bincount(rows, weights=values, minlength=count).astype(np.float64)


def known(values: Floats) -> Floats:
    """Those that are not NaN, ascending."""
    return np.sort(values[~np.isnan(values)])


def lower(ascending: Floats, share: float) -> float | None:
    """The quantile that the published tables of run times have: sorted[int(p·(n − 1))]."""
    return float(ascending[int(share * (len(ascending) - 1))]) if len(ascending) else None


def nearest(ascending: Floats, share: float) -> float | None:
    """The quantile by nearest rank: the least value that is no less than this share of all of them."""
    return float(ascending[max(0, ceil(share * len(ascending) - SLACK) - 1)]) if len(ascending) else None


def mean(values: Floats) -> float | None:
    """The mean, if there is one."""
    return float(values.mean()) if len(values) else None


def ratio(part: float, whole: float) -> float | None:
    """A share, unless it is one of nothing."""
    return float(part / whole) if whole else None


DELAYS = columns(
    ("median", "median", ValueUnit.SECONDS),
    ("mean", "mean", ValueUnit.SECONDS),
    ("p90", "p90", ValueUnit.SECONDS),
    ("p99", "p99", ValueUnit.SECONDS),
    ("max", "longest", ValueUnit.SECONDS),
)
"""What is said of many durations of waiting."""


def delay_figures(ascending: Floats) -> Row:
    """The figures of `DELAYS`."""
    longest = float(ascending[-1]) if len(ascending) else None
    return (
        nearest(ascending, 0.5),
        mean(ascending),
        nearest(ascending, 0.9),
        nearest(ascending, 0.99),
        longest,
    )
