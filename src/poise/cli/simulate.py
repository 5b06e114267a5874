"""`poise simulate`: one policy over a trace. `poise replay`: the core run again from a journal."""

import csv
import json
from math import isfinite
from pathlib import Path
from typing import Any

import click
from rich.box import SIMPLE
from rich.table import Table as RichTable

from poise.cli import INTERRUPTED
from poise.cli.experiment import experiment_options, read_experiment
from poise.cli.options import FILE, FOLDER, force_option, json_option, print_json
from poise.cli.output import (
    COLUMNS,
    OutputKind,
    check_file,
    check_folder,
    console,
    make_folder,
    show_notes,
    watching,
)
from poise.engine.assembly import replay_journal
from poise.engine.journal import NAME
from poise.lab.analysis.summary import Summary
from poise.lab.experiment import SimulationResult
from poise.lab.experiment import simulate as run_simulation
from poise.lab.report.comparison import cell
from poise.lab.traces.synthetic import HELP, KNOBS, SYNTHETIC
from poise.scheduler.model.errors import RequestError
from poise.scheduler.model.units import counted

SHOWN = 3
"""Rejections and remarks that are shown; the others are counted."""
_ROWS = (
    ("jobs", "jobs"), ("finished", "finished"), ("failed", "failed"), ("cancelled", "cancelled"), ("rejected", "rejected"),
    ("unfinished", "unfinished"), ("average JCT", "avg_jct"), ("median JCT", "median_jct"), ("p99 JCT", "p99_jct"),
    ("makespan", "makespan"), ("GPUs in use", "utilisation"), ("GPU-hours", "gpu_hours"), ("preemptions", "preemptions"),
    ("migrations", "migrations"), ("restarts", "restarts"), ("worst ρ", "worst_rho"), ("mean ρ", "mean_rho"),
    ("unfair jobs", "unfair_fraction"), ("Jain's index", "jain"), ("decisions", "decisions"), ("CPU seconds", "cpu_seconds"),
)  # fmt: skip
"""Headings of the summary, and its fields."""
_ONLY_IF_ANY = {"failed", "cancelled", "rejected", "unfinished", "restarts"}

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
@click.option("--out", type=FOLDER, help="Write journal, summary and jobs to a directory.")
@click.option("--per-job", type=FILE, help="Write one row a job: .csv or .json.")
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
    quiet = options["quiet"]
    if per_job is not None and per_job.suffix not in (".csv", ".json"):
        raise RequestError(f"--per-job {per_job}: expected a file that ends in .csv or .json")
    replaced = check_folder("--out", out, force=force)
    request = read_experiment(trace, options, policy)
    make_folder("--out", out)
    kind = OutputKind.ROWS_JSON if per_job is not None and per_job.suffix == ".json" else OutputKind.ROWS_CSV
    replaced += check_file("--per-job", per_job, kind, force=force)  # it may lie in the folder that was just made
    show_notes([*request.notes, *replaced], quiet=quiet)
    journal = None if out is None else out / NAME
    with watching(policy, len(request.trace.jobs), quiet=quiet) as watch:
        outcome = run_simulation(request.trace, request.experiment, journal=journal, watch=watch)
    show_notes(_notes_after(outcome), quiet=quiet)
    if out is not None:
        # CPU times stay out of the directory, so that equal runs leave equal bytes.
        summary = json.dumps(outcome.summary.repeatable(), indent=1, allow_nan=False)
        (out / "summary.json").write_text(summary + "\n", encoding="utf-8")
        write_per_job(out / "jobs.csv", outcome)
    if per_job is not None:
        write_per_job(per_job, outcome)
    if request.as_json:
        print_json(outcome.summary.document())
    else:
        show_summary(outcome.summary)
    if outcome.summary.partial:
        click.echo("poise: interrupted; these results are partial", err=True)
        return INTERRUPTED
    return 0


