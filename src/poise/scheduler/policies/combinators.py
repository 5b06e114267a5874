"""Combinators make a new policy of a policy: `max-min+packed+agnostic`.

    +agnostic      all GPU types are believed to be equally fast          any policy
    +packed        two jobs may share GPUs                                share policies
    +fallback      another policy answers where this one gives up         share policies
    +partitioned   k small problems in place of a large one               share policies; `partitioned.py`
    +stable        ties keep the order of the previous decision           orders of jobs
    +ticks         queues change at whole seconds                         orders of jobs
    +plain         no second aim                                          share policies; `Listing.plain`

Around a share policy a combinator is an allocator that asks another one. `catalogue.py` checks that a combinator applies
to a policy before it is called.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from poise.scheduler.model.arithmetic import Floats
from poise.scheduler.model.errors import SolveError
from poise.scheduler.model.plan import Order, Policy, TieBreak
from poise.scheduler.model.speed import Estimate, Rates
from poise.scheduler.model.workload import Allocation, Allocator, Awareness, Workload
from poise.scheduler.policies.shares import inverse, joined


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
    parts = (workload.speed[:, : workload.types], workload.speed[:, workload.types :])
    speed: Floats = np.hstack([_row_levelled(part) for part in parts if part.shape[1]])
    if workload.beside is None:
        return replace(workload, speed=speed)
    factor = np.ones((workload.beside.shape[0], speed.shape[1]))
    factor[workload.kind] = speed * inverse(workload.speed)
    return replace(workload, speed=speed, beside=workload.beside * factor[:, None, :])


def _row_levelled(speed: Floats) -> Floats:
    first = speed[:, :1]
    reference = np.where(first > 0, first, speed.max(axis=1, initial=0.0, keepdims=True))
    return np.where(speed > 0, reference, 0.0)


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


def packed(policy: Policy) -> Policy:
    """The same policy with pairs: its problem has a row for every pair of jobs of equal gang beside those of single jobs."""
    return around(policy, Packed)


class Packed(ShareCombinator):
    """An allocator that may put two jobs on the same GPUs."""

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
