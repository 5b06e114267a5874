"""Orders of jobs that need no memory: `fifo`, `fifo-skip`, `smallest-first`, `srtf`, `srsf`, `lrtf`, `las`, `ffdl`.

Each policy is a rank for each job m, smaller first, ties by submission. With a_m the submission time, g_m the gang, t_m the
seconds with GPUs so far, and R_m the seconds that the job still needs on its fastest GPU type:

    fifo, fifo-skip   a_m            baselines of every paper: YARN-CS in Tiresias §5, FIFO in Gavel §4.2
    smallest-first    g_m            "sjf" in the Tiresias simulator; large gangs starve while small ones keep coming
    srtf              R_m            shortest remaining time; optimal average JCT on one GPU
    srsf              g_m R_m        shortest remaining service, i.e. GPU-time (Tiresias §2.2: better for gangs)
    lrtf              −R_m           longest remaining time; the bad end of the scale, useful as a bound
    las               t_m            least attained service; needs no durations
    ffdl              a_m, then −g_m gang admission of FfDL

O(log J) per event. Rules about a gang that does not fit, and about preemption, are part of each `Order`.
"""

from collections.abc import Callable

from poise.scheduler.model.job_table import JobView
from poise.scheduler.model.plan import Order, PreemptionRule, Rank, Unfitting
from poise.scheduler.model.speed import Locality
from poise.scheduler.policies import papers
from poise.scheduler.policies.listing import PolicyProperty, queue_listing

_TABLE = "the Tiresias simulator's 60-job table, exactly"


def _by_arrival(job: JobView, _previous: Rank | None, _memory: None) -> Rank:
    return Rank(job.submitted)


def _preemptive(rank: Callable[[JobView, Rank | None, None], Rank]) -> Callable[[], Order]:
    """Preempt by rank; pass over a gang that does not fit."""
    return lambda: Order(rank=rank, preemption=PreemptionRule.BY_RANK, unfitting=Unfitting.SKIPPED)


FIFO = queue_listing(
    "fifo",
    "arrival order; the head blocks",
    "the baseline of the field",
    (PolicyProperty.NO_PREEMPTION, PolicyProperty.NO_DURATIONS, PolicyProperty.IN_ORDER, PolicyProperty.NO_STARVATION),
    lambda: Order(rank=_by_arrival, preemption=PreemptionRule.NEVER, unfitting=Unfitting.BLOCKS),
    optimises="nothing: the baseline",
    fairness="order of arrival",
    gang="whole; the head waits for its gang and blocks",
    verified=f"{_TABLE}; order of starts in random worlds",
)

FIFO_SKIP = queue_listing(
    "fifo-skip",
    "arrival order; those behind may pass a gang that does not fit",
    "first job fit of the Tiresias simulator, NSDI'19",
    (PolicyProperty.NO_PREEMPTION, PolicyProperty.NO_DURATIONS, PolicyProperty.WORK_CONSERVING),
    lambda: Order(rank=_by_arrival, preemption=PreemptionRule.NEVER, unfitting=Unfitting.SKIPPED),
    optimises="use of idle GPUs",
    fairness="order of arrival, as far as gangs fit",
    gang="whole; one that does not fit is passed over",
    verified=f"{_TABLE}; no GPU idles that a gang could use",
    url=papers.TIRESIAS,
)

SMALLEST_FIRST = queue_listing(
    "smallest-first",
    "fewest GPUs first, preemptive",
    "sjf of the Tiresias simulator, NSDI'19",
    (PolicyProperty.NO_DURATIONS, PolicyProperty.WORK_CONSERVING),
    _preemptive(lambda job, _previous, _memory: Rank(float(job.gang))),
    optimises="average completion time where small gangs are short jobs",
    fairness="none: large gangs may starve",
    gang="whole; smallest first",
    verified=_TABLE,
    url=papers.TIRESIAS,
)

# Remaining work. A running job's R_m falls at its pace, so its rank only improves: under srtf and srsf time alone never
# changes a decision. Under lrtf it does, and the order is looked at again at every round. A job of unknown length ranks as
# endless.

