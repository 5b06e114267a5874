"""`poise compare --loads … --seeds …`: policies × loads × seeds on all cores, interrupted and resumed at will.

`sweep` is the command. Below it: the cells (what a process does for one policy, load and seed), and the file that keeps
finished cells, so that a sweep resumes where it was stopped.
"""

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
from poise.cli.experiment import ExperimentRequest, read_experiment
from poise.cli.options import print_json
from poise.cli.output import check_writable, show_notes, show_table, watching
from poise.cli.outside import find_policy
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

MOST_SEEDS = 10_000
MOST_CELLS = 1_000_000
_DECIDE_NOTHING = ("as_json", "quiet", "load")
"""Options that change no number of a cell; its load is part of the grid."""


class CellStart(Enum):
    """Resume from what a file holds, or discard it."""

    RESUME = auto()
    FRESH = auto()


@dataclass(frozen=True, slots=True)
class Sweep:
    """What to sweep over, and where finished cells are kept; `state` None: in the user's cache."""

    loads: tuple[float, ...]
    seeds: int
    state: Path | None
    start: CellStart


def parse_loads(text: str, option: str = "--loads") -> tuple[float, ...]:
    """`0.5,1,2`: different numbers above 0."""
    loads: list[float] = []
    for part in text.split(","):
        try:
            load = float(part)
        except ValueError:
            load = float("nan")
        if not (isfinite(load) and load > 0):
            raise RequestError(f"{option}: expected finite numbers above 0, e.g. 0.5,1,2, got {part.strip()[:50]!r}")
        if load in loads:
            raise RequestError(f"{option}: expected different numbers, got {load:g} twice")
        loads.append(load)
    return tuple(loads)


def sweep(trace: str, names: Sequence[str], asked: Sweep, html: Path | None, options: dict[str, Any]) -> int:
    """Run the cells that are not finished yet, keep their results, show everything; the exit code."""
    grid = _grid(names, asked, options["seed"])
    check_writable("--state", asked.state)
    source = SweepSource.of(trace, options, names[0])
    request = source.request(options["seed"])
    quiet = request.quiet
    # Refuse before any work what would be refused in the middle of it. The lowest load takes the longest, and so has room
    # for the most outages; the last seed is the largest.
    for name in grid.policies:
        find_policy(name)
        replace(request.experiment, policy=name).effective_policy()
    at_load(request, min(grid.loads))
    reseeded(trace, asked.seeds - 1)
    show_notes(request.notes, quiet=quiet)
    with closing(_open_state(asked, request, source)) as state:
        show_notes(list(_notes_before(state, grid)), quiet=quiet)
        left = [cell for cell in grid.cells() if cell not in state.done]
        if left:
            # A second Ctrl-C stops at once; what is finished by then is shown all the same.
            with suppress(KeyboardInterrupt), closing(run_cells(source, left, quiet=quiet)) as finished:
                for cell, summary in finished:
                    state.keep(cell, summary)
        show_notes(state.take_troubles(), quiet=quiet)
        rows = averaged(state.done, grid)
        show_notes(list(_notes_after(rows)), quiet=quiet)
        _show(rows, request, grid, html)
        done = sum(cell in state.done for cell in grid.cells())
        if done == len(grid):
            if asked.state is None:
                state.remove()
            return 0
        further = "the same command goes on from here" if state.path else "nothing was kept to go on from"
        click.echo(f"poise: interrupted; {done:,} of {len(grid):,} cells are done; {further}", err=True)
        return INTERRUPTED


def _grid(names: Sequence[str], asked: Sweep, seed: int) -> Grid:
    twice = next((name for place, name in enumerate(names) if name in names[:place]), None)
    if twice is not None:
        raise RequestError(f"--policies: expected different policies, got {twice} twice")
    grid = Grid(tuple(names), asked.loads, tuple(range(seed, seed + asked.seeds)))
    if len(grid) > MOST_CELLS:
        raise RequestError(f"expected at most {MOST_CELLS:,} cells (policies × loads × seeds), got {len(grid):,}")
    return grid


def _open_state(asked: Sweep, request: ExperimentRequest, source: "SweepSource") -> "SweepState":
    """What is finished already. A file that was named must work; the sweep continues without one in the cache."""
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
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            return opened(place, digest, asked.start)
        except NotASweepError:  # the name of the file is ours: it is what a crash has left of a state
            place.unlink()
            return opened(place, digest, asked.start)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return SweepState.in_memory(f"{where}{error.strerror or error}")


