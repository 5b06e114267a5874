"""What a program gives to be submitted, as requests: checked, and with what only the one who submits it knows."""

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from poise.client.venv import ACTIVE, active
from poise.model.errors import RequestError
from poise.wire.jobfile_complaints import complaint
from poise.wire.jobfile_draft import Variant, sweep_of
from poise.wire.jobfile_values import here, parse_folder
from poise.wire.request import Request, Wire

Sent = TypeVar("Sent", bound=Wire)


def placed(request: Request) -> Request:
    """The request with what only the one who submits it knows.

    That is the folder, programs that are named relative to it, and the virtual environment; a request that says whether it
    has one (None: it has none) has just that.
    """
    cwd = request.cwd or str(here())
    is_said = "venv" in request.model_fields_set or any(name in request.env for name in ACTIVE)
    changed = {
        "cwd": cwd,
        "venv": request.venv if is_said else active(os.environ),
        "command": _found(request.command, cwd),
        "setup": _found(request.setup, cwd),
    }
    return made(Request, **request.model_dump(exclude_unset=True) | changed)


def _found(command: tuple[str, ...], cwd: str) -> tuple[str, ...]:
    """`./train.sh` is a file of the folder; `python` is looked up where the job runs."""
    if not command or "/" not in command[0]:
        return command
    return (str(Path(cwd, command[0])), *command[1:])


def request_of(request: Request | None, fields: Mapping[str, Any]) -> Request:
    """The request that was given, as one or by its fields."""
    if request is None:
        return made(Request, **_rooted(fields))
    if not isinstance(request, Request):
        raise no_request(request)
    if fields:
        raise RequestError("give a Request, or the fields of one")
    return request


def no_request(got: object) -> RequestError:
    """Programs have no types to go by."""
    hint = "; read_job_file(Path(...)) of poise.wire.jobfile reads a job file" if isinstance(got, str | Path) else ""
    return RequestError(f"expected a Request, got {type(got).__name__}{hint}")


def variants_of(params: Iterable[Mapping[str, object]] | Mapping[str, Iterable[object] | object]) -> tuple[Variant, ...]:
    """An environment for each job of an app: those that are given, or every combination of values."""
    try:
        found = (
            sweep_of({name: _values(values) for name, values in params.items()})
            if isinstance(params, Mapping)
            else tuple({name: str(value) for name, value in each.items()} for each in _environments(params))
        )
    except ValueError as error:
        raise RequestError(f"params: {error}") from None
    if not found:
        raise RequestError("params: expected at least one environment")
    return found


def _values(given: object) -> tuple[str, ...]:
    """The values of one variable."""
    if isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping):
        return tuple(map(str, given))
    return (str(given),)


def _environments(params: object) -> Iterator[Mapping[str, object]]:
    """One for each job. Programs have no types to go by."""
    for each in params if isinstance(params, Iterable) and not isinstance(params, str | bytes) else [params]:
        if not isinstance(each, Mapping):
            expected = "environments, [{'LR': 0.1}], or values, {'LR': [0.1, 0.01]}"
            raise RequestError(f"params: expected {expected}, got {type(each).__name__}")
        yield each


def _rooted(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with absolute folders, as far as there are any."""
    found = dict(fields)
    for name in ("cwd", "venv"):
        if isinstance(fields.get(name), str | Path):
            try:
                found[name] = parse_folder(str(fields[name]), Path())
            except ValueError as error:
                raise RequestError(f"{name}: {error}") from None
    return found


def made(kind: type[Sent], **fields: Any) -> Sent:  # noqa: ANN401 - whatever its owner gave
    """Something to be sent; RequestError says what is wrong with it."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        name, problem = complaint(error)
        raise RequestError(f"{name}: {problem}" if name else problem) from None
