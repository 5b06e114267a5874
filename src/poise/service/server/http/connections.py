"""The connection table: how many clients may be connected, and which connection is closed to make room.

uvicorn bounds requests, not connections: its listener accepts whatever the kernel has. One client that opens connections
faster than they time out could then lock out all others, and use up the file descriptors that the store and the runs need.
A reverse proxy can bound connections per address (docs/how-to/put-a-proxy-in-front.md). This table is what holds without
one, and on loopback, where all clients share one address.

The rules:

- A new connection is never refused. If it were, an attacker who holds all places would keep them.
- A connection is *anonymous* until a request on it brings a valid token. When there are too many anonymous connections, the
  address with most of them loses its oldest, once that one has had `grace` seconds to send its request. A client that sends
  its request at once is therefore served, even from the address that the flood comes from.
- After that the connection belongs to its token. A token with too many loses the one that has been idle for longest. When
  all tokens together have too many, the token with most of them does; operators lose theirs last. A connection with a
  request under way is never closed here.
- Each connection has deadlines: for the head of a request, and for reading the answer.

Read `ConnectionTable.accept` first: it is the life of a connection from the kernel's queue on. Only asyncio's public
interface is used. Everything runs in the thread of the event loop, so there are no locks.
"""

import asyncio
import resource
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv6Address

from poise.service.server.accounts import is_at_least
from poise.service.server.logs import Level, Logbook, traceback_of
from poise.service.wire.views import Account, Role

BACKLOG = 1_024  # connections that wait in the kernel to be accepted
SPARE_FILES = 256
"""File descriptors that connections leave to the rest of the service: the store, logs, runs that are being started."""
FILES_PER_RUN = 4
ACCEPTED_AT_ONCE = 64
"""Connections accepted before other work gets a turn. Connections closed for them are gone by the next turn."""
RETRY_SECONDS = 0.05  # longest wait before the next look whether there is room
HEAD_SECONDS = 5.0  # time to send the complete head of a request and, before that, to complete the TLS handshake
READ_SECONDS = 30.0
"""Time for a client to read what it was sent. Shorter than the guard's limit on a request, so this one comes first."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Most connections at one time.

    anonymous       that have not brought a token yet
    authenticated   of all tokens together
    per_token       of one token; operators are exempt
    grace           seconds before an anonymous connection may be closed for another: long enough for a busy event loop to
                    read a head; short, because it bounds how fast a flood makes way for the clients behind it
    """

    anonymous: int = 600
    authenticated: int = 400
    per_token: int = 128
    grace: float = 0.25

    @property
    def total(self) -> int:
        """Connections in all."""
        return self.anonymous + self.authenticated


LIMITS = ConnectionLimits()


