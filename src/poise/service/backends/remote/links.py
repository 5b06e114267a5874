"""One link per node: numbered orders down, numbered news up, and until when the node may run anything.

A link outlives the sessions of its agent. With a session it has the orders that were not confirmed; without one it has none,
as the first order of the next session says everything (`AdoptOrder`). All of this belongs to one thread.
"""

import asyncio
import secrets
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from time import monotonic

from poise.service.wire.agent_messages import MOST_NEWS, AgentNews, AgentOrder, NodeSpec

SLACK = 1.01  # how much longer the server takes a lease to be than the node does: clocks run at different speeds
SLACK_SECONDS = 0.5  # the same for a kernel that is slow to kill, and for the last instants of a process
SILENT_PART = 0.5  # of a lease: after that long without a word a node is unreachable


def with_slack(lease: float) -> float:
    """Return after how many seconds the server takes a lease to be over."""
    return lease * SLACK + SLACK_SECONDS


class Contact(StrEnum):
    """What is known of a node.

    JOINING       it has never been heard of, or its agent is only just looking at what runs there
    REACHABLE     it takes orders
    UNREACHABLE   it has been silent for a while, and may be running what it was told to
    LOST          its lease has ended: nothing runs there
    """

    JOINING = "joining"
    REACHABLE = "reachable"
    UNREACHABLE = "unreachable"
    LOST = "lost"


@dataclass(eq=False, slots=True)
class AgentLink:
    """What the server knows of one node and its agent.

    lease      seconds for which each answer lets the node run things
    identity   of the node; None: there was none of this name before
    evidence   why it is in that state, for people
    refusal    why its agent was refused when it last said hello; None: it was not
    hint       what those say who have started the agent (Ray); None: nothing is wrong
    is_expected    its agent is being started, and has never been heard of: it has no lease that could run out
    is_temporary   it comes and goes with what runs there (a pod), and is forgotten afterwards
    is_bound       its agent has a token that speaks for it alone
    bearer     hash of the token with which the session was last used; empty: it was not yet
    """

    name: str
    lease: float
    spec: NodeSpec | None = None
    identity: str | None = None
    contact: Contact = Contact.JOINING
    evidence: str = "its agent has not reported yet"
    refusal: str | None = None
    hint: str | None = None
    is_expected: bool = False
    is_temporary: bool = False
    is_bound: bool = False
    bearer: bytes = b""
    session: str | None = None
    last_answer: float = field(default_factory=lambda: monotonic())  # by its name: tests have a clock of their own
    seen: int = 0  # number of the last piece of news
    _first: int = 1  # number of the first order that is not confirmed
    _orders: deque[AgentOrder] = field(default_factory=deque)
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)

    def open(self, adopt: AgentOrder) -> str:
        """Begin a session with its first order. Whoever waits for orders of an earlier one finds it over."""
        self.session, self.seen, self._first, self.bearer = secrets.token_hex(16), 0, 1, b""
        self._orders.clear()
        self.send(adopt)
        return self.session

    def close(self) -> None:
        """End the session: what the agent asks for next is refused, until it says hello again."""
        self.session = None
        self._orders.clear()
        self._arrived.set()

    def send(self, order: AgentOrder) -> None:
        """Enqueue an order. Without a session there is nothing to do: the next one begins with everything."""
        if self.session is not None:
            self._orders.append(order)
            self._arrived.set()

    async def orders(self, session: str, done: int, seconds: float) -> tuple[int, Sequence[AgentOrder]] | None:
        """Confirm orders, and wait for later ones; None: the session is over."""
        while self.session == session and self._first <= done and self._orders:
            self._orders.popleft()
            self._first += 1
        deadline = monotonic() + seconds
        while self.session == session and not self._orders and monotonic() < deadline:
            self._arrived.clear()
            try:
                async with asyncio.timeout(deadline - monotonic()):
                    await self._arrived.wait()
            except TimeoutError:
                break
        return (self._first, list(self._orders)[:MOST_NEWS]) if self.session == session else None

    def unseen(self, first: int, news: Sequence[AgentNews]) -> Sequence[AgentNews]:
        """Return what is new of these, and count it as seen."""
        if first > self.seen + 1:
            return ()  # one before it was lost: it is sent again
        fresh = news[self.seen + 1 - first :]
        self.seen += len(fresh)
        return fresh

    def answered(self) -> None:
        """Note that the agent gets an answer now, which renews the node's lease."""
        self.last_answer = monotonic()

    def lease_left(self) -> float:
        """Seconds until the node has certainly ended everything, unless it is answered again."""
        return self.last_answer + with_slack(self.lease) - monotonic()

    def silence(self) -> float:
        """Seconds since it was last answered, and so since it was last heard of."""
        return monotonic() - self.last_answer
