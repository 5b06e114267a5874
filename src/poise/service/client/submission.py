"""What a program gives to be submitted, as requests: checked, and with what only the one who submits it knows."""

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from poise.scheduler.model.errors import RequestError
from poise.service.backends.local.venvs import has_python, holds_python, programs
from poise.service.wire.draft import Variant, current_folder, parse_folder, sweep_of
from poise.service.wire.request import JobRequest, Wire, first_problem

# The virtual environment that a job is submitted from: the job runs in it, not in the Python of the service.
#
# In this order: the environment that is active in the shell (VIRTUAL_ENV, CONDA_PREFIX; of two, the one whose programs come
# first in PATH); the one that the first `python` in PATH belongs to; the one of this very program, called by its path
# without activating it (`.venv/bin/poise`). A Poise that is called by a link into an environment of its own (pipx, uv, an
# administrator's /usr/local/bin/poise) says nothing of the Python that its user means.

ACTIVE = ("VIRTUAL_ENV", "CONDA_PREFIX")
"""What `activate` of venv and of conda set."""
_MARKS = ("pyvenv.cfg", "conda-meta")


def active(environ: Mapping[str, str], program: str | None = None) -> str | None:
    """The directory of the virtual environment; None: there is none.

    program   as it was called; None: this one
    """
    folders = [each for each in environ.get("PATH", "").split(os.pathsep) if each]
    named = [environ[name] for name in ACTIVE if is_environment(environ.get(name, ""))]
    found = min(named, key=lambda each: _place(each, folders), default=None) or _on_path(folders) or _own(program)
    return None if found is None else os.path.abspath(found)


def is_environment(folder: str) -> bool:
    """It is one of venv's or conda's, with a Python."""
    return bool(folder) and has_python(folder) and any(os.path.exists(os.path.join(folder, mark)) for mark in _MARKS)


def _place(venv: str, folders: list[str]) -> int:
    """Where its programs come in PATH; last if they are not there."""
    own = programs(os.path.abspath(venv))
    return next((place for place, each in enumerate(folders) if os.path.abspath(each) == own), len(folders))


def _on_path(folders: list[str]) -> str | None:
    """The environment of the `python` that the shell would run."""
    first = next((each for each in map(os.path.abspath, folders) if holds_python(each)), None)
    return None if first is None or not is_environment(os.path.dirname(first)) else os.path.dirname(first)


def _own(program: str | None) -> str | None:
    """The environment of this process, unless it is there for Poise alone."""
    if sys.prefix == sys.base_prefix or not is_environment(sys.prefix):
        return None
    called = os.path.abspath(sys.argv[0] if program is None else program)
    is_linked = os.path.basename(called) == "poise" and os.path.dirname(called) != programs(sys.prefix)
    return None if is_linked else sys.prefix


Sent = TypeVar("Sent", bound=Wire)


def placed(request: JobRequest) -> JobRequest:
    """The request with what only the one who submits it knows.

    That is the folder, programs that are named relative to it, and the virtual environment; a request that says whether it
    has one (None: it has none) has just that.
    """
    cwd = request.cwd or str(current_folder())
    is_said = "venv" in request.model_fields_set or any(name in request.env for name in ACTIVE)
    changed = {
        "cwd": cwd,
        "venv": request.venv if is_said else active(os.environ),
        "command": _found(request.command, cwd),
        "setup": _found(request.setup, cwd),
    }
    return made(JobRequest, **request.model_dump(exclude_unset=True) | changed)


def _found(command: tuple[str, ...], cwd: str) -> tuple[str, ...]:
    """`./train.sh` is a file of the folder; `python` is looked up where the job runs."""
    if not command or "/" not in command[0]:
        return command
    return (str(Path(cwd, command[0])), *command[1:])


def request_of(request: JobRequest | None, fields: Mapping[str, Any]) -> JobRequest:
    """The request that was given, as one or by its fields."""
    if request is None:
        return made(JobRequest, **_rooted(fields))
    if not isinstance(request, JobRequest):
        raise no_request(request)
    if fields:
        raise RequestError("give a Request, or the fields of one")
    return request


def no_request(got: object) -> RequestError:
    """Programs have no types to go by."""
    hint = "; read_job_file(Path(...)) of poise.service.wire.jobfile reads a job file" if isinstance(got, str | Path) else ""
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
                found[name] = parse_folder(str(fields[name]))
            except ValueError as error:
                raise RequestError(f"{name}: {error}") from None
    return found


def made(kind: type[Sent], **fields: Any) -> Sent:  # noqa: ANN401 - whatever its owner gave
    """Something to be sent; RequestError says what is wrong with it."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        name, problem = first_problem(error)
        raise RequestError(f"{name}: {problem}" if name else problem) from None
