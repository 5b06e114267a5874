"""Claims of one shape, and how long such claims have waited for which cause.

Whether a waiting claim fits depends on its shape alone (gang, types, locality), not on the job. So the causes of waiting
(Philly §3.1) are clocked once a shape, and a job's waiting time by cause is the difference of two readings: the cost of
the whole account is a few shapes a decision, however long the queue.
"""

from collections.abc import Sequence
from enum import IntEnum

from poise.scheduler.model.action import Waited
from poise.scheduler.model.cluster import Holding
from poise.scheduler.model.micro_batches import Tasks
from poise.scheduler.model.speed import Locality
from poise.scheduler.placement.free_gpus import FreeGpus
from poise.scheduler.placement.strategies import Placement


class WaitCause(IntEnum):
    """Why a claim of some shape is not served; the order of `Waited`."""

    ORDER = 0
    FRAGMENTATION = 1
    CAPACITY = 2


NO_WAIT = Waited(0.0, 0.0, 0.0)


class ClaimShape:
    """Gang, GPU types by preference, and locality: what decides whether a claim fits. `waiting` counts such jobs.

    tasks  what rounds divide into, if they do: then a claim fits as soon as any of the GPUs is free
    held   the twin for such jobs that are held back for their tenant's share, whatever is free; its own twin is itself
    """

    __slots__ = ("_clock", "_since", "cause", "gang", "held", "index", "locality", "tasks", "types", "waiting")

    def __init__(
        self, index: int, gang: int, types: tuple[int, ...], locality: Locality, tasks: Tasks | None = None
    ) -> None:
        self.index = index
        self.gang = gang
        self.types = types
        self.locality = locality
        self.tasks = tasks
        self.waiting = 0
        self.held: ClaimShape | None = None
        self.cause = WaitCause.CAPACITY
        self._since = 0.0
        self._clock = [0.0, 0.0, 0.0]

    def classify(self, free: FreeGpus, placement: Placement) -> WaitCause:
        """Why a claim of this shape that still waits does wait."""
        if self.is_held:
            return WaitCause.ORDER
        gang, idle = self.gang if self.tasks is None else 1, free.idle
        for gpu_type in self.types:
            if idle[gpu_type] >= gang:
                break
        else:
            return WaitCause.CAPACITY
        if self.locality is Locality.CLUSTER or self._fits(free, placement):
            return WaitCause.ORDER
        return WaitCause.FRAGMENTATION

    def _fits(self, free: FreeGpus, placement: Placement) -> bool:
        return any(placement(free, gpu_type, self.gang, self.locality) is not None for gpu_type in self.types)

    def is_for(self, holding: Holding, type_of: Sequence[int]) -> bool:
        """These GPUs are of one type, and such a claim may be given it."""
        kind = type_of[holding[0].node]
        return kind in self.types and (len(holding) == 1 or all(type_of[slots.node] == kind for slots in holding))

    @property
    def is_held(self) -> bool:
        """Such claims are held back for their tenant's share."""
        return self.held is self

    def because(self, cause: WaitCause, now: float) -> None:
        """From now on claims of this shape wait for this cause."""
        self._clock[self.cause] += now - self._since
        self._since = now
        self.cause = cause

    def reading(self, now: float) -> Waited:
        """Seconds by cause since the beginning."""
        clock = list(self._clock)
        clock[self.cause] += now - self._since
        return Waited(*clock)


def less(later: Waited, earlier: Waited) -> Waited:
    """What was waited between two readings, by cause."""
    return Waited(*(late - early for late, early in zip(later, earlier, strict=True)))


def added(one: Waited, other: Waited) -> Waited:
    """Two waits one after the other, by cause."""
    return Waited(*(mine + others for mine, others in zip(one, other, strict=True)))
