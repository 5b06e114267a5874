"""First in, first out, without preemption (`fifo`, `fifo-skip`).

Order jobs by a_m, the moment of submission. `fifo` stops at the first gang that does not fit (head of line blocks);
`fifo-skip` passes over it, as the "first job fit" of the Tiresias simulator does. O(log J) an event, no memory.

Both are the baselines of every paper in the field: YARN-CS in Tiresias §5, FIFO in Gavel §4.2.
"""

from poise.model.columns import JobView
from poise.model.plan import Order, Preemption, Rank, Unfitting


def fifo() -> Order:
    """Arrival order; the head blocks."""
    return Order(rank=_by_arrival, preemption=Preemption.NEVER, unfitting=Unfitting.BLOCKS)


def fifo_skip() -> Order:
    """Arrival order; those behind may pass a gang that does not fit."""
    return Order(rank=_by_arrival, preemption=Preemption.NEVER, unfitting=Unfitting.SKIPPED)


def _by_arrival(job: JobView, _previous: Rank | None, _memory: None) -> Rank:
    return Rank(job.submitted)
