"""`poise compare --loads … --seeds …`: policies × loads × seeds over the cores, interrupted and resumed at will."""

import json
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

import click

from poise.analysis.averages import KEYS, Average, Cell, Grid, averaged
from poise.cli import INTERRUPTED
from poise.cli.options import Request
from poise.cli.outputs import check_writable
from poise.cli.sweep_runs import Source, loaded, reseeded, run_cells
from poise.cli.sweep_state import NotASweepError, Start, State, default_place, digest_of, opened
from poise.cli.tables import show_notes, show_table
from poise.model.errors import RequestError
from poise.model.units import counted
from poise.report.sweeping import LEGEND, sweep_page, sweep_table
from poise.traces.synthetic import SYNTHETIC

MOST_SEEDS = 10_000
MOST_CELLS = 1_000_000

_DECIDE_NOTHING = ("as_json", "quiet", "load")
"""Options that change no number of a cell; its load is a matter of the grid."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """What to sweep over, and where finished cells are kept: `state` None is a place of ours."""

    loads: tuple[float, ...]
    seeds: int
    state: Path | None
    start: Start


def parse_loads(text: str, option: str = "--loads") -> tuple[float, ...]:
    """`0.5,1,2`: different numbers above 0."""
    loads: list[float] = []
    for part in text.split(","):
        load = _number(part)
        if not (isfinite(load) and load > 0):
            raise RequestError(f"{option}: expected finite numbers above 0, e.g. 0.5,1,2, got {part.strip()[:50]!r}")
        if load in loads:
            raise RequestError(f"{option}: expected different numbers, got {load:g} twice")
        loads.append(load)
    return tuple(loads)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


def sweep(trace: str, names: Sequence[str], asked: Sweep, html: Path | None, options: dict[str, Any]) -> int:
    """Run what is not there yet, keep it, show everything; the exit code."""
    grid = _grid(names, asked, options["seed"])
    check_writable("--state", asked.state)
    source = Source.of(trace, options, names[0])
    request = source.request(options["seed"])
    quiet = request.quiet
    _check_all(request, grid)
    reseeded(trace, asked.seeds - 1)
    show_notes(request.notes, quiet=quiet)
    with closing(_state(asked, request, source)) as state:
        show_notes(list(_notes_before(state, grid)), quiet=quiet)
        _run(source, grid, state, quiet=quiet)
        show_notes(state.take_troubles(), quiet=quiet)
        rows = averaged(state.done, grid)
        show_notes(list(_notes_after(rows)), quiet=quiet)
        _show(rows, request, grid, html)
        return _conclude(state, asked, grid)


def _grid(names: Sequence[str], asked: Sweep, seed: int) -> Grid:
    twice = next((name for place, name in enumerate(names) if name in names[:place]), None)
    if twice is not None:
        raise RequestError(f"--policies: expected different policies, got {twice} twice")
    grid = Grid(tuple(names), asked.loads, tuple(range(seed, seed + asked.seeds)))
    if len(grid) > MOST_CELLS:
        raise RequestError(f"expected at most {MOST_CELLS:,} cells (policies × loads × seeds), got {len(grid):,}")
    return grid


def _check_all(request: Request, grid: Grid) -> None:
    """Refuse before any work what would be refused in the middle of it."""
    for name in grid.policies:
        replace(request.experiment, policy=name).effective_policy()
    loaded(request, min(grid.loads))  # of all loads it takes the longest, and has room for the most outages


def _state(asked: Sweep, request: Request, source: Source) -> State:
    """What is there already. A named file must do; a place of ours that cannot be used is no reason to stop."""
    decides = {name: value for name, value in source.options.items() if name not in _DECIDE_NOTHING}
    drawn_from = source.trace if source.trace.startswith(SYNTHETIC) else None
    digest = digest_of(request.trace, request.experiment, {**decides, "synthetic": drawn_from})
    if asked.state is not None:
        try:
            return opened(asked.state, digest, asked.start)
        except OSError as error:
            raise RequestError(f"--state {asked.state}: {error.strerror or error}") from None
    try:
        place = default_place(digest)
        return _opened_in_cache(place, digest, asked.start)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return State.in_memory(f"{where}{error.strerror or error}")


def _opened_in_cache(place: Path, digest: str, start: Start) -> State:
    """The file's name is ours: what is no state in it is what a crash has left of one."""
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        return opened(place, digest, start)
    except NotASweepError:
        place.unlink()
        return opened(place, digest, start)


