"""Policies as values, and what they answer: ranks, plans of claims, or long-run shares.

A policy takes one of three forms, in increasing order of freedom and cost:

`Order`       gives each job a rank. The core asks again only when something happens to that job, and keeps all jobs sorted.
`Allocator`   gives each job long-run fractions of time (`workload.py`); rounds turn them into plans.
`Planner`     looks at a frozen snapshot of all jobs and answers with a whole `Plan`.

All are pure: what a policy remembers is a value that is passed in and returned.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple, Protocol, runtime_checkable

from poise.scheduler.model.action import Note
from poise.scheduler.model.cluster import Site
from poise.scheduler.model.errors import RequestError
from poise.scheduler.model.job_table import JobView, Snapshot
from poise.scheduler.model.micro_batches import Mix
from poise.scheduler.model.speed import Estimate, Locality
from poise.scheduler.model.workload import Allocator


class Unfitting(Enum):
    """What a claim that does not fit does to the claims behind it: it blocks them, or is skipped (backfilling)."""

    BLOCKS = auto()
    SKIPPED = auto()


class PreemptionRule(Enum):
    """Whether a job of higher rank may take GPUs from a running job of lower rank."""

    NEVER = auto()
    BY_RANK = auto()


# Rank policies


class TieBreak(Enum):
    """The order of jobs of equal rank: by submission, or as at the previous decision."""

    BY_SUBMISSION = auto()
    BY_PREVIOUS_DECISION = auto()


class Rank(NamedTuple):
    """A job's place in the order: smaller first, by queue, then section, then value; ties as the order's `TieBreak` says.

    value    as of the time of asking
    slope    change of the value per second while the job runs; the value of a waiting job stands still
    until    time at which the policy must be asked again even if nothing happened to the job
    memory   what the policy wants passed back about this job
    """

    value: float
    queue: int = 0
    section: int = 0
    slope: float = 0.0
    until: float = math.inf
    memory: tuple[float, ...] = ()


def any_locality(_job: JobView) -> Locality:
    """Require nothing: GPUs close together are welcome, but not worth waiting for."""
    return Locality.CLUSTER


def learn_nothing(memory: Any, _job: JobView) -> tuple[Any, bool]:  # noqa: ANN401 - each order has its own memory
    """Keep the memory as it is when a job finishes."""
    return memory, False


@dataclass(frozen=True, slots=True)
class Order:
    """A policy that only ranks jobs.

    rank     (job, its previous rank or None, memory) -> its rank now. Asked when a job arrives, starts or stops, when its
             rank's `until` has come, and once more after the decision at that time if the job still runs
    asks     locality that the job requires; asked once, at submission
    memory   what the policy knows of finished jobs; `learn` updates it and says whether existing ranks are now stale
    ticking  `rank` for a clock that only knows whole seconds; None if `rank` does for any clock
    """

    rank: Callable[[JobView, Rank | None, Any], Rank]
    preemption: PreemptionRule
    unfitting: Unfitting
    ties: TieBreak = TieBreak.BY_SUBMISSION
    asks: Callable[[JobView], Locality] = any_locality
    memory: Any = None
    learn: Callable[[Any, JobView], tuple[Any, bool]] = learn_nothing
    ticking: Callable[[JobView, Rank | None, Any], Rank] | None = None

    def __post_init__(self) -> None:
        for name, kind in (("preemption", PreemptionRule), ("unfitting", Unfitting), ("ties", TieBreak)):
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise RequestError(f"{name}: expected one of {', '.join(map(str, kind))}, got {value!r:.60}")
        if not callable(self.rank):
            raise RequestError(f"rank: expected a function of (job, previous, memory), got {self.rank!r:.60}")


# Planners


class Grain(Enum):
    """How long a job gets GPUs: until a later decision, or on each GPU for one task of its current step."""

    LEASE = auto()
    TASK = auto()


class Claim(NamedTuple):
    """A request for a job's whole gang in this decision, at this locality or closer.

    row      the job
    types    indices of GPU types that it may get, best first; None: any on which it runs, its fastest first
    beside   row of another job of equal gang that is to share these GPUs; it must hold none, or share them already
    gpus     how many, within what the job can use; None: the gang that it asks for
    site     exactly these nodes, with as many GPUs on each, whatever `locality` and `types` say; adds up to `gpus`
    mix      number of GPUs of each type, whatever `types` and `gpus` say; for jobs whose steps divide into tasks
    grain    TASK: one task of the current step on each GPU of `mix` or `site`, besides those already being computed
    """

    row: int
    locality: Locality = Locality.CLUSTER
    types: tuple[int, ...] | None = None
    beside: int | None = None
    gpus: int | None = None
    site: Site | None = None
    mix: Mix | None = None
    grain: Grain = Grain.LEASE


class JobEnding(NamedTuple):
    """A job that its app gives up, and the reason."""

    row: int
    reason: str


class StopMode(Enum):
    """Why a plan stops jobs: only to make room for its claims, and not if no room was needed; or in any case."""

    FOR_OTHERS = auto()
    FIRM = auto()


def no_claims(_idle: tuple[int, ...]) -> tuple[Claim, ...]:
    """Claim nothing more, whatever is free."""
    return ()


@dataclass(frozen=True, slots=True)
class Plan:
    """Claims in order of priority. A running job continues if its claim allows what it holds, and is moved if not.

    wake        time at which to plan again even if nothing happened
    stops       rows of running jobs to stop; None: all that have no claim
    more        (free GPUs by type) -> further claims, asked for if GPUs are free once all claims have been served
    ends        jobs to cancel, before anything else
    over_share  rows of waiting jobs that would exceed their tenant's share, whatever is free: why they wait
    notes       for the journal
    """

    claims: tuple[Claim, ...]
    unfitting: Unfitting
    preemption: PreemptionRule
    wake: float = math.inf
    stops: tuple[int, ...] | None = None
    stopping: StopMode = StopMode.FIRM
    more: Callable[[tuple[int, ...]], tuple[Claim, ...]] = no_claims
    ends: tuple[JobEnding, ...] = ()
    over_share: tuple[int, ...] = ()
    notes: tuple[Note, ...] = ()

    @staticmethod
    def changing(claims: tuple[Claim, ...] = (), stops: tuple[int, ...] = (), wake: float = math.inf) -> "Plan":
        """A plan of changes only: jobs it does not name continue. The planner has made sure that all of it fits."""
        return Plan(claims, Unfitting.SKIPPED, PreemptionRule.NEVER, wake, stops, StopMode.FOR_OTHERS)


@runtime_checkable
class Planner(Protocol):
    """A policy that answers with whole plans."""

    def start(self) -> Any:  # noqa: ANN401 - each planner has its own memory
        """The memory before the first plan."""

    def plan(self, snapshot: Snapshot, memory: Any) -> tuple[Plan, Any]:  # noqa: ANN401
        """The plan as of now, and the memory to pass in next time."""


def unchanged(estimate: Estimate) -> Estimate:
    """See speeds as they are believed to be."""
    return estimate


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy as a value; combinators make new policies out of it.

    perceive   how the policy sees believed speeds; a heterogeneity-agnostic one sees all GPU types as equal
    """

    name: str
    answer: Order | Planner | Allocator
    perceive: Callable[[Estimate], Estimate] = unchanged
