"""The HTTP side of the remote back end: what agents may ask for, each by one method (docs/reference/agent-protocol.md).

An authority says for which node the token of a request speaks. One that speaks for a single node opens sessions of that node
and uses no other's; checkpoints, logs and files are its business only where it has a part of their job.
"""

import asyncio
import hashlib
import os
from collections.abc import Awaitable, Callable
from secrets import compare_digest
from typing import NamedTuple

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from poise.service.backends.local.shipped_files import archive_path
from poise.service.backends.local.state_dir import StateDir
from poise.service.backends.remote.authority import ANY_NODE, AgentAuthority, AuthorityAwayError
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
    "starting": 503, "unverified": 503, "forbidden": 403,
    "storage": 507, "session-over": 410, "wrong-request": 400, "unauthorized": 401, "not-found": 404,
    "too-large": 413,
}  # fmt: skip
"""Status by code of a refusal; 409 for all others."""
UNVERIFIED = "whose token it is cannot be found out at the moment; try again"


class Speaker(NamedTuple):
    """Who has sent a request: for which node its token speaks, or ANY_NODE, and the hash of that token.

    node   None: the authority is away, and cannot say
    """

    node: str | None
    bearer: bytes


Handler = Callable[[Request, Speaker], Awaitable[Response]]
Endpoint = Callable[[Request], Awaitable[Response]]


