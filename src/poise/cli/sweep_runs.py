"""The runs of a sweep: what differs from seed to seed, and what the processes do that run the cells."""

import io
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from types import FrameType
from typing import Any

from poise.analysis.averages import Cell
from poise.analysis.summary import Summary
from poise.assembly import Experiment, check, scaled
from poise.assembly import simulate as run_simulation
from poise.cli.cores import spread, workers_for
from poise.cli.options import Request, request_of
from poise.cli.progress import Watch, watching
from poise.model.errors import RequestError, SolveError
from poise.model.units import counted
from poise.traces.fields import whole
from poise.traces.schema import Trace
from poise.traces.sources import STANDARD_INPUT
from poise.traces.synthetic import SYNTHETIC

_SEED = "seed="
_LARGEST_SEED = 2**63 - 1
_KEPT = 2
"""Traces that a process keeps: cells come seed by seed and load by load, and so few suffice."""


@dataclass(frozen=True, slots=True)
class Source:
    """What a request is made from again for every seed, in whichever process: nothing of it can be used up by reading.

    trace     as it was named
    piped     what came by a pipe, which can be read but once; None if it did not
    options   of the command line; their `seed` is that of the first run
    """

    trace: str
    piped: bytes | None
    options: dict[str, Any]
    policy: str

    @staticmethod
    def of(trace: str, options: dict[str, Any], policy: str) -> "Source":
        """Reads what comes by a pipe."""
        if trace == STANDARD_INPUT:
            return Source(trace, sys.stdin.buffer.read(), options, policy)
        if os.path.exists(trace) and not (os.path.isfile(trace) or os.path.isdir(trace)):
            with open(trace, "rb") as pipe:
                return Source(STANDARD_INPUT, pipe.read(), options, policy)
        return Source(trace, None, options, policy)

    def request(self, seed: int) -> Request:
        """The trace at load 1 and the experiment of the runs with a seed; a synthetic trace's own seed moves along.

        The trace keeps the name that it was given.
        """
        trace = reseeded(self.trace, seed - self.options["seed"])
        with nullcontext() if self.piped is None else _standard_input(self.piped):
            request = request_of(trace, {**self.options, "seed": seed, "load": 1.0}, self.policy)
        return request if trace == self.trace else replace(request, trace=replace(request.trace, name=self.trace))


@contextmanager
def _standard_input(content: bytes) -> Iterator[None]:
    before, sys.stdin = sys.stdin, io.TextIOWrapper(io.BytesIO(content))
    try:
        yield
    finally:
        sys.stdin = before


def reseeded(trace: str, later: int) -> str:
    """`synthetic:...,seed=S` with a seed that comes so many later; any other trace as it is."""
    if not trace.startswith(SYNTHETIC) or not later:
        return trace
    parts = [part for part in trace.removeprefix(SYNTHETIC).split(",") if part]
    own = next((part.removeprefix(_SEED) for part in parts if part.startswith(_SEED)), "0")
    kept = [part for part in parts if not part.startswith(_SEED)]
    moved = whole(own, "seed", 0, _LARGEST_SEED) + later
    if moved > _LARGEST_SEED:
        raise RequestError(f"{SYNTHETIC}seed: expected room for {counted(later, 'more seed')}, got {own}")
    return SYNTHETIC + ",".join([*kept, f"{_SEED}{moved}"])


def loaded(request: Request, load: float) -> Trace:
    """A request's trace, arriving so many times as fast. Raises RequestError if it cannot be run so."""
    trace = scaled(request.trace, load=load, most=None)
    check(trace, request.experiment)
    return trace


def run_cells(source: Source, cells: Sequence[Cell], *, quiet: bool) -> Generator[tuple[Cell, Summary], None, None]:
    """Run the cells on the cores there are; they come as they finish. Ctrl-C or SIGTERM ends it early."""
    with watching("cells", len(cells), quiet=quiet) as watch, _asked_to_end_like_ctrl_c():
        if workers_for(len(cells)) == 1:
            yield from _one_by_one(source, cells, watch)
            return
        for place, summary in spread(_run, cells, watch, begin=_begin, given=(source,)):
            yield cells[place], summary


def _one_by_one(source: Source, cells: Sequence[Cell], watch: Watch) -> Iterator[tuple[Cell, Summary]]:
    """In this process."""
    _begin(source)
    for done, cell in enumerate(cells):
        watch.show(done)
        summary = _run(cell, lambda _ended: not watch.interrupted)
        if summary.partial:
            return
        yield cell, summary


@contextmanager
def _asked_to_end_like_ctrl_c() -> Iterator[None]:
    def end(_signal: int, _frame: FrameType | None) -> None:
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


_source: Source
"""That of a worker process: handed over once, not with every cell."""


def _begin(source: Source) -> None:
    global _source
    _source = source
    _request.cache_clear()
    _setting.cache_clear()


@lru_cache(_KEPT)
def _request(seed: int) -> Request:
    return _source.request(seed)


@lru_cache(_KEPT)
def _setting(seed: int, load: float) -> tuple[Trace, Experiment]:
    request = _request(seed)
    return loaded(request, load), request.experiment


def _run(cell: Cell, watch: Callable[[int], bool] = lambda _ended: True) -> Summary:
    trace, experiment = _setting(cell.seed, cell.load)
    try:
        return run_simulation(trace, replace(experiment, policy=cell.policy), watch=watch).summary
    except SolveError as error:
        raise SolveError(f"{cell}: {error}") from None
