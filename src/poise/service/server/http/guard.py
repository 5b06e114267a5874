"""The guard: ASGI middleware in front of every path and method. No request gets past it without a token.

`RequestGuard._handle` is the life of a request: check its head (size, framing, Host, Origin, token), count it among those
under way, pass it on with limits on the bytes and the time of its body, and record what became of it. A bug behind the guard
becomes a 500 with a number, under which the log has the traceback. A loopback address or a forwarded-for header grants
nothing.
"""

import asyncio
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from ipaddress import IPv6Address
from secrets import token_hex
from time import perf_counter

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from poise.scheduler.model.errors import RequestError
from poise.service.server.accounts import LONGEST_TOKEN, TokenStore, is_at_least
from poise.service.server.http.connections import ClientConnection, peer_of
from poise.service.server.http.problems import reply
from poise.service.server.logs import Level, Logbook, traceback_of
from poise.service.server.metrics import Metrics
from poise.service.wire.views import Account, Role

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"})
MOST_DRAINED = 16 << 20  # bytes of a too large body that are read and thrown away before it is refused
DRAIN_SECONDS = 5.0
CLIENT_GONE = 499  # status recorded for a request whose client went away before it was answered
LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})
_AUTHORITY = re.compile(r"(?P<name>\[[0-9a-f:.]{2,45}\]|[a-z0-9]([a-z0-9._-]{0,251}[a-z0-9])?)(:[0-9]{1,5})?")
_RESPONSE_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits on one request, and on all that are under way at one time.

    requests    under way at one time
    reserved    of them, those that only operators may use
    per_token   under way of one token; operators are exempt
    seconds     from the end of the head to the end of the answer
    upload      seconds from the end of the head to the end of the body
    """

    body: int = 1 << 20
    headers: int = 100
    header_bytes: int = 32 << 10
    path: int = 2_000
    query: int = 8_000
    requests: int = 256
    reserved: int = 32
    per_token: int = 64
    seconds: float = 60.0
    upload: float = 10.0


@dataclass(frozen=True, slots=True)
class AllowedHosts:
    """The names that the server answers to, in lower case and without ports.

    They keep a web page from reaching it under a name of the page's own (DNS rebinding).
    """

    names: frozenset[str] = LOOPBACK

    @classmethod
    def of(cls, names: Iterable[str]) -> "AllowedHosts":
        """The loopback names and these; raises RequestError for what is no name of a host."""
        hosts = set(LOOPBACK)
        for name in names:
            host = name.lower()
            if ":" in name:  # an IPv6 address; `beef:8642` is a name with a port, and refused
                try:
                    host = f"[{IPv6Address(name.removeprefix('[').removesuffix(']'))}]"
                except ValueError:
                    host = ""
            match = _AUTHORITY.fullmatch(host)
            if match is None or match["name"] != host:
                raise RequestError(f"--host-name {name!r}: expected the name or address of a host, without a port")
            hosts.add(host)
        return cls(frozenset(hosts))

    def allows(self, authority: str) -> bool:
        """Whether a Host header names this server, with any port."""
        match = _AUTHORITY.fullmatch(authority.lower())
        return match is not None and match["name"] in self.names

    def is_own(self, origin: str, authority: str) -> bool:
        """Whether an Origin header is of a page from this very server: same name, same port."""
        scheme, separator, rest = origin.lower().partition("://")
        return separator != "" and scheme in {"http", "https"} and rest == authority.lower() and self.allows(authority)


@dataclass(frozen=True, slots=True)
class ApiOptions:
    """What an API has beside service and accounts; the defaults are for loopback."""

    hosts: AllowedHosts = field(default_factory=AllowedHosts)
    limits: RequestLimits = field(default_factory=RequestLimits)
    metrics: Metrics = field(default_factory=Metrics)
    log: Logbook = field(default_factory=Logbook)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A problem with which a request is turned away."""

    status: HTTPStatus
    code: str
    detail: str


BUSY = Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "busy", "too many requests are under way; try again")
_NO_TOKEN = "a token is needed: Authorization: Bearer TOKEN, one that is known and has not expired"
NO_TOKEN = Refusal(HTTPStatus.UNAUTHORIZED, "no-token", _NO_TOKEN)
TOO_SLOW = Refusal(HTTPStatus.REQUEST_TIMEOUT, "too-slow", "the request took too long to arrive")
NO_ANSWER = Refusal(
    HTTPStatus.SERVICE_UNAVAILABLE, "not-ready", "no answer in time; it may yet be done: look before trying again"
)


class TooLargeError(Exception):
    """A body has more bytes than it may have."""


