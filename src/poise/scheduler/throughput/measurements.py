"""A throughput table as a value: what was measured, and how questions between the measurements are answered.

How `Throughputs` answers what was not measured (docs/reference/throughput-tables.md has examples):

model        case, `-`, `_` and spaces do not matter: `ResNet-50` is `resnet50`
batch size   no guess: only the one asked for. A job that names none gets the row that names none, else the smallest
             batch size measured
GPUs         the count asked for; else the nearest smaller count, scaled linearly; else the nearest larger one, likewise
locality     the level asked for; else the nearest narrower level given; else the nearest wider one. One GPU has none
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import NamedTuple, Self

from poise.scheduler.model.speed import Locality

Row = tuple[float, float, float]
"""Steps per second of a whole gang, one column per Locality. 0: cannot run."""

CANNOT_RUN: Row = (0.0, 0.0, 0.0)
_IGNORED = re.compile(r"[-_\s]+")


class JobClass(NamedTuple):
    """Jobs that are equally fast. `batch_size` None: not stated."""

    model: str
    batch_size: int | None = None


class Alone(NamedTuple):
    """A measurement: steps per second of a gang that has its GPUs to itself."""

    job: JobClass
    gpu_type: str
    gpus: int
    locality: Locality
    rate: float


class Together(NamedTuple):
    """A measurement: steps per second of two gangs, packed, while they share the same GPUs."""

    first: JobClass
    second: JobClass
    gpu_type: str
    gpus: int
    rates: tuple[float, float]


SpeedsAlone = Mapping[JobClass, Mapping[str, Mapping[int, Row]]]
"""By class, GPU type and number of GPUs. Classes are those that `same_class` gives, types in lower case."""

SpeedsTogether = Mapping[tuple[JobClass, JobClass, str, int], tuple[float, float]]
"""By two classes, which are `ordered`, GPU type and GPUs of either gang: steps per second of the first and of the second."""


def same_model(name: str) -> str:
    """The normal form of a model's name, in which all its spellings are equal."""
    return _IGNORED.sub("", name.lower())


def same_class(job: JobClass) -> JobClass:
    """A class with its model in normal form."""
    return JobClass(same_model(job.model), job.batch_size)


def ordered(one: JobClass, other: JobClass) -> tuple[JobClass, JobClass, bool]:
    """The two in one fixed order, and whether they were swapped for it."""
    is_swapped = (other.model, other.batch_size or 0) < (one.model, one.batch_size or 0)
    return (other, one, True) if is_swapped else (one, other, False)


