"""`poise nodes`: the nodes and who holds their GPUs."""

import click

from poise.cli.live_asking import connected, document, echo_json, json_option
from poise.cli.live_rows import nodes_table
from poise.cli.tables import show_table
from poise.model.units import counted

EPILOG = """\b
Example:
  poise nodes
"""


@click.command(epilog=EPILOG)
@json_option
def nodes(as_json: bool) -> None:
    """Show the nodes: their GPUs, how many are free, and the jobs that hold the others."""
    with connected() as client:
        found = client.nodes()
    if as_json:
        echo_json(document(found))
        return
    free, there = sum(each.free for each in found.nodes), sum(each.gpus for each in found.nodes)
    show_table(nodes_table(found), f"{counted(len(found.nodes), 'node')}, {counted(there, 'GPU')}, {free:,} free")
