"""`poise logs`: what a job prints."""

import click

from poise.cli.live_asking import connected, echo_json, json_option, knowing, patiently_connected, until_stopped
from poise.cli.live_screen import Screen
from poise.client import Client
from poise.model.errors import RequestError

EPILOG = """\b
Examples:
  poise logs 17
  poise logs -f 17
  poise logs --tail 20 --replica 1 17
"""


@click.command(epilog=EPILOG)
@click.argument("job")
@click.option("-f", "--follow", is_flag=True, help="Go on as more is printed, until the job has ended.")
@click.option("--replica", type=click.IntRange(0), default=0, show_default=True, help="Which of its processes.")
@click.option("--tail", type=click.IntRange(0), metavar="N", help="The last N lines only.")
@click.option("--raw", is_flag=True, help="Pass everything on to a terminal: escape codes of the job can change it.")
@json_option
def logs(job: str, follow: bool, replica: int, tail: int | None, raw: bool, as_json: bool) -> int:
    """Print what JOB has printed, of all its runs. Following survives a restart of the server.

    On a terminal colours are shown, and other escape codes are left out; elsewhere the text is as it was printed.
    """
    if follow and as_json:
        raise RequestError("--json is one document, and what is followed has no end; leave one of them out")
    with patiently_connected() if follow else connected() as client, knowing(client, job):
        if follow:
            with Screen(raw=raw) as screen:
                return until_stopped(lambda: _follow(client, job, replica, tail, screen))
        text = client.log(job, replica=replica) if tail is None else client.tail(job, tail, replica=replica)[0]
        if as_json:
            echo_json({"job": job, "replica": replica, "text": text})
        else:
            with Screen(raw=raw) as screen:
                screen.show(text)
    return 0


def _follow(client: Client, job: str, replica: int, tail: int | None, screen: Screen) -> None:
    text, offset = ("", 0) if tail is None else client.tail(job, tail, replica=replica)
    screen.show(text)
    for part in client.follow_log(job, replica=replica, offset=offset):
        screen.show(part)
