"""Orders by believed remaining work, preemptive (`srtf`, `srsf`, `lrtf`).

R_m = seconds that job m still needs on its fastest GPU type.
srtf   least R_m first            shortest remaining time; optimal average JCT on one GPU
srsf   least g_m·R_m first        shortest remaining service, i.e. GPU-time (Tiresias §2.2: better for gangs)
lrtf   most R_m first             longest remaining time; the bad end of the scale, useful as a bound

While a job runs, R_m falls at its pace, so under srtf and srsf time alone never changes a decision; under lrtf it does,
and the order is looked at again at every round. Jobs of unknown length rank as endless. O(log J) an event, no memory.
"""

from poise.model.columns import JobView
from poise.model.plan import Order, Preemption, Rank, Unfitting


def srtf() -> Order:
    """Least remaining time first."""
    return Order(rank=_remaining_time, preemption=Preemption.BY_RANK, unfitting=Unfitting.SKIPPED)


def srsf() -> Order:
    """Least remaining GPU-time first."""
    return Order(rank=_remaining_service, preemption=Preemption.BY_RANK, unfitting=Unfitting.SKIPPED)


def lrtf() -> Order:
    """Most remaining time first."""
    return Order(rank=_most_remaining, preemption=Preemption.BY_RANK, unfitting=Unfitting.SKIPPED)


def _remaining_time(job: JobView, _previous: Rank | None, _memory: None) -> Rank:
    return Rank(job.remaining_seconds, slope=-job.pace)


def _remaining_service(job: JobView, _previous: Rank | None, _memory: None) -> Rank:
    return Rank(job.remaining_seconds * job.gang, slope=-job.pace * job.gang)


def _most_remaining(job: JobView, _previous: Rank | None, _memory: None) -> Rank:
    return Rank(-job.remaining_seconds, slope=job.pace)
