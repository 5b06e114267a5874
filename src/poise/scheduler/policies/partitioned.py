"""`+partitioned:k=`: k smaller problems in place of a large one (POP, SOSP'21; docs/algorithms/pop.md).

GPUs are dealt out evenly to k parts, remaining ones in turn; jobs are dealt out by gang and kind, largest gangs first, each
to the part with the fewest GPUs wanted for what its own are worth, so that parts are alike. The same policy answers for
each part, and the union is the answer: feasible, and near the best where there are many more jobs than parts. Nothing is
drawn at random: the same jobs are always parted in the same way.

A gang that no even part could hold goes to the first part, which is given enough of a type for it beforehand.
"""

from dataclasses import dataclass, replace
from math import nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from poise.scheduler.model.arithmetic import Floats, Ints, times
from poise.scheduler.model.errors import RequestError
from poise.scheduler.model.plan import Policy
from poise.scheduler.model.workload import Allocation, Pairs, Workload
from poise.scheduler.policies.combinators import ShareCombinator, around
from poise.scheduler.policies.shares import inverse, joined, packed, usable


def partitioned(policy: Policy, k: int = 4) -> Policy:
    """The same policy on k parts of the problem."""
    return around(policy, lambda allocator: Partitioned(allocator, k))


@dataclass(frozen=True)
class Partitioned(ShareCombinator):
    """An allocator asked k times for a k-th of everything. `objective` is nan if there are several parts."""

    k: int

    def __post_init__(self) -> None:
        if self.k < 1:
            raise RequestError(f"partitioned: k={self.k}; give 1 part or more")

    def allocate(self, workload: Workload, memory: Any) -> tuple[Allocation, Any]:  # noqa: ANN401
        """The union of the parts' allocations."""
        parts = parted(workload, min(self.k, workload.jobs))
        if len(parts) < 2:
            return self.allocator.allocate(workload, memory)
        answers = [self.allocator.allocate(workload.only(part.jobs, part.gpus), memory) for part in parts]
        share = np.zeros(workload.speed.shape)
        for part, (answer, _) in zip(parts, answers, strict=True):
            share[part.jobs] = answer.share
        both = [(part.jobs, answer.pairs) for part, (answer, _) in zip(parts, answers, strict=True)]
        pairs = Pairs(
            np.concatenate([jobs[pairs.first] for jobs, pairs in both]),
            np.concatenate([jobs[pairs.second] for jobs, pairs in both]),
            np.concatenate([pairs.column for _, pairs in both]),
            np.concatenate([pairs.share for _, pairs in both]),
        )
        remarks = tuple(dict.fromkeys(remark for answer, _ in answers for remark in answer.remarks))
        union = replace(answers[0][0], share=share, pairs=pairs, objective=nan, remarks=remarks)
        return union, joined([memory for _, memory in answers])


@dataclass(frozen=True)
class Partition:
    """Some of the jobs, as indices into the workload, and GPUs of each type for them."""

    jobs: Ints
    gpus: Floats


def parted(workload: Workload, k: int) -> list[Partition]:
    """At most k parts, none without a job."""
    if k < 2:
        return [Partition(np.arange(workload.jobs), workload.gpus)]
    gpus = _dealt_gpus(workload, k)
    home = _dealt_jobs(workload, gpus)
    peopled = np.unique(home)
    idle = np.setdiff1d(np.arange(k), peopled)
    gpus[peopled[0]] += gpus[idle].sum(axis=0)
    return [Partition(np.flatnonzero(home == part), gpus[part]) for part in peopled.tolist()]


def _dealt_gpus(workload: Workload, k: int) -> Floats:
    """(k, types): even parts, remaining GPUs in turn over all types; the first has enough for gangs that need more."""
    enough = _enough_first(workload, np.floor(workload.gpus / k))
    first = np.maximum(np.floor(workload.gpus / k), enough)
    others = np.where(enough > 0, k - 1, k)
    rest = np.where(enough > 0, workload.gpus - first, workload.gpus)
    even = np.floor(rest / others)
    gpus = np.tile(even, (k, 1))
    gpus[0] = np.where(enough > 0, first, even)
    turn = k - 1
    for of, more in enumerate((workload.gpus - gpus.sum(axis=0)).astype(int).tolist()):
        for _ in range(more):
            gpus[turn, of] += 1
            turn = (turn - 1) % k
    return gpus


def _enough_first(workload: Workload, even: Floats) -> Floats:
    """(types,): GPUs for the gangs that no even part could hold, each on the type that has most GPUs; 0 where none does."""
    able = usable(workload) > 0
    fits: NDArray[np.bool_] = able & (workload.gang[:, None] <= even[workload.column_type])
    large = np.flatnonzero(able.any(axis=1) & ~fits.any(axis=1))
    enough = np.zeros(workload.types)
    if len(large):
        most = np.where(able[large], workload.gpus[workload.column_type], -1.0).argmax(axis=1)
        np.maximum.at(enough, workload.column_type[most], workload.gang[large])
    return enough


def _dealt_jobs(workload: Workload, gpus: Floats) -> Ints:
    """The part of each job: of those where it fits the one with the fewest GPUs wanted for their worth; else the first."""
    able: NDArray[np.bool_] = usable(workload) > 0
    holds: NDArray[np.bool_] = workload.gang[:, None, None] <= gpus[:, workload.column_type]
    fits: NDArray[np.bool_] = np.any(able[:, None, :] & holds, axis=2)
    # What a GPU of each type does for the mean job, relative to the job's fastest type.
    speed = packed(workload)
    relative = speed * inverse(speed.max(axis=1, initial=0.0))[:, None]
    total = np.maximum(times(gpus, np.asarray(relative.mean(axis=0), dtype=float)), 1e-9)
    home, wanted = np.zeros(workload.jobs, dtype=np.int64), np.zeros(len(gpus))
    for job in np.lexsort((workload.rows, workload.kind, -workload.gang)).tolist():
        crowded = np.where(fits[job], (wanted + workload.gang[job]) / total, np.inf)
        home[job] = int(crowded.argmin())
        wanted[home[job]] += workload.gang[job]
    return home
