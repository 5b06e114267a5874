"""Wishes: imperative, in the order in which they are to be carried out. A failure to comply comes back as a fact."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from poise.scheduler.model.cluster import Holding
from poise.scheduler.model.event import Event


class Waited(NamedTuple):
    """Seconds a job waited before a launch, by cause (Philly §3.1; ALGORITHMS §6.2).

    order           it would have fitted, but the policy put others first or held it back
    fragmentation   enough GPUs were free, but not as close together as the claim insists on
    capacity        fewer GPUs were free than the gang needs
    """

    order: float
    fragmentation: float
    capacity: float


class PreemptionCause(StrEnum):
    """Why a run ends before its job does."""

    OUTRANKED = "outranked"
    UNPLANNED = "unplanned"
    MOVED = "moved"
    RESIZED = "resized"
    VALIDATED = "validated"
    HELD = "held"


@dataclass(frozen=True, slots=True)
class Launch:
    """Start, or resume from its checkpoint, the whole gang on just these GPUs."""

    job: str
    epoch: int
    gpus: Holding
    waited: Waited


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute one task of the job's current round of training on each of these GPUs, and give them back (`Computed`).

    A new epoch begins with the first tasks of a round; further ones of the same round may follow on other GPUs.
    """

    job: str
    epoch: int
    gpus: Holding
    waited: Waited


@dataclass(frozen=True, slots=True)
class Preempt:
    """Stop the run with a checkpoint. `beneficiary` is the job that the GPUs are held for, if it is another one."""

    job: str
    epoch: int
    why: PreemptionCause
    beneficiary: str | None


@dataclass(frozen=True, slots=True)
class Reject:
    """The job cannot run here as asked, ever; `reason` says which constraint cannot be met."""

    job: str
    reason: str


@dataclass(frozen=True, slots=True)
class Abandon:
    """The job failed once more than it may be retried."""

    job: str
    reason: str


@dataclass(frozen=True, slots=True)
class Cancel:
    """Give the job up, run or not: its app wants it no more. `reason` says why."""

    job: str
    reason: str


@dataclass(frozen=True, slots=True)
class Remark:
    """Nothing to do: something that people should know of a decision, such as a deadline that cannot be met."""

    text: str


@dataclass(frozen=True, slots=True)
class Traded:
    """Nothing to do: a tenant has bought GPUs of a fast type from another for GPUs of a slow one.

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
    """Nothing to do: a tenant is now entitled to so many GPUs of each type, in the cluster's order, in the long run."""

    tenant: str
    gpus: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Send `Woke` at this moment; replaces any earlier wish of this kind."""

    time: float


Note = Remark | Traded | Entitled
"""What people should know; nothing is to be done."""

Action = Launch | Compute | Preempt | Reject | Abandon | Cancel | Note | WakeAt


# What happened: facts and wishes in order. Metrics, replay and bug reports all read this.


class JournalEntry(NamedTuple):
    """One instant: the facts that arrived and the wishes they led to."""

    now: float
    events: tuple[Event, ...]
    actions: tuple[Action, ...]
