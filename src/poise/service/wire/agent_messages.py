"""What the server and the agents of nodes say to each other (docs/reference/agent-protocol.md), version 1.

An agent opens a session (`Hello`, `Welcome`). In it orders go down and news come up, each numbered from 1, and each sent
again until it is confirmed. The first order of a session is `AdoptOrder`.
"""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from poise.service.wire.request import RELAY, JobPlace, JobRequest, Name, Sha256, Wire

PROTOCOL = 1
MOST_NEWS = 500  # pieces of news, or orders, of one message
MOST_PIECES = 200  # logs of one message
SOONEST = 0.5  # seconds between two reports of progress and logs, if there are few nodes

Identity = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
"""Of a node or a service: made at its first start, and kept."""
JobId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}$")]
Epoch = Annotated[int, Field(ge=1, lt=1 << 60)]
Line = Annotated[str, StringConstraints(max_length=2_000)]


class NodeSpec(Wire):
    """A node as its agent describes it.

    address    under which other nodes reach it;  port: of its listener for the agents of other nodes
    withheld   slots that are used by others, and must not be given out
    """

    name: Name
    gpu_type: Name
    gpus: Annotated[int, Field(ge=1, le=1_024)]
    rack: Name = "rack-0"
    address: Annotated[str, StringConstraints(min_length=1, max_length=253)] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, lt=1 << 16)] = 0
    withheld: tuple[int, ...] = ()


class Hello(Wire):
    """An agent asks for a session.

    identity   of the node
    service    whose runs the node has; None: it has none
    """

    protocol: int
    version: Line
    node: NodeSpec
    identity: Identity
    service: Identity | None = None


class Welcome(Wire):
    """The answer to `Hello`.

    lease   seconds for which each answer of the server lets the node run things, from when the agent sent its request
    poll    seconds after which a request for orders is answered, if there are none
    """

    service: Identity
    session: Identity
    lease: float
    poll: float
    version: Line


class PartOrder(Wire):
    """One part of a run: `RunOrder` of the back end, and how to reach the other parts.

    gpus     of all parts: node, GPU type, slots
    master   address of the node with rank 0;  port: MASTER_PORT, or 0 on that node, which then chooses
    peers    by node: where the agents of the other parts listen
    key      which they show each other
    kept_at  where the job's checkpoints are kept: `relay`, or its own directory, as a path that all nodes share or as a URL
    """

    job: JobId
    epoch: Epoch
    gpus: tuple[tuple[str, str, tuple[int, ...]], ...]
    request: JobRequest
    tenant: str
    ran: float
    beside: str | None
    speeds: dict[str, float]
    reason: str | None
    master: str
    port: int
    peers: dict[str, str] = Field(default_factory=dict)
    key: str = ""
    kept_at: JobPlace = RELAY


class AdoptedPart(Wire):
    """A part that is open on the node, and what is wanted of it (`DesiredState`).

    may_begin   whether the node may begin it, if it has nothing of it; not while an earlier run of the job lives elsewhere
    """

    order: PartOrder
    desired: Literal["run", "leave", "gone"]
    may_begin: bool = True


class AdoptOrder(Wire):
    """These parts, and no others, are open on the node."""

    kind: Literal["adopt"] = "adopt"
    parts: tuple[AdoptedPart, ...]


class LaunchOrder(Wire):
    """Start a part."""

    kind: Literal["launch"] = "launch"
    part: PartOrder


class PeersOrder(Wire):
    """Another part of the run has moved: `peers` of this order are where they are now. Nothing is started by it."""

    kind: Literal["peers"] = "peers"
    part: PartOrder


class StopOrder(Wire):
    """Ask a part for a checkpoint and its GPUs, within `deadline` seconds."""

    kind: Literal["stop"] = "stop"
    job: JobId
    epoch: Epoch
    cause: str
    text: str
    deadline: float


class KillOrder(Wire):
    """End a part whose run is not wanted any more, or has failed elsewhere."""

    kind: Literal["kill"] = "kill"
    job: JobId
    epoch: Epoch
    reason: str


class WatchOrder(Wire):
    """A user reads the log of a part: report what is new of it every half second for a while."""

    kind: Literal["watch"] = "watch"
    job: JobId
    epoch: Epoch


