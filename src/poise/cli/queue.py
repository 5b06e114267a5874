"""`poise queue`: the jobs, in scheduling order."""

import csv
import io
import shlex
import sys
from dataclasses import dataclass
from time import sleep
from typing import Any

import click
import yaml

from poise.cli.live import clock, connected, document, echo_json, json_option, knowing, patiently_connected, until_stopped
from poise.cli.output import show_table
from poise.lab.report.axes import amount
from poise.lab.report.page import HtmlTable
from poise.scheduler.model.errors import RequestError, UnknownNameError
from poise.scheduler.model.units import counted
from poise.service.client import Client
from poise.service.wire.request import NO_PRIORITIES, plain
from poise.service.wire.views import JobDetail, JobRow, JobState, NodeList, QueuePage, RunView, Shares

# Jobs, nodes and tenants of a live Poise as tables for people.

QUEUE = ("#", "ID", "NAME", "TENANT", "GPUS", "TYPE", "STATE", "REASON", "WAITED", "RAN", "RESTARTS", "ETA", "SHARE")
WIDE = (*QUEUE, "APP", "ASKED", "SUBMITTED", "FINISHED", "WHY")
_WORDS = ("ID", "NAME", "TENANT", "TYPE", "STATE", "REASON", "APP", "ASKED", "SUBMITTED", "FINISHED", "WHY")
NONE = "–"
LEAST_HOURS = 0.001


def queue_table(rows: tuple[JobRow, ...]) -> HtmlTable:
    """A line a job."""
    return HtmlTable(QUEUE, tuple(map(_cells, rows)), names=3, words=_WORDS)


def wide_table(rows: tuple[JobRow, ...]) -> HtmlTable:
    """The same, with all that is known."""
    return HtmlTable(WIDE, tuple((*_cells(row), *_more_cells(row)) for row in rows), names=3, words=_WORDS)


def state_of(row: JobRow) -> str:
    """Its state and its flags in one word: `PAUSED+PREEMPTED`."""
    return "+".join([row.state, *row.flags])


def span(seconds: float | None) -> str:
    """A span of time for people."""
    return NONE if seconds is None else amount(seconds, "seconds")


def _cells(row: JobRow) -> tuple[str, ...]:
    return (
        NONE if row.position is None else f"{row.position:,}",
        row.id,
        row.name,
        row.tenant,
        _gpus(row),
        row.gpu_type or _asked(row),
        state_of(row),
        row.reason.code,
        span(row.waited),
        span(row.ran),
        f"{row.restarts:,}",
        span(row.eta),
        NONE if row.share is None else amount(row.share, "percent"),
    )


def _gpus(row: JobRow) -> str:
    """How many GPUs a job asks for. One that may run on any number, and has another one now, has both said."""
    return f"{row.gpus:,} (asked {row.wanted:,})" if row.gpus and row.gpus != row.wanted else f"{row.wanted:,}"


def _more_cells(row: JobRow) -> tuple[str, ...]:
    finished = NONE if row.finished is None else clock(row.finished)
    return (row.app or NONE, _asked(row), clock(row.submitted), finished, plain(row.reason.text))


def _asked(row: JobRow) -> str:
    return "/".join(row.gpu_types) or "any"


def nodes_table(nodes: NodeList) -> HtmlTable:
    """A line a node; jobs by slot, each once."""
    rows = tuple(
        (
            each.name,
            each.gpu_type,
            f"{each.gpus:,}",
            f"{each.free:,}",
            each.rack,
            "up" if each.alive else "down",
            " ".join(dict.fromkeys((*filter(None, each.jobs), *(f"({job} leaves)" for job in filter(None, each.leaving)))))
            or NONE,
        )
        for each in nodes.nodes
    )
    columns = ("NODE", "TYPE", "GPUS", "FREE", "RACK", "STATE", "JOBS")
    return HtmlTable(columns, rows, words=("NODE", "TYPE", "RACK", "STATE", "JOBS"))


