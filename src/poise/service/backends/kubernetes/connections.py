"""HTTP/1.1 over connections that are kept open: the transport under the client of the API server.

A bind is one small request, and a scheduler sends thousands of them in a row. The transport that comes with httpx looks at
every open connection before each request, with two system calls each, and took 5 ms of CPU for a bind; this one takes the
connection that was used last. It needs no look at it, as asyncio tells when a server has hung up. Answers are parsed by
httptools, which the server of Poise uses as well.

It knows what the client needs and no more: no proxies, no HTTP/2, no bodies of requests that come in pieces.
"""

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import AsyncIterator, Mapping
from time import monotonic

import httptools
import httpx

KEEP_ALIVE = (
    # A peer that is gone is noticed after a minute, also in a watch in which nothing happens.
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
IDLE_SECONDS = 60.0  # for which an unused connection is kept
MOST_UNREAD = 1 << 20  # bytes of an answer that wait for their reader; then the server has to wait, too
HUNG_UP = "the server hung up without an answer"
CUT_OFF = "the server hung up in the middle of an answer"


class ApiConnection(asyncio.Protocol):
    """One connection: a request, its answer, the next request. httptools calls the methods whose names it knows."""

    def __init__(self) -> None:
        self.status: int | None = None  # of the answer; None: its head is not complete
        self.headers: list[tuple[bytes, bytes]] = []
        self.is_complete = True  # the answer to the last request
        self.idle_since = 0.0
        self.lost: Exception | None = None  # why it cannot be used any more
        self._pieces: deque[bytes] = deque()
        self._unread = 0
        self._is_paused = False
        self._waiter: asyncio.Future[None] | None = None

    # What asyncio tells

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        for option in KEEP_ALIVE:
            transport.get_extra_info("socket").setsockopt(*option)

    def data_received(self, data: bytes) -> None:
        """Take a part of the answer."""
        if self.is_complete:  # no request is under way
            self._lose(httpx.RemoteProtocolError("the server sent something that was not asked for"))
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._lose(httpx.RemoteProtocolError(f"the answer is no HTTP: {error}"))
        except httptools.HttpParserUpgrade:
            self._lose(httpx.RemoteProtocolError("the server changed the protocol"))
        if self._unread > MOST_UNREAD and not self._is_paused and self.lost is None:
            self._is_paused = True
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> None:
        """Record that the server has hung up; an answer that does not say how long it is ends here."""
        if self.status is not None and not self.is_complete and not self._has_length():
            self.on_message_complete()
        self._lose(httpx.RemoteProtocolError(HUNG_UP if self.status is None else CUT_OFF))

    def connection_lost(self, error: Exception | None) -> None:
        """Record that the connection is gone."""
        text = HUNG_UP if self.status is None else CUT_OFF
        self._lose(httpx.RemoteProtocolError(text) if error is None else httpx.ReadError(f"{text}: {error}"))

    # What httptools tells

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header."""
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Take the end of the head. After one that announces another (1xx) comes that."""
        status = self._parser.get_status_code()
        if status >= 200:
            self.status = status

    def on_body(self, data: bytes) -> None:
        """Take a part of the body."""
        self._pieces.append(data)
        self._unread += len(data)

    def on_message_complete(self) -> None:
        """Take the end of an answer."""
        if self.status is None:
            self.headers.clear()
            return
        self.is_complete = True
        if not self._parser.should_keep_alive():
            self._lose(httpx.RemoteProtocolError(HUNG_UP))

    # What the transport asks for

    def send(self, data: bytes) -> None:
        """Send a request."""
        self._parser = httptools.HttpResponseParser(self)
        self.status, self.is_complete = None, False
        self.headers = []
        self._transport.write(data)

    async def head(self, seconds: float | None) -> int:
        """Wait for the head of the answer; return its status."""
        while self.status is None:
            await self._more(seconds)
        return self.status

    async def body(self, seconds: float | None) -> AsyncIterator[bytes]:
        """Yield the body as it comes."""
        while True:
            if self._pieces:
                piece = b"".join(self._pieces)
                self._pieces.clear()
                self._unread = 0
                if self._is_paused and self.lost is None:
                    self._transport.resume_reading()
                self._is_paused = False
                yield piece
            elif self.is_complete:
                return
            else:
                await self._more(seconds)

    def is_usable(self, now: float) -> bool:
        """Whether it may be used for another request."""
        return self.lost is None and self.is_complete and not self._pieces and now - self.idle_since < IDLE_SECONDS

    def close(self) -> None:
        """Hang up."""
        self._lose(httpx.ReadError("the connection was closed"))

    def _has_length(self) -> bool:
        return any(name.lower() in (b"content-length", b"transfer-encoding") for name, _ in self.headers)

    async def _more(self, seconds: float | None) -> None:
        """Wait until more of the answer is there."""
        if self.lost is not None:
            raise self.lost
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(seconds):
                await self._waiter
        except TimeoutError as error:
            raise httpx.ReadTimeout(f"nothing was heard for {seconds:g} s") from error
        finally:
            self._waiter = None

    def _lose(self, error: Exception) -> None:
        if self.lost is None:
            self.lost = error
            self._transport.abort()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class KeepAliveTransport(httpx.AsyncBaseTransport):
    """Sends each request over the connection that was used last and is free, or over a new one.

    verify   the TLS context, or whether certificates are checked
    most     connections that are kept while they are not used
    """

    def __init__(self, verify: ssl.SSLContext | bool, most: int) -> None:
        self._tls = verify if isinstance(verify, ssl.SSLContext) else httpx.create_ssl_context(verify=verify)
        self._tls.set_alpn_protocols(["http/1.1"])
        self._most = most
        self._free: list[ApiConnection] = []
        self._busy: set[ApiConnection] = set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request and wait for the head of its answer."""
        patience: Mapping[str, float | None] = request.extensions.get("timeout", {})
        connection = self._last_used() or await self._connect(request, patience.get("connect"))
        self._busy.add(connection)
        try:
            connection.send(_head(request) + request.content)
            status = await connection.head(patience.get("read"))
        except BaseException:  # also when it was cancelled: its answer must not be taken for that of the next request
            self._drop(connection)
            raise
        return httpx.Response(status, headers=connection.headers, stream=_Body(self, connection, patience.get("read")))

    async def aclose(self) -> None:
        """Hang up all connections."""
        for connection in (*self._free, *self._busy):
            connection.close()
        self._free.clear()
        self._busy.clear()
        await asyncio.sleep(0)  # sockets are closed in the loop's next turn

    def release(self, connection: ApiConnection) -> None:
        """Take a connection back whose answer was read, or is not wanted any more."""
        connection.idle_since = monotonic()
        if not connection.is_usable(connection.idle_since) or len(self._free) >= self._most:
            self._drop(connection)
        elif connection in self._busy:
            self._busy.discard(connection)
            self._free.append(connection)

    def _last_used(self) -> ApiConnection | None:
        now = monotonic()
        while self._free:
            connection = self._free.pop()
            if connection.is_usable(now):
                return connection
            connection.close()
        return None

    def _drop(self, connection: ApiConnection) -> None:
        self._busy.discard(connection)
        connection.close()

    async def _connect(self, request: httpx.Request, seconds: float | None) -> ApiConnection:
        url = request.url
        is_tls = url.scheme == "https"
        name = request.extensions.get("sni_hostname") or url.host
        try:
            async with asyncio.timeout(seconds):
                _, connection = await asyncio.get_running_loop().create_connection(
                    ApiConnection,
                    url.host,
                    url.port or (443 if is_tls else 80),
                    ssl=self._tls if is_tls else None,
                    server_hostname=name if is_tls else None,
                )
        except TimeoutError as error:
            raise httpx.ConnectTimeout(f"no connection within {seconds:g} s") from error
        except OSError as error:  # of TLS as well
            raise httpx.ConnectError(str(error)) from error
        return connection


class _Body(httpx.AsyncByteStream):
    """The body of an answer, as it comes. Its connection is free for others when it was read to the end or closed."""

    def __init__(self, pool: KeepAliveTransport, connection: ApiConnection, seconds: float | None) -> None:
        self._pool, self._connection, self._seconds = pool, connection, seconds
        self._is_closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._connection.body(self._seconds):
            yield piece

    async def aclose(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._pool.release(self._connection)


def _head(request: httpx.Request) -> bytes:
    """Return the head of a request as it goes over the wire."""
    lines = [b"%s %s HTTP/1.1" % (request.method.encode(), request.url.raw_path)]
    lines += [b"%s: %s" % each for each in request.headers.raw]
    return b"\r\n".join((*lines, b"", b""))
