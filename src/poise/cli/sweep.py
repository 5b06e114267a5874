"""`poise compare --loads … --seeds …`: policies × loads × seeds over the cores, interrupted and resumed at will."""

import fcntl
import hashlib
import io
import json
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, fields, replace
from enum import Enum, auto
from functools import lru_cache
from importlib.metadata import version
from math import isfinite
from pathlib import Path
from types import FrameType, NoneType
from typing import IO, Any

import click

import poise
from poise.cli import INTERRUPTED
from poise.cli.options import ExperimentRequest, request_of
from poise.cli.output import Watch, check_writable, show_notes, show_table, watching
from poise.cli.parallel import spread, workers_for
from poise.lab.analysis.statistics import KEYS, Average, Cell, Grid, averaged
from poise.lab.analysis.summary import Summary
from poise.lab.experiment import Experiment, check, scaled
from poise.lab.experiment import simulate as run_simulation
from poise.lab.report.sweep import LEGEND, sweep_page, sweep_table
from poise.lab.traces.parsing import whole
from poise.lab.traces.reader import STANDARD_INPUT
from poise.lab.traces.schema import Trace
from poise.lab.traces.synthetic import SYNTHETIC
from poise.scheduler.model.errors import RequestError, SolveError
from poise.scheduler.model.units import counted

# The runs of a sweep: what differs from seed to seed, and what the processes do that run the cells.

_SEED = "seed="
_LARGEST_SEED = 2**63 - 1
_KEPT = 2
"""Traces that a process keeps: cells come seed by seed and load by load, and so few suffice."""


@dataclass(frozen=True, slots=True)
class SweepSource:
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
    def of(trace: str, options: dict[str, Any], policy: str) -> "SweepSource":
        """Reads what comes by a pipe."""
        if trace == STANDARD_INPUT:
            return SweepSource(trace, sys.stdin.buffer.read(), options, policy)
        if os.path.exists(trace) and not (os.path.isfile(trace) or os.path.isdir(trace)):
            with open(trace, "rb") as pipe:
                return SweepSource(STANDARD_INPUT, pipe.read(), options, policy)
        return SweepSource(trace, None, options, policy)

    def request(self, seed: int) -> ExperimentRequest:
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


def loaded(request: ExperimentRequest, load: float) -> Trace:
    """A request's trace, arriving so many times as fast. Raises RequestError if it cannot be run so."""
    trace = scaled(request.trace, load=load, most=None)
    check(trace, request.experiment)
    return trace


def run_cells(source: SweepSource, cells: Sequence[Cell], *, quiet: bool) -> Generator[tuple[Cell, Summary], None, None]:
    """Run the cells on the cores there are; they come as they finish. Ctrl-C or SIGTERM ends it early."""
    with watching("cells", len(cells), quiet=quiet) as watch, _asked_to_end_like_ctrl_c():
        if workers_for(len(cells)) == 1:
            yield from _one_by_one(source, cells, watch)
            return
        for place, summary in spread(_run_cell, cells, watch, begin=_begin, given=(source,)):
            yield cells[place], summary


def _one_by_one(source: SweepSource, cells: Sequence[Cell], watch: Watch) -> Iterator[tuple[Cell, Summary]]:
    """In this process."""
    _begin(source)
    for done, cell in enumerate(cells):
        watch.show(done)
        summary = _run_cell(cell, lambda _ended: not watch.interrupted)
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


_source: SweepSource
"""That of a worker process: handed over once, not with every cell."""


def _begin(source: SweepSource) -> None:
    global _source
    _source = source
    _request.cache_clear()
    _setting.cache_clear()


@lru_cache(_KEPT)
def _request(seed: int) -> ExperimentRequest:
    return _source.request(seed)


@lru_cache(_KEPT)
def _setting(seed: int, load: float) -> tuple[Trace, Experiment]:
    request = _request(seed)
    return loaded(request, load), request.experiment


def _run_cell(cell: Cell, watch: Callable[[int], bool] = lambda _ended: True) -> Summary:
    trace, experiment = _setting(cell.seed, cell.load)
    try:
        return run_simulation(trace, replace(experiment, policy=cell.policy), watch=watch).summary
    except SolveError as error:
        raise SolveError(f"{cell}: {error}") from None


# Finished cells of a sweep in a file, one line each, so that the sweep goes on where it was stopped.
#
# The first line is a header with a digest of everything that decides the numbers, but not of the grid: a sweep of more
# policies, loads or seeds takes over what is there. A line that was torn off by a crash is left out, and its cell run again.