def _notes_after(outcome: SimulationResult) -> list[str]:
    """Jobs that can never run here, remarks of the policy (the first few of each), and jobs that are in no mean."""
    rejections, remarks, summary = outcome.history.rejections, outcome.history.remarks, outcome.summary
    notes = [f"job {job!r} was rejected: it {reason}" for job, reason in rejections[:SHOWN]]
    if len(rejections) > SHOWN:
        notes.append(f"and {counted(len(rejections) - SHOWN, 'more rejection')}; --per-job lists them")
    notes += [f"at {time:g} s: {text}" for time, text in remarks[:SHOWN]]
    if len(remarks) > SHOWN:
        notes.append(f"and {counted(len(remarks) - SHOWN, 'more remark')}; --out DIR writes them into the journal")
    if summary.unfinished and not summary.partial:
        notes.append(f"{counted(summary.unfinished, 'job')} had not ended when the run did; means leave them out")
    return notes


def show_summary(summary: Summary) -> None:
    """Print the summary of a run, one number per row."""
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


def per_job_rows(outcome: SimulationResult) -> list[dict[str, object]]:
    """One row for each job of the trace in order of submission; what never happened is None."""
    ends = {life.id: place for place, life in enumerate(outcome.measured.jobs)}
    found: list[dict[str, object]] = []
    for life in outcome.history.jobs.values():
        place = ends.get(life.id)
        has_ended = place is not None
        jct = float(outcome.measured.jcts[place]) if has_ended else None
        rho = float(outcome.measured.rhos[place]) if has_ended else None
        values = (
            life.id, life.tenant, life.gpus, life.submitted, _finite(life.started), life.ended if has_ended else None,
            jct, _finite(rho), life.preemptions, life.gpu_seconds, *life.waited, life.status.name.lower(),
        )  # fmt: skip
        found.append(dict(zip(COLUMNS, values, strict=True)))
    return found


def _finite(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None


def write_per_job(path: Path, outcome: SimulationResult) -> None:
    """Write one row per job, as JSON or CSV by the ending of the file."""
    with path.open("w", encoding="utf-8", newline="") as stream:
        if path.suffix == ".json":
            json.dump(per_job_rows(outcome), stream, allow_nan=False, indent=1)
            return
        writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(per_job_rows(outcome))


def show_knobs(*, as_json: bool) -> None:
    """Print the parameters of the trace generator."""
    if as_json:
        print_json([knob._asdict() for knob in KNOBS])
        return
    click.echo("synthetic:KNOB=VALUE,... draws a trace. Knobs:\n")
    width = max(len(f"{knob.name}={knob.default}") for knob in KNOBS)
    for knob in KNOBS:
        click.echo(f"  {f'{knob.name}={knob.default}':{width}}  {knob.meaning}")


REPLAY_EPILOG = """\b
Example:
  poise simulate synthetic:jobs=500 --policy srtf --out run1 && poise replay run1
  poise replay ~/.local/state/poise
"""


@click.command(epilog=REPLAY_EPILOG)
@click.argument("journal", type=click.Path(path_type=Path))
@json_option
def replay(journal: Path, as_json: bool) -> None:
    """Hand the facts of JOURNAL to the core again: a file, a directory that --out wrote, or a service's state.

    Every action must come out as it was written; the first that does not ends the replay with exit code 1.
    """
    from poise.service.server.storage.replay import replay_store, store_of

    store = store_of(journal)
    header, replayed, missing = (*replay_journal(journal), ()) if store is None else replay_store(store)
    if as_json:
        counts = {"instants": replayed.instants, "events": replayed.events, "actions": replayed.actions}
        found = {"journal": str(journal), "policy": header.policy, **counts, "exact": True}
        print_json(found | ({} if store is None else {"missing": list(missing)}))
    else:
        click.echo(
            f"{journal}: {header.policy}: all {counted(replayed.actions, 'action')} of {counted(replayed.events, 'event')} "
            f"at {counted(replayed.instants, 'instant')} came out the same"
        )
        for each in missing:
            click.echo(f"poise: {journal}: {each}", err=True)
