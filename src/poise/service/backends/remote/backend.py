"""The remote back end: `LiveBackend` over the agents of nodes, which connect to it.

One thread runs an asyncio loop, with the HTTP server for agents and `RemoteRuns`, which needs no locks for that reason. The
engine's orders are handed to the loop and return at once; logs are read in the caller's thread, from files that the agents
have shipped to the state directory of the service.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from socket import socket
from ssl import SSLContext
from time import monotonic, sleep
from typing import TypeVar

from poise.scheduler.model.cluster import Node
from poise.scheduler.model.errors import InvariantError
from poise.service.backends.api import BackendFailed, DesiredState, LogPart, OnEvent, RunNotice, RunOrder
from poise.service.backends.local.logs import read_log
from poise.service.backends.local.state_dir import StateDir, token
from poise.service.backends.remote.agent_api import AgentApi
from poise.service.backends.remote.agent_http import AgentListener
from poise.service.backends.remote.authority import AgentAuthority, SharedToken
from poise.service.backends.remote.identity import ServiceIdentity
from poise.service.backends.remote.relay import CheckpointPlaces, RelayedCheckpoints
from poise.service.backends.remote.runs import RemoteRuns

Answer = TypeVar("Answer")
KEEP_ALIVE = 120  # seconds for which a connection of an agent may wait for its next request
LOOK_SECONDS = 0.25  # between two looks at which nodes are silent
LEASE_SECONDS = 60.0  # of a node, unless the operator says otherwise
ADOPT_SECONDS = 3.0  # how long `adopt` waits for agents to connect; they try several times a second
STANDARD = CheckpointPlaces()
SETTLE_SECONDS = 30.0  # how long it waits for those that have connected to look at their runs


@dataclass(frozen=True, slots=True)
class AgentAccess:
    """How agents reach the server: a socket that listens, the URL that leads there, and TLS, if any."""

    bound: socket
    url: str
    tls: SSLContext | None = None


class RemoteBackend:
    """A `LiveBackend` whose runs are on other machines.

    nodes   that the cluster has had so far; others may join
    lease   seconds after which a node that does not hear from the server has ended its runs
    checkpoints   where those of jobs are kept that do not say so themselves
    authority     knows the tokens of agents; None: they share the one in the state directory
    """

    def __init__(  # noqa: PLR0913 - most have a value that is usual
        self,
        nodes: Iterable[Node],
        state_dir: Path,
        on_event: OnEvent,
        access: AgentAccess,
        *,
        lease: float = LEASE_SECONDS,
        adopt_seconds: float = ADOPT_SECONDS,
        checkpoints: CheckpointPlaces = STANDARD,
        authority: AgentAuthority | None = None,
    ) -> None:
        self._state = StateDir(state_dir)
        self._on_event, self._access, self._adopt_seconds = on_event, access, adopt_seconds
        service = ServiceIdentity(state_dir)
        self._authority = SharedToken(service.token) if authority is None else authority
        self._relay = RelayedCheckpoints(self._state, checkpoints, service.identity)
        self._runs = RemoteRuns(service, nodes, on_event, lease=lease, place_of=self._relay.place_of)
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._is_closed = False
        self._listener: AgentListener | None = None
        self._thread = threading.Thread(target=self._run, name="remote-backend", daemon=True)
        self._thread.start()
        self._started.wait()

    def adopt(self, runs: Sequence[tuple[RunOrder, DesiredState]]) -> None:
        """Let agents in, and wait a moment for them to say what became of these runs.

        Nodes that do not report in that time keep their runs as they are, until they report or their lease has ended.
        """
        for order, _ in runs:
            token(order.job)
        self._call(lambda: self._runs.adopt(runs))
        wanted = {part.node for order, _ in runs for part in order.gpus}
        first, last = monotonic() + self._adopt_seconds, monotonic() + SETTLE_SECONDS
        while wanted and monotonic() < last:
            if self._call(lambda: self._runs.has_heard_of(wanted)):
                return
            if monotonic() > first and self._call(self._runs.is_settled):
                return
            sleep(0.01)

    def launch(self, order: RunOrder) -> None:
        """Begin a run once its GPUs are free and the job's run before it is gone."""
        token(order.job)
        self._post(lambda: self._runs.launch(order))

    def stop(self, job: str, epoch: int, notice: RunNotice) -> None:
        """Ask a run for a checkpoint and its GPUs."""
        self._post(lambda: self._runs.stop((job, epoch), notice))

    def kill(self, job: str, epoch: int, reason: str) -> None:
        """End a run whose job is not wanted any more."""
        self._post(lambda: self._runs.kill((job, epoch), reason))

    def log(self, job: str, replica: int, offset: int, limit: int) -> LogPart:
        """Read at most `limit` bytes of what the nodes have shipped of a replica's log; from any thread."""
        self._post(lambda: self._runs.watch(job))
        return LogPart(*read_log(self._state.handle, token(job), replica, offset, limit))

    def close(self) -> None:
        """Stop listening; agents and their runs go on, and find the next server by themselves."""
        if not self._is_closed:
            self._is_closed = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: it has failed
                self._loop.call_soon_threadsafe(self._stop)
            self._thread.join()
            self._state.close()

    # The thread

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:  # which ends requests that are left over, too
                runner.run(self._serve())
        except BaseException as error:
            if not self._is_closed:
                self._on_event(BackendFailed(repr(error)))
            raise
        finally:
            self._started.set()

    async def _serve(self) -> None:
        access = self._access
        api = AgentApi(self._runs, self._state, self._authority, self._relay)
        # On a copy of the socket: a service that could not write for a while opens another back end on it.
        self._listener = AgentListener(api.app(), access.bound, access.tls, keep_alive=KEEP_ALIVE)
        serving = self._loop.create_task(self._listener.serve(self._started.set))
        while not serving.done():
            self._runs.look()
            with contextlib.suppress(OSError):  # tried again at the next look
                await self._runs.save()
            await asyncio.wait([serving], timeout=LOOK_SECONDS)
        await api.close()
        serving.result()

    def _stop(self) -> None:
        if self._listener is not None:  # else it was refused before it listened, and ends by itself
            self._listener.stop()
        for link in self._runs.links.values():  # requests for orders would wait for a long time
            link.close()

    def _post(self, callback: Callable[[], None]) -> None:
        if not self._thread.is_alive():
            raise InvariantError("the remote back end has stopped")
        self._loop.call_soon_threadsafe(callback)

    def _call(self, callback: Callable[[], Answer]) -> Answer:
        """Call back in the loop's thread, and return what it returns."""
        answer: Future[Answer] = Future()

        def calling() -> None:
            try:
                answer.set_result(callback())
            except BaseException as error:
                answer.set_exception(error)

        self._post(calling)
        while True:
            with contextlib.suppress(TimeoutError):
                return answer.result(1.0)
            if not self._thread.is_alive():
                raise InvariantError("the remote back end has stopped")
