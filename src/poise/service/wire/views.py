"""What the server answers. Times are seconds: moments since 1970 (UTC), spans as they are."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field, StringConstraints

from poise.service.wire.request import JobRequest, Name, Wire


class JobState(StrEnum):
    """Where a job stands. PAUSED: out of GPUs, and coming back by itself. The last three are final."""

    PENDING = "PENDING"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    CHECKPOINTING = "CHECKPOINTING"
    PAUSED = "PAUSED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def is_final(self) -> bool:
        """Nothing happens to the job any more."""
        return self in {JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED}


class Flag(StrEnum):
    """What else there is to say of a job's state."""

    HELD = "HELD"
    PREEMPTED = "PREEMPTED"
    RESTARTED = "RESTARTED"
    NODE_FAIL = "NODE_FAIL"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    TIMEOUT = "TIMEOUT"


class ReasonView(Wire):
    """Why a job runs, waits or has ended: a stable code, and a sentence with numbers."""

    code: str
    text: str


class WhyView(Wire):
    """The one dominant reason, the numbers behind it, and what would help."""

    job: str
    state: JobState
    reason: ReasonView
    evidence: tuple[str, ...] = ()
    advice: str | None = None


class JobRow(Wire):
    """A line of the queue.

    position     place among waiting jobs, from 1; None if it does not wait, or further back than places are counted
    gpus         GPUs it holds; `wanted`: GPUs it asked for
    gpu_type     type that it runs on, `v100+k80` if on several; None if it does not run
    waited, ran  seconds in all, until now
    restarts     runs after the first
    eta          seconds until it is expected to end; None: not known
    share        its tenant's part of all GPUs that are held now
    """

    id: str
    name: str
    tenant: str
    app: str | None
    state: JobState
    flags: tuple[Flag, ...]
    reason: ReasonView
    position: int | None
    gpus: int
    wanted: int
    gpu_type: str | None
    gpu_types: tuple[str, ...]
    submitted: float
    started: float | None
    finished: float | None
    waited: float
    ran: float
    restarts: int
    eta: float | None
    share: float | None


class RunView(Wire):
    """A stretch during which a job held GPUs.

    steps    where it began, and what of it was kept (None: not known yet)
    codes    exit codes of its replicas by rank; a signal counts negative
    lost     GPU-seconds of work that was done and not kept
    """

    epoch: int
    started: float
    ended: float | None
    gpus: dict[str, tuple[int, ...]]
    how: str | None
    cause: str | None
    codes: tuple[int | None, ...] = ()
    begun: float = 0.0
    kept: float | None = None
    lost: float | None = None


class JobDetail(Wire):
    """Everything about a job. `request` is there for its owner and for operators.

    lost_gpu_seconds   of work that was done and not kept; None: not known, as a run never reported any steps
    """

    job: JobRow
    preemptions: int
    failures: int
    gpu_seconds: float
    lost_gpu_seconds: float | None
    steps: float
    total_steps: float | None
    checkpoint_steps: float | None
    throughput: float | None
    loss: float | None
    cause: str | None
    runs: tuple[RunView, ...]
    request: JobRequest | None = None


class QueuePage(Wire):
    """Jobs in scheduling order: those that hold GPUs, then those that wait.

    total    how many there are of those that were asked for, on all pages;  counts: the same by state
    """

    jobs: tuple[JobRow, ...]
    total: int
    counts: dict[str, int]


class SubmittedView(Wire):
    """What became of a submission: the jobs' ids, in order; notes: what was asked for and has no effect."""

    jobs: tuple[str, ...]
    notes: tuple[str, ...] = ()


class CommandResult(Wire):
    """A wish was taken: the state that the job is in now, and what comes of it where that does not say it."""

    job: str
    state: JobState
    text: str | None = None


class CancelledJobs(Wire):
    """All jobs of a tenant that had not ended are cancelled: how many there were."""

    tenant: str
    jobs: int


