"""The socket, TLS, and the loop that answers until somebody says stop."""

import asyncio
import ipaddress
import json
import logging
import os
import re
import resource
import signal
import socket
import ssl
from asyncio import TimerHandle, Transport
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from ipaddress import IPv6Address
from pathlib import Path
from socket import SHUT_RDWR
from typing import Any, Protocol

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from poise.scheduler.model.errors import RequestError
from poise.service.backends.local.processes import start_of
from poise.service.server.accounts import is_at_least
from poise.service.server.logs import Level, Logbook, forward
from poise.service.server.storage.state_dir import SERVER, replace_file
from poise.service.wire.views import Account, Role

# Who is connected, and who gives way where room is short. Strangers have brought no token yet; others are of a token.
#
# A newcomer is never refused: the oldest stranger of the address with most of them gives way, once it has had its time.
# So one
# peer without a token, however often it connects, cannot keep out another that says at once what it wants. A token that has
# too many connections gives up the one that has been idle for longest. All of it happens in the loop's thread.


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Connections that there may be at once.

    strangers   that have brought no token yet
    known       of all tokens together
    each        of one token, unless it is an operator's
    grace       seconds that a stranger has before it gives way to others: long enough for a busy loop to read a head,
                and short, as it bounds how fast a flood makes way for those behind it
    """

    strangers: int = 600
    known: int = 400
    each: int = 128
    grace: float = 0.25

    @property
    def all(self) -> int:
        """Connections in all."""
        return self.strangers + self.known


class Abortable(Protocol):
    """A transport, as far as it matters here."""

    def abort(self) -> None:
        """Close it at once."""


class CountedSocket:
    """One connection. `since`: when it was accepted; `is_beyond`: it has a file that others may need."""

    __slots__ = ("address", "host", "is_beyond", "since", "socket", "transport")

    def __init__(self, accepted: socket.socket, address: str, since: float, *, is_beyond: bool = False) -> None:
        self.socket = accepted
        self.address = address
        self.since = since
        self.is_beyond = is_beyond
        self.host: _Host | None = None
        self.transport: Abortable | None = None

    def drop(self) -> None:
        """Hang up. Before TLS has shaken hands there is no transport that could."""
        if self.transport is not None:
            self.transport.abort()
        else:
            with suppress(OSError):  # the peer was faster
                self.socket.shutdown(SHUT_RDWR)


class _Host:
    """A token and its connections: those with a request under way, and the others, the longest idle first."""

    __slots__ = ("busy", "idle", "is_operator", "name")

    def __init__(self, account: Account) -> None:
        self.name = account.name
        self.is_operator = is_at_least(account, Role.OPERATOR)
        self.busy: set[CountedSocket] = set()
        self.idle: dict[CountedSocket, None] = {}

    def __len__(self) -> int:
        return len(self.busy) + len(self.idle)


class ConnectionTable:
    """All connections of a service."""

    def __init__(self, room: ConnectionLimits) -> None:
        self.room = room
        self._strangers: dict[str, dict[CountedSocket, None]] = {}
        self._unknown = 0
        self._hosts: dict[str, _Host] = {}
        self._known = 0

    def __len__(self) -> int:
        return self._unknown + self._known

    def enter(self, link: CountedSocket) -> None:
        """Add a new connection, which has brought no token yet."""
        self._strangers.setdefault(link.address, {})[link] = None
        self._unknown += 1

    def leave(self, link: CountedSocket) -> None:
        """A connection is closed, or as good as; it may have left before."""
        host = link.host
        if host is None:
            self._forget_stranger(link)
        elif link in host.busy or link in host.idle:
            host.busy.discard(link)
            host.idle.pop(link, None)
            self._known -= 1
            if not host:
                self._hosts.pop(host.name, None)

    def begin(self, link: CountedSocket, account: Account) -> None:
        """A request of this account is under way on a connection. Others may have to give way to the first one."""
        host = link.host
        if host is None or host.name != account.name:
            self._recognise(link, account)
        else:
            host.idle.pop(link, None)
            host.busy.add(link)

    def end(self, link: CountedSocket) -> None:
        """The request has been answered."""
        host = link.host
        if host is not None and link in host.busy:
            host.busy.discard(link)
            host.idle[link] = None

    def trim(self, now: float, *, is_short: bool) -> tuple[CountedSocket | None, float]:
        """Have a stranger give way if there are too many, or if files are short: who, and seconds until one can."""
        if self._unknown <= self.room.strangers and not (is_short and self._unknown):
            return None, 0.0
        most = max(self._strangers.values(), key=len)
        oldest = next(iter(most))
        left = self.room.grace - (now - oldest.since)
        if left > 0.0:
            return None, left
        self._drop(oldest)
        return oldest, 0.0

    def _recognise(self, link: CountedSocket, account: Account) -> None:
        """A connection is this account's from now on; another may have to give way to it."""
        self.leave(link)
        host = self._hosts.get(account.name)
        if host is None:
            host = self._hosts[account.name] = _Host(account)
        link.host = host
        host.busy.add(link)
        self._known += 1
        if len(host) > self.room.each and not host.is_operator:
            if host.idle:
                self._drop(next(iter(host.idle)))
        elif self._known > self.room.known or link.is_beyond:
            self._make_room()

    def _make_room(self) -> None:
        """The token with most connections gives up one that is idle; operators' only if there is no other."""
        idle = [host for host in self._hosts.values() if host.idle]
        if idle:
            crowd = max(idle, key=lambda host: (not host.is_operator, len(host)))
            self._drop(next(iter(crowd.idle)))

    def _forget_stranger(self, link: CountedSocket) -> None:
        there = self._strangers.get(link.address)
        if there is not None and link in there:
            del there[link]
            self._unknown -= 1
            if not there:
                del self._strangers[link.address]

    def _drop(self, link: CountedSocket) -> None:
        self.leave(link)
        link.drop()