class RequestGuard:
    """The outermost part of the application."""

    def __init__(self, app: ASGIApp, accounts: TokenStore, options: ApiOptions) -> None:
        self._app, self._accounts = app, accounts
        self._hosts, self._limits, self._metrics, self._log = options.hosts, options.limits, options.metrics, options.log
        self._concurrency = ConcurrencyLimit(options.limits)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Take one ASGI event: an HTTP request, or the server's own start and stop. WebSockets are closed."""
        if scope["type"] == "http":
            await self._handle(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = perf_counter()
        response = _Response(send)
        state = scope.setdefault("state", {})
        connection: ClientConnection | None = state.get("connection")  # None in tests, which call the application directly
        account: Account | None = None
        if connection is not None:
            connection.request_started()
        try:
            checked = self._check_head(scope)
            if isinstance(checked, Refusal):
                await _refuse(scope, receive, response, checked)
                return
            state["account"] = account = checked
            refusal = self._concurrency.enter(account)
            if refusal is not None:
                await _refuse(scope, receive, response, refusal)
                return
            try:
                if connection is not None:
                    connection.authenticated(account)
                await self._pass_on(scope, receive, response)
            finally:
                self._concurrency.leave(account)
        finally:
            if connection is not None:
                connection.request_finished()
            self._record(scope, account, response.status or CLIENT_GONE, perf_counter() - began)

    def _check_head(self, scope: Scope) -> Account | Refusal:
        """The account of the request; or what is wrong, cheapest check first and the token last."""
        headers, limits = scope["headers"], self._limits
        if len(headers) > limits.headers or sum(len(name) + len(value) for name, value in headers) > limits.header_bytes:
            most = f"{limits.headers} headers of {limits.header_bytes:,} bytes in all"
            return Refusal(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "too-large", f"expected at most {most}")
        if len(scope["query_string"]) > limits.query or len(scope["path"]) > limits.path:
            most = f"a path of {limits.path:,} and a query of {limits.query:,} characters"
            return Refusal(HTTPStatus.REQUEST_URI_TOO_LONG, "too-large", f"expected at most {most}")
        given: dict[bytes, list[str]] = {}
        for name, value in headers:
            given.setdefault(name, []).append(value.decode("latin-1"))
        if b"content-length" in given and b"transfer-encoding" in given:
            # The body could end elsewhere for a proxy in front, which would take the rest for another request.
            text = "expected Content-Length or Transfer-Encoding, got both"
            return Refusal(HTTPStatus.BAD_REQUEST, "wrong-request", text)
        hosts = given.get(b"host", [])
        host = hosts[0] if len(hosts) == 1 else ""
        if not self._hosts.allows(host):
            text = "the Host header names another server; add it with --host-name if it is this one"
            return Refusal(HTTPStatus.FORBIDDEN, "wrong-host", text)
        if any(not self._hosts.is_own(origin, host) for origin in given.get(b"origin", ())):
            return Refusal(HTTPStatus.FORBIDDEN, "wrong-origin", "requests from pages of other origins are refused")
        credentials = given.get(b"authorization", [])
        scheme, _, token = credentials[0].partition(" ") if len(credentials) == 1 else ("", "", "")
        if scheme.lower() != "bearer" or not 0 < len(token) <= LONGEST_TOKEN:
            return NO_TOKEN
        return self._accounts.known(token.strip()) or NO_TOKEN

    async def _pass_on(self, scope: Scope, receive: Receive, response: "_Response") -> None:
        """Have the application answer, within limits; whatever goes wrong instead becomes a problem."""
        limits = self._limits
        timeout = asyncio.timeout(limits.seconds)
        body = _RequestBody(receive, limits, timeout)
        refusal: Refusal
        try:
            async with timeout:
                for name, value in scope["headers"]:
                    if name == b"content-length" and (not value.isdigit() or int(value[:20]) > limits.body):
                        raise TooLargeError  # noqa: TRY301 - refused like a body that turns out to be too large
                await self._app(scope, body, response)
        except TooLargeError:
            await _drain(receive)
            text = f"expected a body of at most {limits.body:,} bytes"
            refusal = Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "too-large", text)
        except TimeoutError:
            refusal = NO_ANSWER if body.is_complete else TOO_SLOW
        except asyncio.CancelledError:  # the server stops and waits no longer; a command may be carried out, or not
            refusal = NO_ANSWER
        except ClientDisconnect:
            return
        except Exception as error:
            trace = token_hex(8)
            values = {"trace": trace, "method": scope["method"], "route": route_of(scope)}
            # With a bound on lines: a client can run into the same bug again and again.
            self._log.write_limited(f"bug {values['route']}", Level.ERROR, "bug", values | traceback_of(error))
            text = f"an error inside of Poise; its log says more under {trace}"
            refusal = Refusal(HTTPStatus.INTERNAL_SERVER_ERROR, "internal", text)
        else:
            return
        finally:
            body.stop_timer()
        if response.status:
            # An answer has begun. Break it off, so that the client cannot take it for a complete one.
            raise ConnectionAbortedError(refusal.code)
        await _refuse(scope, body, response, refusal)

    def _record(self, scope: Scope, account: Account | None, status: int, seconds: float) -> None:
        """Count and log a request. What a client causes by mistakes, it can cause at will, so those lines are bounded."""
        method = scope["method"] if scope["method"] in METHODS else "other"
        route = route_of(scope)
        self._metrics.requests.labels(route, method, str(status)).inc()
        self._metrics.request.labels(route).observe(seconds)
        name = None if account is None else account.name
        took = round(seconds * 1e3, 3)
        values = {"method": method, "route": route, "status": status, "account": name, "milliseconds": took}
        if status < 400:
            self._log.write(Level.INFO if method in {"PUT", "DELETE"} else Level.DEBUG, "request", values)
        elif name is not None:
            self._log.write_limited(f"token {name}", Level.WARNING, "request", values)
        else:
            address = peer_of(scope["client"][0]) if scope.get("client") else "unknown"
            self._log.write_limited(address, Level.WARNING, "request", values | {"address": address})


