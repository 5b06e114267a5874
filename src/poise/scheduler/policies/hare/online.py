"""Heterogeneity-aware least attained service (`hlas`; Hare's online scheduler). Needs no durations.

    service_m = Σ over its tasks of seconds on GPU g × (t_m,best / t_mg)       normalised to the job's own fastest GPU type

A task takes t_mg seconds on g, so that each task that is done counts t_m,best, wherever it was done, and one under way its
part of that: service is steps done × K × t_m,best. A gang of g_m GPUs counts as g_m tasks. O(J log J) a deal.

Chen et al., Hare, HPDC'22 and TCC'24: the name; the algorithm is ours.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from poise.scheduler.model.arithmetic import Floats
from poise.scheduler.model.job_table import Snapshot
from poise.scheduler.policies import papers
from poise.scheduler.policies.hare.rank_sharing import LEASES_ONLY, Dealer, StarvationGuard
from poise.scheduler.policies.listing import (
    Family,
    Listing,
    Parameter,
    PolicyProperty,
    Traits,
    choice,
    positive,
)


@dataclass(frozen=True, slots=True)
class AttainedByType:
    """Least service first; remembers what a step costs, by kind of job."""

    def start(self) -> Mapping[int, float]:
        """Nothing is known yet."""
        return MappingProxyType({})

    def values(self, snapshot: Snapshot, memory: Mapping[int, float]) -> tuple[Floats, Mapping[int, float]]:
        """Service of every active job, in seconds of its own fastest GPU."""
        kinds = snapshot.ints(snapshot.columns.kind).tolist()
        new = {kind: row for kind, row in zip(kinds, snapshot.active, strict=True) if kind not in memory}
        if new:
            memory = MappingProxyType({**memory, **{kind: step_service(snapshot, row) for kind, row in new.items()}})
        return snapshot.steps_so_far * np.array([memory[kind] for kind in kinds]), memory


def step_service(snapshot: Snapshot, row: int) -> float:
    """What one step of a job counts: seconds of its fastest GPU."""
    estimate = snapshot.estimate(row)
    if estimate.tasks is not None:
        return estimate.tasks.count * estimate.tasks.best
    return snapshot.columns.gang[row] / estimate.best()


def hlas(*, lease: float = 360.0, long: float = 30.0, guard: StarvationGuard = StarvationGuard.OFF) -> Dealer:
    """Least attained service first, on any mix of GPUs."""
    return Dealer(AttainedByType(), lease, long, guard)


LISTING = Listing(
    "hlas",
    Family.MARKET,
    "least attained service, normalised to each job's fastest type, on any mix of GPUs",
    "Chen et al., Hare, HPDC'22 and TCC'24 (its online scheduler, by name)",
    (PolicyProperty.NO_DURATIONS,),
    hlas,
    (
        Parameter("lease", "360", "seconds after which GPUs are dealt out anew", positive),
        Parameter("long", "30", "tasks that take at least this many seconds are given GPUs one by one", positive),
        Parameter(
            "guard", "off", "whether a task waits for a faster GPU where that gets it done sooner", choice(StarvationGuard)
        ),
    ),
    live=LEASES_ONLY,
    traits=Traits(
        optimises="average completion time, without durations",
        fairness="equal service, in seconds of each job's own fastest type",
        heterogeneity="aware; one job may use several types at once",
        gang="needs none where rounds divide into micro-batches; whole gangs otherwise",
        elasticity="any number of GPUs up to the micro-batches of a round",
        verified="two equal jobs alternate; slow GPUs are charged less; a newcomer gets the next GPU",
    ),
    url=papers.HARE,
)
