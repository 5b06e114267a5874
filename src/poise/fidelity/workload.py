"""The workload: a few dozen small jobs, drawn from a seed."""

from dataclasses import dataclass

import numpy as np

from poise.model.cluster import Cluster
from poise.model.job import Job
from poise.throughput.speeds import Speeds
from poise.throughput.table import shipped

STEP = 0.1
"""Seconds of a step on the reference type."""


@dataclass(frozen=True, slots=True)
class Work:
    """One job: when it arrives (seconds from the start), its gang, and its steps."""

    name: str
    arrives: float
    gpus: int
    steps: int

    @property
    def duration(self) -> float:
        """Seconds on the reference type."""
        return self.steps * STEP


def drawn(jobs: int, seed: int, cluster: Cluster, load: float) -> list[Work]:
    """Jobs that arrive so fast that together they ask for `load` times what the cluster has.

    Durations are log-normal with a median of 6 s, between 1.5 s and 30 s; a quarter of the jobs want two GPUs.
    """
    stream = np.random.default_rng(seed)
    durations = np.clip(stream.lognormal(np.log(6.0), 0.7, jobs), 1.5, 30.0)
    gpus = np.where(stream.random(jobs) < 0.25, 2, 1)
    speed = relative_speeds(cluster)
    capacity = sum(cluster.gpus_of(name) * speed[name] for name in cluster.gpu_types)
    span = float((durations * gpus).sum()) / capacity / load
    arrivals = np.sort(stream.random(jobs)) * span
    drawn_jobs = zip(arrivals - arrivals[0], gpus, durations, strict=True)
    return [
        Work(f"job-{place}", float(at), int(gang), max(1, round(float(seconds) / STEP)))
        for place, (at, gang, seconds) in enumerate(drawn_jobs)
    ]


def relative_speeds(cluster: Cluster) -> dict[str, float]:
    """Speed of each GPU type for a job that nobody has measured, as it is believed; the trainer keeps to it."""
    _, estimate, _ = Speeds(shipped(), cluster).resolve(Job("any", 0.0, 1, duration=1.0))
    return {name: rates[0] for name, rates in zip(cluster.gpu_types, estimate.rates, strict=True)}
