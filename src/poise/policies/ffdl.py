"""First come, first served with gang admission (`ffdl`; Jayaram et al., FfDL, Middleware'19).

Order jobs by a_m, the moment of submission; of those that arrive together the one with the largest gang g_m first, because
it is the hardest to place. A job is admitted with all its GPUs or not at all, and the first that cannot be placed stops the
queue. Admitting a job pod by pod instead lets two jobs hold a part each and wait for the other's for ever.

What is placed is a learner pod, which is on one node. A gang that fits on a node is one pod; a larger one is pods of whole
nodes. So every gang insists on the fewest nodes. Which node is the other half of FfDL, and it is the placement: `pack` takes
the one with the fewest free GPUs that has enough, `spread` the one with the most. O(log J) an event, no memory.
"""

from poise.model.columns import JobView
from poise.model.plan import Order, Preemption, Rank, Unfitting
from poise.model.speed import Locality

PER_SECOND = 1_000_000
"""Arrivals that differ by less than a microsecond are together."""


def ffdl() -> Order:
    """Arrival order, the largest gang first among equals; the head blocks; every gang on the fewest nodes."""
    return Order(rank=_by_arrival, preemption=Preemption.NEVER, unfitting=Unfitting.BLOCKS, asks=_pods)


def _by_arrival(job: JobView, _previous: Rank | None, _memory: None) -> Rank:
    return Rank(-job.gang, queue=round(job.submitted * PER_SECOND))


def _pods(_job: JobView) -> Locality:
    return Locality.PACKED
