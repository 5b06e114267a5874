"""The job: what its owner submits, and the states it goes through."""

from dataclasses import dataclass
from enum import IntEnum, StrEnum

from poise.scheduler.model.errors import RequestError


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
    unit            the GPUs that it gets on each node come in multiples of this: a process group, for instance a pod, of
                    this many GPUs cannot be divided over nodes. `gpus` and its bounds are multiples of it
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
    unit: int = 1

    def __post_init__(self) -> None:
        if self.unit != 1:  # most jobs have units of one GPU, about which nothing can be wrong
            _check_unit(self)


def _check_unit(job: Job) -> None:
    """Raise RequestError if the GPUs that a job asks for are not whole units."""
    if job.unit < 1:
        raise RequestError(f"job {job.id!r}: unit: expected at least 1 GPU, got {job.unit}")
    if job.micro_batches is not None:
        raise RequestError(
            f"job {job.id!r}: unit: expected 1 beside micro_batches, with which any GPUs will do; got {job.unit}"
        )
    for name, gpus in (("gpus", job.gpus), ("min_gpus", job.min_gpus), ("max_gpus", job.max_gpus)):
        if gpus is not None and gpus % job.unit:
            raise RequestError(f"job {job.id!r}: {name}: expected a multiple of unit, which is {job.unit}; got {gpus}")
