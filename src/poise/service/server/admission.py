"""From a request to a job of the core: what is believed of its speed, and whether it can ever run here."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf

from poise.engine.assembly import with_rounds
from poise.engine.journal import Header
from poise.scheduler.core.scheduler import Scheduler
from poise.scheduler.core.settings import RetryRule, Settings
from poise.scheduler.core.speed_profiles import SpeedProfile, why_impossible
from poise.scheduler.model.cluster import Cluster
from poise.scheduler.model.errors import PoiseError, RequestError
from poise.scheduler.model.event import Colocated, Estimated
from poise.scheduler.model.job import Job, Yields
from poise.scheduler.model.speed import Estimate
from poise.scheduler.model.topology import Topology
from poise.scheduler.placement.strategies import placement_named
from poise.scheduler.policies.catalogue import Capability, capabilities_of, policy_named
from poise.scheduler.throughput.speeds import GENERIC, Speeds
from poise.scheduler.throughput.table import Throughputs, shipped
from poise.service.server.engine_api import RefusalCode, RequestRefusedError
from poise.service.wire.request import JobRequest, PreemptionMode

UNKNOWN = "default"
"""Prefix of names that jobs get which have none."""

MOST_KINDS = 2_000
"""Kinds of jobs that are remembered."""

_YIELDS = {
    PreemptionMode.CHECKPOINT: Yields.ATTACHED,
    PreemptionMode.RESTART: Yields.ANY_TIME,
    PreemptionMode.NEVER: Yields.NEVER,
}


class Admission:
    """Knows the cluster and what is believed of speeds; says once of each kind of job what that is.

    check    raises PoiseError for a request that this machine cannot run
    policy   one that puts two jobs on the same GPUs is told what kinds of jobs do to each other there
    """

    def __init__(
        self, cluster: Cluster, check: Callable[[JobRequest], None], policy: str, table: Throughputs | None = None
    ) -> None:
        self._cluster = cluster
        self._topology = Topology(cluster)
        self._table = table or shipped()
        self._speeds = Speeds(self._table, cluster)
        self._check = check
        self._pairs = Capability.PAIRS in capabilities_of(policy)
        self._told: set[str] = set()
        self._measured: dict[str, Job] = {}
        """Of the kinds that it was told of, those that something is known of beside others: a job of each."""
        self._possible: dict[tuple[str, int, tuple[str, ...]], str | None] = {}

    def admit(self, request: JobRequest) -> None:
        """Raise RefusedError, in one line, for a job that can never run here as it is asked for."""
        try:
            for name in request.gpu_types:
                if name not in self._cluster.gpu_types:
                    here = ", ".join(self._cluster.gpu_types)
                    raise RequestError(f"gpu_types: the cluster has no {name!r}; it has {here}")
            self._check(request)
            job = job_of(request, "new", 0.0, request.tenant or UNKNOWN, 1.0)
            problem = self._impossible(job)
        except PoiseError as error:
            raise RequestRefusedError(RefusalCode.WRONG, str(error)) from error
        if problem:
            raise RequestRefusedError(RefusalCode.WRONG, problem)

    def stranded(self, job: Job) -> str | None:
        """Why a job that was taken when the cluster was another one cannot run on this one; None: it can."""
        try:
            return self._impossible(job)
        except PoiseError as error:
            return str(error)

    def _impossible(self, job: Job) -> str | None:
        kind, estimate, _ = self.resolve(job)
        key = (kind, job.gpus, job.gpu_types)
        known = self._possible  # other threads may be here too
        if key not in known:
            if len(known) >= MOST_KINDS:  # people make up names of models as they like
                known = self._possible = {}
                self._speeds = Speeds(self._table, self._cluster)
            reserved = [0] * len(self._topology.types)
            known[key] = why_impossible(job, SpeedProfile(0, estimate), self._topology, reserved)
        return known[key]

    def resolve(self, job: Job) -> tuple[str, Estimate, float]:
        """Kind, believed speed and work of a job; work of unknown length is endless.

        Steps alone say nothing of a job's length if nobody knows how fast its model trains.
        """
        kind, estimate, steps = self._speeds.resolve(self._timed(job))
        return kind, estimate, inf if self._is_endless(job) else steps

    def _is_endless(self, job: Job) -> bool:
        return job.duration is None and (job.steps is None or not self._speeds.knows(job))

    def _timed(self, job: Job) -> Job:
        """The job as one whose speed can be told."""
        return replace(job, steps=None, duration=1.0) if self._is_endless(job) else job

    def news(self, job: Job, kind: str, estimate: Estimate) -> list[Estimated | Colocated]:
        """What the core has to be told before the first job of a kind."""
        if kind in self._told:
            return []
        self.told(job, kind)
        return [Estimated(kind, estimate), *(self._beside(kind) if kind in self._measured else ())]

    def _beside(self, kind: str) -> Iterator[Colocated]:
        """What is believed of a new kind beside each that the core knows."""
        job = self._measured[kind]
        for other, known in self._measured.items():
            rates = self._speeds.pair(job, known) if known.gpus == job.gpus else ()
            if any(mine > 0 and others > 0 for mine, others in rates):
                yield Colocated(kind, other, rates)

    def told(self, job: Job, kind: str) -> None:
        """The core knows this kind, and a job of it, from the journal."""
        self._told.add(kind)
        if self._pairs and self._speeds.knows(job):
            self._measured.setdefault(kind, self._timed(job))


def job_of(request: JobRequest, job: str, now: float, tenant: str, weight: float) -> Job:
    """The job as the core knows it. `weight` is the tenant's."""
    return Job(
        id=job,
        submitted=now,
        gpus=request.gpus,
        duration=request.duration,
        steps=request.steps,
        tenant=tenant,
        app=request.app,
        model=request.model,
        batch_size=request.batch_size,
        weight=request.weight * weight,
        tenant_weight=weight,
        priority=request.priority,
        gpu_types=request.gpu_types,
        min_gpus=request.min_gpus,
        max_gpus=request.max_gpus,
        micro_batches=request.micro_batches,
        name=request.name,
        yields=_YIELDS[request.preemption],
    )


# The core as a live service uses it.

NEVER = 1_000_000
"""Retries that the core itself counts to: how many are forgiven depends on the job, and is counted by the engine."""


def live(settings: Settings) -> Settings:
    """The same settings, where failures are judged by their cause and counted by the engine."""
    return replace(settings, retries=NEVER, retry=RetryRule.CAUSE)


def known(cluster: Cluster) -> Cluster:
    """The same cluster; GPU types that nobody has measured are taken to be as fast as the reference type."""
    names = {*shipped().gpu_types, *cluster.speeds, GENERIC}
    return replace(cluster, speeds=cluster.speeds | {name: 1.0 for name in cluster.gpu_types if name not in names})


def core_of(header: Header) -> Scheduler:
    """A fresh core, with the policy as a live service uses it."""
    policy = with_rounds(policy_named(header.policy, live=True), header.settings, header.seed)
    return Scheduler(header.cluster, policy, placement_named(header.placement), header.settings)
