"""Where results go: looked at before any work is done, so that no run is lost for want of a folder."""

import os
from pathlib import Path

from poise.model.errors import RequestError


def check_writable(option: str, path: Path | None) -> None:
    """Refuse a file that cannot be written: its folder must be there, and allow it."""
    if path is None:
        return
    if not os.path.isdir(path.parent):
        raise RequestError(f"{option} {path}: there is no folder {path.parent}")
    if not os.access(path if os.path.exists(path) else path.parent, os.W_OK):
        raise RequestError(f"{option} {path}: cannot be written: permission denied")


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
