"""The Kubernetes API over HTTP: requests and their errors, lists, watches.

Objects are raw JSON: with 20,000 pods, a model of each would take a gigabyte and twelve seconds. The client itself repeats
a request only if the server has certainly not carried it out (401, after which the credential is read again), or if it is a
GET whose connection had gone stale.
"""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from enum import StrEnum
from random import uniform
from typing import NamedTuple
from urllib.parse import urlencode

import httpx

from poise.scheduler.model.errors import PoiseError
from poise.service.backends.kubernetes.access import Authorization, KubeConfig
from poise.service.backends.kubernetes.connections import IDLE_SECONDS, KEEP_ALIVE, KeepAliveTransport
from poise.service.backends.kubernetes.errors import (
    ApiError,
    ApiUnavailableError,
    ExpiredError,
    NotLeadingError,
    words_of,
)
from poise.service.backends.kubernetes.objects import Json

REQUEST_SECONDS = 30.0  # for a request and its answer
CONNECT_SECONDS = 10.0
PAGE = 500  # objects in one answer to a list
WATCH_SECONDS = 300.0  # after which the server ends a watch; each watch asks for a tenth more or less
WATCH_SLACK = 30.0  # seconds by which the end of a watch may be late; after them the connection is taken to be dead


class PatchKind(StrEnum):
    """How a patch changes an object; the value is the type of its body."""

    MERGE = "application/merge-patch+json"
    STRATEGIC = "application/strategic-merge-patch+json"


class Page(NamedTuple):
    """A part of a list. `is_first`: forget earlier pages, the list was begun anew."""

    items: Sequence[Json]
    resource_version: str
    is_first: bool


