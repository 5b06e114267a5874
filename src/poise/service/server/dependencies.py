"""What a live engine is put together from."""

from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic, time  # noqa: TID251 - the one place where the service looks at a clock

from poise.engine.journal import Header
from poise.scheduler.core.scheduler import Scheduler
from poise.service.backends.api import LiveBackend, OnEvent
from poise.service.server.admission import Admission
from poise.service.server.logs import Logbook
from poise.service.server.metrics import Metrics
from poise.service.server.quotas import Allowance
from poise.service.server.storage.store import Store

# The service's time: seconds since 1970 as the machine's clock had it at the start, and from then on without a jump.
#
# The machine's clock may be set back or forward while the service runs; durations are measured by one that cannot be. After
# a restart time goes on from the last moment of the journal if the machine's clock is behind that.


class ServiceClock:
    """Never goes backwards, not even over restarts. `last` is the last moment that the journal knows."""

    def __init__(self, last: float, *, wall: Callable[[], float] = time, steady: Callable[[], float] = monotonic) -> None:
        self._wall, self._steady = wall, steady
        self._began = steady()
        self._base = max(wall(), last)

    def now(self) -> float:
        """This moment."""
        return self._base + self._steady() - self._began

    def moment(self, at: float, *, earliest: float) -> float:
        """When something happened that the machine's clock dates: not before `earliest`, not in the future.

        What counts is how long ago that is by the same clock: it may have been set since the service was started.
        """
        return min(max(self.now() - (self._wall() - at), earliest), self.now())


@dataclass(frozen=True, slots=True)
class Dependencies:
    """What an engine is put together from. `header`: cluster, policy and settings as they are wanted now."""

    store: Store
    header: Header
    scheduler_of: Callable[[Header], Scheduler]
    intake_of: Callable[[Header], Admission]
    backend_of: Callable[[OnEvent], LiveBackend]
    log: Logbook
    metrics: Metrics
    retries: int
    taken: int = 0
    """Ids of new jobs are above this one, whatever the store knows."""
    keeps_policy: bool = False
    """Nobody named a policy: the header has the one that was in force."""
    allowance: Allowance = field(default_factory=Allowance)
    warnings: tuple[str, ...] = ()
    """What whoever runs the service should know of how it was started."""
    epoch_of: Callable[[str], int] = lambda _job: 0
    """The latest run of a job of which something is there; 0: none is."""
    clock_of: Callable[[float], ServiceClock] = ServiceClock