class ClientConnection:
    """One accepted connection: its deadlines, and whose it is.

    `transport` is None until TLS, if any, is established; `owner` is None while the connection is anonymous.
    """

    __slots__ = ("_head_timer", "_is_closed", "_read_timer", "_requests", "accepted", "address", "is_short", "owner",
                 "socket", "table", "transport")  # fmt: skip

    def __init__(
        self, table: "ConnectionTable", accepted: socket.socket, address: str, now: float, *, is_short: bool = False
    ) -> None:
        self.table = table
        self.address = address
        self.accepted = now
        self.is_short = is_short  # it uses a file descriptor that should be spare
        self.owner: _TokenConnections | None = None
        self.transport: asyncio.Transport | None = None
        self.socket = accepted
        self._requests = 0
        self._is_closed = False
        self._head_timer: asyncio.Handle | None = None
        self._read_timer: asyncio.TimerHandle | None = None

    def opened(self, transport: asyncio.Transport) -> None:
        """Start to wait for the first head."""
        self.transport = transport
        # Report a paused writer as soon as anything is not taken at once: READ_SECONDS counts from there.
        transport.set_write_buffer_limits(high=1, low=0)
        self.received()

    def received(self) -> None:
        """Note that bytes arrived. Unless they are a request's body, the rest of a head must follow in time.

        The deadline stands until the head is complete, however small the pieces are that it arrives in.
        """
        if self._requests == 0 and self._head_timer is None:
            self._head_timer = asyncio.get_running_loop().call_later(HEAD_SECONDS, self._head_is_late)

    def _head_is_late(self) -> None:
        # A busy event loop may have read the head in this very pass; its request then starts before the next callback.
        self._head_timer = asyncio.get_running_loop().call_soon(self.drop)

    def request_started(self) -> None:
        """Note that a head is complete. From here on the guard's limits apply to the request."""
        self._requests += 1
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def authenticated(self, account: Account) -> None:
        """Note whose request it is. A connection that was closed before its request was looked at stays forgotten."""
        if not self._is_closed:
            self.table.begin(self, account)

    def request_finished(self) -> None:
        """Note that the request was answered, or given up."""
        self._requests -= 1
        if self._requests == 0:  # the next of several pipelined requests may have started already
            self.table.end(self)

    def paused(self) -> None:
        """Note that the client does not read. An answer that it never takes would keep the connection open for ever."""
        if self._read_timer is None:
            self._read_timer = asyncio.get_running_loop().call_later(READ_SECONDS, self.drop)

    def resumed(self) -> None:
        """Note that the client has read everything."""
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def closed(self) -> None:
        """Forget the connection. Harmless if it was forgotten before."""
        self._is_closed = True
        for timer in (self._head_timer, self._read_timer):
            if timer is not None:
                timer.cancel()
        self.table.leave(self)

    def drop(self) -> None:
        """Close the connection at once. During a TLS handshake there is no transport yet that could."""
        if self.transport is not None:
            self.transport.abort()
        else:
            with suppress(OSError):  # the client has closed it already
                self.socket.shutdown(socket.SHUT_RDWR)


class _TokenConnections:
    """The connections of one token; `idle` ones in the order in which they became idle."""

    __slots__ = ("busy", "idle", "is_operator", "name")

    def __init__(self, account: Account) -> None:
        self.name = account.name
        self.is_operator = is_at_least(account, Role.OPERATOR)
        self.busy: set[ClientConnection] = set()
        self.idle: dict[ClientConnection, None] = {}  # a dict for its order

    def __len__(self) -> int:
        return len(self.busy) + len(self.idle)


