"""The cells of a sweep: what differs from seed to seed, and what the processes do that run them."""

import io
import os
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from math import isfinite
from typing import BinaryIO

from poise.lab.analysis.statistics import Cell, Grid
from poise.lab.analysis.summary import Summary
from poise.lab.experiment import Experiment, check, scaled, simulate
from poise.lab.options import ExperimentOptions, ExperimentRequest, TraceLike, read_experiment
from poise.lab.parallel import WorkWatch, spread, workers_for
from poise.lab.traces.parsing import whole
from poise.lab.traces.reader import STANDARD_INPUT
from poise.lab.traces.schema import Trace
from poise.lab.traces.synthetic import SYNTHETIC
from poise.scheduler.model.errors import OptionError, RequestError, SolveError, TraceError, Where
from poise.scheduler.model.units import counted

MOST_SEEDS = 10_000
MOST_CELLS = 1_000_000
_SEED = "seed="
_LARGEST_SEED = 2**63 - 1
_MOST_PIPED = 1 << 30
"""Bytes of a trace that comes through a pipe: a sweep keeps them."""
_CACHED = 2
"""Traces that a process keeps: cells come seed by seed and load by load, so that few suffice."""


def checked_loads(loads: Sequence[float], option: str = "loads") -> tuple[float, ...]:
    """Return the loads; raise OptionError unless they are different numbers above 0."""
    found: list[float] = []
    for load in loads:
        if not (isfinite(load) and load > 0):
            raise OptionError(option, f"expected finite numbers above 0, e.g. 0.5,1,2, got {load:g}")
        if load in found:
            raise OptionError(option, f"expected different numbers, got {load:g} twice")
        found.append(load)
    if not found:
        raise OptionError(option, "expected finite numbers above 0, e.g. 0.5,1,2, got none")
    return tuple(found)


def grid_of(policies: Sequence[str], loads: Sequence[float], seeds: Sequence[int]) -> Grid:
    """Return the grid of a sweep; raise RequestError if a policy is in it twice or it is beyond reason."""
    twice = next((name for place, name in enumerate(policies) if name in policies[:place]), None)
    if twice is not None:
        raise OptionError("policies", f"expected different policies, got {twice} twice")
    grid = Grid(tuple(policies), tuple(loads), tuple(seeds))
    if len(grid) > MOST_CELLS:
        raise RequestError(f"expected at most {MOST_CELLS:,} cells (policies × loads × seeds), got {len(grid):,}")
    return grid


@dataclass(frozen=True, slots=True)
class SweepSource:
    """What a request is made from again for every seed, in whichever process: reading it does not use it up.

    trace     as it was named, or a trace, or a function that returns one for a seed
    piped     the content of a pipe, which can be read only once; None if the trace is none
    options   their `seed` is that of the first run
    """

    trace: TraceLike | Callable[[int], TraceLike]
    piped: bytes | None
    options: ExperimentOptions
    policy: str

    @staticmethod
    def of(trace: TraceLike | Callable[[int], TraceLike], options: ExperimentOptions, policy: str) -> "SweepSource":
        """Return the source of this trace; a pipe is read."""
        if trace == STANDARD_INPUT:
            return SweepSource(trace, _content(sys.stdin.buffer, "stdin"), options, policy)
        if isinstance(trace, str) and os.path.exists(trace) and not (os.path.isfile(trace) or os.path.isdir(trace)):
            with open(trace, "rb") as pipe:
                return SweepSource(STANDARD_INPUT, _content(pipe, trace), options, policy)
        return SweepSource(trace, None, options, policy)

    def request(self, seed: int) -> ExperimentRequest:
        """Return the trace at load 1 and the experiment of the runs with a seed; a synthetic trace's own seed moves along.

        A trace that is named keeps the name that it was given.
        """
        options = replace(self.options, seed=seed, load=1.0)
        if not isinstance(self.trace, str):
            trace = self.trace(seed) if callable(self.trace) else self.trace
            return read_experiment(trace, options, self.policy)
        name = reseeded(self.trace, seed - self.options.seed)
        with nullcontext() if self.piped is None else _standard_input(self.piped):
            request = read_experiment(name, options, self.policy)
        return request if name == self.trace else replace(request, trace=replace(request.trace, name=self.trace))


