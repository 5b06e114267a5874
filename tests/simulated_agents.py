"""Many agents in one process, for load: they speak the real protocol to a real server, and run nothing.

Each has three connections, as a real one has: on one it waits for orders, on the others it sends news and logs. A run
that is launched has begun a moment later, reports progress and writes a line of its log every now and then, and
ends after a time that is drawn; when it is asked to leave, it does. What is sent when is as in `poise.service.agent`.
"""

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic, time  # noqa: TID251  agents date their news
from typing import Any

from poise import __version__
from poise.scheduler.model.cluster import Node
from poise.service.wire.agent_messages import PROTOCOL

START_SECONDS, LEAVE_SECONDS = 0.2, 0.3
"""What a start and a leave take on a node."""
FIRST_REPORT = 1.5
"""Seconds after which a run has done a step, and says that it can leave."""
STEPS_PER_SECOND = 10.0
LINE = b"step 1234, loss 0.5678, 10.0 steps/s, 320 images/s, lr 0.001\n"
LINE_SECONDS = 10.0
"""Between two lines that a run writes."""


class AgentConnection:
    """One connection that is kept open: requests are few bytes, answers hardly looked at."""

    def __init__(self, port: int, token: str) -> None:
        self._port = port
        self._head = f"Host: 127.0.0.1:{port}\r\nAuthorization: Bearer {token}\r\nContent-Type: application/json\r\n"
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, path: str, body: bytes) -> Any:
        """Send a request; return the answer. RuntimeError if it is refused."""
        try:
            head, answer = await self._send(path, body)
        except (asyncio.IncompleteReadError, ConnectionError):  # the server closes what was idle for long
            self._streams = None
            head, answer = await self._send(path, body)
        if not head.startswith(b"http/1.1 200"):
            raise RuntimeError(f"{path}: {head!r} {answer!r}")
        return json.loads(answer)

    async def _send(self, path: str, body: bytes) -> tuple[bytes, bytes]:
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        writer.write(f"POST {path} HTTP/1.1\r\n{self._head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.partition(b"content-length: ")[2].partition(b"\r")[0])
        return head, await reader.readexactly(length)

    def close(self) -> None:
        """Hang up."""
        if self._streams is not None:
            self._streams[1].close()


@dataclass(eq=False)
class SimulatedPart:
    """A part of a run on one node."""

    job: str
    epoch: int
    has_rank_0: bool
    port: int
    began: float = field(default_factory=monotonic)
    lines: int = 0  # of its log that were sent
    end: asyncio.TimerHandle | None = None


@dataclass
class AgentTotals:
    """What all agents have seen."""

    alive: int = 0
    begun: int = 0
    finished: int = 0
    left: int = 0
    requests: int = 0


class SimulatedAgent:
    """The agent of one node."""

    def __init__(self, node: Node, port: int, token: str, mean_seconds: float, totals: AgentTotals) -> None:
        self._node, self._mean, self._totals = node, mean_seconds, totals
        self._orders, self._news, self._reports = (AgentConnection(port, token) for _ in range(3))
        self._draw = random.Random(node.name)
        self._parts: dict[tuple[str, int], SimulatedPart] = {}
        self._queue: list[dict[str, Any]] = []
        self._first = 1
        self._wake = asyncio.Event()
        self._session = ""
        self._every = 1.0  # seconds between two reports of progress and logs

    async def run(self) -> None:
        """Serve until cancelled."""
        await asyncio.sleep(self._draw.random())  # they do not all come at the same moment
        spec = {"name": self._node.name, "gpu_type": self._node.gpu_type, "gpus": self._node.gpus, "rack": self._node.rack}
        identity = f"{self._draw.getrandbits(128):032x}"
        hello = {"protocol": PROTOCOL, "version": __version__, "node": spec | {"port": 1}, "identity": identity}
        welcome = await self._ask(self._orders, "/agent/hello", hello)
        self._session = welcome["session"]
        try:
            async with asyncio.TaskGroup() as group:
                for each in (self._take_orders(), self._send_news(), self._report()):
                    group.create_task(each)
        finally:
            self._orders.close()
            self._news.close()
            self._reports.close()

    async def _ask(self, line: AgentConnection, path: str, body: dict[str, Any], more: bytes = b"") -> Any:
        self._totals.requests += 1
        return await line.ask(path, json.dumps(body, separators=(",", ":")).encode() + more)

    async def _take_orders(self) -> None:
        done = 0
        while True:
            answer = await self._ask(self._orders, "/agent/orders", {"session": self._session, "done": done})
            self._every = answer["every"]
            for number, order in enumerate(answer["orders"], answer["first"]):
                if number == done + 1:
                    self._carry_out(order)
                    done = number

    def _carry_out(self, order: dict[str, Any]) -> None:
        if order["kind"] == "adopt":
            self._tell({"kind": "adopted"})
            for part in order["parts"]:  # runs that were placed here before the node had joined
                self._launch(part["order"])
                if part["desired"] != "run":
                    self._leave(part["order"])
        elif order["kind"] == "launch":
            self._launch(order["part"])
        elif order["kind"] in ("stop", "kill"):
            self._leave(order)

    def _launch(self, given: dict[str, Any]) -> None:
        key = given["job"], given["epoch"]
        if key not in self._parts:
            has_rank_0 = given["gpus"][0][0] == self._node.name
            self._parts[key] = SimulatedPart(*key, has_rank_0, 1234 if has_rank_0 else 0)
            asyncio.get_running_loop().call_later(START_SECONDS, self._begin, key)

    def _leave(self, given: dict[str, Any]) -> None:
        key = given["job"], given["epoch"]
        asyncio.get_running_loop().call_later(LEAVE_SECONDS, self._end, key, "yielded")

    def _begin(self, key: tuple[str, int]) -> None:
        part = self._parts.get(key)
        if part is not None:
            part.began = monotonic()
            self._totals.alive += part.has_rank_0
            self._totals.begun += part.has_rank_0
            self._tell({"kind": "began", "job": part.job, "epoch": part.epoch, "at": time(), "port": part.port})
            seconds = random.Random(part.job).expovariate(1 / self._mean)  # the same for all parts of a run
            loop = asyncio.get_running_loop()
            part.end = loop.call_later(seconds, self._end, key, "finished")
            loop.call_later(FIRST_REPORT, self._progressed, key)

    def _end(self, key: tuple[str, int], how: str) -> None:
        part = self._parts.pop(key, None)
        if part is not None:
            if part.end is not None:
                part.end.cancel()
                self._totals.alive -= part.has_rank_0
            self._totals.finished += part.has_rank_0 and how == "finished"
            self._totals.left += part.has_rank_0 and how == "yielded"
            news = {"kind": "ended", "job": part.job, "epoch": part.epoch, "at": time(), "how": how, "cause": None}
            self._tell(news | {"steps": self._steps(part), "codes": [0]})

    def _progressed(self, key: tuple[str, int]) -> None:
        part = self._parts.get(key)
        if part is not None and part.has_rank_0:
            steps = self._steps(part)
            news = {"kind": "progressed", "job": part.job, "epoch": part.epoch, "at": time(), "steps": steps}
            self._tell(news | {"total": 1e6, "checkpoint": steps, "throughput": STEPS_PER_SECOND, "loss": 0.5})

    def _steps(self, part: SimulatedPart) -> float:
        return float(int((monotonic() - part.began) * STEPS_PER_SECOND))

    def _tell(self, news: dict[str, Any]) -> None:
        self._queue.append(news)
        self._wake.set()

    async def _send_news(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            news, self._queue = self._queue[:500], self._queue[500:]
            body = {"session": self._session, "now": time(), "first": self._first, "news": news}
            await self._ask(self._news, "/agent/news", body)
            self._first += len(news)
            if self._queue:
                self._wake.set()

    async def _report(self) -> None:
        """Report progress and logs of all runs, as often as the server wants it."""
        while True:
            await asyncio.sleep(self._every)
            running = [part for part in self._parts.values() if part.has_rank_0 and part.end is not None]
            for part in running:
                self._progressed((part.job, part.epoch))
            await self._send_logs(running)

    async def _send_logs(self, parts: Sequence[SimulatedPart]) -> None:
        due = {part: int((monotonic() - part.began) / LINE_SECONDS) + 1 for part in parts}
        new = {part: lines for part, lines in due.items() if lines > part.lines}
        if new:
            text = b"".join(LINE * (lines - part.lines) for part, lines in new.items())
            pieces = [
                {"job": part.job, "rank": 0, "offset": len(LINE) * part.lines, "length": len(LINE) * (lines - part.lines)}
                for part, lines in new.items()
            ]
            await self._ask(self._reports, "/agent/logs", {"session": self._session, "pieces": pieces}, b"\n" + text)
            for part, lines in new.items():
                part.lines = lines


async def serve_all(nodes: Sequence[Node], port: int, token: str, mean_seconds: float, totals: AgentTotals) -> None:
    """Serve all nodes until cancelled."""
    async with asyncio.TaskGroup() as group:
        for node in nodes:
            group.create_task(SimulatedAgent(node, port, token, mean_seconds, totals).run())
