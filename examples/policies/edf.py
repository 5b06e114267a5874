"""Earliest deadline first: jobs that can still make it, then jobs without a deadline, last those that cannot make it.

With d_m the deadline of job m and R_m the seconds that it still needs on its fastest GPU type, m can make it at time t
while t + R_m + margin <= d_m. On one GPU this order keeps all deadlines if any does (Liu and Layland, JACM 1973).
"""

from math import inf, isinf

from poise import policies as p


def edf(margin: float = 0.0) -> p.Order:
    """Earliest deadline first among the jobs that can still make it with `margin` seconds to spare."""

    def rank(job: p.JobView, _previous: p.Rank | None, _memory: None) -> p.Rank:
        if isinf(job.deadline):
            return p.Rank(job.submitted, section=1)
        left, falls = job.remaining_seconds, 1.0 - job.pace  # falls: what a second takes of the spare time
        if isinf(left):
            left, falls = 0.0, 1.0  # its length is not known: it may make it as long as there is time
        spare = job.deadline - margin - job.now - left
        if spare < 0:
            return p.Rank(job.deadline, section=2)
        return p.Rank(job.deadline, until=job.now + max(spare / falls, 1.0) if falls > 0 else inf)

    return p.Order(rank, p.PreemptionRule.BY_RANK, p.Unfitting.SKIPPED)


POLICY = p.Listing(
    "edf",
    p.Family.QUEUE,
    "earliest deadline first among the jobs that can still make it",
    "Liu and Layland, JACM 1973",
    (p.PolicyProperty.WORK_CONSERVING,),
    edf,
    (p.Parameter("margin", "0", "seconds to spare", p.number),),
    can=frozenset({p.Capability.DEADLINES}),
)
