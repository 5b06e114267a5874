"""Discretised two-dimensional least attained service and Gittins index (`tiresias`, `tiresias-gittins`; NSDI'19).

`tiresias` is Tiresias-L of the paper. `tiresias-gittins` (below) has the same queues and another order inside each.

A_m = g_m·t_m, attained service in GPU-seconds (or t_m in seconds with `service=seconds`).
K queues with limits 0 = L_0 < L_1 < … < L_{K−1} < ∞; job m is in queue i while L_{i−1} <= A_m < L_i, and while its run has
not worked for as long as it took to start: otherwise jobs that are promoted could go on restarting for ever.
- arrival: tail of the first queue; on reaching a limit: tail of the next queue
- inside a queue: running jobs before waiting ones, each in order of arrival in that section; a preempted job goes to
  the head of the waiting ones, so jobs of one queue do not preempt each other once they run
- promotion: a job that has waited `promote` times as long as it has run goes to the tail of the first queue, and both
  counts start again from 0 (0: off)
- placement by skew: a model whose largest tensor is more than `packlimit` of its size insists on the fewest nodes
  (§3.3: such models suffer when spread); others go anywhere

The rank of a job changes only when it crosses a limit, starts or stops: no job is looked at in between. O(log J) an event.

Deliberate differences from the authors' simulator (docs/algorithms/tiresias.md): a job is demoted (L_i − A_m)/g_m seconds
from now, not by a mix of seconds and GPU-seconds; jobs that enter a section at the same time stand there by submission
(`+stable` keeps the authors' list order); times are exact (`+ticks` rounds them up to whole seconds, and counts waiting as
the authors do).
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from math import ceil, floor, inf, isnan, nan

import numpy as np

from poise.scheduler.model.arithmetic import Floats
from poise.scheduler.model.job_table import JobView
from poise.scheduler.model.plan import Order, PreemptionRule, Rank, Unfitting
from poise.scheduler.model.speed import Locality
from poise.scheduler.policies import papers
from poise.scheduler.policies.listing import Parameter, PolicyProperty, choice, number, queue_listing, rising, whole_number

RUNNING, WAITING = 0, 1
"""Sections of a queue."""


class TickLength(StrEnum):
    """How time is counted: exactly, and waiting from the last run; or by whole seconds, and waiting from the first run."""

    EXACT = "exact"
    TICKS = "ticks"


class AttainedService(StrEnum):
    """What is counted as service."""

    GPU_SECONDS = "gpu-seconds"
    SECONDS = "seconds"


Inside = Callable[[int, float], float | None]
"""(queue, attained service) -> value that waiting jobs of the queue stand by; None: first come, first served."""


def first_come(_queue: int, _attained: float) -> None:
    """First come, first served inside a queue."""


@dataclass(frozen=True, slots=True)
class Queues:
    """The rule of queues, shared with the Gittins variant.

    A rank's memory is the service at the last promotion, and the start of the first run since then, NaN before that.
    """

    limits: tuple[float, ...]
    promote: float
    service: AttainedService
    clock: TickLength = TickLength.EXACT

    def rank(self, job: JobView, previous: Rank | None, inside: Inside = first_come) -> Rank:
        """Where the job stands now."""
        if previous is None:
            return self._at_tail(job.now, 0, 0.0, (0.0, nan), inside)
        speed = job.gang if self.service is AttainedService.GPU_SECONDS else 1
        total = job.attained_seconds * speed
        promoted_at, first_run = previous.memory
        attained = total - promoted_at
        queue = max(previous.queue, bisect_right(self.limits, attained))
        if job.running:
            return self._running(job, previous, queue, attained, speed, inside)
        until, ran = inf, attained / speed
        if self.promote > 0 and queue > 0 and ran > 0:  # when it will have waited long enough to be promoted
            is_exact = self.clock is TickLength.EXACT
            until = job.waiting_since + self.promote * ran if is_exact else first_run + ran + floor(self.promote * ran)
        if job.now >= until:
            return self._at_tail(job.now, 0, 0.0, (total, nan), inside)
        value = inside(queue, attained)
        if value is None:
            stays = previous.section == WAITING and previous.queue == queue
            value = previous.value if stays else -job.now
        return Rank(value, queue, WAITING, 0.0, until, previous.memory)

    def _running(self, job: JobView, previous: Rank, queue: int, attained: float, speed: int, inside: Inside) -> Rank:
        """The rank of a running job, which gains `speed` units of service a second."""
        now = job.now
        if previous.section == RUNNING and now < previous.until:
            return previous
        if queue == previous.queue and now >= previous.until and previous.section == RUNNING:
            queue += 1  # the limit was reached just now, whatever rounding says of the service attained
        if queue > previous.queue:
            # For this one decision it competes from the tail; if it goes on it is asked for again and joins the running.
            return self._at_tail(now, queue, attained, previous.memory, inside)._replace(until=now)
        if previous.section == RUNNING:
            return previous
        until = inf
        if queue < len(self.limits):
            span = (self.limits[queue] - attained) / speed
            until = max(now + (float(ceil(span)) if self.clock is TickLength.TICKS else span), job.repaid)
        promoted_at, first_run = previous.memory
        return Rank(now, queue, RUNNING, 0.0, until, (promoted_at, now if isnan(first_run) else first_run))

    @staticmethod
    def _at_tail(now: float, queue: int, attained: float, memory: tuple[float, ...], inside: Inside) -> Rank:
        value = inside(queue, attained)
        return Rank(now if value is None else value, queue, WAITING, memory=memory)


def by_skew(packlimit: float) -> Callable[[JobView], Locality]:
    """Models of greater skew than this insist on the fewest nodes."""
    return lambda job: Locality.PACKED if job.skew is not None and job.skew > packlimit else Locality.CLUSTER


def tiresias(
    *,
    limits: tuple[float, ...] = (3250.0, 7200.0),
    promote: float = 0.0,
    packlimit: float = 0.5,
    service: AttainedService = AttainedService.GPU_SECONDS,
) -> Order:
    """Queues by attained service; first come, first served inside each."""

    def rank(queues: Queues, job: JobView, previous: Rank | None, _memory: None) -> Rank:
        return queues.rank(job, previous)

    exact, ticking = (partial(rank, Queues(limits, promote, service, clock)) for clock in TickLength)
    return Order(
        rank=exact,
        preemption=PreemptionRule.BY_RANK,
        unfitting=Unfitting.SKIPPED,
        asks=by_skew(packlimit),
        ticking=ticking,
    )


_QUEUES = (
    Parameter("limits", "3250/7200", "service at which a job moves to the next queue, in GPU-seconds", rising),
    Parameter(
        "promote", "0", "waiting of this many times its running time brings a job back to the first queue; 0: never", number
    ),
    Parameter("packlimit", "0.5", "models of greater skew (largest tensor ÷ size) insist on the fewest nodes", number),
)
_TIRESIAS = "Gu et al., Tiresias, NSDI'19"

TIRESIAS = queue_listing(
    "tiresias",
    "queues by attained GPU-time (discretised 2D-LAS)",
    _TIRESIAS,
    (PolicyProperty.NO_DURATIONS,),
    tiresias,
    (
        *_QUEUES,
        Parameter("service", "gpu-seconds", "what is counted: gpu-seconds or seconds", choice(AttainedService)),
    ),
    optimises="average completion time, without durations",
    fairness="least attained GPU-time first, in coarse queues",
    gang="whole; skewed models insist on the fewest nodes",
    verified="the authors' simulator on its 60-job trace, job by job",
    url=papers.TIRESIAS,
)


class Delta(StrEnum):
    """How far ahead the index looks."""

    LIMIT = "limit"
    BEST = "best"


@dataclass(frozen=True)
class Sizes:
    """The distribution of total service S, in GPU-seconds, as sorted samples; `fresh` ones are not yet part of it.

    It is learnt from jobs that have finished, never from the future, and taken anew whenever their number has grown by a
    tenth. With it, the job of highest index is served first:

        G_Δ(a) = P(S − a <= Δ | S > a) / E[min(S − a, Δ) | S > a]         G(a) = sup_Δ G_Δ(a)

    O(log S) per question, O(S) at a new fit, amortised O(1) per job.
    """

    samples: Floats
    sums: Floats
    fresh: tuple[float, ...] = ()

    @staticmethod
    def of(values: Floats) -> "Sizes":
        """The distribution of these values."""
        ordered = np.sort(np.asarray(values, dtype=np.float64))
        return Sizes(ordered, np.concatenate(([0.0], np.cumsum(ordered))))

    def with_sample(self, size: float) -> tuple["Sizes", bool]:
        """One more finished job; says whether the distribution itself has changed."""
        fresh = (*self.fresh, size)
        if 10 * len(fresh) < len(self.samples):
            return Sizes(self.samples, self.sums, fresh), False
        return Sizes.of(np.concatenate((self.samples, fresh))), True

    def index(self, attained: float, delta: float) -> float:
        """G_Δ(a); 0 where no sample is larger than a."""
        alive = int(np.searchsorted(self.samples, attained, side="right"))
        total = len(self.samples)
        if alive == total:
            return 0.0
        done = int(np.searchsorted(self.samples, attained + delta, side="right"))
        served = self.sums[done] - self.sums[alive] - attained * (done - alive)
        spent = served + (total - done) * delta if done < total else served
        return float((done - alive) / spent) if spent > 0 else np.inf

    def best_index(self, attained: float) -> float:
        """G(a): the supremum is reached where Δ ends at a sample."""
        alive = int(np.searchsorted(self.samples, attained, side="right"))
        total = len(self.samples)
        if alive == total:
            return 0.0
        ends = self.samples[alive:]
        done = np.searchsorted(ends, ends, side="right")
        served = self.sums[alive + done] - self.sums[alive] - attained * done
        spent = served + (total - alive - done) * (ends - attained)
        return float(np.max(done / spent))


def gittins(
    *,
    limits: tuple[float, ...] = (3250.0, 7200.0),
    promote: float = 0.0,
    packlimit: float = 0.5,
    delta: Delta = Delta.LIMIT,
    samples: int = 10,
) -> Order:
    """Queues by attained service; highest Gittins index first inside each but the last.

    Waiting jobs stand by G_Δ(a) with Δ reaching to the queue's upper limit (`delta=limit`), or by the supremum
    (`delta=best`). A job's index is taken anew when it starts, stops or changes queue. Until there are `samples` finished
    jobs the order is that of `tiresias`.
    """

    def rank(queues: Queues, job: JobView, previous: Rank | None, sizes: Sizes) -> Rank:
        def inside(queue: int, attained: float) -> float | None:
            if queue >= len(limits):
                return None
            if delta is Delta.BEST:
                return -sizes.best_index(attained)
            return -sizes.index(attained, limits[queue] - attained)

        return queues.rank(job, previous, inside if len(sizes.samples) >= samples else first_come)

    exact, ticking = (partial(rank, Queues(limits, promote, AttainedService.GPU_SECONDS, clock)) for clock in TickLength)
    return Order(
        rank=exact,
        preemption=PreemptionRule.BY_RANK,
        unfitting=Unfitting.SKIPPED,
        asks=by_skew(packlimit),
        memory=Sizes.of(np.empty(0)),
        learn=lambda sizes, job: sizes.with_sample(job.attained_service),
        ticking=ticking,
    )


TIRESIAS_GITTINS = queue_listing(
    "tiresias-gittins",
    "queues by attained GPU-time, highest Gittins index first inside each",
    _TIRESIAS,
    (PolicyProperty.NO_DURATIONS,),
    gittins,
    (
        *_QUEUES,
        Parameter("delta", "limit", "how far the index looks: limit of the queue, or best", choice(Delta)),
        Parameter("samples", "10", "finished jobs needed before the index is used", whole_number),
    ),
    optimises="average completion time, with the distribution of durations",
    fairness="highest Gittins index first inside queues by attained GPU-time",
    gang="whole; skewed models insist on the fewest nodes",
    verified="the worked indices, to 1e-4",
    url=papers.TIRESIAS,
)
