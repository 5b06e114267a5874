"""An instance that was run: which GPUs each job held when, its true speeds, and how far it came.

`run_instance` runs one, honestly or with the owners of some jobs lying about them; all measures of the audit read the
`InstanceRun` that comes out.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from math import isfinite
from typing import NamedTuple

from poise.lab.analysis.history import History, RunEnd
from poise.lab.audit.findings import Case
from poise.lab.audit.instances import Instance
from poise.lab.experiment import simulate, speeds_of
from poise.scheduler.model.cluster import Cluster, Holding
from poise.scheduler.model.job import Job, Status
from poise.scheduler.model.speed import Estimate, Locality, Rates
from poise.scheduler.throughput.measurements import Throughputs
from poise.scheduler.throughput.speeds import Speeds


class GpuHold(NamedTuple):
    """GPUs of one type that a job held for a time; those that it shared with another job count half.

    `gpu_type` is an index into the cluster's types.
    """

    job: str
    start: float
    end: float
    gpu_type: int
    gpus: float


@dataclass(frozen=True)
class InstanceRun:
    """The outcome of an instance. `truths`: true speeds. `end`: when the window closed, or the last job ended."""

    instance: Instance
    history: History
    truths: Speeds
    end: float

    @property
    def cluster(self) -> Cluster:
        """The cluster of the instance."""
        return self.instance.experiment.cluster

    @property
    def start(self) -> float:
        """When the first job was submitted; ask of instances that have one."""
        return self.instance.trace.jobs[0].job.submitted

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """GPUs of each type."""
        return tuple(self.cluster.gpus_of(name) for name in self.cluster.gpu_types)

    @cached_property
    def jobs(self) -> tuple[Job, ...]:
        """Jobs that were submitted, were not rejected and can truly run somewhere, in order of submission."""
        lives = self.history.jobs
        known = (each.job for each in self.instance.trace.jobs if each.job.id in lives)
        return tuple(job for job in known if lives[job.id].status is not Status.REJECTED and any(self.rates(job)))

    @cached_property
    def agents(self) -> dict[str, list[Job]]:
        """The same jobs by agent."""
        found: dict[str, list[Job]] = {}
        for job in self.jobs:
            found.setdefault(self.instance.agent(job), []).append(job)
        return found

    @cached_property
    def holds(self) -> list[GpuHold]:
        """All that jobs held. What is under way when the journal ends goes on until the end of the window."""
        gpu_types = self.cluster.gpu_types
        types = [gpu_types.index(node.gpu_type) for node in self.cluster.nodes]
        together: dict[Holding, list[tuple[str, float, float]]] = {}
        for each in self.history.runs:
            span = (each.job, each.start, self.end if each.ended is RunEnd.OPEN else min(each.end, self.end))
            together.setdefault(each.gpus, []).append(span)
        found: list[GpuHold] = []
        for holding, spans in together.items():
            gpus: dict[int, int] = {}
            for node, mask in holding:
                gpus[types[node]] = gpus.get(types[node], 0) + mask.bit_count()
            for job, start, end, part in _divided(spans):
                found += (GpuHold(job, start, end, gpu_type, count * part) for gpu_type, count in gpus.items())
        return found

    @cached_property
    def _holds_by_job(self) -> dict[str, list[GpuHold]]:
        found: dict[str, list[GpuHold]] = {}
        for hold in self.holds:
            found.setdefault(hold.job, []).append(hold)
        return found

    def held_by(self, job: str) -> Sequence[GpuHold]:
        """What a job held."""
        return self._holds_by_job.get(job, ())

    def rates(self, job: Job) -> tuple[float, ...]:
        """`rates_of` a job on this cluster."""
        return rates_of(job, self.truths, self.counts)

    def mean_rate(self, job: Job) -> float:
        """True steps per second on the cluster's mix of types."""
        return mean_rate(self.rates(job), self.counts)

    def case(self, measured: float, bound: float, text: str, **data: object) -> Case:
        """A measurement of this run, which its text and its data name first."""
        return Case(measured, bound, f"{self.instance.name}: {text}", {"instance": self.instance.name, **data})

    def rejected_any(self, jobs: Iterable[Job]) -> bool:
        """Whether one of these was submitted and rejected."""
        lives = self.history.jobs
        return any(job.id in lives and lives[job.id].status is Status.REJECTED for job in jobs)

    def ended(self, job: str) -> float:
        """When it ended, or the run did; ask of jobs that were not rejected."""
        life = self.history.jobs.get(job)
        return life.ended if life is not None and isfinite(life.ended) else self.end

    def mean_completion(self, jobs: Sequence[Job]) -> float:
        """Mean seconds from submission to the end."""
        return sum(self.ended(job.id) - job.submitted for job in jobs) / len(jobs)

    def progress(self, job: Job) -> float:
        """Steps that it truly did: its speed on what it held, less what starts cost. On shared GPUs it is half as fast."""
        rates, lost = self.rates(job), self.instance.experiment.truth.restart_overhead
        return sum(
            rates[each.gpu_type] * each.gpus / job.gpus * max(0.0, each.end - each.start - lost)
            for each in self.held_by(job.id)
        )


