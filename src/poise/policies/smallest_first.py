"""Fewest GPUs first, preemptive (`smallest-first`; "sjf" in the Tiresias simulator).

Order jobs by g_m, ties by submission. Knows nothing of durations; a large gang starves while small ones keep coming.
O(log J) an event, no memory.
"""

from poise.model.columns import JobView
from poise.model.plan import Order, Preemption, Rank, Unfitting


def smallest_first() -> Order:
    """Smallest gang first; a smaller gang preempts larger ones."""
    return Order(rank=_by_gang, preemption=Preemption.BY_RANK, unfitting=Unfitting.SKIPPED)


def _by_gang(job: JobView, _previous: Rank | None, _memory: None) -> Rank:
    return Rank(float(job.gang))
