"""`poise release`: end a hold."""

import click

from poise.cli.live_asking import json_option
from poise.cli.live_wishes import wish
from poise.client import Client

EPILOG = """\b
Examples:
  poise release 17
  poise release --app sweep
"""


@click.command(epilog=EPILOG)
@click.argument("jobs", nargs=-1, metavar="[JOB]...")
@click.option("--app", help="All jobs of this app that have not ended.")
@click.option("--tenant", help="Whose app is meant.  [default: your own; an operator: the only one]")
@json_option
def release(jobs: tuple[str, ...], app: str | None, tenant: str | None, as_json: bool) -> int:
    """End a hold: the jobs may run again."""
    return wish(Client.release, jobs, app, as_json=as_json, tenant=tenant)
