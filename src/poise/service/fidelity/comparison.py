"""Both halves side by side: the simulator is told when jobs arrived and what a start costs, and nothing else."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import mean

from poise.lab.analysis.history import History
from poise.lab.experiment import Experiment, simulate
from poise.lab.simulator.world import Truth
from poise.lab.traces.schema import Trace, TraceJob
from poise.scheduler.core.settings import Cadence, Settings
from poise.scheduler.model.job import Job
from poise.service.fidelity.live_run import FidelityJob, LiveConditions, Lived, live

SCATTER = tuple(each / 10 for each in range(5, 16))
"""Live starts take from half to one and a half times the average, and whose turn is next can hang on that. The simulator

goes through all of it, and what it says is the mean.
"""
ORIGIN = "origin"
"""A job that is over at once: with it, rounds of the simulation are counted from the moment that live ones are."""


@dataclass(frozen=True, slots=True)
class FidelityFigures:
    """Seconds, and a count, of one half."""

    makespan: float
    avg_jct: float
    preemptions: int
    jcts: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both halves. `overhead`: seconds a start, measured live and told the simulator."""

    policy: str
    overhead: float
    live: FidelityFigures
    simulated: FidelityFigures

    @property
    def makespan_error(self) -> float:
        """Of the simulated makespan, as a fraction of the live one."""
        return self.simulated.makespan / self.live.makespan - 1.0

    @property
    def jct_error(self) -> float:
        """Of the simulated average completion time, as a fraction of the live one."""
        return self.simulated.avg_jct / self.live.avg_jct - 1.0

    @property
    def worst(self) -> float:
        """The larger of the two, whatever its sign."""
        return max(abs(self.makespan_error), abs(self.jct_error))


def compared(works: Sequence[FidelityJob], conditions: LiveConditions, progress: Callable[[int], None]) -> Comparison:
    """Run the workload for real, then in the simulator."""
    lived = live(works, conditions, progress)
    overhead = lived.overhead(works, conditions.cluster)
    histories = (_simulated(works, lived, conditions, factor * overhead) for factor in SCATTER)
    return Comparison(conditions.policy, overhead, _of_live(lived), _mean(_of_history(each, works) for each in histories))


def _simulated(works: Sequence[FidelityJob], lived: Lived, conditions: LiveConditions, overhead: float) -> History:
    moments = [each.job.submitted - lived.origin for each in lived.jobs]
    jobs = [TraceJob(Job(ORIGIN, 0.0, 1, duration=1e-6))]
    jobs += (
        TraceJob(Job(work.name, at, work.gpus, duration=work.duration)) for work, at in zip(works, moments, strict=True)
    )
    # The world knows what a start costs; the core believes that it costs nothing, in the simulator as in the service.
    settings = Settings(cadence=Cadence.ROUNDS, round=conditions.round)
    experiment = Experiment(
        conditions.cluster,
        policy=conditions.policy,
        placement=conditions.placement,
        settings=settings,
        truth=Truth(restart_overhead=overhead),
    )
    return simulate(Trace("fidelity", tuple(jobs)), experiment).history


def _mean(figures: Iterable[FidelityFigures]) -> FidelityFigures:
    every = tuple(figures)
    jcts = tuple(map(mean, zip(*(each.jcts for each in every), strict=True)))
    return FidelityFigures(
        mean(each.makespan for each in every), mean(jcts), round(mean(each.preemptions for each in every)), jcts
    )


def _of_live(lived: Lived) -> FidelityFigures:
    rows = [each.job for each in lived.jobs]
    ends = [row.finished or 0.0 for row in rows]
    jcts = tuple(end - row.submitted for end, row in zip(ends, rows, strict=True))
    preemptions = sum(each.preemptions for each in lived.jobs)
    return FidelityFigures(max(ends) - min(row.submitted for row in rows), mean(jcts), preemptions, jcts)


def _of_history(history: History, works: Sequence[FidelityJob]) -> FidelityFigures:
    lives = [history.jobs[work.name] for work in works]
    jcts = tuple(life.ended - life.submitted for life in lives)
    span = max(life.ended for life in lives) - min(life.submitted for life in lives)
    return FidelityFigures(span, mean(jcts), sum(life.preemptions for life in lives), jcts)