class NodeRow(Wire):
    """A node: `jobs` are the ids of the jobs that hold its GPUs, by slot; None: none does; `1+2`: they share it.

    leaving   in the same way, jobs whose processes are still there though the GPU is no longer theirs
    free      GPUs without either
    """

    name: str
    gpu_type: str
    gpus: int
    free: int
    rack: str
    alive: bool
    jobs: tuple[str | None, ...]
    leaving: tuple[str | None, ...] = ()


class NodeList(Wire):
    """All nodes, in the cluster's order."""

    nodes: tuple[NodeRow, ...]


class TenantShare(Wire):
    """A tenant, and what it gets.

    weight       its own, and a factor of its jobs'
    entitled     the part of all GPUs that the policy promises it while all have enough to run; None: it promises no shares
    held         its part of the GPUs that are held now
    gpu_seconds  what it has received since the service began to keep books
    """

    tenant: str
    weight: float
    entitled: float | None
    held: float
    gpus: int
    running: int
    waiting: int
    gpu_seconds: float
    preemptions: int


class Shares(Wire):
    """All tenants, by name. `policy` is the one in force, and `promise` says what it entitles tenants to."""

    tenants: tuple[TenantShare, ...]
    policy: str | None = None
    promise: str | None = None


class Weight(Wire):
    """A tenant's new weight."""

    weight: Annotated[float, Field(ge=1e-3, le=1e3)]


class PolicyName(Wire):
    """A policy of the catalogue, with parameters and combinators as on the command line."""

    policy: Annotated[str, StringConstraints(min_length=1, max_length=500, pattern=r"^[\x20-\x7e]*$")]


class Actor(StrEnum):
    """Who does things beside people. No token is called so."""

    JOB = "job"
    POLICY = "policy"
    SERVICE = "service"


class EventRow(Wire):
    """Something that happened: a view of the journal.

    number   place in the journal: ask for what came after it
    actor    an Actor, or the name of a person's token
    """

    number: int
    time: float
    actor: str
    kind: str
    job: str | None
    tenant: str | None
    text: str


class EventPage(Wire):
    """In the order in which they happened; `next`: number to ask from for more."""

    events: tuple[EventRow, ...]
    next: int


class Log(Wire):
    """A part of a replica's log. `next`: offset to ask from for more; `ended`: nothing will be added."""

    text: str
    offset: int
    next: int
    ended: bool


class Role(StrEnum):
    """What a token may do, each more than the one before.

    READER     look at everything but other people's logs, commands and environments
    USER       and submit jobs, and do as they like with their own
    OPERATOR   and with everybody's
    ADMIN      and change policy, shares and tokens
    """

    READER = "reader"
    USER = "user"
    OPERATOR = "operator"
    ADMIN = "admin"


class Account(Wire):
    """Whom a token stands for."""

    name: Name
    tenant: Name
    role: Role
    expires: float | None = None


class NewToken(Wire):
    """A token to be made. `tenant`: whose jobs those are that it submits; None: called as it. `days`: None: it stays."""

    name: Name
    tenant: Name | None = None
    role: Role = Role.USER
    days: Annotated[float, Field(gt=0, le=36_500)] | None = None


class MadeToken(Wire):
    """The only time that the token itself is shown."""

    token: str
    account: Account


class TokenList(Wire):
    """All tokens, without the tokens."""

    accounts: tuple[Account, ...]


class ServiceView(Wire):
    """What runs here. `ready` is False while it cannot decide or keep anything, and `problem` says why.

    warnings   what whoever runs the service should know of how it was started
    """

    version: str
    policy: str
    cluster: str
    round: float
    now: float
    started: float
    ready: bool
    problem: str | None
    jobs: int
    warnings: tuple[str, ...] = ()


class ProblemView(Wire):
    """Every answer that is not 2xx: one line for people, a stable code for programs."""

    code: str
    detail: str
