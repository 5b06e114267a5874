"""The shape of Philly's workload as published numbers: no row of the trace itself is in here.

Sizes, durations and tenants: of the 82,247 passed jobs, 2017-09-04 10:30:41 to 2017-12-22 08:02:11, in the public
table derived from the trace of Jeon et al., "Analysis of Large-Scale Multi-Tenant GPU Clusters for DNN Training
Workloads", ATC'19. Statuses, causes of failure and run times to failure: of the paper itself (75 days, 96,260 jobs).
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from poise.scheduler.model.arithmetic import Floats

JOBS = 82_247
SPAN = 9_408_690.0
"""Seconds from the first submission to the last."""
GPUS = {1: 76_627, 2: 1_818, 4: 1_870, 8: 1_643, 12: 7, 16: 199, 24: 7, 32: 67, 64: 6, 128: 3}
"""Jobs by size of the gang."""
TENANTS = (41_226, 16_091, 9_953, 7_423, 1_934, 1_511, 1_435, 1_137, 723, 422, 374, 8, 4, 3, 3)
"""Jobs by virtual cluster."""
STATUSES = {"passed": 66_696, "killed": 12_996, "failed": 16_568}
"""Jobs by how they ended; `failed` is the paper's `unsuccessful`."""


class FailureCause(NamedTuple):
    """A cause of failure: how many attempts died of it, and of how many jobs.

    minutes   that those attempts had run, at FAILURE_PROBABILITIES
    share     of the running time of all failed attempts, in percent
    """

    name: str
    trials: int
    jobs: int
    minutes: tuple[float, float, float]
    share: float


FAILURE_PROBABILITIES = (0.50, 0.90, 0.95)
CAUSES = (
    FailureCause("cpu-out-of-memory", 12_076, 2_803, (13.45, 17.73, 33.97), 6.62),
    FailureCause("incorrect-inputs", 9_690, 4_936, (1.87, 404.83, 2095.73), 30.43),
    FailureCause("semantic-error", 2_943, 2_049, (2.72, 376.0, 1436.88), 9.22),
    FailureCause("core-dump", 2_912, 1_784, (0.85, 72.75, 431.65), 3.35),
    FailureCause("invalid-memory-access", 2_602, 1_235, (1.03, 403.5, 1357.38), 3.82),
    FailureCause("model-checkpoint-error", 1_995, 948, (181.67, 3728.93, 8196.02), 21.73),
    FailureCause("cuda-failure", 1_484, 571, (1.32, 19.87, 82.17), 0.62),
    FailureCause("syntax-error", 1_132, 883, (0.58, 5.02, 12.0), 0.19),
    FailureCause("no-signature", 1_684, 698, (1.87, 28.0, 95.17), 0.42),
    FailureCause("gpu-ecc-error", 10, 10, (26.82, 671.92, 2035.02), 0.03),
    FailureCause("output-node-error", 3, 3, (0.85, 0.95, 0.95), 0.0),
    FailureCause("traceback-from-crash", 777, 271, (1.02, 894.33, 1394.07), 2.34),
    FailureCause("mpi-error", 634, 166, (1.62, 3015.27, 5143.98), 3.7),
    FailureCause("gpu-out-of-memory", 487, 261, (18.53, 353.62, 2740.28), 1.08),
    FailureCause("mpi-runtime-failure", 478, 420, (1389.48, 13778.6, 18090.88), 14.63),
    FailureCause("permission-error", 299, 151, (1.0, 8.15, 15.85), 0.07),
    FailureCause("import-error", 148, 148, (0.67, 4.58, 10.73), 0.06),
    FailureCause("job-preempted", 147, 95, (559.08, 2682.85, 5892.23), 1.66),
    FailureCause("cuda-init-failed", 141, 69, (1.08, 2.18, 4.63), 0.03),
    FailureCause("model-diverged", 84, 30, (1.48, 44.37, 76.53), 0.01),
    FailureCause("cuda-version-mismatch", 49, 49, (0.83, 1.65, 1.67), 0.0),
)

FAILED_MINUTES = 13.75e6
"""Running time of all failed attempts, which the paper does not state: the least with which every cause has its share.

The quantiles of MPI runtime failures already take their 14.63 % of it.
"""
MOST_ATTEMPTS = 5
"""Of a job, in the public job log."""


class Bucket(NamedTuple):
    """Durations of the jobs of up to `most_gpus` GPUs, in minutes: at PROBABILITIES, and on average."""

    most_gpus: float
    quantiles: tuple[float, float, float, float, float, float]
    mean: float


