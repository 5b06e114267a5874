"""Finish-time fairness ρ of every job, and Jain's index.

ρ_m = JCT_m ÷ T_m, where T_m is the time that m would take alone on a 1/N slice of the cluster: a slice that holds N_j/N of
every GPU type, in which a gang larger than the slice is served for a part of the time (ALGORITHMS §2.1, iso):

    T_m = steps_m / (Σ_j T_mj·N_j / C)  ·  max(1, g_m·N / C)            C GPUs in all

N is the mean number of active jobs, or of tenants with active jobs, over the life of m.
"""

from collections.abc import Iterable, Sequence
from enum import StrEnum

import numpy as np

from poise.analysis.history import History, Life, cumulated, floats
from poise.model.arrays import Floats


class Fairness(StrEnum):
    """Among whom a slice is 1/N."""

    JOB = "job"
    TENANT = "tenant"


def rho(history: History, lives: Sequence[Life], fairness: Fairness = Fairness.JOB) -> Floats:
    """ρ of these jobs, which have ended; NaN for jobs without work."""
    submitted = floats(life.submitted for life in lives)
    ended = floats(life.ended for life in lives)
    gangs = floats(life.gpus for life in lives)
    slices = np.maximum(1.0, gangs * _mean_level(_active(history, fairness), submitted, ended) / history.cluster.gpus)
    speeds = {kind: _mean_rate(history, rates) for kind, rates in history.rates.items()}
    alone = floats(life.steps / speeds[life.kind] for life in lives) * slices
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(alone > 0, (ended - submitted) / alone, np.nan)


def jain(values: Floats) -> float:
    """(Σx)² ÷ (n·Σx²): 1 if all are equal, 1/n if one has everything; 1 for none at all."""
    squares = len(values) * float(np.sum(values**2))
    return float(np.sum(values)) ** 2 / squares if squares else 1.0


def _mean_rate(history: History, rates: tuple[float, ...]) -> float:
    """Speed on the cluster's mix of types."""
    cluster = history.cluster
    counts = [cluster.gpus_of(name) for name in cluster.gpu_types]
    return sum(rate * count for rate, count in zip(rates, counts, strict=True)) / cluster.gpus


def _active(history: History, fairness: Fairness) -> list[tuple[float, int]]:
    """Changes of the number of active jobs, or of tenants that have some."""
    if fairness is Fairness.JOB:
        return _spans(history, history.jobs.values())
    tenants: dict[str, list[Life]] = {}
    for life in history.jobs.values():
        tenants.setdefault(life.tenant, []).append(life)
    changes: list[tuple[float, int]] = []
    for lives in tenants.values():
        moments, levels = cumulated(_spans(history, lives))
        present = (levels > 0).astype(np.int64)
        changes += zip(moments.tolist(), np.diff(present, prepend=0).tolist(), strict=True)
    return changes


def _spans(history: History, lives: Iterable[Life]) -> list[tuple[float, int]]:
    changes: list[tuple[float, int]] = []
    for life in lives:
        changes.append((life.submitted, 1))
        changes.append((life.ended if life.ended == life.ended else history.end, -1))
    return changes


def _mean_level(changes: list[tuple[float, int]], start: Floats, end: Floats) -> Floats:
    """Mean of a level over spans; over a span of no length, the level at that moment."""
    moments, levels = cumulated(changes)
    area = np.concatenate(([0.0], np.cumsum(levels[:-1] * np.diff(moments))))
    span = end - start
    at_start = np.maximum(1, levels[np.clip(np.searchsorted(moments, start, side="right") - 1, 0, None)])
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = (np.interp(end, moments, area) - np.interp(start, moments, area)) / span
    return np.where(span > 0, mean, at_start)
