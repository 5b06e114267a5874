"""What is submitted."""

from dataclasses import dataclass
from enum import IntEnum, StrEnum


class Status(IntEnum):
    """Where a job stands. A preempted job waits; the last four are final."""

    WAITING = 0
    RUNNING = 1
    FINISHED = 2
    FAILED = 3
    CANCELLED = 4
    REJECTED = 5

    @property
    def is_final(self) -> bool:
        """Nothing happens to the job any more."""
        return self >= Status.FINISHED


class Yields(StrEnum):
    """When a run of a job may be preempted: at any time; once it has attached, so that little is lost; never."""

    ANY_TIME = "any-time"
    ATTACHED = "attached"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class Job:
    """A training job as its owner describes it.

    gpus            the gang: GPUs needed at once, all or nothing
    steps           declared work, in the steps of the throughput table; None if the owner does not know
    duration        seconds on the table's reference GPU type, packed; used where `steps` is not given
    app             jobs that are explored together have one; apps of two tenants are two, whatever they are called
    weight          its own among all jobs, times its tenant's
    tenant_weight   its tenant's among tenants, as of the moment at which this is said; what is said last counts
    gpu_types       types it may run on; empty means any
    deadline        seconds on the trace's clock
    micro_batches   tasks that a step divides into; given, any GPUs will do, and `gpus` is what `duration` refers to
    sync            seconds that putting the tasks of a step together takes, of those that a step takes in all
    yields          when a run of it may be preempted
    """

    id: str
    submitted: float
    gpus: int
    duration: float | None = None
    steps: float | None = None
    tenant: str = "default"
    app: str | None = None
    model: str | None = None
    batch_size: int | None = None
    weight: float = 1.0
    priority: int = 0
    deadline: float | None = None
    gpu_types: tuple[str, ...] = ()
    min_gpus: int | None = None
    max_gpus: int | None = None
    micro_batches: int | None = None
    name: str | None = None
    sync: float = 0.0
    yields: Yields = Yields.ANY_TIME
    tenant_weight: float = 1.0
