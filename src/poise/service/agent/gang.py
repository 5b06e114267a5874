"""Parts of one run on several nodes: what their agents tell each other, with or without a server.

    stop.json, save.json   of rank 0, to all other nodes; once all have it, rank 0 finds `….acknowledged.json`
    rank-<r>.json          of every other rank, to the node of rank 0
    the end of a part      that did not finish, to all other nodes, which end theirs

Agents show each other the key of the run, which came with the order. A file is sent until it is answered or the part is
over, the end of a part for a minute: longer than most leases, with which the others end too. Each can be sent twice without
harm. An agent that was just started does not know its parts yet, and says so. Directories of such runs are looked at a
hundred times a second, by their status: a worker replaces them by renaming, and sends no message.
"""

import asyncio
import logging
import os
import re
import socket
from collections.abc import Callable, Container
from contextlib import suppress
from dataclasses import dataclass
from secrets import compare_digest
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from poise.service.backends.api import RunEnding, RunOrder
from poise.service.backends.local.lease_files import now
from poise.service.backends.local.orders import ranks_here
from poise.service.backends.local.state_dir import StateDir
from poise.service.backends.remote.agent_http import AgentListener
from poise.service.backends.run_table import Key
from poise.service.wire.agent_messages import NodeSpec, PartOrder
from poise.worker.protocol import SAVE, STOP, acknowledged

LOG = logging.getLogger("poise.agent")
LOOK_SECONDS = 0.01
LOOK_AGAIN = 1.0  # seconds after which files are looked at though nothing seems to have changed
RECENT_NANOSECONDS = 30e6  # a kernel's tick is 1 to 10 ms
RETRY_SECONDS = 0.1
END_TRIES = 600  # to say that a part has ended
ANSWER_SECONDS = 5.0
MOST_BYTES = 16 << 20  # of a file that is passed on
_PASSED = re.compile(r"stop\.json|save\.json|rank-[0-9]{1,7}\.json")

EndPart = Callable[[Key, RunEnding], None]


