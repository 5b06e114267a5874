"""The local back end's side of a starter (`runner/starting.py`): runners that another container starts."""

import json
import os
import socket
from contextlib import ExitStack
from pathlib import Path
from time import monotonic, sleep
from typing import NamedTuple

from poise.service.backends.local.runner import starting

RETRY_SECONDS = 0.02
OVER = starting.OVER
"""Error of a starter that starts nothing any more: its container is being ended."""


class StarterCall(NamedTuple):
    """A request for a runner: the connection on which the answer comes, and the pipe that the runner was given."""

    connection: int
    ready: int


class StartedRunner(NamedTuple):
    """A runner that was started: its pid, and a pidfd."""

    pid: int
    pidfd: int


def ask_for_runner(folder: Path, path: str, marks: dict[str, str]) -> StarterCall | None:
    """Ask for the runner of the order in a run's directory, without waiting; None: there is no starter, or not yet.

    path    directory of the run
    marks   variables by which its processes are recognised
    """
    with ExitStack() as on_error:
        try:
            connection = starting.connected(str(folder))
        except OSError:
            return None
        on_error.callback(connection.close)
        ready, write_end = os.pipe()
        on_error.callback(os.close, ready)
        try:
            starting.send(connection, {"start": path, "marks": marks}, write_end)
        except OSError:  # it has just ended
            return None
        finally:
            os.close(write_end)
        on_error.pop_all()
    return StarterCall(connection.detach(), ready)


def answer_to(call: StarterCall) -> StartedRunner | None:
    """Read the answer, which is there; None: the starter has gone. OSError: it could not start a runner."""
    with socket.socket(fileno=os.dup(call.connection)) as connection:
        try:
            text, handles = starting.receive(connection)
            fields = json.loads(text) if text else {}
        except (OSError, ValueError):
            return None
    if "errno" in fields:
        raise OSError(int(fields["errno"]), os.strerror(int(fields["errno"])))
    return StartedRunner(int(fields["pid"]), handles[0]) if handles and "pid" in fields else None


def tell_done(folder: Path, code: int, run: str | None, seconds: float) -> bool:
    """Tell the starter to end with this exit code; False: there was none within that many seconds. Blocks.

    run   directory of the run that its container was there for
    """
    deadline = monotonic() + seconds
    while True:
        try:
            with starting.connected(str(folder)) as connection:
                connection.settimeout(max(RETRY_SECONDS, deadline - monotonic()))
                starting.send(connection, {"done": code, "run": run})
                starting.receive(connection)
                return True
        except OSError:
            if monotonic() > deadline:
                return False
        sleep(RETRY_SECONDS)
