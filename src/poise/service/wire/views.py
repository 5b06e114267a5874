"""What the server answers, one type per kind of answer: jobs, nodes, tenants, events, logs, tokens, the service itself.

All times are in seconds. `submitted`, `started`, `finished`, `ended`, `time`, `now` and `expires` are timestamps since 1970
(UTC), and so are `since`, `drained` and `emptied` of a node; everything else is a duration. Fields are part of the HTTP API
(docs/reference/api.md): they may be added, and neither renamed nor removed.
"""

from enum import StrEnum
from typing import Annotated

from pydantic import Field, StringConstraints

from poise.service.wire.request import JobRequest, Name, Wire

MOST_PIECE = 3 << 17  # bytes of an archive in one request, which are a third more as text


class JobState(StrEnum):
    """The state of a job. PAUSED: without GPUs for now, and resumed by itself. The last three are final."""

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
        """Whether the job has ended."""
        return self in {JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED}


class Flag(StrEnum):
    """What qualifies a job's state."""

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
    """A row of the queue.

    position     place among waiting jobs, from 1; None if it does not wait, or waits beyond the places that are counted
    gpus         GPUs that it holds; `wanted`: GPUs that it asked for
    gpu_type     type that it runs on, `v100+k80` if on several; None if it does not run
    waited, ran  total seconds so far
    restarts     runs after the first
    eta          seconds until it is expected to end; None: not known
    share        its tenant's fraction of all GPUs that are held now
    steps, total_steps, throughput, loss   as it has reported them; None: it has not
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
    steps: float | None = None
    total_steps: float | None = None
    throughput: float | None = None
    loss: float | None = None


class RunView(Wire):
    """One run of a job, from its launch to its end.

    codes    exit codes of its replicas by rank; a signal counts negative
    begun    step that it started from
    kept     step up to which its work was saved; None: not known yet
    lost     GPU-seconds of work that was done and not saved
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
    """Everything about a job. Only its owner and operators are shown the `request`.

    lost_gpu_seconds   work that was done and not saved; None: not known, because a run reported no steps
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

    total    number of matching jobs on all pages
    counts   the same by state
    """

    jobs: tuple[JobRow, ...]
    total: int
    counts: dict[str, int]


