"""`poise events`: what happened, by whom, to what."""

import click

from poise.cli.live_asking import (
    clock,
    connected,
    document,
    echo_json,
    json_option,
    patiently_connected,
    until_stopped,
)
from poise.client import Client
from poise.wire.plain import plain
from poise.wire.views import Happening

EPILOG = """\b
Examples:
  poise events
  poise events --job 17 --follow
"""


@click.command(epilog=EPILOG)
@click.option("--job", help="Only what concerns this job.")
@click.option("--tenant", help="Only what concerns this tenant.")
@click.option("-f", "--follow", is_flag=True, help="Go on as more happens, until Ctrl-C; with --json one object a line.")
@click.option("--limit", type=click.IntRange(1, 1_000), default=50, show_default=True, help="How many, the latest.")
@json_option
def events(job: str | None, tenant: str | None, follow: bool, limit: int, as_json: bool) -> int:
    """Show what happened: [time] [actor] [objects] and a sentence. It is a view of the journal."""
    if follow:
        with patiently_connected() as client:
            return until_stopped(lambda: _follow(client, job, tenant, limit, as_json=as_json))
    with connected() as client:
        found = client.events(after=-limit, job=job, tenant=tenant, limit=limit)
    if as_json:
        echo_json(document(found))
    else:
        for each in found.events:
            click.echo(line(each))
    return 0


def _follow(client: Client, job: str | None, tenant: str | None, limit: int, *, as_json: bool) -> None:
    for each in client.follow_events(after=-limit, job=job, tenant=tenant):
        if as_json:
            echo_json(document(each))
        else:
            click.echo(line(each))


def line(each: Happening) -> str:
    """One thing that happened, in one line."""
    objects = " ".join(name for name in (each.job, each.tenant) if name)
    return f"[{clock(each.time)}] [{each.actor}] [{objects}] {plain(' '.join(each.text.split()))}"
