"""Policies with one fault each, for the tests of the check that has to find it."""

import math
import random
import time
from typing import Any

from poise.policies import (
    Claim,
    Family,
    JobView,
    Listing,
    Order,
    Plan,
    Planner,
    PolicyProperty,
    PreemptionRule,
    Rank,
    Snapshot,
    Unfitting,
)
from poise.scheduler.model.cluster import NodeGpus


def _order(rank: Any, preemption: PreemptionRule = PreemptionRule.BY_RANK) -> Order:
    return Order(rank, preemption, Unfitting.SKIPPED)


def _by_work(job: JobView, _previous: Rank | None, _memory: None) -> Rank:
    return Rank(job.remaining_seconds, slope=-job.pace)


def _in_order(job: JobView, _previous: Rank | None, _memory: None) -> Rank:
    return Rank(job.submitted)


RANDOM = _order(lambda _job, _previous, _memory: Rank(random.random()))  # noqa: TID251 - the fault
CLOCK = _order(lambda _job, _previous, _memory: Rank(time.time()))  # noqa: TID251 - the fault
PRINTS = _order(lambda job, _previous, _memory: print(end="") or Rank(job.submitted))  # noqa: T201 - the fault
IDS = _order(lambda job, _previous, _memory: Rank(float(job.id[1:])))
RAISES = _order(lambda job, _previous, _memory: Rank(1 / (job.gang - 5)))
NAN = _order(lambda job, _previous, _memory: Rank(math.nan if job.gang > 1 else job.submitted))
NO_RANK = _order(lambda _job, _previous, _memory: 3)
HASHES = _order(lambda job, _previous, _memory: Rank(hash(job.tenant)))


def _listed(name: str, *claims: PolicyProperty, make: Any) -> Listing:
    return Listing(name, Family.QUEUE, "a policy with a fault", "nowhere", claims, make)


PREEMPTS = _listed("preempts", PolicyProperty.NO_PREEMPTION, make=lambda: _order(_by_work))
OVERTAKES = _listed("overtakes", PolicyProperty.IN_ORDER, make=lambda: _order(_by_work, PreemptionRule.NEVER))
LOOKS = _listed("looks", PolicyProperty.NO_DURATIONS, make=lambda: _order(_by_work))
IDLES = _listed(
    "idles",
    PolicyProperty.WORK_CONSERVING,
    make=lambda: Order(_in_order, PreemptionRule.NEVER, Unfitting.BLOCKS),
)
DUE = _listed("due", make=lambda: _order(lambda job, _previous, _memory: Rank(job.deadline)))


class _Plans:
    """A planner without memory; what it plans is for those that inherit from it."""

    def start(self) -> None:
        return None

    def plan(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
        return self._planned(snapshot), memory

    def _planned(self, snapshot: Snapshot) -> Plan:
        raise NotImplementedError


def _plan(claims: tuple[Claim, ...], **more: Any) -> Plan:
    return Plan(claims, Unfitting.SKIPPED, PreemptionRule.BY_RANK, **more)


class Starves(_Plans):
    """Gangs of four are never started."""

    def _planned(self, snapshot: Snapshot) -> Plan:
        return _plan(tuple(Claim(row) for row, gang in zip(snapshot.active, snapshot.gang, strict=True) if gang < 4))


class Idles(_Plans):
    """Nothing is ever started."""

    def _planned(self, snapshot: Snapshot) -> Plan:
        return _plan(())


class Circles(_Plans):
    """It wants to be asked again at once, for ever."""

    def _planned(self, snapshot: Snapshot) -> Plan:
        return _plan((), wake=snapshot.now + 0.001)


class Ghosts(_Plans):
    """Claims GPUs of a node that is not there."""

    def _planned(self, snapshot: Snapshot) -> Plan:
        return _plan(tuple(Claim(row, site=(NodeGpus(99, 1),)) for row in snapshot.active))


class Splits(_Plans):
    """Gives every job one GPU, however many it needs."""

    def _planned(self, snapshot: Snapshot) -> Plan:
        return _plan(tuple(Claim(row, gpus=1) for row in snapshot.active))


class Counts(_Plans):
    """Remembers by itself how often it was asked, instead of in its memory."""

    def __init__(self) -> None:
        self.asked = 0

    def _planned(self, snapshot: Snapshot) -> Plan:
        self.asked += 1
        return _plan(tuple(map(Claim, snapshot.active if self.asked % 3 else snapshot.active[::-1])))


class Hangs(_Plans):
    """Never answers."""

    def _planned(self, snapshot: Snapshot) -> Plan:
        while True:
            pass


COUNTS: Planner = Counts()