class KubeClient:
    """Sends requests to one API server, from one event loop. Paths are the caller's, such as `/api/v1/pods`.

    At most `connections` requests are under way at a time; the others wait their turn, and watches do not count. So whatever
    must not wait behind others, such as the renewal of a lease, has a client of its own.

    may_write   asked directly before anything but a GET is sent; if not, NotLeadingError is raised instead
    calls   requests so far by Kubernetes' verbs: get, list, watch, create, update, patch, delete
    """

    def __init__(
        self,
        config: KubeConfig,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        connections: int = 16,
        seconds: float = REQUEST_SECONDS,
        may_write: Callable[[], bool] = lambda: True,
    ) -> None:
        self.config = config
        self.calls: Counter[str] = Counter()
        self._transport, self._connections, self._seconds = transport, connections, seconds
        self._may_write = may_write
        self._turns = asyncio.Semaphore(connections)
        self._http = self._new_http()
        self._serial = 0
        self._retired: httpx.AsyncClient | None = None

    async def get(self, path: str) -> Json:
        """Read an object."""
        return _parsed(await self._ask("get", "GET", path), path)

    async def post(self, path: str, body: Json) -> Json:
        """Create an object, or one of those that are only answered, such as a binding or a review."""
        return _parsed(await self._ask("create", "POST", path, body), path)

    async def put(self, path: str, body: Json) -> Json:
        """Replace an object: the one with the resource version in the body, if it has one."""
        return _parsed(await self._ask("update", "PUT", path, body), path)

    async def patch(self, path: str, body: Json, kind: PatchKind = PatchKind.MERGE) -> Json:
        """Change an object."""
        return _parsed(await self._ask("patch", "PATCH", path, body, kind), path)

    async def delete(self, path: str, *, uid: str | None = None, grace: int | None = None) -> Json:
        """Delete an object, or only the one with this uid; `grace` in seconds. Return it as it is now, or a Status."""
        options = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            **({} if uid is None else {"preconditions": {"uid": uid}}),
            **({} if grace is None else {"gracePeriodSeconds": grace}),
        }
        return _parsed(await self._ask("delete", "DELETE", path, options), path)

    async def pages(self, path: str, *, labels: str = "", fields: str = "", limit: int = PAGE) -> AsyncGenerator[Page, None]:
        """List a collection page by page; a list that expires under way is begun anew, which `Page.is_first` says.

        Others of the event loop have a turn after each page. Items are without `kind` and `apiVersion`.
        """
        token = ""
        while True:
            query = {"limit": str(limit), **_selection(labels, fields), **({"continue": token} if token else {})}
            try:
                answer = _parsed(await self._ask("list", "GET", _with_query(path, query)), path)
            except ExpiredError:
                if not token:
                    raise
                token, limit = "", 8 * limit  # larger pages take less time in all: else it might expire for ever
                continue
            head = answer.get("metadata") or {}
            is_first, token = not token, head.get("continue") or ""
            yield Page(answer.get("items") or (), str(head.get("resourceVersion", "")), is_first)
            if not token:
                return
            await asyncio.sleep(0)

    async def watch(
        self,
        path: str,
        resource_version: str,
        *,
        labels: str = "",
        fields: str = "",
        seconds: float = WATCH_SECONDS,
        on_open: Callable[[], None] | None = None,
    ) -> AsyncGenerator[tuple[str, Json], None]:
        """Yield what happens after a resource version: `ADDED`, `MODIFIED`, `DELETED` or `BOOKMARK`, and the object.

        It ends when the server ends it, after some `seconds`: go on from the resource version of the last object. Raise
        `ExpiredError` if that is too old, and `ApiUnavailableError` if the connection breaks or is silent for longer than
        a watch can last. `on_open` is called when the server has accepted the watch.
        """
        length = int(max(1.0, uniform(0.9, 1.1) * seconds))  # else all watches that a restart began would end together
        query = {
            "watch": "1",
            "resourceVersion": resource_version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(length),
            **_selection(labels, fields),
        }
        patience = httpx.Timeout(length + WATCH_SLACK, connect=CONNECT_SECONDS)
        async with self._streaming(_with_query(path, query), patience) as response:
            if on_open is not None:
                on_open()
            async with aclosing(_lines(response)) as lines:
                async for line in lines:
                    yield _event(line, path)

    async def aclose(self) -> None:
        """Close all connections."""
        await self._http.aclose()
        if self._retired is not None:
            await self._retired.aclose()

    def _new_http(self) -> httpx.AsyncClient:
        if self._transport is not None:
            transport = self._transport
        elif self.config.proxy is None:
            transport = KeepAliveTransport(self.config.verify, self._connections)
        else:
            transport = httpx.AsyncHTTPTransport(
                verify=self.config.verify,
                proxy=self.config.proxy,
                limits=httpx.Limits(
                    max_connections=None, max_keepalive_connections=self._connections, keepalive_expiry=IDLE_SECONDS
                ),
                socket_options=KEEP_ALIVE,
            )
        return httpx.AsyncClient(transport=transport, headers={"User-Agent": "poise", "Accept": "application/json"})

    async def _ask(
        self,
        verb: str,
        method: str,
        path: str,
        body: Json | None = None,
        kind: str = "application/json",
    ) -> httpx.Response:
        """Send a request, again after a refused credential, and return an answer that is no error."""
        content = None if body is None else json.dumps(body, separators=(",", ":")).encode()
        async with self._turns:
            response, used = await self._send(verb, method, path, content, kind)
            if response.status_code == 401 and self.config.credential.forget(used):
                response, _ = await self._send(verb, method, path, content, kind)
        if not response.is_success:
            raise _error(method, path, response)
        return response

    async def _send(
        self, verb: str, method: str, path: str, content: bytes | None, kind: str
    ) -> tuple[httpx.Response, Authorization]:
        used = await self._authorize()
        headers = {**used.headers, **({} if content is None else {"Content-Type": kind})}
        what = f"{method} {path.partition('?')[0]}"
        for is_again in (False, True):
            self.calls[verb] += 1
            request = self._request(method, path, headers, httpx.Timeout(self._seconds, connect=CONNECT_SECONDS), content)
            # Only now: a request may have waited long for its turn, or for a credential.
            if method != "GET" and not self._may_write():
                raise NotLeadingError("this service does not lead any more")
            try:
                async with asyncio.timeout(self._seconds):
                    return await self._http.send(request), used
            except (httpx.TimeoutException, TimeoutError) as error:
                raise ApiUnavailableError(f"{what}: no answer within {self._seconds:g} s") from error
            except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError) as error:
                if is_again or method != "GET":  # a server may close a connection just when it is used again
                    raise ApiUnavailableError(f"{what}: the connection broke: {words_of(error)}") from error
            except httpx.RequestError as error:
                raise ApiUnavailableError(f"{what}: no connection: {words_of(error)}") from error
        raise AssertionError("the second try returns or raises")

    @asynccontextmanager
    async def _streaming(self, path: str, patience: httpx.Timeout) -> AsyncIterator[httpx.Response]:
        """Have an answer that is read as it comes."""
        what = f"watch {path.partition('?')[0]}"
        try:
            response, used = await self._begin(path, patience)
            if response.status_code == 401 and self.config.credential.forget(used):
                await response.aclose()
                response, _ = await self._begin(path, patience)
            try:
                if not response.is_success:
                    await response.aread()
                    raise _error("watch", path, response)
                yield response
            finally:
                await response.aclose()
        except (httpx.TimeoutException, TimeoutError) as error:
            raise ApiUnavailableError(f"{what}: silent for too long") from error
        except (httpx.RequestError, httpx.StreamError) as error:
            raise ApiUnavailableError(f"{what}: the connection broke: {words_of(error)}") from error

    async def _begin(self, path: str, patience: httpx.Timeout) -> tuple[httpx.Response, Authorization]:
        """Send a request for a stream; the head of the answer comes at once, however long the rest takes."""
        used = await self._authorize()
        self.calls["watch"] += 1
        request = self._request("GET", path, used.headers, patience)
        async with asyncio.timeout(self._seconds):
            return await self._http.send(request, stream=True), used

    def _request(
        self, method: str, path: str, headers: Mapping[str, str], patience: httpx.Timeout, content: bytes | None = None
    ) -> httpx.Request:
        name = self.config.server_name
        return self._http.build_request(
            method,
            self.config.server + path,
            headers=headers,
            content=content,
            timeout=patience,
            extensions={} if name is None else {"sni_hostname": name},
        )

    async def _authorize(self) -> Authorization:
        """Say who asks. A new certificate only serves in new connections, so those that are open are used up and left."""
        given = await self.config.credential.authorization()
        if given.serial != self._serial:
            old, self._retired, self._http, self._serial = self._retired, self._http, self._new_http(), given.serial
            if old is not None:
                await old.aclose()
        return given


