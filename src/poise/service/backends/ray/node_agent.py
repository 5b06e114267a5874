"""The actor of one Ray node: runs the agent of the node, and tells how it is.

It is detached, on exactly this node, and Ray starts it again whenever it dies. Constructed without arguments, it does
nothing until the driver tells it what to do, which the driver does each second: so a restarted actor, a server with another
URL or token, and GPUs that have become free need no cases of their own. Its runs live in sessions of their own, out of
Ray's reach.

The actor itself has no GPUs in Ray's books. Those of the node are held by placement groups (`driver.py`), because an actor's
would be given to others while it is being restarted.
"""

import asyncio
import logging
import os
import ssl
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from time import sleep
from typing import NamedTuple

from poise import __version__
from poise.scheduler.model.errors import PoiseError
from poise.service.agent.agent import Agent, AgentConfig
from poise.service.backends.local.isolation import Isolate, isolated
from poise.service.backends.local.orders import LocalSettings
from poise.service.backends.local.processes import environment_of, environment_values
from poise.service.backends.ray.messages import AgentTerms
from poise.service.client.config import state_folder
from poise.service.wire.agent_messages import NodeSpec

STARTING = "its agent is being started"
FOLDER = "ray"  # below the default state directory
RAYLET_SECONDS = 1.0  # between two looks at whether the raylet lives
VISIBLE = b"CUDA_VISIBLE_DEVICES="


class AgentStatus(NamedTuple):
    """How the agent of a node is.

    held      Ray's ids of the GPUs that it was told of
    problem   why it does not run; None: it does
    """

    version: str
    held: tuple[str, ...]
    problem: str | None


class NodeAgent:
    """The actor. All its methods run in one asyncio loop."""

    def __init__(self) -> None:
        logging.getLogger("httpx").setLevel(logging.WARNING)
        threading.Thread(target=_end_with_raylet, args=(os.getppid(),), daemon=True).start()
        self._told: tuple[AgentTerms, NodeSpec] | None = None
        self._held: tuple[str, ...] | None = None
        self._agent: Agent | None = None
        self._running: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()  # a driver may be told while the call of the one before it is still waiting

    async def tell(self, terms: str, spec: str, held: tuple[str, ...] | None) -> AgentStatus:
        """Run the agent like this from now on; start it again if it has ended.

        terms, spec   as JSON, which survives differences of versions
        held          Ray's ids of the GPUs that are held for Poise; None: the same as before, or not known yet, and then
                      nothing is started
        """
        async with self._lock:
            return await self._run_as_told(AgentTerms.model_validate_json(terms), NodeSpec.model_validate_json(spec), held)

    async def _run_as_told(self, terms: AgentTerms, spec: NodeSpec, held: tuple[str, ...] | None) -> AgentStatus:
        told = terms, spec
        if held is not None:
            self._held = held
        if self._held is None:
            return AgentStatus(__version__, (), STARTING)
        problem = await self._end_if_over()
        withheld = withheld_slots(told[1].gpus, self._held, raylet_devices())
        if told != self._told:
            await self._stop()
            self._told = told
        if self._running is None:
            try:
                self._start(*told, withheld)
            except (OSError, PoiseError, ValueError) as error:
                return AgentStatus(__version__, self._held, str(error))
        elif self._agent is not None:
            self._agent.withhold(withheld)
            problem = problem or self._agent.problem
        return AgentStatus(__version__, self._held, problem)

    async def release(self, service: str) -> bool:
        """Stop the agent, without which the node's lease is not renewed; return whether processes of runs still live.

        An actor that was restarted by Ray may not have been told yet where the state of the node is. But that path has the
        name of the service in it, and processes of runs have the path.
        """
        async with self._lock:
            await self._stop()
        mark = f"/{service}/".encode()
        return await asyncio.to_thread(lambda: any(mark in value for value in environment_values(b"POISE_RUN_DIR")))

    def _start(self, terms: AgentTerms, spec: NodeSpec, withheld: tuple[int, ...]) -> None:
        root = Path(terms.state) if terms.state else state_folder(os.environ) / FOLDER
        state = root / terms.service / spec.name
        config = AgentConfig(
            terms.server, terms.token, spec.model_copy(update={"withheld": withheld}), state,
            settings=LocalSettings(isolation=isolated(Isolate(terms.isolate), state).level),
            devices=dict(enumerate(raylet_devices())), verify=trusting(terms.ca) if terms.ca else True,
        )  # fmt: skip
        self._agent = Agent(config)
        self._running = asyncio.get_running_loop().create_task(self._agent.run())

    async def _stop(self) -> None:
        if self._running is not None:
            self._running.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await self._running
            self._running = self._agent = self._told = None

    async def _end_if_over(self) -> str | None:
        """Say what the agent has died of, if it has."""
        running = self._running
        if running is None or not running.done():
            return None
        error = running.exception()
        await self._stop()
        return None if error is None else f"its agent has failed: {error}"


def _end_with_raylet(raylet: int) -> None:
    """End this process once the node's raylet is gone: Ray does not, and the GPUs are not held for Poise any more.

    Runs have until the end of the node's lease for the raylet to come back with another agent.
    """
    while os.getppid() == raylet:
        sleep(RAYLET_SECONDS)
    os._exit(1)


def trusting(certificate: str) -> ssl.SSLContext:
    """Trust the server's own certificate, given as PEM, besides those that this machine trusts.

    It need not be self-signed: of a chain, the first certificate is enough.
    """
    context = ssl.create_default_context()
    context.load_verify_locations(cadata=certificate)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def withheld_slots(gpus: int, held: Iterable[str], visible: list[str]) -> tuple[int, ...]:
    """Name the slots of a node that are not held for Poise.

    Ray names a GPU by its index, or, where the node itself was given some of its machine's GPUs, as it was given.
    """
    places = {name: slot for slot, name in enumerate(visible or map(str, range(gpus)))}
    ours = {places[each] for each in held if each in places}
    return tuple(slot for slot in range(gpus) if slot not in ours)


def raylet_devices() -> list[str]:
    """Name the GPUs that the node was started with, in order; empty: all of the machine, by index.

    Ray changes the variable of its workers, so that of their parent tells.
    """
    for each in environment_of(os.getppid()):
        if each.startswith(VISIBLE):
            return [name.strip() for name in os.fsdecode(each.removeprefix(VISIBLE)).split(",") if name.strip()]
    return []