def _notes_before(state: "SweepState", grid: Grid) -> Iterator[str]:
    yield from state.take_troubles()
    if state.unreadable:
        yield f"{state.path}: lines that could not be read and are left out: {state.unreadable:,}"
    there = sum(cell in state.done for cell in grid.cells())
    if there:
        yield f"{there:,} of {len(grid):,} cells were there already"


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
    seeds = counted(len(grid.seeds), "seed")
    try:
        if request.as_json:
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
    if html is not None and not request.as_json:
        click.echo(f"report: {html}")


# Cells: what differs from seed to seed, and what the processes do that run them.

_SEED = "seed="
_LARGEST_SEED = 2**63 - 1
_CACHED = 2
"""Traces that a process keeps: cells come seed by seed and load by load, so that few suffice."""


@dataclass(frozen=True, slots=True)
class SweepSource:
    """What a request is made from again for every seed, in whichever process: reading it does not use it up.

    trace     as it was named
    piped     the content of a pipe, which can be read only once; None if the trace is none
    options   of the command line; their `seed` is that of the first run
    """

    trace: str
    piped: bytes | None
    options: dict[str, Any]
    policy: str

    @staticmethod
    def of(trace: str, options: dict[str, Any], policy: str) -> "SweepSource":
        """The source of this trace; a pipe is read."""
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
            request = read_experiment(trace, {**self.options, "seed": seed, "load": 1.0}, self.policy)
        return request if trace == self.trace else replace(request, trace=replace(request.trace, name=self.trace))


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
    """A request's trace, arriving `load` times as fast. Raises RequestError if it cannot be run so."""
    trace = scaled(request.trace, load=load, most=None)
    check(trace, request.experiment)
    return trace


def run_cells(source: SweepSource, cells: Sequence[Cell], *, quiet: bool) -> Generator[tuple[Cell, Summary], None, None]:
    """Run the cells on all cores, and yield them as they finish. Ctrl-C or SIGTERM ends it early."""
    with watching("cells", len(cells), quiet=quiet) as watch, _sigterm_like_ctrl_c():
        if workers_for(len(cells)) > 1:
            for place, summary in spread(_run_cell, cells, watch, initialize=_initialize, arguments=(source,)):
                yield cells[place], summary
            return
        _initialize(source)
        for done, cell in enumerate(cells):
            watch.show(done)
            summary = _run_cell(cell, lambda _ended: not watch.interrupted)
            if summary.partial:
                return
            yield cell, summary


@contextmanager
def _sigterm_like_ctrl_c() -> Iterator[None]:
    def end(_signal: int, _frame: FrameType | None) -> None:
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


_source: SweepSource
"""The source of a worker process: handed over once, not with every cell."""


def _initialize(source: SweepSource) -> None:
    global _source
    _source = source
    _request.cache_clear()
    _setting.cache_clear()


@lru_cache(_CACHED)
def _request(seed: int) -> ExperimentRequest:
    return _source.request(seed)


@lru_cache(_CACHED)
def _setting(seed: int, load: float) -> tuple[Trace, Experiment]:
    request = _request(seed)
    return at_load(request, load), request.experiment


def _run_cell(cell: Cell, watch: Callable[[int], bool] = lambda _ended: True) -> Summary:
    trace, experiment = _setting(cell.seed, cell.load)
    try:
        return run_simulation(trace, replace(experiment, policy=cell.policy), watch=watch).summary
    except SolveError as error:
        raise SolveError(f"{cell}: {error}") from None


# The state: finished cells in a file, one line each.
#
# The first line is a header with a digest of everything that decides the numbers, but not of the grid: a sweep of more
# policies, loads or seeds takes over what is there. A line that was cut off by a crash is left out, and its cell run again.

FORMAT = 1
_LONGEST_HEADER = 1 << 16
_NUMERIC = ("numpy", "highspy")
"""Dependencies that compute numbers; their versions are in the digest."""
_DECIDE_NO_NUMBER = {
    "cli", "client.py", "durable.py", "service", "worker", "report", "audit", "bench.py", "__pycache__",
}  # fmt: skip
"""Files and folders of the package on which no simulation depends; what the command line says is in the digest by itself."""


class NotASweepError(RequestError):
    """A file of another kind. It was left as it is."""