FORMAT = 1
_LONGEST_HEADER = 1 << 16
_NUMBERS = ("numpy", "highspy")
"""What else computes."""
_SHOWING = {"cli", "report", "audit", "bench", "studies", "__pycache__"}
"""Rooms of ours that decide no number of a run: what is given on the command line is in the digest by itself."""


class NotASweepError(RequestError):
    """A file of another kind. It was left as it is."""


class CellStart(Enum):
    """Take over what a file holds, or forget it."""

    RESUME = auto()
    FRESH = auto()


@dataclass(slots=True)
class SweepState:
    """What is finished, in memory and, as long as that works, in a file. `unreadable` lines of it were left out."""

    done: dict[Cell, Summary] = field(default_factory=dict)
    unreadable: int = 0
    _troubles: list[str] = field(default_factory=list)
    _path: Path | None = None
    _stream: IO[bytes] | None = None

    @staticmethod
    def in_memory(why: str) -> "SweepState":
        """A state without a file."""
        return SweepState(_troubles=[f"{why}; finished cells are not kept, name a file by --state"])

    @property
    def path(self) -> Path | None:
        """The file that holds all that is finished; None if there is none."""
        return None if self._stream is None else self._path

    def keep(self, cell: Cell, summary: Summary) -> None:
        """One more cell is finished. The line is with the operating system before this returns."""
        self.done[cell] = summary
        if self._stream is None:
            return
        try:
            self._stream.write(_line({"load": cell.load} | summary.document()))
            self._stream.flush()
        except OSError as error:
            self._troubles.append(f"{self._path}: {error.strerror or error}; cells that finish from now on are not kept")
            self.close()  # what is torn now stays the last line

    def take_troubles(self) -> list[str]:
        """Why cells are not kept, if they are not; each trouble is told once."""
        told, self._troubles = self._troubles, []
        return told

    def close(self) -> None:
        """Let go of the file: another sweep may take it."""
        if self._stream is not None:
            with suppress(OSError):
                self._stream.close()
            self._stream = None

    def remove(self) -> None:
        """Take the file away; all is done."""
        self.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def opened(path: Path, digest: str, start: CellStart) -> SweepState:
    """The state in a file, which is made if it is not there; it is ours alone until the process ends.

    Raises RequestError for a file of another sweep, of something else, or at which another process works; OSError if it
    cannot be read or written.
    """
    if path.exists() and not path.is_file():
        raise RequestError(f"{path}: expected a file, or nothing yet")
    path.touch()
    stream = path.open("r+b")
    state = SweepState(_path=path, _stream=stream)
    try:
        _lock(stream, path)
        _take_over(state, stream, _line({"sweep": FORMAT, "poise": poise.__version__, "digest": digest}), start)
    except BaseException:
        state.close()
        raise
    return state


def _take_over(state: SweepState, stream: IO[bytes], header: bytes, start: CellStart) -> None:
    """Read what is there, and leave the stream behind the last whole line."""
    end = 0
    if _is_ours(stream, header, start):
        end = stream.tell()
        for line in stream:
            if line.endswith(b"\n"):
                end += len(line)
                _take(line, state)
    stream.seek(end)
    stream.truncate()
    if not end:
        stream.write(header)
        stream.flush()


def _lock(stream: IO[bytes], path: Path) -> None:
    """Processes that this one starts do not inherit such a lock: it is gone when this process is."""
    try:
        fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise RequestError(f"{path}: another sweep is at work on it; wait for it, or name another file by --state") from None
    except OSError:  # a file system without locks: better unguarded than not at all
        return


def _is_ours(stream: IO[bytes], header: bytes, start: CellStart) -> bool:
    """Whether there is something to go on with; the stream stands behind the header then. Refuses what is not ours."""
    first = stream.readline(_LONGEST_HEADER)
    if not first.endswith(b"\n") and header.startswith(first):
        return False  # empty, or torn off at once
    try:
        document = json.loads(first)
        is_sweep = isinstance(document, dict) and "sweep" in document
    except (ValueError, RecursionError):
        is_sweep = False
    if not is_sweep:
        raise NotASweepError(f"{stream.name}: expected the state of a sweep, got another kind of file; it was left as it is")
    if start is CellStart.FRESH:
        return False
    if first != header:
        raise RequestError(f"{stream.name}: holds another sweep, or one by another Poise; name another file, or add --fresh")
    return True


def _take(line: bytes, state: SweepState) -> None:
    try:
        row = json.loads(line)
        load = row.pop("load")
        summary = Summary(**row)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        state.unreadable += 1
        return
    if isinstance(load, float) and all(_fits(getattr(summary, each.name), each.type) for each in fields(Summary)):
        state.done[Cell(summary.policy, load, summary.seed)] = summary
    else:
        state.unreadable += 1


