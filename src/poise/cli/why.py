"""`poise why`: why a job runs, waits or has ended."""

import click

from poise.cli.live_asking import connected, document, echo_json, json_option, knowing
from poise.wire.plain import plain

EPILOG = """\b
Example:
  poise why 17
"""


@click.command(epilog=EPILOG)
@click.argument("job")
@json_option
def why(job: str, as_json: bool) -> None:
    """Say why JOB runs, waits or has ended: one reason, the evidence, and what would help."""
    with connected() as client, knowing(client, job):
        found = client.why(job)
    if as_json:
        echo_json(document(found))
        return
    click.echo(plain(f"{found.job} {found.state}: {found.reason.text} ({found.reason.code})"))
    for each in found.evidence:
        click.echo(f"  {plain(each)}")
    if found.advice:
        is_idle = found.advice.startswith("Nothing to do")
        click.echo(plain(found.advice) if is_idle else f"What would help: {plain(found.advice)}")
