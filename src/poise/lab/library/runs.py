"""`simulate`, `compare` and `sweep`: the verbs of the command line as functions.

They take a trace and options by the names of the command line, and return results as values. Nothing is printed. What is
wrong with a call is RequestError, one line; a keyword that is not there is TypeError. Ctrl-C leaves no process behind.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Unpack

from poise.engine.journal import NAME
from poise.engine.outside import spec_of
from poise.lab.analysis.run_tables import per_job_table
from poise.lab.analysis.statistics import Grid, averaged
from poise.lab.arguments import flag, items_of, number, path_of, refused, whole
from poise.lab.comparison import PolicyRuns, split_policies
from poise.lab.experiment import simulate as run_simulation
from poise.lab.library.keywords import ExperimentKeywords, options_of, with_keywords
from poise.lab.library.results import ComparisonResult, SimulationResult, SweepResult, notes_of
from poise.lab.options import ExperimentOptions, ExperimentRequest, TraceLike, read_experiment, trace_of
from poise.lab.output_files import (
    OutputKind,
    check_file,
    check_folder,
    check_writable,
    make_folder,
    run_folders,
    write_comparison,
    write_run,
)
from poise.lab.parallel import spread, workers_for
from poise.lab.progress import bar
from poise.lab.report.notes import sweep_notes
from poise.lab.sweep.cells import MOST_SEEDS, SweepSource, check_grid, checked_loads, grid_of, run_cells
from poise.lab.sweep.state import CellStart, SweepState, digest_of_sweep, opened
from poise.lab.traces.schema import Trace
from poise.lab.traces.synthetic import SYNTHETIC, generate
from poise.scheduler.model.errors import OptionError

PolicyLike = Any
"""A specification, or an object that `poise.policies.spec_of` takes: an Order, Planner, Allocator, Policy or Listing, or a
callable that returns one.
"""
Progress = Callable[[int, int], object] | Literal["bar"] | None
"""Is called with what is done and what there is to do: jobs of `simulate`, runs otherwise; `bar` draws a progress bar."""
_EVERY = 512
"""Calls of a simulation's watch between two reports of progress."""


@with_keywords
def simulate(
    trace: TraceLike | object,
    *,
    policy: PolicyLike = "fifo",
    out: str | PathLike[str] | None = None,
    journal: str | PathLike[str] | None = None,
    progress: Progress = None,
    **options: Unpack[ExperimentKeywords],
) -> SimulationResult:
    """Run a trace under one policy, as `poise simulate` does.

    trace      a Trace, what `Trace.of` makes one of, or the text that the command line takes: a path, `synthetic:...`
    policy     a specification, or a policy as an object
    out        folder for journal, summary and jobs;  journal: file for the journal alone
    progress   "bar", or a function of (jobs that have ended, jobs)
    options    the options of `poise simulate`, by their names

    Raises RequestError for what is wrong with the call, PolicyError for what a policy of your own raises.
    """
    chosen = options_of(simulate, options)
    name = spec_of(policy)
    folder, file = _path(out, "out"), _path(journal, "journal")
    if folder is not None and file is not None:
        raise OptionError(("out", "journal"), "both name a place for the journal; give one of the two")
    replaced = check_folder("out", folder, force=False) + check_file("journal", file, OutputKind.JOURNAL, force=False)
    request = read_experiment(_loaded(trace, chosen), chosen, name)
    make_folder("out", folder)
    with _reporting(progress, name, len(request.trace)) as report:
        done = run_simulation(
            request.trace, request.experiment, journal=file if folder is None else folder / NAME, watch=_watch(report)
        )
    if folder is not None:
        write_run(folder, done.summary, per_job_table(done.history, done.measured))
    result = SimulationResult.of(done, request.trace)
    return replace(result, notes=(*replaced, *request.notes, *result.notes))