@dataclass(frozen=True)
class Throughputs:
    """Measured steps per second. `reference` is the GPU type that durations are stated on."""

    name: str
    reference: str
    gpu_types: tuple[str, ...]
    _spellings: Mapping[str, str] = field(repr=False, hash=False)
    _rows: SpeedsAlone = field(repr=False, hash=False)
    _pairs: SpeedsTogether = field(repr=False, hash=False)
    _skews: Mapping[str, float] = field(repr=False, hash=False)
    _sizes: Mapping[str, float] = field(repr=False, hash=False, default_factory=dict)

    @classmethod
    def of(
        cls,
        name: str,
        reference: str,
        alone: Iterable[Alone],
        together: Iterable[Together] = (),
        skews: Mapping[str, float] | None = None,
    ) -> Self:
        """A table of these measurements. If two answer the same question, the first counts."""
        measurements = tuple(alone)
        spellings: dict[str, str] = {}
        levels: dict[JobClass, dict[str, dict[int, dict[Locality, float]]]] = {}
        for job, gpu_type, gpus, locality, rate in measurements:
            spellings.setdefault(same_model(job.model), job.model)
            counts = levels.setdefault(same_class(job), {}).setdefault(gpu_type.lower(), {})
            counts.setdefault(gpus, {}).setdefault(locality, rate)
        rows = {
            job: {on: {gpus: _filled(given, gpus) for gpus, given in counts.items()} for on, counts in types.items()}
            for job, types in levels.items()
        }
        pairs: dict[tuple[JobClass, JobClass, str, int], tuple[float, float]] = {}
        for first, second, gpu_type, gpus, rates in together:
            left, right, is_swapped = ordered(same_class(first), same_class(second))
            pairs.setdefault((left, right, gpu_type.lower(), gpus), rates[::-1] if is_swapped else rates)
        return cls(
            name=name,
            reference=reference.lower(),
            gpu_types=tuple(dict.fromkeys(each.gpu_type.lower() for each in measurements)),
            _spellings=spellings,
            _rows=rows,
            _pairs=pairs,
            _skews={same_model(model): skew for model, skew in (skews or {}).items()},
        )

    def models(self) -> tuple[str, ...]:
        """Names of the models, as first spelled, in the order of the table."""
        return tuple(self._spellings.values())

    def classes(self) -> tuple[JobClass, ...]:
        """Every model and batch size measured, in the order of the table."""
        return tuple(JobClass(self._spellings[job.model], job.batch_size) for job in self._rows)

    def alone(self) -> SpeedsAlone:
        """All speeds alone, in the order of `classes`."""
        return self._rows

    def together(self) -> SpeedsTogether:
        """All speeds of pairs, in the order of the table."""
        return self._pairs

    def with_speeds(self, name: str, alone: SpeedsAlone, together: SpeedsTogether) -> Self:
        """The same table with another name and other speeds of the same classes."""
        return replace(self, name=name, _rows=alone, _pairs=together)

    def knows(self, model: str, batch_size: int | None) -> bool:
        """Whether some measurement answers for this model at this batch size."""
        return self._find(model, batch_size) is not None

    def measures(self, model: str, batch_size: int | None, gpu_type: str) -> bool:
        """Whether it was measured on this type, at any count; a measurement of 0 counts."""
        job = self._find(model, batch_size)
        return job is not None and gpu_type.lower() in self._rows[job]

    def rate(self, model: str, batch_size: int | None, gpu_type: str, gpus: int, locality: Locality) -> float:
        """Steps per second of the whole gang; 0 where it cannot run or was never measured on that type."""
        return self.row(model, batch_size, gpu_type, gpus)[locality]

    def row(self, model: str, batch_size: int | None, gpu_type: str, gpus: int) -> Row:
        """`rate` at every locality."""
        job = self._find(model, batch_size)
        counts = {} if job is None else self._rows[job].get(gpu_type.lower(), {})
        if gpus in counts or not counts:
            return counts.get(gpus, CANNOT_RUN)
        measured = max((count for count in counts if count < gpus), default=min(counts))
        packed, rack, cluster = (rate * gpus / measured for rate in counts[measured])
        return (packed, packed, packed) if gpus == 1 else (packed, rack, cluster)

    def pair(self, first: JobClass, second: JobClass, gpu_type: str, gpus: int) -> tuple[float, float] | None:
        """Steps per second of both while they hold the same GPUs, packed; 0 if they do not fit, None if not measured.

        Nothing is scaled: what two jobs do to each other on other counts is not known.
        """
        one, other = self._find(*first), self._find(*second)
        if one is None or other is None:
            return None
        left, right, is_swapped = ordered(one, other)
        rates = self._pairs.get((left, right, gpu_type.lower(), gpus))
        return rates[::-1] if rates is not None and is_swapped else rates

    def speedup(self, gpu_type: str) -> float | None:
        """Typical speed of a type relative to the reference type; None if nothing links the two. For unmeasured models.

        The geometric mean over the models measured on both (1 GPU, packed); every model counts once, whatever the
        number of its batch sizes.
        """
        if gpu_type.lower() == self.reference:
            return 1.0
        ratios: dict[str, list[float]] = {}
        for job, types in self._rows.items():
            here, there = _of_one_gpu(types, gpu_type.lower()), _of_one_gpu(types, self.reference)
            if here > 0 and there > 0:
                ratios.setdefault(job.model, []).append(math.log(here / there))
        return math.exp(fmean(map(fmean, ratios.values()))) if ratios else None

    def skew(self, model: str) -> float | None:
        """Size of the model's largest tensor ÷ size of the model (Tiresias §3.3)."""
        return self._skews.get(same_model(model))

    def size(self, model: str) -> float | None:
        """Bytes of the model's parameters; None if not known."""
        return self._sizes.get(same_model(model))

    def with_sizes(self, sizes: Mapping[str, float]) -> Self:
        """The same table with the sizes of models, in bytes."""
        return replace(self, _sizes={same_model(model): size for model, size in sizes.items()})

    def flat(self) -> Self:
        """The same table without effects of locality: every level is as fast as packed."""
        rows = {
            job: {on: {gpus: (row[0], row[0], row[0]) for gpus, row in counts.items()} for on, counts in types.items()}
            for job, types in self._rows.items()
        }
        return replace(self, _rows=rows)

    def _find(self, model: str, batch_size: int | None) -> JobClass | None:
        """The measured class that answers for this one; None if there is none."""
        job = JobClass(same_model(model), batch_size)
        if job in self._rows:
            return job
        if batch_size is not None or job.model not in self._spellings:
            return None
        return min(each for each in self._rows if each.model == job.model)


def _filled(given: Mapping[Locality, float], gpus: int) -> Row:
    """All levels from those given: a level that was not measured is as fast as the nearest narrower one, else wider."""

    def at(level: Locality) -> float:
        narrower = [each for each in given if each <= level]
        return given[max(narrower) if narrower else min(given)]

    wider = Locality.PACKED if gpus == 1 else Locality.CLUSTER
    return at(Locality.PACKED), at(min(Locality.RACK, wider)), at(wider)


def _of_one_gpu(types: Mapping[str, Mapping[int, Row]], gpu_type: str) -> float:
    return types.get(gpu_type, {}).get(1, CANNOT_RUN)[Locality.PACKED]
