"""What stands before every path and method: bounds, Host and Origin, a token. Nothing behind it is reached without one.

It is plain ASGI. A loopback address or a forwarded-for header grants nothing. What goes wrong behind it, and is nobody's
mistake but ours, comes out as a 500 with a number under which the log has the rest.
"""

import asyncio
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from ipaddress import IPv6Address
from secrets import token_hex
from time import perf_counter

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from poise.scheduler.model.errors import RequestError
from poise.service.server.accounts import LONGEST_TOKEN, TokenStore, is_at_least
from poise.service.server.http.listener import ConnectionSlot, neighbourhood
from poise.service.server.http.problems import reply
from poise.service.server.logs import Level, Logbook, trace_of
from poise.service.server.metrics import Metrics
from poise.service.wire.views import Account, Role

# Which names a server answers to: what keeps a web page from reaching it by a name of its own (DNS rebinding).

LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})
_AUTHORITY = re.compile(r"(?P<name>\[[0-9a-f:.]{2,45}\]|[a-z0-9]([a-z0-9._-]{0,251}[a-z0-9])?)(:[0-9]{1,5})?")


@dataclass(frozen=True, slots=True)
class Hosts:
    """Names in lower case, without ports: the loopback ones, and those that were configured."""

    names: frozenset[str] = LOOPBACK

    @classmethod
    def of(cls, names: Iterable[str]) -> "Hosts":
        """The loopback names and these; raises RequestError for what is no name of a host."""
        return cls(LOOPBACK | {_checked(each) for each in names})

    def allows(self, authority: str) -> bool:
        """A Host header that names this server, with any port."""
        match = _AUTHORITY.fullmatch(authority.lower())
        return match is not None and match["name"] in self.names

    def is_own(self, origin: str, authority: str) -> bool:
        """An Origin header that is of a page from this very server: same name, same port."""
        scheme, separator, rest = origin.lower().partition("://")
        return separator != "" and scheme in {"http", "https"} and rest == authority.lower() and self.allows(authority)


def _checked(name: str) -> str:
    bracketed = f"[{_address(name)}]" if ":" in name else name.lower()
    match = _AUTHORITY.fullmatch(bracketed)
    if match is None or match["name"] != bracketed:
        raise RequestError(f"--host-name {name!r}: expected the name or address of a host, without a port")
    return match["name"]


def _address(name: str) -> str:
    """What has a colon in it must be an address of IPv6; `beef:8642` is a name with a port."""
    try:
        return str(IPv6Address(name.removeprefix("[").removesuffix("]")))
    except ValueError:
        return ""


METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"})
MOST_DRAINED = 16 << 20
"""Bytes of a body that is too large which are thrown away before it is refused."""
DRAIN_SECONDS = 5.0
GONE = 499
"""Status of a request whose client went away before it was answered."""
_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of each request, and of all that are under way at once.

    requests   under way at once
    reserve    of them, those that only operators' may be
    each       of one token, unless it is an operator's
    seconds    from the end of the head to the end of the answer
    upload     seconds from the end of the head to the end of the body
    """

    body: int = 1 << 20
    headers: int = 100
    header_bytes: int = 32 << 10
    path: int = 2_000
    query: int = 8_000
    requests: int = 256
    reserve: int = 32
    each: int = 64
    seconds: float = 60.0
    upload: float = 10.0


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that does not get in."""

    status: HTTPStatus
    code: str
    detail: str


BUSY = Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "busy", "too many requests are under way; try again")
NO_TOKEN = Refusal(
    HTTPStatus.UNAUTHORIZED,
    "no-token",
    "a token is needed: Authorization: Bearer TOKEN, one that is known and has not expired",
)
TOO_SLOW = Refusal(HTTPStatus.REQUEST_TIMEOUT, "too-slow", "the request took too long to arrive")
NO_ANSWER = Refusal(
    HTTPStatus.SERVICE_UNAVAILABLE, "not-ready", "no answer in time; it may yet be done: look before trying again"
)


class TooLargeError(Exception):
    """More bytes than a body may have."""


