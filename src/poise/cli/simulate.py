"""`poise simulate`: one policy over a trace."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.box import SIMPLE
from rich.table import Table as RichTable

from poise.cli import INTERRUPTED
from poise.cli.options import ExperimentRequest, experiment_options, request_of
from poise.cli.output import (
    check_ending,
    check_folder,
    check_rows,
    console,
    force_option,
    make_folder,
    over,
    show_notes,
    watching,
    write_per_job,
)
from poise.engine.assembly import replay_journal
from poise.engine.journal import NAME
from poise.lab.analysis.summary import Summary
from poise.lab.experiment import SimulationResult
from poise.lab.experiment import simulate as run_simulation
from poise.lab.report.comparison import cell
from poise.lab.traces.synthetic import HELP, KNOBS, SYNTHETIC
from poise.scheduler.model.units import counted

# What a person is shown of one run.

_ROWS = (
    ("jobs", "jobs"),
    ("finished", "finished"),
    ("failed", "failed"),
    ("cancelled", "cancelled"),
    ("rejected", "rejected"),
    ("unfinished", "unfinished"),
    ("average JCT", "avg_jct"),
    ("median JCT", "median_jct"),
    ("p99 JCT", "p99_jct"),
    ("makespan", "makespan"),
    ("GPUs in use", "utilisation"),
    ("GPU-hours", "gpu_hours"),
    ("preemptions", "preemptions"),
    ("migrations", "migrations"),
    ("restarts", "restarts"),
    ("worst ρ", "worst_rho"),
    ("mean ρ", "mean_rho"),
    ("unfair jobs", "unfair_fraction"),
    ("Jain's index", "jain"),
    ("decisions", "decisions"),
    ("CPU seconds", "cpu_seconds"),
)
SHOWN = 3
"""Rejections that are told one by one."""

_ONLY_IF_ANY = {"failed", "cancelled", "rejected", "unfinished", "restarts"}


def show_summary(summary: Summary) -> None:
    """One run, a row a number."""
    click.echo(f"{summary.policy} on {summary.cluster}: {summary.trace}")
    table = RichTable(show_header=False, box=SIMPLE)
    table.add_column(style="bold")
    table.add_column(justify="right")
    for heading, key in _ROWS:
        if key not in _ONLY_IF_ANY or getattr(summary, key):
            table.add_row(heading, cell(summary, key))
    console().print(table)
    if summary.partial:
        click.echo("These results are partial: the run was interrupted.", err=True)


def show_unfinished(summary: Summary, *, quiet: bool) -> None:
    """Jobs that had not ended when the run did, and so are in no mean."""
    if summary.unfinished and not summary.partial:
        show_notes(
            [f"{counted(summary.unfinished, 'job')} had not ended when the run did; means leave them out"], quiet=quiet
        )


def show_rejections(rejections: Sequence[tuple[str, str]], *, quiet: bool) -> None:
    """Which jobs can never run here, and why; the first few of them."""
    notes = [f"job {job!r} was rejected: it {reason}" for job, reason in rejections[:SHOWN]]
    if len(rejections) > SHOWN:
        notes.append(f"and {counted(len(rejections) - SHOWN, 'more rejection')}; --per-job lists them")
    show_notes(notes, quiet=quiet)


def show_remarks(remarks: Sequence[tuple[float, str]], *, quiet: bool) -> None:
    """What the policy had to say of its decisions; the first few of them."""
    notes = [f"at {moment:g} s: {text}" for moment, text in remarks[:SHOWN]]
    if len(remarks) > SHOWN:
        notes.append(f"and {counted(len(remarks) - SHOWN, 'more remark')}; --out DIR writes them into the journal")
    show_notes(notes, quiet=quiet)


EPILOG = """\b
Examples:
  poise simulate synthetic:jobs=1000,seed=1 --cluster gpu:64@8 --policy srtf
  poise simulate jobs.jsonl --cluster v100:8,k80:16 --policy tiresias:limits=300/900 --json
  poise simulate synthetic:models=resnet50/vgg16 --cluster v100:8,k80:8 --policy max-min --estimate profiled:types=1
  poise simulate synthetic:help
