"""`poise use`: another policy for the running service."""

import click

from poise.cli.live_asking import connected, document, echo_json, json_option

EPILOG = """\b
Examples:
  poise use max-min
  poise use tiresias:limits=300/900,promote=8
"""


@click.command(epilog=EPILOG)
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
