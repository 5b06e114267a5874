"""An instance that was run: who held what when, how far every job came, and how fast it truly is."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from math import isfinite
from typing import NamedTuple

from poise.lab.analysis.history import History, RunEnd, RunInterval
from poise.lab.audit.instances import Instance
from poise.lab.experiment import simulate, speeds_of
from poise.scheduler.model.cluster import Cluster, Holding
from poise.scheduler.model.job import Job, Status
from poise.scheduler.model.micro_batches import Tasks
from poise.scheduler.model.speed import Estimate, Locality, Rates
from poise.scheduler.throughput.measurements import Throughputs
from poise.scheduler.throughput.speeds import Speeds

# What owners say of their jobs where that is not the truth: the scheduler believes it, the world does not.


@dataclass(frozen=True, slots=True)
class Lie:
    """What is said is so many times what is true.

    speeds   factor on the speed, by GPU type; 0: says that it cannot run there. 1 for types not named
    size     factor on the work
    """

    speeds: tuple[tuple[str, float], ...] = ()
    size: float = 1.0

    def told(self, estimate: Estimate, gpu_types: tuple[str, ...]) -> Estimate:
        """What is said of speeds; `gpu_types` are those of the cluster."""
        factor = dict(self.speeds)
        factors = tuple(factor.get(name.lower(), 1.0) for name in gpu_types)
        others = tuple((gpus, _times(rates, factors)) for gpus, rates in estimate.others)
        tasks = None if estimate.tasks is None else _slower(estimate.tasks, factors)
        return replace(estimate, rates=_times(estimate.rates, factors), others=others, tasks=tasks)

    def __str__(self) -> str:
        """In words, as the end of `says that it`."""
        said = [_said(name, factor) for name, factor in self.speeds]
        if self.size != 1.0:
            said.append(f"has {self.size:g} times its work")
        return " and ".join(said) or "is what it is"


def _said(gpu_type: str, factor: float) -> str:
    return f"runs {factor:g} times as fast on {gpu_type} as it does" if factor else f"cannot run on {gpu_type}"


def _times(rates: Rates, factors: tuple[float, ...]) -> Rates:
    return tuple((a * factor, b * factor, c * factor) for (a, b, c), factor in zip(rates, factors, strict=True))


def _slower(tasks: Tasks, factors: tuple[float, ...]) -> Tasks:
    seconds = tuple(each / factor if factor else 0.0 for each, factor in zip(tasks.seconds, factors, strict=True))
    return replace(tasks, seconds=seconds)


class MisreportedSpeeds(Speeds):
    """A throughput table bound to a cluster, and what the owners of some jobs, by id, say instead."""

    def __init__(self, table: Throughputs, cluster: Cluster, lies: Mapping[str, Lie]) -> None:
        super().__init__(table, cluster)
        self._gpu_types = cluster.gpu_types
        self._lies = lies

    def resolve(self, job: Job) -> tuple[str, Estimate, float]:
        """Kind, estimate and work of a job as its owner states them: a kind of its own where that is a lie."""
        kind, estimate, steps = super().resolve(job)
        lie = self._lies.get(job.id)
        if lie is None:
            return kind, estimate, steps
        return f"{kind}!{lie.speeds}", lie.told(estimate, self._gpu_types), steps * lie.size


HONEST: Mapping[str, Lie] = {}


class Spell(NamedTuple):
    """GPUs of one type that a job held from a moment to another; those that it shared with another job count half."""

    job: str
    start: float
    end: float
    gpu_type: int
    gpus: float


@dataclass(frozen=True)
class Played:
    """What became of an instance. `end`: when the window closed, or the last job ended."""

    instance: Instance
    history: History
    truths: Speeds
    end: float

    @property
    def cluster(self) -> Cluster:
        """Where it was."""
        return self.instance.experiment.cluster

    @cached_property
    def jobs(self) -> tuple[Job, ...]:
        """Those that came, were not rejected and can truly run somewhere, in order of submission."""
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
    def counts(self) -> tuple[int, ...]:
        """GPUs of each type."""
        return tuple(self.cluster.gpus_of(name) for name in self.cluster.gpu_types)

    @cached_property
    def spells(self) -> list[Spell]:
        """Who held what when."""
        return list(_spells(self.history.runs, self.cluster, self.end))

    def rates(self, job: Job) -> tuple[float, ...]:
        """`rates_of` a job here."""
        return rates_of(job, self.truths, self.counts)

    def mean_rate(self, job: Job) -> float:
        """True steps per second on the cluster's mix of types."""
        return mean_rate(self.rates(job), self.counts)

    def refused(self, jobs: Iterable[Job]) -> bool:
        """Some of these came and were rejected."""
        lives = self.history.jobs
        return any(job.id in lives and lives[job.id].status is Status.REJECTED for job in jobs)

    def ended(self, job: str) -> float:
        """When it came to its end, or the run did; ask of jobs that were not rejected."""
        life = self.history.jobs.get(job)
        return life.ended if life is not None and isfinite(life.ended) else self.end

    def progress(self, job: Job) -> float:
        """Steps that it truly did: its speed on what it held, less what starts cost. On shared GPUs it is half as fast."""
        rates, lost = self.rates(job), self.instance.experiment.truth.restart_overhead
        return sum(
            rates[each.gpu_type] * each.gpus / job.gpus * max(0.0, each.end - each.start - lost)
            for each in self.held_by(job.id)
        )

    @cached_property
    def _by_job(self) -> dict[str, list[Spell]]:
        found: dict[str, list[Spell]] = {}
        for spell in self.spells:
            found.setdefault(spell.job, []).append(spell)
        return found

    def held_by(self, job: str) -> Sequence[Spell]:
        """What a job held when."""
        return self._by_job.get(job, ())


