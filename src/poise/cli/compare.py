"""`poise compare`: several policies over one trace, side by side. `poise demo`: the same on built-in data."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from poise.cli import INTERRUPTED
from poise.cli.experiment import check_rows, check_rows_ending, experiment_options, per_job_option, read_experiment
from poise.cli.options import FILE, FOLDER, examples, force_option, json_option, print_json, with_options
from poise.cli.output import check_report, show_notes, show_table, watching
from poise.cli.outside import find_policy
from poise.cli.sweep import SweepRequest, parse_loads, sweep
from poise.lab.analysis.run_tables import per_job_table
from poise.lab.columns import Table
from poise.lab.comparison import PolicyRuns, joined, split_policies
from poise.lab.experiment import Experiment, FinishedSimulation
from poise.lab.output_files import check_folder, make_folder, run_folders, write_comparison
from poise.lab.parallel import spread, workers_for
from poise.lab.report.comparison import ComparedRun, comparison_page, table
from poise.lab.report.notes import comparison_notes
from poise.lab.sweep.cells import MOST_SEEDS
from poise.lab.sweep.state import CellStart
from poise.lab.traces.synthetic import demo_trace
from poise.scheduler.model.cluster import parse_cluster
from poise.scheduler.model.errors import RequestError
from poise.scheduler.model.units import counted

EPILOG = """\b
Examples:
  poise compare synthetic:jobs=2000 --cluster v100:16,k80:16 --policies fifo,srtf,tiresias --html report.html
  poise compare synthetic:jobs=300 --cluster gpu:32 --policies fifo,srtf --per-job jobs.csv --out runs
  poise compare synthetic:jobs=300 --cluster gpu:32 --policies fifo,srtf --loads 0.5,1,2 --seeds 5
