"""Who is connected, and who gives way where room is short. Strangers have brought no token yet; others are of a token.

A newcomer is never refused: the oldest stranger of the address with most of them gives way, once it has had its time. So one
peer without a token, however often it connects, cannot keep out another that says at once what it wants. A token that has
too many connections gives up the one that has been idle for longest. All of it happens in the loop's thread.
"""

from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv6Address
from socket import SHUT_RDWR, socket
from typing import Protocol

from poise.server.accounts import is_at_least
from poise.wire.views import Account, Role


@dataclass(frozen=True, slots=True)
class Room:
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


class Link:
    """One connection. `since`: when it was accepted; `is_beyond`: it has a file that others may need."""

    __slots__ = ("address", "host", "is_beyond", "since", "socket", "transport")

    def __init__(self, accepted: socket, address: str, since: float, *, is_beyond: bool = False) -> None:
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
        self.busy: set[Link] = set()
        self.idle: dict[Link, None] = {}

    def __len__(self) -> int:
        return len(self.busy) + len(self.idle)


class Guests:
    """All connections of a service."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self._strangers: dict[str, dict[Link, None]] = {}
        self._unknown = 0
        self._hosts: dict[str, _Host] = {}
        self._known = 0

    def __len__(self) -> int:
        return self._unknown + self._known

    def enter(self, link: Link) -> None:
        """Somebody has connected."""
        self._strangers.setdefault(link.address, {})[link] = None
        self._unknown += 1

    def leave(self, link: Link) -> None:
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

    def begin(self, link: Link, account: Account) -> None:
        """A request of this account is under way on a connection. Others may have to give way to the first one."""
        host = link.host
        if host is None or host.name != account.name:
            self._recognise(link, account)
        else:
            host.idle.pop(link, None)
            host.busy.add(link)

    def end(self, link: Link) -> None:
        """The request has been answered."""
        host = link.host
        if host is not None and link in host.busy:
            host.busy.discard(link)
            host.idle[link] = None

    def trim(self, now: float, *, is_short: bool) -> tuple[Link | None, float]:
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

    def _recognise(self, link: Link, account: Account) -> None:
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

    def _forget_stranger(self, link: Link) -> None:
        there = self._strangers.get(link.address)
        if there is not None and link in there:
            del there[link]
            self._unknown -= 1
            if not there:
                del self._strangers[link.address]

    def _drop(self, link: Link) -> None:
        self.leave(link)
        link.drop()


@dataclass(frozen=True, slots=True)
class Visit:
    """A connection among all, as far as requests on it have to do with that."""

    guests: Guests
    link: Link

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
