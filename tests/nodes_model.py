"""Nodes without processes or sockets: agents that lose messages and die, a server that does too, and a clock of their own.

`ModelNode` is what an agent and its local back end are to the server: directories that outlive everything (`parts`), a
session that does not, and a lease. `ModelCluster` has the nodes, a real `RemoteRuns`, and an engine that knows what it has
journaled. Whatever lives where, and since when, is known here, so each law is checked when it could be broken.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal
from unittest.mock import patch

from tests.backends import a_request

from poise.scheduler.model.cluster import Node
from poise.service.backends.api import (
    BackendEvent,
    BackendFailed,
    DesiredState,
    Finding,
    NodeReport,
    NodeState,
    RunBegan,
    RunEnded,
    RunEvent,
    RunNotice,
    RunOrder,
    RunPart,
)
from poise.service.backends.remote import links, runs
from poise.service.backends.remote.identity import ServiceIdentity
from poise.service.backends.remote.links import AgentLink
from poise.service.backends.remote.runs import RefusedAgentError, RemoteRuns
from poise.service.backends.run_table import Key
from poise.service.wire import agent_messages as messages
from poise.service.wire.agent_messages import AgentNews, PartOrder

LEASE = 10.0
SLOWEST = 1.005
"""How much longer a second of a node may be than one of the server."""
SERVICE = "5" * 32
Phase = Literal["waiting", "alive", "over"]


@dataclass
class Clock:
    """Seconds since the beginning, by the server's clock."""

    now: float = 1_000.0

    def __call__(self) -> float:
        """Read it."""
        return self.now


@dataclass
class ModelPart:
    """The directory of a run on a node, and what lives of it."""

    order: PartOrder
    phase: Phase = "waiting"
    desired: str = "run"
    began: float | None = None
    ended: float | None = None
    how: Literal["finished", "yielded", "failed"] = "failed"

    @property
    def slots(self) -> set[tuple[str, int]]:
        """All GPUs of its run."""
        return {(node, slot) for node, _, slots in self.order.gpus for slot in slots}


@dataclass
class ModelNode:
    """A node. `clock_error` is of its wall clock; `pace`: how long one of its seconds takes."""

    name: str
    clock_error: float
    pace: float
    parts: dict[Key, ModelPart] = field(default_factory=dict)
    until: float = 0.0  # when its lease ends, by the server's clock
    lease: float = 0.0  # how long the last one was
    session: str | None = None
    port: int = 0  # of its agent; each has another
    done: int = 0
    news: list[AgentNews] = field(default_factory=list)
    first: int = 1
    identity: str = ""

    def __post_init__(self) -> None:
        """Choose an identity."""
        self.identity = f"{sum(self.name.encode()):032x}"

    def alive(self) -> list[Key]:
        """Runs with processes here."""
        return [key for key, part in self.parts.items() if part.phase == "alive"]

    def can_begin(self, key: Key) -> bool:
        """Whether nothing here is in the way of a part: earlier runs of its job, and other runs on its GPUs."""
        part = self.parts[key]
        others = [(each, other) for each, other in self.parts.items() if each != key and other.phase == "alive"]
        return part.phase == "waiting" and not any(each[0] == key[0] or part.slots & other.slots for each, other in others)


class ModelIdentity(ServiceIdentity):
    """Who the service is, without a disk."""

    def __init__(self) -> None:
        self.identity, self.token, self.lease, self.nodes = SERVICE, "token", 0.0, {}

    def save_now(self) -> None:
        """Nothing is kept."""


