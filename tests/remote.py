"""A remote back end under test, with the agents of its nodes on loopback addresses of this machine."""

import asyncio
import gc
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.backends import QUICK, Stage, _environ, _pids, until

from poise.scheduler.model.cluster import Node
from poise.service.agent.agent import Agent, AgentConfig
from poise.service.backends.api import DesiredState, NodeState, RunOrder
from poise.service.backends.local.orders import LocalSettings
from poise.service.backends.remote.backend import AgentAccess, RemoteBackend
from poise.service.backends.remote.identity import TOKEN_FILE
from poise.service.wire.agent_messages import NodeSpec

NODES = (Node("v100-0", "v100", 4), Node("v100-1", "v100", 4), Node("k80-0", "k80", 2))


class AgentThread:
    """The agent of a node, in a thread of this process."""

    def __init__(self, config: AgentConfig) -> None:
        self.config = config
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[None] | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name=config.node.name, daemon=True)
        self._thread.start()
        self._started.wait()

    def _run(self) -> None:
        async def serve() -> None:
            self._task = asyncio.current_task()
            self._agent = Agent(self.config)
            self._started.set()
            try:
                await self._agent.run()
            finally:
                await hang_up()

        try:
            with suppress(asyncio.CancelledError), asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(serve())
        finally:
            self._started.set()

    def call(self, action: Callable[[Agent], None]) -> None:
        """Do something with the agent, in its loop."""
        self._loop.call_soon_threadsafe(lambda: action(self._agent))

    def stop(self) -> None:
        """End the agent; its runs go on."""
        if self._task is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()


class RemoteStage(Stage):
    """A remote back end in a directory, which may be closed and opened again under its agents."""

    def __init__(
        self, folder: Path, nodes: tuple[Node, ...] = NODES, settings: LocalSettings = QUICK, *, lease: float = 60.0
    ) -> None:
        super().__init__()
        self.folder, self.nodes, self.settings, self.lease = folder, nodes, settings, lease
        self._bound = listening()
        self.url = f"http://127.0.0.1:{self._bound.getsockname()[1]}"
        self.backend = self.open()
        self.agents = {node.name: self.agent(node) for node in nodes}
        self.backend.adopt([])
        self.joined(*self.agents)

    def open(self, **more: Any) -> RemoteBackend:
        """Open a server on the same port as before."""
        (self.folder / "server").mkdir(exist_ok=True)
        access = AgentAccess(self._bound, self.url)
        lease = more.pop("lease", self.lease)
        self.backend = RemoteBackend(self.nodes, self.folder / "server", self.tell, access, lease=lease, **more)
        return self.backend

    def agent(self, node: Node, **more: Any) -> AgentThread:
        """Start the agent of a node."""
        spec = NodeSpec(name=node.name, gpu_type=node.gpu_type, gpus=node.gpus, rack=node.rack)
        token = (self.folder / "server" / TOKEN_FILE).read_text().strip()
        settings = more.pop("settings", self.settings)
        return AgentThread(AgentConfig(self.url, token, spec, self.folder / node.name, settings=settings, **more))

    def joined(self, *names: str) -> None:
        """Wait until these nodes are up."""
        until(lambda: all(self.node_state(name) is NodeState.UP for name in names))

    def node_state(self, name: str) -> NodeState | None:
        """What the back end last said of a node."""
        return next((each.state for each in reversed([*self.reports]) if each.node.name == name), None)

    def reopen(self, *runs: tuple[RunOrder, DesiredState]) -> None:
        """As after a crash of the server: a new one that is told what the journal knows."""
        self.backend.close()
        self.open().adopt(runs)

    def processes(self, *names: str) -> list[int]:
        """Everything that carries a mark of these nodes; of all, if none is named."""
        marks = [b"POISE_RUN_DIR=" + bytes(self.folder / name) + b"/" for name in names or self.agents]
        return [pid for pid in _pids() if any(each.startswith(mark) for each in _environ(pid) for mark in marks)]

    def close(self) -> None:
        """End what runs, as a server does that knows of nothing; afterwards nothing must be left."""
        self.reopen()
        until(lambda: not self.processes())
        for agent in self.agents.values():
            agent.stop()
        self.backend.close()
        self._bound.close()
        gc.collect()  # a connection that was left open fails this test, and not whichever is running when it is found


async def hang_up() -> None:
    """Close the connections of this loop that httpx has dropped without closing them.

    It does so if it is cancelled while it closes some that the server has closed before (seen with httpcore 1.0.9). The
    garbage collector would close them, with a warning that fails whichever test is running then.
    """
    loop = asyncio.get_running_loop()
    for transport in [*loop._transports.values()]:  # type: ignore[attr-defined]
        transport.abort()
    await asyncio.sleep(0)


def listening(port: int = 0) -> socket.socket:
    """A socket that listens on a port of this machine; on a free one if none is named."""
    return socket.create_server(("127.0.0.1", port))
