"""The shape of Philly's workload as published numbers: no row of the trace itself is in here.

Sizes, durations and tenants: of the 82,247 passed jobs, 2017-09-04 10:30:41 to 2017-12-22 08:02:11, in the public
table derived from the trace of Jeon et al., "Analysis of Large-Scale Multi-Tenant GPU Clusters for DNN Training
Workloads", ATC'19. Statuses and causes of failure: of the paper itself (75 days, 96,260 jobs).
"""

from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from poise.model.arrays import Floats

JOBS = 82_247
SPAN = 9_408_690.0
"""Seconds from the first submission to the last."""

GPUS = {
    1: 76_627,
    2: 1_818,
    4: 1_870,
    8: 1_643,
    12: 7,
    16: 199,
    24: 7,
    32: 67,
    64: 6,
    128: 3,
}
"""Jobs by size of the gang."""

TENANTS = (41_226, 16_091, 9_953, 7_423, 1_934, 1_511, 1_435, 1_137, 723, 422, 374, 8, 4, 3, 3)
"""Jobs by virtual cluster."""

STATUSES = {"passed": 66_696, "killed": 12_996, "failed": 16_568}
"""Jobs by how they ended; `failed` is the paper's `unsuccessful`."""


class Cause(NamedTuple):
    """A cause of failure: how many attempts died of it, and of how many jobs."""

    name: str
    trials: int
    jobs: int


CAUSES = (
    Cause("cpu-out-of-memory", 12_076, 2_803),
    Cause("incorrect-inputs", 9_690, 4_936),
    Cause("semantic-error", 2_943, 2_049),
    Cause("core-dump", 2_912, 1_784),
    Cause("invalid-memory-access", 2_602, 1_235),
    Cause("model-checkpoint-error", 1_995, 948),
    Cause("cuda-failure", 1_484, 571),
    Cause("syntax-error", 1_132, 883),
    Cause("no-signature", 1_684, 698),
    Cause("gpu-ecc-error", 10, 10),
    Cause("output-node-error", 3, 3),
    Cause("traceback-from-crash", 777, 271),
    Cause("mpi-error", 634, 166),
    Cause("gpu-out-of-memory", 487, 261),
    Cause("mpi-runtime-failure", 478, 420),
    Cause("permission-error", 299, 151),
    Cause("import-error", 148, 148),
    Cause("job-preempted", 147, 95),
    Cause("cuda-init-failed", 141, 69),
    Cause("model-diverged", 84, 30),
    Cause("cuda-version-mismatch", 49, 49),
)


class Bucket(NamedTuple):
    """Durations of the jobs of up to so many GPUs, in minutes: at PROBABILITIES, and on average."""

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
    """Seconds of each job, from one uniform number in [0, 1) each: the inverse distribution of its bucket.

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
    """Minutes at 0, at PROBABILITIES and at 1; the last by bisection, as the mean grows with it."""
    _, quantiles, mean = BUCKETS[index]
    low, high = quantiles[-1], quantiles[-1] * 1000
    even = (np.arange(20_000) + 0.5) / 20_000
    while high - low > 1e-6 * low:
        end = (low + high) / 2
        knots = (_SHORTEST, *quantiles, end)
        low, high = (end, high) if np.exp(_log_minutes(even, knots)).mean() < mean else (low, end)
    return (_SHORTEST, *quantiles, high)


def _log_minutes(uniform: Floats, knots: tuple[float, ...]) -> Floats:
    low, high = PROBABILITIES[-2:]
    way = (uniform - low) / (high - low)
    bent = np.where((way > 0) & (way < 1), low + (high - low) * way**2, uniform)
    logarithms: Floats = np.interp(bent, (0.0, *PROBABILITIES, 1.0), np.log(knots))
    return logarithms
