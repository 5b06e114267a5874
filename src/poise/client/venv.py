"""The virtual environment that a job is submitted from: the job runs in it, not in the Python of the service.

In this order: the environment that is active in the shell (VIRTUAL_ENV, CONDA_PREFIX; of two, the one whose programs come
first in PATH); the one that the first `python` in PATH belongs to; the one of this very program, called by its path
without activating it (`.venv/bin/poise`). A Poise that is called by a link into an environment of its own (pipx, uv, an
administrator's /usr/local/bin/poise) says nothing of the Python that its user means.
"""

import os
import sys
from collections.abc import Mapping

from poise.backends.local.venvs import has_python, holds_python, programs

ACTIVE = ("VIRTUAL_ENV", "CONDA_PREFIX")
"""What `activate` of venv and of conda set."""
_MARKS = ("pyvenv.cfg", "conda-meta")


def active(environ: Mapping[str, str], program: str | None = None) -> str | None:
    """The directory of the virtual environment; None: there is none.

    program   as it was called; None: this one
    """
    folders = [each for each in environ.get("PATH", "").split(os.pathsep) if each]
    named = [environ[name] for name in ACTIVE if is_environment(environ.get(name, ""))]
    found = min(named, key=lambda each: _place(each, folders), default=None) or _on_path(folders) or _own(program)
    return None if found is None else os.path.abspath(found)


def is_environment(folder: str) -> bool:
    """It is one of venv's or conda's, with a Python."""
    return bool(folder) and has_python(folder) and any(os.path.exists(os.path.join(folder, mark)) for mark in _MARKS)


def _place(venv: str, folders: list[str]) -> int:
    """Where its programs come in PATH; last if they are not there."""
    own = programs(os.path.abspath(venv))
    return next((place for place, each in enumerate(folders) if os.path.abspath(each) == own), len(folders))


def _on_path(folders: list[str]) -> str | None:
    """The environment of the `python` that the shell would run."""
    first = next((each for each in map(os.path.abspath, folders) if holds_python(each)), None)
    return None if first is None or not is_environment(os.path.dirname(first)) else os.path.dirname(first)


def _own(program: str | None) -> str | None:
    """The environment of this process, unless it is there for Poise alone."""
    if sys.prefix == sys.base_prefix or not is_environment(sys.prefix):
        return None
    called = os.path.abspath(sys.argv[0] if program is None else program)
    is_linked = os.path.basename(called) == "poise" and os.path.dirname(called) != programs(sys.prefix)
    return None if is_linked else sys.prefix
