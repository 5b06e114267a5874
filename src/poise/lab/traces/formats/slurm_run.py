"""Rows of Slurm's accounting, whichever way `sacct` prints them: attempts of jobs, and steps."""

from collections.abc import Iterable
from typing import NamedTuple

from poise.lab.traces.gpu_types import gpu_type_of, is_slice, is_table_type


class SlurmRun(NamedTuple):
    """One attempt of a job: an allocation, or a wait for one.

    key         what the rows of a job have in common: the number of the allocation
    job         id for people;  array: that of the array that it is a task of
    state       the first word of it;  times: seconds since 1970, None where they are not known
    seconds     run time as accounted, None if it is not
    gpus        of the allocation; if there is none, of the request
    gpu_types   those that it may run on; empty means any
    sliced      its GPUs are parts of GPUs
    """

    line: int
    cluster: str
    key: str
    job: str
    array: str | None
    tenant: str
    name: str | None
    state: str
    submitted: float
    eligible: float | None
    start: float | None
    end: float | None
    seconds: float | None
    gpus: int
    gpu_types: tuple[str, ...]
    sliced: bool
    nodes: int


class SlurmStep(NamedTuple):
    """A step of the job that has this key, and its GPUs."""

    line: int
    cluster: str
    key: str
    gpus: int


class SlurmGpus(NamedTuple):
    """A number of GPUs, and the types that make it up, as the site calls them; none if they are not told."""

    total: int
    types: tuple[str, ...]


def gpus_of(counts: Iterable[tuple[str, int]]) -> SlurmGpus:
    """Return what these counts by type come to, where the type `""` stands for all types.

    Slurm counts only types that its configuration lists: if they do not add up, it is not known what the others are.
    """
    by_type = dict(counts)
    total = by_type.pop("", 0)
    typed = sum(by_type.values())
    types = tuple(name for name, count in by_type.items() if count) if typed >= total else ()
    return SlurmGpus(max(total, typed), types)


def gpu_types_of(requested: SlurmGpus, constraint: str) -> tuple[str, ...]:
    """Return the types that a request names; else those of its constraint, if it names nothing but types of the table."""
    if requested.types:
        return tuple(dict.fromkeys(map(gpu_type_of, requested.types)))
    named = tuple(dict.fromkeys(map(gpu_type_of, constraint.strip("[]()").split("|"))))
    return named if all(map(is_table_type, named)) else ()


def is_sliced(*gpus: SlurmGpus) -> bool:
    """Return whether any of the types is a slice of a GPU."""
    return any(is_slice(name) for each in gpus for name in each.types)
