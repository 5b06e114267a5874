"""The settings of the core: everything about a set-up that is neither policy nor placement."""

from dataclasses import dataclass
from enum import StrEnum
from math import inf

from poise.scheduler.model.errors import OptionError, RequestError
from poise.scheduler.model.speed import Locality
from poise.scheduler.model.workload import Filling

SHORTEST_ROUND = 0.001
"""Seconds; as calendar timestamps, the ends of shorter rounds would coincide."""


def check_round(length: float) -> None:
    """Refuse a round that is too short."""
    if length < SHORTEST_ROUND:
        raise OptionError("round", f"expected at least {SHORTEST_ROUND} seconds, got {length}")


class Cadence(StrEnum):
    """When to decide: at round boundaries, at every change, or both."""

    ROUNDS = "rounds"
    EVENTS = "events"
    BOTH = "both"


class RetryRule(StrEnum):
    """How failed runs are forgiven: by their count alone, or by what they died of."""

    COUNT = "count"
    CAUSE = "cause"


@dataclass(frozen=True, slots=True)
class DelayScheduling:
    """How long a waiting job requires locality, in seconds of waiting: first few nodes, then one rack; 0: not at all.

    This is Philly's first guideline, locality relaxed by waiting (docs/algorithms/philly.md).
    """

    packed: float
    rack: float

    def at(self, since: float, now: float) -> Locality:
        """The locality that a job which waits since `since` requires now; relaxes at each of `relaxations`."""
        if now < since + self.packed:
            return Locality.PACKED
        return Locality.RACK if now < since + self.rack else Locality.CLUSTER

    def relaxations(self, since: float) -> list[float]:
        """When a job that waits since `since` requires less."""
        return [since + each for each in (self.packed, self.rack) if each > 0]


@dataclass(frozen=True, slots=True)
class Settings:
    """Times are in seconds unless it says rounds.

    backfill           with cadence `rounds`: GPUs freed inside a round go to waiting jobs at once, without preemption
    restart_overhead   time without progress at each start, as the core believes it
    minimum_run        a job that just started is not preempted for this long
    recompute          least time between two solves of a share policy; 0: at every change
    credit             rounds that every job is taken to have received when shares change (Gavel: half a round)
    patience           rounds that a running job may get ahead of its share before it has to make way, with debts carried
                       along when shares change; 0: neither, as Gavel
    filling            when GPUs left over by shares go to other jobs: after all shares, or type by type as in Gavel
    packed_wait        a waiting job requires as few nodes as possible for this long
    rack_wait          a waiting job requires one rack for this long
    defragment         running jobs may be moved to make room on one node, each this long after its start; 0: never
    validation_gpus    GPUs set aside for trials: jobs of several GPUs first run on one of them for `validation_time`
    retry              by count, or by cause: what no retry heals is given up at once, what passes is tried again after
                       `backoff`, doubled each time
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
    packed_wait: float = 0.0
    rack_wait: float = 0.0
    defragment: float = 0.0
    validation_gpus: int = 0
    validation_time: float = 300.0
    retry: RetryRule = RetryRule.COUNT
    backoff: float = 60.0
    filling: Filling = Filling.LAST

    def __post_init__(self) -> None:
        if not self.round > 0:
            raise RequestError(f"a round takes more than 0 seconds, not {self.round}")
        if self.restart_overhead < 0 or self.minimum_run < 0 or self.retries < 0:
            raise RequestError("restart overhead, minimum run time and retries cannot be negative")
        amounts = (self.packed_wait, self.rack_wait, self.defragment, self.validation_gpus, self.backoff)
        if not all(0 <= amount < inf for amount in amounts) or not 0 < self.validation_time < inf:
            raise RequestError("waits for locality, defragmentation, validation and back-off are finite and not negative")
        if not (0 <= self.recompute < inf and 0 <= self.patience < inf and 0 < self.credit < inf):
            raise RequestError("recompute and patience are finite and not negative, the credit is finite and above 0 rounds")
