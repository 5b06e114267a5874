"""One simulation: a trace under an experiment, from the choices to the summary.

`Experiment` holds the choices, `simulate` runs them: it builds the scheduler that the header describes and the simulated
world, lets `engine.loop` drive both, and reads the summary off the entries of the journal. `check` refuses beforehand
what would stop a run in its middle. The functions at the end change a trace before it is run.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from time import process_time

from poise.engine.assembly import build_scheduler
from poise.engine.journal import COMPLETE, INTERRUPTED, Header, JournalWriter
from poise.engine.loop import collector_paused, run
from poise.engine.outside import blaming
from poise.lab.analysis.fairness import Fairness
from poise.lab.analysis.history import History
from poise.lab.analysis.summary import Effort, Measured, Summary, SummaryLabels, measure, summarise
from poise.lab.simulator.outages import Drain, Outage, parse_drain, parse_outages
from poise.lab.simulator.world import ReportedSpeeds, Simulator, Truth
from poise.lab.traces.schema import Trace
from poise.scheduler.core.settings import Cadence, Settings
from poise.scheduler.model.action import JournalEntry
from poise.scheduler.model.cluster import MOST_GPUS, Cluster
from poise.scheduler.model.errors import OptionError, RequestError
from poise.scheduler.model.job import Job
from poise.scheduler.policies.catalogue import Capability, capabilities_of, with_combinators
from poise.scheduler.throughput.speeds import Speeds
from poise.scheduler.throughput.table import Throughputs, shipped

MOST_SECONDS = 1e15
"""Thirty million years: floats tell seconds apart up to here, and no trace lasts longer."""


@dataclass(frozen=True, slots=True)
class Experiment:
    """All choices of a simulation but the trace.

    truths      the world's throughputs where they differ from the believed ones
    estimates   how beliefs are made of the table: as it stands, or with what owners misreport; the world stays true
    faults      outages of nodes, as a specification or a file
    drains      planned drains of nodes, each as a specification
    until       seconds after the first submission at which the simulation stops
    """

    cluster: Cluster
    policy: str = "fifo"
    placement: str = "consolidate"
    combinators: str = ""
    settings: Settings = field(default_factory=Settings)
    throughputs: Throughputs = field(default_factory=shipped)
    truths: Throughputs | None = None
    estimates: Callable[[Throughputs, Cluster], Speeds] = Speeds
    truth: Truth = field(default_factory=Truth)
    faults: str | None = None
    drains: tuple[str, ...] = ()
    fairness: Fairness = Fairness.JOB
    seed: int = 0
    until: float = inf

    def effective_policy(self) -> str:
        """Return the policy with the preset's combinators, where they apply."""
        return with_combinators(self.policy, self.combinators)


@dataclass(frozen=True, slots=True)
class FinishedSimulation:
    """What came of a simulation."""

    summary: Summary
    history: History
    measured: Measured


def simulate(
    trace: Trace, experiment: Experiment, *, journal: Path | None = None, watch: Callable[[int], bool] = lambda _ended: True
) -> FinishedSimulation:
    """Run a trace under an experiment.

    journal   file to write the journal to
    watch     called with the number of jobs that have ended; stops the run by returning False
    """
    header = header_of(trace, experiment)
    scheduler = build_scheduler(header)
    beliefs, truths = speeds_of(experiment)
    first = trace.jobs[0].job.submitted if trace.jobs else 0.0
    reported = ReportedSpeeds.PAIRS if Capability.PAIRS in capabilities_of(experiment.policy) else ReportedSpeeds.ALONE
    world = Simulator(
        trace.jobs,
        experiment.cluster,
        beliefs=beliefs,
        truths=truths,
        truth=replace(experiment.truth, reported_speeds=reported),
        outages=outages_of(trace, experiment),
        until=first + experiment.until,
        sizes=lambda job: None if job.model is None else experiment.throughputs.size(job.model),
    )
    began = process_time()
    entries: list[JournalEntry] = []
    target = journal.open("w", encoding="utf-8", newline="\n") if journal else nullcontext()
    with target as stream, collector_paused():
        writer = JournalWriter(stream, header) if stream else None

        def record(entry: JournalEntry) -> None:
            entries.append(entry)
            if writer:
                writer.record(entry)

        with blaming(experiment.policy):
            complete, deciding = run(scheduler, world, record, lambda: watch(world.ended))
        history = History.of(entries, experiment.cluster)
        measured = measure(history, experiment.fairness)
        if writer:  # a journal without this line is one whose run was cut off
            writer.close(COMPLETE if complete else INTERRUPTED)
    effort = Effort(scheduler.decisions, process_time() - began, deciding)
    labels = SummaryLabels(experiment.policy, trace.name, str(experiment.cluster), experiment.seed, len(trace.jobs))
    rounds = None if experiment.settings.cadence is Cadence.EVENTS else experiment.settings.round
    summary = summarise(history, measured, labels, effort, round_seconds=rounds, partial=not complete)
    return FinishedSimulation(summary, history, measured)


