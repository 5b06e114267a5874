"""What a policy answers: an order of all jobs, or a plan of claims; and the policy itself as a value.

A policy that is nothing but an order says so (`Order`): a rank for each job, asked for again only when something happens
to that job, so that the core keeps the order incrementally. Any other policy is a `Planner`: it looks at a frozen
snapshot and answers with a whole plan. Both are pure; what they remember is a value that goes in and comes out.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple, Protocol, runtime_checkable

from poise.scheduler.model.action import Note
from poise.scheduler.model.cluster import Site
from poise.scheduler.model.job_table import JobView, Snapshot
from poise.scheduler.model.micro_batches import Mix
from poise.scheduler.model.speed import Estimate, Locality
from poise.scheduler.model.workload import Allocator


class Unfitting(Enum):
    """What a claim that does not fit does to the claims behind it."""

    BLOCKS = auto()
    SKIPPED = auto()


class PreemptionRule(Enum):
    """May a job of higher rank take GPUs from a running job of lower rank?"""

    NEVER = auto()
    BY_RANK = auto()


class TieBreak(Enum):
    """How jobs of equal rank stand: by submission, or as they stood at the previous decision."""

    BY_SUBMISSION = auto()
    BY_PREVIOUS_DECISION = auto()


class Rank(NamedTuple):
    """Where a job stands: smaller first, by queue, then section, then value; equal ranks as the order says (`TieBreak`).

    value    as of the moment of asking
    slope    change of the value per second while the job runs; a waiting job's value stands still
    until    moment at which the policy must be asked again although nothing happened to the job
    memory   what the policy wants to be reminded of about this job
    """

    value: float
    queue: int = 0
    section: int = 0
    slope: float = 0.0
    until: float = math.inf
    memory: tuple[float, ...] = ()


def any_locality(_job: JobView) -> Locality:
    """The usual wish: close together is welcome, but not worth waiting for."""
    return Locality.CLUSTER


def learn_nothing(memory: Any, _job: JobView) -> tuple[Any, bool]:  # noqa: ANN401 - each order has its own memory
    """The usual way to learn from a finished job: not at all."""
    return memory, False


@dataclass(frozen=True, slots=True)
class Order:
    """A policy that is nothing but an order.

    rank     (job, its previous rank or None, memory) -> its rank now. Asked when a job arrives, starts, stops, when its
             rank's `until` has come, and once more after the decision at that moment if it still runs.
    asks     the locality that the job insists on; asked once, at submission
    memory   what the order knows of jobs that have finished; `learn` updates it and says whether ranks are now stale
    ticking  the rank by a clock of whole seconds; None: it is the same by any clock
    """

    rank: Callable[[JobView, Rank | None, Any], Rank]
    preemption: PreemptionRule
    unfitting: Unfitting
    ties: TieBreak = TieBreak.BY_SUBMISSION
    asks: Callable[[JobView], Locality] = any_locality
    memory: Any = None
    learn: Callable[[Any, JobView], tuple[Any, bool]] = learn_nothing
    ticking: Callable[[JobView, Rank | None, Any], Rank] | None = None


class StopMode(Enum):
    """What the stops of a plan are for: to make room for its claims, and undone where none was needed; or firm."""

    FOR_OTHERS = auto()
    FIRM = auto()


def no_claims(_idle: tuple[int, ...]) -> tuple["Claim", ...]:
    """No claim, whatever is free."""
    return ()


class Grain(Enum):
    """For how long GPUs are given to a job: until a later decision, or for one task of its current round each."""

    LEASE = auto()
    TASK = auto()


class Claim(NamedTuple):
    """A wish for a job's whole gang in this decision, at this locality or closer.

    types    GPU types that it may be given, the best first; None: any on which the job runs, its fastest first
    beside   another job of equal gang that is to share these GPUs; it must hold none, or share them already
    gpus     how many; None: the gang that the job asks for. Others only as far as the job can do with them
    site     just here, whatever locality and types say; its GPUs add up to `gpus`
    mix      so many GPUs of each type, whatever `types` and `gpus` say: for jobs whose rounds divide into tasks
    grain    TASK: one task of the current round on each of the GPUs of `mix` or `site`, besides those it is computing on
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
    """A job that its app gives up, and why."""

    row: int
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """Claims in order. A running job goes on where its claim allows what it holds, and is moved where it does not.

    stops     running jobs to stop; None: all that are not claimed for
    more      (free GPUs by type) -> further claims, if any GPUs are left over once all claims have been looked at
    wake      moment at which to plan again although nothing happened
    ends      jobs to give up for good, before anything else
    held      waiting jobs that are held back for their tenant's share, whatever is free: that is what they wait for
    notes     what people should know of this plan; they go into the journal
    """

    claims: tuple[Claim, ...]
    unfitting: Unfitting
    preemption: PreemptionRule
    wake: float = math.inf
    stops: tuple[int, ...] | None = None
    stopping: StopMode = StopMode.FIRM
    more: Callable[[tuple[int, ...]], tuple[Claim, ...]] = no_claims
    ends: tuple[JobEnding, ...] = ()
    held: tuple[int, ...] = ()
    notes: tuple[Note, ...] = ()

    @staticmethod
    def changing(claims: tuple[Claim, ...] = (), stops: tuple[int, ...] = (), wake: float = math.inf) -> "Plan":
        """A plan that says only what is to change, by a planner that has seen to it that all of it fits."""
        return Plan(claims, Unfitting.SKIPPED, PreemptionRule.NEVER, wake, stops, StopMode.FOR_OTHERS)


@runtime_checkable
class Planner(Protocol):
    """A policy that answers with whole plans."""

    def start(self) -> Any:  # noqa: ANN401 - each planner has its own memory
        """The memory before the first plan."""

    def plan(self, snapshot: Snapshot, memory: Any) -> tuple[Plan, Any]:  # noqa: ANN401
        """The plan for this moment, and the memory to hand in next time."""


def unchanged(estimate: Estimate) -> Estimate:
    """See speeds as they are believed to be."""
    return estimate


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy as a value; combinators make new ones of it.

    perceive   how the policy sees what is believed of speeds (heterogeneity-agnostic: all types alike)
    """

    name: str
    answer: Order | Planner | Allocator
    perceive: Callable[[Estimate], Estimate] = unchanged