def shares_table(shares: Shares) -> HtmlTable:
    """A line a tenant."""
    columns = ("TENANT", "WEIGHT", "ENTITLED", "HELD", "GPUS", "RUNNING", "WAITING", "GPU-HOURS", "PREEMPTIONS")
    rows = tuple(
        (
            each.tenant,
            amount(each.weight, "plain"),
            NONE if each.entitled is None else amount(each.entitled, "percent"),
            amount(each.held, "percent"),
            f"{each.gpus:,}",
            f"{each.running:,}",
            f"{each.waiting:,}",
            _hours(each.gpu_seconds),
            f"{each.preemptions:,}",
        )
        for each in shares.tenants
    )
    return HtmlTable(columns, rows, words=("TENANT",))


def facts(detail: JobDetail) -> list[tuple[str, str]]:
    """What there is to say of a job, with a heading each; what is not known is left out."""
    row = detail.job
    found = [
        ("state", state_of(row)),
        ("reason", f"{row.reason.text} ({row.reason.code})"),
        ("tenant", row.tenant),
        ("app", row.app),
        ("GPUs", f"{row.gpus:,} held, {row.wanted:,} asked for; type {row.gpu_type or _asked(row)}"),
        ("submitted", clock(row.submitted)),
        ("started", None if row.started is None else clock(row.started)),
        ("finished", None if row.finished is None else clock(row.finished)),
        ("waited", span(row.waited)),
        ("ran", span(row.ran)),
        ("steps", _steps(detail)),
        ("checkpoint", None if detail.checkpoint_steps is None else f"at step {amount(detail.checkpoint_steps, 'plain')}"),
        ("throughput", None if detail.throughput is None else f"{amount(detail.throughput, 'plain')} steps/s"),
        ("loss", None if detail.loss is None else amount(detail.loss, "plain")),
        ("GPU-hours", _hours(detail.gpu_seconds)),
        ("lost GPU-hours", _hours(detail.lost_gpu_seconds) if detail.lost_gpu_seconds else None),
        ("preemptions", f"{detail.preemptions:,}" if detail.preemptions else None),
        ("failures", f"{detail.failures:,}" if detail.failures else None),
        ("cause", detail.cause),
        ("command", None if detail.request is None else shlex.join(detail.request.command)),
        ("folder", None if detail.request is None else detail.request.cwd),
        ("virtual env", None if detail.request is None else detail.request.venv),
        ("priority", _priority(detail)),
    ]
    return [(heading, plain(text)) for heading, text in found if text is not None]


def _priority(detail: JobDetail) -> str | None:
    """What its owner gave it, which comes to nothing yet."""
    if detail.request is None or not detail.request.priority:
        return None
    return f"{detail.request.priority}, without effect: {NO_PRIORITIES}"


def _hours(seconds: float) -> str:
    """GPU-hours; what is next to nothing is no number to read."""
    hours = seconds / 3600
    return f"<{LEAST_HOURS}" if 0 < hours < LEAST_HOURS else amount(hours, "plain")


def _steps(detail: JobDetail) -> str | None:
    """How far it is; None: it says nothing of that, as a script that knows nothing of Poise."""
    reports = detail.steps or detail.checkpoint_steps is not None or detail.throughput is not None
    done = amount(detail.steps, "plain") if reports else None
    if detail.total_steps is not None:
        return f"{done or NONE} of {amount(detail.total_steps, 'plain')}"
    return done


def runs_table(runs: tuple[RunView, ...]) -> HtmlTable:
    """A line a run."""
    columns = ("RUN", "BEGAN", "RAN", "GPUS", "ENDED", "EXIT", "STEPS", "LOST", "CAUSE")
    return HtmlTable(columns, tuple(map(_run_cells, runs)), words=("BEGAN", "GPUS", "ENDED", "CAUSE"))


def _run_cells(run: RunView) -> tuple[str, ...]:
    kept = NONE if run.kept is None else f"{amount(run.begun, 'plain')}..{amount(run.kept, 'plain')}"
    return (
        str(run.epoch),
        clock(run.started),
        NONE if run.ended is None else span(run.ended - run.started),
        " ".join(f"{node}:{'/'.join(map(str, slots))}" for node, slots in run.gpus.items()) or NONE,
        run.how or NONE,
        " ".join(NONE if code is None else str(code) for code in run.codes) or NONE,
        kept,
        NONE if run.lost is None else f"{span(run.lost)}",
        plain(run.cause or NONE),
    )


