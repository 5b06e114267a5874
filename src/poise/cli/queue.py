"""`poise queue`: the jobs, in scheduling order."""

import csv
import io
import sys
from dataclasses import dataclass
from time import sleep
from typing import Any

import click
import yaml

from poise.cli.live_asking import connected, document, echo_json, patiently_connected, until_stopped
from poise.cli.live_rows import queue_table, wide_table
from poise.cli.tables import show_table
from poise.client import Client
from poise.model.errors import RequestError, UnknownNameError
from poise.model.units import counted
from poise.wire.plain import plain
from poise.wire.views import JobRow, Queue, State

PAGE = 1_000
"""Rows that are asked for at once."""
EVERY = 2.0
"""Seconds between two looks of --watch."""
_ENDED = tuple(state for state in State if state.is_final)
_GROUPS = {"all": tuple(State), "ended": _ENDED}

EPILOG = """\b
Examples:
  poise queue
  poise queue --state paused,running --tenant vision -o wide
  poise queue --state ended --limit 10 --json
"""


@click.command(epilog=EPILOG)
@click.option(
    "--state", "states", multiple=True, metavar="STATE", help="Only these; `ended` and `all` are words for several."
)
@click.option("--tenant", help="Only this tenant's jobs.")
@click.option("--app", help="Only the jobs of this app.")
@click.option("--limit", type=click.IntRange(1), default=50, show_default=True, help="Rows.")
@click.option("--all", "everything", is_flag=True, help="All rows.")
@click.option("--watch", is_flag=True, help="Look again every two seconds, until Ctrl-C.")
@click.option(
    "-o", "form", type=click.Choice(["table", "wide", "json", "yaml", "csv"]), default="table", help="How to show it."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout: -o json.")
def queue(form: str, as_json: bool, watch: bool, everything: bool, limit: int, **asked: Any) -> int:  # noqa: ANN401
    """Show the jobs that have not ended, in scheduling order: those that hold GPUs, then those that wait.

    GPUS is how many it asks for; `2 (asked 1)`: it may run on any number, and holds 2 now. TYPE is the GPU type that it runs
    on, or those that it may. WAITED and RAN are in all. SHARE is its tenant's part of the GPUs that are held now. `poise why
    ID` says more than REASON.
    """
    form = "json" if as_json else form
    wanted = Wanted(_states(asked["states"]), asked["tenant"], asked["app"], None if everything else limit)
    if not watch:
        with connected() as client:
            show(_ask(client, wanted), form)
        return 0
    if form not in ("table", "wide"):
        raise RequestError(f"--watch draws tables; ask again and again for -o {form}")
    with patiently_connected() as client:
        return until_stopped(lambda: _watch(client, wanted, form))


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which jobs are asked for; rows: None for all."""

    states: tuple[State, ...]
    tenant: str | None
    app: str | None
    rows: int | None


def _watch(client: Client, wanted: Wanted, form: str) -> None:
    while True:
        found = _ask(client, wanted)
        click.clear()
        show(found, form)
        sleep(EVERY)


def _states(words: tuple[str, ...]) -> tuple[State, ...]:
    found: dict[State, None] = {}
    for word in (part.strip().lower() for each in words for part in each.split(",")):
        if word not in _GROUPS and word.upper() not in State.__members__:
            raise UnknownNameError("state", word, [*_GROUPS, *(state.lower() for state in State)])
        found |= dict.fromkeys(_GROUPS.get(word) or (State[word.upper()],))
    return tuple(found)


def _ask(client: Client, wanted: Wanted) -> Queue:
    """The rows, page by page."""
    found: list[JobRow] = []
    while True:
        size = PAGE if wanted.rows is None else min(PAGE, wanted.rows - len(found))
        page = client.queue(states=wanted.states, tenant=wanted.tenant, app=wanted.app, limit=size, offset=len(found))
        found += page.jobs
        if len(page.jobs) < size or len(found) in (page.total, wanted.rows):
            return page.model_copy(update={"jobs": tuple(found)})


def show(found: Queue, form: str) -> None:
    """The queue in one of its forms."""
    if form == "json":
        echo_json(document(found))
    elif form == "yaml":
        click.echo(yaml.safe_dump(document(found), sort_keys=False, allow_unicode=True), nl=False)
    elif form == "csv":
        click.echo(_csv(found, is_for_people=sys.stdout.isatty()), nl=False)
    elif not found.jobs:
        click.echo("no jobs")
    else:
        show_table(wide_table(found.jobs) if form == "wide" else queue_table(found.jobs), _title(found))
        if len(found.jobs) < found.total:
            click.echo(f"{len(found.jobs):,} of {found.total:,} jobs are shown; --all shows all", err=True)


def _title(found: Queue) -> str:
    counts = ", ".join(f"{count:,} {state.lower()}" for state in State if (count := found.counts.get(state, 0)))
    return counts or counted(found.total, "job")


def _csv(found: Queue, *, is_for_people: bool) -> str:
    """The columns of the JSON document; several words in a cell are joined by +."""
    out = io.StringIO()
    names = [name for name in JobRow.model_fields if name != "reason"]
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*names, "reason", "reason_text"])
    for row in document(found)["jobs"]:
        cells = ["+".join(cell) if isinstance(cell, list) else cell for cell in (row[name] for name in names)]
        text = row["reason"]["text"]
        writer.writerow([*cells, row["reason"]["code"], plain(text) if is_for_people else text])
    return out.getvalue()
