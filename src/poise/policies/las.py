"""Least attained service first (`las`).

Order jobs by t_m, the seconds with GPUs so far; equal ones by submission. Needs no knowledge of durations. A running job
falls behind as it runs, so the order is looked at again at every round (a continuous order would slice time without
end); `tiresias` is the discretised form that preempts far less. O(log J) an event, no memory.

Nuyens and Wierman, "The foreground-background queue: a survey" (2008); Tiresias (NSDI'19) §3.2.
"""

from poise.model.columns import JobView
from poise.model.plan import Order, Preemption, Rank, Unfitting


def las() -> Order:
    """Least attained seconds first."""
    return Order(rank=_attained, preemption=Preemption.BY_RANK, unfitting=Unfitting.SKIPPED)


def _attained(job: JobView, _previous: Rank | None, _memory: None) -> Rank:
    return Rank(job.attained_seconds, slope=1.0 if job.running else 0.0)
