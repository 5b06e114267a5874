"""`poise repair`: a journal that was damaged, or lost its end, made one that the service can go on with."""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from poise.client.config import state_folder
from poise.model.units import counted

if TYPE_CHECKING:
    from poise.server.repairing import Examined

EPILOG = """\b
Examples:
  poise repair --dry-run                what is wrong, if anything is; exit code 1 if something is
  poise repair /var/lib/poise/state
"""


@click.command(epilog=EPILOG)
@click.argument("state", type=click.Path(path_type=Path), required=False)
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="Say what is wrong, and change nothing.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def repair(state: Path | None, yes: bool, dry_run: bool, as_json: bool) -> int:
    """Mend the journal in STATE, the state directory of a service that does not run.  [default: ~/.local/state/poise]

    What can be read is kept; a job that cannot has failed; what was answered and is lost is named, and its numbers are not
    given out again. The files as they were found stay in STATE/backups.
    """
    from poise.server.folder import FolderLock, existing_folder
    from poise.server.repairing import examined

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


def _counted(found: "Examined") -> str:
    return f"{counted(found.entries, 'instant')} of the journal, {counted(found.jobs, 'job')}"


def _say(problems: list[str]) -> None:
    for each in problems:
        click.echo(each)
