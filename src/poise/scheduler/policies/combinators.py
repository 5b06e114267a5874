"""`+agnostic`: the policy takes all GPU types for equally fast (Gavel's heterogeneity-agnostic world, ALGORITHMS §2.1).

Every type on which the job can run at all is believed to be equally fast; what the world does with the job is unchanged.
Queue policies take the speed of the fastest type, and types in the cluster's order instead of the job's fastest type first;
share policies take that of the cluster's first type (`blind.py`), and types are served in an order drawn for each round.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from poise.scheduler.model.arithmetic import Floats
from poise.scheduler.model.errors import RequestError, SolveError
from poise.scheduler.model.micro_batches import Tasks
from poise.scheduler.model.plan import Order, Policy, TieBreak
from poise.scheduler.model.speed import Estimate, Rates
from poise.scheduler.model.workload import Allocation, Allocator, Awareness, Workload
from poise.scheduler.policies.finish_time import FinishTime
from poise.scheduler.policies.gavel import Makespan, MaxMin, MaxThroughput, SecondaryObjective
from poise.scheduler.policies.shares import Count, SecondAim, inverse, joined

# `+agnostic` for share policies: all GPU types are taken for equally fast (Gavel's heterogeneity-agnostic world).
#
# T_mj := T_m0  on every type j on which m can run, 0 being the first type of the cluster (packed, and likewise spread);
# its highest, if it does not run there
#
# Throughputs of pairs keep their relation to those alone (ALGORITHMS §2.1; a constant factor in a job's row changes
# nothing in
# policies that normalise, so that this is also the authors' T := 1).


@dataclass(frozen=True)
class HeterogeneityAgnostic:
    """An allocator that cannot tell GPU types apart."""

    allocator: Allocator

    def start(self) -> Any:  # noqa: ANN401 - that of the allocator
        """As the allocator starts."""
        return self.allocator.start()

    def allocate(self, workload: Workload, memory: Any) -> tuple[Allocation, Any]:  # noqa: ANN401
        """What the allocator would do if all types were as fast as the first."""
        allocation, memory = self.allocator.allocate(levelled(workload), memory)
        return replace(allocation, awareness=Awareness.BLIND), memory


def levelled(workload: Workload) -> Workload:
    """The workload with one speed for all packed columns of a job, and one for all spread ones."""
    speed = _levelled_workload(workload.speed, workload.types)
    if workload.beside is None:
        return replace(workload, speed=speed)
    factor = np.ones((workload.beside.shape[0], speed.shape[1]))
    factor[workload.kind] = speed * inverse(workload.speed)
    return replace(workload, speed=speed, beside=workload.beside * factor[:, None, :])


def _levelled_workload(speed: Floats, types: int) -> Floats:
    parts = (speed[:, :types], speed[:, types:])
    return np.hstack([np.where(part > 0, _reference(part), 0.0) for part in parts if part.shape[1]])


def _reference(speed: Floats) -> Floats:
    """The speed on the first type of the cluster; of a job that does not run there, its highest."""
    first = speed[:, :1]
    return np.where(first > 0, first, speed.max(axis=1, initial=0.0, keepdims=True))


# How combinators for share policies are applied: an allocator in, another one out.


def on_shares(policy: Policy, combinator: str, make: Callable[[Allocator], Allocator]) -> Policy:
    """The same policy with another allocator; refused for a policy that does not answer with shares."""
    if not isinstance(policy.answer, Allocator):
        raise RequestError(f"+{combinator} applies to policies that answer with shares; {policy.name!r} does not")
    return replace(policy, answer=make(policy.answer))


def agnostic(policy: Policy) -> Policy:
    """The same policy, blind to differences between GPU types."""
    if isinstance(policy.answer, Allocator):
        return on_shares(policy, "agnostic", HeterogeneityAgnostic)
    seen = policy.perceive
    return replace(policy, perceive=lambda estimate: _levelled(seen(estimate)))


def _levelled(estimate: Estimate) -> Estimate:
    others = tuple((gpus, _level(rates)) for gpus, rates in estimate.others)
    tasks = None if estimate.tasks is None else _tasks_levelled(estimate.tasks)
    return replace(estimate, rates=_level(estimate.rates), others=others, tasks=tasks)


def _level(rates: Rates) -> Rates:
    best = max(rates, key=lambda row: row[0], default=(0.0, 0.0, 0.0))
    return tuple(best if row[0] > 0 else row for row in rates)


def _tasks_levelled(tasks: Tasks) -> Tasks:
    if not tasks.best:
        return tasks
    sync = tasks.sync[tasks.seconds.index(tasks.best)]
    rows = zip(tasks.seconds, tasks.sync, strict=True)
    return replace(
        tasks,
        seconds=tuple(tasks.best if each > 0 else each for each in tasks.seconds),
        sync=tuple(sync if each > 0 else row for each, row in rows),
    )


# `+fallback`: where a policy's program is not solved, shares by another policy, and a remark that says so.


@dataclass(frozen=True)
class Both:
    """The memories of a policy and of the one behind it."""

    first: Any
    second: Any

    def joined(self, others: Sequence["Both"]) -> "Both":
        """One of several."""
        all_of = [self, *others]
        return Both(joined([one.first for one in all_of]), joined([one.second for one in all_of]))


@dataclass(frozen=True)
class Fallback:
    """An allocator, and another one for when it gives up. The first keeps its memory of before."""

    allocator: Allocator
    other: Allocator

    def start(self) -> Both:
        """Both as they start."""
        return Both(self.allocator.start(), self.other.start())

    def allocate(self, workload: Workload, memory: Both) -> tuple[Allocation, Both]:
        """The first one's shares if it has any, else the other's."""
        try:
            allocation, first = self.allocator.allocate(workload, memory.first)
        except SolveError as error:
            allocation, second = self.other.allocate(workload, memory.second)
            remark = f"{_name(self.allocator)} gave up: {error}; shares by {_name(self.other)} instead"
            return replace(allocation, remarks=(*allocation.remarks, remark)), replace(memory, second=second)
        return allocation, replace(memory, first=first)


def _name(allocator: Any) -> str:  # noqa: ANN401 - combinators have an allocator of their own
    """Of the policy without its combinators, as in the catalogue: MaxMin is max-min."""
    while hasattr(allocator, "allocator"):
        allocator = allocator.allocator
    return re.sub(r"(?<=[a-z])(?=[A-Z][a-z])", "-", type(allocator).__name__).lower()


# `+packed`: two jobs may share GPUs where they were measured to gain by it (space sharing; Gavel, OSDI'20 §3.1).
#
# The policy's problem has a row for every pair of jobs of equal gang beside the rows of single jobs (ALGORITHMS §2.4).
# What is
# known of pairs comes with the estimates; without this combinator it is not looked at.


def packed(policy: Policy) -> Policy:
    """The same policy, with pairs."""
    return on_shares(policy, "packed", Packed)


def shares_gpus(policy: Policy) -> bool:
    """The policy puts two jobs on the same GPUs: it says so itself, or `+packed` is somewhere among its combinators."""
    if getattr(policy.answer, "shares_gpus", False):
        return True
    allocator: object = policy.answer
    while allocator is not None and not isinstance(allocator, Packed):
        allocator = getattr(allocator, "allocator", None)
    return allocator is not None


@dataclass(frozen=True)
class Packed:
    """An allocator that may put two jobs on the same GPUs."""

    allocator: Allocator

    def start(self) -> Any:  # noqa: ANN401 - that of the allocator
        """As the allocator starts."""
        return self.allocator.start()

    def allocate(self, workload: Workload, memory: Any) -> tuple[Allocation, Any]:  # noqa: ANN401
        """Shares of jobs and of pairs."""
        return self.allocator.allocate(replace(workload, beside=workload.known_beside), memory)


# `+plain`: no second aim. What the best answer does not need goes where the solver's centre puts it, as in Gavel's code.
#
# A linear program fixes only the jobs that matter to its objective; Poise's policies put the rest to use. The preset `gavel`
# adds this combinator, so that its numbers can be compared with the authors'.


def plain(policy: Policy) -> Policy:
    """The same shares without a second aim; raw steps for total throughput, as the authors count them."""
    return on_shares(policy, "plain", _without_second_aim)


def _without_second_aim(allocator: Any) -> Any:  # noqa: ANN401 - any allocator; those without a second aim stay as they are
    match allocator:
        case MaxMin():
            return replace(allocator, then=SecondaryObjective.NOTHING)
        case FinishTime() | Makespan():
            return replace(allocator, then=SecondAim.NOTHING)
        case MaxThroughput():
            return replace(allocator, count=Count.RAW)
        case _ if hasattr(allocator, "allocator"):
            return replace(allocator, allocator=_without_second_aim(allocator.allocator))
        case _:
            return allocator


# `+stable`: equal ranks keep the order that they had at the previous decision, as in the Tiresias authors' simulator.
#
# That simulator keeps one list and sorts it stably at each event, so that ties depend on history (ALGORITHMS §7.3); without
# this combinator they go by submission, then by place in the trace. The preset `tiresias` adds it.


def stable(policy: Policy) -> Policy:
    """The same order, with ties by the previous decision."""
    if not isinstance(policy.answer, Order):
        raise RequestError(f"+stable applies to orders of jobs; {policy.name!r} plans as a whole")
    return replace(policy, answer=replace(policy.answer, ties=TieBreak.BY_PREVIOUS_DECISION))


# `+ticks`: queues change at whole seconds, as in the Tiresias authors' simulator. The preset `tiresias` adds it.
#
# That simulator counts in whole seconds (ALGORITHMS §7.3): a job that reaches a limit between two of them is demoted at the
# later one. It also adds up all waiting since a job first ran after its last promotion, where Poise counts from the
# last run.
# Orders that have no such moments stay as they are.


def ticks(policy: Policy) -> Policy:
    """The same order by a clock of whole seconds."""
    if not isinstance(policy.answer, Order):
        raise RequestError(f"+ticks applies to orders of jobs; {policy.name!r} plans as a whole")
    order = policy.answer
    return replace(policy, answer=replace(order, rank=order.ticking or order.rank))
