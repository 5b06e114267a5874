"""Finish-time fairness ρ of every job, and Jain's index.

ρ_m = JCT_m ÷ T_m, where T_m is the time that m would take alone on a 1/N slice of the cluster: a slice that holds N_j/N of
every GPU type, in which a gang larger than the slice is served for a part of the time (docs/algorithms/gavel.md):

    T_m = steps_m / (Σ_j T_mj·N_j / C)  ·  max(1, g_m·N / C)            C GPUs in all

N is the mean number of active jobs, or of tenants with active jobs, over the lifetime of m. steps and T are the true ones,
where the journal tells them (`History.rates_of`).

By app, all jobs of an app have its ρ: from its first submission to the end of its last job, over the time that all its work
would take on a 1/N slice, N the mean number of active apps over the lifetime of the app:

    T_a = Σ_m steps_m g_m / (Σ_j T_mj·N_j / C)  ÷  min(Σ_m g_m, C / N),   and no less than its longest job alone would take

The work of a job that its app gave up counts as far as GPUs were spent on it. A job that names no app is an app by itself.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import TypeVar

import numpy as np

from poise.lab.analysis.history import History, JobHistory, cumulated, floats
from poise.scheduler.model.arithmetic import Floats
from poise.scheduler.model.job import Status

Key = TypeVar("Key")


class Fairness(StrEnum):
    """What N counts: a slice is 1/N of the cluster."""

    JOB = "job"
    TENANT = "tenant"
    APP = "app"


def rho(history: History, jobs: Sequence[JobHistory], fairness: Fairness = Fairness.JOB) -> Floats:
    """Return ρ of these jobs, which have ended; NaN for jobs without work, and for jobs whose work is unknown."""
    if fairness is Fairness.APP:
        return _rho_by_app(history, jobs)
    submitted = floats(job.submitted for job in jobs)
    ended = floats(job.ended for job in jobs)
    gangs = floats(job.gpus for job in jobs)
    if fairness is Fairness.JOB:
        active = _spans(history, history.jobs.values())
    else:
        active = _present(history, _groups(history.jobs.values(), lambda job: job.tenant))
    slices = np.maximum(1.0, gangs * _mean_level(active, submitted, ended) / history.cluster.gpus)
    with np.errstate(divide="ignore", invalid="ignore"):
        alone = floats(job.steps for job in jobs) / _mean_rates(history, jobs) * slices
        return _ratio(ended - submitted, alone)


def _rho_by_app(history: History, jobs: Sequence[JobHistory]) -> Floats:
    """Return ρ of the app of each of these jobs. An app that has not ended counts as if it ended with the journal."""
    apps = _groups((job for job in history.jobs.values() if job.status is not Status.REJECTED), _app)
    submitted = floats(min(job.submitted for job in members) for members in apps.values())
    ended = floats(max(_end(history, job) for job in members) for members in apps.values())
    level = _mean_level(_present(history, apps), submitted, ended)
    alone: list[float] = []  # seconds that each app takes on its slice: for all its work, or for its longest job
    for members, gpus in zip(apps.values(), (history.cluster.gpus / np.maximum(level, 1.0)).tolist(), strict=True):
        work: list[float] = []  # GPU-seconds of each job on the cluster's mix of types
        for job, speed in zip(members, _mean_rates(history, members).tolist(), strict=True):
            needed = job.steps * job.gpus / speed if job.steps and speed else 0.0
            work.append(min(needed, job.gpu_seconds) if job.status is Status.CANCELLED else needed)
        longest = max(each / min(job.gpus, gpus) for each, job in zip(work, members, strict=True))
        alone.append(max(sum(work) / min(sum(job.gpus for job in members), gpus), longest))
    by_app = _ratio(ended - submitted, floats(alone))
    place = {name: index for index, name in enumerate(apps)}
    return by_app[[place[_app(job)] for job in jobs]]


def _app(job: JobHistory) -> tuple[str, ...]:
    """Return what tells apps apart: tenant and name, or the job itself."""
    return ("job", job.id) if job.app is None else ("app", job.tenant, job.app)


def jain(values: Floats) -> float:
    """Return Jain's index (Σx)² ÷ (n·Σx²): 1 if all are equal, 1/n if one has everything; 1 for no values."""
    squares = len(values) * float(np.sum(values**2))
    return float(np.sum(values)) ** 2 / squares if squares else 1.0


def _ratio(took: Floats, alone: Floats) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where((alone > 0) & np.isfinite(alone), took / alone, np.nan)


def _mean_rates(history: History, jobs: Iterable[JobHistory]) -> Floats:
    """Return the speed of each job on the cluster's mix of types."""
    cluster = history.cluster
    counts = [cluster.gpus_of(name) for name in cluster.gpu_types]
    known: dict[str | tuple[float, ...], float] = {}

    def mean(job: JobHistory) -> float:
        of = job.rates or job.kind
        if of not in known:
            rates = history.rates_of(job)
            known[of] = sum(rate * count for rate, count in zip(rates, counts, strict=True)) / cluster.gpus
        return known[of]

    return floats(mean(job) for job in jobs)


def _groups(jobs: Iterable[JobHistory], key: Callable[[JobHistory], Key]) -> dict[Key, list[JobHistory]]:
    groups: dict[Key, list[JobHistory]] = {}
    for job in jobs:
        groups.setdefault(key(job), []).append(job)
    return groups


def _present(history: History, groups: Mapping[Key, list[JobHistory]]) -> list[tuple[float, int]]:
    """Return changes of the number of groups that have an active job."""
    changes: list[tuple[float, int]] = []
    for jobs in groups.values():
        times, levels = cumulated(_spans(history, jobs))
        present = (levels > 0).astype(np.int64)
        changes += zip(times.tolist(), np.diff(present, prepend=0).tolist(), strict=True)
    return changes


def _spans(history: History, jobs: Iterable[JobHistory]) -> list[tuple[float, int]]:
    """Return changes of the number of active jobs: from submission to end, or to the end of the journal."""
    changes: list[tuple[float, int]] = []
    for job in jobs:
        changes.append((job.submitted, 1))
        changes.append((_end(history, job), -1))
    return changes


def _end(history: History, job: JobHistory) -> float:
    return job.ended if job.ended == job.ended else history.end


def _mean_level(changes: list[tuple[float, int]], start: Floats, end: Floats) -> Floats:
    """Return the mean of a level over spans; over a span of no length, the level at that time."""
    times, levels = cumulated(changes)
    area = np.concatenate(([0.0], np.cumsum(levels[:-1] * np.diff(times))))
    span = end - start
    at_start = np.maximum(1, levels[np.clip(np.searchsorted(times, start, side="right") - 1, 0, None)])
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = (np.interp(end, times, area) - np.interp(start, times, area)) / span
    return np.where(span > 0, mean, at_start)