def header_of(trace: Trace, experiment: Experiment) -> Header:
    """Return the header of the journal: the choices that the scheduler is built from."""
    policy = experiment.effective_policy()
    return Header(trace.name, experiment.cluster, policy, experiment.placement, experiment.settings, experiment.seed)


def speeds_of(experiment: Experiment) -> tuple[Speeds, Speeds]:
    """Return believed and true speeds: one object if they are the same.

    Placement `count` knows no distances, and then neither does the world.
    """
    believed, true = experiment.throughputs, experiment.truths or experiment.throughputs
    if experiment.placement == "count":
        believed, true = believed.flat(), true.flat()
    beliefs = experiment.estimates(believed, experiment.cluster)
    is_true = experiment.truths is None and experiment.estimates is Speeds
    return beliefs, beliefs if is_true else Speeds(true, experiment.cluster)


def check(trace: Trace, experiment: Experiment) -> None:
    """Raise RequestError for what would stop a run in its middle: work of unknown length, times beyond reason, outages."""
    for speeds in dict.fromkeys(speeds_of(experiment)):  # belief and truth may be the same
        work = _work(trace, speeds)
        last = trace.jobs[-1].job.submitted if trace.jobs else 0.0
        if not work + last <= MOST_SECONDS:
            amounts = f"{work:.3g} GPU-seconds of work, submitted until {last:.3g} s"
            raise RequestError(f"{trace.name}: expected at most {MOST_SECONDS:.0e} seconds, got {amounts}")
    outages_of(trace, experiment)


def outages_of(trace: Trace, experiment: Experiment) -> list[Outage | Drain]:
    """Return outages and drains; drawn outages cover four times what the work takes on the whole cluster."""
    first, last = (trace.jobs[0].job.submitted, trace.jobs[-1].job.submitted) if trace.jobs else (0.0, 0.0)
    found: list[Outage | Drain] = [parse_drain(each, experiment.cluster, start=first) for each in experiment.drains]
    if experiment.faults is None or not trace.jobs:
        return found
    horizon = last - first + 4 * _work(trace, speeds_of(experiment)[1]) / experiment.cluster.gpus
    return found + parse_outages(experiment.faults, experiment.cluster, start=first, horizon=horizon, seed=experiment.seed)


def _work(trace: Trace, speeds: Speeds) -> float:
    """Return the GPU-seconds of all jobs, each on its fastest type."""
    best: dict[str, float] = {}
    work = 0.0
    for each in trace.jobs:
        kind, estimate, steps = speeds.resolve(each.job)
        if kind not in best:
            best[kind] = estimate.best()
        if best[kind] > 0:
            work += steps / best[kind] * each.job.gpus
    return work


def scaled(trace: Trace, *, load: float, most: int | None) -> Trace:
    """Return the first `most` jobs, arriving `load` times as fast."""
    return trace[:most].scaled(load)


def elastic(trace: Trace) -> Trace:
    """Let jobs that state no bounds run on any number of GPUs up to what they ask for, or of units if they have such."""
    jobs = (
        replace(each, job=replace(each.job, min_gpus=each.job.unit))
        if each.job.min_gpus is each.job.max_gpus is None
        else each
        for each in trace.jobs
    )
    return replace(trace, jobs=tuple(jobs))


def divided(trace: Trace, per_gpu: int) -> Trace:
    """Divide the steps of jobs that do not say how they divide: into `per_gpu` micro-batches per GPU of the gang.

    A gang whose GPUs come in units stays a gang.
    """

    def divide(job: Job) -> Job:
        count = job.gpus * per_gpu
        if count > MOST_GPUS:
            raise OptionError("micro_batches", f"expected at most {MOST_GPUS:,} a job, got {count:,} for job {job.id!r}")
        return replace(job, micro_batches=count, min_gpus=None, max_gpus=None)

    def is_settled(job: Job) -> bool:
        return job.micro_batches is not None or job.unit > 1

    jobs = (each if is_settled(each.job) else replace(each, job=divide(each.job)) for each in trace.jobs)
    return replace(trace, jobs=tuple(jobs))
