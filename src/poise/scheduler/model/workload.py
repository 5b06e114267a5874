"""`Workload`: the active jobs as the input of an optimisation problem. `Allocation`: what a share policy answers.

A column is a GPU type at a locality: first every type with its gangs packed; then, if splitting a gang costs speed for any
job, every type again with its gangs spread.
"""

from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum, auto
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from poise.scheduler.model.arithmetic import Bools, Floats, Ints


@dataclass(frozen=True)
class Workload:
    """Active jobs by ascending row. Arrays have one entry per job unless a shape is given; n is the number of jobs.

    now            time, as all times here in seconds
    rows           the core's rows, ascending: a job submitted earlier has a smaller one
    gang           GPUs needed at once, >= 1
    weight         > 0, tenants' weights not included
    submitted      time
    deadline       time; inf if there is none
    steps_left     believed work left, >= 0; inf if unknown
    tenant         index of the tenant, in order of first submission of all tenants ever seen
    speed          (n, columns): believed steps per second of the whole gang; 0 where it cannot run
    held           column that the job holds GPUs of; -1 while it waits
    partner        index (not row) of the job that it shares its GPUs with; -1 if none
    gpus           (types,): GPUs alive
    price          (types,): per GPU-hour
    column_type    (columns,): type of each column
    kind           jobs of one kind are equally fast everywhere
    beside         (kinds, kinds, columns): steps per second of the first kind on GPUs shared with the second; 0 where
                   they cannot share. None for policies that do not share GPUs
    known_beside   the same for all policies; None if nothing is known of any pair
    divides        whether its rounds divide into tasks, so that a part of the gang or a mix of types will do
    part           of those jobs: speed now ÷ speed of the whole gang on the column held
    tenant_weight  (tenants,): weight by index of tenant; None if all weigh 1
    pinned         whether a running job keeps what it holds, whatever else waits
    free           (types,): GPUs alive that no pinned job holds

    `divides` and `part` are None together if no job divides, `pinned` and `free` if no job is pinned.
    """

    now: float
    rows: Ints
    gang: Floats
    weight: Floats
    submitted: Floats
    deadline: Floats
    steps_left: Floats
    tenant: Ints
    speed: Floats
    held: Ints
    partner: Ints
    gpus: Floats
    price: Floats
    column_type: Ints
    kind: Ints
    beside: Floats | None = None
    known_beside: Floats | None = None
    divides: Bools | None = None
    part: Floats | None = None
    tenant_weight: Floats | None = None
    pinned: Bools | None = None
    free: Floats | None = None

    @property
    def jobs(self) -> int:
        """Number of jobs."""
        return len(self.rows)

    @property
    def types(self) -> int:
        """Number of GPU types."""
        return len(self.gpus)

    def only(self, chosen: NDArray[Any], gpus: Floats | None = None) -> "Workload":
        """The workload of some jobs (a mask or indices), with other numbers of GPUs if given. None is shared or pinned."""
        return replace(
            self,
            **{name: column[chosen] for name in _PER_JOB if (column := getattr(self, name)) is not None},
            partner=np.full(len(self.rows[chosen]), -1),
            gpus=self.gpus if gpus is None else gpus,
            pinned=None,
            free=None,
        )


_PER_JOB = (
    "rows", "gang", "weight", "submitted", "deadline", "steps_left", "tenant", "speed", "held", "kind", "divides", "part",
)  # fmt: skip


@dataclass(frozen=True)
class Pairs:
    """Time that two jobs spend together on the same GPUs, as arrays of equal length.

    first, second   jobs, as indices into the workload (in a solver: rows of its market)
    column          where
    share           fraction of time, >= 0
    """

    first: Ints
    second: Ints
    column: Ints
    share: Floats

    @staticmethod
    def none() -> "Pairs":
        """No pair."""
        empty = np.empty(0, dtype=np.int64)
        return Pairs(empty, empty, empty, np.empty(0))


class Awareness(Enum):
    """Whether an allocation tells GPU types apart. If it does not, each round serves the types in an order drawn for it."""

    AWARE = auto()
    BLIND = auto()


class Leftover(Enum):
    """What happens to GPUs that no job has a share of in this round, while a job that could use them waits."""

    FILLED = auto()
    IDLE = auto()


class Filling(StrEnum):
    """When GPUs left over by shares are filled: after shares are served on all types, or type by type (Gavel).

    Type by type, a job that only fills up an early type is gone when the type on which it has a share has its turn.
    """

    LAST = "last"
    BY_TYPE = "by-type"


@dataclass(frozen=True)
class Allocation:
    """Long-run fractions of time.

    share       (jobs, columns): of each job alone on each column
    pairs       of pairs of jobs together
    objective   value of what the policy optimises, in its own terms; nan if it optimises nothing
    remarks     notes for the user, e.g. a deadline that cannot be met, or a fallback
    """

    share: Floats
    pairs: Pairs = field(default_factory=Pairs.none)
    objective: float = float("nan")
    awareness: Awareness = Awareness.AWARE
    leftover: Leftover = Leftover.FILLED
    remarks: tuple[str, ...] = ()


@runtime_checkable
class Allocator(Protocol):
    """A policy that answers with long-run fractions of time. Pure: its memory goes in and comes out.

    Memory is keyed by `Workload.rows`, because jobs come and go between two calls.
    """

    def start(self) -> Any:  # noqa: ANN401 - each allocator has its own memory
        """The memory before the first allocation."""

    def allocate(self, workload: Workload, memory: Any) -> tuple[Allocation, Any]:  # noqa: ANN401
        """The allocation as of now, and the memory to pass in next time."""
