"""`poise hold`: keep jobs from running."""

import click

from poise.cli.live_asking import json_option
from poise.cli.live_wishes import wish
from poise.client import Client

EPILOG = """\b
Examples:
  poise hold 17
  poise hold --app sweep
"""


@click.command(epilog=EPILOG)
@click.argument("jobs", nargs=-1, metavar="[JOB]...")
@click.option("--app", help="All jobs of this app that have not ended.")
@click.option("--tenant", help="Whose app is meant.  [default: your own; an operator: the only one]")
@json_option
def hold(jobs: tuple[str, ...], app: str | None, tenant: str | None, as_json: bool) -> int:
    """Keep jobs from running until they are released. One that runs is preempted: it is asked for a checkpoint first."""
    return wish(Client.hold, jobs, app, as_json=as_json, tenant=tenant)