def rates_of(job: Job, truths: Speeds, counts: Sequence[int]) -> tuple[float, ...]:
    """True steps per second of the whole gang, packed, by type; 0 where there are never as many GPUs as it needs."""
    least = 1 if job.micro_batches is not None else job.min_gpus or job.gpus
    rows = zip(truths.estimate(job).rates, counts, strict=True)
    return tuple(row[Locality.PACKED] if least <= count else 0.0 for row, count in rows)


def mean_rate(rates: Sequence[float], counts: Sequence[int]) -> float:
    """Steps per second on a mix of so many GPUs of each type."""
    return sum(rate * count for rate, count in zip(rates, counts, strict=True)) / sum(counts)


def play(instance: Instance, lies: Mapping[str, Lie] = HONEST) -> Played:
    """Run an instance; owners of some jobs, by id, lie."""
    experiment = instance.experiment
    if lies:
        experiment = replace(experiment, estimates=partial(MisreportedSpeeds, lies=lies))
    history = simulate(instance.trace, experiment).history
    first = instance.trace.jobs[0].job.submitted if instance.trace.jobs else 0.0
    until = first + experiment.until
    return Played(instance, history, speeds_of(experiment)[1], until if isfinite(until) else history.end)


def _spells(stints: list[RunInterval], cluster: Cluster, end: float) -> Iterator[Spell]:
    """Stints by type of GPU. What is under way when the journal ends goes on until the end of the window."""
    gpu_types = cluster.gpu_types
    types = [gpu_types.index(node.gpu_type) for node in cluster.nodes]
    together: dict[Holding, list[tuple[str, float, float]]] = {}
    for each in stints:
        span = (each.job, each.start, end if each.ended is RunEnd.OPEN else min(each.end, end))
        together.setdefault(each.gpus, []).append(span)
    for holding, spans in together.items():
        gpus: dict[int, int] = {}
        for node, mask in holding:
            gpus[types[node]] = gpus.get(types[node], 0) + mask.bit_count()
        for job, start, until, part in _parted(spans):
            yield from (Spell(job, start, until, gpu_type, count * part) for gpu_type, count in gpus.items())


def _parted(spans: list[tuple[str, float, float]]) -> Iterator[tuple[str, float, float, float]]:
    """Spans on the same GPUs, cut where another begins or ends; each has its part of them."""
    spans = sorted((span for span in spans if span[2] > span[1]), key=lambda span: span[1])
    if all(earlier[2] <= later[1] for earlier, later in pairwise(spans)):
        yield from ((*span, 1.0) for span in spans)
        return
    moments = sorted({moment for _, start, end in spans for moment in (start, end)})
    for start, end in pairwise(moments):
        here = [job for job, since, until in spans if since <= start and end <= until]
        yield from ((job, start, end, 1.0 / len(here)) for job in here)