@with_keywords
def compare(
    trace: TraceLike | object,
    *,
    policies: str | Iterable[PolicyLike],
    out: str | PathLike[str] | None = None,
    progress: Progress = None,
    processes: int | None = None,
    **options: Unpack[ExperimentKeywords],
) -> ComparisonResult:
    """Run a trace under several policies, as `poise compare` does, on the cores there are.

    trace       as for `simulate`
    policies    several policies, each as for `simulate`; or text with commas between them
    out         folder for a folder of each run
    progress    "bar", or a function of (runs that are done, runs)
    processes   how many to use at most;  1: none but this one
    options     the options of `poise compare`, by their names
    """
    chosen = options_of(compare, options)
    names = grid_of(_names(_listed(policies)), (1.0,), (0,)).policies
    folder, most = _path(out, "out"), _processes(processes)
    replaced = check_folder("out", folder, force=False)
    request = read_experiment(_loaded(trace, chosen), chosen, names[0])
    experiments = [replace(request.experiment, policy=name) for name in names]
    for experiment in experiments:
        experiment.effective_policy()
    make_folder("out", folder)
    folders = {} if folder is None else run_folders(folder, names)
    runs = PolicyRuns(request.trace, partial(SimulationResult.of, trace=request.trace), folders)
    with _reporting(progress, "policies", len(names)) as report:
        if workers_for(len(names), most) > 1:
            found = dict(spread(runs.run, experiments, report, processes=most))
        else:
            found = {}
            for place, experiment in enumerate(experiments):
                found[place] = runs.run(experiment)
                report.show(place + 1)
    results = [found[place] for place in range(len(names))]
    if folder is not None:
        write_comparison(folder, [each.summary for each in results])
    return ComparisonResult(dict(zip(names, results, strict=True)), notes_of(results, (*replaced, *request.notes)))


@with_keywords
def sweep(  # noqa: PLR0913 - what the command line takes as options
    trace: TraceLike | Callable[[int], TraceLike] | object,
    *,
    policies: str | Iterable[PolicyLike],
    loads: float | Iterable[float] = 1.0,
    seeds: int | Iterable[int] = 1,
    state: str | PathLike[str] | None = None,
    fresh: bool = False,
    progress: Progress = None,
    processes: int | None = None,
    **options: Unpack[ExperimentKeywords],
) -> SweepResult:
    """Run every policy at every load with every seed, as `poise compare --loads … --seeds …` does.

    trace    as for `simulate`; or a function that returns one for a seed. A synthetic trace is drawn anew for each seed, one
             of a file stays as it is
    loads    jobs arrive this many times as fast
    seeds    how many runs of each, with `seed` and the numbers after it; or the seeds themselves
    state    file in which finished runs are kept: the same call goes on from there;  fresh: forget what it holds

    The other arguments are those of `compare`.
    """
    chosen = options_of(sweep, options)
    factors = checked_loads(
        [number(each, "loads") for each in _several(loads, "loads", "numbers above 0, e.g. [0.5, 1, 2]")]
    )
    if options.get("load", 1.0) != 1.0:
        raise OptionError(("load", "loads"), "say different things of the same trace; give one of the two")
    first = whole(chosen.seed, "seed", 0)
    asked = _listed(policies)
    grid = grid_of(_names(asked), factors, _seeds(seeds, first))
    most = _processes(processes)
    drawn = _drawn(trace, chosen)
    source = SweepSource.of(drawn, replace(chosen, seed=first), grid.policies[0])
    file = _path(state, "state")
    if file is not None and (callable(drawn) or not all(isinstance(each, str) for each in asked)):
        raise OptionError("state", "runs are kept by the names of policies and traces; leave it out with objects")
    check_writable("state", file)
    request = check_grid(source, grid)
    with closing(_kept(file, source, request, grid, CellStart.FRESH if flag(fresh, "fresh") else CellStart.RESUME)) as kept:
        left = [cell for cell in grid.cells() if cell not in kept.done]
        with (
            _reporting(progress, "runs", len(left)) as report,
            closing(run_cells(source, left, report, processes=most)) as finished,
        ):
            for cell, summary in finished:
                kept.keep(cell, summary)
        rows = averaged(kept.done, grid)
        return SweepResult(rows, (*request.notes, *kept.take_troubles(), *sweep_notes(rows)))


