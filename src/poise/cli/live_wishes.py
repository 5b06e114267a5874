"""Verbs that want something of jobs: of one, of several, or of all of an app."""

from collections.abc import Callable

import click

from poise.cli.live_asking import connected, document, echo_json, knowing
from poise.client import Client
from poise.model.errors import PoiseError, RequestError
from poise.wire.plain import plain
from poise.wire.views import Done, JobRow, Role

PAGE = 1_000
_MAY_ANY = (Role.OPERATOR, Role.ADMIN)
"""Who may do it to jobs of any tenant."""
Verb = Callable[[Client, str], Done]


def wish(verb: Verb, jobs: tuple[str, ...], app: str | None, *, as_json: bool, tenant: str | None = None) -> int:
    """Do it to each, whatever becomes of the others; the exit code is that of the worst.

    tenant   whose app is meant, where several tenants have one of that name
    """
    if tenant is not None and app is None:
        raise RequestError(f"--tenant {tenant} says whose app is meant; name the app with --app")
    if not jobs and app is None:
        raise RequestError("name a job, several, or an app with --app")
    with connected() as client:
        every = tuple(dict.fromkeys((*jobs, *(() if app is None else _of_app(client, app, tenant)))))
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
            click.echo(plain(f"poise: {error}" if len(jobs) == 1 else f"poise: {job}: {error}"), err=True)
            found.append({"job": job, "error": str(error)})
            code = max(code, 2 if isinstance(error, RequestError) else 1)
    return found, code


def _done(client: Client, verb: Verb, job: str) -> Done:
    with knowing(client, job):
        return verb(client, job)


def _of_app(client: Client, app: str, tenant: str | None) -> list[str]:
    """All jobs of an app that have not ended. An app is its tenant's own: a user means that of the token's tenant."""
    me = client.me()
    whose = me.tenant if tenant is None and me.role not in _MAY_ANY else tenant
    found: list[JobRow] = []
    while True:
        page = client.queue(app=app, tenant=whose, limit=PAGE, offset=len(found))
        found += page.jobs
        if len(page.jobs) < PAGE:
            break
    if not found:
        owner = "" if whose is None else f" of tenant {whose}"
        raise RequestError(f"the app {app!r}{owner} has no jobs that have not ended")
    tenants = sorted({row.tenant for row in found})
    if len(tenants) > 1:
        raise RequestError(f"the app {app!r} is of several tenants: {', '.join(tenants)}; say whose with --tenant")
    return [row.id for row in found]
