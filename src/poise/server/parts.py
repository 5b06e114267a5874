"""What a live engine is put together from."""

from collections.abc import Callable
from dataclasses import dataclass, field

from poise.core.scheduler import Scheduler
from poise.engine.journal import Header
from poise.engine.live import Tell, World
from poise.server.clock import Clock
from poise.server.intake import Intake
from poise.server.logs import Logbook
from poise.server.metrics import Metrics
from poise.server.quotas import Allowance
from poise.server.store import Store


@dataclass(frozen=True, slots=True)
class Parts:
    """What an engine is put together from. `header`: cluster, policy and settings as they are wanted now."""

    store: Store
    header: Header
    scheduler_of: Callable[[Header], Scheduler]
    intake_of: Callable[[Header], Intake]
    world_of: Callable[[Tell], World]
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
    clock_of: Callable[[float], Clock] = Clock
