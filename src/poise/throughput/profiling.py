"""What is measured of a newcomer: which GPU types it runs alone on, which reference classes it runs beside.

Draws come from one seed and the name of a class: which types a class is profiled on does not depend on what else a table
holds nor on its order, and a longer profile contains the shorter one.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from poise.model.errors import ThroughputError
from poise.throughput.lines import shown
from poise.throughput.measured import JobClass

Pair = tuple[JobClass, JobClass, str, int]
"""A class, the one beside it, the GPU type that they share, and the GPUs of either gang."""

PROFILED = "profiled"
_ALL = "all"


@dataclass(frozen=True, slots=True)
class Profile:
    """How much is measured of a newcomer, and how the rest is completed.

    types         GPU types that it runs alone on; None: all, so that its speeds alone are known, as Gavel takes them to be
    pairs         fraction of the (profiled type, reference class) pairs that it is measured in, 0 to 1
    references    classes known in full, by draw; all others are newcomers. None: every class in turn is a newcomer to all
                  the others
    rank, regulariser   of the matrix completion; rank 0 takes every class for an average one
    """

    types: int | None = 1
    pairs: float = 0.2
    references: int | None = None
    rank: int = 10
    regulariser: float = 1e-2
    seed: int = 0


class _Range(NamedTuple):
    read: type[int] | type[float]
    least: float
    most: float


_KEYS = {
    "types": _Range(int, 1, 1e6),
    "pairs": _Range(float, 0, 1),
    "references": _Range(int, 1, 1e6),
    "rank": _Range(int, 0, 100),
    "regulariser": _Range(float, 1e-9, 1e9),
    "seed": _Range(int, 0, 1e15),
}


def parse_profile(spec: str) -> Profile:
    """The profile that `profiled:types=1,pairs=0.2,references=16,rank=10,regulariser=0.01,seed=0` stands for.

    Every parameter may be left out. `types=all`: speeds alone are known; `references=all`: each class in turn is new.
    """
    head, colon, tail = spec.partition(":")
    parts = [part.partition("=") for part in tail.split(",")] if colon else []
    keys = [key for key, _, _ in parts]
    if head != PROFILED or len({*keys}) < len(keys) or not {*keys} <= _KEYS.keys():
        known = ", ".join(field.name for field in fields(Profile))
        raise ThroughputError(f"estimate {shown(spec)}: expected {PROFILED}:KEY=VALUE,... with each key once, of {known}")
    chosen: dict[str, Any] = {key: _value(spec, key, text) for key, _, text in parts}
    return replace(Profile(), **chosen)


def _value(spec: str, key: str, text: str) -> int | float | None:
    read, least, most = _KEYS[key]
    if text == _ALL and key in ("types", "references"):
        return None
    try:
        number = math.nan if "_" in text else read(text)
    except ValueError:
        number = math.nan
    if not least <= number <= most:
        kind = "a whole number" if read is int else "a number"
        raise ThroughputError(
            f"estimate {shown(spec)}: {key}: expected {kind} from {least:g} to {most:g}, got {shown(text)}"
        )
    return number


def references_of(jobs: Sequence[JobClass], profile: Profile, name: str) -> dict[JobClass, tuple[JobClass, ...]]:
    """Every newcomer of a table of this name with its references, both in the order of the table."""
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
    """GPU types that a newcomer is measured on, drawn from those that it runs on; speeds by type."""
    types = sorted(gpu_type for gpu_type, rate in runs.items() if rate > 0)
    order = chance(profile, job, "types").permutation(len(types))
    return [types[index] for index in order[: profile.types]]


def profiled_pairs(job: JobClass, pairs: Iterable[Pair], profile: Profile) -> list[Pair]:
    """The pairs that a newcomer is measured in, drawn from those of one gang size; a part of a pair is a whole one."""
    known = sorted(pairs, key=lambda pair: (pair[1].model, pair[1].batch_size or 0, pair[2]))
    order = chance(profile, job, "pairs").permutation(len(known))
    return [known[index] for index in order[: math.ceil(profile.pairs * len(known) - 1e-9)]]


def chance(profile: Profile, job: JobClass, purpose: str) -> np.random.Generator:
    """The draws of one class for one purpose."""
    return np.random.default_rng([profile.seed, crc32(f"{purpose}/{job.model}/{job.batch_size}".encode())])
