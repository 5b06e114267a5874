"""`poise queue`, `show` and `why`: what the running service knows about jobs.

The verbs come first, the tables that they print below.
"""

import csv
import io
import shlex
import sys
from time import sleep
from typing import Any

import click
import yaml

from poise.cli.live import (
    PAGE,
    answer,
    clock_time,
    connected,
    connected_for_long,
    document,
    state_of,
    suggesting,
    until_interrupted,
)
from poise.cli.options import examples, json_flag, json_option, print_json, with_options
from poise.cli.output import show_table
from poise.lab.report.axes import amount
from poise.lab.report.page import HtmlTable
from poise.scheduler.model.errors import RequestError, UnknownNameError, plain
from poise.scheduler.model.units import counted
from poise.service.client import Client
from poise.service.wire.request import LONE_PROCESS, NO_PRIORITIES, is_lone_process
from poise.service.wire.views import JobDetail, JobRow, JobState, QueuePage, RunView, WhyView

EVERY = 2.0
"""Seconds between two looks of --watch."""
_ENDED = tuple(state for state in JobState if state.is_final)
_GROUPS = {"all": tuple(JobState), "ended": _ENDED}

EPILOG = """\b
Examples:
  poise queue
  poise queue --state paused,running --tenant vision -o wide
  poise queue --state ended --limit 10 --json
"""


_QUEUE_OPTIONS = (
    click.option("--state", "states", multiple=True, metavar="STATE",
        help="Only these; `ended` and `all` are words for several."),
    click.option("--tenant", help="Only this tenant's jobs."),
    click.option("--app", help="Only the jobs of this app."),
    click.option("--limit", type=click.IntRange(1), default=50, show_default=True, help="Rows."),
    click.option("--all", "everything", is_flag=True, help="All rows."),
    click.option("--watch", is_flag=True, help="Look again every two seconds, until Ctrl-C."),
    click.option("-o", "form", type=click.Choice(["table", "wide", "json", "yaml", "csv"]), default="table",
        help="How to show it."),
    json_flag("One JSON document on stdout: -o json."),
)  # fmt: skip


@click.command(epilog=EPILOG)
@with_options(_QUEUE_OPTIONS)
def queue(form: str, as_json: bool, watch: bool, everything: bool, limit: int, **asked: Any) -> int:  # noqa: ANN401
    """Show the jobs that have not ended, in scheduling order: those that hold GPUs, then those that wait.

    GPUS is how many it asks for; `2 (asked 1)`: it may run on any number, and holds 2 now. TYPE is the GPU type that it runs
    on, or those that it may. WAITED and RAN are in all. SHARE is its tenant's part of the GPUs that are held now. `poise why
    ID` says more than REASON.
    """
    form = "json" if as_json else form
    states = _states(asked.pop("states"))
    rows = None if everything else limit
    if not watch:
        with connected() as client:
            show_queue(_ask(client, rows, states=states, **asked), form)
        return 0
    if form not in ("table", "wide"):
        raise RequestError(f"--watch draws tables; ask again and again for -o {form}")

    def draw_forever() -> None:
        while True:
            found = _ask(client, rows, states=states, **asked)
            click.clear()
            show_queue(found, form)
            sleep(EVERY)

    with connected_for_long() as client:
        return until_interrupted(draw_forever)


def _states(words: tuple[str, ...]) -> tuple[JobState, ...]:
    found: dict[JobState, None] = {}
    for word in (part.strip().lower() for each in words for part in each.split(",")):
        if word not in _GROUPS and word.upper() not in JobState.__members__:
            raise UnknownNameError("state", word, [*_GROUPS, *(state.lower() for state in JobState)])
        found |= dict.fromkeys(_GROUPS.get(word) or (JobState[word.upper()],))
    return tuple(found)


def _ask(client: Client, most: int | None, **asked: Any) -> QueuePage:  # noqa: ANN401 - as Client.queue takes it
    """The matching jobs, page by page; most: None for all."""
    found: list[JobRow] = []
    while True:
        size = PAGE if most is None else min(PAGE, most - len(found))
        page = client.queue(**asked, limit=size, offset=len(found))
        found += page.jobs
        if len(page.jobs) < size or len(found) in (page.total, most):
            return page.model_copy(update={"jobs": tuple(found)})


