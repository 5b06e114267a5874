"""`poise use`: another policy for the running service."""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from poise.cli.live import clock, connected, document, echo_json, json_option
from poise.cli.output import show_table
from poise.cli.queue import NONE
from poise.lab.report.page import HtmlTable
from poise.scheduler.model.errors import RequestError
from poise.scheduler.model.units import counted
from poise.service.client import Client
from poise.service.client.config import state_folder
from poise.service.wire.views import Role, TokenList

if TYPE_CHECKING:
    from poise.service.server.storage.repair import RepairFindings

USE_EPILOG = """\b
Examples:
  poise use max-min
  poise use tiresias:limits=300/900,promote=8
"""


@click.command(epilog=USE_EPILOG)
@click.argument("policy")
@json_option
def use(policy: str, as_json: bool) -> None:
    """Go on under POLICY: NAME, NAME:key=value,..., NAME+COMBINATOR of `poise policies`.

    Jobs that run stay where they are until the policy decides otherwise.
    """
    with connected() as client:
        found = client.use(policy)
    if as_json:
        echo_json(document(found))
    else:
        click.echo(f"{found.policy} on {found.cluster}")


# `poise tokens`: who may use the running service.

ROLES = [role.value for role in Role]

TOKENS_EPILOG = """\b
Examples:
  poise tokens
  poise tokens --make ann --tenant vision --days 90
  poise tokens --revoke ann
"""


@click.command(epilog=TOKENS_EPILOG)
@click.option("--make", metavar="NAME", help="Make a token of this name, and show it this once.")
@click.option("--tenant", metavar="NAME", help="Whose jobs those are that it submits.  [default: its name]")
@click.option("--role", type=click.Choice(ROLES), help="What it may do.  [default: user]")
@click.option("--days", type=float, help="Until it expires.  [default: it does not]")
@click.option("--revoke", metavar="NAME", help="Make a token worthless from now on.")
@json_option
def tokens(
    make: str | None, tenant: str | None, role: str | None, days: float | None, revoke: str | None, as_json: bool
) -> None:
    """List the tokens of the running service, make one or revoke one. Only admins may."""
    if make is not None and revoke is not None:
        raise RequestError("--make and --revoke are two wishes; say one at a time")
    if make is None and (tenant, role, days) != (None, None, None):
        raise RequestError("--tenant, --role and --days describe a token that --make makes")
    with connected() as client:
        if make is not None:
            _make(client, make, tenant, Role(role or Role.USER), days, as_json=as_json)
        elif revoke is not None:
            _revoke(client, revoke, as_json=as_json)
        else:
            _list(client.tokens(), as_json=as_json)


def _make(client: Client, name: str, tenant: str | None, role: Role, days: float | None, *, as_json: bool) -> None:
    """The token alone is on standard output, so that it can go straight into a file."""
    made = client.make_token(name, tenant=tenant, role=role, days=days)
    if as_json:
        echo_json(document(made))
        return
    account = made.account
    until = "" if account.expires is None else f", until {clock(account.expires)}"
    whose = f"{name} is a {account.role} of tenant {account.tenant}"
    click.echo(f"poise: {whose}{until}; the token is shown this once", err=True)
    click.echo(made.token)


def _revoke(client: Client, name: str, *, as_json: bool) -> None:
    gone = client.drop_token(name)
    if as_json:
        echo_json(document(gone))
    else:
        click.echo(f"{gone.name} is revoked")


def _list(found: TokenList, *, as_json: bool) -> None:
    if as_json:
        echo_json(document(found))
        return
    rows = ((each.name, each.tenant, each.role.value, _until(each.expires)) for each in found.accounts)
    columns = ("NAME", "TENANT", "ROLE", "EXPIRES")
    show_table(HtmlTable(columns, tuple(rows), names=4, words=columns), counted(len(found.accounts), "token"))


def _until(expires: float | None) -> str:
    return NONE if expires is None else clock(expires)


# `poise repair`: a journal that was damaged, or lost its end, made one that the service can go on with.

REPAIR_EPILOG = """\b
Examples:
  poise repair --dry-run                what is wrong, if anything is; exit code 1 if something is
  poise repair /var/lib/poise/state
"""


@click.command(epilog=REPAIR_EPILOG)
@click.argument("state", type=click.Path(path_type=Path), required=False)
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="Say what is wrong, and change nothing.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
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
                _say(found.problems)
                if wanted and not yes and sys.stdin.isatty():
                    click.confirm("Repair it?", default=True, abort=True, err=True)
            kept = exchange() if wanted else None
    finally:
        lock.release()
    if as_json:
        counts = {"entries": found.entries, "jobs": found.jobs, "next_job": found.next_job}
        backup = None if kept is None else str(kept)
        click.echo(json.dumps({"state": str(folder), "problems": found.problems, "backup": backup, **counts}))
    elif kept is not None:
        click.echo(f"kept: {_counted(found)}; the files as they were found: {kept}")
        click.echo(f"repaired: the next job is number {found.next_job:,}; start the service, and look at `poise queue`")
    elif not found.problems:
        click.echo(f"nothing to repair: {_counted(found)}")
    return 1 if found.problems and kept is None else 0


def _counted(found: "RepairFindings") -> str:
    return f"{counted(found.entries, 'instant')} of the journal, {counted(found.jobs, 'job')}"


def _say(problems: list[str]) -> None:
    for each in problems:
        click.echo(each)
