"""`poise cancel`, `hold` and `release`: for one job, for several, or for all jobs of an app."""

import sys
from collections.abc import Callable

import click

from poise.cli.live import PAGE, answer, connected, document, suggesting
from poise.cli.options import examples, json_option, print_json, with_options
from poise.scheduler.model.errors import PoiseError, RequestError
from poise.scheduler.model.units import counted
from poise.service.client import Client
from poise.service.wire.request import plain
from poise.service.wire.views import CommandResult, JobRow, Role

Command = Callable[[Client, str], CommandResult]

_jobs_and_app = with_options((
    click.argument("jobs", nargs=-1, metavar="[JOB]..."),
    click.option("--app", help="All jobs of this app that have not ended."),
))  # fmt: skip
_tenant_of_app = click.option("--tenant", help="Whose app is meant.  [default: your own; an operator: the only one]")


@click.command(epilog=examples("poise cancel 17", "poise cancel --app sweep", "poise cancel --tenant vision"))
@_jobs_and_app
@click.option(
    "--tenant",
    help="All jobs of this tenant that have not ended; with --app, those of its app. Of other tenants only operators may.",
)
@click.option("--yes", is_flag=True, help="With --tenant alone: do not ask first, where there is a terminal to ask.")
@json_option
def cancel(jobs: tuple[str, ...], app: str | None, tenant: str | None, yes: bool, as_json: bool) -> int:
    """Withdraw jobs. Those that run are stopped; what they have printed stays."""
    if tenant is None or app is not None:
        return _apply(Client.cancel, jobs, app, tenant, as_json=as_json)
    if jobs:
        raise RequestError("--tenant names all jobs of a tenant; leave the others out")
    with connected() as client:
        there = client.queue(tenant=tenant, limit=1).total
        if not there:
            raise RequestError(f"the tenant {tenant!r} has no jobs that have not ended")
        question = f"Cancel {counted(there, 'job')} of tenant {tenant}?"
        if not yes and can_ask() and not click.confirm(question, err=True):
            click.echo("poise: nothing was cancelled", err=True)
            return 1
        done = client.cancel_all(tenant)
        text = f"{counted(done.jobs, 'job')} of tenant {done.tenant} cancelled"
        answer(done, lambda _: click.echo(text), as_json=as_json)
    return 0


def can_ask() -> bool:
    """Whether standard input is a terminal, so that a question can be answered."""
    return sys.stdin.isatty()


HOLD_EPILOG = """\b
Examples:
  poise hold 17
  poise hold --app sweep
  poise hold --stop 17                         TERM at its deadline; what it has not saved is lost
"""


@click.command(epilog=HOLD_EPILOG)
@_jobs_and_app
@_tenant_of_app
@click.option("--stop", is_flag=True, help="Make a run leave even if it cannot save: TERM at its deadline at the latest.")
@json_option
def hold(jobs: tuple[str, ...], app: str | None, tenant: str | None, stop: bool, as_json: bool) -> int:
    """Keep jobs from running until they are released. One that runs is asked to save its work and to leave.

    One that cannot save its work, or not yet, goes on and keeps its GPUs: it is held as soon as it can, or when it ends.
    """
    return _apply(Client.stop if stop else Client.hold, jobs, app, tenant, as_json=as_json)


@click.command(epilog=examples("poise release 17", "poise release --app sweep"))
@_jobs_and_app
@_tenant_of_app
@json_option
def release(jobs: tuple[str, ...], app: str | None, tenant: str | None, as_json: bool) -> int:
    """End a hold: the jobs may run again."""
    return _apply(Client.release, jobs, app, tenant, as_json=as_json)


def _apply(command: Command, jobs: tuple[str, ...], app: str | None, tenant: str | None, *, as_json: bool) -> int:
    """Send a command for each job, whatever becomes of the others; the exit code is that of the worst.

    tenant   owner of the app, if several tenants have one of that name
    """
    if tenant is not None and app is None:
        raise RequestError(f"--tenant {tenant} says whose app is meant; name the app with --app")
    if not jobs and app is None:
        raise RequestError("name a job, several, or an app with --app")
    found: list[dict[str, str]] = []
    code = 0
    with connected() as client:
        every = tuple(dict.fromkeys((*jobs, *(() if app is None else _jobs_of_app(client, app, tenant)))))
        for job in every:
            try:
                with suggesting(client, job):
                    done = document(command(client, job))
                found.append({name: value for name, value in done.items() if value is not None})
            except PoiseError as error:
                click.echo(plain(f"poise: {error}" if len(every) == 1 else f"poise: {job}: {error}"), err=True)
                found.append({"job": job, "error": str(error)})
                code = max(code, 2 if isinstance(error, RequestError) else 1)
    if as_json:
        print_json(found)
    else:
        for each in found:
            if "state" in each:
                click.echo(f"{each['job']} {each['state']}" + (f": {plain(each['text'])}" if each.get("text") else ""))
    return code


def _jobs_of_app(client: Client, app: str, tenant: str | None) -> list[str]:
    """All jobs of an app that have not ended. An app belongs to a tenant: a user means that of the token's tenant."""
    me = client.me()
    owner = me.tenant if tenant is None and me.role not in (Role.OPERATOR, Role.ADMIN) else tenant
    found: list[JobRow] = []
    while True:
        page = client.queue(app=app, tenant=owner, limit=PAGE, offset=len(found))
        found += page.jobs
        if len(page.jobs) < PAGE:
            break
    if not found:
        whose = "" if owner is None else f" of tenant {owner}"
        raise RequestError(f"the app {app!r}{whose} has no jobs that have not ended")
    tenants = sorted({row.tenant for row in found})
    if len(tenants) > 1:
        raise RequestError(f"the app {app!r} is of several tenants: {', '.join(tenants)}; say whose with --tenant")
    return [row.id for row in found]