class Gangs:
    """The runs of several nodes that have a part on this one.

    end_part   called when another part has ended that did not finish: end this one too
    """

    def __init__(self, node: str, state: StateDir, end_part: EndPart) -> None:
        self._node, self._state, self._end_part = node, state, end_part
        self._parts: dict[Key, PartOrder] = {}
        self._ranks: dict[Key, list[int]] = {}  # of this node
        self._expected: dict[Key, PartOrder] = {}  # whose files are being fetched: they can end, and take no files yet
        self._is_settled = False  # whether it is known which parts are here
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._watches: dict[Key, DirectoryWatch] = {}
        self._watching: asyncio.Task[None] | None = None
        self._telling: set[asyncio.Task[None]] = set()  # kept here, as nothing else refers to them
        self._http = httpx.AsyncClient(timeout=ANSWER_SECONDS)

    def expect(self, part: PartOrder) -> None:
        """A part is being prepared here: other nodes may say that theirs have ended."""
        self._expected[part.job, part.epoch] = part

    def dismiss(self, key: Key) -> None:
        """It is not any more."""
        self._expected.pop(key, None)

    def enter(self, part: PartOrder, order: RunOrder) -> None:
        """Pass files of a part on from now on, if its run has others."""
        key = part.job, part.epoch
        if len(part.gpus) > 1:
            # A server that was just started does not know yet where the other nodes are.
            before = self._parts.get(key)
            peers = {**({} if before is None else before.peers), **part.peers}
            self._parts[key], self._ranks[key] = part.model_copy(update={"peers": peers}), ranks_here(order)
            if self._watching is None:
                self._watching = asyncio.get_running_loop().create_task(self._watch())
            if key not in self._tasks:
                self._watches[key] = DirectoryWatch(str(self._state.run_path(*key)))
                self._tasks[key] = asyncio.get_running_loop().create_task(self._pass_files(key))

    def ended(self, key: Key, how: RunEnding) -> None:
        """A part of this node is over: tell the others if they have to end for it."""
        part = self._parts.pop(key, None)
        self._ranks.pop(key, None)
        self._watches.pop(key, None)
        task = self._tasks.pop(key, None)
        if task is not None:
            task.cancel()
        if part is not None and how is not RunEnding.FINISHED:
            for node in part.peers:
                telling = asyncio.get_running_loop().create_task(self._tell_end(part, node, how))
                self._telling.add(telling)
                telling.add_done_callback(self._telling.discard)

    def keep(self, keys: Container[Key]) -> None:
        """Forget all runs but these: the others have ended while there was no server to tell."""
        self._is_settled = True
        self._expected.clear()
        for key in [key for key in self._parts if key not in keys]:
            del self._parts[key], self._ranks[key], self._watches[key]
            self._tasks.pop(key).cancel()

    def deadline(self, key: Key) -> float | None:
        """Return how long a part has to save its work when it is asked to leave; None: it is not here."""
        part = self._parts.get(key)
        return None if part is None else part.request.checkpoint.deadline

    async def close(self) -> None:
        """Stop passing anything on."""
        left = [*self._tasks.values(), *self._telling, *([] if self._watching is None else [self._watching])]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await self._http.aclose()

    # What this node sends

    async def _watch(self) -> None:
        """Look at the directories of all runs, again and again."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for watch in self._watches.values():
                watch.look()

    async def _pass_files(self, key: Key) -> None:
        """Watch the files of a run and pass each new version on, until the part is over."""
        order = self._parts[key]
        first = order.gpus[0][0]
        is_first = first == self._node
        others = [node for node, _, _ in order.gpus if node != self._node] if is_first else [first]
        names = [STOP, SAVE] if is_first else [f"rank-{rank}.json" for rank in self._ranks[key]]
        seen: dict[str, object] = {}
        watch = self._watches[key]
        while True:
            watch.changed.clear()
            for name in names:
                stamp = self._state.stamp(*key, name)
                if stamp is None or stamp == seen.get(name):
                    continue
                fields = self._state.get(*key, name)
                if fields is None:
                    continue
                await asyncio.gather(*(self._send(key, "PUT", node, name, fields) for node in others))
                with suppress(OSError):  # tried again at the next look
                    if is_first:
                        self._state.put(*key, acknowledged(name), {"step": fields.get("step")})
                    seen[name] = stamp
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_AGAIN):  # not `wait_for`, which may lose a cancellation before Python 3.12
                    await watch.changed.wait()

    async def _tell_end(self, part: PartOrder, node: str, how: RunEnding) -> None:
        key = part.job, part.epoch
        await self._send(key, "POST", node, "ended", {"how": how.value}, part, tries=END_TRIES)

    async def _send(
        self, key: Key, method: str, node: str, name: str, fields: dict[str, Any],
        part: PartOrder | None = None, tries: int | None = None,
    ) -> None:  # fmt: skip
        """Send until it is answered, to wherever the agent of that node is by now; it may not be known yet.

        404: the other node does not have the run (yet, or any more); 503: it does not know whether it has.
        """
        while tries is None or tries > 0:
            current = part or self._parts[key]
            url = current.peers.get(node)
            with suppress(httpx.HTTPError):
                if url is None:
                    raise httpx.ConnectError("it is not known where the node is")
                where = f"{url}/runs/{current.job}/{current.epoch}/{name}"
                answer = await self._http.request(method, where, json=fields, headers={"X-Poise-Key": current.key})
                if answer.is_success or (answer.status_code == httpx.codes.NOT_FOUND and method == "POST"):
                    return
            tries = None if tries is None else tries - 1
            await asyncio.sleep(RETRY_SECONDS)

    # What others send

    def app(self) -> Starlette:
        """Make the application that other agents talk to."""

        async def answer(request: Request) -> Response:
            key = request.path_params["job"], int(request.path_params["epoch"])
            name, is_end = request.path_params["name"], request.method == "POST"
            part = self._parts.get(key) or (self._expected.get(key) if is_end else None)
            if part is None:
                return Response(status_code=404 if self._is_settled else 503)
            if not part.key or not compare_digest(request.headers.get("X-Poise-Key", "").encode(), part.key.encode()):
                return Response(status_code=403)
            if int(request.headers.get("content-length", MOST_BYTES + 1)) > MOST_BYTES:
                return Response(status_code=413)
            fields = await request.json()
            if not isinstance(fields, dict):
                return Response(status_code=400)
            if is_end and name == "ended":
                self._end_part(key, RunEnding(fields["how"]))
            elif request.method == "PUT" and _PASSED.fullmatch(name):
                fields.pop("version", None)
                try:
                    self._state.put(*key, name, fields)
                except OSError as error:
                    LOG.warning("%s of run %s/%s cannot be written: %s", name, *key, error)
                    return Response(status_code=507)
            else:
                return Response(status_code=404)
            return Response(status_code=204)

        return Starlette(routes=[Route("/runs/{job}/{epoch:int}/{name}", answer, methods=["PUT", "POST"])])


class DirectoryWatch:
    """Whether something was put into a directory: the time of its last change says so, at the cost of one system call."""

    def __init__(self, path: str) -> None:
        self._path, self._seen = path, 0
        self.changed = asyncio.Event()

    def look(self) -> None:
        """Set `changed` if something was.

        Two changes within one tick of the kernel's clock look like one, so a recent one counts again.
        """
        with suppress(OSError):
            stamp = os.stat(self._path).st_mtime_ns
            if stamp != self._seen or abs(now() * 1e9 - stamp) < RECENT_NANOSECONDS:
                self._seen = stamp
                self.changed.set()


@dataclass(frozen=True, slots=True)
class PeerServer:
    """The listener for other agents, on a port of its own."""

    port: int
    _listener: AgentListener
    _serving: asyncio.Task[None]

    async def close(self) -> None:
        """Stop listening."""
        self._listener.stop(at_once=True)
        await asyncio.wait([self._serving])


async def serve_peers(app: Starlette, node: NodeSpec, host: str | None = None) -> PeerServer:
    """Listen for other agents on the node's address, or on another one; on any port if the node names none.

    host   where to listen; None: on the node's address; "": on all that there are
    """
    host = node.address if host is None else host
    is_both = host == "" and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if ":" in host or is_both else socket.AF_INET
    with socket.create_server((host, node.port), family=family, dualstack_ipv6=is_both) as bound:
        port, listener = bound.getsockname()[1], AgentListener(app, bound)
    return PeerServer(port, listener, asyncio.get_running_loop().create_task(listener.serve()))
