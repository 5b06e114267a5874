"""Finished cells of a sweep in a file, one line each, so that the sweep goes on where it was stopped.

The first line is a header with a digest of everything that decides the numbers, but not of the grid: a sweep of more
policies, loads or seeds takes over what is there. A line that was torn off by a crash is left out, and its cell run again.
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
from poise.analysis.averages import Cell
from poise.analysis.summary import Summary
from poise.assembly import Experiment
from poise.model.errors import RequestError
from poise.traces.schema import Trace

FORMAT = 1
_LONGEST_HEADER = 1 << 16
_NUMBERS = ("numpy", "highspy")
"""What else computes."""
_SHOWING = {"cli", "report", "audit", "bench", "studies", "__pycache__"}
"""Rooms of ours that decide no number of a run: what is given on the command line is in the digest by itself."""


class NotASweepError(RequestError):
    """A file of another kind. It was left as it is."""


class Start(Enum):
    """Take over what a file holds, or forget it."""

    RESUME = auto()
    FRESH = auto()


@dataclass(slots=True)
class State:
    """What is finished, in memory and, as long as that works, in a file. `unreadable` lines of it were left out."""

    done: dict[Cell, Summary] = field(default_factory=dict)
    unreadable: int = 0
    _troubles: list[str] = field(default_factory=list)
    _path: Path | None = None
    _stream: IO[bytes] | None = None

    @staticmethod
    def in_memory(why: str) -> "State":
        """A state without a file."""
        return State(_troubles=[f"{why}; finished cells are not kept, name a file by --state"])

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


def opened(path: Path, digest: str, start: Start) -> State:
    """The state in a file, which is made if it is not there; it is ours alone until the process ends.

    Raises RequestError for a file of another sweep, of something else, or at which another process works; OSError if it
    cannot be read or written.
    """
    if path.exists() and not path.is_file():
        raise RequestError(f"{path}: expected a file, or nothing yet")
    path.touch()
    stream = path.open("r+b")
    state = State(_path=path, _stream=stream)
    try:
        _lock(stream, path)
        _take_over(state, stream, _line({"sweep": FORMAT, "poise": poise.__version__, "digest": digest}), start)
    except BaseException:
        state.close()
        raise
    return state


def _take_over(state: State, stream: IO[bytes], header: bytes, start: Start) -> None:
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


def _is_ours(stream: IO[bytes], header: bytes, start: Start) -> bool:
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
    if start is Start.FRESH:
        return False
    if first != header:
        raise RequestError(f"{stream.name}: holds another sweep, or one by another Poise; name another file, or add --fresh")
    return True


def _take(line: bytes, state: State) -> None:
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
