"""Actions: what the core asks a back end to do, in the order in which to do it; and the journal entry, events and actions.

An action is imperative and may fail; a failure comes back as an event. Actions carry job and epoch, so applying one twice
has the same effect as applying it once. As with events, the journal stores names of classes and fields by position.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from poise.scheduler.model.cluster import Holding
from poise.scheduler.model.event import Event


class Waited(NamedTuple):
    """Seconds that a job waited before a launch, by cause (Philly §3.1; docs/algorithms/philly.md).

    order           it would have fitted, but the policy put other jobs first or held it back
    fragmentation   enough GPUs were free, but not as close together as its claim requires
    capacity        fewer GPUs were free than the gang needs
    """

    order: float
    fragmentation: float
    capacity: float


class PreemptionCause(StrEnum):
    """Why a run is stopped before its job is done.

    OUTRANKED   a job of higher rank needs the GPUs
    UNPLANNED   the policy's plan has no claim for the job
    MOVED       the job continues on other GPUs
    RESIZED     the job continues with another number of GPUs
    VALIDATED   its trial run is over
    HELD        its owner put it on hold
    DRAINED     its node is drained: GPUs that it holds are not given out any more
    """

    OUTRANKED = "outranked"
    UNPLANNED = "unplanned"
    MOVED = "moved"
    RESIZED = "resized"
    VALIDATED = "validated"
    HELD = "held"
    DRAINED = "drained"


@dataclass(frozen=True, slots=True)
class Launch:
    """Start the whole gang on exactly these GPUs, from its checkpoint if it has one."""

    job: str
    epoch: int
    gpus: Holding
    waited: Waited


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute one task of the job's current training step on each of these GPUs, and free each when done (`Computed`).

    The first tasks of a step begin a new epoch; further tasks of the same step may follow on other GPUs.
    """

    job: str
    epoch: int
    gpus: Holding
    waited: Waited


@dataclass(frozen=True, slots=True)
class Preempt:
    """Stop the run with a checkpoint.

    beneficiary   the job that gets the GPUs; None if that is no other job
    """

    job: str
    epoch: int
    why: PreemptionCause
    beneficiary: str | None


@dataclass(frozen=True, slots=True)
class Reject:
    """Refuse the job: it can never run on this cluster as asked. `reason` names the constraint that cannot be met."""

    job: str
    reason: str


@dataclass(frozen=True, slots=True)
class Abandon:
    """Give the job up as failed: it has used up its retries, or its failure is not worth one."""

    job: str
    reason: str


@dataclass(frozen=True, slots=True)
class Cancel:
    """Cancel the job, running or not, because its app has no use for it any more. `reason` says why."""

    job: str
    reason: str


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Send `Woke` at this time. Replaces any earlier `WakeAt`."""

    time: float


@dataclass(frozen=True, slots=True)
class Remark:
    """A note about a decision for the people who run the cluster, e.g. that a deadline cannot be met."""

    text: str


@dataclass(frozen=True, slots=True)
class Traded:
    """A note: a tenant has bought GPUs of a fast type from another tenant, and pays with GPUs of a slow type.

    gpus    of the fast type, as a long-run average
    price   GPUs of the slow type for each of them
    """

    buyer: str
    seller: str
    fast: str
    slow: str
    gpus: float
    price: float


@dataclass(frozen=True, slots=True)
class Entitled:
    """A note: a tenant is now entitled to this many GPUs of each type (in the cluster's order), as a long-run average."""

    tenant: str
    gpus: tuple[float, ...]


Note = Remark | Traded | Entitled
"""Actions that ask for nothing: they are recorded for people to read."""

Action = Launch | Compute | Preempt | Reject | Abandon | Cancel | Note | WakeAt


class JournalEntry(NamedTuple):
    """One step of the core: the events of one timestamp, and the actions that it answered with.

    The journal is a sequence of these. Metrics, replay and bug reports all read it.
    """

    now: float
    events: tuple[Event, ...]
    actions: tuple[Action, ...]
