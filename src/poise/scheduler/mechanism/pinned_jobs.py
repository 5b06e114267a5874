"""What is selected for a round, beginning with the pinned jobs: those that keep their GPUs whoever waits.

Shares are computed of what pinned jobs leave (`shared_out`), and every round begins with them where they are
(`RoundSelection.first`). A plan made with GPUs that cannot be had would serve, on paper, jobs that do not fit beside the
pinned ones; these jobs would wait, and jobs that run would count as served in every round and never make way.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from poise.scheduler.model.arithmetic import Ints
from poise.scheduler.model.workload import Allocation, Allocator, Pairs, Workload

WHOLE = 1.0 - 1e-6
"""Shares from here on mean all the time."""

Unit = tuple[int, int, int]
"""A job, its partner that shares the GPUs or -1, and the column."""


@dataclass(frozen=True, slots=True)
class RoundSelection:
    """What each job has in a round: its column and its partner, -1 for none.

    is_served   jobs that have a place so far;  order: units in the order in which they were served, by their first job
    hosts       pinned jobs beside which there may be another one
    """

    column: Ints
    partner: Ints
    is_served: list[bool]
    order: list[int] = field(default_factory=list)
    hosts: set[int] = field(default_factory=set)

    @staticmethod
    def first(workload: Workload) -> "RoundSelection":
        """Only pinned jobs are served; two of them that share GPUs go on sharing."""
        nothing = np.full(workload.jobs, -1)
        if workload.pinned is None:
            return RoundSelection(nothing, nothing.copy(), [False] * workload.jobs)
        pinned = workload.pinned
        both = pinned & (workload.partner >= 0) & pinned[workload.partner]
        return RoundSelection(
            np.where(pinned, workload.held, -1),
            np.where(both, workload.partner, -1),
            pinned.tolist(),
            hosts=set(np.flatnonzero(pinned & ~both).tolist()),
        )

    def serve(self, job: int, other: int, where: int) -> None:
        """Give a unit its place in this round."""
        self.is_served[job], self.column[job] = True, where
        self.order.append(job)
        if other >= 0:
            self.is_served[other], self.column[other] = True, where
            self.partner[job], self.partner[other] = other, job

    def take(self, units: list[Unit], gangs: list[int], room: int) -> int:
        """Serve units in this order as far as their gangs fit and their jobs are not served yet; returns the room left."""
        is_served = self.is_served
        for job, other, where in units:
            if not room:
                break
            if is_served[job] or gangs[job] > room or (other >= 0 and is_served[other]):
                continue
            room -= gangs[job]
            self.serve(job, other, where)
        return room

    def join(self, units: list[Unit], workload: Workload) -> None:
        """Let the first unit of each pinned job, by priority, decide whether a partner joins it or it stays alone."""
        for job, other, where in units:
            for host, guest in ((job, other), (other, job)):
                if host in self.hosts and workload.held[host] == where and (guest < 0 or not self.is_served[guest]):
                    self.hosts.discard(host)
                    if guest >= 0:
                        self.serve(host, guest, where)


def shared_out(allocator: Allocator, workload: Workload, memory: Any) -> tuple[Allocation, Any]:  # noqa: ANN401
    """Shares of pinned jobs as if they could be stopped, and of all others in the GPUs that those leave.

    So a job that keeps its GPUs gets ahead of its share, which counts once it can be stopped; and no other job is owed
    what was not to be had. Time beside a pinned job comes on top of that. The allocator's memory is of all jobs.
    """
    whole, after = allocator.allocate(workload, memory)
    if workload.pinned is None:
        return whole, after
    pinned = np.flatnonzero(workload.pinned)
    if (whole.share[pinned, workload.held[pinned]] >= WHOLE).all():  # pinned jobs run all the time anyhow
        return whole, after
    rest, _ = allocator.allocate(workload.only(~workload.pinned, workload.free), memory)
    share = whole.share.copy()
    share[~workload.pinned] = rest.share
    # Pairs of the other jobs, and those of a pinned job and another one on the column that the pinned one holds.
    others, is_pinned, all_pairs = np.flatnonzero(~workload.pinned), workload.pinned, whole.pairs
    host = np.where(is_pinned[all_pairs.first], all_pairs.first, all_pairs.second)
    hosted = (is_pinned[all_pairs.first] != is_pinned[all_pairs.second]) & (workload.held[host] == all_pairs.column)
    pairs = Pairs(
        np.append(others[rest.pairs.first], all_pairs.first[hosted]),
        np.append(others[rest.pairs.second], all_pairs.second[hosted]),
        np.append(rest.pairs.column, all_pairs.column[hosted]),
        np.append(rest.pairs.share, all_pairs.share[hosted]),
    )
    return replace(rest, share=share, pairs=pairs), after
