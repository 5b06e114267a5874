"""`poise compare`: several policies over one trace, side by side. `poise demo`: the same on built-in data."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from poise.cli import INTERRUPTED
from poise.cli.experiment import experiment_options, read_experiment
from poise.cli.options import FILE, examples, force_option, json_option, print_json, with_options
from poise.cli.output import check_report, show_notes, show_table, watching
from poise.cli.outside import find_policy
from poise.cli.parallel import spread, workers_for
from poise.cli.sweep import MOST_SEEDS, CellStart, Sweep, parse_loads, sweep
from poise.lab.analysis.summary import Summary
from poise.lab.experiment import Experiment
from poise.lab.experiment import simulate as run_simulation
from poise.lab.report.comparison import ComparedRun, comparison_page, table
from poise.lab.traces.schema import Trace
from poise.lab.traces.synthetic import demo_trace
from poise.scheduler.model.cluster import parse_cluster
from poise.scheduler.model.errors import RequestError
from poise.scheduler.model.units import counted

EPILOG = """\b
Examples:
  poise compare synthetic:jobs=2000 --cluster v100:16,k80:16 --policies fifo,srtf,tiresias --html report.html
  poise compare synthetic:jobs=300 --cluster gpu:32 --policies fifo,srtf --loads 0.5,1,2 --seeds 5
"""


_OPTIONS = (
    click.argument("trace"),
    click.option("--policies", required=True, help="Policies, separated by commas: fifo,tiresias:limits=300/900,promote=8."),
    experiment_options,
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
    html: Path | None,
    loads: str | None,
    seeds: int | None,
    state: Path | None,
    fresh: bool,
    **options: Any,  # noqa: ANN401
) -> int:
    """Run TRACE under several policies and show them side by side.

    With --loads or --seeds it is a sweep: every policy at every load with every seed, on the cores there are. Ctrl-C
    stops it, and the same command goes on from there.
    """
    check_report(html, force=options.pop("force"), quiet=options["quiet"])
    names = split_policies(policies)
    if loads is not None or seeds is not None:
        if loads is not None and options["load"] != 1:
            raise RequestError("--load and --loads say different things of the same trace; give one of the two")
        factors = parse_loads(str(options["load"]), "--load") if loads is None else parse_loads(loads)
        asked = Sweep(factors, seeds or 1, state, CellStart.FRESH if fresh else CellStart.RESUME)
        return sweep(trace, names, asked, html, options)
    if state is not None or fresh:
        raise RequestError(f"{'--state' if state else '--fresh'} is for sweeps; give --loads or --seeds too")
    return _compare(trace, names, html, options)


def _compare(trace: str, names: list[str], html: Path | None, options: dict[str, Any]) -> int:
    request = read_experiment(trace, options, names[0])
    experiments = [replace(request.experiment, policy=name) for name in names]
    for experiment in experiments:
        find_policy(experiment.policy)
        experiment.effective_policy()
    show_notes(request.notes, quiet=request.quiet)
    runs = run_all(request.trace, experiments, quiet=request.quiet)
    summaries = [run.summary for run in runs]
    show_notes(list(_notes_after(summaries)), quiet=request.quiet)
    title = f"{request.trace.name} on {request.experiment.cluster}"
    try:
        if request.as_json:
            print_json([summary.document() for summary in summaries])
        else:
            show_table(table(summaries), title)
    finally:  # the report is written even if the reader of the table has gone
        if html is not None:
            intro = f"{counted(len(request.trace.jobs), 'job')} of {title}."
            html.write_text(comparison_page(title, intro, runs), encoding="utf-8")
    if html is not None and not request.as_json:
        click.echo(f"report: {html}")
    return conclude(runs, names)


def _notes_after(summaries: Sequence[Summary]) -> Iterator[str]:
    rejected = max((summary.rejected for summary in summaries), default=0)
    if rejected:
        yield f"jobs that can never run here were rejected, {rejected:,} of them; `poise simulate` says why"
    unfinished = max((summary.unfinished for summary in summaries if not summary.partial), default=0)
    if unfinished:
        yield f"jobs had not ended when their run did, up to {unfinished:,} in a run; means leave them out"


def conclude(runs: Sequence[ComparedRun], names: Sequence[str]) -> int:
    """The exit code; prints a line if results are missing."""
    if len(runs) == len(names) and not any(run.summary.partial for run in runs):
        return 0
    click.echo(f"poise: interrupted; {len(runs)} of {len(names)} policies are shown, results may be partial", err=True)
    return INTERRUPTED


def split_policies(text: str) -> list[str]:
    """`fifo,tiresias:limits=300/900,promote=8,srtf`: a part with `=` but no `:` continues the policy before it."""
    names: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        if "=" in part and ":" not in part and names:
            names[-1] += f",{part}"
        else:
            names.append(part)
    if not names:
        raise RequestError("--policies: expected at least one name, e.g. fifo,srtf,tiresias")
    return names


def run_all(trace: Trace, experiments: Sequence[Experiment], *, quiet: bool) -> list[ComparedRun]:
    """Run the experiments on all cores. After an interruption, those that finished; on one core, the last one is partial."""
    if workers_for(len(experiments)) > 1:
        with watching("policies", len(experiments), quiet=quiet) as watch:
            done = dict(spread(_simulate, experiments, watch, initialize=_initialize, arguments=(trace,)))
        return [done[place] for place in sorted(done)]
    runs: list[ComparedRun] = []
    for experiment in experiments:
        with watching(experiment.policy, len(trace.jobs), quiet=quiet) as watch:
            outcome = run_simulation(trace, experiment, watch=watch)
        runs.append(ComparedRun.of(outcome.summary, outcome.history, outcome.measured))
        if outcome.summary.partial:
            break
    return runs


_trace: Trace
"""The trace of a worker process: handed over once, not with every task."""


def _initialize(trace: Trace) -> None:
    global _trace
    _trace = trace


def _simulate(experiment: Experiment) -> ComparedRun:
    outcome = run_simulation(_trace, experiment)
    return ComparedRun.of(outcome.summary, outcome.history, outcome.measured)


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
    runs = run_all(trace, [replace(base, policy=name) for name in POLICIES], quiet=quiet)
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
