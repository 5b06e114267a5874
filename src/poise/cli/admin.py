"""`poise use`, `tokens` and `repair`: the policy, the accounts and the journal of a service."""

import os
import sys
from pathlib import Path

import click

from poise.cli.live import answer, clock_time, connected
from poise.cli.options import choice_of, examples, json_option, print_json
from poise.cli.output import show_table
from poise.cli.queue import NONE
from poise.lab.report.page import HtmlTable
from poise.scheduler.model.errors import RequestError
from poise.scheduler.model.units import counted
from poise.service.client.config import state_folder
from poise.service.wire.views import MadeToken, Role, TokenList


@click.command(epilog=examples("poise use max-min", "poise use tiresias:limits=300/900,promote=8"))
@click.argument("policy")
@json_option
def use(policy: str, as_json: bool) -> None:
    """Go on under another POLICY: NAME, NAME:key=value,..., NAME+COMBINATOR of `poise policies`.

    Jobs that run stay where they are until the policy decides otherwise.
    """
    with connected() as client:
        answer(client.use(policy), lambda found: click.echo(f"{found.policy} on {found.cluster}"), as_json=as_json)


TOKENS_EPILOG = """\b
Examples:
  poise tokens
  poise tokens --make ann --tenant vision --days 90
  poise tokens --revoke ann
"""


@click.command(epilog=TOKENS_EPILOG)
@click.option("--make", metavar="NAME", help="Make a token of this name, and show it this once.")
@click.option("--tenant", metavar="NAME", help="Whose jobs those are that it submits.  [default: its name]")
@click.option("--role", type=choice_of(Role), help="What it may do.  [default: user]")
@click.option("--days", type=float, help="Until it expires.  [default: it does not]")
@click.option("--revoke", metavar="NAME", help="Make a token worthless from now on.")
@json_option
def tokens(
    make: str | None, tenant: str | None, role: str | None, days: float | None, revoke: str | None, as_json: bool
) -> None:
    """List the tokens of the running service, make one or revoke one. Only admins may."""
    if make is not None and revoke is not None:
        raise RequestError("--make and --revoke exclude each other; use one at a time")
    if make is None and (tenant, role, days) != (None, None, None):
        raise RequestError("--tenant, --role and --days describe a token that --make makes")
    with connected() as client:
        if make is not None:
            made = client.make_token(make, tenant=tenant, role=Role(role or Role.USER), days=days)
            answer(made, _show_token, as_json=as_json)
        elif revoke is not None:
            gone = client.drop_token(revoke)
            answer(gone, lambda account: click.echo(f"{account.name} is revoked"), as_json=as_json)
        else:
            answer(client.tokens(), _show_tokens, as_json=as_json)


def _show_token(made: MadeToken) -> None:
    """Print the token alone on standard output, so that it can go straight into a file."""
    account = made.account
    until = "" if account.expires is None else f", until {clock_time(account.expires)}"
    whose = f"{account.name} has the role {account.role}, of tenant {account.tenant}"
    click.echo(f"poise: {whose}{until}; the token is shown this once", err=True)
    click.echo(made.token)


def _show_tokens(found: TokenList) -> None:
    columns = ("NAME", "TENANT", "ROLE", "EXPIRES")
    rows = tuple(
        (each.name, each.tenant, each.role.value, NONE if each.expires is None else clock_time(each.expires))
        for each in found.accounts
    )
    show_table(HtmlTable(columns, rows, names=4, words=columns), counted(len(found.accounts), "token"))


REPAIR_EPILOG = """\b
Examples:
  poise repair --dry-run                what is wrong, if anything is; exit code 1 if something is
  poise repair /var/lib/poise/state
"""


@click.command(epilog=REPAIR_EPILOG)
@click.argument("state", type=click.Path(path_type=Path), required=False)
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="Say what is wrong, and change nothing.")
@json_option
def repair(state: Path | None, yes: bool, dry_run: bool, as_json: bool) -> int:
    """Mend the journal in STATE, the state directory of a service that does not run.  [default: ~/.local/state/poise]

    What can be read is kept; a job that cannot has failed; what was answered and is lost is named, and its numbers are not
    given out again. The files as they were found stay in STATE/backups.
    """
    from poise.service.server.storage.repair import examined
    from poise.service.server.storage.state_dir import FolderLock, existing_folder

    folder = existing_folder(state or state_folder(os.environ))
    lock = FolderLock(folder)
    try:
        with examined(folder) as (found, exchange):
            wanted = bool(found.problems) and not dry_run
            if not as_json:
                for each in found.problems:
                    click.echo(each)
                if wanted and not yes and sys.stdin.isatty():
                    click.confirm("Repair it?", default=True, abort=True, err=True)
            kept = exchange() if wanted else None
    finally:
        lock.release()
    there = f"{counted(found.entries, 'instant')} of the journal, {counted(found.jobs, 'job')}"
    if as_json:
        counts = {"entries": found.entries, "jobs": found.jobs, "next_job": found.next_job}
        backup = None if kept is None else str(kept)
        print_json({"state": str(folder), "problems": found.problems, "backup": backup, **counts})
    elif kept is not None:
        click.echo(f"kept: {there}; the files as they were found: {kept}")
        click.echo(f"repaired: the next job is number {found.next_job:,}; start the service, and look at `poise queue`")
    elif not found.problems:
        click.echo(f"nothing to repair: {there}")
    return 1 if found.problems and kept is None else 0