def _fits(value: object, kind: Any) -> bool:  # noqa: ANN401 - the type of a field
    """A whole number stands for a float, and None for one that JSON cannot write."""
    return isinstance(value, kind) or (isinstance(value, int | NoneType) and isinstance(0.0, kind))


def _line(document: Mapping[str, object]) -> bytes:
    return json.dumps(document, allow_nan=False).encode() + b"\n"


def default_place(digest: str) -> Path:
    """Where the state of a sweep is kept if nobody says where: the user's cache. Raises OSError if there is none."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    try:
        cache = Path(named) if os.path.isabs(named) else Path.home() / ".cache"
    except RuntimeError as error:
        raise OSError(str(error)) from None
    return cache / "poise" / "sweeps" / f"{digest[:32]}.jsonl"


def digest_of(trace: Trace, experiment: Experiment, options: Mapping[str, object]) -> str:
    """One for everything that decides the numbers of a cell: our code, the trace, the cluster, tables, options, files."""
    whole = hashlib.sha256()
    for part in _parts(trace, experiment, options):
        whole.update(hashlib.sha256(part).digest())
    return whole.hexdigest()


def _parts(trace: Trace, experiment: Experiment, options: Mapping[str, object]) -> Iterable[bytes]:
    yield repr([poise.__version__, *(version(each) for each in _NUMBERS)]).encode()
    package = Path(poise.__file__).parent
    for file in sorted(package.rglob("*")):  # a version number stays while code is worked on
        if file.is_file() and not _SHOWING.intersection(file.relative_to(package).parts):
            yield file.read_bytes()
    yield repr(sorted(options.items())).encode()
    for value in options.values():
        if isinstance(value, str) and os.path.isfile(value):
            yield Path(value).read_bytes()
    yield repr(experiment.cluster).encode()
    for table in (experiment.throughputs, experiment.truths):
        yield repr(table and (table, table.alone(), table.together())).encode()
    for each in trace.jobs:
        yield repr(each).encode()


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
    start: CellStart


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
    source = SweepSource.of(trace, options, names[0])
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


def _check_all(request: ExperimentRequest, grid: Grid) -> None:
    """Refuse before any work what would be refused in the middle of it."""
    for name in grid.policies:
        replace(request.experiment, policy=name).effective_policy()
    loaded(request, min(grid.loads))  # of all loads it takes the longest, and has room for the most outages


def _state(asked: Sweep, request: ExperimentRequest, source: SweepSource) -> SweepState:
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
        return SweepState.in_memory(f"{where}{error.strerror or error}")


def _opened_in_cache(place: Path, digest: str, start: CellStart) -> SweepState:
    """The file's name is ours: what is no state in it is what a crash has left of one."""
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        return opened(place, digest, start)
    except NotASweepError:
        place.unlink()
        return opened(place, digest, start)


def _notes_before(state: SweepState, grid: Grid) -> Iterator[str]:
    yield from state.take_troubles()
    if state.unreadable:
        yield f"{state.path}: lines that could not be read and are left out: {state.unreadable:,}"
    there = sum(cell in state.done for cell in grid.cells())
    if there:
        yield f"{there:,} of {len(grid):,} cells were there already"


def _run(source: SweepSource, grid: Grid, state: SweepState, *, quiet: bool) -> None:
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


def _show(rows: Sequence[Average], request: ExperimentRequest, grid: Grid, html: Path | None) -> None:
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


def _intro(rows: Sequence[Average], request: ExperimentRequest, grid: Grid) -> str:
    runs = sum(len(row.runs) for row in rows)
    partial = f" The sweep was interrupted: {runs:,} of its {len(grid):,} runs are in here." if runs < len(grid) else ""
    jobs, seeds = counted(len(request.trace.jobs), "job"), counted(len(grid.seeds), "seed")
    return f"{jobs} of {request.trace.name} on {request.experiment.cluster}: means over {seeds}.{partial}"


def _conclude(state: SweepState, asked: Sweep, grid: Grid) -> int:
    """The exit code; a file of ours is needed no more once everything is done."""
    done = sum(cell in state.done for cell in grid.cells())
    if done == len(grid):
        if asked.state is None:
            state.remove()
        return 0
    further = "the same command goes on from here" if state.path else "nothing was kept to go on from"
    click.echo(f"poise: interrupted; {done:,} of {len(grid):,} cells are done; {further}", err=True)
    return INTERRUPTED
