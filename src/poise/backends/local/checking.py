"""Whether what a job asks for is on this machine: said at submission, so that nothing waits for hours only to fail."""

import os
import shutil
from collections.abc import Mapping

from poise.backends.local.orders import inherited
from poise.model.errors import RequestError
from poise.wire.request import Request

LONGEST_SHOWN = 200


def checked(request: Request, environ: Mapping[str, str] | None = None) -> None:
    """The working directory is there, and so are the programs; RequestError says what is not.

    environ   the server's environment; None: this process's
    """
    base = inherited(os.environ if environ is None else environ)
    cwd = request.cwd
    if cwd is not None and not os.path.isdir(cwd):
        what = "is not a directory" if os.path.exists(cwd) else "does not exist"
        raise RequestError(f"cwd: {cwd[:LONGEST_SHOWN]!r} {what}; name a directory of the machine that the service runs on")
    path = request.env.get("PATH", base.get("PATH", os.defpath))
    for field, command in (("command", request.command), ("setup", request.setup)):
        if command:
            _check_encoding(field, command)
            _check_program(field, command[0], cwd, path)
    _check_encoding("env", tuple(request.env.values()))


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


def _check_encoding(field: str, texts: tuple[str, ...]) -> None:
    try:
        for text in texts:
            text.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{field}: not every character of it can be written as UTF-8") from None