def _content(pipe: BinaryIO, name: str) -> bytes:
    """All that comes out of a pipe; TraceError if that never ends."""
    content = pipe.read(_MOST_PIPED + 1)
    if len(content) > _MOST_PIPED:
        raise TraceError(Where(name), f"expected at most {_MOST_PIPED >> 20:,} MiB from a pipe, got more; save it as a file")
    return content


@contextmanager
def _standard_input(content: bytes) -> Iterator[None]:
    before, sys.stdin = sys.stdin, io.TextIOWrapper(io.BytesIO(content))
    try:
        yield
    finally:
        sys.stdin = before


def reseeded(trace: str, later: int) -> str:
    """`synthetic:...,seed=S` with the seed S + later; any other trace as it is."""
    if not trace.startswith(SYNTHETIC) or not later:
        return trace
    parts = [part for part in trace.removeprefix(SYNTHETIC).split(",") if part]
    own = next((part.removeprefix(_SEED) for part in parts if part.startswith(_SEED)), "0")
    kept = [part for part in parts if not part.startswith(_SEED)]
    moved = whole(own, "seed", 0, _LARGEST_SEED) + later
    if moved > _LARGEST_SEED:
        raise RequestError(f"{SYNTHETIC}seed: expected room for {counted(later, 'more seed')}, got {own}")
    return SYNTHETIC + ",".join([*kept, f"{_SEED}{moved}"])


def at_load(request: ExperimentRequest, load: float) -> Trace:
    """Return a request's trace, arriving `load` times as fast. Raises RequestError if it cannot be run so."""
    trace = scaled(request.trace, load=load, most=None)
    check(trace, request.experiment)
    return trace


def check_grid(source: SweepSource, grid: Grid) -> ExperimentRequest:
    """Refuse before any work what would be refused in the middle of it; return the request of the first seed."""
    request = source.request(grid.seeds[0])
    for name in grid.policies:
        replace(request.experiment, policy=name).effective_policy()
    # The lowest load takes the longest, and so has room for the most outages; the last seed is the largest.
    at_load(request, min(grid.loads))
    if isinstance(source.trace, str):
        reseeded(source.trace, grid.seeds[-1] - grid.seeds[0])
    return request


def run_cells(
    source: SweepSource, cells: Sequence[Cell], watch: WorkWatch, *, processes: int | None = None
) -> Generator[tuple[Cell, Summary], None, None]:
    """Run the cells on all cores, and yield them as they finish; end early if the watch is interrupted."""
    runs = CellRuns(source)
    if workers_for(len(cells), processes) > 1:
        for place, summary in spread(runs.run, cells, watch, processes=processes):
            yield cells[place], summary
        return
    for done, cell in enumerate(cells):
        watch.show(done)
        summary = runs.run(cell, lambda _ended: not watch.interrupted)
        if summary.partial:
            return
        yield cell, summary


class CellRuns:
    """Runs the cells of a sweep in one process, and keeps the traces that the next cells need, too."""

    def __init__(self, source: SweepSource) -> None:
        self._request = lru_cache(_CACHED)(source.request)
        self._setting = lru_cache(_CACHED)(self._at)

    def run(self, cell: Cell, watch: Callable[[int], bool] = lambda _ended: True) -> Summary:
        """Run one cell; `watch` as for `simulate`."""
        trace, experiment = self._setting(cell.seed, cell.load)
        try:
            return simulate(trace, replace(experiment, policy=cell.policy), watch=watch).summary
        except SolveError as error:
            raise SolveError(f"{cell}: {error}") from None

    def _at(self, seed: int, load: float) -> tuple[Trace, Experiment]:
        request = self._request(seed)
        return at_load(request, load), request.experiment
