"""`poise cancel`: withdraw jobs."""

import click

from poise.cli.live_asking import json_option
from poise.cli.live_wishes import wish
from poise.client import Client

EPILOG = """\b
Examples:
  poise cancel 17
  poise cancel --app sweep
"""


@click.command(epilog=EPILOG)
@click.argument("jobs", nargs=-1, metavar="[JOB]...")
@click.option("--app", help="All jobs of this app that have not ended.")
@click.option("--tenant", help="Whose app is meant.  [default: your own; an operator: the only one]")
@json_option
def cancel(jobs: tuple[str, ...], app: str | None, tenant: str | None, as_json: bool) -> int:
    """Withdraw jobs. Those that run are stopped; what they have printed stays."""
    return wish(Client.cancel, jobs, app, as_json=as_json, tenant=tenant)
