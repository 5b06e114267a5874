"""The active jobs as an optimisation problem sees them, and the answer of a share policy.

A column is a GPU type at a locality: first every type with its gangs packed, then, where splitting a gang costs speed, every
type again with gangs spread.
"""

from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum, auto
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from poise.scheduler.model.arithmetic import Bools, Floats, Ints


@dataclass(frozen=True)
class Workload:
    """Active jobs by ascending row, as arrays of equal length n. Seconds, steps, GPUs.

    rows         the core's rows: an earlier job has a smaller one
    steps_left   believed work left; inf if nobody knows
    deadline     moment; inf if there is none
    tenant       index of the tenant, in order of first submission of all tenants ever seen
    speed        (n, columns): believed steps per second of the whole gang; 0 where it cannot run
    held         column that a job holds GPUs of, -1 if it waits
    partner      job that it shares its GPUs with, as an index; -1 if it has none
    gpus         (types,): GPUs alive;  price: (types,) per GPU-hour
    column_type  (columns,): the type of each column
    kind         jobs of one kind are equally fast everywhere
    beside       (kinds, kinds, columns) or None: steps per second of the first kind on GPUs that it shares with the second;
                 None for policies that do not share GPUs
    known_beside the same, whether the policy shares GPUs or not; None if nothing is known of pairs
    divides      jobs whose rounds divide: a part of the gang, or a mix of types, will do; None if there are none
    part         speed now ÷ speed of the whole gang on the column held, of those jobs; None likewise
    tenant_weight  weight of each tenant, by index; None if all weigh 1
    pinned       running jobs that keep what they hold whoever waits; None if there are none
    free         (types,): GPUs alive that pinned jobs do not hold; None likewise
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
        """How many there are."""
        return len(self.rows)

    @property
    def types(self) -> int:
        """How many GPU types there are."""
        return len(self.gpus)

    def only(self, chosen: NDArray[Any], gpus: Floats | None = None) -> "Workload":
        """Some of the jobs (mask or indices), perhaps with fewer GPUs."""
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
    """Time that two jobs are to spend on the same GPUs; indices into the workload, columns, fractions of time.

    A solver knows them as rows of its market.
    """

    first: Ints
    second: Ints
    column: Ints
    share: Floats

    @staticmethod
    def none() -> "Pairs":
        """Nobody shares."""
        nobody = np.empty(0, dtype=np.int64)
        return Pairs(nobody, nobody, nobody, np.empty(0))


class Awareness(Enum):
    """Whether an allocation tells GPU types apart; if it does not, no type is served before the others."""

    AWARE = auto()
    BLIND = auto()


class Leftover(Enum):
    """What becomes of GPUs that nobody has a share of in this round, while a job that could use them waits."""

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
    """Long-run fractions of time: share[m, c] of job m alone on column c, and of pairs together.

    objective   value of what the policy optimises, in its own terms; nan if it optimises nothing
    remarks     what its user should know: a deadline that cannot be met, a fallback
    """

    share: Floats
    pairs: Pairs = field(default_factory=Pairs.none)
    objective: float = float("nan")
    awareness: Awareness = Awareness.AWARE
    leftover: Leftover = Leftover.FILLED
    remarks: tuple[str, ...] = ()


@runtime_checkable
class Allocator(Protocol):
    """A policy that answers with long-run fractions of time. Pure: what it remembers goes in and comes out.

    memory keyed by `Workload.rows`, for jobs come and go between two calls
    """

    def start(self) -> Any:  # noqa: ANN401 - each allocator has its own memory
        """The memory before the first allocation."""

    def allocate(self, workload: Workload, memory: Any) -> tuple[Allocation, Any]:  # noqa: ANN401
        """The allocation for this moment, and the memory to hand in next time."""
