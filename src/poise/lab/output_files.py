"""Files of results, which are looked at before any work is done, so that no run is lost and nothing else is overwritten.

What an earlier run wrote is replaced, and a note says so; anything else in the way is left alone, unless it is forced.
Messages begin with the option that names the file, as the caller spells it.
"""

import json
import os
import re
from collections.abc import Sequence
from enum import Enum
from pathlib import Path

from poise.engine.journal import NAME
from poise.lab.analysis.run_tables import PER_JOB_COLUMNS
from poise.lab.analysis.summary import Summary
from poise.lab.columns import Table
from poise.lab.report.page import GENERATOR
from poise.scheduler.model.errors import RequestError

SUMMARY, JOBS, COMPARISON = "summary.json", "jobs.csv", "comparison.json"
"""Files of a folder beside the journal; the last one is that of a folder that holds several runs."""
_RECOGNISED = 4096
"""Bytes of a file by which its kind is recognised."""
_UNUSUAL = re.compile(r"[^A-Za-z0-9_.,=+-]")
_LONGEST = 100
"""Characters of the name of a policy's folder."""


class OutputKind(Enum):
    """Files that commands write, each with the bytes by which it is recognised."""

    REPORT = f'name="generator" content="{GENERATOR}"'.encode()
    ROWS_CSV = ",".join(PER_JOB_COLUMNS[:6]).encode()
    ROWS_JSON = f'\n  "{PER_JOB_COLUMNS[0]}":'.encode()
    JOURNAL = b'{"journal":'
    COMPARISON = b'[\n {\n  "policy":'


def check_writable(option: str, path: Path | None) -> None:
    """Refuse a file that cannot be written: its folder must be there, and allow it."""
    if path is None:
        return
    if not os.path.isdir(path.parent):
        raise RequestError(f"{option} {path}: there is no folder {path.parent}")
    try:
        path.stat()
        is_there = True
    except FileNotFoundError:
        is_there = False
    except OSError as error:  # links in a circle, a name that is too long
        raise RequestError(f"{option} {path}: cannot be written: {error.strerror or error}") from None
    if not os.access(path if is_there else path.parent, os.W_OK):
        raise RequestError(f"{option} {path}: cannot be written: permission denied")


def check_file(option: str, path: Path | None, kind: OutputKind, *, force: bool) -> list[str]:
    """Refuse a file that cannot be written, or that is there and of another kind; the notes on one that is replaced."""
    check_writable(option, path)
    if path is not None and path.is_dir():
        raise RequestError(f"{option} {path}: is a folder; name a file")
    if path is None or not path.is_file() or not (begin := _beginning(path)):  # a device, a pipe, nothing, or an empty file
        return []
    if kind.value in begin:
        return [f"{option} {path}: replaces what an earlier run wrote"]
    if not force:
        raise RequestError(f"{option} {path}: there is a file of another kind; name another one{_or_force(option)}")
    return [f"{option} {path}: replaces a file of another kind"]


def check_folder(option: str, path: Path | None, *, force: bool) -> list[str]:
    """Refuse a folder that holds something, but no run; the notes on one whose run is replaced."""
    if path is None or not path.is_dir():
        return []
    try:
        names = sorted(os.listdir(path))
        is_run = any(
            (path / name).is_file() and _beginning(path / name).startswith(kind.value)
            for name, kind in ((NAME, OutputKind.JOURNAL), (COMPARISON, OutputKind.COMPARISON))
        )
    except OSError as error:
        raise RequestError(f"{option} {path}: cannot be read: {error.strerror or error}") from None
    if not names:
        return []
    if is_run:
        return [f"{option} {path}: replaces what an earlier run wrote"]
    if not force:
        raise RequestError(f"{option} {path}: holds {names[0]} and no run; name a new folder{_or_force(option)}")
    return [f"{option} {path}: writes into a folder that holds other things"]


def _or_force(option: str) -> str:
    """What the command line can be told besides."""
    return ", or add --force" if option.startswith("--") else ""


def make_folder(option: str, path: Path | None) -> None:
    """Make a folder, and those above it, unless it is there."""
    if path is None:
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"{option} {path}: cannot be made: {error.strerror or error}") from None
    if not os.access(path, os.W_OK):
        raise RequestError(f"{option} {path}: cannot be written: permission denied")


def _beginning(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_RECOGNISED)


def write_run(folder: Path, summary: Summary, jobs: Table) -> None:
    """Write a run's summary and its jobs beside the journal. CPU times stay out, so that equal runs leave equal bytes."""
    text = json.dumps(summary.repeatable(), indent=1, allow_nan=False)
    (folder / SUMMARY).write_text(text + "\n", encoding="utf-8")
    jobs.write(folder / JOBS)


def write_comparison(folder: Path, summaries: Sequence[Summary]) -> None:
    """Write the summaries of several runs, whose own folders are beside it."""
    text = json.dumps([summary.repeatable() for summary in summaries], indent=1, allow_nan=False)
    (folder / COMPARISON).write_text(text + "\n", encoding="utf-8")


def run_folders(folder: Path, policies: Sequence[str]) -> dict[str, Path]:
    """Return a folder of its own for each policy, named after it in characters that every file system takes."""
    found: dict[str, Path] = {}
    for policy in policies:
        name = _UNUSUAL.sub("-", policy)[:_LONGEST].strip(".") or "policy"
        while folder / name in found.values():
            name += "-"
        found[policy] = folder / name
    return found