PROBABILITIES = (0.10, 0.25, 0.50, 0.75, 0.90, 0.99)
BUCKETS = (
    Bucket(1, (1.0, 2.0, 18.6, 45.3, 141.9, 2256.4), 138.4),
    Bucket(4, (0.2, 0.3, 6.1, 756.0, 2768.1, 12451.9), 919.8),
    Bucket(8, (3.6, 31.2, 394.7, 2886.8, 5837.9, 17527.8), 2162.9),
    Bucket(float("inf"), (1.1, 9.4, 352.3, 1737.0, 4113.8, 14855.0), 1588.8),
)

_SHORTEST = 1 / 60
"""Minutes: the log counts in whole seconds."""


def durations(gpus: NDArray[np.int64], uniform: Floats) -> Floats:
    """Return seconds of each job, from one uniform number in [0, 1) each: the inverse distribution of its bucket.

    Between published quantiles the logarithm of the duration goes straight, but between p90 and p99 as the square of
    the way: going straight there, the bucket of 2 to 4 GPUs would already have more than its mean. Above p99 it goes
    straight to an end that gives each bucket its published mean.
    """
    bucket = np.searchsorted([each.most_gpus for each in BUCKETS], gpus)
    seconds = np.empty(len(gpus))
    for index in range(len(BUCKETS)):
        there = bucket == index
        seconds[there] = 60 * np.exp(_log_minutes(uniform[there], _knots(index)))
    return seconds


@cache
def _knots(index: int) -> tuple[float, ...]:
    """Return minutes at 0, at PROBABILITIES and at 1."""
    _, quantiles, mean = BUCKETS[index]
    return _with_mean(mean, (_SHORTEST, *quantiles), _log_minutes)


def _log_minutes(uniform: Floats, knots: tuple[float, ...]) -> Floats:
    low, high = PROBABILITIES[-2:]
    way = (uniform - low) / (high - low)
    bent = np.where((way > 0) & (way < 1), low + (high - low) * way**2, uniform)
    logarithms: Floats = np.interp(bent, (0.0, *PROBABILITIES, 1.0), np.log(knots))
    return logarithms


def seconds_to_failure(cause: int, uniform: Floats) -> Floats:
    """Return seconds to failure of attempts that die of a cause (its place in CAUSES), from one uniform number each.

    They go straight from a second to the median; the logarithm goes straight between published quantiles, and above p95
    to an end that gives the cause its published share of FAILED_MINUTES, or is p95 where that is enough.
    """
    return 60 * np.exp(_log_minutes_to_failure(uniform, _failure_knots(cause)))


@cache
def _failure_knots(cause: int) -> tuple[float, ...]:
    """Return minutes at 0, at FAILURE_PROBABILITIES and at 1."""
    _, trials, _, minutes, share = CAUSES[cause]
    return _with_mean(share / 100 * FAILED_MINUTES / trials, (_SHORTEST, *minutes), _log_minutes_to_failure)


def _log_minutes_to_failure(uniform: Floats, knots: tuple[float, ...]) -> Floats:
    median = FAILURE_PROBABILITIES[0]
    early = np.log(np.interp(uniform, (0.0, median), knots[:2]))
    late = np.interp(uniform, (*FAILURE_PROBABILITIES, 1.0), np.log(knots[1:]))
    logarithms: Floats = np.where(uniform < median, early, late)
    return logarithms


def _with_mean(
    mean: float, knots: tuple[float, ...], log_minutes: Callable[[Floats, tuple[float, ...]], Floats]
) -> tuple[float, ...]:
    """Add a last knot at 1 that brings the mean nearest to this: by bisection, as the mean grows with that knot."""
    low, high = knots[-1], knots[-1] * 1000
    even = (np.arange(20_000) + 0.5) / 20_000
    while high - low > 1e-6 * low:
        end = (low + high) / 2
        low, high = (end, high) if np.exp(log_minutes(even, (*knots, end))).mean() < mean else (low, end)
    return (*knots, high)


@cache
def attempt_shares(cause: int) -> Floats:
    """Return the probabilities that a job that dies of a cause does so once, twice, and up to MOST_ATTEMPTS times.

    Each further attempt is the same number of times as likely as the one before: of all distributions with the published
    mean, attempts ÷ jobs, this one assumes least.
    """
    mean = CAUSES[cause].trials / CAUSES[cause].jobs
    low, high, counts = 0.0, 100.0, np.arange(MOST_ATTEMPTS)
    while high - low > 1e-12:
        ratio = (low + high) / 2
        weights = ratio**counts
        low, high = (ratio, high) if 1 + (weights * counts).sum() / weights.sum() < mean else (low, ratio)
    weights = low**counts
    shares: Floats = weights / weights.sum()
    return shares
