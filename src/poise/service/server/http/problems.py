"""How an error looks to a client: a status, a stable code, one line; never a traceback."""

import json
import reprlib
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from http import HTTPStatus
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticSerializationError
from starlette.exceptions import HTTPException

from poise.scheduler.model.errors import RequestError
from poise.service.server.engine_api import RefusalCode, RequestRefusedError
from poise.service.wire.views import ProblemView

JSON = "application/json"
RETRY_SECONDS = 1
LONGEST_DETAIL = 1_000
MOST_MISTAKES = 2_000
"""Of a body, of which the first is told."""

STATUS = {
    RefusalCode.WRONG: HTTPStatus.BAD_REQUEST,
    RefusalCode.FORBIDDEN: HTTPStatus.FORBIDDEN,
    RefusalCode.UNKNOWN: HTTPStatus.NOT_FOUND,
    RefusalCode.CONFLICT: HTTPStatus.CONFLICT,
    RefusalCode.FULL: HTTPStatus.TOO_MANY_REQUESTS,
    RefusalCode.QUOTA: HTTPStatus.TOO_MANY_REQUESTS,
    RefusalCode.RATE: HTTPStatus.TOO_MANY_REQUESTS,
    RefusalCode.STORAGE: HTTPStatus.INSUFFICIENT_STORAGE,
    RefusalCode.NOT_READY: HTTPStatus.SERVICE_UNAVAILABLE,
}
_LATER = {HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.INSUFFICIENT_STORAGE}

_SHORT = reprlib.Repr()
_SHORT.maxlevel = 2
_SHORT.maxstring = _SHORT.maxother = 60


def reply(status: int, code: str, detail: str, headers: Mapping[str, str] | None = None) -> Response:
    """A problem as a client gets it; one that may pass says when to try again."""
    later = {"retry-after": str(RETRY_SECONDS)} if status in _LATER else {}
    line = " ".join(detail.split())[:LONGEST_DETAIL]
    body = encoded(ProblemView(code=code, detail=line))
    return Response(body, status, {**later, **(headers or {})}, JSON)


def encoded(model: BaseModel) -> bytes:
    """A model as JSON in UTF-8, whatever is in it: a letter that has no UTF-8 (half of a surrogate pair) becomes `?`.

    Whoever said it, a client or a job, one such letter must not hide all the rest.
    """
    try:
        return model.model_dump_json().encode()
    except PydanticSerializationError:
        document = model.model_dump(mode="json")
        return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def refused(_: Request, error: Exception) -> Response:
    """A wish that the engine, or a rule of the API, did not grant."""
    assert isinstance(error, RequestRefusedError)
    later = {} if error.retry is None else {"retry-after": str(error.retry)}
    return reply(STATUS[error.fault], error.fault.value, str(error), later)


def wrong(_: Request, error: Exception) -> Response:
    """A request that makes no sense to a part below."""
    return reply(HTTPStatus.BAD_REQUEST, RefusalCode.WRONG.value, str(error))


def missing(request: Request, error: Exception) -> Response:
    """No such path, or no such method there; then the answer says which there are."""
    assert isinstance(error, HTTPException)
    path = _SHORT.repr(request.scope["path"])
    if error.status_code != HTTPStatus.METHOD_NOT_ALLOWED:
        return reply(error.status_code, RefusalCode.UNKNOWN.value, f"there is nothing at {path}")
    template = getattr(request.scope.get("route"), "path", None)
    routes = (each for each in request.app.routes if getattr(each, "path", None) == template)
    methods = ", ".join(sorted({method for each in routes for method in each.methods}))
    return reply(
        error.status_code, "no-such-method", f"{request.method} is not for {path}; known: {methods}", {"allow": methods}
    )


def unfit(request: Request, error: Exception) -> Response:
    """A part of a path or of a query that is not as described."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where, *place = first["loc"]
    text = sentence(first, tuple(place), asked(request))
    return reply(HTTPStatus.BAD_REQUEST, RefusalCode.WRONG.value, f"{where}: {text}")


HANDLERS: tuple[tuple[type[Exception], Any], ...] = (
    (RequestRefusedError, refused),
    (RequestError, wrong),
    (HTTPException, missing),
    (RequestValidationError, unfit),
)


def asked(request: Request) -> dict[str, FieldInfo]:
    """Keys that the query of a request may have."""
    route = request.scope.get("route")
    parameters = getattr(getattr(route, "dependant", None), "query_params", ())
    models = _models(each.field_info.annotation for each in parameters)
    return {name: field for each in models for name, field in each.model_fields.items()}


def misfit(error: ValidationError, model: type[BaseModel]) -> RequestRefusedError:
    """What is wrong with a body, in one line: the first thing, and how many more there are."""
    if error.error_count() > MOST_MISTAKES:  # to describe them, which can be done for all or none, would hold up everybody
        text = f"{error.error_count():,} mistakes, too many to name one; known keys: {', '.join(model.model_fields)}"
        return RequestRefusedError(RefusalCode.WRONG, text)
    # A list whose only item is wrong is also said to be too short.
    errors = [each for each in error.errors(include_url=False) if each["type"] != "too_short" or not each["input"]]
    first = next((each for each in errors if each["type"] == "extra_forbidden"), errors[0])
    text = sentence(first, first["loc"], _fields(model, first["loc"][:-1]))
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return RequestRefusedError(RefusalCode.WRONG, text + more)


def sentence(error: Mapping[str, Any], place: tuple[int | str, ...], known: Iterable[str]) -> str:
    """One error of validation: the field, what is wrong, the value; for an unknown key the nearest known one."""
    where = _where(place)
    message = error["msg"].removeprefix("Value error, ").replace("Input should be", "expected", 1)
    match error["type"]:
        case "extra_forbidden":
            return f"unknown key {_SHORT.repr(str(place[-1]))}{_inside(place)}{_hint(str(place[-1]), known)}"
        case "missing":
            return f"{where}: missing"
        case "value_error":
            return f"{where}: {message}" if where else message
        case "json_invalid":
            return f"not JSON: {message.removeprefix('Invalid JSON: ')}"
        case _:
            return f"{where or 'body'}: {message[0].lower()}{message[1:]}, got {_SHORT.repr(error.get('input'))}"


def _where(place: tuple[int | str, ...]) -> str:
    """`jobs[0].checkpoint.every`."""
    parts = (f"[{each}]" if isinstance(each, int) else f".{each}" for each in place)
    return "".join(parts).removeprefix(".")[:200]


def _inside(place: tuple[int | str, ...]) -> str:
    outer = _where(place[:-1])
    return f" in {outer}" if outer else ""


def _hint(key: str, known: Iterable[str]) -> str:
    names = sorted(known)
    near = get_close_matches(key[:100], names, n=1, cutoff=0.5)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; known: {', '.join(names)}" if names else ""


def _fields(kind: object, place: tuple[int | str, ...]) -> tuple[str, ...]:
    """Names of the fields that a model has at a place inside it."""
    models = [kind]
    for step in place:
        if isinstance(step, str):
            models = [each.model_fields[step].annotation for each in _models(models) if step in each.model_fields]
    return tuple(name for each in _models(models) for name in each.model_fields)


def _models(kinds: Iterable[object]) -> list[type[BaseModel]]:
    """The models among some annotations, and inside of them: of `tuple[Request, ...] | None` it is Request."""
    found: list[type[BaseModel]] = []
    for kind in kinds:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found.append(kind)
        else:
            found += _models(getattr(kind, "__args__", ()))
    return found