PAGE = 1_000
"""Rows that are asked for at once."""
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
    wanted = QueueFilter(_states(asked["states"]), asked["tenant"], asked["app"], None if everything else limit)
    if not watch:
        with connected() as client:
            show_queue(_ask(client, wanted), form)
        return 0
    if form not in ("table", "wide"):
        raise RequestError(f"--watch draws tables; ask again and again for -o {form}")
    with patiently_connected() as client:
        return until_stopped(lambda: _watch(client, wanted, form))


@dataclass(frozen=True, slots=True)
class QueueFilter:
    """Which jobs are asked for; rows: None for all."""

    states: tuple[JobState, ...]
    tenant: str | None
    app: str | None
    rows: int | None


def _watch(client: Client, wanted: QueueFilter, form: str) -> None:
    while True:
        found = _ask(client, wanted)
        click.clear()
        show_queue(found, form)
        sleep(EVERY)


def _states(words: tuple[str, ...]) -> tuple[JobState, ...]:
    found: dict[JobState, None] = {}
    for word in (part.strip().lower() for each in words for part in each.split(",")):
        if word not in _GROUPS and word.upper() not in JobState.__members__:
            raise UnknownNameError("state", word, [*_GROUPS, *(state.lower() for state in JobState)])
        found |= dict.fromkeys(_GROUPS.get(word) or (JobState[word.upper()],))
    return tuple(found)


def _ask(client: Client, wanted: QueueFilter) -> QueuePage:
    """The rows, page by page."""
    found: list[JobRow] = []
    while True:
        size = PAGE if wanted.rows is None else min(PAGE, wanted.rows - len(found))
        page = client.queue(states=wanted.states, tenant=wanted.tenant, app=wanted.app, limit=size, offset=len(found))
        found += page.jobs
        if len(page.jobs) < size or len(found) in (page.total, wanted.rows):
            return page.model_copy(update={"jobs": tuple(found)})


def show_queue(found: QueuePage, form: str) -> None:
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


def _title(found: QueuePage) -> str:
    counts = ", ".join(f"{count:,} {state.lower()}" for state in JobState if (count := found.counts.get(state, 0)))
    return counts or counted(found.total, "job")


def _csv(found: QueuePage, *, is_for_people: bool) -> str:
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


# `poise show`: everything about a job.

SHOW_EPILOG = """\b
Example:
  poise show 17
"""


@click.command(epilog=SHOW_EPILOG)
@click.argument("job")
@json_option
def show(job: str, as_json: bool) -> None:
    """Show everything about JOB: its state, its progress and its runs."""
    with connected() as client, knowing(client, job):
        detail = client.show(job)
    if as_json:
        echo_json(document(detail))
    else:
        _show(detail)


def _show(detail: JobDetail) -> None:
    click.echo(detail.job.id if detail.job.name == detail.job.id else f"{detail.job.id} {detail.job.name}")
    found = facts(detail)
    width = max(len(heading) for heading, _ in found)
    for heading, text in found:
        click.echo(f"  {heading:{width}}  {text}")
    if detail.runs:
        click.echo()
        cut = detail.runs[0].epoch > 1
        show_table(
            runs_table(detail.runs), f"Runs, the last {len(detail.runs)} of {detail.runs[-1].epoch}" if cut else "Runs"
        )


# `poise why`: why a job runs, waits or has ended.

WHY_EPILOG = """\b
Example:
  poise why 17
"""


@click.command(epilog=WHY_EPILOG)
@click.argument("job")
@json_option
def why(job: str, as_json: bool) -> None:
    """Say why JOB runs, waits or has ended: one reason, the evidence, and what would help."""
    with connected() as client, knowing(client, job):
        found = client.why(job)
    if as_json:
        echo_json(document(found))
        return
    click.echo(plain(f"{found.job} {found.state}: {found.reason.text} ({found.reason.code})"))
    for each in found.evidence:
        click.echo(f"  {plain(each)}")
    if found.advice:
        is_idle = found.advice.startswith("Nothing to do")
        click.echo(plain(found.advice) if is_idle else f"What would help: {plain(found.advice)}")


# `poise nodes`: the nodes and who holds their GPUs.

NODES_EPILOG = """\b
Example:
  poise nodes
"""


@click.command(epilog=NODES_EPILOG)
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
