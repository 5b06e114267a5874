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

from poise.scheduler.model.job_table import JobView
from poise.scheduler.model.plan import Order, PreemptionRule, Rank, Unfitting
from poise.scheduler.model.speed import Locality
from poise.scheduler.policies.listing import Family, Listing, PolicyProperty, Traits

_TYPES = "on its fastest free type; never moved"
_TABLE = "the Tiresias simulator's 60-job table, exactly"


def _by_arrival(job: JobView, _previous: Rank | None, _memory: None) -> Rank:
    return Rank(job.submitted)


def fifo() -> Order:
    """Arrival order; the head blocks."""
    return Order(rank=_by_arrival, preemption=PreemptionRule.NEVER, unfitting=Unfitting.BLOCKS)


FIFO = Listing(
    "fifo",
    Family.QUEUE,
    "arrival order; the head blocks",
    "the baseline of the field",
    (PolicyProperty.NO_PREEMPTION, PolicyProperty.NO_DURATIONS, PolicyProperty.IN_ORDER, PolicyProperty.NO_STARVATION),
    fifo,
    traits=Traits(
        optimises="nothing: the baseline",
        fairness="order of arrival",
        heterogeneity=_TYPES,
        gang="whole; the head waits for its gang and blocks",
        verified=f"{_TABLE}; order of starts in random worlds",
    ),
)


def fifo_skip() -> Order:
    """Arrival order; a gang that does not fit is passed over ("first job fit" of the Tiresias simulator)."""
    return Order(rank=_by_arrival, preemption=PreemptionRule.NEVER, unfitting=Unfitting.SKIPPED)


FIFO_SKIP = Listing(
    "fifo-skip",
    Family.QUEUE,
    "arrival order; those behind may pass a gang that does not fit",
    "first job fit of the Tiresias simulator, NSDI'19",
    (PolicyProperty.NO_PREEMPTION, PolicyProperty.NO_DURATIONS, PolicyProperty.WORK_CONSERVING),
    fifo_skip,
    traits=Traits(
        optimises="use of idle GPUs",
        fairness="order of arrival, as far as gangs fit",
        heterogeneity=_TYPES,
        gang="whole; one that does not fit is passed over",
        verified=f"{_TABLE}; no GPU idles that a gang could use",
    ),
)


def smallest_first() -> Order:
    """Fewest GPUs first; a smaller gang preempts larger ones."""

    def by_gang(job: JobView, _previous: Rank | None, _memory: None) -> Rank:
        return Rank(float(job.gang))

    return Order(rank=by_gang, preemption=PreemptionRule.BY_RANK, unfitting=Unfitting.SKIPPED)


SMALLEST_FIRST = Listing(
    "smallest-first",
    Family.QUEUE,
    "fewest GPUs first, preemptive",
    "sjf of the Tiresias simulator, NSDI'19",
    (PolicyProperty.NO_DURATIONS, PolicyProperty.WORK_CONSERVING),
    smallest_first,
    traits=Traits(
        optimises="average completion time where small gangs are short jobs",
        fairness="none: large gangs may starve",
        heterogeneity=_TYPES,
        gang="whole; smallest first",
        verified=_TABLE,
    ),
)

# Remaining work. A running job's R_m falls at its pace, so its rank only improves: under srtf and srsf time alone never
# changes a decision. Under lrtf it does, and the order is looked at again at every round. A job of unknown length ranks as
# endless.


def srtf() -> Order:
    """Least remaining time first."""

    def remaining_time(job: JobView, _previous: Rank | None, _memory: None) -> Rank:
        return Rank(job.remaining_seconds, slope=-job.pace)

    return Order(rank=remaining_time, preemption=PreemptionRule.BY_RANK, unfitting=Unfitting.SKIPPED)


SRTF = Listing(
    "srtf",
    Family.QUEUE,
    "least remaining time first, preemptive",
    "Schrage 1968; SRTF in Tiresias, NSDI'19",
    (PolicyProperty.WORK_CONSERVING,),
    srtf,
    traits=Traits(
        optimises="average completion time, with durations known",
        fairness="none: long jobs may starve",
        heterogeneity=_TYPES,
        gang="whole, in order of remaining time",
        verified=_TABLE,
    ),
)


