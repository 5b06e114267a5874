"""Events: what a back end tells the core. Each is a fact, in the past tense, and true.

Events arrive in batches that share one timestamp (`Scheduler.handle(now, events)`), and the core reads a batch in order:
first what ended, then what was lost, returned or restricted, then what arrived. An event about a run carries the epoch of
that run, which is the number of the job's launches so far. The core drops an event whose epoch is no longer current, so a
late report of an earlier run does no harm.

The journal stores the name of each class in lower case and its fields by position: renaming a class or changing its
fields is another version of the journal (`engine/journal.py`).
"""

from dataclasses import dataclass

from poise.scheduler.model.cluster import Holding
from poise.scheduler.model.job import Job
from poise.scheduler.model.speed import Estimate

# What is known of speeds. These come before the first job that they describe.


@dataclass(frozen=True, slots=True)
class Estimated:
    """Jobs of a kind are now believed to have these speeds. Precedes the first job of its kind; may be sent again."""

    kind: str
    estimate: Estimate


@dataclass(frozen=True, slots=True)
class Colocated:
    """Jobs of two kinds, of equal gang, are now believed to have these speeds while they share GPUs.

    Both kinds have been estimated before.

    rates   by GPU type, packed: steps per second of a job of `kind` and of one of `other`; 0 where they cannot share,
            or where nothing is known
    """

    kind: str
    other: str
    rates: tuple[tuple[float, float], ...]


# Jobs arrive.


@dataclass(frozen=True, slots=True)
class Submitted:
    """A job has arrived.

    kind    names the estimate that holds for it
    steps   declared work; inf if unknown
    """

    job: Job
    kind: str
    steps: float


@dataclass(frozen=True, slots=True)
class Revealed:
    """What is true of the job that was submitted just before, where that differs from what is believed.

    For metrics only: the core ignores it.

    steps   its true work
    rates   steps per second of the whole gang, packed, by GPU type
    """

    job: str
    steps: float
    rates: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Carried:
    """A job that was submitted before this journal begins, in its present state.

    Only estimates come before it, and what has happened to nodes.

    steps      declared work; inf if unknown
    epoch      of its current run, or of its last one
    done       steps done when the current run began; if it waits, steps done so far
    received   seconds with GPUs before the current run
    failures   how many of its runs have failed
    since      start of the current run; if it waits, since when
    gpus       what it holds; empty while it waits
    held       its owner holds it back
    attached   since when its current run can be preempted with little loss (`Attached`); None if it cannot
    until      end of its back-off after a failure; None if it does not back off
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


# A run goes on, or ends.


@dataclass(frozen=True, slots=True)
class Attached:
    """The job's run has reported that it can be preempted: it has done a step, and saves its state when asked to stop."""

    job: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Progressed:
    """The job's run has reported how far it is (`steps`) and the loss of its model, which its owner minimises."""

    job: str
    epoch: int
    steps: float
    loss: float


@dataclass(frozen=True, slots=True)
class Finished:
    """The job's run has completed the job's work. It may have been asked to stop shortly before."""

    job: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The job's run has died by itself.

    steps   where the job would resume
    final   the back end rules out a retry, whatever the retry rule says
    """

    job: str
    epoch: int
    cause: str
    steps: float
    final: bool = False


@dataclass(frozen=True, slots=True)
class Stopped:
    """The job's run has stopped because it was preempted or its node was lost; the job would resume from `steps`."""

    job: str
    epoch: int
    steps: float


@dataclass(frozen=True, slots=True)
class Computed:
    """Each of these GPUs has computed one task of the job's current training step, and is free again."""

    job: str
    epoch: int
    gpus: Holding


@dataclass(frozen=True, slots=True)
class Synchronised:
    """All tasks of the job's step have been computed and combined. That ends the run; the job resumes from `steps`."""

    job: str
    epoch: int
    steps: float


# The owner of a job intervenes.


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The owner has withdrawn the job."""

    job: str


@dataclass(frozen=True, slots=True)
class Held:
    """The owner has put the job on hold: it must not run until it is released."""

    job: str


@dataclass(frozen=True, slots=True)
class Released:
    """The owner has released a held job."""

    job: str


# The cluster and the clock.


@dataclass(frozen=True, slots=True)
class NodeLost:
    """A node is gone, and with it every run that had GPUs on it."""

    node: int


@dataclass(frozen=True, slots=True)
class NodeReturned:
    """A lost node is back. Its GPUs are free, except those that are closed (`NodeRestricted`): they stay so."""

    node: int


@dataclass(frozen=True, slots=True)
class NodeRestricted:
    """Which GPUs of a node are given out has changed. This replaces what was said of the node before.

    Nothing starts on a closed GPU. The node may be lost: what is closed stays so when it returns. May come before `Carried`
    jobs, whose runs are then treated as those that were there already.

    closed    slots that are not given out from now on, ascending; () opens all
    drained   whether runs that hold a closed slot are to leave as soon as they may be preempted, rather than go on
    """

    node: int
    closed: tuple[int, ...]
    drained: bool


NodeEvent = NodeLost | NodeReturned | NodeRestricted


@dataclass(frozen=True, slots=True)
class Belated:
    """This batch became known too late to decide anything at its timestamp; the core only records what it says."""


@dataclass(frozen=True, slots=True)
class Woke:
    """The time that the core asked to be woken at (`WakeAt`) has come."""


Event = (
    Estimated | Colocated | Submitted | Revealed | Carried | Attached | Finished | Failed | Stopped | Computed | Synchronised
    | Progressed | Cancelled | Held | Released | NodeLost | NodeReturned | NodeRestricted | Belated | Woke
)  # fmt: skip
