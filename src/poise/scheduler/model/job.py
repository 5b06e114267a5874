"""The job: what its owner submits, and the states it goes through."""

from dataclasses import dataclass
from enum import IntEnum, StrEnum


class Status(IntEnum):
    """State of a job in the core. A preempted job is WAITING; the last four are final."""

    WAITING = 0
    RUNNING = 1
    FINISHED = 2
    FAILED = 3
    CANCELLED = 4
    REJECTED = 5

    @property
    def is_final(self) -> bool:
        """Whether the job is over."""
        return self >= Status.FINISHED


class Yields(StrEnum):
    """When a run of the job may be preempted.

    ANY_TIME   always
    ATTACHED   once it has reported that it can save its state (`Attached`), so that little is lost
    NEVER      not at all: it keeps its GPUs until it ends
    """

    ANY_TIME = "any-time"
    ATTACHED = "attached"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class Job:
    """A training job as its owner describes it.

    gpus            the gang: GPUs needed at once, all or nothing
    steps           declared work, in the steps of the throughput table; None if the owner does not know
    duration        seconds on the table's reference GPU type, packed; used where `steps` is not given
    submitted       time, in seconds on the trace's clock, as is `deadline`
    app             name shared by jobs that are explored together, e.g. a hyper-parameter sweep; private to the tenant
    weight          for policies that divide among jobs; the live service states the owner's number times the tenant's
    tenant_weight   for policies that divide among tenants; the last value stated counts
    gpu_types       types it may run on; empty means any
    min_gpus        fewest and most (`max_gpus`) GPUs it can run on; None: exactly `gpus`
    micro_batches   tasks that a step divides into: it then runs on any GPUs, and `gpus` is what `duration` refers to.
                    None if steps do not divide
    sync            seconds of each step that combining its tasks takes
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
