"""`poise submit`: jobs for the running service."""

import json
import sys
from typing import Any

import click

from poise.cli.live_asking import connected, echo_json, json_option
from poise.cli.live_flags import draft, job_options
from poise.cli.live_rows import state_of
from poise.client import Client
from poise.client.client import new_key, placed
from poise.model.errors import PoiseError
from poise.wire.request import Request

MANY = 20
"""Jobs above which a person at a terminal is asked first."""
_COMMAND = "poise.cli.submit.command"

EPILOG = """\b
Examples:
  poise submit -- python train.py --epochs 10
  poise submit -g 4 --type v100,a100 -n resnet50 -- python train.py
  poise submit job.yaml --env LR=0.01
  poise submit --sweep LR=0.1,0.01 --sweep SEED=1,2 -- python train.py --lr '${LR}' --seed '${SEED}'
  poise submit script.sbatch
"""


class Submit(click.Command):
    """A command whose words after `--` are another command's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keep what stands after `--` apart."""
        at = args.index("--") if "--" in args else len(args)
        ctx.meta[_COMMAND] = tuple(args[at + 1 :])
        try:
            return super().parse_args(ctx, args[:at])
        except click.NoSuchOption as error:
            if "--" in args or all(word.startswith("-") for word in args):
                raise
            text = f"{error.format_message()} A command goes after --: poise submit -- python train.py"
            raise click.UsageError(text, ctx) from None


@click.command(cls=Submit, epilog=EPILOG, options_metavar="[OPTIONS] [FILE] [-- COMMAND...]")
@click.argument("file", nargs=-1, metavar="")
@job_options
@click.option("-y", "--yes", is_flag=True, help=f"Do not ask, however many jobs it is (more than {MANY} are asked about).")
@click.option("--dry-run", is_flag=True, help="Print what would be submitted, as JSON; nothing is sent.")
@json_option
@click.pass_context
def submit(ctx: click.Context, /, file: tuple[str, ...], yes: bool, dry_run: bool, as_json: bool, **options: Any) -> None:  # noqa: ANN401
    """Submit a job, an array or a sweep to the running service.

    FILE is a job file in YAML, a script that begins with #! (its #SBATCH lines count), or - for a job file on standard
    input. Or give a command after --; no shell sees it. Options win over what FILE says.
    """
    if len(file) > 1:
        raise click.UsageError(f"one FILE, or a command after --: poise submit -- {' '.join(file)}")
    found = draft(file[0] if file else None, ctx.meta[_COMMAND], options)
    for note in found.notes:
        click.echo(f"note: {note}", err=True)
    key = new_key()
    requests = tuple(map(placed, found.requests(key)))
    if dry_run:
        shown = [request.model_dump(mode="json", exclude_defaults=True) for request in requests]
        click.echo(json.dumps(shown if found.variants else shown[0], indent=1))
        return
    if len(requests) > MANY and not yes and not as_json and sys.stdin.isatty():
        click.confirm(f"Submit {len(requests):,} jobs?", default=True, abort=True, err=True)
    with connected() as client:
        _submit(client, requests, key, as_json=as_json)


def _submit(client: Client, requests: tuple[Request, ...], key: str, *, as_json: bool) -> None:
    jobs = [handle.id for handle in client.submit_all(requests, key=key)]
    if as_json:
        echo_json({"jobs": jobs})
        return
    first, app = jobs[0], requests[0].app
    if len(jobs) == 1:
        click.echo(f"submitted {first}{_standing(client, first)}")
        click.echo(f"next: poise why {first} · poise logs -f {first} · poise queue")
    else:
        click.echo(f"submitted {len(jobs):,} jobs of app {app}: {' '.join(_few(jobs))}")
        click.echo(f"{first}{_standing(client, first)}")
        click.echo(f"next: poise queue --app {app} · poise why {first} · poise logs -f {first}")


def _standing(client: Client, job: str) -> str:
    """Its name, state and reason; nothing if the server is away by now: the job is submitted all the same."""
    try:
        row = client.show(job).job
    except PoiseError:
        return ""
    name = f" {row.name}" if row.name != row.id else ""
    return f"{name}: {state_of(row)}, {row.reason.text}"


def _few(jobs: list[str]) -> list[str]:
    return jobs if len(jobs) <= MANY else [*jobs[: MANY // 2], "…", *jobs[-MANY // 2 :]]
