"""Verbs that want something of jobs: of one, of several, or of all of an app."""

import sys
from collections.abc import Callable

import click

from poise.cli.live import connected, document, echo_json, json_option, knowing
from poise.scheduler.model.errors import PoiseError, RequestError
from poise.scheduler.model.units import counted
from poise.service.client import Client
from poise.service.wire.request import plain
from poise.service.wire.views import CommandResult, JobRow, Role

PAGE = 1_000
_MAY_ANY = (Role.OPERATOR, Role.ADMIN)
"""Who may do it to jobs of any tenant."""
Verb = Callable[[Client, str], CommandResult]


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


def _done(client: Client, verb: Verb, job: str) -> CommandResult:
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


# `poise cancel`: withdraw jobs.

CANCEL_EPILOG = """\b
Examples:
  poise cancel 17
  poise cancel --app sweep
  poise cancel --tenant vision
"""


@click.command(epilog=CANCEL_EPILOG)
@click.argument("jobs", nargs=-1, metavar="[JOB]...")
@click.option("--app", help="All jobs of this app that have not ended.")
@click.option(
    "--tenant",
    help="All jobs of this tenant that have not ended; with --app, those of its app. Of other tenants only operators may.",
)
@click.option("--yes", is_flag=True, help="With --tenant alone: do not ask first, where there is a terminal to ask.")
@json_option
def cancel(jobs: tuple[str, ...], app: str | None, tenant: str | None, yes: bool, as_json: bool) -> int:
    """Withdraw jobs. Those that run are stopped; what they have printed stays."""
    if tenant is None or app is not None:
        return wish(Client.cancel, jobs, app, as_json=as_json, tenant=tenant)
    if jobs:
        raise RequestError("--tenant names all jobs of a tenant; leave the others out")
    return _cancel_all(tenant, asks=not yes and is_asked(), as_json=as_json)


def is_asked() -> bool:
    """Say whether standard input is a terminal, so that a question can be answered."""
    return sys.stdin.isatty()


def _cancel_all(tenant: str, *, asks: bool, as_json: bool) -> int:
    with connected() as client:
        there = client.queue(tenant=tenant, limit=1).total
        if not there:
            raise RequestError(f"the tenant {tenant!r} has no jobs that have not ended")
        if asks and not click.confirm(f"Cancel {counted(there, 'job')} of tenant {tenant}?", err=True):
            click.echo("poise: nothing was cancelled", err=True)
            return 1
        done = client.cancel_all(tenant)
    if as_json:
        echo_json(document(done))
    else:
        click.echo(f"{counted(done.jobs, 'job')} of tenant {done.tenant} cancelled")
    return 0


# `poise hold`: keep jobs from running.

HOLD_EPILOG = """\b
Examples:
  poise hold 17
  poise hold --app sweep
  poise hold --stop 17                         TERM at its deadline; what it has not saved is lost
"""


@click.command(epilog=HOLD_EPILOG)
@click.argument("jobs", nargs=-1, metavar="[JOB]...")
@click.option("--app", help="All jobs of this app that have not ended.")
@click.option("--tenant", help="Whose app is meant.  [default: your own; an operator: the only one]")
@click.option("--stop", is_flag=True, help="Make a run leave even if it cannot save: TERM at its deadline at the latest.")
@json_option
def hold(jobs: tuple[str, ...], app: str | None, tenant: str | None, stop: bool, as_json: bool) -> int:
    """Keep jobs from running until they are released. One that runs is asked to save its work and to leave.

    One that cannot save its work, or not yet, goes on and keeps its GPUs: it is held as soon as it can, or when it ends.
    """
    return wish(Client.stop if stop else Client.hold, jobs, app, as_json=as_json, tenant=tenant)


# `poise release`: end a hold.

RELEASE_EPILOG = """\b
Examples:
  poise release 17
  poise release --app sweep
"""


@click.command(epilog=RELEASE_EPILOG)
@click.argument("jobs", nargs=-1, metavar="[JOB]...")
@click.option("--app", help="All jobs of this app that have not ended.")
@click.option("--tenant", help="Whose app is meant.  [default: your own; an operator: the only one]")
@json_option
def release(jobs: tuple[str, ...], app: str | None, tenant: str | None, as_json: bool) -> int:
    """End a hold: the jobs may run again."""
    return wish(Client.release, jobs, app, as_json=as_json, tenant=tenant)
