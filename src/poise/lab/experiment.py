"""Where a policy, a placement, a world and a journal are put together: the only module that knows them all."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from pathlib import Path
from time import process_time

from poise.engine.assembly import build_scheduler
from poise.engine.journal import COMPLETE, INTERRUPTED, Header, JournalWriter
from poise.engine.loop import collector_paused, run
from poise.lab.analysis.fairness import Fairness
from poise.lab.analysis.history import History
from poise.lab.analysis.summary import Effort, Measured, Summary, SummaryLabels, measure, summarise
from poise.lab.simulator.outages import outages
from poise.lab.simulator.world import Outage, Simulator, Tells, Truth
from poise.lab.traces.schema import Trace
from poise.scheduler.core.settings import Cadence, Settings
from poise.scheduler.model.action import JournalEntry
from poise.scheduler.model.cluster import MOST_GPUS, Cluster
from poise.scheduler.model.errors import RequestError
from poise.scheduler.model.job import Job
from poise.scheduler.policies.catalogue import policy_named, with_combinators
from poise.scheduler.policies.combinators import shares_gpus
from poise.scheduler.throughput.speeds import Speeds
from poise.scheduler.throughput.table import Throughputs, shipped

MOST_SECONDS = 1e15
"""Thirty million years: floats tell seconds apart up to here, and no trace lasts longer."""


@dataclass(frozen=True, slots=True)
class Experiment:
    """All choices of a simulation but the trace.

    truths   the world's throughputs where they differ from the believed ones
    estimates  how the believed table is read: as it stands, or with what owners say of their own jobs; the world stays true
    faults   outages of nodes, as a specification or a file
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
    fairness: Fairness = Fairness.JOB
    seed: int = 0
    until: float = inf

    def effective_policy(self) -> str:
        """The policy with the preset's combinators, where they apply."""
        return with_combinators(self.policy, self.combinators)


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """A simulation that ran."""

    summary: Summary
    history: History
    measured: Measured


def speeds_of(experiment: Experiment) -> tuple[Speeds, Speeds]:
    """What is believed of speeds, and the truth; placement `count` knows no distances, and then neither does the world."""
    believed, true = experiment.throughputs, experiment.truths or experiment.throughputs
    if experiment.placement == "count":
        believed, true = believed.flat(), true.flat()
    beliefs = experiment.estimates(believed, experiment.cluster)
    is_true = experiment.truths is None and experiment.estimates is Speeds
    return beliefs, beliefs if is_true else Speeds(true, experiment.cluster)


def header_of(trace: Trace, experiment: Experiment) -> Header:
    """The choices that the core is put together from."""
    return Header(
        trace.name,
        experiment.cluster,
        experiment.effective_policy(),
        experiment.placement,
        experiment.settings,
        experiment.seed,
    )


def simulate(
    trace: Trace,
    experiment: Experiment,
    *,
    journal: Path | None = None,
    watch: Callable[[int], bool] = lambda _ended: True,
) -> SimulationResult:
    """Run a trace under an experiment. `watch` is told how many jobs have ended, and stops the run by answering False."""
    header = header_of(trace, experiment)
    scheduler = build_scheduler(header)
    world = _world(trace, experiment)
    began = process_time()
    entries: list[JournalEntry] = []
    with _recording(journal, header, entries) as record, collector_paused():
        complete, deciding = run(scheduler, world, record, lambda: watch(world.ended))
        record.complete = complete
        history = History.of(entries, experiment.cluster)
        measured = measure(history, experiment.fairness)
    effort = Effort(scheduler.decisions, process_time() - began, deciding)
    labels = SummaryLabels(experiment.policy, trace.name, str(experiment.cluster), experiment.seed, len(trace.jobs))
    rounds = None if experiment.settings.cadence is Cadence.EVENTS else experiment.settings.round
    summary = summarise(history, measured, labels, effort, round_seconds=rounds, partial=not complete)
    return SimulationResult(summary, history, measured)


def check(trace: Trace, experiment: Experiment) -> None:
    """Raise RequestError for what would stop a run in its middle: work of unknown length, times beyond reason, outages."""
    for speeds in dict.fromkeys(speeds_of(experiment)):  # belief and truth may be the same
        work = _work(trace, speeds)
        last = trace.jobs[-1].job.submitted if trace.jobs else 0.0
        if not work + last <= MOST_SECONDS:
            amounts = f"{work:.3g} GPU-seconds of work, submitted until {last:.3g} s"
            raise RequestError(f"{trace.name}: expected at most {MOST_SECONDS:.0e} seconds, got {amounts}")
    _lost_nodes(trace, experiment)


