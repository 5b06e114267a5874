"""Finish-time fairness ρ of every job, and Jain's index.

ρ_m = JCT_m ÷ T_m, where T_m is the time that m would take alone on a 1/N slice of the cluster: a slice that holds N_j/N of
every GPU type, in which a gang larger than the slice is served for a part of the time (ALGORITHMS §2.1, iso):

    T_m = steps_m / (Σ_j T_mj·N_j / C)  ·  max(1, g_m·N / C)            C GPUs in all

N is the mean number of active jobs, or of tenants with active jobs, over the life of m. steps and T are the true ones, where
the journal tells them (`History.rates_of`).

By app, all jobs of an app have its ρ: from its first submission to the end of its last job, over the time that all its work
would take on a 1/N slice, N the mean number of active apps over the life of the app:

    T_a = Σ_m steps_m g_m / (Σ_j T_mj·N_j / C)  ÷  min(Σ_m g_m, C / N),   and no less than its longest job alone would take

Of a job that its app gave up, work counts as far as GPUs were spent on it. A job that names no app is one by itself.
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
    """Among whom a slice is 1/N."""

    JOB = "job"
    TENANT = "tenant"
    APP = "app"


def rho(history: History, lives: Sequence[JobHistory], fairness: Fairness = Fairness.JOB) -> Floats:
    """ρ of these jobs, which have ended; NaN for jobs without work, and for jobs whose work is unknown."""
    if fairness is Fairness.APP:
        return _rho_by_app(history, lives)
    submitted = floats(life.submitted for life in lives)
    ended = floats(life.ended for life in lives)
    gangs = floats(life.gpus for life in lives)
    slices = np.maximum(1.0, gangs * _mean_level(_active(history, fairness), submitted, ended) / history.cluster.gpus)
    with np.errstate(divide="ignore", invalid="ignore"):
        alone = floats(life.steps for life in lives) / _mean_rates(history, lives) * slices
        return _ratio(ended - submitted, alone)


def _rho_by_app(history: History, lives: Sequence[JobHistory]) -> Floats:
    """ρ of the app of each of these jobs. An app that has not come to its end counts as if it ended with the journal."""
    apps = _groups((life for life in history.jobs.values() if life.status is not Status.REJECTED), _app)
    submitted = floats(min(life.submitted for life in members) for members in apps.values())
    ended = floats(max(_end(history, life) for life in members) for members in apps.values())
    level = _mean_level(_present(history, apps), submitted, ended)
    work = [
        [_gpu_seconds(life, speed) for life, speed in zip(members, _mean_rates(history, members).tolist(), strict=True)]
        for members in apps.values()
    ]
    gangs = [[life.gpus for life in members] for members in apps.values()]
    slices = (history.cluster.gpus / np.maximum(level, 1.0)).tolist()
    alone = floats(_alone(*each) for each in zip(work, gangs, slices, strict=True))
    by_app = _ratio(ended - submitted, alone)
    place = {name: index for index, name in enumerate(apps)}
    return by_app[[place[_app(life)] for life in lives]]


def _alone(work: Sequence[float], gangs: Sequence[int], gpus: float) -> float:
    """Seconds that jobs of one app take on so many GPUs: for all their work, or for the longest of them."""
    longest = max(each / min(gang, gpus) for each, gang in zip(work, gangs, strict=True))
    return max(sum(work) / min(sum(gangs), gpus), longest)


def _gpu_seconds(life: JobHistory, speed: float) -> float:
    """What a job needs on the cluster's mix of types; of a job that was given up, no more than was spent on it."""
    needed = life.steps * life.gpus / speed if life.steps and speed else 0.0
    return min(needed, life.gpu_seconds) if life.status is Status.CANCELLED else needed


def _app(life: JobHistory) -> tuple[str, ...]:
    """What tells apps apart: their tenants and names, or the job itself."""
    return ("job", life.id) if life.app is None else ("app", life.tenant, life.app)


def jain(values: Floats) -> float:
    """(Σx)² ÷ (n·Σx²): 1 if all are equal, 1/n if one has everything; 1 for none at all."""
    squares = len(values) * float(np.sum(values**2))
    return float(np.sum(values)) ** 2 / squares if squares else 1.0


def _ratio(took: Floats, alone: Floats) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where((alone > 0) & np.isfinite(alone), took / alone, np.nan)


def _mean_rates(history: History, lives: Iterable[JobHistory]) -> Floats:
    """Speed of each job on the cluster's mix of types."""
    cluster = history.cluster
    counts = [cluster.gpus_of(name) for name in cluster.gpu_types]
    known: dict[str | tuple[float, ...], float] = {}

    def mean(life: JobHistory) -> float:
        of = life.rates or life.kind
        if of not in known:
            rates = history.rates_of(life)
            known[of] = sum(rate * count for rate, count in zip(rates, counts, strict=True)) / cluster.gpus
        return known[of]

    return floats(mean(life) for life in lives)


def _active(history: History, fairness: Fairness) -> list[tuple[float, int]]:
    """Changes of the number of active jobs, or of tenants that have some."""
    if fairness is Fairness.JOB:
        return _spans(history, history.jobs.values())
    return _present(history, _groups(history.jobs.values(), lambda life: life.tenant))


def _groups(lives: Iterable[JobHistory], key: Callable[[JobHistory], Key]) -> dict[Key, list[JobHistory]]:
    groups: dict[Key, list[JobHistory]] = {}
    for life in lives:
        groups.setdefault(key(life), []).append(life)
    return groups


def _present(history: History, groups: Mapping[Key, list[JobHistory]]) -> list[tuple[float, int]]:
    """Changes of the number of groups of which some job is active."""
    changes: list[tuple[float, int]] = []
    for lives in groups.values():
        moments, levels = cumulated(_spans(history, lives))
        present = (levels > 0).astype(np.int64)
        changes += zip(moments.tolist(), np.diff(present, prepend=0).tolist(), strict=True)
    return changes


def _spans(history: History, lives: Iterable[JobHistory]) -> list[tuple[float, int]]:
    changes: list[tuple[float, int]] = []
    for life in lives:
        changes.append((life.submitted, 1))
        changes.append((_end(history, life), -1))
    return changes


def _end(history: History, life: JobHistory) -> float:
    return life.ended if life.ended == life.ended else history.end


def _mean_level(changes: list[tuple[float, int]], start: Floats, end: Floats) -> Floats:
    """Mean of a level over spans; over a span of no length, the level at that moment."""
    moments, levels = cumulated(changes)
    area = np.concatenate(([0.0], np.cumsum(levels[:-1] * np.diff(moments))))
    span = end - start
    at_start = np.maximum(1, levels[np.clip(np.searchsorted(moments, start, side="right") - 1, 0, None)])
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = (np.interp(end, moments, area) - np.interp(start, moments, area)) / span
    return np.where(span > 0, mean, at_start)
