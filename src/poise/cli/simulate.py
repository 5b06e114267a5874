"""`poise simulate`: one policy over a trace. `poise replay`: the core run again from a journal."""

from pathlib import Path
from typing import Any

import click
from rich.box import SIMPLE
from rich.table import Table as RichTable

from poise.cli import INTERRUPTED
from poise.cli.experiment import check_rows, check_rows_ending, experiment_options, per_job_option, read_experiment
from poise.cli.options import FILE, FOLDER, force_option, json_option, print_json
from poise.cli.output import console, show_notes, watching
from poise.cli.outside import find_policy
from poise.engine.assembly import replay_journal
from poise.engine.journal import NAME
from poise.lab.analysis.run_tables import per_job_table
from poise.lab.analysis.summary import Summary
from poise.lab.experiment import simulate as run_simulation
from poise.lab.output_files import OutputKind, check_file, check_folder, make_folder, write_run
from poise.lab.report.comparison import ComparedRun
from poise.lab.report.notes import run_notes
from poise.lab.report.simulation import simulation_page, summary_rows
from poise.lab.traces.synthetic import HELP, KNOBS, SYNTHETIC
from poise.scheduler.model.units import counted

EPILOG = """\b
Examples:
  poise simulate synthetic:jobs=1000,seed=1 --cluster gpu:64@8 --policy srtf
  poise simulate jobs.jsonl --cluster v100:8,k80:16 --policy tiresias:limits=300/900 --json
  poise simulate synthetic:models=resnet50/vgg16 --cluster v100:8,k80:8 --policy max-min --estimate profiled:types=1
  poise simulate synthetic:help
"""


@click.command(epilog=EPILOG)
@click.argument("trace")
@click.option(
    "--policy", default="fifo", show_default=True, help="NAME, NAME:key=value,..., NAME+COMBINATOR, MODULE:ATTRIBUTE."
)
@experiment_options
@click.option("--out", type=FOLDER, help="Write journal, summary and jobs to a directory.")
@per_job_option
@click.option("--html", type=FILE, help="Write a report with figures to a file.")
@force_option
def simulate(
    trace: str,
    policy: str,
    out: Path | None,
    per_job: Path | None,
    html: Path | None,
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
    check_rows_ending(per_job)
    replaced = check_folder("--out", out, force=force)
    request = read_experiment(trace, options, policy)
    make_folder("--out", out)
    replaced += check_rows(per_job, force=force)  # it may lie in the folder that was just made
    replaced += check_file("--html", html, OutputKind.REPORT, force=force)
    show_notes([*request.notes, *replaced], quiet=quiet)
    journal = None if out is None else out / NAME
    with watching(policy, len(request.trace.jobs), quiet=quiet) as watch:
        outcome = run_simulation(request.trace, request.experiment, journal=journal, watch=watch)
    show_notes(run_notes(outcome.history, outcome.summary), quiet=quiet)
    jobs = per_job_table(outcome.history, outcome.measured)
    if out is not None:
        write_run(out, outcome.summary, jobs)
    if per_job is not None:
        jobs.write(per_job)
    try:
        if options["as_json"]:
            print_json(outcome.summary.document())
        else:
            show_summary(outcome.summary)
    finally:  # the report is written even if the reader of the summary has gone
        if html is not None:
            run = ComparedRun.of(outcome.summary, outcome.history, outcome.measured)
            html.write_text(simulation_page(run), encoding="utf-8")
    if html is not None and not options["as_json"]:
        click.echo(f"report: {html}")
    if outcome.summary.partial:
        click.echo("poise: interrupted; these results are partial", err=True)
        return INTERRUPTED
    return 0


def show_summary(summary: Summary) -> None:
    """Print the summary of a run, one number per row."""
    click.echo(f"{summary.policy} on {summary.cluster}: {summary.trace}")
    table = RichTable(show_header=False, box=SIMPLE)
    table.add_column(style="bold")
    table.add_column(justify="right")
    for row in summary_rows(summary):
        table.add_row(*row)
    console().print(table)
    if summary.partial:
        click.echo("These results are partial: the run was interrupted.", err=True)


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
@click.option(
    "--allow-policy",
    "allowed",
    multiple=True,
    metavar="MODULE:ATTRIBUTE",
    help="Import this policy from outside of Poise, which the journal names. May be given more than once.",
)
@json_option
def replay(journal: Path, allowed: tuple[str, ...], as_json: bool) -> None:
    """Hand the facts of JOURNAL to the core again: a file, a directory that --out wrote, or a service's state.

    Every action must come out as it was written; the first that does not ends the replay with exit code 1.
    """
    from poise.service.server.storage.replay import replay_store, store_of

    for each in allowed:
        find_policy(each)
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
