"""`poise policies`: the catalogue."""

from dataclasses import asdict

import click
from rich.box import SIMPLE
from rich.table import Table as RichTable

from poise.cli.options import examples, json_option, print_json
from poise.cli.output import console, show_notes
from poise.cli.outside import find_policy
from poise.engine.outside import find_all
from poise.scheduler.policies.catalogue import COMBINATORS, Listing, known, listing_of


@click.command(epilog=examples("poise policies", "poise policies tiresias", "poise policies edf:POLICY"))
@click.argument("name", required=False)
@json_option
def policies(name: str | None, as_json: bool) -> None:
    """List the policies, or show one in full: NAME or MODULE:ATTRIBUTE. Those of plug-ins are in the list."""
    if name is None:
        show_notes(list(find_all()), quiet=False)
        chosen = list(known().values())
    else:
        find_policy(name)
        chosen = [listing_of(name)]
    if as_json:
        documents = [document(listing) for listing in chosen]
        print_json(documents if name is None else documents[0])
    elif name is None:
        _show_all()
    else:
        _show_one(chosen[0])


def document(listing: Listing) -> dict[str, object]:
    """A row of the catalogue as JSON."""
    fields = {name: getattr(listing, name) for name in ("name", "family", "summary", "paper", "url", "claims")}
    parameters = [
        {"name": parameter.name, "default": parameter.default, "meaning": parameter.meaning}
        for parameter in listing.parameters
    ]
    return {
        **fields,
        "parameters": parameters,
        "traits": asdict(listing.traits),
        "capabilities": sorted(listing.capabilities),
        "origin": listing.origin or None,
    }


def _show_all() -> None:
    shown = RichTable(box=SIMPLE)
    for heading in ("policy", "family", "what it does", "parameters"):
        shown.add_column(heading)
    for listing in known().values():
        parameters = " ".join(parameter.name for parameter in listing.parameters)
        origin = f" (from {listing.origin})" if listing.origin else ""
        shown.add_row(listing.name, listing.family, listing.summary + origin, parameters)
    for combinator in COMBINATORS.values():
        shown.add_row(f"+{combinator.name}", "combinator", combinator.summary, "")
    console().print(shown)


def _show_one(listing: Listing) -> None:
    click.echo(f"{listing.name} ({listing.family}): {listing.summary}")
    click.echo(f"from: {listing.paper}")
    if listing.url is not None:
        click.echo(f"url: {listing.url}")
    if listing.origin:
        click.echo(f"origin: {listing.origin}")
    for claim in listing.claims:
        click.echo(f"claims: {claim}")
    for name, words in asdict(listing.traits).items():
        click.echo(f"{name}: {words}")
    for capability in sorted(listing.capabilities):
        click.echo(f"capability: {capability}")
    for parameter in listing.parameters:
        click.echo(f"  {parameter.name}={parameter.default}  {parameter.meaning}")
