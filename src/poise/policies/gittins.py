"""Discretised two-dimensional Gittins index (`tiresias-gittins`; Tiresias-G of NSDI'19).

S is the GPU-time of a whole job. With its distribution known, serve the job of highest index first:

    G_Δ(a) = P(S − a <= Δ | S > a) / E[min(S − a, Δ) | S > a]         G(a) = sup_Δ G_Δ(a)

Queues and limits are those of `tiresias`; inside a queue, waiting jobs stand by G_Δ(a) with Δ reaching to the queue's upper
limit (`delta=limit`), or by the supremum (`delta=best`); the last queue is first come, first served. A job's index is
taken anew when it starts, stops or changes queue.

The distribution is learnt from the jobs that have finished, never from the future; it is taken anew whenever their number
has grown by a tenth, and until there are `samples` of them the order is that of `tiresias`.
O(log S) a question, O(S) at a new fit, amortised O(1) a job.
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import partial

import numpy as np

from poise.model.arrays import Floats
from poise.model.columns import JobView
from poise.model.plan import Order, Preemption, Rank, Unfitting
from poise.policies.tiresias import Clock, Queues, Service, by_skew, first_come


class Delta(StrEnum):
    """How far ahead the index looks."""

    LIMIT = "limit"
    BEST = "best"


@dataclass(frozen=True)
class Sizes:
    """The distribution of total service, as sorted samples. `fresh` ones are not yet part of it."""

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
    """Queues by attained service; highest Gittins index first inside each but the last."""

    def rank(queues: Queues, job: JobView, previous: Rank | None, sizes: Sizes) -> Rank:
        def inside(queue: int, attained: float) -> float | None:
            if queue >= len(limits):
                return None
            if delta is Delta.BEST:
                return -sizes.best_index(attained)
            return -sizes.index(attained, limits[queue] - attained)

        return queues.rank(job, previous, inside if len(sizes.samples) >= samples else first_come)

    exact, ticking = (partial(rank, Queues(limits, promote, Service.GPU_SECONDS, clock)) for clock in Clock)
    return Order(
        rank=exact,
        preemption=Preemption.BY_RANK,
        unfitting=Unfitting.SKIPPED,
        asks=by_skew(packlimit),
        memory=Sizes.of(np.empty(0)),
        learn=_learn,
        ticking=ticking,
    )


def _learn(sizes: Sizes, job: JobView) -> tuple[Sizes, bool]:
    return sizes.with_sample(job.attained_service)
