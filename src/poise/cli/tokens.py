"""`poise tokens`: who may use the running service."""

import click

from poise.cli.live_asking import clock, connected, document, echo_json, json_option
from poise.cli.live_rows import NONE
from poise.cli.tables import show_table
from poise.client import Client
from poise.model.errors import RequestError
from poise.model.units import counted
from poise.report.page import Table
from poise.wire.views import Accounts, Role

ROLES = [role.value for role in Role]

EPILOG = """\b
Examples:
  poise tokens
  poise tokens --make ann --tenant vision --days 90
  poise tokens --revoke ann
"""


@click.command(epilog=EPILOG)
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


def _list(found: Accounts, *, as_json: bool) -> None:
    if as_json:
        echo_json(document(found))
        return
    rows = ((each.name, each.tenant, each.role.value, _until(each.expires)) for each in found.accounts)
    columns = ("NAME", "TENANT", "ROLE", "EXPIRES")
    show_table(Table(columns, tuple(rows), names=4, words=columns), counted(len(found.accounts), "token"))


def _until(expires: float | None) -> str:
    return NONE if expires is None else clock(expires)
