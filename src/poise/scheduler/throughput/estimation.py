"""Estimates of speeds that were never measured, from a short profile and from what is known of other job classes.

Alone. Rows are job classes, columns (GPU type, GPUs, locality), entries log steps per second. A newcomer is measured on a
few types; the rest of its row is completed at low rank, with an offset per row and per column, so that only ratios of speeds
matter: what a step is differs from model to model. How a class scales on one type tells about the others. That a class does
not run somewhere is taken as known, because a failed start shows it.

Together (Gavel's estimator; docs/algorithms/gavel.md). For every gang size rows are reference classes, columns (GPU type,
reference),

    A[r, (t, r')] = steps per second of r beside r' ÷ steps per second of r alone, in [0, 1]

A newcomer is measured on a fraction of the columns of its profiled types, its row is completed at low rank, and the
reference at the least cosine distance is its stand-in: what that one keeps beside r', times the newcomer's own speed alone,
is the estimate. For two newcomers it is what the stand-in of one keeps beside that of the other. Measurements always take
precedence over estimates.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, fields
from functools import cache
from itertools import combinations_with_replacement, compress, product
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from poise.scheduler.model.arithmetic import exp
from poise.scheduler.model.errors import ThroughputError
from poise.scheduler.model.speed import Locality
from poise.scheduler.throughput.matrix_completion import Offsets, completed, nearest
from poise.scheduler.throughput.measurements import CANNOT_RUN, JobClass, Row, Throughputs, ordered, same_class
from poise.scheduler.throughput.table import LEAST_RATE, MOST_RATE, shown

# The profile: which GPU types a newcomer is measured alone on, and which reference classes it is measured beside.
#
# Draws depend only on a seed and the name of a class. So the types that a class is profiled on do not depend on what else a
# table holds or on its order, and a longer profile contains the shorter one.

Pair = tuple[JobClass, JobClass, str, int]
"""A class, the one beside it, the GPU type that they share, and the GPUs of either gang."""

PROFILED = "profiled"
_ALL = "all"


@dataclass(frozen=True, slots=True)
class Profile:
    """How much is measured of a newcomer, and how the rest is completed.

    types         number of GPU types that it is measured alone on; None: all, as Gavel assumes
    pairs         fraction of the (profiled type, reference class) pairs that it is measured in, 0 to 1
    references    number of classes known in full, drawn at random; all others are newcomers. None: each class in turn is a
                  newcomer to all the others
    rank, regulariser   of the matrix completion; rank 0 treats every class as an average one
    """

    types: int | None = 1
    pairs: float = 0.2
    references: int | None = None
    rank: int = 10
    regulariser: float = 1e-2
    seed: int = 0


_KEYS: dict[str, tuple[type[int] | type[float], float, float]] = {
    "types": (int, 1, 1e6),
    "pairs": (float, 0, 1),
    "references": (int, 1, 1e6),
    "rank": (int, 0, 100),
    "regulariser": (float, 1e-9, 1e9),
    "seed": (int, 0, 1e15),
}
"""By parameter: how it is read, its least and its greatest value."""


def parse_profile(spec: str) -> Profile:
    """Read a profile such as `profiled:types=1,pairs=0.2,references=16,rank=10,regulariser=0.01,seed=0`.

    Every parameter may be left out. `types=all`: speeds alone are known; `references=all`: each class in turn is new.
    """
    head, colon, tail = spec.partition(":")
    parts = [part.partition("=") for part in tail.split(",")] if colon else []
    keys = [key for key, _, _ in parts]
    if head != PROFILED or len({*keys}) < len(keys) or not {*keys} <= _KEYS.keys():
        known = ", ".join(field.name for field in fields(Profile))
        raise ThroughputError(f"estimate {shown(spec)}: expected {PROFILED}:KEY=VALUE,... with each key once, of {known}")
    chosen: dict[str, Any] = {}
    for key, _, text in parts:
        read, least, most = _KEYS[key]
        try:
            chosen[key] = math.nan if "_" in text else read(text)
        except ValueError:
            chosen[key] = math.nan
        if text == _ALL and key in ("types", "references"):
            chosen[key] = None
        elif not least <= chosen[key] <= most:
            expected = f"{'a whole number' if read is int else 'a number'} from {least:g} to {most:g}"
            raise ThroughputError(f"estimate {shown(spec)}: {key}: expected {expected}, got {shown(text)}")
    return Profile(**chosen)


def references_of(jobs: Sequence[JobClass], profile: Profile, name: str) -> dict[JobClass, tuple[JobClass, ...]]:
    """The newcomers of a table, each with its references, both in the order of the table. `name` is for messages."""
    if profile.references is None:
        return {job: tuple(other for other in jobs if other != job) for job in jobs}
    if profile.references >= len(jobs):
        raise ThroughputError(
            f"estimate: expected fewer references than the {len(jobs)} job classes of table {name!r}, "
            f"got {profile.references}; `references={_ALL}` estimates each class from all the others"
        )
    names = sorted(jobs, key=lambda job: (job.model, job.batch_size or 0))
    order = np.random.default_rng(profile.seed).permutation(len(names))
    drawn = {names[index] for index in order[: profile.references]}
    references = tuple(job for job in jobs if job in drawn)
    return {job: references for job in jobs if job not in drawn}


def profiled_types(job: JobClass, runs: Mapping[str, float], profile: Profile) -> list[str]:
    """GPU types that a newcomer is measured on, drawn from those that it runs on (`runs`: speed by type)."""
    types = sorted(gpu_type for gpu_type, rate in runs.items() if rate > 0)
    order = _generator(profile, job, "types").permutation(len(types))
    return [types[index] for index in order[: profile.types]]


def profiled_pairs(job: JobClass, pairs: Iterable[Pair], profile: Profile) -> list[Pair]:
    """The pairs that a newcomer is measured in, drawn from those of one gang size; their number is rounded up."""
    known = sorted(pairs, key=lambda pair: (pair[1].model, pair[1].batch_size or 0, pair[2]))
    order = _generator(profile, job, "pairs").permutation(len(known))
    return [known[index] for index in order[: math.ceil(profile.pairs * len(known) - 1e-9)]]


def _generator(profile: Profile, job: JobClass, purpose: str) -> np.random.Generator:
    """The random numbers of one class for one purpose."""
    return np.random.default_rng([profile.seed, crc32(f"{purpose}/{job.model}/{job.batch_size}".encode())])


# Estimates, and what they are worth

_Alone = Mapping[str, Mapping[int, Row]]
_Column = tuple[str, int, Locality]
_Beside = tuple[str, JobClass]
_Rates = tuple[float, float]


@dataclass(frozen=True, slots=True)
class EstimateError:
    """The errors of `count` estimates; all 0 if there are none."""

    count: int = 0
    median: float = 0.0
    mean: float = 0.0
    p90: float = 0.0

    @classmethod
    def of(cls, errors: Sequence[float]) -> "EstimateError":
        """Summarise errors, all of which are >= 0."""
        if not errors:
            return cls()
        median, p90 = np.quantile(errors, (0.5, 0.9))
        return cls(len(errors), float(median), math.fsum(errors) / len(errors), float(p90))


@dataclass(frozen=True, slots=True)
class Report:
    """How good the estimates of a table are, compared with the table itself.

    newcomers   the classes that were estimated
    alone       relative errors of speeds alone, |estimate ÷ truth − 1|
    together    absolute errors of the part of its speed alone that a job keeps beside another, in all pairs with a newcomer.
                Pairs of the profile count too, so that profiles of any length are judged by the same pairs; pairs that fit
                on the same GPUs neither in truth nor by estimate do not
    misfits     fraction of pairs with a newcomer that were estimated to fit on the same GPUs and do not, or vice versa
    left_out    number of speeds alone that nothing known is linked to; the believed table does without them
    """

    newcomers: tuple[JobClass, ...]
    alone: EstimateError
    together: EstimateError
    misfits: float
    left_out: int

    def __str__(self) -> str:
        alone = f"{self.alone.count:,} speeds alone, off by {self.alone.median:.1%} (median), {self.alone.p90:.1%} (p90)"
        beside = f"{self.together.count:,} beside another, off by {self.together.mean:.3f} of the speed alone (mean)"
        return f"{len(self.newcomers)} job classes estimated: {alone}; {beside}, {self.misfits:.1%} of pairs misjudged"


def estimated(table: Throughputs, profile: Profile) -> tuple[Throughputs, Report]:
    """The table as it would be believed if its newcomers had only been profiled, and how wrong that is.

    It answers no question that the table does not answer, so a simulator that holds the table knows the truth about all.
    """
    shares = _shares(table)
    references = references_of(tuple(table.alone()), profile, table.name)
    own: dict[JobClass, _Alone] = {}
    for job in references:
        truth = table.alone()[job]
        fastest = {gpu_type: max(map(max, counts.values())) for gpu_type, counts in truth.items()}
        own[job] = {gpu_type: truth[gpu_type] for gpu_type in profiled_types(job, fastest, profile)}
    met = {each for job in references for each in _met(shares, job, references[job], own[job], profile)}
    known = _Known(table, shares, references, own, met, profile)
    rows = {job: _as_asked(known.alone(job), truth) if job in own else truth for job, truth in table.alone().items()}
    measured = {pair: rates for pair, rates in table.together().items() if known.has(pair)}
    believed = table.with_speeds(f"{table.name}, estimated", rows, measured)
    pairs = known.together(believed, [pair for pair in table.together() if pair[0] in own or pair[1] in own])
    believed = table.with_speeds(believed.name, rows, {**pairs, **measured})
    return believed, _report(table, believed, own, pairs)


def filled(table: Throughputs, newcomers: Collection[JobClass], profile: Profile) -> Throughputs:
    """The table with the gaps of these classes filled in, from what it holds of them and of all the others.

    Fills in speeds alone on every GPU type, at the counts that a class was measured at on some type, and speeds beside any
    class at those counts. Only rank, regulariser and seed of the profile are used.
    """
    names = {same_class(job) for job in newcomers}
    others = tuple(job for job in table.alone() if job not in names)
    own = {job: types for job, types in table.alone().items() if job in names}
    shares = _shares(table)
    met = {each for each in shares if each[0] in own}
    known = _Known(table, shares, dict.fromkeys(own, others), own, met, profile)
    rows = dict(table.alone())
    for job, measured in own.items():
        counts = {gpus for on in measured.values() for gpus in on}
        speeds = {on: {gpus: row for gpus, row in each.items() if gpus in counts} for on, each in known.alone(job).items()}
        rows[job] = {on: each for on, each in speeds.items() if each}
    believed = table.with_speeds(f"{table.name}, filled", rows, table.together())
    gaps = [pair for pair in _possible_pairs(rows, own) if believed.pair(*pair) is None]
    return table.with_speeds(believed.name, rows, {**table.together(), **known.together(believed, gaps)})


def stand_ins(table: Throughputs, references: Collection[JobClass], gpus: int, profile: Profile) -> dict[JobClass, JobClass]:
    """The reference that each class of the table is most like on gangs of this size; a reference may stand for itself.

    All types are profiled. Classes that were measured beside no other class at this size are left out.
    """
    spelled = dict(zip(table.alone(), table.classes(), strict=True))
    names = {same_class(job) for job in references}
    keys = tuple(job for job in table.alone() if job in names)
    shares = _shares(table)
    found: dict[JobClass, JobClass] = {}
    for job in dict.fromkeys(each[0] for each in shares if each[3] == gpus):
        met = {*_met(shares, job, keys, table.gpu_types, profile)}
        likeness = _Known(table, shares, {job: keys}, {}, met, profile).likeness(job, gpus)
        if likeness is not None:
            found[spelled[job]] = spelled[likeness.stand_in]
    return found


class _Likeness(NamedTuple):
    """The stand-in of a class, and the part of its speed that the stand-in keeps, by type and reference beside it."""

    stand_in: JobClass
    shares: Mapping[_Beside, float]


@dataclass(frozen=True)
class _Known:
    """What estimates may use.

    table, shares   everything about references
    references      by newcomer
    own             by newcomer: its speeds alone that were measured
    met             (newcomer, reference, type, gang) that were measured together
    """

    table: Throughputs
    shares: Mapping[Pair, float]
    references: Mapping[JobClass, tuple[JobClass, ...]]
    own: Mapping[JobClass, _Alone]
    met: Set[Pair]
    profile: Profile

    def has(self, pair: Pair) -> bool:
        """Whether these two were measured together: both are references, or one is in the profile of the other."""
        one, other, gpu_type, gpus = pair
        is_old = one not in self.references and other not in self.references
        return is_old or pair in self.met or (other, one, gpu_type, gpus) in self.met

    def alone(self, job: JobClass) -> dict[str, dict[int, Row]]:
        """Speeds alone of a newcomer: measured where it was profiled, else estimated if anything known is linked to them."""
        jobs, columns = [self.own[job], *map(self.table.alone().__getitem__, self.references[job])], _columns(self.table)
        rates_of = [[each.get(on, {}).get(gpus, CANNOT_RUN)[level] for on, gpus, level in columns] for each in jobs]
        known = np.array([[math.log(rate) if rate > 0 else math.nan for rate in row] for row in rates_of])
        rows, reached = _linked(~np.isnan(known))
        rank, regulariser = self.profile.rank, self.profile.regulariser
        logs = completed(known[np.ix_(rows, reached)], rank=rank, regulariser=regulariser, offsets=Offsets.BOTH)[0]
        rates = exp(np.clip(logs, math.log(LEAST_RATE), math.log(MOST_RATE))).tolist()
        found: dict[tuple[str, int], dict[Locality, float]] = {}
        for (gpu_type, gpus, level), rate in zip(compress(columns, reached), rates, strict=True):
            found.setdefault((gpu_type, gpus), {})[level] = rate
        speeds: dict[str, dict[int, Row]] = {}
        for (gpu_type, gpus), levels in found.items():  # an estimate never makes a gang faster for being spread
            packed = levels.get(Locality.PACKED, max(levels.values()))
            rack = min(packed, levels.get(Locality.RACK, packed))
            speeds.setdefault(gpu_type, {})[gpus] = packed, rack, min(rack, levels.get(Locality.CLUSTER, rack))
        for gpu_type, counts in self.own[job].items():
            speeds.setdefault(gpu_type, {}).update(counts)
        return speeds

    def likeness(self, job: JobClass, gpus: int) -> _Likeness | None:
        """The likeness of a newcomer, from its measurements; a reference stands for itself. None if nothing is known."""
        is_new = job in self.references
        references = self.references[job] if is_new else next(iter(self.references.values()))
        columns = [(gpu_type, other) for gpu_type in self.table.gpu_types for other in references]
        matrix = np.array([[self._share(row, at, gpus) for at in columns] for row in references])
        matrix = matrix.reshape(len(references), len(columns))  # also if there are none
        rows, used = ~np.isnan(matrix).all(axis=1), ~np.isnan(matrix).all(axis=0)
        names, places = [*compress(references, rows)], [*compress(columns, used)]
        if not names or not (is_new or job in names):
            return None
        met = [(job, other, gpu_type, gpus) in self.met for gpu_type, other in places]
        measured = [self._share(job, at, gpus) if is_met else math.nan for at, is_met in zip(places, met, strict=True)]
        known = np.vstack([measured, matrix[np.ix_(rows, used)]])
        rank, regulariser = self.profile.rank, self.profile.regulariser
        full = np.clip(completed(known, rank=rank, regulariser=regulariser, offsets=Offsets.NONE), 0.0, 1.0)
        index = nearest(full[0], full[1:], _generator(self.profile, job, "stand-in")) if is_new else names.index(job)
        return _Likeness(names[index], dict(zip(places, full[1 + index].tolist(), strict=True)))

    def together(self, believed: Throughputs, wanted: Iterable[Pair]) -> dict[Pair, _Rates]:
        """Estimates of these pairs, in this order; pairs that nothing is known about are left out."""
        likeness = cache(self.likeness)

        def rate(job: JobClass, other: JobClass, gpu_type: str, gpus: int) -> float | None:
            mine, its = likeness(job, gpus), likeness(other, gpus)
            if mine is None or its is None:
                return None
            beside = other if (gpu_type, other) in mine.shares else its.stand_in
            share = mine.shares.get((gpu_type, beside))
            if share is None:
                return None
            estimate = share * believed.row(*job, gpu_type, gpus)[Locality.PACKED]
            return 0.0 if estimate < LEAST_RATE else min(estimate, MOST_RATE)

        found: dict[Pair, _Rates] = {}
        for one, other, gpu_type, gpus in wanted:
            first, second = rate(one, other, gpu_type, gpus), rate(other, one, gpu_type, gpus)
            if first is not None and second is not None:
                found[one, other, gpu_type, gpus] = first, second
        return found

    def _share(self, job: JobClass, beside: _Beside, gpus: int) -> float:
        gpu_type, other = beside
        return self.shares.get((job, other, gpu_type, gpus), math.nan)


def _met(
    shares: Iterable[Pair], job: JobClass, references: Collection[JobClass], types: Collection[str], profile: Profile
) -> Iterator[Pair]:
    """The pairs that a newcomer is measured in: the same fraction at every gang size, on profiled types, with references."""
    at_size: dict[int, list[Pair]] = {}
    for pair in shares:
        if pair[0] == job and pair[1] in references and pair[2] in types:
            at_size.setdefault(pair[3], []).append(pair)
    for pairs in at_size.values():
        yield from profiled_pairs(job, pairs, profile)


def _shares(table: Throughputs) -> dict[Pair, float]:
    """The part of its speed alone that the first of a pair keeps, for both orders of a pair, where it runs alone."""
    shares: dict[Pair, float] = {}
    for (one, other, gpu_type, gpus), rates in table.together().items():
        for pair, rate in zip(((one, other, gpu_type, gpus), (other, one, gpu_type, gpus)), rates, strict=True):
            alone = table.row(*pair[0], gpu_type, gpus)[Locality.PACKED]
            if alone > 0:
                shares.setdefault(pair, min(rate / alone, 1.0))
    return shares


def _columns(table: Throughputs) -> list[_Column]:
    """Every type and count of the table, at every locality that makes a difference anywhere in it."""
    places = {(on, gpus): row for types in table.alone().values() for on in types for gpus, row in types[on].items()}
    rows = [row for types in table.alone().values() for counts in types.values() for row in counts.values()]
    wider = [level for level in (Locality.RACK, Locality.CLUSTER) if any(row[level] != row[level - 1] for row in rows)]
    return [(on, gpus, level) for on, gpus in places for level in (Locality.PACKED, *(wider if gpus > 1 else ()))]


def _linked(known: NDArray[np.bool_]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Rows and columns that a chain of known entries leads to from the first row."""
    first = np.arange(len(known)) == 0
    columns = known[0]
    while True:
        rows = first | known[:, columns].any(axis=1)
        wider = known[rows].any(axis=0)
        if (wider == columns).all():
            return rows, columns
        columns = wider


