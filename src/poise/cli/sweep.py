"""`poise compare --loads … --seeds …`: policies × loads × seeds on all cores, interrupted and resumed at will."""

import signal
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from math import inf, nan
from pathlib import Path
from types import FrameType
from typing import Any

import click

from poise.cli import INTERRUPTED
from poise.cli.experiment import experiment_options_of
from poise.cli.options import print_json
from poise.cli.output import show_notes, show_table, watching
from poise.cli.outside import find_policy
from poise.lab.analysis.statistics import Average, Grid, averaged
from poise.lab.options import ExperimentRequest
from poise.lab.output_files import check_writable
from poise.lab.report.notes import sweep_notes
from poise.lab.report.sweep import LEGEND, sweep_page, sweep_table
from poise.lab.sweep.cells import SweepSource, check_grid, checked_loads, grid_of, run_cells
from poise.lab.sweep.state import CellStart, NotASweepError, SweepState, default_place, digest_of_sweep, opened
from poise.scheduler.model.errors import OptionError, RequestError
from poise.scheduler.model.units import counted


@dataclass(frozen=True, slots=True)
class SweepRequest:
    """What to sweep over, and where finished cells are kept; `state` None: in the user's cache."""

    loads: tuple[float, ...]
    seeds: int
    state: Path | None
    start: CellStart


def parse_loads(text: str, option: str = "loads") -> tuple[float, ...]:
    """`0.5,1,2`: different numbers above 0."""
    loads: list[float] = []
    for part in text.split(","):
        try:
            loads.append(float(part))
        except ValueError:
            loads.append(nan)
        if not loads[-1] > 0 or loads[-1] == inf:
            raise OptionError(option, f"expected finite numbers above 0, e.g. 0.5,1,2, got {part.strip()[:50]!r}")
    return checked_loads(loads, option)


def sweep(trace: str, names: Sequence[str], asked: SweepRequest, html: Path | None, options: dict[str, Any]) -> int:
    """Run the cells that are not finished yet, keep their results, show everything; the exit code."""
    seeds = range(options["seed"], options["seed"] + asked.seeds)
    grid = grid_of(names, asked.loads, seeds)
    check_writable("--state", asked.state)
    source = SweepSource.of(trace, experiment_options_of(options), names[0])
    quiet = options["quiet"]
    for name in grid.policies:
        find_policy(name)
    request = check_grid(source, grid)
    show_notes(request.notes, quiet=quiet)
    with closing(_open_state(asked, request, source, grid)) as state:
        show_notes(list(_notes_before(state, grid)), quiet=quiet)
        left = [cell for cell in grid.cells() if cell not in state.done]
        if left:
            # A second Ctrl-C stops at once; what is finished by then is shown all the same.
            with (
                suppress(KeyboardInterrupt),
                watching("cells", len(left), quiet=quiet) as watch,
                _sigterm_like_ctrl_c(),
                closing(run_cells(source, left, watch)) as finished,
            ):
                for cell, summary in finished:
                    state.keep(cell, summary)
        show_notes(state.take_troubles(), quiet=quiet)
        rows = averaged(state.done, grid)
        show_notes(list(sweep_notes(rows)), quiet=quiet)
        _show(rows, request, grid, html, as_json=options["as_json"])
        done = sum(cell in state.done for cell in grid.cells())
        if done == len(grid):
            if asked.state is None:
                state.remove()
            return 0
        further = "the same command goes on from here" if state.path else "nothing was kept to go on from"
        click.echo(f"poise: interrupted; {done:,} of {len(grid):,} cells are done; {further}", err=True)
        return INTERRUPTED


def _open_state(asked: SweepRequest, request: ExperimentRequest, source: SweepSource, grid: Grid) -> SweepState:
    """What is finished already. A file that was named must work; the sweep continues without one in the cache."""
    digest = digest_of_sweep(source, request, grid)
    if asked.state is not None:
        try:
            return opened(asked.state, digest, asked.start)
        except OSError as error:
            raise RequestError(f"--state {asked.state}: {error.strerror or error}") from None
    try:
        place = default_place(digest)
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            return opened(place, digest, asked.start)
        except NotASweepError:  # the name of the file is ours: it is what a crash has left of a state
            place.unlink()
            return opened(place, digest, asked.start)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return SweepState.in_memory(f"{where}{error.strerror or error}")


def _notes_before(state: SweepState, grid: Grid) -> Iterator[str]:
    yield from state.take_troubles()
    if state.unreadable:
        yield f"{state.path}: lines that could not be read and are left out: {state.unreadable:,}"
    there = sum(cell in state.done for cell in grid.cells())
    if there:
        yield f"{there:,} of {len(grid):,} cells were there already"


def _show(rows: Sequence[Average], request: ExperimentRequest, grid: Grid, html: Path | None, *, as_json: bool) -> None:
    title = f"{request.trace.name} on {request.experiment.cluster}"
    seeds = counted(len(grid.seeds), "seed")
    try:
        if as_json:
            print_json([row.document() for row in rows])
        else:
            show_table(sweep_table(rows), f"{title}, {seeds}")
            if any(row.means["avg_jct"].interval for row in rows):
                click.echo(LEGEND.format(rival=grid.policies[0]))
    finally:  # the report is written even if the reader of the table has gone
        if html is not None:
            runs = sum(len(row.runs) for row in rows)
            missing = f" The sweep was interrupted: {runs:,} of its {len(grid):,} runs are in here."
            intro = f"{counted(len(request.trace.jobs), 'job')} of {title}: means over {seeds}."
            html.write_text(sweep_page(title, intro + (missing if runs < len(grid) else ""), rows), encoding="utf-8")
    if html is not None and not as_json:
        click.echo(f"report: {html}")


@contextmanager
def _sigterm_like_ctrl_c() -> Iterator[None]:
    def end(_signal: int, _frame: FrameType | None) -> None:
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
