"""`poise simulate`: one policy over a trace."""

import json
from pathlib import Path
from typing import Any

import click

from poise.assembly import Outcome
from poise.assembly import simulate as run_simulation
from poise.cli import INTERRUPTED
from poise.cli.options import Request, experiment_options, request_of
from poise.cli.outputs import check_ending, check_folder, check_rows, force_option, make_folder, over
from poise.cli.per_job import write_per_job
from poise.cli.progress import watching
from poise.cli.summaries import show_rejections, show_remarks, show_summary, show_unfinished
from poise.cli.tables import show_notes
from poise.engine.journal_file import NAME
from poise.traces.synthetic import HELP, KNOBS, SYNTHETIC

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


def _run(request: Request, out: Path | None) -> tuple[Outcome, bool]:
    journal = None if out is None else out / NAME
    with watching(request.experiment.policy, len(request.trace.jobs), quiet=request.quiet) as watch:
        outcome = run_simulation(request.trace, request.experiment, journal=journal, watch=watch)
    return outcome, outcome.summary.partial


def _write(outcome: Outcome, out: Path | None, per_job: Path | None) -> None:
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