def _kept(file: Path | None, source: SweepSource, request: ExperimentRequest, grid: Grid, start: CellStart) -> SweepState:
    """What is finished already: nothing, if no file is named."""
    if file is None:
        return SweepState()
    try:
        return opened(file, digest_of_sweep(source, request, grid), start, afresh="pass fresh=True")
    except OSError as error:
        raise OptionError("state", f"{file}: {error.strerror or error}") from None


# Arguments


def _loaded(trace: object, chosen: ExperimentOptions) -> Trace:
    """The trace, if it has a job."""
    found = trace_of(trace, chosen.format)
    if not found.jobs:
        raise OptionError("trace", f"expected at least one job, got none ({found.name})")
    return found


def _drawn(trace: object, chosen: ExperimentOptions) -> Any:  # noqa: ANN401 - what SweepSource takes
    """The trace as a sweep takes it: one that its specification draws as it is goes by its specification."""
    if isinstance(trace, PathLike):
        return str(trace)
    if isinstance(trace, str) or callable(trace):
        return trace
    found = _loaded(trace, chosen)
    if found.name.startswith(SYNTHETIC) and generate(found.name) == found:
        return found.name
    return found


def _listed(policies: object) -> list[object]:
    """Several policies one by one, as they were given."""
    if isinstance(policies, str):
        return [*split_policies(policies)]
    given = list(_several(policies, "policies", 'policies, e.g. ["fifo", "srtf"]'))
    if not given:
        raise OptionError("policies", 'expected at least one, e.g. ["fifo", "srtf"]')
    return given


def _names(policies: Sequence[object]) -> list[str]:
    """The specifications of several policies."""
    return [spec_of(each) for each in policies]  # type: ignore[arg-type]  # it says what it takes


def _several(given: object, name: str, expected: str) -> Iterable[object]:
    """What is given, or the one that is given."""
    items = items_of(given)
    if items is not None:
        return items
    if isinstance(given, str | bytes | Iterable) or given is None or isinstance(given, bool):
        raise refused(name, expected, given)
    return [given]


def _seeds(seeds: object, first: int) -> Sequence[int]:
    """The seeds of a sweep: so many from the first one on, or those that are given."""
    items = items_of(seeds)
    if items is None:
        return range(first, first + whole(seeds, "seeds", 1, MOST_SEEDS))
    found = sorted(whole(each, "seeds", first) for each in items)
    if not found or len(set(found)) < len(found):
        raise OptionError("seeds", f"expected a number of runs, or different seeds, got {found}")
    return found


def _processes(given: object) -> int | None:
    return None if given is None else whole(given, "processes", 1)


def _path(given: object, name: str) -> Path | None:
    return None if given is None else path_of(given, name)


# Progress


class _Report:
    """Tells whoever asked for it how much is done."""

    interrupted = False  # Ctrl-C is an exception here, as everywhere in a program

    def __init__(self, tell: Callable[[int], object]) -> None:
        self._tell = tell
        self._told = 0

    def show(self, done: int) -> None:
        """Tell it, if it has changed."""
        if done != self._told:
            self._told = done
            self._tell(done)


@contextmanager
def _reporting(progress: object, title: str, total: int) -> Iterator[_Report]:
    if progress is None:
        yield _Report(lambda _done: None)
    elif isinstance(progress, str) and progress == "bar":
        with bar(title, total) as shown:
            yield _Report(shown.update)
    elif callable(progress):
        yield _Report(lambda done: progress(done, total))
    else:
        raise refused("progress", '"bar", or a function of what is done and how much there is', progress)


def _watch(report: _Report) -> Callable[[int], bool]:
    """What a simulation is watched by: it calls at every instant, so that it reports only now and then."""
    calls = 0

    def watch(ended: int) -> bool:
        nonlocal calls
        calls += 1
        if calls % _EVERY == 0:
            report.show(ended)
        return True

    return watch
