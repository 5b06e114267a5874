"""`poise submit`: jobs for the running service."""

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Self

import click

from poise.cli.live_asking import connected, echo_json, json_option, patiently_connected
from poise.cli.live_flags import draft, job_options
from poise.cli.live_rows import state_of
from poise.cli.live_waiting import followed, waited
from poise.client import Client
from poise.client.client import new_key
from poise.client.placing import placed
from poise.model.errors import PoiseError, RequestError
from poise.wire.notes import notes_on
from poise.wire.plain import plain
from poise.wire.request import Request

MANY = 20
"""Jobs above which a person at a terminal is asked first."""
_COMMAND = "poise.cli.submit.command"

EPILOG = """\b
Examples:
  poise submit -- python train.py --epochs 10
  poise submit -g 4 --type v100,a100 -n resnet50 -- python train.py
  poise submit job.yaml --env LR=0.01 --env WANDB_API_KEY --env-file secrets.env
  poise submit --follow -- python train.py
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
@click.option("--wait", is_flag=True, help="Wait until the jobs have ended; exit codes as of `poise wait`.")
@click.option("--follow", is_flag=True, help="Print what the job prints until it has ended; exit codes as of `poise wait`.")
@click.option("-q", "--id-only", is_flag=True, help="Print the ids alone, one a line.")
@json_option
@click.pass_context
def submit(ctx: click.Context, /, file: tuple[str, ...], dry_run: bool, **options: Any) -> int:  # noqa: ANN401
    """Submit a job, an array or a sweep to the running service.

    FILE is a job file in YAML, a script that begins with #! (its #SBATCH lines count), or - for a job file on standard
    input. Or give a command after --; no shell sees it. Options win over what FILE says. The job runs in the current folder
    and in the virtual environment that is active.
    """
    if len(file) > 1:
        raise click.UsageError(f"one FILE, or a command after --: poise submit -- {' '.join(file)}")
    manner = Manner.of(options)
    found = draft(file[0] if file else None, ctx.meta[_COMMAND], options)
    _note(found.notes)
    key = new_key()
    requests = tuple(map(placed, found.requests(key)))
    if dry_run:
        _note(notes_on(requests))
        shown = [request.model_dump(mode="json", exclude_defaults=True) for request in requests]
        click.echo(json.dumps(shown if found.variants else shown[0], indent=1))
        return 0
    manner.check(len(requests))
    if len(requests) > MANY and manner.asks and sys.stdin.isatty():
        click.confirm(f"Submit {len(requests):,} jobs?", default=True, abort=True, err=True)
    with connected() if manner.end is End.NONE else patiently_connected() as client:
        return _submit(client, requests, key, manner)


class End(Enum):
    """What is done once the jobs are submitted."""

    NONE = "none"
    WAIT = "wait"
    FOLLOW = "follow"


class Form(Enum):
    """What is printed of a submission."""

    LINES = "lines"
    IDS = "ids"
    JSON = "json"


@dataclass(frozen=True, slots=True)
class Manner:
    """How a submission is made: what is asked before, printed, and waited for."""

    form: Form
    end: End
    asks: bool

    @classmethod
    def of(cls, options: dict[str, Any]) -> Self:
        """What the options say, which are taken out of them; RequestError if they contradict each other."""
        yes, as_json, ids, wait, follow = (options.pop(name) for name in ("yes", "as_json", "id_only", "wait", "follow"))
        if as_json and ids:
            raise RequestError("--json and --id-only are two forms of one answer; leave one of them out")
        if follow and (as_json or ids):
            raise RequestError("--follow prints what the job prints; leave --json and --id-only out, or take --wait")
        form = Form.JSON if as_json else Form.IDS if ids else Form.LINES
        return cls(form, End.FOLLOW if follow else End.WAIT if wait else End.NONE, asks=not yes and not as_json)

    def check(self, jobs: int) -> None:
        """RequestError for what cannot be done with so many jobs."""
        if self.end is End.FOLLOW and jobs > 1:
            raise RequestError(
                f"--follow prints one log, and these are {jobs:,} jobs; take --wait, or `poise logs -f` of one"
            )


def _note(notes: Iterable[str]) -> None:
    for note in notes:
        click.echo(plain(f"note: {note}"), err=True)


def _submit(client: Client, requests: tuple[Request, ...], key: str, manner: Manner) -> int:
    handles = client.submit_all(requests, key=key)
    _note(handles[0].notes)
    jobs = [handle.id for handle in handles]
    venv = requests[0].venv
    if manner.form is Form.LINES:
        _tell(client, jobs, requests[0], is_log=manner.end is End.FOLLOW)
    elif manner.form is Form.IDS:
        click.echo("\n".join(jobs))
    if manner.end is End.FOLLOW:
        return followed(client, jobs[0])
    states, code = ({}, 0) if manner.end is End.NONE else waited(client, jobs, None, quiet=manner.form is not Form.LINES)
    if manner.form is Form.JSON:
        more = {"venv": venv} if venv else {}
        echo_json(
            {"jobs": jobs, **more, **({"states": [states[job].value for job in jobs if job in states]} if states else {})}
        )
    elif manner.form is Form.LINES:
        for job, state in states.items():
            click.echo(f"{job} {state}")
    return code


def _tell(client: Client, jobs: list[str], request: Request, *, is_log: bool) -> None:
    """What became of a submission, for people; beside a log that is followed it does not stand in the log's way."""
    first, lines = jobs[0], []
    if len(jobs) == 1:
        lines.append(f"submitted {first}{_standing(client, first)}")
        further = f"next: poise why {first} · poise logs -f {first} · poise queue"
    else:
        lines += [f"submitted {len(jobs):,} jobs of app {request.app}: {' '.join(_few(jobs))}"]
        lines += [f"{first}{_standing(client, first)}"]
        further = f"next: poise queue --app {request.app} · poise why {first} · poise logs -f {first}"
    if request.venv is not None:
        lines.append(f"runs in the virtual environment {request.venv} (--no-venv: in none)")
    for line in lines if is_log else (*lines, further):
        click.echo(plain(line), err=is_log)


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
