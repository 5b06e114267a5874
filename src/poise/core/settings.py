"""The choices of an experiment that are neither policy nor placement."""

from dataclasses import dataclass
from enum import StrEnum
from math import inf

from poise.model.errors import RequestError


class Cadence(StrEnum):
    """When to decide: at round boundaries, at every change, or both."""

    ROUNDS = "rounds"
    EVENTS = "events"
    BOTH = "both"


@dataclass(frozen=True, slots=True)
class Settings:
    """Seconds, all of them but the count of retries.

    backfill           with cadence `rounds`: GPUs freed inside a round go to waiting jobs at once, without preemption
    restart_overhead   time without progress at each start, as the core believes it
    minimum_run        a job that just started is not preempted for this long
    recompute          least time between two solves of a share policy; 0: at every change
    credit             rounds that every job is taken to have received when shares change (Gavel: half a round)
    patience           rounds that a running job may get ahead of its share before it has to make way, with debts carried
                       along when shares change; 0: neither, as Gavel
    retries            failed runs of a job that are forgiven; 4 is what the Philly job log shows (at most 5 attempts)
    """

    cadence: Cadence = Cadence.BOTH
    round: float = 360.0
    backfill: bool = True
    restart_overhead: float = 0.0
    minimum_run: float = 0.0
    retries: int = 4
    recompute: float = 0.0
    credit: float = 0.5
    patience: float = 1.0

    def __post_init__(self) -> None:
        if not self.round > 0:
            raise RequestError(f"a round takes more than 0 seconds, not {self.round}")
        if self.restart_overhead < 0 or self.minimum_run < 0 or self.retries < 0:
            raise RequestError("restart overhead, minimum run time and retries cannot be negative")
        if not (0 <= self.recompute < inf and 0 <= self.patience < inf and 0 < self.credit < inf):
            raise RequestError("recompute and patience are finite and not negative, the credit is finite and above 0 rounds")