class AgentApi:
    """Answers agents. All of it runs in the loop of the thread that owns `runs`."""

    def __init__(self, runs: RemoteRuns, state: StateDir, authority: AgentAuthority, relay: RelayedCheckpoints) -> None:
        self._runs, self._authority, self._relay = runs, authority, relay
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

    def _guarded(self, handler: Handler) -> Endpoint:
        """Check the token, and answer what is refused with its code."""

        async def answer(request: Request) -> Response:
            try:
                return await handler(request, await self._speaker(request))
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

    async def _speaker(self, request: Request) -> Speaker:
        """Find out for whom a request speaks; RefusedAgentError if its token is good for nothing."""
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        bearer = hashlib.sha256(given.encode(errors="replace")).digest()
        try:
            node = await self._authority.node_of(given)
        except AuthorityAwayError:
            return Speaker(None, bearer)
        if node is None:
            raise RefusedAgentError("unauthorized", "the agents' token is wrong")
        return Speaker(node, bearer)

    def _link(self, session: str, speaker: Speaker) -> AgentLink:
        """Return the link with this session; RefusedAgentError if it is over, or another node's.

        While the authority is away a session goes on with the token that it had: runs must not end because of that.
        """
        link = self._runs.link_of(session)
        if speaker.node is None:
            if not compare_digest(link.bearer, speaker.bearer):
                raise RefusedAgentError("unverified", UNVERIFIED)
        elif speaker.node not in (ANY_NODE, link.name):
            raise RefusedAgentError("unauthorized", "the token is that of another node")
        else:
            link.bearer = speaker.bearer
        return link

    def _check_job(self, link: AgentLink, job: str) -> None:
        """Refuse a node with a token of its own what belongs to other jobs: what runs there is a user's."""
        if link.is_bound and not self._runs.has_part(link, job):
            raise RefusedAgentError("forbidden", f"node {link.name} has no part of job {job[:100]}")

    async def _hello(self, request: Request, speaker: Speaker) -> Response:
        hello = Hello.model_validate_json(await _body(request))
        if speaker.node is None:
            raise RefusedAgentError("unverified", UNVERIFIED)
        if speaker.node not in (ANY_NODE, hello.node.name):
            raise RefusedAgentError("unauthorized", f"the token does not speak for node {hello.node.name}")
        answer = self._runs.hello(hello, is_bound=speaker.node != ANY_NODE)
        try:
            await self._runs.save()
        except OSError as error:
            raise RefusedAgentError("storage", f"the server cannot remember the node: {error}") from None
        self._runs.answered(self._link(answer.session, speaker))
        return _json(answer)

    async def _orders(self, request: Request, speaker: Speaker) -> Response:
        asked = OrdersRequest.model_validate_json(await _body(request))
        link = self._link(asked.session, speaker)
        found = await link.orders(asked.session, asked.done, POLL_PART * self._runs.lease)
        if found is None:
            raise RefusedAgentError("session-over", "this session is over; say hello again")
        self._runs.answered(link)
        return _json(OrdersAnswer(first=found[0], orders=tuple(found[1]), every=self._runs.report_every))

    async def _news(self, request: Request, speaker: Speaker) -> Response:
        told = NewsRequest.model_validate_json(await _body(request))
        link = self._link(told.session, speaker)
        self._runs.hear(link, told.now, link.unseen(told.first, told.news))
        self._runs.answered(link)
        return _json(NewsAnswer(seen=link.seen))

    async def _logs(self, request: Request, speaker: Speaker) -> Response:
        head, _, text = (await _body(request)).partition(b"\n")
        told = LogsRequest.model_validate_json(head)
        link = self._link(told.session, speaker)
        for job in {piece.job for piece in told.pieces}:
            self._check_job(link, job)
        if sum(piece.length for piece in told.pieces) != len(text):
            raise RefusedAgentError("wrong-request", "pieces: not as long as what follows them")
        assert link.identity is not None
        received = await self._shipped.append(link.identity, told.pieces, text)
        self._runs.answered(self._runs.link_of(told.session))
        return _json(LogsAnswer(received=received))

    # Checkpoints. Bodies are as long as they are: they go to the disk and come from it in blocks.

    async def _list_checkpoints(self, request: Request, speaker: Speaker) -> Response:
        self._caller(request, speaker)
        answer = await asyncio.to_thread(self._relay.names, request.path_params["job"])
        self._runs.answered(self._caller(request, speaker))
        return _json(answer)

    async def _put_checkpoint(self, request: Request, speaker: Speaker) -> Response:
        self._caller(request, speaker)
        answer = await self._relay.write(*_blob(request), request.stream())
        self._runs.answered(self._caller(request, speaker))  # a session that has ended meanwhile is told so
        return _json(answer)

    async def _get_checkpoint(self, request: Request, speaker: Speaker) -> Response:
        link = self._caller(request, speaker)
        handle = await asyncio.to_thread(self._relay.open, *_blob(request))
        self._runs.answered(link)
        length = {"Content-Length": str(os.fstat(handle).st_size)}
        return StreamingResponse(blocks_of(handle), media_type="application/octet-stream", headers=length)

    async def _remove_checkpoint(self, request: Request, speaker: Speaker) -> Response:
        self._caller(request, speaker)
        await asyncio.to_thread(self._relay.remove, *_blob(request))
        self._runs.answered(self._caller(request, speaker))
        return Response(status_code=204)

    async def _get_files(self, request: Request, speaker: Speaker) -> Response:
        """Send the archive of a working directory that was shipped with jobs."""
        link = self._link(request.query_params.get("session", ""), speaker)
        asked = ArchiveName.model_validate({**request.path_params, "tenant": request.query_params.get("tenant")})
        if link.is_bound and not self._runs.needs_files(link, asked.tenant, asked.sha256):
            raise RefusedAgentError("forbidden", f"node {link.name} has no part of a job with these files")
        try:
            handle = os.open(archive_path(self._folder, asked.tenant, asked.sha256), os.O_RDONLY | os.O_NOFOLLOW)
        except OSError as error:
            raise RefusedAgentError("not-found", f"the files of the job are not on the server: {error.strerror}") from None
        self._runs.answered(link)
        length = {"Content-Length": str(os.fstat(handle).st_size)}
        return StreamingResponse(blocks_of(handle), media_type="application/octet-stream", headers=length)

    def _caller(self, request: Request, speaker: Speaker) -> AgentLink:
        """Return the link of who asks for a checkpoint, and may."""
        link = self._link(request.query_params.get("session", ""), speaker)
        self._check_job(link, request.path_params["job"])
        return link


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
