"""Combinators make a new policy of a policy: `max-min+packed+agnostic`.

    +agnostic      all GPU types are believed to be equally fast          any policy
    +packed        two jobs may share GPUs                                share policies
    +fallback      another policy answers where this one gives up         share policies
    +partitioned   k small problems in place of a large one               share policies
    +stable        ties keep the order of the previous decision           orders of jobs
    +ticks         queues change at whole seconds                         orders of jobs
    +plain         no second aim                                          share policies; `Listing.plain`

Around a share policy a combinator is an allocator that asks another one. `catalogue.py` checks that a combinator applies
to a policy before it is called.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from poise.scheduler.model.arithmetic import Floats, Ints, times
from poise.scheduler.model.errors import RequestError, SolveError
from poise.scheduler.model.plan import Order, Policy, TieBreak
from poise.scheduler.model.speed import Estimate, Rates
from poise.scheduler.model.workload import Allocation, Allocator, Awareness, Pairs, Workload
from poise.scheduler.policies.shares import inverse, joined, packed, usable


def around(policy: Policy, make: Callable[[Allocator], Allocator]) -> Policy:
    """The same share policy with another allocator, made of its own."""
    assert isinstance(policy.answer, Allocator)
    return replace(policy, answer=make(policy.answer))


@dataclass(frozen=True)
class ShareCombinator:
    """An allocator around another one, whose memory it keeps."""

    allocator: Allocator

    def start(self) -> Any:  # noqa: ANN401 - that of the allocator
        """The memory that the allocator starts with."""
        return self.allocator.start()


# --- +agnostic: Gavel's heterogeneity-agnostic world (docs/algorithms/gavel.md). Only beliefs change, not the world.


def agnostic(policy: Policy) -> Policy:
    """The same policy, blind to differences between GPU types.

    A share policy sees all types at the speed of the cluster's first type, and types are served in an order drawn for each
    round. Any other policy sees them at the speed of the job's fastest type, and takes types in the cluster's order.
    """
    if isinstance(policy.answer, Allocator):
        return around(policy, HeterogeneityAgnostic)
    perceive = policy.perceive
    return replace(policy, perceive=lambda estimate: _equally_fast(perceive(estimate)))


class HeterogeneityAgnostic(ShareCombinator):
    """An allocator that cannot tell GPU types apart."""

    def allocate(self, workload: Workload, memory: Any) -> tuple[Allocation, Any]:  # noqa: ANN401
        """What the allocator would do if all types were as fast as the first."""
        allocation, memory = self.allocator.allocate(levelled(workload), memory)
        return replace(allocation, awareness=Awareness.BLIND), memory


def levelled(workload: Workload) -> Workload:
    """The workload with one speed for all packed columns of a job, and one for all spread ones.

    That speed is T_m0, on the first type of the cluster; the job's highest if it does not run there. Columns where it
    cannot run stay 0. Speeds of pairs keep their ratio to speeds alone. A constant factor in a job's row changes nothing
    in policies that normalise, so this is also the authors' T := 1.
    """
    speed = np.zeros_like(workload.speed)
    for columns in (slice(workload.types), slice(workload.types, None)):
        believed = workload.speed[:, columns]
        if believed.shape[1]:
            reference = np.where(believed[:, :1] > 0, believed[:, :1], believed.max(axis=1, initial=0.0, keepdims=True))
            speed[:, columns] = np.where(believed > 0, reference, 0.0)
    if workload.beside is None:
        return replace(workload, speed=speed)
    factor = np.ones((workload.beside.shape[0], speed.shape[1]))
    factor[workload.kind] = speed * inverse(workload.speed)
    return replace(workload, speed=speed, beside=workload.beside * factor[:, None, :])


def _equally_fast(estimate: Estimate) -> Estimate:
    """The estimate with the best speed on every type where the job runs at all, also for other gangs and for tasks."""

    def level(rates: Rates) -> Rates:
        best = max(rates, key=lambda row: row[0], default=(0.0, 0.0, 0.0))
        return tuple(best if row[0] > 0 else row for row in rates)

    tasks = estimate.tasks
    if tasks is not None and tasks.best:
        sync = tasks.sync[tasks.seconds.index(tasks.best)]
        tasks = replace(
            tasks,
            seconds=tuple(tasks.best if each > 0 else each for each in tasks.seconds),
            sync=tuple(sync if each > 0 else row for each, row in zip(tasks.seconds, tasks.sync, strict=True)),
        )
    others = tuple((gpus, level(rates)) for gpus, rates in estimate.others)
    return replace(estimate, rates=level(estimate.rates), others=others, tasks=tasks)


# --- +packed: space sharing (Gavel, OSDI'20 §3.1).


class Packed(ShareCombinator):
    """An allocator whose problem has a row for every pair of jobs of equal gang beside those of single jobs."""

    def allocate(self, workload: Workload, memory: Any) -> tuple[Allocation, Any]:  # noqa: ANN401
        """Shares of jobs and of pairs. What is known of pairs is in every workload; only here is it looked at."""
        return self.allocator.allocate(replace(workload, beside=workload.known_beside), memory)


# --- +fallback: where a program is not solved, shares by another policy, and a remark that says so.


@dataclass(frozen=True)
class Both:
    """The memories of a policy and of the one behind it."""

    first: Any
    second: Any

    def joined(self, others: Sequence["Both"]) -> "Both":
        """One memory of several (`+partitioned`)."""
        every = [self, *others]
        return Both(joined([each.first for each in every]), joined([each.second for each in every]))


@dataclass(frozen=True)
class Fallback:
    """An allocator, and another one for when it gives up; their names are for remarks."""

    allocator: Allocator
    other: Allocator
    name: str
    other_name: str

    def start(self) -> Both:
        """Both memories at their start."""
        return Both(self.allocator.start(), self.other.start())

    def allocate(self, workload: Workload, memory: Both) -> tuple[Allocation, Both]:
        """The first one's shares if it has any, else the other's. An allocator that is not used keeps its memory."""
        try:
            allocation, first = self.allocator.allocate(workload, memory.first)
        except SolveError as error:
            allocation, second = self.other.allocate(workload, memory.second)
            remark = f"{self.name} gave up: {error}; shares by {self.other_name} instead"
            return replace(allocation, remarks=(*allocation.remarks, remark)), replace(memory, second=second)
        return allocation, replace(memory, first=first)


# --- +stable and +ticks: habits of the Tiresias authors' simulator. The preset `tiresias` adds both.


def stable(policy: Policy) -> Policy:
    """The same order; equal ranks keep the order that they had at the previous decision.

    The authors' simulator keeps one list and sorts it stably at each event, so ties depend on history. Without this
    combinator they go by submission, then by place in the trace.
    """
    assert isinstance(policy.answer, Order)
    return replace(policy, answer=replace(policy.answer, ties=TieBreak.BY_PREVIOUS_DECISION))


def ticks(policy: Policy) -> Policy:
    """The same order by a clock of whole seconds; orders that change at no moment of their own stay as they are.

    In the authors' simulator a job that reaches a limit between two seconds is demoted at the later one. It also adds up
    all waiting since a job first ran after its last promotion, where Poise counts from the last run.
    """
    assert isinstance(policy.answer, Order)
    return replace(policy, answer=replace(policy.answer, rank=policy.answer.ticking or policy.answer.rank))


# --- +partitioned: k smaller problems in place of a large one (POP, SOSP'21; docs/algorithms/pop.md).


@dataclass(frozen=True)
class Partitioned(ShareCombinator):
    """An allocator asked k times for a k-th of everything. `objective` is nan if there are several parts.

    GPUs are dealt out evenly to k parts, remaining ones in turn; jobs are dealt out by gang and kind, largest gangs first,
    each to the part with the fewest GPUs wanted for what its own are worth, so that parts are alike. The same policy answers
    for each part, and the union is the answer: feasible, and near the best where there are many more jobs than parts.
    Nothing is drawn at random: the same jobs are always parted in the same way. A gang that no even part could hold goes to
    the first part, which is given enough of a type for it beforehand.
    """

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
