"""Jobs that keep their GPUs whoever waits: shares are of what they leave, and every round begins with them where they are.

Whoever plans with GPUs that cannot be had serves on paper those who do not fit beside the pinned ones; and who runs among
them counts as served in every round, and never makes way.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from poise.scheduler.model.arithmetic import Bools, Ints
from poise.scheduler.model.workload import Allocation, Allocator, Pairs, Workload

WHOLE = 1.0 - 1e-6
"""A share from which on a job is to run there all the time."""

Unit = tuple[int, int, int]
"""A job, the one that is to share its GPUs or -1, and the column."""


@dataclass(frozen=True, slots=True)
class PinnedShares:
    """What everybody is to have in a round: the column of each job, -1 for none, and its partner, -1 for none.

    is_served   who has a place so far;  order: units in the order in which they were served, by their first job
    hosts       pinned jobs beside which there may be another one
    """

    column: Ints
    partner: Ints
    is_served: list[bool]
    order: list[int] = field(default_factory=list)
    hosts: set[int] = field(default_factory=set)

    @staticmethod
    def first(workload: Workload) -> "PinnedShares":
        """Nobody is served but those who are pinned, and whom they share with if both are."""
        nobody = np.full(workload.jobs, -1)
        if workload.pinned is None:
            return PinnedShares(nobody, nobody.copy(), [False] * workload.jobs)
        pinned = workload.pinned
        both = pinned & (workload.partner >= 0) & pinned[workload.partner]
        return PinnedShares(
            np.where(pinned, workload.held, -1),
            np.where(both, workload.partner, -1),
            pinned.tolist(),
            hosts=set(np.flatnonzero(pinned & ~both).tolist()),
        )

    def serve(self, job: int, other: int, where: int) -> None:
        """The unit has its place in this round."""
        self.is_served[job], self.column[job] = True, where
        self.order.append(job)
        if other >= 0:
            self.is_served[other], self.column[other] = True, where
            self.partner[job], self.partner[other] = other, job

    def take(self, units: list[Unit], gangs: list[int], room: int) -> int:
        """Units in this order have their places as far as there is room, whoever is not served yet; says what is left."""
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
        """Of units by priority, those of a pinned job and another one: the first that can be, unless it is first alone."""
        for job, other, where in units:
            for host, guest in ((job, other), (other, job)):
                if host in self.hosts and workload.held[host] == where and (guest < 0 or not self.is_served[guest]):
                    self.hosts.discard(host)
                    if guest >= 0:
                        self.serve(host, guest, where)


def shared_out(allocator: Allocator, workload: Workload, memory: Any) -> tuple[Allocation, Any]:  # noqa: ANN401
    """Shares of pinned jobs as if they could be stopped, and of all others in the GPUs that those leave.

    So who keeps its GPUs gets ahead of its share, which counts once it can be stopped; and nobody else is owed what was not
    to be had. Time beside a pinned job comes on top of that. What the allocator remembers is of everybody.
    """
    whole, after = allocator.allocate(workload, memory)
    if workload.pinned is None:
        return whole, after
    pinned = np.flatnonzero(workload.pinned)
    if (whole.share[pinned, workload.held[pinned]] >= WHOLE).all():  # it lets everybody who runs go on
        return whole, after
    rest, _ = allocator.allocate(workload.only(~workload.pinned, workload.free), memory)
    share = whole.share.copy()
    share[~workload.pinned] = rest.share
    return replace(rest, share=share, pairs=_pairs(workload, workload.pinned, whole.pairs, rest.pairs)), after


def _pairs(workload: Workload, pinned: Bools, whole: Pairs, rest: Pairs) -> Pairs:
    """Those of the others, and those of a pinned job and another one that can be where the pinned one is."""
    others = np.flatnonzero(~pinned)
    host = np.where(pinned[whole.first], whole.first, whole.second)
    hosted = (pinned[whole.first] != pinned[whole.second]) & (workload.held[host] == whole.column)
    return Pairs(
        np.append(others[rest.first], whole.first[hosted]),
        np.append(others[rest.second], whole.second[hosted]),
        np.append(rest.column, whole.column[hosted]),
        np.append(rest.share, whole.share[hosted]),
    )
