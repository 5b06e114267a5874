"""The HTTP server: address, TLS certificate, socket, and uvicorn between them and the application.

`serve_http` runs until it is told to stop. uvicorn speaks HTTP/1.1; connections are accepted and bounded here
(`connections.py`), because uvicorn's own limits (`limit_concurrency`) would refuse an operator along with a flood. uvicorn
is used through its public settings, `Server.serve` and `Server.should_exit`, and through one class: `HttpConnection`.
"""

import asyncio
import ipaddress
import json
import os
import re
import signal
import socket
import ssl
import threading
from asyncio import Transport
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from poise.durable import replace_file
from poise.scheduler.model.errors import RequestError
from poise.service.backends.local.processes import start_of
from poise.service.server.http import connections
from poise.service.server.http.connections import BACKLOG, ClientConnection, ConnectionTable
from poise.service.server.logs import Level, Logbook, forward
from poise.service.server.storage.state_dir import SERVER

DEFAULT_PORT = 8642
IDLE_SECONDS = 15  # time for a connection to send another request
CLOSE_SECONDS = 2.0  # time for a TLS client to acknowledge the end of a connection
STOP_SECONDS = 10  # time for requests under way when the service stops
MOST_HEAD = 48 << 10  # bytes of an incomplete head; the guard has a limit of its own for complete ones
POLL_SECONDS = 0.1
_LISTEN = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9][A-Za-z0-9._-]*)(:(?P<port>[0-9]{1,5}))?")
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Addresses that stand for all interfaces, and the loopback address that reaches them from this machine."""


async def serve_http(
    app: FastAPI,
    bound: socket.socket,
    tls: ssl.SSLContext | None,
    *,
    log: Logbook,
    ready: Callable[[], None],
    is_over: Callable[[], bool],
) -> None:
    """Answer requests until SIGTERM, SIGINT or `is_over()`; call `ready` once connections are accepted.

    Requests under way get STOP_SECONDS to finish. A second SIGINT does not wait for them.
    """
    # A client can cause uvicorn's warnings at will; what they say about requests is logged, with a bound, by us.
    forward("uvicorn", log, Level.ERROR)
    forward("asyncio", log, Level.WARNING)
    forward("poise.local", log, Level.WARNING)
    config = uvicorn.Config(
        app,
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,  # where a request comes from grants nothing, so no header about it is believed
        server_header=False,
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=STOP_SECONDS,
        h11_max_incomplete_event_size=MOST_HEAD,
    )
    server = uvicorn.Server(config)
    table = ConnectionTable(connections.LIMITS, log)
    loop = asyncio.get_running_loop()
    serving = loop.create_task(server.serve(sockets=[]))  # without a socket of its own
    while not (server.started or serving.done()):
        await asyncio.sleep(0)
    accepting = loop.create_task(table.accept(bound, partial(_connect, server, tls)))

    def stop(number: int | None = None) -> None:
        if server.should_exit and number == signal.SIGINT:
            server.force_exit = True
        accepting.cancel()  # first, so that uvicorn sees no connection after those that it tells to finish
        server.should_exit = True

    # These replace the handlers of `Server.serve`, which would raise the signal again once it has stopped: to be told to
    # stop is no failure, and the exit code is 0.
    if threading.current_thread() is threading.main_thread():  # no other thread may handle signals
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, number)
    ready()
    while not serving.done():
        log.report_suppressed()
        if is_over() or accepting.done():
            stop()
        await asyncio.wait([serving], timeout=POLL_SECONDS)
    accepting.cancel()
    await asyncio.wait([accepting])
    for task in (serving, accepting):
        if not task.cancelled():
            task.result()  # raises what ended it, if that was a bug


async def _connect(server: uvicorn.Server, tls: ssl.SSLContext | None, connection: ClientConnection) -> None:
    """Complete the TLS handshake, if any, and attach the HTTP protocol to a connection."""
    await asyncio.get_running_loop().connect_accepted_socket(
        lambda: HttpConnection(server, connection),
        connection.socket,
        ssl=tls,
        ssl_handshake_timeout=connections.HEAD_SECONDS if tls else None,
        ssl_shutdown_timeout=CLOSE_SECONDS if tls else None,
    )


class HttpConnection(H11Protocol):
    """uvicorn's HTTP/1.1 connection, which also reports to the connection table.

    It extends the callbacks that asyncio documents for every protocol, and overrides one method of uvicorn,
    `send_400_response`. `tests/unit/test_server_listening.py` fails if a version of uvicorn calls them no longer.
    Each request finds its ClientConnection in the state of its ASGI scope, where the guard looks for it.
    """

    def __init__(self, server: uvicorn.Server, connection: ClientConnection) -> None:
        super().__init__(server.config, server.server_state, {"connection": connection})
        self.connection = connection

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """Start to wait for a head."""
        super().connection_made(transport)
        self.connection.opened(transport)

    def data_received(self, data: bytes) -> None:
        """Parse what arrived, and start a deadline if it belongs to no request under way."""
        super().data_received(data)
        self.connection.received()

    def pause_writing(self) -> None:
        """Start a deadline for the client to read."""
        super().pause_writing()
        self.connection.paused()

    def resume_writing(self) -> None:
        """End that deadline."""
        self.connection.resumed()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Leave the connection table."""
        self.connection.closed()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP with a problem in JSON, like any other mistake, and close."""
        address = self.connection.address
        values = {"status": 400, "address": address, "problem": msg}
        self.connection.table.log.write_limited(address, Level.WARNING, "request", values)
        body = json.dumps({"code": "wrong-request", "detail": msg}).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


@dataclass(frozen=True, slots=True)
class BindAddress:
    """Where to listen: a name or an address, and a port; port 0: any that is free."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, option: str = "--listen", port: int = DEFAULT_PORT) -> "BindAddress":
        """`127.0.0.1:8642`, `[::1]:8642`, `name:8642`, or without a port; then `port` is meant."""
        match = _LISTEN.fullmatch(text)
        if match is None or int(match["port"] or port) > 65_535 or match["host"].isdecimal():
            raise RequestError(f"{option} {text!r}: expected HOST:PORT, e.g. 127.0.0.1:{port} or [::1]:{port}")
        return cls(match["host"].strip("[]"), int(match["port"] or port))

    @property
    def is_loopback(self) -> bool:
        """Only this machine can reach it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host.lower() == "localhost"

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Certificate:
    """Files of a certificate, with its chain, and of its private key; both PEM."""

    chain: Path
    key: Path

    def context(self) -> ssl.SSLContext:
        """A server's TLS context with Python's defaults; raises RequestError if the files do not make one."""
        for option, path in (("--tls-cert", self.chain), ("--tls-key", self.key)):
            if not os.access(path, os.R_OK) or not path.is_file():
                raise RequestError(f"{option} {path}: cannot be read")

        def refuse_password() -> str:  # OpenSSL would ask for it on the terminal
            raise ValueError("the key is encrypted")

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.chain, self.key, password=refuse_password)
        except (ssl.SSLError, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise RequestError(
                f"--tls-cert {self.chain}, --tls-key {self.key}: not a certificate and its key: {reason}"
            ) from None
        return context


def bind(address: BindAddress, option: str = "--listen") -> socket.socket:
    """A socket that listens, so that the port is certainly ours; raises RequestError in one line if that fails."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise RequestError(f"{option} {address}: {getattr(error, 'strerror', None) or error}") from None
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(place)
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        raise RequestError(f"{option} {address}: {error.strerror or error}") from None
    return bound


def url_of(address: BindAddress, bound: socket.socket, scheme: str) -> str:
    """The URL that clients of this machine use."""
    return f"{scheme}://{BindAddress(_EVERYWHERE.get(address.host, address.host), bound.getsockname()[1])}"


@contextmanager
def announced(folder: Path, url: str) -> Iterator[None]:
    """Tell clients of this machine, by a file in the state directory, where the server is for as long as it runs."""
    path = folder / SERVER
    me = {"pid": os.getpid(), "born": start_of(os.getpid())}
    replace_file(path, json.dumps({"url": url, **me}) + "\n")
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