def show_queue(found: QueuePage, form: str) -> None:
    """Print the queue in one of its forms."""
    if form == "json":
        print_json(document(found))
    elif form == "yaml":
        click.echo(yaml.safe_dump(document(found), sort_keys=False, allow_unicode=True), nl=False)
    elif form == "csv":
        click.echo(_csv(found, is_for_people=sys.stdout.isatty()), nl=False)
    elif not found.jobs:
        click.echo("no jobs")
    else:
        counts = ", ".join(f"{count:,} {state.lower()}" for state in JobState if (count := found.counts.get(state, 0)))
        table = wide_table(found.jobs) if form == "wide" else queue_table(found.jobs)
        show_table(table, counts or counted(found.total, "job"))
        if len(found.jobs) < found.total:
            click.echo(f"{len(found.jobs):,} of {found.total:,} jobs are shown; --all shows all", err=True)


def _csv(found: QueuePage, *, is_for_people: bool) -> str:
    """The fields of the JSON document as columns; several words in a cell are joined by +."""
    out = io.StringIO()
    names = [name for name in JobRow.model_fields if name != "reason"]
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*names, "reason", "reason_text"])
    for row in document(found)["jobs"]:
        cells = ["+".join(cell) if isinstance(cell, list) else cell for cell in (row[name] for name in names)]
        text = row["reason"]["text"]
        writer.writerow([*cells, row["reason"]["code"], plain(text) if is_for_people else text])
    return out.getvalue()


@click.command(epilog=examples("poise show 17"))
@click.argument("job")
@json_option
def show(job: str, as_json: bool) -> None:
    """Show everything about JOB: its state, its progress and its runs."""
    with connected() as client, suggesting(client, job):
        answer(client.show(job), _show_job, as_json=as_json)


def _show_job(detail: JobDetail) -> None:
    click.echo(detail.job.id if detail.job.name == detail.job.id else f"{detail.job.id} {detail.job.name}")
    found = facts(detail)
    width = max(len(heading) for heading, _ in found)
    for heading, text in found:
        click.echo(f"  {heading:{width}}  {text}")
    if detail.runs:
        click.echo()
        is_cut = detail.runs[0].epoch > 1
        title = f"Runs, the last {len(detail.runs)} of {detail.runs[-1].epoch}" if is_cut else "Runs"
        show_table(runs_table(detail.runs), title)


@click.command(epilog=examples("poise why 17"))
@click.argument("job")
@json_option
def why(job: str, as_json: bool) -> None:
    """Say why JOB runs, waits or has ended: one reason, the evidence, and what would help."""
    with connected() as client, suggesting(client, job):
        answer(client.why(job), _show_why, as_json=as_json)


def _show_why(found: WhyView) -> None:
    click.echo(plain(f"{found.job} {found.state}: {found.reason.text} ({found.reason.code})"))
    for each in found.evidence:
        click.echo(f"  {plain(each)}")
    if found.advice:
        is_idle = found.advice.startswith("Nothing to do")
        click.echo(plain(found.advice) if is_idle else f"What would help: {plain(found.advice)}")


# Tables

QUEUE = ("#", "ID", "NAME", "TENANT", "GPUS", "TYPE", "STATE", "REASON", "WAITED", "RAN", "RESTARTS", "ETA", "SHARE")
WIDE = (*QUEUE, "APP", "ASKED", "SUBMITTED", "FINISHED", "WHY")
_WORDS = ("ID", "NAME", "TENANT", "TYPE", "STATE", "REASON", "APP", "ASKED", "SUBMITTED", "FINISHED", "WHY")
NONE = "–"


def queue_table(rows: tuple[JobRow, ...]) -> HtmlTable:
    """The queue, one row per job."""
    return HtmlTable(QUEUE, tuple(map(_cells, rows)), names=3, words=_WORDS)


def wide_table(rows: tuple[JobRow, ...]) -> HtmlTable:
    """The same with all columns."""
    cells = (
        (
            *_cells(row), row.app or NONE, _asked(row), clock_time(row.submitted), _clock(row.finished) or NONE,
            plain(row.reason.text),
        )
        for row in rows
    )  # fmt: skip
    return HtmlTable(WIDE, tuple(cells), names=3, words=_WORDS)


def span(seconds: float | None) -> str:
    """A duration for people."""
    return NONE if seconds is None else amount(seconds, "seconds")


