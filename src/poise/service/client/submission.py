"""What a program gives to be submitted, as checked requests, completed with what only its submitter knows.

That is the current folder, and the virtual environment that the job is submitted from: the job runs in it, not in the Python
of the service. The environment is, in this order,

- the one that is active in the shell (VIRTUAL_ENV, CONDA_PREFIX; of two, the one whose programs come first in PATH);
- the one that the first `python` in PATH belongs to;
- the one of this very program, if it is called by its path without activating it (`.venv/bin/poise`). A Poise that is called
  through a link into an environment of its own (pipx, uv, an administrator's /usr/local/bin/poise) says nothing about the
  Python that its user means.
"""

import os
import sys
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from poise.scheduler.model.errors import RequestError
from poise.service.backends.local.venvs import has_python, holds_python, programs
from poise.service.client.scripts import joins_process_group
from poise.service.wire.draft import Variant, current_folder, parse_folder, sweep_of
from poise.service.wire.moments import moment_from_now
from poise.service.wire.request import JobRequest, Wire, first_problem

ACTIVE = ("VIRTUAL_ENV", "CONDA_PREFIX")  # what `activate` of venv and of conda set
_MARKS = ("pyvenv.cfg", "conda-meta")

Sent = TypeVar("Sent", bound=Wire)