def _notes_before(state: State, grid: Grid) -> Iterator[str]:
    yield from state.take_troubles()
    if state.unreadable:
        yield f"{state.path}: lines that could not be read and are left out: {state.unreadable:,}"
    there = sum(cell in state.done for cell in grid.cells())
    if there:
        yield f"{there:,} of {len(grid):,} cells were there already"


def _run(source: Source, grid: Grid, state: State, *, quiet: bool) -> None:
    left: list[Cell] = [cell for cell in grid.cells() if cell not in state.done]
    if left:
        # A second Ctrl-C stops at once; what is finished by then is shown all the same.
        with suppress(KeyboardInterrupt), closing(run_cells(source, left, quiet=quiet)) as finished:
            for cell, summary in finished:
                state.keep(cell, summary)


def _notes_after(rows: Sequence[Average]) -> Iterator[str]:
    rejected = max((run.rejected for row in rows for run in row.runs.values()), default=0)
    if rejected:
        yield f"jobs that can never run here were rejected, up to {rejected:,} in a run; `poise simulate` says why"
    unfinished = max((run.unfinished for row in rows for run in row.runs.values()), default=0)
    if unfinished:
        yield f"jobs had not ended when their run did, up to {unfinished:,} in a run; means leave them out"
    policies = {row.policy: None for row in rows}
    same = [name for name in policies if all(row.is_constant for row in rows if row.policy == name)]
    if same:
        who = "any policy" if len(same) == len(policies) else ", ".join(same)
        yield f"seeds changed nothing under {who}: runs with different seeds came out the same, and have no intervals"
    for row in rows:
        counts = {key: row.means[key].runs for key in KEYS}
        absent = [key for key in KEYS if not counts[key]]
        if absent:
            yield f"{row.policy} at load {row.load:g}: no run has {', '.join(absent)}"
        short = [key for key in KEYS if 0 < counts[key] < len(row.runs)]
        if short:
            some = f"only {min(counts[key] for key in short):,} of {len(row.runs):,} runs"
            yield f"{row.policy} at load {row.load:g}: {some} have {', '.join(short)}; means are over those"


def _show(rows: Sequence[Average], request: Request, grid: Grid, html: Path | None) -> None:
    title = f"{request.trace.name} on {request.experiment.cluster}"
    count = counted(len(grid.seeds), "seed")
    try:
        if request.as_json:
            click.echo(json.dumps([row.document() for row in rows], allow_nan=False))
        else:
            show_table(sweep_table(rows), f"{title}, {count}")
            if any(row.means["avg_jct"].interval for row in rows):
                click.echo(LEGEND.format(rival=grid.policies[0]))
    finally:  # as in `compare`
        if html is not None:
            html.write_text(sweep_page(title, _intro(rows, request, grid), rows), encoding="utf-8")
    if html is not None and not request.as_json:
        click.echo(f"report: {html}")


def _intro(rows: Sequence[Average], request: Request, grid: Grid) -> str:
    runs = sum(len(row.runs) for row in rows)
    partial = f" The sweep was interrupted: {runs:,} of its {len(grid):,} runs are in here." if runs < len(grid) else ""
    jobs, seeds = counted(len(request.trace.jobs), "job"), counted(len(grid.seeds), "seed")
    return f"{jobs} of {request.trace.name} on {request.experiment.cluster}: means over {seeds}.{partial}"


def _conclude(state: State, asked: Sweep, grid: Grid) -> int:
    """The exit code; a file of ours is needed no more once everything is done."""
    done = sum(cell in state.done for cell in grid.cells())
    if done == len(grid):
        if asked.state is None:
            state.remove()
        return 0
    further = "the same command goes on from here" if state.path else "nothing was kept to go on from"
    click.echo(f"poise: interrupted; {done:,} of {len(grid):,} cells are done; {further}", err=True)
    return INTERRUPTED