class ConnectionTable:
    """All connections of a service."""

    def __init__(self, limits: ConnectionLimits, log: Logbook) -> None:
        self.limits = limits
        self.log = log
        self._anonymous: dict[str, dict[ClientConnection, None]] = {}  # by address, the oldest first
        self._anonymous_count = 0
        self._owners: dict[str, _TokenConnections] = {}
        self._owned_count = 0

    def __len__(self) -> int:
        return self._anonymous_count + self._owned_count

    async def accept(self, bound: socket.socket, connect: Callable[[ClientConnection], Awaitable[object]]) -> None:
        """Accept connections until cancelled, no faster than others can be closed for them.

        `connect` completes the TLS handshake, if any, and attaches the HTTP protocol. Cancelling ends pending handshakes.
        """
        loop = asyncio.get_running_loop()
        bound.setblocking(False)
        async with asyncio.TaskGroup() as handshakes:
            number = 0
            while True:
                try:
                    accepted, peer = await loop.sock_accept(bound)
                except ConnectionAbortedError:  # the client left while it was waiting
                    continue
                except OSError as error:  # most often: no file descriptor is left
                    problem = error.strerror or str(error)
                    self.log.write_limited("system", Level.WARNING, "no-connection", {"problem": problem})
                    await asyncio.sleep(RETRY_SECONDS)
                    continue
                # The kernel gives out the lowest free number, so that of a new descriptor says how many are in use.
                is_short = accepted.fileno() >= open_files_limit() - SPARE_FILES
                # Until there is room this connection is not read, and those behind it wait in the kernel, in order.
                try:
                    while wait := self.make_room(loop.time(), is_short=is_short):
                        await asyncio.sleep(min(wait, RETRY_SECONDS))
                except asyncio.CancelledError:
                    accepted.close()
                    raise
                connection = ClientConnection(self, accepted, peer_of(str(peer[0])), loop.time(), is_short=is_short)
                self.enter(connection)
                handshakes.create_task(self._connect(connection, connect))
                number += 1
                if number % ACCEPTED_AT_ONCE == 0:
                    await asyncio.sleep(0)  # `sock_accept` does not yield while connections are waiting

    async def _connect(self, connection: ClientConnection, connect: Callable[[ClientConnection], Awaitable[object]]) -> None:
        try:
            await connect(connection)
        except OSError:  # no TLS, not in time, or the client left: of no interest to the log
            self.leave(connection)
        except Exception as error:  # must not end the loop that accepts
            self.leave(connection)
            self.log.write_limited("bug connect", Level.ERROR, "bug", traceback_of(error))

    def make_room(self, now: float, *, is_short: bool) -> float:
        """Close an anonymous connection if there are too many or file descriptors are short.

        Returns the seconds until the oldest has had its grace; 0 if there is room now.
        """
        if self._anonymous_count <= self.limits.anonymous and not (is_short and self._anonymous_count):
            return 0.0
        most = max(self._anonymous.values(), key=len)
        oldest = next(iter(most))
        wait = self.limits.grace - (now - oldest.accepted)
        if wait > 0.0:
            return wait
        self.log.write_limited(oldest.address, Level.WARNING, "connection-displaced", {"address": oldest.address})
        self._drop(oldest)
        return 0.0

    def enter(self, connection: ClientConnection) -> None:
        """Add a new connection, which is anonymous."""
        self._anonymous.setdefault(connection.address, {})[connection] = None
        self._anonymous_count += 1

    def leave(self, connection: ClientConnection) -> None:
        """Remove a connection, unless it was removed before."""
        owner = connection.owner
        if owner is None:
            same_address = self._anonymous.get(connection.address, {})
            if connection in same_address:
                del same_address[connection]
                self._anonymous_count -= 1
                if not same_address:
                    del self._anonymous[connection.address]
        elif connection in owner.busy or connection in owner.idle:
            owner.busy.discard(connection)
            owner.idle.pop(connection, None)
            self._owned_count -= 1
            if not owner:
                self._owners.pop(owner.name, None)

    def begin(self, connection: ClientConnection, account: Account) -> None:
        """Note a request of this account. The connection is its token's from now on; others may be closed for it."""
        owner = connection.owner
        if owner is not None and owner.name == account.name:
            owner.idle.pop(connection, None)
            owner.busy.add(connection)
            return
        self.leave(connection)
        owner = self._owners.setdefault(account.name, _TokenConnections(account))
        connection.owner = owner
        owner.busy.add(connection)
        self._owned_count += 1
        if len(owner) > self.limits.per_token and not owner.is_operator:
            if owner.idle:
                self._drop(next(iter(owner.idle)))
        elif self._owned_count > self.limits.authenticated or connection.is_short:
            with_idle = [each for each in self._owners.values() if each.idle]
            if with_idle:
                largest = max(with_idle, key=lambda each: (not each.is_operator, len(each)))
                self._drop(next(iter(largest.idle)))

    def end(self, connection: ClientConnection) -> None:
        """Note that the request was answered: the connection is idle, and the last of its token's idle ones to go."""
        owner = connection.owner
        if owner is not None and connection in owner.busy:
            owner.busy.discard(connection)
            owner.idle[connection] = None

    def _drop(self, connection: ClientConnection) -> None:
        self.leave(connection)
        connection.drop()


def peer_of(host: str) -> str:
    """The peer that an address counts for: all addresses of an IPv6 /64 network are one, as one host can use them all."""
    if ":" not in host:
        return host
    address = IPv6Address(host.partition("%")[0])
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return f"{IPv6Address(int(address) >> 64 << 64)}/64"


def open_files_limit() -> int:
    """File descriptors that this process may have open."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return limit if limit != resource.RLIM_INFINITY else 1 << 30


def raise_open_files_limit(runs: int) -> None:
    """Raise the limit of open files to fit all connections and this number of runs, as far as this user may."""
    wanted = LIMITS.total + SPARE_FILES + FILES_PER_RUN * runs
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if open_files_limit() < wanted:
        granted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with suppress(ValueError, OSError):  # some systems have a limit of their own
            resource.setrlimit(resource.RLIMIT_NOFILE, (granted, hard))