AgentOrder = Annotated[
    AdoptOrder | LaunchOrder | PeersOrder | StopOrder | KillOrder | WatchOrder, Field(discriminator="kind")
]  # fmt: skip


class OrdersRequest(Wire):
    """All orders up to number `done` have been carried out, or are on the node's disk."""

    session: Identity
    done: Annotated[int, Field(ge=0)]


class OrdersAnswer(Wire):
    """Orders in a row; the first has this number.

    every   seconds between two reports of progress and logs: the more nodes, the fewer
    """

    first: int
    orders: tuple[AgentOrder, ...] = ()
    every: float = SOONEST


class PartBegan(Wire):
    """All replicas of a part have started. `port`: MASTER_PORT, `begun`: as of `RunBegan`, both of the part with rank 0."""

    kind: Literal["began"] = "began"
    job: JobId
    epoch: Epoch
    at: float
    port: int
    begun: float | None = None


class PartProgressed(Wire):
    """What rank 0 reports (`RunProgressed`)."""

    kind: Literal["progressed"] = "progressed"
    job: JobId
    epoch: Epoch
    at: float
    steps: float
    total: float | None
    checkpoint: float | None
    throughput: float | None
    loss: float | None


class PartEnded(Wire):
    """Nothing of a part is left on its node (`RunEnded`). `failed_at`: when its first replica failed; None: none did."""

    kind: Literal["ended"] = "ended"
    job: JobId
    epoch: Epoch
    at: float
    how: Literal["finished", "yielded", "failed"]
    steps: float | None
    cause: str | None
    codes: tuple[int | None, ...]
    failed_at: float | None = None


class PartUnknown(Wire):
    """The node has nothing of a part that it was to adopt, and does not begin it.

    It may not (`AdoptedPart.may_begin`), or cannot: only the node of rank 0 chooses the port.
    """

    kind: Literal["unknown"] = "unknown"
    job: JobId
    epoch: Epoch


class NodeAdopted(Wire):
    """Every part of the last `AdoptOrder` was looked at."""

    kind: Literal["adopted"] = "adopted"


class NodeWithholds(Wire):
    """From now on these slots are used by others."""

    kind: Literal["withholds"] = "withholds"
    slots: tuple[int, ...]


AgentNews = Annotated[
    PartBegan | PartProgressed | PartEnded | PartUnknown | NodeAdopted | NodeWithholds, Field(discriminator="kind")
]  # fmt: skip


class NewsRequest(Wire):
    """News in a row; the first has this number. `now`: the time by the clock that dates them."""

    session: Identity
    now: float
    first: Annotated[int, Field(ge=1)]
    news: Annotated[tuple[AgentNews, ...], Field(max_length=MOST_NEWS)]


class NewsAnswer(Wire):
    """All news up to this number are known."""

    seen: int


class BlobNames(Wire):
    """What the server keeps of a job's checkpoints. `most`: bytes that one of them may have."""

    names: tuple[str, ...]
    most: int


class BlobAnswer(Wire):
    """What the server has received of a blob, and put on its disk."""

    bytes: int
    sha256: str


class ArchiveName(Wire):
    """Files that were shipped with jobs of a tenant."""

    tenant: Name
    sha256: Sha256


class LogPiece(Wire):
    """A piece of a log: the replica, the byte of the node's own log with which it begins, and its length."""

    job: JobId
    rank: Annotated[int, Field(ge=0, le=1_000_000)]
    offset: Annotated[int, Field(ge=0)]
    length: Annotated[int, Field(ge=0)]


class LogsRequest(Wire):
    """Pieces of different logs. Their bytes follow the message, which is one line, without anything between them."""

    session: Identity
    pieces: Annotated[tuple[LogPiece, ...], Field(max_length=MOST_PIECES)]


class LogsAnswer(Wire):
    """Up to which byte the server has each of these logs; None: it cannot be kept now."""

    received: tuple[int | None, ...]


class AgentRefusal(Wire):
    """Why a request was refused: a code, and a sentence.

    codes: starting, session-over, agent-version, foreign-service, name-taken, wrong-request, unauthorized, storage,
    too-large, not-found
    """

    code: str
    detail: str
