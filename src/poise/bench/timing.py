"""Timing: CPU seconds of all threads of the process, for answers on what `drawing.py` draws.

Of a share policy an allocation is timed; of Themis an auction, in which every app bids and half a GPU is free for each; of
Hare a plan, from the relaxation to the last task on its GPU.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import nan
from time import process_time

import numpy as np

from poise.bench.drawing import Draw, drawn_apps, drawn_for, drawn_works
from poise.model.errors import RequestError
from poise.model.plan import Policy
from poise.model.workload import Allocation, Allocator, Workload
from poise.policies.hare.offline import Hare
from poise.policies.hare.schedule import schedule
from poise.policies.themis.apps import Roll
from poise.policies.themis.planner import Themis
from poise.policies.themis.selling import Sale


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured: CPU seconds of each repeat, and the objective, which is the same every time.

    bound   that no answer is beyond, if the policy knows one
    """

    seconds: tuple[float, ...]
    objective: float
    gpus: int
    types: int
    bound: float = nan

    @property
    def best(self) -> float:
        """The least: what else the machine does only ever adds."""
        return min(self.seconds)


@dataclass(frozen=True, slots=True)
class Timing:
    """CPU seconds of each repeat, and the answer, which is the same every time."""

    seconds: tuple[float, ...]
    allocation: Allocation

    @property
    def best(self) -> float:
        """The least: what else the machine does only ever adds."""
        return min(self.seconds)


def measured(policy: Policy, draw: Draw, repeats: int, done: Callable[[int], None]) -> Figures:
    """Time the policy on a settled draw. Raises RequestError for a bad draw, or for a policy that is not timed."""
    if isinstance(policy.answer, Themis):
        return time_auction(policy.answer, draw, repeats, done)
    if isinstance(policy.answer, Hare):
        return time_plan(draw, repeats, done)
    allocator = allocator_of(policy)
    workload = drawn_for(policy, draw)
    timing = time_allocation(allocator, workload, repeats, done)
    return Figures(timing.seconds, timing.allocation.objective, int(workload.gpus.sum()), workload.types)


def time_auction(themis: Themis, draw: Draw, repeats: int, done: Callable[[int], None]) -> Figures:
    """Time auctions in which all apps bid for the same free GPUs: bids, the optimum, payments, placement, leftovers."""
    snapshot = drawn_apps(draw)
    roll = Roll().at(snapshot)
    rules = replace(themis, f=0.0).rules()
    nothing = np.zeros(len(snapshot.active), dtype=bool)
    seconds = []
    for repeat in range(repeats):
        before = process_time()
        sale = Sale(rules, snapshot, roll, 0)
        sale.auction(nothing)
        seconds.append(process_time() - before)
        done(repeat + 1)
    return Figures(tuple(seconds), sale.worth, snapshot.gpus, 1)


def time_plan(draw: Draw, repeats: int, done: Callable[[int], None]) -> Figures:
    """Time Hare's list: the relaxation, the order of all tasks, and every task on its GPU."""
    jobs, gpus = drawn_works(draw)
    seconds = []
    for repeat in range(repeats):
        before = process_time()
        plan = schedule(jobs, gpus)
        seconds.append(process_time() - before)
        done(repeat + 1)
    return Figures(tuple(seconds), plan.value, len(gpus.kinds), draw.types, plan.bound)


def allocator_of(policy: Policy) -> Allocator:
    """What is to be timed. Raises RequestError if the policy does not answer with shares."""
    if not isinstance(policy.answer, Allocator):
        raise RequestError(f"bench solve times policies that answer with shares, themis and hare; not {policy.name!r}")
    return policy.answer


def time_allocation(allocator: Allocator, workload: Workload, repeats: int, done: Callable[[int], None]) -> Timing:
    """Time so many allocations, each on fresh memory, and say after each how many are done.

    CPU seconds of all threads of the process; what is drawn beforehand is not in them.
    """
    seconds = []
    for repeat in range(repeats):
        memory = allocator.start()
        before = process_time()
        allocation, _ = allocator.allocate(workload, memory)
        seconds.append(process_time() - before)
        done(repeat + 1)
    return Timing(tuple(seconds), allocation)