def srsf() -> Order:
    """Least remaining GPU-time first."""

    def remaining_service(job: JobView, _previous: Rank | None, _memory: None) -> Rank:
        return Rank(job.remaining_seconds * job.gang, slope=-job.pace * job.gang)

    return Order(rank=remaining_service, preemption=PreemptionRule.BY_RANK, unfitting=Unfitting.SKIPPED)


SRSF = Listing(
    "srsf",
    Family.QUEUE,
    "least remaining GPU-time first, preemptive",
    "SRSF in Tiresias, NSDI'19 §2.2",
    (PolicyProperty.WORK_CONSERVING,),
    srsf,
    traits=Traits(
        optimises="average completion time, with durations known and gangs counted",
        fairness="none: large long jobs may starve",
        heterogeneity=_TYPES,
        gang="whole, in order of remaining GPU-time",
        verified=_TABLE,
    ),
)


def lrtf() -> Order:
    """Most remaining time first."""

    def most_remaining(job: JobView, _previous: Rank | None, _memory: None) -> Rank:
        return Rank(-job.remaining_seconds, slope=job.pace)

    return Order(rank=most_remaining, preemption=PreemptionRule.BY_RANK, unfitting=Unfitting.SKIPPED)


LRTF = Listing(
    "lrtf",
    Family.QUEUE,
    "most remaining time first, preemptive",
    "the opposite of SRTF, as a bound",
    (PolicyProperty.WORK_CONSERVING,),
    lrtf,
    traits=Traits(
        optimises="nothing: a bound on what order can do",
        fairness="none",
        heterogeneity=_TYPES,
        gang="whole, in order of remaining time",
        verified="an oracle of the Tiresias simulator, job by job",
    ),
)


def las() -> Order:
    """Least attained seconds first.

    A running job falls behind as it runs, so the order is looked at again at every round: a continuous order would slice
    time without end. `tiresias` is the discretised form, which preempts far less.
    """

    def attained(job: JobView, _previous: Rank | None, _memory: None) -> Rank:
        return Rank(job.attained_seconds, slope=1.0 if job.running else 0.0)

    return Order(rank=attained, preemption=PreemptionRule.BY_RANK, unfitting=Unfitting.SKIPPED)


LAS = Listing(
    "las",
    Family.QUEUE,
    "least attained seconds first, preemptive at rounds",
    "Nuyens and Wierman 2008; Tiresias, NSDI'19 §3.2",
    (PolicyProperty.NO_DURATIONS, PolicyProperty.WORK_CONSERVING),
    las,
    traits=Traits(
        optimises="average completion time, without durations",
        fairness="least attained seconds first",
        heterogeneity=_TYPES,
        gang="whole, in order of attained seconds",
        verified="an oracle of the Tiresias simulator, job by job; no GPU idles that a gang could use",
    ),
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

    def by_arrival_then_gang(job: JobView, _previous: Rank | None, _memory: None) -> Rank:
        return Rank(-job.gang, queue=round(job.submitted * PER_SECOND))

    return Order(
        rank=by_arrival_then_gang,
        preemption=PreemptionRule.NEVER,
        unfitting=Unfitting.BLOCKS,
        asks=lambda _job: Locality.PACKED,
    )


FFDL = Listing(
    "ffdl",
    Family.QUEUE,
    "arrival order, the largest gang first among equals; whole gangs on the fewest nodes; the head blocks",
    "Jayaram et al., FfDL, Middleware'19",
    (PolicyProperty.NO_PREEMPTION, PolicyProperty.NO_DURATIONS, PolicyProperty.NO_STARVATION),
    ffdl,
    traits=Traits(
        optimises="nothing: admission without deadlock",
        fairness="order of arrival, the largest gang first among equals",
        heterogeneity=_TYPES,
        gang="whole, on the fewest nodes; the head blocks; pack or spread is the placement",
        verified="pack starts the 4-GPU job that spread keeps waiting; no deadlock where pods one by one have one",
    ),
)