@dataclass(frozen=True, slots=True)
class Gate:
    """Looks at the head of a request: what is wrong with it, or whom it comes from."""

    accounts: TokenStore
    hosts: Hosts
    bounds: Bounds

    def check(self, scope: Scope) -> Account | Refusal:
        """In this order: size, where the body ends, Host, Origin, token."""
        found: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            found.setdefault(name, []).append(value)
        return self._size(scope) or _framing(found) or self._place(found) or self._holder(found)

    def _size(self, scope: Scope) -> Refusal | None:
        headers, bounds = scope["headers"], self.bounds
        if len(headers) > bounds.headers or sum(len(name) + len(value) for name, value in headers) > bounds.header_bytes:
            most = f"{bounds.headers} headers of {bounds.header_bytes:,} bytes in all"
            return Refusal(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "too-large", f"expected at most {most}")
        if len(scope["query_string"]) > bounds.query or len(scope["path"]) > bounds.path:
            most = f"a path of {bounds.path:,} and a query of {bounds.query:,} characters"
            return Refusal(HTTPStatus.REQUEST_URI_TOO_LONG, "too-large", f"expected at most {most}")
        return None

    def _place(self, found: dict[bytes, list[bytes]]) -> Refusal | None:
        """One Host that names this server, and if there is an Origin, its own."""
        hosts = found.get(b"host", [])
        host = hosts[0].decode("latin-1") if len(hosts) == 1 else ""
        if not self.hosts.allows(host):
            text = "the Host header names another server; add it with --host-name if it is this one"
            return Refusal(HTTPStatus.FORBIDDEN, "wrong-host", text)
        if any(not self.hosts.is_own(origin.decode("latin-1"), host) for origin in found.get(b"origin", ())):
            return Refusal(HTTPStatus.FORBIDDEN, "wrong-origin", "requests from pages of other origins are refused")
        return None

    def _holder(self, found: dict[bytes, list[bytes]]) -> Account | Refusal:
        given = found.get(b"authorization", [])
        scheme, _, token = given[0].decode("latin-1").partition(" ") if len(given) == 1 else ("", "", "")
        if scheme.lower() != "bearer" or not 0 < len(token) <= LONGEST_TOKEN:
            return NO_TOKEN
        return self.accounts.known(token.strip()) or NO_TOKEN


def _framing(found: dict[bytes, list[bytes]]) -> Refusal | None:
    """A body whose end is said in two ways could end elsewhere for a proxy, which would take its rest for a request."""
    if b"content-length" in found and b"transfer-encoding" in found:
        text = "expected Content-Length or Transfer-Encoding, got both"
        return Refusal(HTTPStatus.BAD_REQUEST, "wrong-request", text)
    return None


def _too_large(bounds: Bounds) -> Refusal:
    return Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "too-large", f"expected a body of at most {bounds.body:,} bytes")


def _is_too_large(scope: Scope, most: int) -> bool:
    """The head announces more bytes than a body may have, or a number of them that is none."""
    for name, value in scope["headers"]:
        if name == b"content-length":
            return not value.isdigit() or int(value[:20]) > most
    return False


class ConcurrencyLimit:
    """Counts requests that are under way: no token takes all of them, and some are left to operators."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._inside = 0
        self._of: dict[str, int] = {}

    def enter(self, account: Account) -> Refusal | None:
        """Let one in; why not, otherwise. Whoever got in has to leave."""
        bounds, mine = self._bounds, self._of.get(account.name, 0)
        is_free = mine < bounds.each and self._inside < bounds.requests - bounds.reserve
        if not is_free and (refusal := self._why_not(account, mine)) is not None:
            return refusal
        self._inside += 1
        self._of[account.name] = mine + 1
        return None

    def _why_not(self, account: Account, mine: int) -> Refusal | None:
        bounds = self._bounds
        if is_at_least(account, Role.OPERATOR):
            return BUSY if self._inside >= bounds.requests else None
        if mine < bounds.each:
            return BUSY
        text = f"token {account.name!r} has {mine} requests under way, of at most {bounds.each}; wait for an answer first"
        return Refusal(HTTPStatus.TOO_MANY_REQUESTS, "too-many-requests", text)

    def leave(self, account: Account) -> None:
        """One that got in is answered."""
        self._inside -= 1
        left = self._of.pop(account.name) - 1
        if left:
            self._of[account.name] = left


class ResponseGuard:
    """The sending side of a request: adds what every answer has, and remembers what became of it."""

    def __init__(self, send: Send) -> None:
        self.status = 0
        self._send = send

    async def __call__(self, message: Message) -> None:
        """Send a part of the answer."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), *_HEADERS]
        await self._send(message)


class Body:
    """The receiving side: counts bytes, however they arrive. From when they are first waited for, they have their time."""

    def __init__(self, receive: Receive, bounds: Bounds, limit: asyncio.Timeout) -> None:
        self.complete = False
        self.receive = receive
        self._left = bounds.body
        self._seconds = bounds.upload
        self._limit = limit
        self._due: asyncio.TimerHandle | None = None

    async def __call__(self) -> Message:
        """The next part; raises TooLargeError beyond the bound."""
        if self._due is None:
            self._due = asyncio.get_running_loop().call_later(self._seconds, self._give_up)
        message = await self.receive()
        self._left -= len(message.get("body", b""))
        if not message.get("more_body", False):
            self.complete = True
            self.forget()
        if self._left < 0:
            raise TooLargeError
        return message

    def forget(self) -> None:
        """Nothing more is waited for."""
        if self._due is not None:
            self._due.cancel()

    def _give_up(self) -> None:
        with suppress(RuntimeError):  # the time of the whole request is over as well
            self._limit.reschedule(0.0)


