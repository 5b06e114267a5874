"""What waiting claims ask for, and how long jobs have waited for which cause.

Whether a waiting claim fits depends on its shape alone (gang, GPU types, locality, unit), not on the job. So the causes of
waiting (docs/algorithms/philly.md) are clocked once per shape, and a job's waiting time by cause is the difference of two
readings of its shape's clock. The whole account costs a few shapes per decision, however long the queue is.
"""

from collections.abc import Container, Sequence
from enum import IntEnum

from poise.scheduler.model.action import Waited
from poise.scheduler.model.cluster import Holding
from poise.scheduler.model.job import Status
from poise.scheduler.model.micro_batches import Tasks
from poise.scheduler.model.speed import Locality
from poise.scheduler.placement.free_gpus import FreeGpus
from poise.scheduler.placement.strategies import Placement


class WaitCause(IntEnum):
    """Why a claim of some shape is not served. The values are the order of the fields of `Waited`."""

    ORDER = 0
    FRAGMENTATION = 1
    CAPACITY = 2


NO_WAIT = Waited(0.0, 0.0, 0.0)


class ClaimShape:
    """Gang, GPU types by preference, locality and unit: what decides whether a claim fits.

    unit        the GPUs on each node come in multiples of this
    waiting     number of jobs that wait with this shape
    tasks       the micro-batches of a step, if steps divide: then a claim fits as soon as any usable GPU is free
    over_share  the twin of this shape for jobs that would exceed their tenant's share, whatever is free; a twin's twin
                is itself; None until the first such job
    """

    __slots__ = (
        "_clock", "_since", "cause", "gang", "index", "locality", "over_share", "tasks", "types", "unit", "waiting",
    )  # fmt: skip

    def __init__(
        self,
        index: int,
        gang: int,
        types: tuple[int, ...],
        locality: Locality,
        tasks: Tasks | None = None,
        unit: int = 1,
    ) -> None:
        self.index = index
        self.gang = gang
        self.types = types
        self.locality = locality
        self.tasks = tasks
        self.unit = unit
        self.waiting = 0
        self.over_share: ClaimShape | None = None
        self.cause = WaitCause.CAPACITY
        self._since = 0.0
        self._clock = [0.0, 0.0, 0.0]

    def classify(self, free: FreeGpus, placement: Placement) -> WaitCause:
        """Say why a claim of this shape waits, given what is free now."""
        if self.is_over_share:
            return WaitCause.ORDER
        gang, idle = self.gang if self.tasks is None else 1, free.idle
        for gpu_type in self.types:
            if idle[gpu_type] >= gang:
                break
        else:
            return WaitCause.CAPACITY
        if (self.locality is Locality.CLUSTER and self.unit == 1) or any(
            self.place(free, placement, gpu_type) is not None for gpu_type in self.types
        ):
            return WaitCause.ORDER
        return WaitCause.FRAGMENTATION

    def place(self, free: FreeGpus, placement: Placement, gpu_type: int) -> Holding | None:
        """The GPUs of a type that the placement gives to such a claim; None if it does not fit."""
        offered = free if self.unit == 1 else free.in_units(gpu_type, self.unit)  # most claims have no units
        return placement(offered, gpu_type, self.gang, self.locality)

    def is_for(self, holding: Holding, type_of: Sequence[int]) -> bool:
        """Say whether these GPUs are of one type that such a claim may be given."""
        gpu_type = type_of[holding[0].node]
        return gpu_type in self.types and (len(holding) == 1 or all(type_of[slots.node] == gpu_type for slots in holding))

    @property
    def is_over_share(self) -> bool:
        """Whether claims of this shape would exceed their tenant's share."""
        return self.over_share is self

    def because(self, cause: WaitCause, now: float) -> None:
        """Charge waiting from now on to this cause."""
        self._clock[self.cause] += now - self._since
        self._since = now
        self.cause = cause

    def reading(self, now: float) -> Waited:
        """Seconds by cause since the clock began."""
        clock = list(self._clock)
        clock[self.cause] += now - self._since
        return Waited(*clock)


