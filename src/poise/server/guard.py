"""What stands before every path and method: bounds, Host and Origin, a token. Nothing behind it is reached without one.

It is plain ASGI. A loopback address or a forwarded-for header grants nothing. What goes wrong behind it, and is nobody's
mistake but ours, comes out as a 500 with a number under which the log has the rest.
"""

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from secrets import token_hex
from time import perf_counter

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from poise.server.accounts import LONGEST_TOKEN, Accounts
from poise.server.hosts import Hosts
from poise.server.logs import Level, Logbook
from poise.server.metrics import Metrics
from poise.server.problems import reply
from poise.wire.views import Account

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
    """Of each request; `requests`: that are under way at once; `seconds`: from its headers to the end of the answer."""

    body: int = 1 << 20
    headers: int = 100
    header_bytes: int = 32 << 10
    path: int = 2_000
    query: int = 8_000
    requests: int = 256
    seconds: float = 60.0


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

    accounts: Accounts
    hosts: Hosts
    bounds: Bounds

    def check(self, scope: Scope) -> Account | Refusal:
        """In this order: size, where the body ends, Host, Origin, token, announced length of the body."""
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
        account = self.accounts.known(token.strip())
        if account is None:
            return NO_TOKEN
        length = found.get(b"content-length", [b"0"])[0]
        return _too_large(self.bounds) if not length.isdigit() or int(length[:20]) > self.bounds.body else account


def _framing(found: dict[bytes, list[bytes]]) -> Refusal | None:
    """A body whose end is said in two ways could end elsewhere for a proxy, which would take its rest for a request."""
    if b"content-length" in found and b"transfer-encoding" in found:
        text = "expected Content-Length or Transfer-Encoding, got both"
        return Refusal(HTTPStatus.BAD_REQUEST, "wrong-request", text)
    return None


def _too_large(bounds: Bounds) -> Refusal:
    return Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "too-large", f"expected a body of at most {bounds.body:,} bytes")


class Answer:
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
    """The receiving side: counts bytes, however they arrive."""

    def __init__(self, receive: Receive, most: int) -> None:
        self.complete = False
        self._left = most
        self.receive = receive

    async def __call__(self) -> Message:
        """The next part; raises TooLargeError beyond the bound."""
        message = await self.receive()
        self._left -= len(message.get("body", b""))
        self.complete = not message.get("more_body", False)
        if self._left < 0:
            raise TooLargeError
        return message


class Guard:
    """The outermost part of the application."""

    def __init__(self, app: ASGIApp, *, gate: Gate, metrics: Metrics, log: Logbook) -> None:
        self._app = app
        self._gate = gate
        self._metrics = metrics
        self._log = log
        self._inside = 0

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
        answer = Answer(send)
        self._inside += 1
        try:
            caller = BUSY if self._inside > self._gate.bounds.requests else self._gate.check(scope)
            if isinstance(caller, Refusal):
                if caller.status is HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
                    await _drain(receive)
                await _refuse(scope, receive, answer, caller)
            else:
                scope.setdefault("state", {})["account"] = caller
                await self._pass(scope, Body(receive, self._gate.bounds.body), answer)
        finally:
            self._inside -= 1
            self._record(scope, answer.status or GONE, perf_counter() - began)

    async def _pass(self, scope: Scope, body: Body, answer: Answer) -> None:
        try:
            async with asyncio.timeout(self._gate.bounds.seconds):
                await self._app(scope, body, answer)
        except TooLargeError:
            await _drain(body.receive)
            await self._apologise(scope, body, answer, _too_large(self._gate.bounds))
        except TimeoutError:
            await self._apologise(scope, body, answer, NO_ANSWER if body.complete else TOO_SLOW)
        except asyncio.CancelledError:  # the server stops and waits no longer; the wish may yet be granted, or not
            await self._apologise(scope, body, answer, NO_ANSWER)
        except ClientDisconnect:
            pass  # nobody is there to be told
        except Exception as error:
            trace = token_hex(8)
            self._log.error("bug", error=error, trace=trace, method=scope["method"], route=route_of(scope))
            text = f"an error inside of Poise; its log says more under {trace}"
            refusal = Refusal(HTTPStatus.INTERNAL_SERVER_ERROR, "internal", text)
            await self._apologise(scope, body, answer, refusal)

    async def _apologise(self, scope: Scope, body: Body, answer: Answer, refusal: Refusal) -> None:
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
        self._log.say(
            _level(method, status),
            "request",
            {"method": method, "route": route, "status": status, "account": who, "milliseconds": took},
        )


def _level(method: str, status: int) -> Level:
    """Refusals are worth a line, and what changes the service; what is done to jobs is in the journal."""
    if status >= 400:
        return Level.WARNING
    return Level.INFO if method in {"PUT", "DELETE"} else Level.DEBUG


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


async def _refuse(scope: Scope, receive: Receive, answer: Answer, refusal: Refusal) -> None:
    """Say no and hang up: what is left of the request is not waited for."""
    more = {"www-authenticate": "Bearer"} if refusal.status is HTTPStatus.UNAUTHORIZED else {}
    await reply(refusal.status, refusal.code, refusal.detail, {"connection": "close", **more})(scope, receive, answer)
