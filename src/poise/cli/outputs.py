"""Where results go: looked at before any work is done, so that no run is lost, and nothing else is written over.

What an earlier run wrote is replaced, and a note says so. Anything else that stands in the way is left alone, unless --force
says otherwise.
"""

import os
from enum import Enum, auto
from pathlib import Path

import click

from poise.cli.per_job import FIRST_COLUMNS
from poise.engine.journal_file import NAME
from poise.model.errors import RequestError
from poise.report.page import GENERATOR

_LOOKED_AT = 4096
"""Bytes of a file that say what kind it is."""


class Over(Enum):
    """What may be written over: what earlier runs wrote, or anything."""

    OWN = auto()
    ANYTHING = auto()


class Kind(Enum):
    """Files that commands write, each with the bytes that give it away."""

    REPORT = f'name="generator" content="{GENERATOR}"'.encode()
    ROWS_CSV = ",".join(FIRST_COLUMNS).encode()
    ROWS_JSON = f'[\n {{\n  "{FIRST_COLUMNS[0]}":'.encode()
    JOURNAL = b'{"journal":'


force_option = click.option("--force", is_flag=True, help="Write over files and folders of other kinds too.")


def over(*, force: bool) -> Over:
    """What the option says."""
    return Over.ANYTHING if force else Over.OWN


def check_writable(option: str, path: Path | None) -> None:
    """Refuse a file that cannot be written: its folder must be there, and allow it."""
    if path is None:
        return
    if not os.path.isdir(path.parent):
        raise RequestError(f"{option} {path}: there is no folder {path.parent}")
    if not os.access(path if os.path.exists(path) else path.parent, os.W_OK):
        raise RequestError(f"{option} {path}: cannot be written: permission denied")


def check_file(option: str, path: Path | None, kind: Kind, allowed: Over) -> list[str]:
    """Refuse a file that cannot be written, or that is there and of another kind; what to say of one that is replaced."""
    check_writable(option, path)
    if path is None or not path.is_file() or not (begin := _beginning(path)):  # a device, a pipe, nothing, or an empty file
        return []
    if kind.value in begin:
        return [f"{option} {path}: replaces what an earlier run wrote"]
    if allowed is Over.OWN:
        raise RequestError(f"{option} {path}: there is a file of another kind; name another one, or add --force")
    return [f"{option} {path}: replaces a file of another kind"]


def check_ending(path: Path | None) -> None:
    """Refuse a file for rows of jobs whose ending does not say how to write them."""
    if path is not None and path.suffix not in (".csv", ".json"):
        raise RequestError(f"--per-job {path}: expected a file that ends in .csv or .json")


def check_rows(path: Path | None, allowed: Over) -> list[str]:
    """As `check_file`, for rows of jobs."""
    kind = Kind.ROWS_JSON if path is not None and path.suffix == ".json" else Kind.ROWS_CSV
    return check_file("--per-job", path, kind, allowed)


def check_folder(option: str, path: Path | None, allowed: Over) -> list[str]:
    """Refuse a folder that holds something, but no run; what to say of one whose run is replaced."""
    if path is None or not path.is_dir():
        return []
    try:
        names = sorted(os.listdir(path))
        is_run = NAME in names and (path / NAME).is_file() and _beginning(path / NAME).startswith(Kind.JOURNAL.value)
    except OSError as error:
        raise RequestError(f"{option} {path}: cannot be read: {error.strerror or error}") from None
    if not names:
        return []
    if is_run:
        return [f"{option} {path}: replaces what an earlier run wrote"]
    if allowed is Over.OWN:
        raise RequestError(f"{option} {path}: holds {names[0]} and no run; name a new folder, or add --force")
    return [f"{option} {path}: writes into a folder that holds other things"]


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
        return file.read(_LOOKED_AT)
