"""The HTTP side of the remote back end: what agents may ask for, each by one method (docs/reference/agent-protocol.md)."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from secrets import compare_digest

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from poise.service.backends.local.shipped_files import archive_path
from poise.service.backends.local.state_dir import StateDir
from poise.service.backends.remote.links import AgentLink
from poise.service.backends.remote.relay import RelayedCheckpoints, blocks_of
from poise.service.backends.remote.runs import POLL_PART, RefusedAgentError, RemoteRuns
from poise.service.backends.remote.shipped_logs import ShippedLogs
from poise.service.wire.agent_messages import (
    AgentRefusal,
    ArchiveName,
    Hello,
    LogsAnswer,
    LogsRequest,
    NewsAnswer,
    NewsRequest,
    OrdersAnswer,
    OrdersRequest,
)
from poise.service.wire.request import Wire, first_problem

MOST_BODY = 16 << 20  # bytes of a message
STATUS = {
    "starting": 503, "storage": 507, "session-over": 410, "wrong-request": 400, "unauthorized": 401, "not-found": 404,
    "too-large": 413,
}  # fmt: skip
"""Status by code of a refusal; 409 for all others."""

Handler = Callable[[Request], Awaitable[Response]]


class AgentApi:
    """Answers agents. All of it runs in the loop of the thread that owns `runs`."""

    def __init__(self, runs: RemoteRuns, state: StateDir, token: str, relay: RelayedCheckpoints) -> None:
        self._runs, self._token, self._relay = runs, token, relay
        self._shipped = ShippedLogs(state)
        self._folder = state.path.parent

    async def close(self) -> None:
        """Write what has arrived of logs, and take no more."""
        await self._shipped.close()

    def app(self) -> ASGIApp:
        """Make the application. Messages, which are many and small, go past the router and its layers: those cost most."""
        posts = {"hello": self._hello, "orders": self._orders, "news": self._news, "logs": self._logs}
        messages = {f"/agent/{name}": self._guarded(each) for name, each in posts.items()}
        others = Starlette(
            routes=[
                *(Route(path, each, methods=["POST"]) for path, each in messages.items()),
                Route("/agent/files/{sha256}", self._guarded(self._get_files), methods=["GET"]),
                Route("/agent/checkpoints/{job}", self._guarded(self._list_checkpoints), methods=["GET"]),
                Route("/agent/checkpoints/{job}/{name}", self._guarded(self._get_checkpoint), methods=["GET"]),
                Route("/agent/checkpoints/{job}/{name}", self._guarded(self._put_checkpoint), methods=["PUT"]),
                Route("/agent/checkpoints/{job}/{name}", self._guarded(self._remove_checkpoint), methods=["DELETE"]),
            ]
        )

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            message = messages.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
            if message is None:
                await others(scope, receive, send)
            else:
                response = await message(Request(scope, receive))
                await response(scope, receive, send)

        return app

    def _guarded(self, handler: Handler) -> Handler:
        """Check the token, and answer what is refused with its code."""

        async def answer(request: Request) -> Response:
            try:
                given = request.headers.get("authorization", "").removeprefix("Bearer ")
                if not compare_digest(given.encode(), self._token.encode()):
                    raise RefusedAgentError("unauthorized", "the agents' token is wrong")  # noqa: TRY301
                return await handler(request)
            except RefusedAgentError as error:
                return _json(AgentRefusal(code=error.code, detail=str(error)), STATUS.get(error.code, 409))
            except ClientDisconnect:  # the agent was killed, or cut off, in the middle of a body: no one reads the answer
                return Response(status_code=400)
            except OSError as error:
                return _json(AgentRefusal(code="storage", detail=f"the server cannot keep it: {error}"), STATUS["storage"])
            except ValidationError as error:
                field, text = first_problem(error)
                detail = text if field is None else f"{field}: {text}"
                return _json(AgentRefusal(code="wrong-request", detail=detail), 400)

        return answer

    async def _hello(self, request: Request) -> Response:
        answer = self._runs.hello(Hello.model_validate_json(await _body(request)))
        try:
            await self._runs.save()
        except OSError as error:
            raise RefusedAgentError("storage", f"the server cannot remember the node: {error}") from None
        self._runs.answered(self._runs.link_of(answer.session))
        return _json(answer)

    async def _orders(self, request: Request) -> Response:
        asked = OrdersRequest.model_validate_json(await _body(request))
        link = self._runs.link_of(asked.session)
        found = await link.orders(asked.session, asked.done, POLL_PART * self._runs.lease)
        if found is None:
            raise RefusedAgentError("session-over", "this session is over; say hello again")
        self._runs.answered(link)
        return _json(OrdersAnswer(first=found[0], orders=tuple(found[1]), every=self._runs.report_every))

    async def _news(self, request: Request) -> Response:
        told = NewsRequest.model_validate_json(await _body(request))
        link = self._runs.link_of(told.session)
        self._runs.hear(link, told.now, link.unseen(told.first, told.news))
        self._runs.answered(link)
        return _json(NewsAnswer(seen=link.seen))

    async def _logs(self, request: Request) -> Response:
        head, _, text = (await _body(request)).partition(b"\n")
        told = LogsRequest.model_validate_json(head)
        link = self._runs.link_of(told.session)
        if sum(piece.length for piece in told.pieces) != len(text):
            raise RefusedAgentError("wrong-request", "pieces: not as long as what follows them")
        assert link.identity is not None
        received = await self._shipped.append(link.identity, told.pieces, text)
        self._runs.answered(self._runs.link_of(told.session))
        return _json(LogsAnswer(received=received))

    # Checkpoints. Bodies are as long as they are: they go to the disk and come from it in blocks.

    async def _list_checkpoints(self, request: Request) -> Response:
        self._caller(request)
        answer = await asyncio.to_thread(self._relay.names, request.path_params["job"])
        self._runs.answered(self._caller(request))
        return _json(answer)

    async def _put_checkpoint(self, request: Request) -> Response:
        self._caller(request)
        answer = await self._relay.write(*_blob(request), request.stream())
        self._runs.answered(self._caller(request))  # a session that has ended meanwhile is told so
        return _json(answer)

    async def _get_checkpoint(self, request: Request) -> Response:
        link = self._caller(request)
        handle = await asyncio.to_thread(self._relay.open, *_blob(request))
        self._runs.answered(link)
        length = {"Content-Length": str(os.fstat(handle).st_size)}
        return StreamingResponse(blocks_of(handle), media_type="application/octet-stream", headers=length)

    async def _remove_checkpoint(self, request: Request) -> Response:
        self._caller(request)
        await asyncio.to_thread(self._relay.remove, *_blob(request))
        self._runs.answered(self._caller(request))
        return Response(status_code=204)

    async def _get_files(self, request: Request) -> Response:
        """Send the archive of a working directory that was shipped with jobs."""
        link = self._caller(request)
        asked = ArchiveName.model_validate({**request.path_params, "tenant": request.query_params.get("tenant")})
        try:
            handle = os.open(archive_path(self._folder, asked.tenant, asked.sha256), os.O_RDONLY | os.O_NOFOLLOW)
        except OSError as error:
            raise RefusedAgentError("not-found", f"the files of the job are not on the server: {error.strerror}") from None
        self._runs.answered(link)
        length = {"Content-Length": str(os.fstat(handle).st_size)}
        return StreamingResponse(blocks_of(handle), media_type="application/octet-stream", headers=length)

    def _caller(self, request: Request) -> AgentLink:
        return self._runs.link_of(request.query_params.get("session", ""))


def _blob(request: Request) -> tuple[str, str]:
    return request.path_params["job"], request.path_params["name"]


async def _body(request: Request) -> bytes:
    """Read a message of bounded size."""
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > MOST_BODY:
            raise RefusedAgentError("wrong-request", f"a message has at most {MOST_BODY:,} bytes")
        parts.append(part)
    return b"".join(parts)


def _json(answer: Wire, status: int = 200) -> Response:
    return Response(answer.model_dump_json(), status, media_type="application/json")
