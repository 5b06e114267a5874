"""What an engine is built from: the store, the back end, the core, a clock. `startup.py` makes them; tests make others."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic, time  # noqa: TID251 - the one place where the service looks at a clock

from poise.engine.assembly import with_rounds
from poise.engine.journal import Header
from poise.scheduler.core.scheduler import Scheduler
from poise.scheduler.core.settings import RetryRule, Settings
from poise.scheduler.model.cluster import Cluster
from poise.scheduler.placement.strategies import placement_named
from poise.scheduler.policies.catalogue import policy_named
from poise.scheduler.throughput.speeds import GENERIC
from poise.scheduler.throughput.table import shipped
from poise.service.backends.api import LiveBackend, OnEvent
from poise.service.server.admission import Admission
from poise.service.server.logs import Logbook
from poise.service.server.metrics import Metrics
from poise.service.server.quotas import Allowance
from poise.service.server.shipped_archives import ShippedArchives
from poise.service.server.storage.store import Store
from poise.service.wire.request import JobRequest, notes_on

NEVER = 1_000_000
"""Retries that the core itself counts to: how many a job has depends on the job, and the engine counts them."""


class ServiceClock:
    """The service's time: seconds since 1970. It never goes backwards, not even over restarts.

    It reads the machine's clock once, at the start, and goes on from there by a clock that cannot be set. After a restart it
    goes on from `last`, the last time in the journal, if the machine's clock is behind that.
    """

    def __init__(self, last: float, *, wall: Callable[[], float] = time, steady: Callable[[], float] = monotonic) -> None:
        self._wall, self._steady = wall, steady
        self._began = steady()
        self._base = max(wall(), last)

    def now(self) -> float:
        """The present time."""
        return self._base + self._steady() - self._began

    def from_wall(self, at: float) -> float:
        """The service's time of something that the machine's clock dates; never negative, never in the future.

        What counts is how long ago it was by that same clock: it may have been set since the service started.
        """
        return min(max(self.now() - (self._wall() - at), 0.0), self.now())


@dataclass(frozen=True, slots=True)
class Dependencies:
    """What an engine is built from.

    header         cluster, policy and settings that the service was started with
    keeps_policy   no policy was named at the start: the header has the one that was in force
    keeps_cluster  no cluster was named at the start: the header has the one that was in force, and nodes may join it
    highest_job    ids of new jobs are above this one, whatever the store knows
    latest_epoch   the latest run of a job of which there is any trace on disk; 0: none
    warnings       what the operator should know of how the service was started
    files          working directories that were shipped with jobs
    notes          what the owner of new jobs should know of them
    """

    store: Store
    header: Header
    new_scheduler: Callable[[Header], Scheduler]
    new_admission: Callable[[Header], Admission]
    new_backend: Callable[[OnEvent], LiveBackend]
    log: Logbook
    metrics: Metrics
    retries: int
    highest_job: int = 0
    keeps_policy: bool = False
    keeps_cluster: bool = False
    allowance: Allowance = field(default_factory=Allowance)
    warnings: tuple[str, ...] = ()
    files: ShippedArchives = field(default_factory=lambda: ShippedArchives(None))
    notes: Callable[[Sequence[JobRequest]], tuple[str, ...]] = notes_on
    latest_epoch: Callable[[str], int] = lambda _job: 0
    new_clock: Callable[[float], ServiceClock] = ServiceClock


def live_settings(settings: Settings) -> Settings:
    """The settings of a live core: failures are judged by their cause, and retries are counted by the engine."""
    return replace(settings, retries=NEVER, retry=RetryRule.CAUSE)


def live_cluster(cluster: Cluster) -> Cluster:
    """The cluster of a live core: GPU types that were never measured are taken to be as fast as the reference type."""
    names = {*shipped().gpu_types, *cluster.speeds, GENERIC}
    return replace(cluster, speeds=cluster.speeds | {name: 1.0 for name in cluster.gpu_types if name not in names})


def core_of(header: Header) -> Scheduler:
    """A fresh core, with the policy as a live service uses it."""
    policy = with_rounds(policy_named(header.policy, live=True), header.settings, header.seed)
    return Scheduler(header.cluster, policy, placement_named(header.placement), header.settings)
