"""First in, first out, without preemption (`fifo`, `fifo-skip`).

Order jobs by a_m, the moment of submission. `fifo` stops at the first gang that does not fit (head of line blocks);
`fifo-skip` passes over it, as the "first job fit" of the Tiresias simulator does. O(log J) an event, no memory.

Both are the baselines of every paper in the field: YARN-CS in Tiresias §5, FIFO in Gavel §4.2.
"""

from poise.scheduler.model.job_table import JobView
from poise.scheduler.model.plan import Order, PreemptionRule, Rank, Unfitting
from poise.scheduler.model.speed import Locality


def fifo() -> Order:
    """Arrival order; the head blocks."""
    return Order(rank=_by_arrival, preemption=PreemptionRule.NEVER, unfitting=Unfitting.BLOCKS)


def fifo_skip() -> Order:
    """Arrival order; those behind may pass a gang that does not fit."""
    return Order(rank=_by_arrival, preemption=PreemptionRule.NEVER, unfitting=Unfitting.SKIPPED)


def _by_arrival(job: JobView, _previous: Rank | None, _memory: None) -> Rank:
    return Rank(job.submitted)


# Fewest GPUs first, preemptive (`smallest-first`; "sjf" in the Tiresias simulator).
#
# Order jobs by g_m, ties by submission. Knows nothing of durations; a large gang starves while small ones keep coming.
# O(log J) an event, no memory.


def smallest_first() -> Order:
    """Smallest gang first; a smaller gang preempts larger ones."""
    return Order(rank=_by_gang, preemption=PreemptionRule.BY_RANK, unfitting=Unfitting.SKIPPED)


def _by_gang(job: JobView, _previous: Rank | None, _memory: None) -> Rank:
    return Rank(float(job.gang))


# Orders by believed remaining work, preemptive (`srtf`, `srsf`, `lrtf`).
#
# R_m = seconds that job m still needs on its fastest GPU type.
# srtf   least R_m first            shortest remaining time; optimal average JCT on one GPU
# srsf   least g_m·R_m first        shortest remaining service, i.e. GPU-time (Tiresias §2.2: better for gangs)
# lrtf   most R_m first             longest remaining time; the bad end of the scale, useful as a bound
#
# While a job runs, R_m falls at its pace, so under srtf and srsf time alone never changes a decision; under lrtf it does,
# and the order is looked at again at every round. Jobs of unknown length rank as endless. O(log J) an event, no memory.


def srtf() -> Order:
    """Least remaining time first."""
    return Order(rank=_remaining_time, preemption=PreemptionRule.BY_RANK, unfitting=Unfitting.SKIPPED)


def srsf() -> Order:
    """Least remaining GPU-time first."""
    return Order(rank=_remaining_service, preemption=PreemptionRule.BY_RANK, unfitting=Unfitting.SKIPPED)


def lrtf() -> Order:
    """Most remaining time first."""
    return Order(rank=_most_remaining, preemption=PreemptionRule.BY_RANK, unfitting=Unfitting.SKIPPED)


def _remaining_time(job: JobView, _previous: Rank | None, _memory: None) -> Rank:
    return Rank(job.remaining_seconds, slope=-job.pace)


def _remaining_service(job: JobView, _previous: Rank | None, _memory: None) -> Rank:
    return Rank(job.remaining_seconds * job.gang, slope=-job.pace * job.gang)


def _most_remaining(job: JobView, _previous: Rank | None, _memory: None) -> Rank:
    return Rank(-job.remaining_seconds, slope=job.pace)


# Least attained service first (`las`).
#
# Order jobs by t_m, the seconds with GPUs so far; equal ones by submission. Needs no knowledge of durations. A running job
# falls behind as it runs, so the order is looked at again at every round (a continuous order would slice time without
# end); `tiresias` is the discretised form that preempts far less. O(log J) an event, no memory.
#
# Nuyens and Wierman, "The foreground-background queue: a survey" (2008); Tiresias (NSDI'19) §3.2.


def las() -> Order:
    """Least attained seconds first."""
    return Order(rank=_attained, preemption=PreemptionRule.BY_RANK, unfitting=Unfitting.SKIPPED)


def _attained(job: JobView, _previous: Rank | None, _memory: None) -> Rank:
    return Rank(job.attained_seconds, slope=1.0 if job.running else 0.0)


# First come, first served with gang admission (`ffdl`; Jayaram et al., FfDL, Middleware'19).
#
# Order jobs by a_m, the moment of submission; of those that arrive together the one with the largest gang g_m first, because
# it is the hardest to place. A job is admitted with all its GPUs or not at all, and the first that cannot be placed
# stops the
# queue. Admitting a job pod by pod instead lets two jobs hold a part each and wait for the other's for ever.
#
# What is placed is a learner pod, which is on one node. A gang that fits on a node is one pod; a larger one is pods of whole
# nodes. So every gang insists on the fewest nodes. Which node is the other half of FfDL, and it is the placement:
# `pack` takes
# the one with the fewest free GPUs that has enough, `spread` the one with the most. O(log J) an event, no memory.

PER_SECOND = 1_000_000
"""Arrivals that differ by less than a microsecond are together."""


def ffdl() -> Order:
    """Arrival order, the largest gang first among equals; the head blocks; every gang on the fewest nodes."""
    return Order(rank=_by_gang_arrival, preemption=PreemptionRule.NEVER, unfitting=Unfitting.BLOCKS, asks=_pods)


def _by_gang_arrival(job: JobView, _previous: Rank | None, _memory: None) -> Rank:
    return Rank(-job.gang, queue=round(job.submitted * PER_SECOND))


def _pods(_job: JobView) -> Locality:
    return Locality.PACKED
