"""One run in a few numbers: the keys of `--json` (docs/reference/metrics.md).

`measure` takes completion times and ρ of the jobs that ended, `summarise` makes the summary of them.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from math import ceil, isfinite
from typing import Any

import numpy as np

from poise.lab.analysis.fairness import Fairness, jain, rho
from poise.lab.analysis.history import History, JobHistory, cumulated, floats
from poise.lab.columns import UnknownKeyError
from poise.scheduler.model.arithmetic import Floats, dot
from poise.scheduler.model.job import Status

UNFAIR = 1.1
"""A job with a larger ρ was treated unfairly."""


@dataclass(frozen=True, slots=True)
class SummaryLabels:
    """What was run; `jobs` counts all jobs of the trace, also those not yet submitted when the run stopped."""

    policy: str
    trace: str
    cluster: str
    seed: int
    jobs: int


@dataclass(frozen=True, slots=True)
class Effort:
    """What the run took: decisions, CPU seconds in all, and seconds in the scheduler."""

    decisions: int
    cpu_seconds: float
    policy_seconds: float


@dataclass(frozen=True, slots=True)
class Summary:
    """Times in seconds; None where there is nothing to take a mean of.

    finished, failed, cancelled, rejected, unfinished add up to jobs. Completion times are those of all jobs that came to
    an end of their own, failed and cancelled ones included.
    """

    policy: str
    trace: str
    cluster: str
    seed: int
    jobs: int
    finished: int
    failed: int
    cancelled: int
    rejected: int
    unfinished: int
    avg_jct: float | None
    median_jct: float | None
    p99_jct: float | None
    weighted_jct: float
    makespan: float
    utilisation: float
    preemptions: int
    migrations: int
    restarts: int
    worst_rho: float | None
    mean_rho: float | None
    unfair_fraction: float | None
    jain: float | None
    gpu_hours: float
    rounds: int
    decisions: int
    cpu_seconds: float
    policy_seconds: float
    partial: bool

    def keys(self) -> tuple[str, ...]:
        """Return the keys, so that `dict(summary)` works."""
        return tuple(each.name for each in fields(self))

    def __getitem__(self, key: str) -> Any:  # noqa: ANN401 - the value of a field
        if not isinstance(key, str) or key not in self.keys():
            raise UnknownKeyError("key of a summary", str(key), self.keys())
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.keys())

    def document(self) -> dict[str, object]:
        """Return a JSON document; numbers that are not finite become None."""
        return {
            key: None if isinstance(value, float) and not isfinite(value) else value for key, value in asdict(self).items()
        }

    def repeatable(self) -> dict[str, object]:
        """Return the document without what differs from run to run: CPU times."""
        return {key: value for key, value in self.document().items() if not key.endswith("_seconds")}


@dataclass(frozen=True, slots=True)
class Measured:
    """The jobs that came to an end, with their completion times and ρ, in order of submission."""

    jobs: list[JobHistory]
    jcts: Floats
    rhos: Floats


def measure(history: History, fairness: Fairness = Fairness.JOB) -> Measured:
    """Return completion times and ρ of the jobs that ended."""
    jobs = history.ended_jobs()
    jcts = floats(job.ended - job.submitted for job in jobs)
    return Measured(jobs, jcts, rho(history, jobs, fairness) if jobs else jcts)


def summarise(
    history: History,
    measured: Measured,
    labels: SummaryLabels,
    effort: Effort,
    *,
    round_seconds: float | None,
    partial: bool,
) -> Summary:
    """Return the numbers of one run. `round_seconds` is None where there are no rounds."""
    jobs = history.jobs.values()
    rhos = measured.rhos[np.isfinite(measured.rhos)]
    first = min((job.submitted for job in jobs), default=0.0)
    last = max((job.ended for job in measured.jobs), default=first)
    return Summary(
        **asdict(labels),
        finished=history.count(Status.FINISHED),
        failed=history.count(Status.FAILED),
        cancelled=history.count(Status.CANCELLED),
        rejected=history.count(Status.REJECTED),
        unfinished=labels.jobs - len(measured.jobs) - history.count(Status.REJECTED),
        avg_jct=_mean(measured.jcts),
        median_jct=_quantile(measured.jcts, 0.5),
        p99_jct=_quantile(measured.jcts, 0.99),
        weighted_jct=dot(measured.jcts, floats(job.weight for job in measured.jobs)),
        makespan=last - first,
        utilisation=utilisation(history, first, last),
        preemptions=sum(job.preemptions for job in jobs),
        migrations=sum(job.migrations for job in jobs),
        restarts=sum(job.restarts for job in jobs),
        worst_rho=float(rhos.max()) if len(rhos) else None,
        mean_rho=_mean(rhos),
        unfair_fraction=_mean((rhos > UNFAIR).astype(np.float64)),
        jain=jain(1 / rhos[rhos > 0]) if len(rhos) else None,
        gpu_hours=sum(job.gpu_seconds for job in jobs) / 3600,
        rounds=max(1, ceil((last - first) / round_seconds)) if round_seconds and measured.jobs else 0,
        **asdict(effort),
        partial=partial,
    )


def utilisation(history: History, first: float, last: float) -> float:
    """Return GPU-seconds held by jobs ÷ GPU-seconds that there were, between two times."""
    there = _area([(first, history.cluster.gpus), *history.live], first, last)
    return _area(history.held, first, last) / there if there > 0 else 0.0


def _area(changes: list[tuple[float, int]], first: float, last: float) -> float:
    """Return ∫ level dt between two times."""
    if not changes or last <= first:
        return 0.0
    times, levels = cumulated(changes)
    edges = np.clip(np.append(times, last), first, last)
    return float(np.sum(levels * np.diff(edges)))


def _mean(values: Floats) -> float | None:
    return float(values.mean()) if len(values) else None


def _quantile(values: Floats, part: float) -> float | None:
    value = float(np.quantile(values, part)) if len(values) else None
    return value if value is None or isfinite(value) else None
