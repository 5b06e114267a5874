"""Connections of agents, to the server and to each other: parsed in C, and none of strangers is kept.

With a thousand nodes, parsing in Python is a fifth of all the work. That parser takes heads of any length and at any pace,
also from those who have no token. Without bounds they could use up the file descriptors that journal, leases and runs need.
So a TLS handshake and a head have a time in which they have to be complete, a head has a length, and there is a number of
connections that may be waiting for either: above it the oldest is closed. An answer that strangers can get ends its
connection. Agents send theirs at once, and are served.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import ClassVar

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST_HEAD = 64 << 10  # bytes of a request before its body
HEAD_SECONDS = 10.0  # for the head of a request to be complete, from when the connection was opened or its first byte came
MOST_WAITING = 1_000  # connections without a complete head: an agent's has one once it has been read; as many handshakes
ACCEPTED_AT_ONCE = 100  # connections, before others are served again: a thousand agents come back at the same time
ACCEPT_AGAIN = 0.1  # seconds until the next try if there are no file descriptors left
ANSWERS_TO_STRANGERS = frozenset({401, 403, 404, 405, 503})


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


class AgentListener:
    """Serves an application on a copy of a socket that listens, until it is told to stop.

    keep_alive   seconds for which a connection may wait for its next request
    """

    def __init__(
        self, app: ASGIApp, bound: socket.socket, tls: ssl.SSLContext | None = None, *, keep_alive: int = 5
    ) -> None:
        config = uvicorn.Config(
            hanging_up(app), loop="asyncio", ws="none", lifespan="off", log_config=None, access_log=False,
            proxy_headers=False, server_header=False, timeout_keep_alive=keep_alive, timeout_graceful_shutdown=1,
        )  # fmt: skip
        config.load()
        self._server = _ServerWithoutSignals(config)
        self._bound, self._tls = bound.dup(), tls
        self._opening: dict[asyncio.Task[None], socket.socket] = {}  # connections in their handshakes, the oldest first

    async def serve(self, ready: Callable[[], None] = lambda: None) -> None:
        """Serve until `stop`; call `ready` once connections are accepted."""
        serving = asyncio.get_running_loop().create_task(self._server.serve(sockets=[]))  # without a socket of its own
        while not (self._server.started or serving.done()):
            await asyncio.sleep(0.001)
        self._bound.setblocking(False)
        self._listen()
        ready()
        await asyncio.wait([serving])
        self.stop()
        self._bound.close()
        for task in [*self._opening]:
            task.cancel()
        await asyncio.gather(*self._opening, return_exceptions=True)
        for connection in [*self._server.server_state.connections]:  # that were not waited for
            connection.transport.abort()
        await asyncio.sleep(0)
        serving.result()

    def stop(self, *, at_once: bool = False) -> None:
        """Accept nothing more, and end once what is being answered has been; `at_once`: without waiting for that."""
        if self._bound.fileno() >= 0:  # it has not ended by itself
            asyncio.get_running_loop().remove_reader(self._bound)
        self._server.should_exit = True
        self._server.force_exit = self._server.force_exit or at_once

    def _listen(self) -> None:
        if not self._server.should_exit:
            asyncio.get_running_loop().add_reader(self._bound, self._accept)

    def _accept(self) -> None:
        """Accept what waits. Not `loop.sock_accept`: where that is cancelled, it may lose one that it has accepted."""
        loop = asyncio.get_running_loop()
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                connection, _ = self._bound.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:  # the client is gone
                continue
            except OSError:  # there are no descriptors left
                loop.remove_reader(self._bound)
                loop.call_later(ACCEPT_AGAIN, self._listen)
                return
            connection.setblocking(False)
            task = loop.create_task(self._open(connection))
            self._opening[task] = connection
            task.add_done_callback(self._opened)
            if len(self._opening) > MOST_WAITING:
                next(iter(self._opening)).cancel()

    def _opened(self, task: asyncio.Task[None]) -> None:
        connection = self._opening.pop(task)
        if task.cancelled():  # perhaps before it began
            connection.close()

    async def _open(self, connection: socket.socket) -> None:
        server, seconds = self._server, HEAD_SECONDS if self._tls else None
        with suppress(OSError):  # the client is gone, or speaks no TLS; asyncio has closed it
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: AgentHttp(server.config, server.server_state, {}),
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=seconds,
            )


class _ServerWithoutSignals(uvicorn.Server):
    """Leaves signals to those who run the loop: uvicorn would raise them a second time once it has stopped."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def hanging_up(app: ASGIApp) -> ASGIApp:
    """Have an application end each connection with an answer that a stranger can get: it may never send the rest."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] in ANSWERS_TO_STRANGERS:
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        await app(scope, receive, answer)

    return serve
