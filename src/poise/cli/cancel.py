"""`poise cancel`: withdraw jobs."""

import sys

import click

from poise.cli.live_asking import connected, document, echo_json, json_option
from poise.cli.live_wishes import wish
from poise.client import Client
from poise.model.errors import RequestError
from poise.model.units import counted

EPILOG = """\b
Examples:
  poise cancel 17
  poise cancel --app sweep
  poise cancel --tenant vision
"""


@click.command(epilog=EPILOG)
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
