"""Both halves side by side. The simulator is told when jobs arrived and what a start costs, and nothing else."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean

from poise.lab.analysis.history import History
from poise.lab.experiment import Experiment, simulate
from poise.lab.simulator.world import Truth
from poise.lab.traces.schema import Trace, TraceJob
from poise.scheduler.core.settings import Cadence, Settings
from poise.scheduler.model.job import Job
from poise.service.fidelity.live_run import FidelityJob, FidelitySetup, LiveResult, ServedBy, on_this_machine, run_live

SCATTER = tuple(each / 10 for each in range(5, 16))
"""Live starts take from half to one and a half times the average, and which job is next can depend on that. The simulator

runs with each of these factors, and its result is the mean.
"""
ORIGIN = "origin"
"""A job that ends at once: it makes the rounds of the simulation start at the time at which the live ones do."""


@dataclass(frozen=True, slots=True)
class FidelityFigures:
    """The result of one half; times in seconds."""

    makespan: float
    avg_jct: float
    preemptions: int
    jcts: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both halves. `overhead`: seconds per start, measured live and given to the simulator."""

    policy: str
    overhead: float
    live: FidelityFigures
    simulated: FidelityFigures

    @property
    def makespan_error(self) -> float:
        """Error of the simulated makespan, as a fraction of the live one."""
        return self.simulated.makespan / self.live.makespan - 1.0

    @property
    def jct_error(self) -> float:
        """Error of the simulated average completion time, as a fraction of the live one."""
        return self.simulated.avg_jct / self.live.avg_jct - 1.0

    @property
    def worst(self) -> float:
        """The larger of the two errors, whatever its sign."""
        return max(abs(self.makespan_error), abs(self.jct_error))


def mean_of(runs: Sequence[Comparison]) -> Comparison:
    """The mean of several comparisons under one policy, of workloads with as many jobs each."""
    live, simulated = _mean([run.live for run in runs]), _mean([run.simulated for run in runs])
    return Comparison(runs[0].policy, mean(run.overhead for run in runs), live, simulated)


def compare(
    jobs: Sequence[FidelityJob], setup: FidelitySetup, progress: Callable[[int], None], served: ServedBy = on_this_machine
) -> Comparison:
    """Run the workload for real, then in the simulator."""
    result = run_live(jobs, setup, progress, served)
    overhead = result.overhead(jobs, setup.cluster)
    rows = [each.job for each in result.jobs]
    live = _figures(
        [row.submitted for row in rows],
        [row.finished or 0.0 for row in rows],
        sum(each.preemptions for each in result.jobs),
    )
    runs = []
    for factor in SCATTER:
        history = _simulate(jobs, result, setup, factor * overhead)
        lives = [history.jobs[job.name] for job in jobs]
        preemptions = sum(life.preemptions for life in lives)
        runs.append(_figures([life.submitted for life in lives], [life.ended for life in lives], preemptions))
    return Comparison(setup.policy, overhead, live, _mean(runs))


def _mean(found: Sequence[FidelityFigures]) -> FidelityFigures:
    jcts = tuple(map(mean, zip(*(each.jcts for each in found), strict=True)))
    preemptions = round(mean(each.preemptions for each in found))
    return FidelityFigures(mean(each.makespan for each in found), mean(jcts), preemptions, jcts)


def _figures(submitted: Sequence[float], ended: Sequence[float], preemptions: int) -> FidelityFigures:
    jcts = tuple(end - start for start, end in zip(submitted, ended, strict=True))
    return FidelityFigures(max(ended) - min(submitted), mean(jcts), preemptions, jcts)


def _simulate(jobs: Sequence[FidelityJob], live: LiveResult, setup: FidelitySetup, overhead: float) -> History:
    trace = [TraceJob(Job(ORIGIN, 0.0, 1, duration=1e-6))]
    for job, seen in zip(jobs, live.jobs, strict=True):
        trace.append(TraceJob(Job(job.name, seen.job.submitted - live.origin, job.gpus, duration=job.duration)))
    # The world knows what a start costs; the core believes that it costs nothing, in the simulator as in the service.
    experiment = Experiment(
        setup.cluster,
        policy=setup.policy,
        placement=setup.placement,
        settings=Settings(cadence=Cadence.ROUNDS, round=setup.round),
        truth=Truth(restart_overhead=overhead),
    )
    return simulate(Trace("fidelity", tuple(trace)), experiment).history