class ConcurrencyLimit:
    """Counts requests under way: one token cannot take all places, and some are reserved for operators."""

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits
        self._count = 0
        self._by_token: dict[str, int] = {}

    def enter(self, account: Account) -> Refusal | None:
        """Count a request, which has to leave later; or say why it is refused, and do not count it."""
        limits, mine = self._limits, self._by_token.get(account.name, 0)
        if is_at_least(account, Role.OPERATOR):
            if self._count >= limits.requests:
                return BUSY
        elif mine >= limits.per_token:
            text = f"token {account.name!r} has {mine} requests under way, of at most {limits.per_token}"
            return Refusal(HTTPStatus.TOO_MANY_REQUESTS, "too-many-requests", f"{text}; wait for an answer first")
        elif self._count >= limits.requests - limits.reserved:
            return BUSY
        self._count += 1
        self._by_token[account.name] = mine + 1
        return None

    def leave(self, account: Account) -> None:
        """Count out a request that was counted."""
        self._count -= 1
        left = self._by_token.pop(account.name) - 1
        if left:
            self._by_token[account.name] = left


class _Response:
    """The `send` of a request: adds the headers of every answer; `status` is 0 until an answer begins."""

    def __init__(self, send: Send) -> None:
        self.status = 0
        self._send = send

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), *_RESPONSE_HEADERS]
        await self._send(message)


class _RequestBody:
    """The `receive` of a request: counts bytes however they arrive, and limits the time from the first wait for them."""

    def __init__(self, receive: Receive, limits: RequestLimits, timeout: asyncio.Timeout) -> None:
        self.is_complete = False
        self._receive = receive
        self._left = limits.body
        self._seconds = limits.upload
        self._timeout = timeout
        self._timer: asyncio.TimerHandle | None = None

    async def __call__(self) -> Message:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._expire)
        message = await self._receive()
        self._left -= len(message.get("body", b""))
        if not message.get("more_body", False):
            self.is_complete = True
            self.stop_timer()
        if self._left < 0:
            raise TooLargeError
        return message

    def stop_timer(self) -> None:
        """End the limit on its time."""
        if self._timer is not None:
            self._timer.cancel()

    def _expire(self) -> None:
        with suppress(RuntimeError):  # the timeout of the whole request has expired as well
            self._timeout.reschedule(0.0)


def route_of(scope: Scope) -> str:
    """The template of the path that a request matched; never the path itself, as metrics and logs need few values."""
    return getattr(scope.get("route"), "path", "other")


async def _drain(receive: Receive) -> None:
    """Read what is still being sent, within limits: a client that is cut off while it sends never reads the answer."""
    left = MOST_DRAINED
    with suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_SECONDS):
            while left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                if not message.get("more_body", False):
                    return


async def _refuse(scope: Scope, receive: Receive, response: _Response, refusal: Refusal) -> None:
    """Answer with a problem and close the connection: the rest of the request is not waited for."""
    more = {"www-authenticate": "Bearer"} if refusal.status is HTTPStatus.UNAUTHORIZED else {}
    await reply(refusal.status, refusal.code, refusal.detail, {"connection": "close", **more})(scope, receive, response)