"""


@click.command(epilog=EPILOG)
@click.argument("trace")
@click.option("--policy", default="fifo", show_default=True, help="NAME, NAME:key=value,..., NAME+COMBINATOR.")
@experiment_options
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), help="Write journal, summary and jobs to a directory."
)
@click.option("--per-job", type=click.Path(dir_okay=False, path_type=Path), help="Write one row a job: .csv or .json.")
@force_option
def simulate(
    trace: str,
    policy: str,
    out: Path | None,
    per_job: Path | None,
    force: bool,
    **options: Any,  # noqa: ANN401
) -> int:
    """Run TRACE under one policy and say how it went.

    TRACE is a file (plain, .gz, .xz, or a .tar.gz of several), a directory of such, - for stdin, or synthetic:KNOBS.
    """
    if trace == SYNTHETIC + HELP:
        show_knobs(as_json=options["as_json"])
        return 0
    allowed = over(force=force)
    check_ending(per_job)
    replaced = check_folder("--out", out, allowed)
    request = request_of(trace, options, policy)
    make_folder("--out", out)
    replaced += check_rows(per_job, allowed)  # it may lie in the folder that was just made
    show_notes([*request.notes, *replaced], quiet=request.quiet)
    outcome, interrupted = _run(request, out)
    show_rejections(outcome.history.rejections, quiet=request.quiet)
    show_remarks(outcome.history.remarks, quiet=request.quiet)
    show_unfinished(outcome.summary, quiet=request.quiet)
    _write(outcome, out, per_job)
    if request.as_json:
        click.echo(json.dumps(outcome.summary.document(), allow_nan=False))
    else:
        show_summary(outcome.summary)
    if interrupted:
        click.echo("poise: interrupted; these results are partial", err=True)
    return INTERRUPTED if interrupted else 0


def _run(request: ExperimentRequest, out: Path | None) -> tuple[SimulationResult, bool]:
    journal = None if out is None else out / NAME
    with watching(request.experiment.policy, len(request.trace.jobs), quiet=request.quiet) as watch:
        outcome = run_simulation(request.trace, request.experiment, journal=journal, watch=watch)
    return outcome, outcome.summary.partial


def _write(outcome: SimulationResult, out: Path | None, per_job: Path | None) -> None:
    """CPU times stay out of the directory, so that equal runs leave equal bytes."""
    if out is not None:
        summary = json.dumps(outcome.summary.repeatable(), indent=1, allow_nan=False)
        (out / "summary.json").write_text(summary + "\n", encoding="utf-8")
        write_per_job(out / "jobs.csv", outcome)
    if per_job is not None:
        write_per_job(per_job, outcome)


def show_knobs(*, as_json: bool) -> None:
    """The knobs of the generator."""
    if as_json:
        click.echo(json.dumps([knob._asdict() for knob in KNOBS]))
        return
    click.echo("synthetic:KNOB=VALUE,... draws a trace. Knobs:\n")
    width = max(len(f"{knob.name}={knob.default}") for knob in KNOBS)
    for knob in KNOBS:
        click.echo(f"  {f'{knob.name}={knob.default}':{width}}  {knob.meaning}")


# `poise replay`: re-drive the core from a journal.

REPLAY_EPILOG = """\b
Example:
  poise simulate synthetic:jobs=500 --policy srtf --out run1 && poise replay run1
  poise replay ~/.local/state/poise
"""


@click.command(epilog=REPLAY_EPILOG)
@click.argument("journal", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def replay(journal: Path, as_json: bool) -> None:
    """Hand the facts of JOURNAL (a file, a directory that --out wrote, or a service's state) to the core again.

    Every action must come out as it was written; the first that does not ends the replay with exit code 1.
    """
    from poise.service.server.storage.replay import replay_store, store_of

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