@dataclass(frozen=True, slots=True)
class ConnectionSlot:
    """A connection among all, as far as requests on it have to do with that."""

    guests: ConnectionTable
    link: CountedSocket

    def begin(self, account: Account) -> None:
        """A request of this account is under way."""
        self.guests.begin(self.link, account)

    def end(self) -> None:
        """It has been answered."""
        self.guests.end(self.link)


def neighbourhood(host: str) -> str:
    """Whom an address counts for: an IPv6 network of 64 bits is one peer, who has all its addresses."""
    if ":" not in host:
        return host
    address = IPv6Address(host.partition("%")[0])
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return f"{IPv6Address(int(address) >> 64 << 64)}/64"


# Takes connections off the socket: as many as there is room and files for, and not faster than others can give way.

ROOM = ConnectionLimits()
BACKLOG = 1_024
"""Connections that wait to be taken."""
SPARE_FILES = 256
"""Files that connections leave to the rest of the service: the store, logs, runs that are being started."""
FILES_A_RUN = 4
AT_ONCE = 64
"""Connections that are taken before anything else is done. Who gives way to them is gone by the next time."""
LOOK_SECONDS = 0.05
"""At most, before the next look whether there is room."""

Welcome = Callable[[CountedSocket], Coroutine[Any, Any, None]]


