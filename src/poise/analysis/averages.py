"""Many runs in a few numbers: policies × loads × seeds, averaged over the seeds."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import NamedTuple

from poise.analysis.intervals import Contrast, Mean, contrast, mean_of
from poise.analysis.summary import Summary

_LABELS = ("policy", "trace", "cluster", "seed", "partial")
_EFFORT = ("cpu_seconds", "policy_seconds")
KEYS = tuple(each.name for each in fields(Summary) if each.name not in (*_LABELS, *_EFFORT))
"""The numbers of a summary that the same inputs decide: those with intervals."""


class Cell(NamedTuple):
    """A run's place in a grid."""

    policy: str
    load: float
    seed: int

    def __str__(self) -> str:
        return f"{self.policy} at load {self.load:g}, seed {self.seed}"


@dataclass(frozen=True, slots=True)
class Grid:
    """Every policy at every load with every seed. All policies see the same traces."""

    policies: tuple[str, ...]
    loads: tuple[float, ...]
    seeds: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.policies) * len(self.loads) * len(self.seeds)

    def cells(self) -> Iterator[Cell]:
        """Seed by seed, so that what is done early says something of everything; heavy loads, which take long, first."""
        for seed, load, policy in product(self.seeds, sorted(self.loads, reverse=True), self.policies):
            yield Cell(policy, load, seed)


@dataclass(frozen=True, slots=True)
class Average:
    """The runs of one policy at one load.

    labels     a summary, for what is no number; its seed is the first of the grid
    runs       by seed; at least one
    partial    whether some seeds are yet to be run
    means      by key of the summary
    against    by key: against the runs of the `rival`, the first policy, with the same seeds; nothing for the rival itself
    """

    labels: Summary
    load: float
    runs: Mapping[int, Summary]
    partial: bool
    means: Mapping[str, Mean]
    rival: str
    against: Mapping[str, Contrast]

    @property
    def policy(self) -> str:
        """Its name, as it was asked for."""
        return self.labels.policy

    @property
    def is_constant(self) -> bool:
        """Whether several runs came out the same in every number: their seeds decide nothing."""
        return len(self.runs) > 1 and all(self.means[key].interval is None for key in KEYS)

    def than(self, other: "Average", key: str) -> Contrast:
        """A number against that of other runs at the same load."""
        return _paired(self.runs, other.runs, key)

    def document(self) -> dict[str, object]:
        """As a JSON document: the keys of a summary hold means."""
        return {
            **self.labels.document(),
            **{key: _whole(each, getattr(self.labels, key)) for key, each in self.means.items()},
            "partial": self.partial,
            "load": self.load,
            "seeds": list(self.runs),
            "runs": len(self.runs),
            "intervals": {key: self.means[key].interval for key in KEYS},
            "counts": {key: self.means[key].runs for key in KEYS},
            "against": {"policy": self.rival, **{key: _plain(each) for key, each in self.against.items()}}
            if self.against
            else None,
        }


def averaged(runs: Mapping[Cell, Summary], grid: Grid) -> list[Average]:
    """Load by load, the policies in the order of the grid; without those of which no run is there yet."""
    found: list[Average] = []
    for load in grid.loads:
        rows = [_row(runs, grid, policy, load) for policy in grid.policies]
        found += [_average(row, load, grid, rows[0]) for row in rows if row]
    return found


def _row(runs: Mapping[Cell, Summary], grid: Grid, policy: str, load: float) -> dict[int, Summary]:
    cells = {seed: Cell(policy, load, seed) for seed in grid.seeds}
    return {seed: runs[cell] for seed, cell in cells.items() if cell in runs}


def _average(row: dict[int, Summary], load: float, grid: Grid, first: dict[int, Summary]) -> Average:
    means = {key: mean_of([getattr(run, key) for run in row.values()]) for key in (*KEYS, *_EFFORT)}
    has_rival = row is not first and row.keys() & first.keys()
    against = {key: _paired(row, first, key) for key in KEYS} if has_rival else {}
    labels = replace(next(iter(row.values())), seed=grid.seeds[0])
    return Average(labels, load, row, len(row) < len(grid.seeds), means, grid.policies[0], against)


def _paired(ours: Mapping[int, Summary], theirs: Mapping[int, Summary], key: str) -> Contrast:
    shared = [seed for seed in ours if seed in theirs]
    return contrast([getattr(ours[seed], key) for seed in shared], [getattr(theirs[seed], key) for seed in shared])


def _whole(mean: Mean, sample: object) -> float | None:
    """A mean; of counts that all agree, the count."""
    return int(mean.value) if mean.value is not None and mean.interval is None and isinstance(sample, int) else mean.value


def _plain(each: Contrast) -> dict[str, object]:
    return {
        "difference": each.difference.value,
        "interval": each.difference.interval,
        "ratio": each.ratio,
        "ratio_interval": each.ratio_interval,
        "runs": each.difference.runs,
    }