"""


_OPTIONS = (
    click.argument("trace"),
    click.option("--policies", required=True, help="Policies, separated by commas: fifo,tiresias:limits=300/900,promote=8."),
    experiment_options,
    click.option("--out", type=FOLDER,
        help="Write journal, summary and jobs of each policy to a folder of its own in a directory."),
    per_job_option,
    click.option("--html", type=FILE, help="Write a report with figures to a file."),
    force_option,
    click.option("--loads", metavar="LIST", help="Sweep: every policy at each of these loads, e.g. 0.5,1,2."),
    click.option("--seeds", type=click.IntRange(1, MOST_SEEDS), metavar="N",
        help="Sweep: N runs of each, with --seed and those after it; a synthetic trace's own seed moves along. Means with "
        "95 % confidence intervals."),
    click.option("--state", type=FILE, metavar="FILE",
        help="Keep the finished runs of a sweep in FILE, and go on from there.  "
        "[default: in the cache, until it is complete]"),
    click.option("--fresh", is_flag=True, help="Forget what was kept of a sweep that was interrupted."),
)  # fmt: skip


@click.command(epilog=EPILOG)
@with_options(_OPTIONS)
def compare(
    trace: str,
    policies: str,
    loads: str | None,
    seeds: int | None,
    **options: Any,  # noqa: ANN401
) -> int:
    """Run TRACE under several policies and show them side by side.

    With --loads or --seeds it is a sweep: every policy at every load with every seed, on the cores there are. Ctrl-C
    stops it, and the same command goes on from there.
    """
    files = ComparedFiles(options["out"], options["per_job"], options["html"])
    state, fresh = options["state"], options["fresh"]
    check_rows_ending(files.per_job)
    check_report(files.html, force=options["force"], quiet=options["quiet"])
    names = split_policies(policies)
    if loads is not None or seeds is not None:
        if loads is not None and options["load"] != 1:
            raise RequestError("--load and --loads say different things of the same trace; give one of the two")
        if files.out is not None or files.per_job is not None:
            raise RequestError(f"{'--out' if files.out else '--per-job'} is not for sweeps; leave out --loads and --seeds")
        factors = parse_loads(str(options["load"]), "load") if loads is None else parse_loads(loads)
        asked = SweepRequest(factors, seeds or 1, state, CellStart.FRESH if fresh else CellStart.RESUME)
        return sweep(trace, names, asked, files.html, options)
    if state is not None or fresh:
        raise RequestError(f"{'--state' if state else '--fresh'} is for sweeps; give --loads or --seeds too")
    return _compare(trace, names, files, options)


@dataclass(frozen=True, slots=True)
class ComparedFiles:
    """What to write: a folder per run, one row per job, the report."""

    out: Path | None
    per_job: Path | None
    html: Path | None


def _compare(trace: str, names: list[str], files: ComparedFiles, options: dict[str, Any]) -> int:
    quiet, force, as_json = options["quiet"], options["force"], options["as_json"]
    replaced = check_folder("--out", files.out, force=force)
    request = read_experiment(trace, options, names[0])
    experiments = [replace(request.experiment, policy=name) for name in names]
    for experiment in experiments:
        find_policy(experiment.policy)
        experiment.effective_policy()
    make_folder("--out", files.out)
    replaced += check_rows(files.per_job, force=force)  # it may lie in the folder that was just made
    show_notes([*request.notes, *replaced], quiet=quiet)
    folders = {} if files.out is None else run_folders(files.out, names)
    finish = _with_rows if files.per_job is not None else _without_rows
    done = run_all(PolicyRuns(request.trace, finish, folders), experiments, quiet=quiet)
    runs = [run for run, _ in done]
    summaries = [run.summary for run in runs]
    if files.out is not None:
        write_comparison(files.out, summaries)
    if files.per_job is not None:
        joined([(run.summary.policy, rows) for run, rows in done]).write(files.per_job)
    show_notes(list(comparison_notes(summaries)), quiet=quiet)
    title = f"{request.trace.name} on {request.experiment.cluster}"
    try:
        if as_json:
            print_json([summary.document() for summary in summaries])
        else:
            show_table(table(summaries), title)
    finally:  # the report is written even if the reader of the table has gone
        if files.html is not None:
            intro = f"{counted(len(request.trace.jobs), 'job')} of {title}."
            files.html.write_text(comparison_page(title, intro, runs), encoding="utf-8")
    if files.html is not None and not as_json:
        click.echo(f"report: {files.html}")
    return conclude(runs, names)


Compared = tuple[ComparedRun, Table]
"""A run for the table and the report, and its jobs for --per-job."""


def _with_rows(done: FinishedSimulation) -> Compared:
    return ComparedRun.of(done.summary, done.history, done.measured), per_job_table(done.history, done.measured)


def _without_rows(done: FinishedSimulation) -> Compared:
    return ComparedRun.of(done.summary, done.history, done.measured), Table({})


def conclude(runs: Sequence[ComparedRun], names: Sequence[str]) -> int:
    """The exit code; prints a line if results are missing."""
    if len(runs) == len(names) and not any(run.summary.partial for run in runs):
        return 0
    click.echo(f"poise: interrupted; {len(runs)} of {len(names)} policies are shown, results may be partial", err=True)
    return INTERRUPTED


def run_all(runs: PolicyRuns[Compared], experiments: Sequence[Experiment], *, quiet: bool) -> list[Compared]:
    """Run the experiments on all cores. After an interruption, those that finished; on one core, the last one is partial."""
    if workers_for(len(experiments)) > 1:
        with watching("policies", len(experiments), quiet=quiet) as watch:
            done = dict(spread(runs.run, experiments, watch))
        return [done[place] for place in sorted(done)]
    found: list[Compared] = []
    for experiment in experiments:
        with watching(experiment.policy, len(runs.trace.jobs), quiet=quiet) as watch:
            found.append(runs.run(experiment, watch))
        if found[-1][0].summary.partial:
            break
    return found


CLUSTER = "k80:8,p100:8,v100:8"
POLICIES = ("fifo", "srtf", "las", "tiresias", "max-min", "max-min+agnostic", "themis", "gandiva-fair")


@click.command(epilog=examples("poise demo --html report.html"))
@click.option(
    "--html", type=FILE, default=Path("poise-demo.html"), show_default=True,
    help="Where to write the report.",
)  # fmt: skip
@force_option
@json_option
@click.option("--quiet", is_flag=True, help="No progress and no notes on stderr.")
def demo(html: Path, force: bool, as_json: bool, quiet: bool) -> int:
    """Run a built-in trace under several policies: 240 jobs on a mixed cluster. Prints a table, writes an HTML report."""
    check_report(html, force=force, quiet=quiet)
    trace = demo_trace()
    base = Experiment(parse_cluster(CLUSTER))
    experiments = [replace(base, policy=name) for name in POLICIES]
    runs = [run for run, _ in run_all(PolicyRuns(trace, _without_rows, {}), experiments, quiet=quiet)]
    summaries = [run.summary for run in runs]
    tenants = len({each.job.tenant for each in trace.jobs})
    title = f"{len(trace.jobs)} jobs of {tenants} tenants on {CLUSTER}"
    html.write_text(comparison_page("Poise: the tour", f"{title}.", runs), encoding="utf-8")
    if as_json:
        print_json([summary.document() for summary in summaries])
    else:
        show_table(table(summaries), title)
        click.echo(f"report: {html.resolve()}  (open it in a browser)")
        click.echo("next:   poise policies · poise simulate --help · poise compare --help")
    return conclude(runs, POLICIES)
