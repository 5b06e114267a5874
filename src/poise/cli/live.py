"""What the verbs of a live service share: the connection, answers for programs and for people, jobs by inexact names."""

import difflib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, TypeVar

import click

from poise.cli import INTERRUPTED
from poise.cli.options import print_json
from poise.scheduler.model.errors import RequestError, plain
from poise.service.client import Client, ServerRefusedError
from poise.service.client.connection import NOT_FOUND
from poise.service.wire.request import Wire
from poise.service.wire.views import JobRow

PATIENCE = 30.0
"""Seconds for which a verb that asks once waits for a server that restarts."""
LONG_PATIENCE = 600.0
"""Seconds for which a verb that follows something waits for a server that is away."""
PAGE = 1_000
"""Jobs that are asked for at once."""
_TIMESTAMPS = {"submitted", "started", "finished", "ended", "time", "now", "expires", "since", "drained", "emptied"}

View = TypeVar("View", bound=Wire)


def connected(patience: float | None = None) -> Client:
    """The server that a command talks to. While it restarts it is waited for, for `patience` seconds.

    patience   None: as long as a verb that asks once should wait
    """
    return Client.from_config(patience=PATIENCE if patience is None else patience, waiting=_announce_wait)


def connected_for_long(timeout: float | None = None) -> Client:
    """The same, for a verb that follows something: a longer absence of the server does not end it.

    timeout   seconds after which the verb itself ends, if it does
    """
    return connected(LONG_PATIENCE if timeout is None else min(timeout, LONG_PATIENCE))


def _announce_wait(why: str) -> None:
    click.echo(f"poise: {plain(why)}; waiting for it, Ctrl-C ends that", err=True)


@contextmanager
def suggesting(client: Client, job: str) -> Iterator[None]:
    """Inside, an unknown job is answered with the nearest ones."""
    try:
        yield
    except ServerRefusedError as error:
        if error.code != NOT_FOUND:
            raise
        rows = client.queue(limit=PAGE).jobs
        known = dict.fromkeys((*(row.id for row in rows), *(row.name for row in rows)))
        near = difflib.get_close_matches(job, known)
        hint = f"did you mean {' or '.join(near)}?" if near else "`poise queue` lists those that there are"
        raise RequestError(f"there is no job {job!r}; {hint}") from None


def find_job(client: Client, job: str) -> str:
    """The id of a job that was named on the command line."""
    with suggesting(client, job):
        return client.find(job)


def until_interrupted(work: Callable[[], None]) -> int:
    """Do work that people end with Ctrl-C; the exit code."""
    try:
        work()
    except KeyboardInterrupt:
        click.echo(err=True)
        return INTERRUPTED
    return 0


def answer(view: View, show: Callable[[View], object], *, as_json: bool) -> None:
    """Print a view as JSON, or have it shown to people."""
    if as_json:
        print_json(document(view))
    else:
        show(view)


def document(view: Wire) -> Any:  # noqa: ANN401 - JSON
    """A view as JSON for programs: durations in seconds, timestamps as ISO 8601 in UTC."""
    return _with_timestamps(view.model_dump(mode="json"))


def _with_timestamps(value: Any) -> Any:  # noqa: ANN401 - JSON
    if isinstance(value, list):
        return [_with_timestamps(each) for each in value]
    if not isinstance(value, dict):
        return value
    found = {}
    for name, each in value.items():
        is_timestamp = name in _TIMESTAMPS and isinstance(each, int | float) and not isinstance(each, bool)
        found[name] = iso_time(each) if is_timestamp else _with_timestamps(each)
    return found


def iso_time(timestamp: float) -> str:
    """A timestamp for programs: 2026-03-01T12:00:00.250Z."""
    return _calendar(timestamp).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def clock_time(timestamp: float) -> str:
    """A timestamp for people, to the second, in UTC."""
    return _calendar(timestamp).strftime("%Y-%m-%d %H:%M:%SZ")


def _calendar(timestamp: float) -> datetime:
    return datetime.fromtimestamp(min(max(timestamp, 0.0), 253_402_300_799.0), tz=UTC)  # years from 1970 to 9999


def state_of(row: JobRow) -> str:
    """The state of a job with its flags: `PAUSED+PREEMPTED`."""
    return "+".join([row.state, *row.flags])
