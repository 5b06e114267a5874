"""How an error looks to a client: an HTTP status, a stable code and one line of text; never a traceback.

`HANDLERS` says which exception becomes which problem. The rest of the file words the mistakes that pydantic finds.
"""

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
from pydantic_core import PydanticSerializationError
from starlette.exceptions import HTTPException

from poise.scheduler.model.errors import RequestError
from poise.service.server.service_api import RefusalCode, RequestRefusedError
from poise.service.wire.views import ProblemView

JSON = "application/json"
RETRY_SECONDS = 1
LONGEST_DETAIL = 1_000
MOST_MISTAKES = 2_000
"""Mistakes in one body that are described, to tell the first. Describing more would hold up the event loop."""

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
_TEMPORARY = {HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.INSUFFICIENT_STORAGE}

_SHORT = reprlib.Repr()
_SHORT.maxlevel = 2
_SHORT.maxstring = _SHORT.maxother = 60


class WrongTypeError(Exception):
    """A body that is not declared to be JSON."""


def reply(status: int, code: str, detail: str, headers: Mapping[str, str] | None = None) -> Response:
    """A problem as a response. One that may pass by itself says when to try again, unless `headers` do."""
    later = {"retry-after": str(RETRY_SECONDS)} if status in _TEMPORARY else {}
    line = " ".join(detail.split())[:LONGEST_DETAIL]
    body = encoded(ProblemView(code=code, detail=line))
    return Response(body, status, {**later, **(headers or {})}, JSON)


def encoded(model: BaseModel) -> bytes:
    """A model as JSON in UTF-8. A character without UTF-8 (half of a surrogate pair) becomes `?`.

    Clients and jobs can bring such characters into names and messages; one must not hide all the rest.
    """
    try:
        return model.model_dump_json().encode()
    except PydanticSerializationError:
        document = model.model_dump(mode="json")
        return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def _refused(_: Request, error: RequestRefusedError) -> Response:
    later = {} if error.retry is None else {"retry-after": str(error.retry)}
    return reply(STATUS[error.fault], error.fault.value, str(error), later)


def _no_route(request: Request, error: HTTPException) -> Response:
    """No such path; or no such method there, and then the answer lists those that there are."""
    path = _SHORT.repr(request.scope["path"])
    if error.status_code != HTTPStatus.METHOD_NOT_ALLOWED:
        return reply(error.status_code, RefusalCode.UNKNOWN.value, f"there is nothing at {path}")
    template = getattr(request.scope.get("route"), "path", None)
    routes = (each for each in request.app.routes if getattr(each, "path", None) == template)
    methods = ", ".join(sorted({method for each in routes for method in each.methods}))
    text = f"{request.method} is not for {path}; known: {methods}"
    return reply(error.status_code, "no-such-method", text, {"allow": methods})


def _invalid_parameter(_: Request, error: RequestValidationError) -> Response:
    """A part of a path or query does not validate. Unknown keys of a query were refused before."""
    first = error.errors()[0]
    where, *place = first["loc"]
    return reply(HTTPStatus.BAD_REQUEST, RefusalCode.WRONG.value, f"{where}: {sentence(first, tuple(place), ())}")


HANDLERS: tuple[tuple[type[Exception], Any], ...] = (
    (RequestRefusedError, _refused),
    (RequestError, lambda _, error: reply(HTTPStatus.BAD_REQUEST, RefusalCode.WRONG.value, str(error))),
    (HTTPException, _no_route),
    (RequestValidationError, _invalid_parameter),
    (WrongTypeError, lambda _, error: reply(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "wrong-type", str(error))),
)
"""Any other exception is a bug, which the guard answers with a 500."""


def body_problem(error: ValidationError, model: type[BaseModel]) -> RequestRefusedError:
    """What is wrong with a body, in one line: the first mistake, and how many more there are."""
    if error.error_count() > MOST_MISTAKES:
        text = f"{error.error_count():,} mistakes, too many to name one; known keys: {', '.join(model.model_fields)}"
        return RequestRefusedError(RefusalCode.WRONG, text)
    # A list whose only item is wrong is also reported as too short.
    errors = [each for each in error.errors(include_url=False) if each["type"] != "too_short" or not each["input"]]
    first = next((each for each in errors if each["type"] == "extra_forbidden"), errors[0])
    models: list[object] = [model]
    for step in first["loc"][:-1]:
        if isinstance(step, str):
            models = [each.model_fields[step].annotation for each in _models(models) if step in each.model_fields]
    known = [name for each in _models(models) for name in each.model_fields]
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return RequestRefusedError(RefusalCode.WRONG, sentence(first, first["loc"], known) + more)


def sentence(error: Mapping[str, Any], place: tuple[int | str, ...], known: Iterable[str]) -> str:
    """One validation error as text: the field, what is wrong, the value; for an unknown key the nearest known one."""
    where = _path_text(place)
    message = error["msg"].removeprefix("Value error, ").replace("Input should be", "expected", 1)
    match error["type"]:
        case "extra_forbidden":
            key, outer, names = str(place[-1]), _path_text(place[:-1]), sorted(known)
            near = get_close_matches(key[:100], names, n=1, cutoff=0.5)
            listed = f"; known: {', '.join(names)}" if names else ""
            hint = f"; did you mean {near[0]!r}?" if near else listed
            return f"unknown key {_SHORT.repr(key)}{f' in {outer}' if outer else ''}{hint}"
        case "missing":
            return f"{where}: missing"
        case "value_error":
            return f"{where}: {message}" if where else message
        case "json_invalid":
            return f"not JSON: {message.removeprefix('Invalid JSON: ')}"
        case _:
            return f"{where or 'body'}: {message[0].lower()}{message[1:]}, got {_SHORT.repr(error.get('input'))}"


def _path_text(place: tuple[int | str, ...]) -> str:
    """`jobs[0].checkpoint.every`."""
    parts = (f"[{each}]" if isinstance(each, int) else f".{each}" for each in place)
    return "".join(parts).removeprefix(".")[:200]


def _models(annotations: Iterable[object]) -> list[type[BaseModel]]:
    """The models in some annotations: for `tuple[Request, ...] | None` that is Request."""
    found: list[type[BaseModel]] = []
    for annotation in annotations:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            found.append(annotation)
        else:
            found += _models(getattr(annotation, "__args__", ()))
    return found
