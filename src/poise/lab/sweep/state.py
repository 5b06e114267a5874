"""Finished cells of a sweep in a file, one line each, so that the sweep resumes where it was stopped.

The first line is a header with a digest of everything that decides the numbers, but not of the grid: a sweep of more
policies, loads or seeds takes over what is there. A line that was cut off by a crash is left out, and its cell run again.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from enum import Enum, auto
from importlib.metadata import version
from pathlib import Path
from types import NoneType
from typing import IO, Any

import poise
from poise.engine.outside import source_files
from poise.lab.analysis.statistics import Cell, Grid
from poise.lab.analysis.summary import Summary
from poise.lab.experiment import Experiment
from poise.lab.options import ExperimentRequest
from poise.lab.sweep.cells import SweepSource
from poise.lab.traces.schema import Trace
from poise.lab.traces.synthetic import SYNTHETIC
from poise.scheduler.model.errors import RequestError

FORMAT = 1
_LONGEST_HEADER = 1 << 16
_NUMERIC = ("numpy", "highspy")
"""Dependencies that compute numbers; their versions are in the digest."""
_DECIDE_NO_NUMBER = {
    "cli", "client.py", "durable.py", "service", "worker", "report", "audit", "bench.py", "library", "__pycache__",
}  # fmt: skip
"""Files and folders of the package on which no simulation depends; what the command line says is in the digest by itself."""


class CellStart(Enum):
    """Resume from what a file holds, or discard it."""

    RESUME = auto()
    FRESH = auto()


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


def opened(path: Path, digest: str, start: CellStart, *, afresh: str = "add --fresh") -> SweepState:
    """The state in a file, which is made if it is not there; it is locked until the process ends.

    afresh   how to have what the file holds forgotten

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
                problem = "another sweep is at work on it; wait for it, or name another file"
                raise RequestError(f"{path}: {problem}") from None
        end = 0
        if _is_resumable(stream, header, start, afresh):
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


def _is_resumable(stream: IO[bytes], header: bytes, start: CellStart, afresh: str) -> bool:
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
        raise RequestError(f"{stream.name}: holds another sweep, or one by another Poise; name another file, or {afresh}")
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


def digest_of_sweep(source: SweepSource, request: ExperimentRequest, grid: Grid) -> str:
    """Return the digest of a sweep; of its policies, it holds the files of those from outside, which may change."""
    drawn_from = source.trace if isinstance(source.trace, str) and source.trace.startswith(SYNTHETIC) else None
    outside = {f"policy {name}": file for name in grid.policies for file in source_files(name)}
    options = {**source.options.deciding(), "synthetic": drawn_from, **outside}
    return digest_of(request.trace, request.experiment, options)


def digest_of(trace: Trace, experiment: Experiment, options: Mapping[str, object]) -> str:
    """Return a digest of everything that decides the numbers of a cell: code, trace, cluster, tables, options and files."""
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
    cluster = experiment.cluster
    yield repr((cluster.nodes, cluster.speeds, cluster.prices)).encode()
    for table in (experiment.throughputs, experiment.truths):
        yield repr(table and (table, table.alone(), table.together())).encode()
    for each in trace.jobs:
        yield repr(each).encode()