class RequestGuard:
    """The outermost part of the application."""

    def __init__(self, app: ASGIApp, *, gate: Gate, metrics: Metrics, log: Logbook) -> None:
        self._app = app
        self._gate = gate
        self._metrics = metrics
        self._log = log
        self._turnstile = ConcurrencyLimit(gate.bounds)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or refuse it. Of what is no HTTP request, only the server's own start and stop get in."""
        if scope["type"] == "http":
            await self._visit(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _visit(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = perf_counter()
        answer = ResponseGuard(send)
        try:
            caller = self._gate.check(scope)
            refusal = caller if isinstance(caller, Refusal) else self._turnstile.enter(caller)
            if isinstance(caller, Account):
                scope.setdefault("state", {})["account"] = caller
            if refusal is not None:
                await _refuse(scope, receive, answer, refusal)
            elif isinstance(caller, Account):
                await self._host(caller, scope, receive, answer)
        finally:
            self._record(scope, answer.status or GONE, perf_counter() - began)

    async def _host(self, account: Account, scope: Scope, receive: Receive, answer: ResponseGuard) -> None:
        """A request that got in; whatever becomes of it, it is counted out."""
        visit: ConnectionSlot | None = scope["state"].get("visit")
        try:
            if visit is not None:
                visit.begin(account)
            await self._pass(scope, receive, answer)
        finally:
            self._turnstile.leave(account)
            if visit is not None:
                visit.end()

    async def _pass(self, scope: Scope, receive: Receive, answer: ResponseGuard) -> None:
        bounds = self._gate.bounds
        limit = asyncio.timeout(bounds.seconds)
        body = Body(receive, bounds, limit)
        try:
            async with limit:
                if _is_too_large(scope, bounds.body):
                    raise TooLargeError  # noqa: TRY301 - it is told as of a body that turns out to be
                await self._app(scope, body, answer)
        except TooLargeError:
            await _drain(body.receive)
            await self._apologise(scope, body, answer, _too_large(bounds))
        except TimeoutError:
            await self._apologise(scope, body, answer, NO_ANSWER if body.complete else TOO_SLOW)
        except asyncio.CancelledError:  # the server stops and waits no longer; the wish may yet be granted, or not
            await self._apologise(scope, body, answer, NO_ANSWER)
        except ClientDisconnect:
            pass  # nobody is there to be told
        except Exception as error:
            trace = token_hex(8)
            self._complain(error, trace, scope)
            text = f"an error inside of Poise; its log says more under {trace}"
            refusal = Refusal(HTTPStatus.INTERNAL_SERVER_ERROR, "internal", text)
            await self._apologise(scope, body, answer, refusal)
        finally:
            body.forget()

    def _complain(self, error: Exception, trace: str, scope: Scope) -> None:
        """A mistake of ours can be had again and again, too."""
        values = {"trace": trace, "method": scope["method"], "route": route_of(scope)}
        self._log.caused_by(f"bug {values['route']}", Level.ERROR, "bug", values | trace_of(error))

    async def _apologise(self, scope: Scope, body: Body, answer: ResponseGuard, refusal: Refusal) -> None:
        """Once an answer has begun, all that is left is to break it off, so that it cannot be taken for a whole one."""
        if answer.status:
            raise ConnectionAbortedError(refusal.code)
        await _refuse(scope, body, answer, refusal)

    def _record(self, scope: Scope, status: int, seconds: float) -> None:
        method = scope["method"] if scope["method"] in METHODS else "other"
        route = route_of(scope)
        self._metrics.requested(route, method, status, seconds)
        account = scope.get("state", {}).get("account")
        who = account.name if account is not None else None
        took = round(seconds * 1e3, 3)
        said = {"method": method, "route": route, "status": status, "account": who, "milliseconds": took}
        if status < 400:
            self._log.say(Level.INFO if method in {"PUT", "DELETE"} else Level.DEBUG, "request", said)
        elif who is not None:
            self._log.caused_by(f"token {who}", Level.WARNING, "request", said)
        else:
            address = address_of(scope)
            self._log.caused_by(address, Level.WARNING, "request", said | {"address": address})


def address_of(scope: Scope) -> str:
    """Where a request comes from, for the log alone: it grants nothing."""
    return neighbourhood(scope["client"][0]) if scope.get("client") else "unknown"


def route_of(scope: Scope) -> str:
    """The template of the path that a request found; never the path itself, of which there is no end."""
    return getattr(scope.get("route"), "path", "other")


async def _drain(receive: Receive) -> None:
    """Take what is still being sent, within reason: whoever is hung up on while sending never gets to read why."""
    left = MOST_DRAINED
    with suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_SECONDS):
            while left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                if not message.get("more_body", False):
                    return


async def _refuse(scope: Scope, receive: Receive, answer: ResponseGuard, refusal: Refusal) -> None:
    """Say no and hang up: what is left of the request is not waited for."""
    more = {"www-authenticate": "Bearer"} if refusal.status is HTTPStatus.UNAUTHORIZED else {}
    await reply(refusal.status, refusal.code, refusal.detail, {"connection": "close", **more})(scope, receive, answer)