class ModelCluster:
    """Nodes, a server that may crash, and what its engine has journaled."""

    def __init__(self, sizes: Sequence[int], errors: Sequence[float] = ()) -> None:
        self.clock = Clock()
        self._patches = [patch.object(links, "monotonic", self.clock), patch.object(runs, "time", self.clock)]
        self._patches.append(patch.object(runs, "monotonic", self.clock))
        for each in self._patches:
            each.start()
        self._loop = asyncio.new_event_loop()
        self.cluster = [Node(f"n{number}", "v100", size) for number, size in enumerate(sizes)]
        errors = [*errors, *(0.0 for _ in sizes)]
        self.nodes = {
            node.name: ModelNode(node.name, error, SLOWEST if number % 2 else 1.0)
            for number, (node, error) in enumerate(zip(self.cluster, errors, strict=False))
        }
        self.journal: dict[Key, tuple[RunOrder, DesiredState]] = {}  # runs that are open, as the journal has it
        self.over: set[Key] = set()  # runs whose end is journaled
        self.epochs: Counter[str] = Counter()
        self.service, self.lease = ModelIdentity(), LEASE
        self.up: set[str] = set()  # nodes that are up, as the engine knows
        self._events: list[RunEvent] = []  # reported and not journaled
        self._told: Counter[Key] = Counter()  # ends, in this life of the server
        self._asked: set[Key] = set()  # runs that this server was told of
        self.server = self._start()

    def close(self) -> None:
        """Put the clocks back."""
        for each in self._patches:
            each.stop()
        self._loop.close()

    # The server and its engine

    def _start(self) -> RemoteRuns:
        self._told.clear()
        self._asked = set(self.journal)
        self.up = set()
        server = RemoteRuns(self.service, self.cluster, self._hear, lease=self.lease)
        server.adopt([*self.journal.values()])
        return server

    def crash(self, lease: float = LEASE) -> None:
        """The server dies, and what it has not journaled is forgotten; another one is started, with another `--fence`."""
        self._events.clear()
        self.lease = lease
        self.server = self._start()

    def _hear(self, event: BackendEvent) -> None:
        assert not isinstance(event, BackendFailed | Finding)
        if isinstance(event, NodeReport):
            if event.state is NodeState.LOST:
                left = self.nodes[event.node.name].alive()
                assert not left, f"{event.node.name} counts as lost, and runs {left}"
            (self.up.add if event.state is NodeState.UP else self.up.discard)(event.node.name)
            return
        key = event.job, event.epoch
        assert key in self._asked, f"{event}, of which this server was told nothing"
        assert not self._told[key], f"{event} after its end"
        if isinstance(event, RunEnded):
            self._told[key] += 1
            living = [name for name, node in self.nodes.items() if key in node.alive()]
            assert not living, f"{event}, and it lives on {living}"
        if isinstance(event, RunBegan):
            self._check_date(event)
        self._events.append(event)

    def _check_date(self, event: RunBegan) -> None:
        """Times are those at which things happened, whatever the clock of a node says."""
        began = [part.began for node in self.nodes.values() if (part := node.parts.get((event.job, event.epoch)))]
        known = [each for each in began if each is not None]
        assert known, event
        assert abs(event.at - max(known)) < 1e-6, (event, known)

    def keep(self) -> None:
        """The engine journals what it has heard."""
        for event in self._events:
            if isinstance(event, RunEnded):
                self.journal.pop((event.job, event.epoch))
                self.over.add((event.job, event.epoch))
        self._events.clear()

    def free(self) -> list[tuple[str, int]]:
        """GPUs of nodes that are up, and that no run has which is to stay."""
        gpus = [(node.name, slot) for node in self.cluster if node.name in self.up for slot in range(node.gpus)]
        held = {gpu for order, desired in self.journal.values() if desired is DesiredState.RUN for gpu in _gpus(order)}
        return [gpu for gpu in gpus if gpu not in held]

    def launch(self, job: str, gpus: Sequence[tuple[str, int]]) -> None:
        """The engine starts the next run of a job, once the one before is over or was told to leave."""
        if not gpus or any(key[0] == job and each[1] is DesiredState.RUN for key, each in self.journal.items()):
            return
        self.epochs[job] += 1
        names = sorted({name for name, _ in gpus}, key=lambda name: [each[0] for each in gpus].index(name))
        parts = tuple(RunPart(name, "v100", tuple(sorted(slot for each, slot in gpus if each == name))) for name in names)
        order = RunOrder(job, self.epochs[job], parts, a_request("", gpus=len(gpus)))
        key = job, order.epoch
        self.journal[key] = order, DesiredState.RUN
        self._asked.add(key)
        self.server.launch(order)

    def stop(self, key: Key) -> None:
        """The engine asks a run to leave."""
        order, desired = self.journal[key]
        if desired is DesiredState.RUN:
            self.journal[key] = order, DesiredState.LEAVE
            self.server.stop(key, RunNotice("preempted", "others wait", 5.0))

    def kill(self, key: Key) -> None:
        """The engine ends a run."""
        self.journal[key] = self.journal[key][0], DesiredState.GONE
        self.server.kill(key, "cancelled")

    # Time

    def wait(self, seconds: float) -> None:
        """Time passes. What runs on a node whose lease has ended is killed by its kernel, at that very moment."""
        self.clock.now += seconds
        for node in self.nodes.values():
            if node.until <= self.clock.now:
                for key in node.alive():
                    self._end(node, key, "failed", at=min(node.until, self.clock.now))
        self.server.look()

    # What happens on a node

    def begin(self, node: ModelNode, key: Key) -> None:
        """Processes of a part begin to live."""
        if not node.can_begin(key) or node.until <= self.clock.now:
            return
        part = node.parts[key]
        assert key not in self.over, f"{key} begins on {node.name}, and is over"
        assert not self._told[key], f"{key} begins on {node.name}, and its end was reported"
        for name, other in self.nodes.items():
            for each in other.alive():
                assert each[0] != key[0] or each == key, f"{key} begins on {node.name} while {each} lives on {name}"
                assert each == key or not part.slots & other.parts[each].slots, f"{key} and {each} share a GPU"
        part.phase, part.began = "alive", self.clock.now
        if node.session is not None:
            node.news.append(self._began(node, key))

    def end(self, node: ModelNode, key: Key, how: Literal["finished", "yielded", "failed"]) -> None:
        """A part ends, by itself or because it was told to."""
        if key in node.alive():
            self._end(node, key, how, self.clock.now)

    def _end(self, node: ModelNode, key: Key, how: Literal["finished", "yielded", "failed"], at: float) -> None:
        part = node.parts[key]
        part.phase, part.how, part.ended = "over", "yielded" if part.desired == "gone" else how, at
        if node.session is not None:
            node.news.append(self._ended(node, key))

    def reboot(self, node: ModelNode) -> None:
        """The machine goes down, and comes back with its disk."""
        for key in node.alive():
            self._end(node, key, "failed", self.clock.now)
        node.until = 0.0
        self.lose_agent(node)

    def lose_agent(self, node: ModelNode) -> None:
        """The agent dies; its runs go on."""
        node.session = None
        node.port += 1

    def _now(self, node: ModelNode) -> float:
        return self.clock.now + node.clock_error

    def _began(self, node: ModelNode, key: Key) -> AgentNews:
        part = node.parts[key]
        assert part.began is not None
        is_first = part.order.gpus[0][0] == node.name
        port = 4_000 + key[1] if is_first else part.order.port
        return messages.PartBegan(job=key[0], epoch=key[1], at=part.began + node.clock_error, port=port)

    def _ended(self, node: ModelNode, key: Key) -> AgentNews:
        part = node.parts[key]
        assert part.ended is not None
        at = part.ended + node.clock_error
        failed_at = at if part.how == "failed" else None
        return messages.PartEnded(
            job=key[0], epoch=key[1], at=at, how=part.how, steps=None, cause=None, codes=(), failed_at=failed_at
        )

    # What an agent and the server say to each other. `lost`: the answer is.

    def hello(self, node: ModelNode, *, lost: bool = False) -> None:
        """Ask for a session."""
        spec = messages.NodeSpec(
            name=node.name, gpu_type="v100", gpus=next(each.gpus for each in self.cluster if each.name == node.name),
            port=10_000 + node.port,
        )  # fmt: skip
        sent, node.session = self.clock.now, None
        hello = messages.Hello(
            protocol=messages.PROTOCOL, version="1", node=spec, identity=node.identity,
            service=SERVICE if node.alive() else None,
        )  # fmt: skip
        welcome = self.server.hello(hello)
        self.server.answered(self.server.link_of(welcome.session))
        if not lost:
            node.session, node.done, node.news, node.first = welcome.session, 0, [], 1
            self._renew(node, sent)

    def ask(self, node: ModelNode, *, lost: bool = False) -> None:
        """Ask for orders, and carry them out."""
        sent = self.clock.now
        link = self._link(node)
        if link is None or node.session is None:
            return
        found = self._loop.run_until_complete(link.orders(node.session, node.done, 0.0))
        assert found is not None
        self.server.answered(link)
        if lost:
            return
        self._renew(node, sent)
        first, orders = found
        for number, order in enumerate(orders, first):
            if number == node.done + 1:
                self._carry_out(node, order)
                node.done = number

    def tell(self, node: ModelNode, *, lost: bool = False, most: int = 500) -> None:
        """Send the news that are not confirmed."""
        sent = self.clock.now
        link = self._link(node)
        if link is None:
            return
        self.server.hear(link, self._now(node), link.unseen(node.first, node.news[:most]))
        self.server.answered(link)
        if lost:
            return
        self._renew(node, sent)
        confirmed = link.seen - node.first + 1
        node.news, node.first = node.news[confirmed:], node.first + confirmed

    def _link(self, node: ModelNode) -> AgentLink | None:
        try:
            return None if node.session is None else self.server.link_of(node.session)
        except RefusedAgentError:
            node.session = None
            return None

    def _renew(self, node: ModelNode, sent: float) -> None:
        until = sent + self.lease * node.pace
        node.until = max(node.until, until) if node.lease == self.lease else until
        node.lease = self.lease

    def _carry_out(self, node: ModelNode, order: messages.AgentOrder) -> None:
        match order:
            case messages.AdoptOrder():
                self._adopt(node, order)
            case messages.LaunchOrder():
                self._take(node, order.part)
            case messages.PeersOrder():
                pass  # starts nothing
            case messages.StopOrder():
                self._want(node, (order.job, order.epoch), "leave")
            case messages.KillOrder():
                self._want(node, (order.job, order.epoch), "gone")

    def _adopt(self, node: ModelNode, order: messages.AdoptOrder) -> None:
        listed = {(each.order.job, each.order.epoch): each for each in order.parts}
        for key, part in node.parts.items():  # those that are not listed are ended, and not reported
            if key not in listed and part.phase != "over":
                part.desired, part.phase, part.how, part.ended = "gone", "over", "yielded", self.clock.now
        for key, each in listed.items():
            if key in node.parts and node.parts[key].phase == "waiting":
                del node.parts[key]  # what waits is in the memory of the agent, and has no directory
            can_begin = each.may_begin and (each.order.port or each.order.gpus[0][0] == node.name)
            if can_begin or key in node.parts:
                if each.desired == "run" or key in node.parts:
                    self._take(node, each.order)
                    self._want(node, key, each.desired)
                else:  # it never began, and never will
                    node.parts[key] = ModelPart(each.order, "over", each.desired, None, self.clock.now, "yielded")
                    node.news.append(self._ended(node, key))
                    del node.parts[key]
            else:
                node.news.append(messages.PartUnknown(job=key[0], epoch=key[1]))
        node.news.append(messages.NodeAdopted())

    def _take(self, node: ModelNode, order: PartOrder) -> None:
        """Take up a part: as new, or as what its directory says."""
        key = order.job, order.epoch
        part = node.parts.get(key)
        if part is None:
            node.parts[key] = ModelPart(order)
        elif part.phase == "alive":
            node.news.append(self._began(node, key))
        elif part.phase == "over":
            if part.began is not None:
                node.news.append(self._began(node, key))
            node.news.append(self._ended(node, key))

    def _want(self, node: ModelNode, key: Key, desired: str) -> None:
        part = node.parts.get(key)
        if part is not None and part.phase != "over" and desired != "run" and part.desired != "gone":
            part.desired = desired
            if part.phase == "waiting":
                part.phase, part.how, part.ended = "over", "yielded", self.clock.now
                node.news.append(self._ended(node, key))
                del node.parts[key]  # it has no directory

    # When nothing goes wrong any more

    def settle(self) -> None:
        """Let messages pass and time too, until nothing changes: afterwards every order was carried out."""
        for _ in range(60):
            for node in self.nodes.values():
                if self._link(node) is None:
                    self.hello(node)
                self.ask(node)
                for key, part in [*node.parts.items()]:
                    self.begin(node, key)
                    if part.desired != "run":
                        self.end(node, key, "yielded")
                    elif self._has_finished(key):  # then so do the others
                        self.end(node, key, "finished")
                self.tell(node)
            self.keep()
            self.wait(LEASE / 20)
        for key, (order, desired) in self.journal.items():
            assert desired is DesiredState.RUN, f"{key} was to end ({desired}), and did not"
            for name in (each.node for each in order.gpus):
                assert key in self.nodes[name].alive(), f"{key} does not live on {name}: {self.nodes[name].parts.get(key)}"
        for name, node in self.nodes.items():
            strays = [key for key in node.alive() if key not in self.journal]
            assert not strays, f"{name} still has {strays}"
        assert self.up == set(self.nodes)

    def _has_finished(self, key: Key) -> bool:
        found = [node.parts[key] for node in self.nodes.values() if key in node.parts]
        return any(part.phase == "over" and part.how == "finished" for part in found)


def _gpus(order: RunOrder) -> list[tuple[str, int]]:
    return [(part.node, slot) for part in order.gpus for slot in part.slots]