def _cells(row: JobRow) -> tuple[str, ...]:
    # A job that may run on any number of GPUs, and now holds another one than it asked for, shows both.
    is_resized = row.gpus and row.gpus != row.wanted
    gpus = f"{row.gpus:,} (asked {row.wanted:,})" if is_resized else f"{row.wanted:,}"
    return (
        NONE if row.position is None else f"{row.position:,}", row.id, row.name, row.tenant, gpus,
        row.gpu_type or _asked(row), state_of(row), row.reason.code, span(row.waited), span(row.ran),
        f"{row.restarts:,}", span(row.eta), NONE if row.share is None else amount(row.share, "percent"),
    )  # fmt: skip


def _clock(timestamp: float | None) -> str | None:
    return None if timestamp is None else clock_time(timestamp)


def _asked(row: JobRow) -> str:
    return "/".join(row.gpu_types) or "any"


def facts(detail: JobDetail) -> list[tuple[str, str]]:
    """Headings and texts about a job; what is not known is left out."""
    row, request = detail.job, detail.request
    found = [
        ("state", state_of(row)),
        ("reason", f"{row.reason.text} ({row.reason.code})"),
        ("tenant", row.tenant),
        ("app", row.app),
        ("GPUs", f"{row.gpus:,} held, {row.wanted:,} asked for; type {row.gpu_type or _asked(row)}"),
        ("submitted", clock_time(row.submitted)),
        ("started", _clock(row.started)),
        ("finished", _clock(row.finished)),
        ("waited", span(row.waited)),
        ("ran", span(row.ran)),
        ("steps", _steps(detail)),
        ("checkpoint", None if detail.checkpoint_steps is None else f"at step {amount(detail.checkpoint_steps, 'plain')}"),
        ("throughput", None if detail.throughput is None else f"{amount(detail.throughput, 'plain')} steps/s"),
        ("loss", None if detail.loss is None else amount(detail.loss, "plain")),
        ("GPU-hours", gpu_hours(detail.gpu_seconds)),
        ("lost GPU-hours", gpu_hours(detail.lost_gpu_seconds) if detail.lost_gpu_seconds else None),
        ("preemptions", f"{detail.preemptions:,}" if detail.preemptions else None),
        ("failures", f"{detail.failures:,}" if detail.failures else None),
        ("cause", detail.cause),
        ("after", None if request is None else ", ".join(request.after) or None),
        ("begins", None if request is None or row.started is not None else _clock(request.begin)),
        ("finish by", None if request is None else _clock(request.deadline)),
        ("at once", None if request is None or request.array_cap is None else f"{request.array_cap:,} of its array"),
        ("command", None if request is None else shlex.join(request.command)),
        ("folder", None if request is None else request.cwd),
        ("virtual env", None if request is None else request.venv),
        ("replicas", LONE_PROCESS if request and is_lone_process(request) else None),
        ("priority", f"{request.priority}; {NO_PRIORITIES}" if request and request.priority else None),
    ]
    return [(heading, plain(text)) for heading, text in found if text is not None]


def gpu_hours(seconds: float) -> str:
    """GPU-hours for people, from GPU-seconds."""
    hours = seconds / 3600
    return "<0.001" if 0 < hours < 0.001 else amount(hours, "plain")


def _steps(detail: JobDetail) -> str | None:
    """The progress of a job; None: it reports none, as a script that does not use poise.worker."""
    reports = detail.steps or detail.checkpoint_steps is not None or detail.throughput is not None
    done = amount(detail.steps, "plain") if reports else None
    if detail.total_steps is not None:
        return f"{done or NONE} of {amount(detail.total_steps, 'plain')}"
    return done


def runs_table(runs: tuple[RunView, ...]) -> HtmlTable:
    """One row per run."""
    columns = ("RUN", "BEGAN", "RAN", "GPUS", "ENDED", "EXIT", "STEPS", "LOST", "CAUSE")
    rows = tuple(
        (
            str(run.epoch),
            clock_time(run.started),
            NONE if run.ended is None else span(run.ended - run.started),
            " ".join(f"{node}:{'/'.join(map(str, slots))}" for node, slots in run.gpus.items()) or NONE,
            run.how or NONE,
            " ".join(NONE if code is None else str(code) for code in run.codes) or NONE,
            NONE if run.kept is None else f"{amount(run.begun, 'plain')}..{amount(run.kept, 'plain')}",
            span(run.lost),
            plain(run.cause or NONE),
        )
        for run in runs
    )
    return HtmlTable(columns, rows, words=("BEGAN", "GPUS", "ENDED", "CAUSE"))