def _as_asked(believed: _Alone, truth: _Alone) -> _Alone:
    """The believed speeds that the truth has too; that something does not run is known."""
    asked: dict[str, dict[int, Row]] = {}
    for gpu_type, counts in truth.items():
        for gpus, true in counts.items():
            row = believed.get(gpu_type, {}).get(gpus, true if max(true) == 0 else None)
            if row is not None:
                packed, rack, cluster = (rate if runs > 0 else 0.0 for rate, runs in zip(row, true, strict=True))
                asked.setdefault(gpu_type, {})[gpus] = packed, rack, cluster
    return asked


def _possible_pairs(rows: Mapping[JobClass, _Alone], newcomers: Collection[JobClass]) -> Iterator[Pair]:
    """Every newcomer beside every class, in the order of tables, wherever both run alone at the same count."""
    for one, other in combinations_with_replacement(rows, 2):
        if one in newcomers or other in newcomers:
            for gpu_type in rows[one]:
                for gpus, row in rows[one][gpu_type].items():
                    if row[0] > 0 and rows[other].get(gpu_type, {}).get(gpus, CANNOT_RUN)[0] > 0:
                        yield *ordered(one, other)[:2], gpu_type, gpus


def _report(table: Throughputs, believed: Throughputs, own: dict[JobClass, _Alone], pairs: dict[Pair, _Rates]) -> Report:
    """Compare these estimates of pairs, and those of speeds alone where newcomers were not profiled, with the truth."""
    alone: list[float] = []
    left_out = 0
    for job, (gpu_type, gpus, level) in product(own, _columns(table)):
        true = table.alone()[job].get(gpu_type, {}).get(gpus, CANNOT_RUN)[level]
        if true == 0 or gpu_type in own[job]:
            continue
        row = believed.alone()[job].get(gpu_type, {}).get(gpus)
        if row is None:
            left_out += 1
        else:
            alone.append(abs(row[level] / true - 1))
    together: list[float] = []
    misfits = 0
    for pair, rates in pairs.items():
        truth, gpu_type, gpus = table.together()[pair], *pair[2:]
        misfits += (min(truth) > 0) != (min(rates) > 0)
        for job, rate, true in zip(pair[:2], rates, truth, strict=True) if max(*rates, *truth) > 0 else ():
            mine, its = (each.row(*job, gpu_type, gpus)[Locality.PACKED] for each in (believed, table))
            if mine > 0 and its > 0:
                together.append(abs(rate / mine - min(true / its, 1.0)))
    spelled = dict(zip(table.alone(), table.classes(), strict=True))
    newcomers = tuple(spelled[job] for job in own)
    wrong = misfits / max(len(pairs), 1)
    return Report(newcomers, EstimateError.of(alone), EstimateError.of(together), wrong, left_out)
