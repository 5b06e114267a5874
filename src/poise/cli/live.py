"""What the live verbs share: the server that is asked, answers as JSON, and jobs whose names are nearly right."""

import difflib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import click

from poise.cli import INTERRUPTED
from poise.scheduler.model.errors import RequestError
from poise.service.client import Client, ServerRefusedError
from poise.service.client.connection import NOT_FOUND
from poise.service.wire.request import Wire, plain

PATIENCE = 30.0
"""Seconds for which a verb that asks once waits for a server that restarts."""
LONG_PATIENCE = 600.0
"""Seconds for which a verb that follows something waits for a server that is away."""
_LOOKED_AT = 1_000
"""Jobs among which a wrong id is looked for."""
_MOMENTS = {"submitted", "started", "finished", "ended", "time", "now", "expires"}

json_option = click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")


def connected() -> Client:
    """The server that a command talks to. While it restarts it is waited for."""
    return Client.from_config(patience=PATIENCE, waiting=_say_that_it_waits)


def patiently_connected(most: float | None = None) -> Client:
    """The same, for a verb that follows something: a longer absence of the server does not end it.

    most   seconds, if the verb itself ends after so many
    """
    return Client.from_config(
        patience=LONG_PATIENCE if most is None else min(most, LONG_PATIENCE), waiting=_say_that_it_waits
    )


def _say_that_it_waits(why: str) -> None:
    click.echo(f"poise: {plain(why)}; waiting for it, Ctrl-C ends that", err=True)


def found(client: Client, job: str) -> str:
    """The id of a job that was named on the command line."""
    with knowing(client, job):
        return client.find(job)


@contextmanager
def knowing(client: Client, job: str) -> Iterator[None]:
    """Inside, a job that is not there is answered with the nearest that are."""
    try:
        yield
    except ServerRefusedError as error:
        if error.code != NOT_FOUND:
            raise
        raise RequestError(f"there is no job {job!r}; {_hint(client, job)}") from None


def _hint(client: Client, job: str) -> str:
    rows = client.queue(limit=_LOOKED_AT).jobs
    near = [row.id for row in rows if row.name == job][:3] or difflib.get_close_matches(job, [row.id for row in rows])
    return f"did you mean {' or '.join(near)}?" if near else "`poise queue` lists those that there are"


def until_stopped(work: Callable[[], None]) -> int:
    """Do something that people end with Ctrl-C; the exit code."""
    try:
        work()
    except KeyboardInterrupt:
        click.echo(err=True)
        return INTERRUPTED
    return 0


def document(view: Wire) -> Any:  # noqa: ANN401 - JSON
    """A view as JSON for programs: spans in seconds, moments as ISO 8601 in UTC."""
    return _timed(view.model_dump(mode="json"))


def echo_json(found: object) -> None:
    """One document on standard output."""
    click.echo(json.dumps(found, allow_nan=False))


def iso(moment: float) -> str:
    """A moment for programs: 2026-03-01T12:00:00.250Z."""
    return _calendar(moment).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def clock(moment: float) -> str:
    """A moment for people, to the second, in UTC."""
    return _calendar(moment).strftime("%Y-%m-%d %H:%M:%SZ")


def _calendar(moment: float) -> datetime:
    return datetime.fromtimestamp(min(max(moment, 0.0), 253_402_300_799.0), tz=UTC)


def _timed(value: Any) -> Any:  # noqa: ANN401 - JSON
    if isinstance(value, list):
        return [_timed(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {name: iso(each) if _is_moment(name, each) else _timed(each) for name, each in value.items()}


def _is_moment(name: str, value: object) -> bool:
    return name in _MOMENTS and isinstance(value, int | float) and not isinstance(value, bool)
