"""The socket, TLS, and the loop that answers until somebody says stop."""

import asyncio
import ipaddress
import json
import logging
import os
import re
import signal
import socket
import ssl
from asyncio import TimerHandle, Transport
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from poise.backends.local.processes import start_of
from poise.model.errors import RequestError
from poise.server.accepting import BACKLOG, ROOM, Acceptor
from poise.server.folder import SERVER, replace_file
from poise.server.guests import Guests, Link, Visit
from poise.server.logs import Level, Logbook, forward

DEFAULT_PORT = 8642
_LISTEN = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9][A-Za-z0-9._-]*)(:(?P<port>[0-9]{1,5}))?")
HEAD_SECONDS = 5.0
"""For a connection to bring the whole head of a request; and before that, with TLS, to shake hands."""
READ_SECONDS = 30.0
"""For a client to take what it is sent; less than the guard gives a request, so that this comes first."""
FAREWELL_SECONDS = 2.0
"""With TLS, for a client to say that it has seen the end."""
IDLE_SECONDS = 15
"""For a connection to come up with another request."""
STOP_SECONDS = 10
"""For requests that are under way, once the service is to stop."""
MOST_HEAD = 48 << 10
"""Bytes of a head that is not complete; the guard has a bound of its own for complete ones."""
_QUIET = logging.getLogger("uvicorn.error.http")
"""For what uvicorn says of a connection: its warnings, which a peer can cause at will, are said here, and bounded."""
_QUIET.setLevel(logging.ERROR)


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen: a name or an address, and a port; 0: any that is free."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> "Address":
        """`127.0.0.1:8642`, `[::1]:8642`, `name:8642`, or without a port."""
        match = _LISTEN.fullmatch(text)
        if match is None or int(match["port"] or DEFAULT_PORT) > 65_535 or match["host"].isdecimal():
            raise RequestError(
                f"--listen {text!r}: expected HOST:PORT, e.g. 127.0.0.1:{DEFAULT_PORT} or [::1]:{DEFAULT_PORT}"
            )
        return cls(match["host"].strip("[]"), int(match["port"] or DEFAULT_PORT))

    @property
    def is_loopback(self) -> bool:
        """Nobody from outside of this machine can reach it."""
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

    def check(self) -> None:
        """Raise RequestError if TLS cannot be spoken with it."""
        for option, path in (("--tls-cert", self.chain), ("--tls-key", self.key)):
            if not os.access(path, os.R_OK) or not path.is_file():
                raise RequestError(f"{option} {path}: cannot be read")
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.chain, self.key, password=_no_password)
        except (ssl.SSLError, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise RequestError(
                f"--tls-cert {self.chain}, --tls-key {self.key}: not a certificate and its key: {reason}"
            ) from None


def _no_password() -> str:
    raise ValueError("the key is encrypted")


def bind(address: Address) -> socket.socket:
    """A socket that listens nowhere yet; raises RequestError in one line where that cannot be."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise RequestError(f"--listen {address}: {getattr(error, 'strerror', None) or error}") from None
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(place)
        bound.listen(BACKLOG)  # only now is it certain that the port is ours
    except OSError as error:
        bound.close()
        raise RequestError(f"--listen {address}: {error.strerror or error}") from None
    return bound


def url_of(address: Address, bound: socket.socket, scheme: str) -> str:
    """What clients of this machine call."""
    everywhere = {"0.0.0.0": "127.0.0.1", "::": "::1"}
    return f"{scheme}://{Address(everywhere.get(address.host, address.host), bound.getsockname()[1])}"


class Connection(H11Protocol):
    """HTTP/1.1 over one connection, with bounds that uvicorn lacks: on the time of heads and of reading.

    Each request has its visit in its state, so that the guard can say whose it is and when it is over.
    """

    _due: TimerHandle | None = None
    _unread: TimerHandle | None = None

    def __init__(self, config: uvicorn.Config, server_state: ServerState, visit: Visit, log: Logbook) -> None:
        super().__init__(config, server_state, {"visit": visit})
        self.logger = _QUIET
        self._visit = visit
        self._log = log

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """Whoever comes has something to say, in time."""
        super().connection_made(transport)
        self._visit.link.transport = transport
        transport.set_write_buffer_limits(high=1, low=0)  # so that we hear of it whenever something is not taken at once
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """Whoever begins a head, or goes on with a body after the answer, has to finish in time, whatever the pieces."""
        super().data_received(data)
        if self.conn.their_state is h11.IDLE or self.conn.our_state is h11.DONE:
            self._await_head()
        else:
            self._forget_head()

    def pause_writing(self) -> None:
        """The client does not read. It has to, in time: an answer that nobody takes would keep its connection for ever."""
        super().pause_writing()
        self._unread = self.loop.call_later(READ_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """It has read everything."""
        self._forget_unread()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        self._forget_head()
        self._forget_unread()
        self._visit.guests.leave(self._visit.link)
        super().connection_lost(exc)

    def _should_upgrade(self) -> bool:
        """HTTP/1.1 it is, and nothing else; uvicorn would tell the log what to install."""
        return False

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP gets a problem too."""
        address = self._visit.link.address
        self._log.caused_by(address, Level.WARNING, "request", {"status": 400, "address": address, "problem": msg})
        body = json.dumps({"code": "wrong-request", "detail": msg}).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _await_head(self) -> None:
        if self._due is None:
            self._due = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def _forget_head(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def _forget_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None


class Listener(uvicorn.Server):
    """Answers until SIGTERM or SIGINT, which end it in good order, or until `is_over`; `ready` is called once it answers."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None], is_over: Callable[[], bool], log: Logbook) -> None:
        super().__init__(config)
        self._ready = ready
        self._is_over = is_over
        self._log = log
        self._guests = Guests(ROOM)
        self._acceptors: list[Acceptor] = []

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """To be told to stop is no failure: the signal is not raised again."""
        before = {each: signal.signal(each, self.handle_exit) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to answer. Connections are taken here, as uvicorn knows no bounds on those without a token."""
        await super().startup([])
        self._acceptors = [Acceptor(each, self._guests, self._welcome, self._log) for each in sockets or ()]
        self._ready()

    async def _welcome(self, link: Link) -> None:
        tls = self.config.ssl if self.config.is_ssl else None
        await asyncio.get_running_loop().connect_accepted_socket(
            lambda: Connection(self.config, self.server_state, Visit(self._guests, link), self._log),
            link.socket,
            ssl=tls,
            ssl_handshake_timeout=HEAD_SECONDS if tls else None,
            ssl_shutdown_timeout=FAREWELL_SECONDS if tls else None,
        )

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether to stop."""
        self._log.catch_up()
        return await super().on_tick(counter) or self._is_over()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End in good order."""
        for each in self._acceptors:
            each.close()
        await super().shutdown(sockets)


def config_of(app: FastAPI, certificate: Certificate | None, log: Logbook) -> uvicorn.Config:
    """How uvicorn is to speak: HTTP/1.1, perhaps in TLS, and believing no header about where a request comes from."""
    forward("uvicorn", log, Level.WARNING)
    forward("asyncio", log, Level.WARNING)
    forward("poise.local", log, Level.WARNING)
    return uvicorn.Config(
        app,
        http=Connection,
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=STOP_SECONDS,
        h11_max_incomplete_event_size=MOST_HEAD,
        ssl_certfile=None if certificate is None else certificate.chain,
        ssl_keyfile=None if certificate is None else certificate.key,
    )


@contextmanager
def announced(folder: Path, url: str) -> Iterator[None]:
    """Clients of this machine find the server as long as it is there."""
    path = folder / SERVER
    me = {"pid": os.getpid(), "born": start_of(os.getpid())}
    replace_file(path, json.dumps({"url": url, **me}) + "\n")
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