class Acceptor:
    """Takes connections until it is closed. `welcome` speaks with each, and ends once it is connected, or cannot be.

    The kernel gives out the lowest number that is free, so that of a connection says how many files are open. Without a
    bound a flood of connections, which needs no token, would keep runs from being started.
    """

    def __init__(self, bound: socket.socket, guests: ConnectionTable, welcome: Welcome, log: Logbook) -> None:
        self._bound = bound
        self._guests = guests
        self._welcome = welcome
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_short = False
        bound.setblocking(False)
        self._listen()

    def close(self) -> None:
        """Take no more."""
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._bound)

    def _listen(self) -> None:
        self._pause = None
        self._loop.add_reader(self._bound, self._come)

    def _rest(self, seconds: float) -> None:
        """Take none for a while; they wait in the kernel, in order."""
        self._loop.remove_reader(self._bound)
        self._pause = self._loop.call_later(seconds, self._listen)

    def _come(self) -> None:
        for _ in range(AT_ONCE):
            now = self._loop.time()
            dropped, wait = self._guests.trim(now, is_short=self._is_short)
            if dropped is not None:
                self._log.caused_by(dropped.address, Level.WARNING, "connection-displaced", {"address": dropped.address})
                self._is_short = False
            elif wait:
                self._rest(min(wait, LOOK_SECONDS))
                return
            try:
                accepted, address = self._bound.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._log.caused_by("system", Level.WARNING, "no-connection", {"problem": error.strerror or str(error)})
                self._rest(LOOK_SECONDS)
                return
            self._take(accepted, str(address[0]), now)

    def _take(self, accepted: socket.socket, address: str, now: float) -> None:
        accepted.setblocking(False)
        self._is_short = accepted.fileno() >= most_files() - SPARE_FILES
        link = CountedSocket(accepted, neighbourhood(address), now, is_beyond=self._is_short)
        self._guests.enter(link)
        task = self._loop.create_task(self._met(link))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _met(self, link: CountedSocket) -> None:
        """Whoever does not get as far as HTTP leaves no trace."""
        try:
            await self._welcome(link)
        except OSError:  # no TLS, or not in time, or hung up on
            self._guests.leave(link)
        except BaseException:
            self._guests.leave(link)
            raise


def most_files() -> int:
    """Files that this process may have open."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return most if most != resource.RLIM_INFINITY else 1 << 30


def ask_for_files(runs: int) -> None:
    """Raise the limit of open files to fit all connections and this number of runs, as far as this user may."""
    wanted = ROOM.all + SPARE_FILES + FILES_A_RUN * runs
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most_files() < wanted:
        granted = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
        with suppress(ValueError, OSError):  # some systems have a bound of their own
            resource.setrlimit(resource.RLIMIT_NOFILE, (granted, most))


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
class BindAddress:
    """Where to listen: a name or an address, and a port; 0: any that is free."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> "BindAddress":
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


def bind(address: BindAddress) -> socket.socket:
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


def url_of(address: BindAddress, bound: socket.socket, scheme: str) -> str:
    """What clients of this machine call."""
    everywhere = {"0.0.0.0": "127.0.0.1", "::": "::1"}
    return f"{scheme}://{BindAddress(everywhere.get(address.host, address.host), bound.getsockname()[1])}"


class HttpConnection(H11Protocol):
    """HTTP/1.1 over one connection, with bounds that uvicorn lacks: on the time of heads and of reading.

    Each request has its visit in its state, so that the guard can say whose it is and when it is over.
    """

    _due: TimerHandle | None = None
    _unread: TimerHandle | None = None

    def __init__(self, config: uvicorn.Config, server_state: ServerState, visit: ConnectionSlot, log: Logbook) -> None:
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


class LimitedListener(uvicorn.Server):
    """Answers until SIGTERM or SIGINT, which end it in good order, or until `is_over`; `ready` is called once it answers."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None], is_over: Callable[[], bool], log: Logbook) -> None:
        super().__init__(config)
        self._ready = ready
        self._is_over = is_over
        self._log = log
        self._guests = ConnectionTable(ROOM)
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

    async def _welcome(self, link: CountedSocket) -> None:
        tls = self.config.ssl if self.config.is_ssl else None
        await asyncio.get_running_loop().connect_accepted_socket(
            lambda: HttpConnection(self.config, self.server_state, ConnectionSlot(self._guests, link), self._log),
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
        http=HttpConnection,
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