def less(later: Waited, earlier: Waited) -> Waited:
    """Waiting between two readings, by cause."""
    return Waited(*(late - early for late, early in zip(later, earlier, strict=True)))


def added(one: Waited, other: Waited) -> Waited:
    """Two waits one after the other, by cause."""
    return Waited(*(mine + others for mine, others in zip(one, other, strict=True)))


class WaitClocks:
    """Which jobs wait with which shape, and since which reading of its clock.

    shape_of   shape of each job's claim, by row; of a running job, the one that it waited with last
    waiting    shapes that some job waits with, by index; a decision looks at these and at nothing else that waits
    """

    def __init__(self) -> None:
        self.shape_of: list[ClaimShape] = []
        self.waiting: dict[int, ClaimShape] = {}
        self._began: dict[int, Waited] = {}
        """Reading of the shape's clock when the job began to wait with this shape."""
        self._before: dict[int, Waited] = {}
        """What the job waited before that: with other shapes, or while it was suspended."""
        self.new: list[int] = []
        """Rows that began to wait in this instant; some may have stopped waiting since."""

    def begin(self, row: int, shape: ClaimShape) -> None:
        """Clock the job's waiting from the end of this instant on.

        The clock is read by `note_new`, not here: the decision of this instant may still change what shapes wait for.
        """
        self.shape_of[row] = shape
        shape.waiting += 1
        self.waiting[shape.index] = shape
        self.new.append(row)

    def note_new(self, status: Sequence[int], active: Container[int], now: float) -> None:
        """At the end of an instant, note the clocks of the active jobs that began to wait in it and still do."""
        for row in self.new:
            if status[row] == Status.WAITING and row in active:
                self._began[row] = self.shape_of[row].reading(now)
        self.new.clear()

    def change(self, row: int, shape: ClaimShape, now: float) -> None:
        """Let a waiting job wait with another shape; what it waited so far is kept."""
        before = self.shape_of[row]
        if shape is before:
            return
        began = self._began.pop(row, None)
        if began is not None:
            past = self._before.get(row, NO_WAIT)
            self._before[row] = added(past, less(before.reading(now), began))
            self._began[row] = shape.reading(now)
        self._leave(before)
        self.shape_of[row] = shape
        shape.waiting += 1
        self.waiting[shape.index] = shape

    def end(self, row: int, now: float, since: float) -> Waited:
        """Stop the clock of a job that waits since `since`; return how long it waited, by cause."""
        shape = self.shape_of[row]
        self._leave(shape)
        began = self._began.pop(row, None) if self._began else None
        before = self._before.pop(row, None) if self._before else None
        if since == now:
            return NO_WAIT
        waited = NO_WAIT if began is None else less(shape.reading(now), began)  # None: it began in this instant
        return waited if before is None else added(before, waited)

    def keep(self, row: int, waited: Waited) -> None:
        """Keep what a job waited until it was suspended, for when it waits again."""
        self._before[row] = waited

    def add_suspension(self, row: int, seconds: float) -> None:
        """Count a suspension as waiting for the order: the job was not allowed to compete."""
        self._before[row] = added(self._before.get(row, NO_WAIT), Waited(seconds, 0.0, 0.0))

    def forget(self, row: int) -> None:
        """Drop what is kept for a suspended job that has ended."""
        self._before.pop(row, None)

    def classify(self, free: FreeGpus, placement: Placement, now: float) -> None:
        """After a decision, say for each shape that still waits why it does."""
        for shape in self.waiting.values():
            cause = shape.classify(free, placement)
            if cause is not shape.cause:
                shape.because(cause, now)

    def _leave(self, shape: ClaimShape) -> None:
        shape.waiting -= 1
        if not shape.waiting:
            del self.waiting[shape.index]
