"""From a request to a job of the core: what is believed of its speed, and whether it can ever run here."""

from collections.abc import Callable
from dataclasses import replace
from math import inf

from poise.core.beliefs import Belief, why_impossible
from poise.model.cluster import Cluster
from poise.model.errors import PoiseError, UnknownNameError
from poise.model.event import Estimated
from poise.model.job import Job
from poise.model.speed import Estimate
from poise.model.topology import Topology
from poise.server.seam import Fault, RefusedError
from poise.throughput.speeds import Speeds
from poise.throughput.table import Throughputs, shipped
from poise.wire.request import Preemption, Request

UNKNOWN = "default"
"""Prefix of names that jobs get which have none."""


class Intake:
    """Knows the cluster and what is believed of speeds; says once of each kind of job what that is.

    check   raises PoiseError for a request that this machine cannot run
    """

    def __init__(self, cluster: Cluster, check: Callable[[Request], None], table: Throughputs | None = None) -> None:
        self._cluster = cluster
        self._topology = Topology(cluster)
        self._speeds = Speeds(table or shipped(), cluster)
        self._check = check
        self._told: set[str] = set()
        self._possible: dict[tuple[str, int, tuple[str, ...]], str | None] = {}

    def admit(self, request: Request) -> None:
        """Raise RefusedError, in one line, for a job that can never run here as it is asked for."""
        try:
            for name in request.gpu_types:
                if name not in self._cluster.gpu_types:
                    raise UnknownNameError("GPU type", name, self._cluster.gpu_types)
            self._check(request)
            job = job_of(request, "new", 0.0, request.tenant or UNKNOWN, 1.0)
            problem = self._impossible(job)
        except PoiseError as error:
            raise RefusedError(Fault.WRONG, str(error)) from error
        if problem:
            raise RefusedError(Fault.WRONG, problem)

    def _impossible(self, job: Job) -> str | None:
        kind, estimate, _ = self.resolve(job)
        key = (kind, job.gpus, job.gpu_types)
        if key not in self._possible:
            reserved = [0] * len(self._topology.types)
            self._possible[key] = why_impossible(job, Belief(0, estimate), self._topology, reserved)
        return self._possible[key]

    def resolve(self, job: Job) -> tuple[str, Estimate, float]:
        """Kind, believed speed and work of a job; work of unknown length is endless.

        Steps alone say nothing of a job's length if nobody knows how fast its model trains.
        """
        if job.duration is None and (job.steps is None or not self._speeds.knows(job)):
            kind, estimate, _ = self._speeds.resolve(replace(job, steps=None, duration=1.0))
            return kind, estimate, inf
        return self._speeds.resolve(job)

    def news(self, kind: str, estimate: Estimate) -> list[Estimated]:
        """What the core has to be told before the first job of a kind."""
        if kind in self._told:
            return []
        self._told.add(kind)
        return [Estimated(kind, estimate)]

    def told(self, kind: str) -> None:
        """The core knows this kind from the journal."""
        self._told.add(kind)


def job_of(request: Request, job: str, now: float, tenant: str, weight: float) -> Job:
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
        priority=request.priority,
        gpu_types=request.gpu_types,
        min_gpus=request.min_gpus,
        max_gpus=request.max_gpus,
        micro_batches=request.micro_batches,
        name=request.name,
        steadfast=request.preemption is Preemption.NEVER,
    )
