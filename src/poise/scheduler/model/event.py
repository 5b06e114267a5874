"""Facts: past tense and true. They arrive at the core in batches that share one instant.

The order inside a batch is the order in which it is to be read: what ended, what was lost or returned, what arrived.
A fact about a run carries the epoch of that run (the count of the job's launches); a stale one is recognised by it.
"""

from dataclasses import dataclass

from poise.scheduler.model.cluster import Holding
from poise.scheduler.model.job import Job
from poise.scheduler.model.speed import Estimate


@dataclass(frozen=True, slots=True)
class Estimated:
    """The speed of a kind of job is now believed to be this. It precedes the first job of its kind."""

    kind: str
    estimate: Estimate


@dataclass(frozen=True, slots=True)
class Colocated:
    """Jobs of two kinds, of equal gang, are now believed to have these speeds while they share GPUs, by GPU type, packed.

    Both kinds have been estimated before. 0: they cannot share there, or nobody knows.
    """

    kind: str
    other: str
    rates: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Submitted:
    """A job arrived. `kind` names the estimate that holds for it; `steps` is its declared work, inf if nobody knows."""

    job: Job
    kind: str
    steps: float


@dataclass(frozen=True, slots=True)
class Revealed:
    """What is true of the job that arrived just before, where it is not what is believed: for metrics, not for the core.

    steps   its work;  rates: steps per second of the whole gang, packed, by GPU type
    """

    job: str
    steps: float
    rates: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Carried:
    """A job that was submitted before this journal begins, as it stands now. Only estimates come before it.

    epoch      of its current run, or of its last one
    done       steps done when the current run began, or until now
    received   seconds with GPUs before the current run
    since      start of the current run; or since when it waits
    gpus       what it holds; empty: it waits
    held       its owner holds it back
    attached   since when its current run is attached; None: it is not
    until      it backs off after a failure until then; None: it does not
    """

    job: Job
    kind: str
    steps: float
    epoch: int
    done: float
    received: float
    failures: int
    since: float
    gpus: Holding
    held: bool
    attached: float | None = None
    until: float | None = None


@dataclass(frozen=True, slots=True)
class Attached:
    """A run has done a step, and can save what it does: from now on it leaves when it is asked to, and loses little."""

    job: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Finished:
    """A run reached the end of its job's work, perhaps after it had been asked to stop."""

    job: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A run died by itself; the job would go on from `steps`, unless nothing is to be hoped for any more (`final`)."""

    job: str
    epoch: int
    cause: str
    steps: float
    final: bool = False


@dataclass(frozen=True, slots=True)
class Stopped:
    """A run that was preempted, or whose node was lost, has stopped; the job would go on from `steps`."""

    job: str
    epoch: int
    steps: float


@dataclass(frozen=True, slots=True)
class Computed:
    """These GPUs have each computed a task of the current round of training, and are free again."""

    job: str
    epoch: int
    gpus: Holding


@dataclass(frozen=True, slots=True)
class Synchronised:
    """All tasks of a round have been computed and put together; the job would go on from `steps`. That was the run."""

    job: str
    epoch: int
    steps: float


@dataclass(frozen=True, slots=True)
class Progressed:
    """A run has come so far, and its model is now as good as this: `loss` is what its owner minimises."""

    job: str
    epoch: int
    steps: float
    loss: float


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The owner withdrew the job."""

    job: str


@dataclass(frozen=True, slots=True)
class Held:
    """The owner wants the job not to run until further notice."""

    job: str


@dataclass(frozen=True, slots=True)
class Released:
    """The owner wants a held job to run again."""

    job: str


@dataclass(frozen=True, slots=True)
class NodeLost:
    """A node is gone, and so are the runs that had GPUs on it."""

    node: int


@dataclass(frozen=True, slots=True)
class NodeReturned:
    """A lost node is back, with all its GPUs free."""

    node: int


@dataclass(frozen=True, slots=True)
class Belated:
    """Everything at this instant became known later, so late that nothing can be decided for it any more."""


@dataclass(frozen=True, slots=True)
class Woke:
    """The moment that the core asked to be woken at has come."""


Event = (
    Estimated
    | Colocated
    | Submitted
    | Revealed
    | Carried
    | Attached
    | Finished
    | Failed
    | Stopped
    | Computed
    | Synchronised
    | Progressed
    | Cancelled
    | Held
    | Released
    | NodeLost
    | NodeReturned
    | Belated
    | Woke
)
