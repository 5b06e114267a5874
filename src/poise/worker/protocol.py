"""The worker's side of the lease protocol, version 1 (docs/reference/lease-protocol.md): files and variables, nothing else.

Files are in the run's directory, JSON, each replaced atomically:

    lease.json      read by rank 0: {"version", "job", "epoch", "ends", "cause", "text"}; once `ends` is a number, leave
    stop.json       written by rank 0, read by the others: {"version", "step"}: stop before that step
    save.json       the same for checkpoints that all ranks take part in
    stop.acknowledged.json, save.acknowledged.json
                    read by rank 0 of a run of several nodes: {"version", "step"}: all nodes have that file
    rank-<r>.json   see rank_state.py
    progress.json   written by rank 0, see progress.py
    failure.json    {"version", "cause", "text"}: why the run is about to leave with exit code 73
"""

import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

VERSION = 1
YIELDED = 75  # exit code of a run that left when asked to, with its work saved (EX_TEMPFAIL)
CHECKPOINT_FAILED = 73
"""Exit code of a run whose checkpoint could not be written at the end of its lease, or not be read at its start."""
CHECKPOINT_CAUSE = "model-checkpoint-error"

LEASE, STOP, SAVE, PROGRESS, FAILURE = "lease.json", "stop.json", "save.json", "progress.json", "failure.json"

Value = TypeVar("Value")


def acknowledged(name: str) -> str:
    """Return the file that says which version of a file of rank 0 all nodes of the run have."""
    return f"{name.removesuffix('.json')}.acknowledged.json"


class WorkerError(RuntimeError):
    """The training script, or the environment that it was started in, is not as this library expects it."""


class Notice(NamedTuple):
    """Why the lease ends. `ends`: seconds since 1970 at which the processes are made to leave; None: not known."""

    ends: float | None
    cause: str
    text: str


class WorkerEnv(NamedTuple):
    """What the environment says of this process and its job."""

    run_dir: str | None  # of the lease protocol; None: outside Poise
    checkpoint_dir: str | None
    checkpoint_every: float | None  # seconds between periodic checkpoints; None: none
    rank: int
    world_size: int
    nodes: int  # nodes that the processes are on
    micro_batches: int | None  # per step of the job; None: not said
    rank_speeds: tuple[float, ...]  # relative speed by rank; empty: all alike
    lease_steps: int | None  # steps after which the lease ends, for tests; None: when Poise says so


def worker_env(variables: Mapping[str, str]) -> WorkerEnv:
    """Read the environment; a WorkerError names a variable whose value is impossible."""
    run_dir = variables.get("POISE_RUN_DIR") or None
    if run_dir and variables.get("POISE_LEASE_VERSION", str(VERSION)) != str(VERSION):
        given = variables["POISE_LEASE_VERSION"]
        raise WorkerError(
            f"POISE_LEASE_VERSION: the service speaks version {given}, this library {VERSION}; install its Poise"
        )
    world_size = _read(variables, "WORLD_SIZE", _count) or 1
    rank = _read(variables, "RANK", int) or 0
    speeds = _read(variables, "POISE_RANK_SPEEDS", lambda text: tuple(map(_positive, text.split(",")))) or ()
    if not 0 <= rank < world_size:
        raise WorkerError(f"RANK: expected 0 to {world_size - 1} as WORLD_SIZE is {world_size}, got {rank}")
    if speeds and len(speeds) != world_size:
        raise WorkerError(f"POISE_RANK_SPEEDS: expected {world_size} numbers, one a rank, got {len(speeds)}")
    return WorkerEnv(
        run_dir=run_dir,
        checkpoint_dir=variables.get("POISE_CHECKPOINT_DIR") or None,
        checkpoint_every=_read(variables, "POISE_CHECKPOINT_EVERY", _positive),
        rank=rank,
        world_size=world_size,
        nodes=_read(variables, "POISE_NODES", _count) or 1,
        micro_batches=_read(variables, "POISE_MICRO_BATCHES", _count),
        rank_speeds=speeds,
        lease_steps=_read(variables, "POISE_LEASE_STEPS", _count),
    )


def _read(variables: Mapping[str, str], name: str, parse: Callable[[str], Value]) -> Value | None:
    text = variables.get(name, "")
    if not text:
        return None
    try:
        return parse(text)
    except ValueError:
        raise WorkerError(f"{name}: cannot be {text!r}") from None


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise ValueError(text)
    return number


class WatchedFile:
    """A file of the run's directory that another process writes: one `stat` per look, read again only when replaced."""

    def __init__(self, run_dir: str | None, name: str) -> None:
        self._path = None if run_dir is None else os.path.join(run_dir, name)
        self._seen: tuple[int, int] | None = None
        self._fields: dict[str, Any] = {}

    def fields(self) -> dict[str, Any]:
        """Return its contents; empty if it is missing or cannot be read."""
        if self._path is None:
            return {}
        try:
            stat = os.stat(self._path)
        except OSError:
            return {}
        if (stat.st_mtime_ns, stat.st_ino) != self._seen:
            self._seen, self._fields = (stat.st_mtime_ns, stat.st_ino), {}
            with suppress(OSError, ValueError), open(self._path, encoding="utf-8") as file:
                found = json.load(file)
                if isinstance(found, dict) and found.get("version") == VERSION:
                    self._fields = found
        return self._fields


def notice_in(fields: Mapping[str, Any]) -> Notice | None:
    """Return the end of the lease, if lease.json has one."""
    ends = fields.get("ends")
    if not isinstance(ends, int | float):
        return None
    return Notice(float(ends), str(fields.get("cause") or "lease-end"), str(fields.get("text") or "the lease ends"))


def replace_json(run_dir: str, name: str, fields: Mapping[str, object], flush: Callable[[int], None] = os.fsync) -> None:
    """Replace a file of the run's directory atomically. `flush` is called with the open file before the rename."""
    path = os.path.join(run_dir, name)
    part = f"{path}.{os.getpid()}.part"  # ranks that fail together write the same file
    with open(part, "w", encoding="utf-8") as file:
        json.dump({"version": VERSION, **fields}, file, allow_nan=False)
        file.flush()
        flush(file.fileno())
    os.replace(part, path)


def say(text: str) -> None:
    """Write a line to the job's log."""
    sys.stderr.write(f"poise: {text}\n")
    sys.stderr.flush()


def say_traceback() -> None:
    """Write the traceback of the current exception to the job's log."""
    from traceback import print_exc  # here: seldom needed, and slow to import

    print_exc(file=sys.stderr)
