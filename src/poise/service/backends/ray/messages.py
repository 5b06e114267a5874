"""What the back end and its driver process say to each other: one JSON object a line.

The back end writes `DriverOrder` to the driver's stdin, once; that end of the pipe stays open, and its closing ends the
driver. The driver writes `DriverReport` to stdout about once a second.
"""

from typing import Literal

from poise.service.wire.request import Wire

DEFAULT_ADDRESS = "auto"  # Ray looks for a cluster of this machine


class AgentTerms(Wire):
    """What the agent of every node has to know.

    service   identity of the service
    server    URL for agents;  ca: certificates to check it with, PEM; empty: those of the node
    state     directory on the node, in which there is one per service and node; empty: the default
    isolate   as `poise agent --isolate`
    """

    service: str
    server: str
    token: str
    ca: str = ""
    state: str = ""
    isolate: Literal["auto", "on", "off"] = "auto"


class DriverOrder(Wire):
    """What a driver is started for.

    holder   names this start of the service, to tell two servers of one identity apart
    """

    address: str
    holder: str
    terms: AgentTerms


class RayNodeReport(Wire):
    """A node with GPUs as Ray knows it.

    gpus       0: it is dead, and was so before the driver was started
    is_alive   whether Ray says so
    problem    why the node takes no orders, in words for people; None: it should
    """

    name: str
    gpu_type: str
    gpus: int
    rack: str
    is_alive: bool
    problem: str | None = None


class DriverReport(Wire):
    """How it stands.

    nodes      all that Ray has told of since the driver was started
    warnings   for the operator
    refusal    why this service must not or cannot drive the cluster; the driver ends
    problem    why there is no connection at the moment; the driver ends, and another one may have more luck
    """

    nodes: tuple[RayNodeReport, ...] = ()
    warnings: tuple[str, ...] = ()
    refusal: str | None = None
    problem: str | None = None