@dataclass(slots=True)
class SweepState:
    """Finished cells, in memory and, as long as that works, in a file. `unreadable`: lines of it that were left out."""

    done: dict[Cell, Summary] = field(default_factory=dict)
    unreadable: int = 0
    _troubles: list[str] = field(default_factory=list)
    _path: Path | None = None
    _stream: IO[bytes] | None = None
    """None: there is no file, or it is closed."""

    @staticmethod
    def in_memory(why: str) -> "SweepState":
        """A state without a file."""
        return SweepState(_troubles=[f"{why}; finished cells are not kept, name a file by --state"])

    @property
    def path(self) -> Path | None:
        """The file that holds all finished cells; None if there is none."""
        return None if self._stream is None else self._path

    def keep(self, cell: Cell, summary: Summary) -> None:
        """Add a finished cell. Its line is with the operating system before this returns."""
        self.done[cell] = summary
        if self._stream is None:
            return
        try:
            self._stream.write(_line({"load": cell.load} | summary.document()))
            self._stream.flush()
        except OSError as error:
            self._troubles.append(f"{self._path}: {error.strerror or error}; cells that finish from now on are not kept")
            self.close()  # a line that is cut off now stays the last one

    def take_troubles(self) -> list[str]:
        """Why cells are not kept, if they are not; each trouble is returned once."""
        found, self._troubles = self._troubles, []
        return found

    def close(self) -> None:
        """Release the file: another sweep may use it."""
        if self._stream is not None:
            with suppress(OSError):
                self._stream.close()
            self._stream = None

    def remove(self) -> None:
        """Delete the file."""
        self.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def opened(path: Path, digest: str, start: CellStart) -> SweepState:
    """The state in a file, which is made if it is not there; it is locked until the process ends.

    Raises RequestError for a file of another sweep, of something else, or at which another process works; OSError if it
    cannot be read or written.
    """
    if path.exists() and not path.is_file():
        raise RequestError(f"{path}: expected a file, or nothing yet")
    path.touch()
    stream = path.open("r+b")
    state = SweepState(_path=path, _stream=stream)
    header = _line({"sweep": FORMAT, "poise": poise.__version__, "digest": digest})
    try:
        # Processes that this one starts do not inherit such a lock: it is gone when this process is.
        with suppress(OSError):  # a file system without locks: better unguarded than not at all
            try:
                fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                problem = "another sweep is at work on it; wait for it, or name another file by --state"
                raise RequestError(f"{path}: {problem}") from None
        end = 0
        if _is_resumable(stream, header, start):
            end = stream.tell()
            for line in stream:
                if line.endswith(b"\n"):
                    end += len(line)
                    _take(line, state)
        stream.seek(end)
        stream.truncate()  # after the last whole line
        if not end:
            stream.write(header)
            stream.flush()
    except BaseException:
        state.close()
        raise
    return state


def _is_resumable(stream: IO[bytes], header: bytes, start: CellStart) -> bool:
    """Whether there are cells to resume from; the stream is behind the header then. Refuses a file of another kind."""
    first = stream.readline(_LONGEST_HEADER)
    if not first.endswith(b"\n") and header.startswith(first):
        return False  # empty, or cut off at once
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
    """Add the cell of a line, if the line is whole and every field has its type."""
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
    """Whether JSON's value stands for the type: a whole number for a float, None for a float that JSON cannot write."""
    return isinstance(value, kind) or (isinstance(value, int | NoneType) and isinstance(0.0, kind))


def _line(document: Mapping[str, object]) -> bytes:
    return json.dumps(document, allow_nan=False).encode() + b"\n"


def default_place(digest: str) -> Path:
    """Where the state of a sweep is kept by default: the user's cache. Raises OSError if there is none."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    try:
        cache = Path(named) if os.path.isabs(named) else Path.home() / ".cache"
    except RuntimeError as error:
        raise OSError(str(error)) from None
    return cache / "poise" / "sweeps" / f"{digest[:32]}.jsonl"


def digest_of(trace: Trace, experiment: Experiment, options: Mapping[str, object]) -> str:
    """A digest of everything that decides the numbers of a cell: code, trace, cluster, tables, options and files."""
    whole = hashlib.sha256()
    for part in _digested(trace, experiment, options):
        whole.update(hashlib.sha256(part).digest())
    return whole.hexdigest()


def _digested(trace: Trace, experiment: Experiment, options: Mapping[str, object]) -> Iterable[bytes]:
    yield repr([poise.__version__, *(version(each) for each in _NUMERIC)]).encode()
    package = Path(poise.__file__).parent
    for file in sorted(package.rglob("*")):  # the version number does not change while code is worked on
        if file.is_file() and not _DECIDE_NO_NUMBER.intersection(file.relative_to(package).parts):
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
