"""One run in a few numbers: the keys of `--json` (INTERFACE §2)."""

from dataclasses import asdict, dataclass
from math import ceil, isfinite

import numpy as np

from poise.lab.analysis.fairness import Fairness, jain, rho
from poise.lab.analysis.history import History, JobHistory, cumulated, floats
from poise.scheduler.model.arithmetic import Floats, dot
from poise.scheduler.model.job import Status

UNFAIR = 1.1
"""A job with a larger ρ was treated unfairly."""


@dataclass(frozen=True, slots=True)
class SummaryLabels:
    """What was run; `jobs` are all jobs of the trace, those not yet submitted when the run stopped included."""

    policy: str
    trace: str
    cluster: str
    seed: int
    jobs: int


@dataclass(frozen=True, slots=True)
class Effort:
    """What it took: decisions, and CPU seconds of the whole run and of the scheduler in it."""

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

    def document(self) -> dict[str, object]:
        """As a JSON document; a number that is beyond all floats is None there."""
        return {
            key: None if isinstance(value, float) and not isfinite(value) else value for key, value in asdict(self).items()
        }

    def repeatable(self) -> dict[str, object]:
        """The same without what differs from run to run: CPU times."""
        return {key: value for key, value in self.document().items() if not key.endswith("_seconds")}


@dataclass(frozen=True, slots=True)
class Measured:
    """The jobs that came to an end, with their completion times and ρ, in order of submission."""

    lives: list[JobHistory]
    jcts: Floats
    rhos: Floats


def measure(history: History, fairness: Fairness = Fairness.JOB) -> Measured:
    """Completion times and ρ."""
    lives = history.ran()
    jcts = floats(life.ended - life.submitted for life in lives)
    return Measured(lives, jcts, rho(history, lives, fairness) if lives else jcts)


def summarise(
    history: History,
    measured: Measured,
    labels: SummaryLabels,
    effort: Effort,
    *,
    round_seconds: float | None,
    partial: bool,
) -> Summary:
    """The numbers of one run. `round_seconds` is None where there are no rounds."""
    lives = history.jobs.values()
    rhos = measured.rhos[np.isfinite(measured.rhos)]
    first = min((life.submitted for life in lives), default=0.0)
    last = max((life.ended for life in measured.lives), default=first)
    unfinished = labels.jobs - len(measured.lives) - history.count(Status.REJECTED)
    return Summary(
        policy=labels.policy,
        trace=labels.trace,
        cluster=labels.cluster,
        seed=labels.seed,
        jobs=labels.jobs,
        finished=history.count(Status.FINISHED),
        failed=history.count(Status.FAILED),
        cancelled=history.count(Status.CANCELLED),
        rejected=history.count(Status.REJECTED),
        unfinished=unfinished,
        avg_jct=_mean(measured.jcts),
        median_jct=_quantile(measured.jcts, 0.5),
        p99_jct=_quantile(measured.jcts, 0.99),
        weighted_jct=dot(measured.jcts, floats(life.weight for life in measured.lives)),
        makespan=last - first,
        utilisation=utilisation(history, first, last),
        preemptions=sum(life.preemptions for life in lives),
        migrations=sum(life.migrations for life in lives),
        restarts=sum(life.restarts for life in lives),
        worst_rho=float(rhos.max()) if len(rhos) else None,
        mean_rho=_mean(rhos),
        unfair_fraction=_mean((rhos > UNFAIR).astype(np.float64)),
        jain=jain(1 / rhos[rhos > 0]) if len(rhos) else None,
        gpu_hours=sum(life.gpu_seconds for life in lives) / 3600,
        rounds=max(1, ceil((last - first) / round_seconds)) if round_seconds and measured.lives else 0,
        decisions=effort.decisions,
        cpu_seconds=effort.cpu_seconds,
        policy_seconds=effort.policy_seconds,
        partial=partial,
    )


def utilisation(history: History, first: float, last: float) -> float:
    """GPU-seconds held by jobs ÷ GPU-seconds there were, between two moments."""
    there = _area([(first, history.cluster.gpus), *history.live], first, last)
    return _area(history.held, first, last) / there if there > 0 else 0.0


def _area(changes: list[tuple[float, int]], first: float, last: float) -> float:
    """∫ level dt between two moments."""
    if not changes or last <= first:
        return 0.0
    moments, levels = cumulated(changes)
    edges = np.clip(np.append(moments, last), first, last)
    return float(np.sum(levels * np.diff(edges)))


def _mean(values: Floats) -> float | None:
    return float(values.mean()) if len(values) else None


def _quantile(values: Floats, part: float) -> float | None:
    value = float(np.quantile(values, part)) if len(values) else None
    return value if value is None or isfinite(value) else None
