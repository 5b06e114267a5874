"""Admission: from a request to a job of the core, with what is believed of its speed; and whether it can ever run here."""

from collections.abc import Callable
from dataclasses import replace
from math import inf

from poise.scheduler.core.speed_profiles import SpeedProfile, why_impossible
from poise.scheduler.model.cluster import Cluster
from poise.scheduler.model.errors import PoiseError, RequestError
from poise.scheduler.model.event import Colocated, Estimated
from poise.scheduler.model.job import Job, Yields
from poise.scheduler.model.speed import Estimate
from poise.scheduler.model.topology import Topology
from poise.scheduler.policies.catalogue import Capability, capabilities_of
from poise.scheduler.throughput.speeds import Speeds
from poise.scheduler.throughput.table import Throughputs, shipped
from poise.service.server.service_api import RefusalCode, RequestRefusedError
from poise.service.wire.request import JobRequest, PreemptionMode

NO_NODE = "no node has joined the cluster yet"  # why a job waits that may well be possible once some have
UNKNOWN = "default"  # tenant under which a request that names none is checked
MOST_KINDS = 2_000  # kinds of jobs for which the answer is remembered

_YIELDS = {
    PreemptionMode.CHECKPOINT: Yields.ATTACHED,
    PreemptionMode.RESTART: Yields.ANY_TIME,
    PreemptionMode.NEVER: Yields.NEVER,
}


class Admission:
    """Knows the cluster and what is believed of speeds. One per chapter of the journal.

    The core has to be told the speed of each kind of job once, before the first job of it: `estimates` keeps track of that.
    `admit` is called from the threads of the HTTP server; everything else from the engine's.

    check    raises PoiseError for a request that this machine cannot run
    policy   one that puts two jobs on the same GPUs also needs to know how kinds of jobs slow each other down
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
        self._known_kinds: set[str] = set()  # kinds whose speed the core knows
        self._measured: dict[str, Job] = {}  # of those, the kinds whose speed beside others is known: one job of each
        self._possible: dict[tuple[str, int, tuple[str, ...]], str | None] = {}

    def admit(self, request: JobRequest) -> None:
        """Raise RequestRefusedError, in one line, for a job that can never run here as it is asked for.

        While the cluster has no nodes at all, what it will have is not known, and everything else is accepted.
        """
        try:
            for name in request.gpu_types if self._cluster.nodes else ():
                if name not in self._cluster.gpu_types:
                    here = ", ".join(self._cluster.gpu_types)
                    raise RequestError(f"gpu_types: the cluster has no {name!r}; it has {here}")
            self._check(request)
        except PoiseError as error:
            raise RequestRefusedError(RefusalCode.WRONG, str(error)) from error
        problem = self.why_stranded(job_of(request, "new", 0.0, request.tenant or UNKNOWN, 1.0))
        if problem and self._cluster.nodes:
            raise RequestRefusedError(RefusalCode.WRONG, problem)

    def why_stranded(self, job: Job) -> str | None:
        """Why a job cannot run on this cluster, however long it waits; None: it can."""
        if not self._cluster.nodes:
            return NO_NODE
        try:
            kind, estimate, _ = self.resolve(job)
        except PoiseError as error:
            return str(error)
        key = (kind, job.gpus, job.gpu_types)
        known = self._possible  # a local: another thread may replace it meanwhile
        if key not in known:
            if len(known) >= MOST_KINDS:  # names of models are free text, so their number has no bound
                known = self._possible = {}
                self._speeds = Speeds(self._table, self._cluster)
            reserved = [0] * len(self._topology.types)
            known[key] = why_impossible(job, SpeedProfile(0, estimate), self._topology, reserved)
        return known[key]

    def resolve(self, job: Job) -> tuple[str, Estimate, float]:
        """Kind, believed speed and work of a job; infinite work if its length is unknown."""
        kind, estimate, steps = self._speeds.resolve(self._timed(job))
        return kind, estimate, inf if self._is_endless(job) else steps

    def _is_endless(self, job: Job) -> bool:
        """Steps alone do not say how long a job is if the speed of its model is unknown."""
        return job.duration is None and (job.steps is None or not self._speeds.knows(job))

    def _timed(self, job: Job) -> Job:
        """The job with a length, which the speed tables ask for."""
        return replace(job, steps=None, duration=1.0) if self._is_endless(job) else job

    def estimates(self, job: Job, kind: str, estimate: Estimate) -> list[Estimated | Colocated]:
        """Facts about speed that the core needs before this job; none unless it is the first of its kind."""
        if kind in self._known_kinds:
            return []
        self.mark_known(job, kind)
        facts: list[Estimated | Colocated] = [Estimated(kind, estimate)]
        if kind in self._measured:
            timed = self._measured[kind]
            for other, known in self._measured.items():
                rates = self._speeds.pair(timed, known) if known.gpus == timed.gpus else ()
                if any(mine > 0 and others > 0 for mine, others in rates):
                    facts.append(Colocated(kind, other, rates))
        return facts

    def mark_known(self, job: Job, kind: str) -> None:
        """Note that the core knows this kind of job, as the journal says."""
        self._known_kinds.add(kind)
        if self._pairs and self._speeds.knows(job):
            self._measured.setdefault(kind, self._timed(job))


def job_of(request: JobRequest, job: str, now: float, tenant: str, weight: float) -> Job:
    """The job as the core knows it. `weight` is the tenant's."""
    return Job(
        id=job, submitted=now, gpus=request.gpus, duration=request.duration, steps=request.steps, tenant=tenant,
        app=request.app, model=request.model, batch_size=request.batch_size, weight=request.weight * weight,
        tenant_weight=weight, priority=request.priority, gpu_types=request.gpu_types, min_gpus=request.min_gpus,
        max_gpus=request.max_gpus, deadline=request.deadline, micro_batches=request.micro_batches, name=request.name,
        yields=_YIELDS[request.preemption], unit=1 if request.pods is None else request.pods.gpus,
    )  # fmt: skip
