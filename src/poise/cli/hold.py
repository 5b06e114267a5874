"""`poise hold`: keep jobs from running."""

import click

from poise.cli.live_asking import json_option
from poise.cli.live_wishes import wish
from poise.client import Client

EPILOG = """\b
Examples:
  poise hold 17
  poise hold --app sweep
  poise hold --stop 17                         TERM at its deadline; what it has not saved is lost
"""


@click.command(epilog=EPILOG)
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