def _work(trace: Trace, speeds: Speeds) -> float:
    """GPU-seconds of all jobs, each on its fastest type."""
    best: dict[str, float] = {}
    work = 0.0
    for each in trace.jobs:
        kind, estimate, steps = speeds.resolve(each.job)
        if kind not in best:
            best[kind] = estimate.best()
        if best[kind] > 0:
            work += steps / best[kind] * each.job.gpus
    return work


def _lost_nodes(trace: Trace, experiment: Experiment) -> list[Outage]:
    if experiment.faults is None or not trace.jobs:
        return []
    first, last = trace.jobs[0].job.submitted, trace.jobs[-1].job.submitted
    horizon = last - first + 4 * _work(trace, speeds_of(experiment)[1]) / experiment.cluster.gpus
    return outages(experiment.faults, experiment.cluster, start=first, horizon=horizon, seed=experiment.seed)


def _world(trace: Trace, experiment: Experiment) -> Simulator:
    beliefs, truths = speeds_of(experiment)
    first = trace.jobs[0].job.submitted if trace.jobs else 0.0
    tells = Tells.PAIRS if shares_gpus(policy_named(experiment.policy)) else Tells.SPEEDS
    return Simulator(
        trace.jobs,
        experiment.cluster,
        beliefs=beliefs,
        truths=truths,
        truth=replace(experiment.truth, tells=tells),
        outages=_lost_nodes(trace, experiment),
        until=first + experiment.until,
        sizes=partial(_size, experiment.throughputs),
    )


def _size(table: Throughputs, job: Job) -> float | None:
    """Bytes of a job's model, if the table knows it."""
    return None if job.model is None else table.size(job.model)


class Recorder:
    """Keeps every instant for the metrics, and writes it to a journal if there is one."""

    def __init__(self, entries: list[JournalEntry], writer: JournalWriter | None) -> None:
        self.complete = False
        self._keep = entries.append
        self._write = writer.record if writer else None

    def __call__(self, entry: JournalEntry) -> None:
        """Take one instant."""
        self._keep(entry)
        if self._write:
            self._write(entry)


@contextmanager
def _recording(journal: Path | None, header: Header, entries: list[JournalEntry]) -> Iterator[Recorder]:
    if journal is None:
        yield Recorder(entries, None)
        return
    with journal.open("w", encoding="utf-8", newline="\n") as stream:
        writer = JournalWriter(stream, header)
        recorder = Recorder(entries, writer)
        yield recorder
        writer.close(COMPLETE if recorder.complete else INTERRUPTED)


def scaled(trace: Trace, *, load: float, most: int | None) -> Trace:
    """The first `most` jobs, arriving `load` times as fast."""
    jobs = trace.jobs[:most]
    if load == 1.0 or not jobs:
        return replace(trace, jobs=jobs)
    first = jobs[0].job.submitted
    moved = (replace(each, job=replace(each.job, submitted=_sped_up(each.job.submitted, first, load))) for each in jobs)
    return replace(trace, jobs=tuple(moved))


def elastic(trace: Trace) -> Trace:
    """Jobs that state no bounds can do with any number of GPUs up to what they ask for."""
    jobs = (
        replace(each, job=replace(each.job, min_gpus=1)) if each.job.min_gpus is each.job.max_gpus is None else each
        for each in trace.jobs
    )
    return replace(trace, jobs=tuple(jobs))


def divided(trace: Trace, per_gpu: int) -> Trace:
    """Steps of jobs that do not say how they divide do so into this many micro-batches a GPU that the job asks for."""
    jobs = (
        replace(each, job=_divided(each.job, each.job.gpus * per_gpu)) if each.job.micro_batches is None else each
        for each in trace.jobs
    )
    return replace(trace, jobs=tuple(jobs))


def _divided(job: Job, count: int) -> Job:
    if count > MOST_GPUS:
        raise RequestError(f"--micro-batches: expected at most {MOST_GPUS:,} a job, got {count:,} for job {job.id!r}")
    return replace(job, micro_batches=count, min_gpus=None, max_gpus=None)


def _sped_up(moment: float, first: float, load: float) -> float:
    return first + (moment - first) / load
