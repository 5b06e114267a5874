"""Whether what a job asks for is on this machine: said at submission, so that nothing waits for hours only to fail."""

import os
import shutil
from collections.abc import Mapping

from poise.backends.local.orders import inherited
from poise.backends.local.venvs import has_python, path_inside
from poise.model.errors import RequestError
from poise.wire.request import Request

LONGEST_SHOWN = 200
MOST_BYTES = (128 << 10) - 1
"""Of an argument, or of a variable with its name: the kernel starts nothing that has more (MAX_ARG_STRLEN in execve(2))."""


def checked(request: Request, environ: Mapping[str, str] | None = None, hidden: str | None = None) -> None:
    """The working directory is there, and so are the programs, and they can be started; RequestError says what is not.

    environ   the server's environment; None: this process's
    hidden    directory that jobs do not see; None: they see all
    """
    base = inherited(os.environ if environ is None else environ)
    cwd = request.cwd
    if cwd is not None and not os.path.isdir(cwd):
        what = "is not a directory" if os.path.exists(cwd) else "does not exist"
        raise RequestError(f"cwd: {cwd[:LONGEST_SHOWN]!r} {what}; name a directory of the machine that the service runs on")
    _check_seen("cwd", cwd, hidden)
    _check_venv(request.venv)
    _check_seen("venv", request.venv, hidden)
    path = path_inside(request.venv, request.env.get("PATH", base.get("PATH", os.defpath)))
    for field, command in (("command", request.command), ("setup", request.setup)):
        if command:
            _check_bytes(field, {f"argument {number}": text for number, text in enumerate(command)})
            _check_program(field, command[0], cwd, path)
            _check_seen(field, command[0] if command[0].startswith("/") else None, hidden)
    _check_bytes("env", {name: f"{name}={value}" for name, value in request.env.items()})


def _check_venv(venv: str | None) -> None:
    if venv is not None and not has_python(venv):
        text = "is no virtual environment of the machine that the service runs on: it has no bin/python"
        raise RequestError(f"venv: {venv[:LONGEST_SHOWN]!r} {text}; name one that is, or submit with --no-venv")


def _check_seen(field: str, path: str | None, hidden: str | None) -> None:
    """It does not lie in what jobs do not see."""
    if path is None or hidden is None:
        return
    if os.path.commonpath((os.path.realpath(path), os.path.realpath(hidden))) == os.path.realpath(hidden):
        shown = path[:LONGEST_SHOWN]
        raise RequestError(
            f"{field}: {shown!r} lies in the state directory of the service, which jobs do not see; move it out of {hidden}"
        )


def _check_program(field: str, program: str, cwd: str | None, path: str) -> None:
    shown = program[:LONGEST_SHOWN]
    if "/" not in program:
        if shutil.which(program, path=path) is None:
            raise RequestError(f"{field}: no program {shown!r} in the PATH of the job; give its path, or set PATH in env")
        return
    if not program.startswith("/") and cwd is None:
        raise RequestError(f"{field}: {shown!r} is a relative path; give an absolute one, or a cwd")
    where = os.path.join(cwd or "/", program)
    if not os.path.isfile(where):
        raise RequestError(f"{field}: no program at {where[:LONGEST_SHOWN]!r}")
    if not os.access(where, os.X_OK):
        raise RequestError(
            f"{field}: {where[:LONGEST_SHOWN]!r} is not executable; run chmod +x, or name its interpreter first"
        )


def _check_bytes(field: str, texts: Mapping[str, str]) -> None:
    """Each can be handed to a program; they have names for people."""
    for name, text in texts.items():
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            raise RequestError(f"{field}: not every character of {name} can be written as UTF-8") from None
        if size > MOST_BYTES:
            raise RequestError(
                f"{field}: {name} has {size:,} bytes as UTF-8; at most {MOST_BYTES:,} can be handed over: put it into a file"
            )