def validated(kind: type[Sent], **fields: Any) -> Sent:  # noqa: ANN401 - whatever the caller gave
    """A value to be sent; RequestError says what is wrong with it."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        name, problem = first_problem(error)
        raise RequestError(f"{name}: {problem}" if name else problem) from None


def request_of(request: JobRequest | None, fields: Mapping[str, Any]) -> JobRequest:
    """The request, given as one or by its fields; relative folders of the fields become absolute."""
    if request is not None:
        check_request(request)
        if fields:
            raise RequestError("give a Request, or the fields of one")
        return request
    found = dict(fields)
    if "after" in found:
        found["after"] = _terms(found["after"])
    for name in ("begin", "deadline"):
        if isinstance(found.get(name), str | datetime):
            found[name] = _timestamp(name, found[name])
    for name in ("cwd", "venv"):
        if isinstance(fields.get(name), str | Path):
            try:
                found[name] = parse_folder(str(fields[name]))
            except ValueError as error:
                raise RequestError(f"{name}: {error}") from None
    return validated(JobRequest, **found)


def _terms(given: object) -> tuple[str, ...]:
    """Terms of `after` from one or several of them; a handle of a job, or its id as a number, stands for its end."""
    several = given if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
    return tuple(str(getattr(each, "id", each)) for each in several)


def _timestamp(name: str, given: str | datetime) -> float:
    """The timestamp of a moment, given as people write it or as a datetime; one without a zone is local time."""
    try:
        return moment_from_now(given) if isinstance(given, str) else given.timestamp()
    except (ValueError, OverflowError, OSError) as error:
        raise RequestError(f"{name}: {error}") from None


def with_ids(request: JobRequest, ids: Mapping[str, str]) -> JobRequest:
    """The request, with ids in the place of the jobs that each of its terms names."""
    if not request.after:
        return request
    return validated(
        JobRequest, **request.model_dump(exclude_unset=True) | {"after": tuple(map(ids.__getitem__, request.after))}
    )


def check_request(given: object) -> None:
    """Raise RequestError for what is no request: not every program is type-checked."""
    if not isinstance(given, JobRequest):
        is_file = isinstance(given, str | Path)
        hint = "; read_job_file(Path(...)) of poise.service.wire.jobfile reads a job file" if is_file else ""
        raise RequestError(f"expected a Request, got {type(given).__name__}{hint}")


def completed_request(request: JobRequest) -> JobRequest:
    """The request with its folder, programs that are relative to it (`./train.sh`), and the virtual environment.

    A request that says whether it has an environment (None: it has none) keeps that. A program without a folder, such as
    `python`, is looked up where the job runs.
    """
    if request.image is not None:  # folders and environments are those of the image, not of this machine
        return request
    if request.files is not None:  # it runs there, wherever that is
        return _in_environment(request, {})
    cwd = request.cwd or str(current_folder())
    changed: dict[str, Any] = {"cwd": cwd}
    for name in ("command", "setup"):
        words = getattr(request, name)
        changed[name] = (str(Path(cwd, words[0])), *words[1:]) if words and "/" in words[0] else words
    if joins_process_group(request.command, cwd):
        changed["process_group"] = True
    return _in_environment(request, changed)


def _in_environment(request: JobRequest, changed: Mapping[str, Any]) -> JobRequest:
    is_given = "venv" in request.model_fields_set or any(name in request.env for name in ACTIVE)
    venv = request.venv if is_given else active_environment(os.environ)
    return validated(JobRequest, **request.model_dump(exclude_unset=True) | {"venv": venv, **changed})


def with_files(request: JobRequest, folder: Path, sha256: str) -> JobRequest:
    """The request, to be run in the files of a folder that were shipped. Paths into the folder become relative to it."""
    inside = f"{folder}/"
    changed: dict[str, Any] = {"cwd": None, "files": sha256}
    if joins_process_group(request.command, str(folder)):
        changed["process_group"] = True
    for name in ("command", "setup"):
        changed[name] = tuple(
            f"./{word.removeprefix(inside)}" if word.startswith(inside) else word for word in getattr(request, name)
        )
    return validated(JobRequest, **request.model_dump(exclude_unset=True) | changed)


def variants_of(params: Iterable[Mapping[str, object]] | Mapping[str, Iterable[object] | object]) -> tuple[Variant, ...]:
    """One environment for each job of an app: those that are given, or every combination of values."""
    try:
        if isinstance(params, Mapping):
            return sweep_of({name: _values(values) for name, values in params.items()})
    except ValueError as error:
        raise RequestError(f"params: {error}") from None
    found: list[Variant] = []
    for each in params if isinstance(params, Iterable) and not isinstance(params, str | bytes) else [params]:
        if not isinstance(each, Mapping):
            expected = "environments, [{'LR': 0.1}], or values, {'LR': [0.1, 0.01]}"
            raise RequestError(f"params: expected {expected}, got {type(each).__name__}")
        found.append({name: str(value) for name, value in each.items()})
    if not found:
        raise RequestError("params: expected at least one environment")
    return tuple(found)


def _values(given: object) -> tuple[str, ...]:
    """The values of one variable."""
    if isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping):
        return tuple(map(str, given))
    return (str(given),)


def active_environment(environ: Mapping[str, str], program: str | None = None) -> str | None:
    """The folder of the virtual environment; None: there is none.

    program   the path by which this program was called; None: sys.argv
    """
    folders = [os.path.abspath(each) for each in environ.get("PATH", "").split(os.pathsep) if each]

    def place(venv: str) -> int:
        """Where its programs come in PATH; last if they are not there."""
        own = programs(os.path.abspath(venv))
        return folders.index(own) if own in folders else len(folders)

    named = [environ[name] for name in ACTIVE if is_environment(environ.get(name, ""))]
    if named:
        return os.path.abspath(min(named, key=place))
    first = next((each for each in folders if holds_python(each)), None)  # of the `python` that the shell would run
    if first is not None and is_environment(os.path.dirname(first)):
        return os.path.dirname(first)
    if sys.prefix == sys.base_prefix or not is_environment(sys.prefix):
        return None
    called = os.path.abspath(sys.argv[0] if program is None else program)
    is_linked = os.path.basename(called) == "poise" and os.path.dirname(called) != programs(sys.prefix)
    return None if is_linked else os.path.abspath(sys.prefix)


def is_environment(folder: str) -> bool:
    """Whether a folder is an environment of venv or conda, with a Python."""
    return bool(folder) and has_python(folder) and any(os.path.exists(os.path.join(folder, mark)) for mark in _MARKS)
