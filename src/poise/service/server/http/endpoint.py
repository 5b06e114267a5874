"""One endpoint of the API as data: what it takes, what it answers, and which role it needs at least."""

from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from http import HTTPStatus
from inspect import signature
from typing import Annotated, Any, TypeVar, get_origin

from fastapi import Depends, FastAPI, Path, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.concurrency import run_in_threadpool

from poise.service.server.accounts import is_at_least
from poise.service.server.engine_api import EngineApi, RefusalCode, RequestRefusedError
from poise.service.server.http.problems import JSON, asked, encoded, misfit, sentence
from poise.service.wire.request import NAME, Wire
from poise.service.wire.views import Account, ProblemView, Role

LARGE = 64 << 10
"""Bytes of a body from which on it is read beside the loop rather than in it."""

_ALWAYS = (400, 401, 403, 408, 413, 414, 429, 431, 500, 503)
"""What any endpoint may answer: mostly the guard."""

W = TypeVar("W", bound=Wire)
Handler = Callable[[Request], Coroutine[Any, Any, Response]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """faults   statuses beside those that any endpoint may answer."""

    method: str
    path: str
    least: Role
    handler: Callable[..., Any]
    answers: type[Wire]
    takes: type[Wire] | None = None
    status: HTTPStatus = HTTPStatus.OK
    faults: tuple[int, ...] = ()

    def add_to(self, app: FastAPI) -> None:
        """Make the application answer here. The role is looked at before anything else of the request is."""
        app.router.add_api_route(
            self.path,
            self.handler,
            methods=[self.method],
            operation_id=self.handler.__name__,
            description=f"{self.handler.__doc__}\n\nNeeds the role {self.least.value} at least.",
            summary=(self.handler.__doc__ or "").partition(".")[0],
            status_code=self.status,
            response_model=self.answers,
            response_description="Done",
            responses=problems(*self._statuses()),
            route_class_override=self._route(),
            openapi_extra=self._body(),
        )

    def _route(self) -> type[APIRoute]:
        """A handler that takes the request and nothing else is called straight away; FastAPI finds out what others take."""
        check, handler = at_least(self.least), self.handler
        is_direct = list(signature(handler).parameters) == ["request"]

        class Checked(APIRoute):
            def get_route_handler(self) -> Handler:
                inner: Handler = handler if is_direct else super().get_route_handler()

                async def handle(request: Request) -> Response:
                    await check(request)
                    await check_query(request)
                    return await inner(request)

                return handle

        return Checked

    def _statuses(self) -> tuple[int, ...]:
        taking = (415,) if self.takes else ()
        changing = (507,) if self.method != "GET" else ()
        return (*_ALWAYS, *taking, *changing, *self.faults)

    def _body(self) -> dict[str, Any]:
        if self.takes is None:
            return {}
        schema = {"$ref": f"#/components/schemas/{self.takes.__name__}"}
        return {"requestBody": {"required": True, "content": {JSON: {"schema": schema}}}}


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Answers that are not 2xx, as the API's description has them."""
    return {status: {"model": ProblemView, "description": HTTPStatus(status).phrase} for status in sorted(statuses)}


def caller_of(request: Request) -> Account:
    """Whom the request comes from; the guard has looked at the token."""
    account: Account = request.state.account
    return account


async def _caller(request: Request) -> Account:
    return caller_of(request)


Caller = Annotated[Account, Depends(_caller)]
NamePart = Annotated[str, Path(pattern=f"^{NAME}$", max_length=64)]
"""A name in a path. It is looked up, and never made part of a file's path."""


def at_least(role: Role) -> Callable[[Request], Awaitable[None]]:
    """A check that the caller has this role, or one that may do more."""

    async def check(request: Request) -> None:
        account = caller_of(request)
        if not is_at_least(account, role):
            raise RequestRefusedError(
                RefusalCode.FORBIDDEN, f"needs the role {role.value}; token {account.name!r} is a {account.role.value}'s"
            )

    return check


async def check_query(request: Request) -> None:
    """Refuse keys that the endpoint does not know, and those that come twice where one is expected."""
    if not request.scope["query_string"]:
        return
    known = asked(request)
    for name, times in Counter(name for name, _ in request.query_params.multi_items()).items():
        if name not in known:
            text = sentence({"type": "extra_forbidden", "msg": ""}, (name,), known)
            raise RequestRefusedError(RefusalCode.WRONG, f"query: {text}")
        if times > 1 and get_origin(known[name].annotation) is not tuple:
            raise RequestRefusedError(RefusalCode.WRONG, f"query: {name}: expected once, got it {times} times")


def is_owner(engine: EngineApi, account: Account, job: str) -> bool:
    """The job is the caller's tenant's, or the caller is an operator; raises RefusedError for a job that is not there."""
    return engine.owner(job) == account.tenant or is_at_least(account, Role.OPERATOR)


def check_owner(engine: EngineApi, account: Account, job: str) -> None:
    """Refuse others' jobs to those who are no operators."""
    if not is_owner(engine, account, job):
        raise RequestRefusedError(
            RefusalCode.FORBIDDEN, f"job {job} is of tenant {engine.owner(job)}; only its owner and operators may do that"
        )


def answer(model: BaseModel, status: int = HTTPStatus.OK) -> Response:
    """A model as JSON. It was valid when it was made, and is not looked at again."""
    return Response(encoded(model), status, media_type=JSON)


async def body_of(request: Request, model: type[W]) -> W:
    """The body of a request, which must be JSON and just as the model says: no text for a number."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != JSON:
        raise UnfitTypeError(kind)
    raw = await request.body()
    if len(raw) > LARGE:
        return await run_in_threadpool(_parsed, raw, model)
    return _parsed(raw, model)


def _parsed(raw: bytes, model: type[W]) -> W:
    try:
        return model.model_validate_json(raw, strict=True)
    except ValidationError as error:
        raise misfit(error, model) from None


class UnfitTypeError(Exception):
    """A body that is not said to be JSON."""

    def __init__(self, kind: str) -> None:
        super().__init__(f"expected a body of type {JSON}, got {kind[:60] or 'none'}")