class FilePiece(Wire):
    """A piece of an archive that is uploaded: from byte `offset` on, of `total` bytes in all. An empty one only asks."""

    total: Annotated[int, Field(ge=1, le=1 << 40)]
    offset: Annotated[int, Field(ge=0, le=1 << 40)]
    data: Annotated[str, StringConstraints(max_length=MOST_PIECE * 4 // 3, pattern=r"^[A-Za-z0-9+/]*={0,2}$")]


class FileReceived(Wire):
    """How many bytes of an archive the service has; complete: all, and they are what the name says."""

    received: int
    complete: bool


class SubmittedView(Wire):
    """An accepted submission: the ids of its jobs, in order. `notes`: what has no effect, or not the expected one."""

    jobs: tuple[str, ...]
    notes: tuple[str, ...] = ()


class CommandResult(Wire):
    """A command was accepted: the state that the job is in now, and `text` if the state does not say what will follow."""

    job: str
    state: JobState
    text: str | None = None


class NamedJob(Wire):
    """A job by its name."""

    id: str
    name: str
    tenant: str
    state: JobState


class JobsCalled(Wire):
    """The jobs that a word in the place of an id can mean: one, some of several, or none.

    total   number of these jobs
    exact   it is the name of them; if not, their names begin with it
    """

    jobs: tuple[NamedJob, ...]
    total: int
    exact: bool


class Cancellation(Wire):
    """Which jobs to cancel: of a tenant (None: of all), of an app, in one of these states (none: that have not ended)."""

    tenant: Name | None = None
    app: Name | None = None
    states: Annotated[tuple[JobState, ...], Field(max_length=len(JobState))] = ()


class CancelledJobs(Wire):
    """How many jobs were cancelled, of a tenant or of all: those that were asked for and had not ended."""

    tenant: str | None
    jobs: int


class NodeCondition(StrEnum):
    """How a node is.

    UP            it takes new runs
    UNREACHABLE   nothing is heard of it at the moment; its runs may go on
    LOST          nothing runs there any more, and nothing can be started
    DRAINING      an operator keeps new runs away; some are still there
    DRAINED       the same, and nothing runs there any more
    """

    UP = "up"
    UNREACHABLE = "unreachable"
    LOST = "lost"
    DRAINING = "draining"
    DRAINED = "drained"


class NodeRun(Wire):
    """A run that holds GPUs of a node, or has not left them yet.

    slots     its GPUs on this node
    leaving   it was told to leave
    stays     of a run on a drained node that was not: why it goes on, and until when
    """

    job: str
    name: str
    tenant: str
    epoch: int
    slots: tuple[int, ...]
    leaving: bool
    stays: str | None = None


class NodeRow(Wire):
    """A node.

    jobs        ids of the jobs that hold its GPUs, by slot; None: free; `1+2`: two jobs share it
    leaving     likewise, jobs whose processes still run though the GPU is no longer theirs
    free        GPUs without either
    available   of those, GPUs that new runs may get; None: the server is too old to say
    alive       False: it is lost
    since       when it came into its state, if that is known;  evidence: why it is in that state
    withheld    slots that others use, which are not given out
    drained     since when it is drained; None: it is not. `drained_by` whom, and for what `drain_reason`
    emptied     since when nothing runs there, once it is drained
    """

    name: str
    gpu_type: str
    gpus: int
    free: int
    rack: str
    alive: bool
    jobs: tuple[str | None, ...]
    leaving: tuple[str | None, ...] = ()
    state: NodeCondition = NodeCondition.UP
    available: int | None = None
    since: float | None = None
    evidence: str | None = None
    withheld: tuple[int, ...] = ()
    drained: float | None = None
    drained_by: str | None = None
    drain_reason: str | None = None
    emptied: float | None = None
    runs: tuple[NodeRun, ...] = ()


class NodeList(Wire):
    """All nodes, in the cluster's order."""

    nodes: tuple[NodeRow, ...]


class NewDrain(Wire):
    """Why a node is drained, for those who ask."""

    reason: Annotated[str, StringConstraints(min_length=1, max_length=500, pattern=r"^[^\x00-\x1f\x7f]*$")] | None = None


class TenantShare(Wire):
    """A tenant, and what it gets.

    weight       multiplies the weights of its jobs
    entitled     fraction of all GPUs that the policy promises it while every tenant has enough to run; None: no promise
    held         its fraction of the GPUs that are held now
    gpu_seconds  received since the service started to account for it
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
    """All tenants, by name. `promise` says what the `policy` in force entitles tenants to."""

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
    """Actors that are not people. No token has such a name."""

    JOB = "job"
    POLICY = "policy"
    SERVICE = "service"


class EventRow(Wire):
    """One event, as a view of the journal.

    number   position in the journal; later events are asked for by it
    actor    an Actor, or the name of a person's token
    node     that it is about, if it is about one
    """

    number: int
    time: float
    actor: str
    kind: str
    job: str | None
    tenant: str | None
    text: str
    node: str | None = None


class EventPage(Wire):
    """Events in order. `next`: the number to ask from for more."""

    events: tuple[EventRow, ...]
    next: int


class Log(Wire):
    """A part of a replica's log. `next`: the offset to ask from for more; `ended`: nothing will be added."""

    text: str
    offset: int
    next: int
    ended: bool


class Role(StrEnum):
    """What a token may do; each role includes the one before.

    READER     see everything except other people's logs, commands and environments
    USER       submit jobs and control its own
    OPERATOR   control all jobs, and drain nodes
    ADMIN      change policy, shares and tokens
    """

    READER = "reader"
    USER = "user"
    OPERATOR = "operator"
    ADMIN = "admin"


class Account(Wire):
    """The account that a token belongs to."""

    name: Name
    tenant: Name
    role: Role
    expires: float | None = None


class NewToken(Wire):
    """A token to be made.

    tenant   owner of the jobs that it submits; None: a tenant of the token's name
    days     until it expires; None: never
    """

    name: Name
    tenant: Name | None = None
    role: Role = Role.USER
    days: Annotated[float, Field(gt=0, le=36_500)] | None = None


class MadeToken(Wire):
    """A new token; the only answer that shows the token itself."""

    token: str
    account: Account


class TokenList(Wire):
    """All accounts, without their tokens."""

    accounts: tuple[Account, ...]


class ServiceView(Wire):
    """The running service. `ready` is False while it can neither decide nor store, and `problem` says why.

    warnings   about how it was started, for whoever runs it
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
    """Any answer that is not 2xx: one line for people, a stable code for programs."""

    code: str
    detail: str
