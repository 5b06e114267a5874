"""Instances: small clusters with a few agents, drawn from a seed, on which properties are measured.

Each agent is a tenant with jobs of a model of its own, so that policies that look at jobs, at apps or at tenants all deal
with the same agents. Times are counted in turns: a turn is the longest time for which a policy gives out GPUs before it
looks again, and all that a policy can do about time is to deal out turns. With the usual settings it takes 720 s: two rounds
of 360 s in a row, which a job may have under shares (`Settings.patience`); leases take 600 s and less.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from math import exp, inf, log

from poise.lab.experiment import Experiment
from poise.lab.traces.schema import Trace, TraceJob
from poise.scheduler.core.settings import Settings
from poise.scheduler.model.cluster import parse_cluster
from poise.scheduler.model.job import Job
from poise.scheduler.model.speed import Locality
from poise.scheduler.throughput.measurements import Alone, JobClass, Throughputs

LEASE = 600.0
"""Seconds of the longest lease, interval or time slice that a policy of the catalogue has by default."""
WINDOW = 60
"""Turns that a standing instance is watched for: one turn more or less is a small part of any share."""
SPEEDUPS = (1.2, 6.5)
"""How much faster the fastest type is than the slowest, from model to model (Gandiva_fair, EuroSys'20, Table 1)."""
LOAD = 1.05
"""GPUs that a crowded stream asks for ÷ GPUs of the cluster."""
CROWDED_TURNS = 300
"""Turns that such a stream lasts, before `starvation` cuts it to what it needs."""


def turn_of(settings: Settings) -> float:
    """Seconds of a turn under these settings: the longest time for which a policy gives out GPUs."""
    return max(LEASE, settings.round * (1.0 + settings.patience))


class AgentKind(Enum):
    """Whose shares are measured."""

    TENANTS = auto()
    JOBS = auto()


@dataclass(frozen=True, slots=True)
class Instance:
    """A trace, the experiment that it is run with, and whose shares are measured.

    turn      seconds
    marked    ids of the jobs to watch for starvation; empty: all of them
    """

    trace: Trace
    experiment: Experiment
    turn: float
    agent_kind: AgentKind = AgentKind.TENANTS
    marked: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name for people."""
        return self.trace.name

    def agent(self, job: Job) -> str:
        """The agent that a job belongs to."""
        return job.tenant if self.agent_kind is AgentKind.TENANTS else job.id


@dataclass(frozen=True, slots=True)
class InstanceShape:
    """A cluster and a number of agents, each with `jobs` jobs of `gang` GPUs."""

    name: str
    cluster: str
    agents: int
    jobs: int = 1
    gang: int = 1


STANDING = (
    InstanceShape("six jobs", "v100:2@2,k80:2@2", 6),
    InstanceShape("four tenants of four jobs", "v100:4,k80:4", 4, jobs=4),
    InstanceShape("six gangs of two", "v100:4@2,k80:4@2", 6, gang=2),
)
"""Overloaded from the start. The first two are those in which agents lie."""
STREAMS = (
    InstanceShape("long jobs in a stream", "v100:2@2,k80:2@2", 4),
    InstanceShape("long jobs, three types", "v100:2@2,p100:1@1,k80:2@2", 5),
)
GANG_STREAM = InstanceShape("gangs of one and two in a stream", "v100:4@2,k80:4@2", 6, gang=2)
CROWDED = InstanceShape("a crowded stream", "v100:2@2,k80:2@2", 4)


@dataclass(frozen=True, slots=True)
class InstanceGenerator:
    """Draws instances from a seed; they take policy and settings from the experiment. `turn`: seconds."""

    experiment: Experiment
    turn: float
    seed: int

    def standing(self, shape: InstanceShape) -> Instance:
        """All jobs are submitted at the start, and none ends before the window closes."""
        rng = self._rng("standing", shape)
        agents = _AgentSpeeds(rng, shape, shape.agents)
        window = WINDOW * self.turn
        jobs = [
            agents.job(agent, 0.0, window * rng.uniform(1.5, 3.0) * agents.fastest(agent), shape.gang, f"-{number}")
            for agent in range(shape.agents)
            for number in range(shape.jobs)
        ]
        return self._instance(shape, agents, jobs, until=window)

    def batch(self, shape: InstanceShape) -> Instance:
        """All jobs are submitted at the start, and all run to their end."""
        rng = self._rng("batch", shape)
        agents = _AgentSpeeds(rng, shape, shape.agents)
        jobs = [
            agents.job(agent, 0.0, self._turns(rng, 20, 40) / shape.jobs * agents.mean(agent), shape.gang, f"-{number}")
            for agent in range(shape.agents)
            for number in range(shape.jobs)
        ]
        return self._instance(shape, agents, jobs)

    def stream(self, shape: InstanceShape) -> Instance:
        """Long jobs from the start, and a stream of shorter ones that asks for four fifths of the GPUs."""
        rng = self._rng("stream", shape)
        shorts = 4 * shape.agents
        agents = _AgentSpeeds(rng, shape, shape.agents + shorts)
        gangs = [1 + index % shape.gang for index in range(shape.agents + shorts)]
        work = [self._turns(rng, 60, 80) for _ in range(shape.agents)] + [self._turns(rng, 16, 24) for _ in range(shorts)]
        jobs = [agents.job(index, 0.0, work[index] * agents.mean(index), gangs[index]) for index in range(shape.agents)]
        moment = 0.0
        for index in range(shape.agents, shape.agents + shorts):
            jobs.append(agents.job(index, moment, work[index] * agents.mean(index), gangs[index]))
            moment += work[index] * gangs[index] / (0.8 * agents.gpus) * rng.uniform(0.5, 1.5)
        return self._instance(shape, agents, jobs)

    def crowded(self, shape: InstanceShape) -> Instance:
        """A stream of short jobs that slightly overloads the cluster, and three jobs that are easily passed over.

        Those are a long one, a gang as large as a type allows, and one that can use the slowest type only. All short jobs
        are of one model, so that no policy gains throughput by giving each the right type.
        """
        rng = self._rng("crowded", shape)
        agents = _AgentSpeeds(rng, shape, shape.agents)
        long, wide, narrow, short = range(4)
        victims = [
            agents.job(long, self.turn, self._turns(rng, 5, 7) * agents.mean(long), 1),
            agents.job(wide, self.turn, self._turns(rng, 2, 4) * agents.mean(wide), max(agents.counts)),
            replace(
                agents.job(narrow, self.turn, self._turns(rng, 2, 4) * agents.mean(narrow, -1), 1),
                gpu_types=agents.types[-1:],
            ),
        ]
        jobs: list[Job] = []
        moment = 0.0
        while moment < CROWDED_TURNS * self.turn:
            work, name = self._turns(rng, 1, 2), f"short-{len(jobs)}"
            jobs.append(replace(agents.job(short, moment, work * agents.mean(short), 1), id=name, tenant=name))
            moment += work / (LOAD * agents.gpus) if len(jobs) > agents.gpus else 0.0
        drawn = self._instance(shape, agents, sorted((*jobs, *victims), key=lambda job: job.submitted))
        return replace(drawn, marked=tuple(job.id for job in victims))

    def _turns(self, rng: random.Random, least: float, most: float) -> float:
        """A time of `least` to `most` turns, in seconds."""
        return rng.uniform(least, most) * self.turn

    def _rng(self, kind: str, shape: InstanceShape) -> random.Random:
        return random.Random(f"{self.seed}/{kind}/{shape.name}")

    def _instance(self, shape: InstanceShape, agents: "_AgentSpeeds", jobs: Sequence[Job], until: float = inf) -> Instance:
        trace = Trace(f"{shape.name}, seed {self.seed}", tuple(map(TraceJob, jobs)))
        experiment = replace(
            self.experiment,
            cluster=agents.cluster,
            throughputs=agents.table(),
            truths=None,
            until=until,
            faults=None,
            drains=(),
        )
        return Instance(trace, experiment, self.turn)


class _AgentSpeeds:
    """Agents, each with its own speed on each GPU type of a cluster, the fastest type first."""

    def __init__(self, rng: random.Random, shape: InstanceShape, agents: int) -> None:
        self.cluster = parse_cluster(shape.cluster)
        self.types = self.cluster.gpu_types
        self.counts = [self.cluster.gpus_of(name) for name in self.types]
        self.gpus = self.cluster.gpus
        self._rates = list(_rates(rng, agents, len(self.types)))

    def table(self) -> Throughputs:
        """Steps per second of one GPU; speed is proportional to the number of GPUs."""
        rows = [
            Alone(JobClass(_named(agent)), name, 1, Locality.PACKED, rate)
            for agent, rates in enumerate(self._rates)
            for name, rate in zip(self.types, rates, strict=True)
        ]
        return Throughputs.of("audit", self.types[-1], rows)

    def mean(self, agent: int, since: int = 0) -> float:
        """Mean steps per second over the cluster's GPUs, if only types from the index `since` on can be used."""
        rates = zip(self._rates[agent][since:], self.counts[since:], strict=True)
        return sum(rate * count for rate, count in rates) / self.gpus

    def fastest(self, agent: int) -> float:
        """Steps per second of one GPU of the fastest type."""
        return self._rates[agent][0]

    def job(self, agent: int, submitted: float, steps: float, gang: int, suffix: str = "") -> Job:
        """A job of `steps` for each GPU of its gang."""
        name = _named(agent)
        return Job(name + suffix, submitted, gang, steps=steps * gang, tenant=name, model=name)


def _named(agent: int) -> str:
    return f"agent-{agent}"


def _rates(rng: random.Random, agents: int, types: int) -> Iterator[tuple[float, ...]]:
    """Speeds by type, per agent. Speed-ups are spread evenly over their range, in random order."""
    low, high = map(log, SPEEDUPS)
    places = [(place + rng.uniform(0.2, 0.8)) / agents for place in range(agents)]
    rng.shuffle(places)
    for place in places:
        slow = rng.uniform(1.0, 4.0)
        best = low + (high - low) * place
        between = sorted((rng.uniform(0.3, 0.8) for _ in range(types - 2)), reverse=True)
        yield tuple(slow * exp(best * part) for part in (1.0, *between, 0.0))