def rates_of(job: Job, truths: Speeds, counts: Sequence[int]) -> tuple[float, ...]:
    """True steps per second of the whole gang, packed, by type; 0 where there are never as many GPUs as it needs."""
    least = 1 if job.micro_batches is not None else job.min_gpus or job.gpus
    rows = zip(truths.estimate(job).rates, counts, strict=True)
    return tuple(row[Locality.PACKED] if least <= count else 0.0 for row, count in rows)


def mean_rate(rates: Sequence[float], counts: Sequence[int]) -> float:
    """Steps per second on a mix with `counts` GPUs of each type."""
    return sum(rate * count for rate, count in zip(rates, counts, strict=True)) / sum(counts)


def _divided(spans: list[tuple[str, float, float]]) -> Iterator[tuple[str, float, float, float]]:
    """Spans of jobs on the same GPUs, cut where another begins or ends, each with its share of the GPUs."""
    spans = sorted((span for span in spans if span[2] > span[1]), key=lambda span: span[1])
    if all(earlier[2] <= later[1] for earlier, later in pairwise(spans)):
        yield from ((*span, 1.0) for span in spans)
        return
    for start, end in pairwise(sorted({time for _, *ends in spans for time in ends})):
        here = [job for job, since, until in spans if since <= start and end <= until]
        yield from ((job, start, end, 1.0 / len(here)) for job in here)


# Lies: the scheduler believes what owners say, the world does not.


@dataclass(frozen=True, slots=True)
class Lie:
    """Factors between what an owner states and what is true.

    speeds   factor on the speed, by GPU type; 0: states that it cannot run there. 1 for types not named
    size     factor on the work
    """

    speeds: tuple[tuple[str, float], ...] = ()
    size: float = 1.0

    def stated(self, estimate: Estimate, gpu_types: tuple[str, ...]) -> Estimate:
        """What is stated about speeds; `gpu_types` are those of the cluster."""
        by_type = dict(self.speeds)
        factors = tuple(by_type.get(name.lower(), 1.0) for name in gpu_types)
        tasks = estimate.tasks
        if tasks is not None:
            seconds = (each / factor if factor else 0.0 for each, factor in zip(tasks.seconds, factors, strict=True))
            tasks = replace(tasks, seconds=tuple(seconds))
        others = tuple((gpus, _times(rates, factors)) for gpus, rates in estimate.others)
        return replace(estimate, rates=_times(estimate.rates, factors), others=others, tasks=tasks)

    def __str__(self) -> str:
        """In words, as the end of `says that it`."""
        said = [
            f"runs {factor:g} times as fast on {name} as it does" if factor else f"cannot run on {name}"
            for name, factor in self.speeds
        ]
        if self.size != 1.0:
            said.append(f"has {self.size:g} times its work")
        return " and ".join(said) or "is what it is"


def _times(rates: Rates, factors: tuple[float, ...]) -> Rates:
    return tuple((a * factor, b * factor, c * factor) for (a, b, c), factor in zip(rates, factors, strict=True))


class MisreportedSpeeds(Speeds):
    """A throughput table bound to a cluster, and what the owners of some jobs, by id, state instead."""

    def __init__(self, table: Throughputs, cluster: Cluster, lies: Mapping[str, Lie]) -> None:
        super().__init__(table, cluster)
        self._gpu_types, self._lies = cluster.gpu_types, lies

    def resolve(self, job: Job) -> tuple[str, Estimate, float]:
        """Kind, estimate and work of a job as its owner states them: a kind of its own where that is a lie."""
        kind, estimate, steps = super().resolve(job)
        lie = self._lies.get(job.id)
        if lie is None:
            return kind, estimate, steps
        return f"{kind}!{lie.speeds}", lie.stated(estimate, self._gpu_types), steps * lie.size


HONEST: Mapping[str, Lie] = {}


def run_instance(instance: Instance, lies: Mapping[str, Lie] = HONEST) -> InstanceRun:
    """Run an instance; `lies` are told by the owners of some jobs, by id."""
    experiment = instance.experiment
    if lies:
        experiment = replace(experiment, estimates=partial(MisreportedSpeeds, lies=lies))
    history = simulate(instance.trace, experiment).history
    first = instance.trace.jobs[0].job.submitted if instance.trace.jobs else 0.0
    until = first + experiment.until
    return InstanceRun(instance, history, speeds_of(experiment)[1], until if isfinite(until) else history.end)
