"""Jobs, nodes and tenants of a live Poise as tables for people."""

import shlex

from poise.cli.live_asking import clock
from poise.report.amounts import amount
from poise.report.page import Table
from poise.wire.notes import NO_PRIORITIES
from poise.wire.plain import plain
from poise.wire.views import JobDetail, JobRow, Nodes, Run, Shares

QUEUE = ("#", "ID", "NAME", "TENANT", "GPUS", "TYPE", "STATE", "REASON", "WAITED", "RAN", "RESTARTS", "ETA", "SHARE")
WIDE = (*QUEUE, "APP", "ASKED", "SUBMITTED", "FINISHED", "WHY")
_WORDS = ("ID", "NAME", "TENANT", "TYPE", "STATE", "REASON", "APP", "ASKED", "SUBMITTED", "FINISHED", "WHY")
NONE = "–"
LEAST_HOURS = 0.001


def queue_table(rows: tuple[JobRow, ...]) -> Table:
    """A line a job."""
    return Table(QUEUE, tuple(map(_cells, rows)), names=3, words=_WORDS)


def wide_table(rows: tuple[JobRow, ...]) -> Table:
    """The same, with all that is known."""
    return Table(WIDE, tuple((*_cells(row), *_more_cells(row)) for row in rows), names=3, words=_WORDS)


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


def nodes_table(nodes: Nodes) -> Table:
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
    return Table(columns, rows, words=("NODE", "TYPE", "RACK", "STATE", "JOBS"))


def shares_table(shares: Shares) -> Table:
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
    return Table(columns, rows, words=("TENANT",))


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


def runs_table(runs: tuple[Run, ...]) -> Table:
    """A line a run."""
    columns = ("RUN", "BEGAN", "RAN", "GPUS", "ENDED", "EXIT", "STEPS", "LOST", "CAUSE")
    return Table(columns, tuple(map(_run_cells, runs)), words=("BEGAN", "GPUS", "ENDED", "CAUSE"))


def _run_cells(run: Run) -> tuple[str, ...]:
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
