"""The Ray back end: a remote back end whose agents are started by Ray.

    server ── RayBackend ── RemoteBackend ◀── HTTP ── agent, in an actor ── runs
                   └── driver process ── Ray                └── held by Ray on each node with GPUs

Ray says which nodes there are, accounts for their GPUs, and keeps agents alive. Orders and news go between server and
agents, as with any remote back end, so nothing here runs or ends a job. In particular, a node that Ray says is dead is not
lost before its lease has ended: its runs may live on without Ray.
"""

import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from poise.scheduler.model.cluster import Node
from poise.scheduler.model.errors import PoiseError, RequestError
from poise.service.backends.api import BackendFailed, OnEvent, OperatorLog
from poise.service.backends.ray.driver_process import DriverProcess
from poise.service.backends.ray.messages import DEFAULT_ADDRESS, AgentTerms, DriverOrder, DriverReport
from poise.service.backends.remote.backend import STANDARD, AgentAccess, RemoteBackend
from poise.service.backends.remote.identity import ServiceIdentity
from poise.service.backends.remote.relay import CheckpointPlaces

GRACE_LOOKS = 15  # reports for which the agent of a new node may take to join before the node is reported with its problem


@dataclass(frozen=True, slots=True)
class RayOptions:
    """How the Ray cluster is found, and how its agents are started.

    address       HOST:PORT of the head node; `auto`: as Ray finds it
    agent_state   directory on the nodes for the state of agents; None: below the default state directory there
    certificate   with which agents check the server, PEM; None: with those of their node
    """

    address: str = DEFAULT_ADDRESS
    agent_state: Path | None = None
    certificate: Path | None = None
    isolate: Literal["auto", "on", "off"] = "auto"


class RayBackend(RemoteBackend):
    """A `LiveBackend` on a Ray cluster."""

    def __init__(  # noqa: PLR0913 - those of a remote back end, and of Ray
        self,
        nodes: Iterable[Node],
        state_dir: Path,
        on_event: OnEvent,
        access: AgentAccess,
        options: RayOptions,
        log: OperatorLog,
        *,
        lease: float,
        checkpoints: CheckpointPlaces = STANDARD,
    ) -> None:
        nodes = tuple(nodes)
        self._log = log
        self._is_ready = False
        self._refusal: str | None = None
        self._warned: set[str] = set()
        self._problem: str | None = None
        self._looks: dict[str, int] = {}  # reports in a row in which a node had a problem
        service = ServiceIdentity(state_dir)
        service.save_now()  # the cluster is claimed by this name before any node has a lease
        terms = AgentTerms(
            service=service.identity, server=access.url, token=service.token, isolate=options.isolate,
            ca="" if options.certificate is None else options.certificate.read_text(),
            state="" if options.agent_state is None else str(options.agent_state),
        )  # fmt: skip
        order = DriverOrder(address=options.address, holder=secrets.token_hex(16), terms=terms)
        self._driver = DriverProcess(order, state_dir, self._hear_driver)
        try:
            if not nodes:
                self._check(self._driver.first())
            super().__init__(nodes, state_dir, on_event, access, lease=lease, checkpoints=checkpoints)
        except BaseException:
            self._driver.close()
            raise
        self._is_ready = True
        if self._refusal is not None:  # it came before there was a listener
            on_event(BackendFailed(self._refusal))

    def close(self) -> None:
        """Stop listening, and leave the cluster as it is: agents, their runs and the GPUs that they hold."""
        self._driver.close()
        super().close()

    def _check(self, first: DriverReport) -> None:
        """Refuse to start for the first time without a cluster.

        Later starts do not wait for Ray. Agents go on without it, and their leases run out while they get no answers. A
        service that must not drive the cluster any more stops when the driver says so.
        """
        if first.refusal is not None:
            raise RequestError(first.refusal)
        if first.problem is not None:
            raise PoiseError(f"no Ray cluster: {first.problem}")

    def _hear_driver(self, report: DriverReport) -> None:
        """Take a report. Called in the driver's thread."""
        for text in report.warnings:
            if text not in self._warned:
                self._warned.add(text)
                self._log.warning("ray", text=text)
        if report.problem != self._problem:
            self._problem = report.problem
            if report.problem is None:
                self._log.info("ray-connected")
            else:
                self._log.warning("ray-away", text=f"{report.problem}; runs go on")
        if report.refusal is not None:
            self._refusal = report.refusal
        if not self._is_ready:
            return
        if self._refusal is not None:
            self._on_event(BackendFailed(self._refusal))
            return
        self._looks = {each.name: self._looks.get(each.name, 0) + 1 for each in report.nodes if each.problem is not None}
        for each in report.nodes:
            is_due = not each.is_alive or self._looks.get(each.name, 0) >= GRACE_LOOKS
            node = Node(each.name, each.gpu_type, each.gpus, each.rack)
            self._post(partial(self._runs.hint, node, each.problem if is_due else None))