def _selection(labels: str, fields: str) -> dict[str, str]:
    return {**({"labelSelector": labels} if labels else {}), **({"fieldSelector": fields} if fields else {})}


def _with_query(path: str, query: Mapping[str, str]) -> str:
    return f"{path}{'&' if '?' in path else '?'}{urlencode(query)}"


def _parsed(response: httpx.Response, path: str) -> Json:
    try:
        answer = json.loads(response.content)
    except ValueError as error:
        raise ApiUnavailableError(f"{path}: the answer is no JSON; is there a Kubernetes API at this address?") from error
    if not isinstance(answer, dict):
        raise ApiUnavailableError(f"{path}: the answer is no object; is there a Kubernetes API at this address?")
    return answer


def _error(method: str, path: str, response: httpx.Response) -> PoiseError:
    """Turn an answer that is an error into one of ours."""
    try:
        status = json.loads(response.content)
    except ValueError:
        status = None
    if not isinstance(status, dict):
        status = {"message": " ".join(response.text.split())[:200]}
    after = response.headers.get("Retry-After", "")
    path = path.partition("?")[0]
    return _status_error(f"{method} {path}", response.status_code, status, float(after) if after.isdigit() else None)


def _status_error(what: str, code: int, status: Json, retry_after: float | None = None) -> PoiseError:
    """Turn a Status of Kubernetes into an error: one that may pass is `ApiUnavailableError`."""
    reason = str(status.get("reason") or httpx.codes.get_reason_phrase(code).replace(" ", "") or "Unknown")
    message = " ".join(str(status.get("message") or "the server says no more").split())
    details = status.get("details")
    details = details if isinstance(details, dict) else {}
    if retry_after is None and isinstance(details.get("retryAfterSeconds"), int):
        retry_after = float(details["retryAfterSeconds"])
    if code == 410:
        return ExpiredError(code, reason, f"{what}: {message}", retry_after)
    # An eviction that a disruption budget forbids has the status of an overloaded server, but it is an answer.
    by_budget = any(cause.get("reason") == "DisruptionBudget" for cause in details.get("causes") or ())
    if code >= 500 or (code == 429 and not by_budget):
        return ApiUnavailableError(f"{what}: {code} {reason}: {message}", status=code, retry_after=retry_after)
    return ApiError(code, reason, f"{what}: {message}", retry_after)


async def _lines(response: httpx.Response) -> AsyncGenerator[bytes, None]:
    """Split a stream at newlines alone: httpx would also split at characters that stand in texts."""
    rest: list[bytes] = []
    async for piece in response.aiter_bytes():
        *ends, last = piece.split(b"\n")
        for end in ends:
            line = b"".join((*rest, end))
            rest.clear()
            if line.strip():
                yield line
        if last:
            rest.append(last)


def _event(line: bytes, path: str) -> tuple[str, Json]:
    try:
        event = json.loads(line)
        kind, thing = str(event["type"]), dict(event["object"])
        if kind != "ERROR":
            thing["metadata"]["resourceVersion"]  # from which a watch that is cut goes on
    except (ValueError, KeyError, TypeError) as error:
        raise ApiUnavailableError(f"watch {path}: a line of the answer is no event") from error
    if kind == "ERROR":
        code = thing.get("code")
        raise _status_error(f"watch {path}", code if isinstance(code, int) else 500, thing)
    return kind, thing
