"""One endpoint of the API as data: what it takes, what it answers, and the least role that may call it.

On the way from a route to the engine there are two steps: the check of role and query here, and the handler in `app.py`.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from inspect import signature
from typing import Annotated, Any, TypeVar, get_origin, get_type_hints

from fastapi import Depends, FastAPI, Path, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from starlette.concurrency import run_in_threadpool

from poise.service.server.accounts import is_at_least
from poise.service.server.engine_api import RefusalCode, RequestRefusedError
from poise.service.server.http.problems import JSON, WrongTypeError, body_problem, encoded, sentence
from poise.service.wire.request import NAME, Wire
from poise.service.wire.views import Account, ProblemView, Role

LARGE = 64 << 10
"""Bytes from which on a body is parsed in a thread, so that the event loop can answer others meanwhile."""
ANY_ENDPOINT = (400, 401, 403, 408, 413, 414, 429, 431, 500, 503)
"""Statuses that any endpoint may answer, mostly by the guard."""

W = TypeVar("W", bound=Wire)
Handler = Callable[[Request], Coroutine[Any, Any, Response]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A method and path with its handler.

    role       the least that may call it
    takes      the model of the body, if there is one
    problems   statuses beside those that any endpoint may answer
    """

    method: str
    path: str
    role: Role
    handler: Callable[..., Any]
    answers: type[Wire]
    takes: type[Wire] | None = None
    status: HTTPStatus = HTTPStatus.OK
    problems: tuple[int, ...] = ()

    def add_to(self, app: FastAPI) -> None:
        """Make the application answer here. The role is checked before anything else of the request."""
        handler = self.handler
        check = checked(self.role, get_type_hints(handler).get("query"))
        # A handler that takes the request and nothing else is called directly, which saves FastAPI's injection.
        is_direct = list(signature(handler).parameters) == ["request"]

        class CheckedRoute(APIRoute):
            def get_route_handler(self) -> Handler:
                inner: Handler = handler if is_direct else super().get_route_handler()

                async def handle(request: Request) -> Response:
                    await check(request)
                    return await inner(request)

                return handle

        statuses = (
            *ANY_ENDPOINT,
            *((415,) if self.takes else ()),
            *((507,) if self.method != "GET" else ()),
            *self.problems,
        )
        extra: dict[str, Any] = {}
        if self.takes is not None:
            schema = {"$ref": f"#/components/schemas/{self.takes.__name__}"}
            extra = {"requestBody": {"required": True, "content": {JSON: {"schema": schema}}}}
        app.router.add_api_route(
            self.path,
            handler,
            methods=[self.method],
            operation_id=handler.__name__,
            description=f"{handler.__doc__}\n\nNeeds the role {self.role.value} at least.",
            summary=(handler.__doc__ or "").partition(".")[0],
            status_code=self.status,
            response_model=self.answers,
            response_description="Done",
            responses=problem_responses(*statuses),
            route_class_override=CheckedRoute,
            openapi_extra=extra,
        )


def problem_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Answers that are not 2xx, for the OpenAPI description."""
    return {status: {"model": ProblemView, "description": HTTPStatus(status).phrase} for status in sorted(statuses)}


def checked(role: Role, query: type[BaseModel] | None = None) -> Callable[[Request], Awaitable[None]]:
    """A check that the caller has at least this role and that the query has only keys of this model, each once.

    FastAPI would ignore unknown keys, and take the last of several values.
    """
    known: Mapping[str, FieldInfo] = {} if query is None else query.model_fields

    async def check(request: Request) -> None:
        account = caller_of(request)
        if not is_at_least(account, role):
            raise RequestRefusedError(
                RefusalCode.FORBIDDEN, f"needs the role {role.value}; token {account.name!r} is a {account.role.value}'s"
            )
        if not request.scope["query_string"]:
            return
        for name, times in Counter(name for name, _ in request.query_params.multi_items()).items():
            if name not in known:
                text = sentence({"type": "extra_forbidden", "msg": ""}, (name,), known)
                raise RequestRefusedError(RefusalCode.WRONG, f"query: {text}")
            if times > 1 and get_origin(known[name].annotation) is not tuple:
                raise RequestRefusedError(RefusalCode.WRONG, f"query: {name}: expected once, got it {times} times")

    return check


def caller_of(request: Request) -> Account:
    """The account whose token the request brought; the guard has checked it."""
    account: Account = request.state.account
    return account


async def _caller(request: Request) -> Account:  # a coroutine: FastAPI would call a function in a thread
    return caller_of(request)


Caller = Annotated[Account, Depends(_caller)]
NamePart = Annotated[str, Path(pattern=f"^{NAME}$", max_length=64)]
"""A name in a path. It is looked up, and never made part of a file's path."""


def answer(model: BaseModel, status: int = HTTPStatus.OK) -> Response:
    """A model as JSON, not validated again."""
    return Response(encoded(model), status, media_type=JSON)


async def body_of(request: Request, model: type[W]) -> W:
    """The body of a request, which must be JSON and exactly what the model says: no text for a number."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != JSON:
        raise WrongTypeError(f"expected a body of type {JSON}, got {kind[:60] or 'none'}")
    raw = await request.body()

    def parse() -> W:
        try:
            return model.model_validate_json(raw, strict=True)
        except ValidationError as error:
            raise body_problem(error, model) from None

    return await run_in_threadpool(parse) if len(raw) > LARGE else parse()
