"""Connections of agents, to the server and to each other: parsed in C, and none of those that say nothing is kept.

With a thousand nodes, parsing in Python is a fifth of all the work. That parser takes heads of any length and at any pace,
also from those who have no token. Without bounds they could use up the file descriptors that journal, leases and runs need.
So a head has a length, a time in which it has to be complete, and there is a number of connections that may be waiting for
one: above it the oldest is closed. Agents send theirs at once, and are served.
"""

import asyncio
from typing import ClassVar

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST_HEAD = 64 << 10  # bytes of a request before its body
HEAD_SECONDS = 10.0  # for the head of a request to be complete, from when the connection was opened or its first byte came
MOST_WAITING = 1_000  # connections without a complete head: an agent's has one once it has been read


class AgentHttp(HttpToolsProtocol):
    """One connection of an agent."""

    _waiting: ClassVar[dict["AgentHttp", None]] = {}  # those of this process that wait for a head, the oldest first
    _timer: asyncio.TimerHandle | None = None
    _in_head, _head = False, 0  # whether the head of a request is being read, and bytes of it that came before the last ones

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first head."""
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_waiting()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """Begin to count."""
        super().on_message_begin()
        self._in_head, self._head = True, 0

    def on_headers_complete(self) -> None:
        """Stop counting."""
        self._in_head = False
        self._stop_waiting()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        """Parse what has come."""
        self._head += len(data)
        if self._in_head and self._head > MOST_HEAD:
            self.transport.close()
            return
        super().data_received(data)
        if self._in_head:  # most heads come in one piece
            self._wait()

    def _wait(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)
            self._waiting[self] = None
            if len(self._waiting) > MOST_WAITING:
                oldest = next(iter(self._waiting))
                oldest._stop_waiting()
                oldest.transport.abort()

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._waiting.pop(self, None)


async def close_connections(server: uvicorn.Server) -> None:
    """Close what a server that has stopped leaves open: connections that it had just accepted, or was told not to wait for.

    Agents connect again and again, so there often is one. It takes three turns of the loop until one that was accepted is
    known to the server.
    """
    for _ in range(3):
        for connection in [*server.server_state.connections]:
            connection.transport.abort()
        await asyncio.sleep(0)
