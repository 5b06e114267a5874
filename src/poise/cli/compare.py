"""`poise compare`: several policies over one trace, side by side."""

import json
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from poise.assembly import Experiment
from poise.assembly import simulate as run_simulation
from poise.cli.options import experiment_options, request_of
from poise.cli.outputs import check_writable
from poise.cli.progress import Watch, watching
from poise.cli.tables import show_notes, show_table
from poise.model.errors import PoiseError, RequestError
from poise.report.comparison import Run, comparison_page, table
from poise.traces.schema import Trace

INTERRUPTED = 130

PULSE = 0.1
"""Seconds between two looks at whether Ctrl-C was pressed while other processes work."""

EPILOG = """\b
Example:
  poise compare synthetic:jobs=2000 --cluster v100:16,k80:16 --policies fifo,srtf,tiresias --html report.html
"""


@click.command(epilog=EPILOG)
@click.argument("trace")
@click.option("--policies", required=True, help="Policies, separated by commas: fifo,tiresias:limits=300/900,promote=8.")
@experiment_options
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write a report with figures to a file.")
def compare(trace: str, policies: str, html: Path | None, **options: Any) -> int:  # noqa: ANN401
    """Run TRACE under several policies and show them side by side."""
    check_writable("--html", html)
    names = split_policies(policies)
    request = request_of(trace, options, names[0])
    experiments = [replace(request.experiment, policy=name) for name in names]
    for experiment in experiments:
        experiment.effective_policy()
    show_notes(request.notes, quiet=request.quiet)
    runs = run_all(request.trace, experiments, quiet=request.quiet)
    summaries = [run.summary for run in runs]
    rejected = max((summary.rejected for summary in summaries), default=0)
    notes = [f"{rejected:,} jobs can never run here and were rejected; `poise simulate` says why"] if rejected else []
    show_notes(notes, quiet=request.quiet)
    title = f"{request.trace.name} on {request.experiment.cluster}"
    if html is not None:
        intro = f"{len(request.trace.jobs):,} jobs of {request.trace.name} on {request.experiment.cluster}."
        html.write_text(comparison_page(title, intro, runs), encoding="utf-8")
    if request.as_json:
        click.echo(json.dumps([summary.document() for summary in summaries], allow_nan=False))
    else:
        show_table(table(summaries), title)
        if html is not None:
            click.echo(f"report: {html}")
    return conclude(runs, names)


def conclude(runs: Sequence[Run], names: Sequence[str]) -> int:
    """The exit code; says so if not all that was asked for is there."""
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


def run_all(trace: Trace, experiments: Sequence[Experiment], *, quiet: bool) -> list[Run]:
    """Run the experiments on the cores there are; those that were interrupted are left out."""
    workers = min(len(experiments), os.cpu_count() or 1)
    if workers == 1:
        return list(_one_by_one(trace, experiments, quiet=quiet))
    done: dict[int, Run] = {}
    with (  # the watch comes first: Ctrl-C must find it while processes are being started, too
        watching("policies", len(experiments), quiet=quiet) as watch,
        ProcessPoolExecutor(workers, initializer=_begin, initargs=(trace,)) as pool,
    ):
        try:
            _collect([pool.submit(_simulate, experiment) for experiment in experiments], done, watch)
        except BrokenExecutor:
            raise PoiseError("a process that simulated a policy was killed, perhaps for want of memory") from None
        finally:
            if len(done) < len(experiments):
                for process in list((pool._processes or {}).values()):
                    process.terminate()
    return [done[place] for place in sorted(done)]


def _collect(futures: list[Future[Run]], done: dict[int, Run], watch: Watch) -> None:
    """Take what comes out, by place, until everything has or Ctrl-C was pressed."""
    left = set(futures)
    while left and not watch.interrupted:
        ended, left = wait(left, timeout=PULSE, return_when=FIRST_COMPLETED)
        for future in ended:
            done[futures.index(future)] = future.result()
        watch.show(len(done))


def _one_by_one(trace: Trace, experiments: Sequence[Experiment], *, quiet: bool) -> Iterator[Run]:
    for experiment in experiments:
        with watching(experiment.policy, len(trace.jobs), quiet=quiet) as watch:
            outcome = run_simulation(trace, experiment, watch=watch)
        yield Run.of(outcome.summary, outcome.history, outcome.measured)
        if outcome.summary.partial:
            return


_trace: Trace
"""The trace of a worker process: handed over once, not with every task."""


def _begin(trace: Trace) -> None:
    global _trace
    _trace = trace
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _simulate(experiment: Experiment) -> Run:
    outcome = run_simulation(_trace, experiment)
    return Run.of(outcome.summary, outcome.history, outcome.measured)
