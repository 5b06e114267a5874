"""Both halves side by side: the simulator is told when jobs arrived and what a start costs, and nothing else."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import mean

from poise.analysis.history import History
from poise.assembly import Experiment, simulate
from poise.backends.simulator.world import Truth
from poise.core.settings import Cadence, Settings
from poise.fidelity.living import Conditions, Lived, live
from poise.fidelity.workload import Work
from poise.model.job import Job
from poise.traces.schema import Trace, TraceJob

SCATTER = tuple(each / 10 for each in range(5, 16))
"""Live starts take from half to one and a half times the average, and whose turn is next can hang on that. The simulator

goes through all of it, and what it says is the mean.
"""
ORIGIN = "origin"
"""A job that is over at once: with it, rounds of the simulation are counted from the moment that live ones are."""


@dataclass(frozen=True, slots=True)
class Figures:
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
    live: Figures
    simulated: Figures

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


def compared(works: Sequence[Work], conditions: Conditions, progress: Callable[[int], None]) -> Comparison:
    """Run the workload for real, then in the simulator."""
    lived = live(works, conditions, progress)
    overhead = lived.overhead(works, conditions.cluster)
    histories = (_simulated(works, lived, conditions, factor * overhead) for factor in SCATTER)
    return Comparison(conditions.policy, overhead, _of_live(lived), _mean(_of_history(each, works) for each in histories))


def _simulated(works: Sequence[Work], lived: Lived, conditions: Conditions, overhead: float) -> History:
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


def _mean(figures: Iterable[Figures]) -> Figures:
    every = tuple(figures)
    jcts = tuple(map(mean, zip(*(each.jcts for each in every), strict=True)))
    return Figures(mean(each.makespan for each in every), mean(jcts), round(mean(each.preemptions for each in every)), jcts)


def _of_live(lived: Lived) -> Figures:
    rows = [each.job for each in lived.jobs]
    ends = [row.finished or 0.0 for row in rows]
    jcts = tuple(end - row.submitted for end, row in zip(ends, rows, strict=True))
    preemptions = sum(each.preemptions for each in lived.jobs)
    return Figures(max(ends) - min(row.submitted for row in rows), mean(jcts), preemptions, jcts)


def _of_history(history: History, works: Sequence[Work]) -> Figures:
    lives = [history.jobs[work.name] for work in works]
    jcts = tuple(life.ended - life.submitted for life in lives)
    span = max(life.ended for life in lives) - min(life.submitted for life in lives)
    return Figures(span, mean(jcts), sum(life.preemptions for life in lives), jcts)