SRTF = queue_listing(
    "srtf",
    "least remaining time first, preemptive",
    "Schrage 1968; SRTF in Tiresias, NSDI'19",
    (PolicyProperty.WORK_CONSERVING,),
    _preemptive(lambda job, _previous, _memory: Rank(job.remaining_seconds, slope=-job.pace)),
    optimises="average completion time, with durations known",
    fairness="none: long jobs may starve",
    gang="whole, in order of remaining time",
    verified=_TABLE,
    url=papers.SCHRAGE,
)

SRSF = queue_listing(
    "srsf",
    "least remaining GPU-time first, preemptive",
    "SRSF in Tiresias, NSDI'19 §2.2",
    (PolicyProperty.WORK_CONSERVING,),
    _preemptive(lambda job, _previous, _memory: Rank(job.remaining_seconds * job.gang, slope=-job.pace * job.gang)),
    optimises="average completion time, with durations known and gangs counted",
    fairness="none: large long jobs may starve",
    gang="whole, in order of remaining GPU-time",
    verified=_TABLE,
    url=papers.TIRESIAS,
)

LRTF = queue_listing(
    "lrtf",
    "most remaining time first, preemptive",
    "the opposite of SRTF, as a bound",
    (PolicyProperty.WORK_CONSERVING,),
    _preemptive(lambda job, _previous, _memory: Rank(-job.remaining_seconds, slope=job.pace)),
    optimises="nothing: a bound on what order can do",
    fairness="none",
    gang="whole, in order of remaining time",
    verified="an oracle of the Tiresias simulator, job by job",
)

# A running job falls behind under las as it runs, so the order is looked at again at every round: a continuous order would
# slice time without end. `tiresias` is the discretised form, which preempts far less.

LAS = queue_listing(
    "las",
    "least attained seconds first, preemptive at rounds",
    "Nuyens and Wierman 2008; Tiresias, NSDI'19 §3.2",
    (PolicyProperty.NO_DURATIONS, PolicyProperty.WORK_CONSERVING),
    _preemptive(lambda job, _previous, _memory: Rank(job.attained_seconds, slope=1.0 if job.running else 0.0)),
    optimises="average completion time, without durations",
    fairness="least attained seconds first",
    gang="whole, in order of attained seconds",
    verified="an oracle of the Tiresias simulator, job by job; no GPU idles that a gang could use",
    url=papers.TIRESIAS,
)

PER_SECOND = 1_000_000
"""Arrivals that differ by less than a microsecond count as simultaneous."""


def ffdl() -> Order:
    """Arrival order, the largest gang first among simultaneous arrivals; the head blocks; every gang on the fewest nodes.

    The largest gang is the hardest to place. A job is admitted with all its GPUs or not at all: admitting it pod by pod
    lets two jobs hold a part each and wait for the other's part for ever. A learner pod is on one node; a gang that fits
    on a node is one pod, a larger one is pods of whole nodes, so every gang insists on the fewest nodes. Which node is the
    other half of FfDL, and it is the placement: `pack` takes the fullest node that has enough free GPUs, `spread` the
    emptiest.
    """
    return Order(
        rank=lambda job, _previous, _memory: Rank(-job.gang, queue=round(job.submitted * PER_SECOND)),
        preemption=PreemptionRule.NEVER,
        unfitting=Unfitting.BLOCKS,
        asks=lambda _job: Locality.PACKED,
    )


FFDL = queue_listing(
    "ffdl",
    "arrival order, the largest gang first among equals; whole gangs on the fewest nodes; the head blocks",
    "Jayaram et al., FfDL, Middleware'19",
    (PolicyProperty.NO_PREEMPTION, PolicyProperty.NO_DURATIONS, PolicyProperty.NO_STARVATION),
    ffdl,
    optimises="nothing: admission without deadlock",
    fairness="order of arrival, the largest gang first among equals",
    gang="whole, on the fewest nodes; the head blocks; pack or spread is the placement",
    verified="pack starts the 4-GPU job that spread keeps waiting; no deadlock where pods one by one have one",
    url=papers.FFDL,
)
