"""Verbs that want something of jobs: of one, of several, or of all of an app."""

from collections.abc import Callable

import click

from poise.cli.live_asking import connected, document, echo_json, knowing
from poise.client import Client
from poise.model.errors import PoiseError, RequestError
from poise.wire.plain import plain
from poise.wire.views import Done

PAGE = 1_000
Verb = Callable[[Client, str], Done]


def wish(verb: Verb, jobs: tuple[str, ...], app: str | None, *, as_json: bool) -> int:
    """Do it to each, whatever becomes of the others; the exit code is that of the worst."""
    if not jobs and app is None:
        raise RequestError("name a job, several, or an app with --app")
    with connected() as client:
        every = tuple(dict.fromkeys((*jobs, *(() if app is None else _of_app(client, app)))))
        found, code = _each(client, verb, every)
    if as_json:
        echo_json(found)
    else:
        for each in found:
            if "state" in each:
                click.echo(f"{each['job']} {each['state']}" + (f": {plain(each['text'])}" if each.get("text") else ""))
    return code


def _each(client: Client, verb: Verb, jobs: tuple[str, ...]) -> tuple[list[dict[str, str]], int]:
    found: list[dict[str, str]] = []
    code = 0
    for job in jobs:
        try:
            done = document(_done(client, verb, job))
            found.append({name: value for name, value in done.items() if value is not None})
        except PoiseError as error:
            click.echo(f"poise: {error}" if len(jobs) == 1 else f"poise: {job}: {error}", err=True)
            found.append({"job": job, "error": str(error)})
            code = max(code, 2 if isinstance(error, RequestError) else 1)
    return found, code


def _done(client: Client, verb: Verb, job: str) -> Done:
    with knowing(client, job):
        return verb(client, job)


def _of_app(client: Client, app: str) -> list[str]:
    """All jobs of an app that have not ended."""
    found: list[str] = []
    while True:
        page = client.queue(app=app, limit=PAGE, offset=len(found))
        found += [row.id for row in page.jobs]
        if len(page.jobs) < PAGE:
            break
    if not found:
        raise RequestError(f"the app {app!r} has no jobs that have not ended")
    return found
