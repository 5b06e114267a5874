"""`poise replay`: re-drive the core from a journal."""

import json
from pathlib import Path

import click

from poise.assembly import replay_journal
from poise.model.units import counted

EPILOG = """\b
Example:
  poise simulate synthetic:jobs=500 --policy srtf --out run1 && poise replay run1
  poise replay ~/.local/state/poise
"""


@click.command(epilog=EPILOG)
@click.argument("journal", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def replay(journal: Path, as_json: bool) -> None:
    """Hand the facts of JOURNAL (a file, a directory that --out wrote, or a service's state) to the core again.

    Every action must come out as it was written; the first that does not ends the replay with exit code 1.
    """
    from poise.server.replaying import replay_store, store_of

    store = store_of(journal)
    header, replayed, missing = (*replay_journal(journal), ()) if store is None else replay_store(store)
    if as_json:
        counts = {"instants": replayed.instants, "events": replayed.events, "actions": replayed.actions}
        found = {"journal": str(journal), "policy": header.policy, **counts, "exact": True}
        click.echo(json.dumps(found | ({} if store is None else {"missing": list(missing)})))
    else:
        click.echo(
            f"{journal}: {header.policy}: all {counted(replayed.actions, 'action')} of {counted(replayed.events, 'event')} "
            f"at {counted(replayed.instants, 'instant')} came out the same"
        )
        for each in missing:
            click.echo(f"poise: {journal}: {each}", err=True)
