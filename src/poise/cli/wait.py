"""`poise wait`: until jobs have ended."""

import click

from poise.cli.live_asking import echo_json, found, json_option, patiently_connected
from poise.cli.live_flags import seconds_of
from poise.cli.live_waiting import waited

EPILOG = """\b
Examples:
  poise wait 17
  poise wait 17 18 --timeout 1h && echo done
"""


@click.command(epilog=EPILOG)
@click.argument("jobs", nargs=-1, required=True, metavar="JOB...")
@click.option("--timeout", metavar="TIME", help="Wait no longer than that.  [default: as long as it takes]")
@click.option("-q", "--quiet", is_flag=True, help="Say nothing of jobs that have not ended.")
@json_option
def wait(jobs: tuple[str, ...], timeout: str | None, quiet: bool, as_json: bool) -> int:
    """Wait until all JOBs have ended, then print each with its final state. A restart of the server does not end it.

    Exit codes: 0 all succeeded, 1 one failed or was cancelled; 124 the time is up, 130 Ctrl-C, and the jobs go on.
    """
    most = None if timeout is None else seconds_of("timeout", timeout)
    with patiently_connected(most) as client:
        ids = list(dict.fromkeys(found(client, each) for each in jobs))
        states, code = waited(client, ids, most, quiet=quiet)
    if as_json:
        echo_json([{"job": job, "state": state.value} for job, state in states.items()])
    else:
        for job, state in states.items():
            click.echo(f"{job} {state}")
    return code
