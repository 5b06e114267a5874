"""`poise show`: everything about a job."""

import click

from poise.cli.live_asking import connected, document, echo_json, json_option, knowing
from poise.cli.live_rows import facts, runs_table
from poise.cli.tables import show_table
from poise.wire.views import JobDetail

EPILOG = """\b
Example:
  poise show 17
"""


@click.command(epilog=EPILOG)
@click.argument("job")
@json_option
def show(job: str, as_json: bool) -> None:
    """Show everything about JOB: its state, its progress and its runs."""
    with connected() as client, knowing(client, job):
        detail = client.show(job)
    if as_json:
        echo_json(document(detail))
    else:
        _show(detail)


def _show(detail: JobDetail) -> None:
    click.echo(detail.job.id if detail.job.name == detail.job.id else f"{detail.job.id} {detail.job.name}")
    found = facts(detail)
    width = max(len(heading) for heading, _ in found)
    for heading, text in found:
        click.echo(f"  {heading:{width}}  {text}")
    if detail.runs:
        click.echo()
        cut = detail.runs[0].epoch > 1
        show_table(
            runs_table(detail.runs), f"Runs, the last {len(detail.runs)} of {detail.runs[-1].epoch}" if cut else "Runs"
        )
