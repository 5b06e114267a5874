"""Virtual environments of jobs: the programs of one come first in PATH, as after `activate`.

Imported by the runner: standard library only, and only what starts fast.
"""

import os
from collections.abc import Mapping

VENV_GONE = "virtual-environment-gone"
"""Cause of a run that could not start because its virtual environment was deleted after the job was submitted."""


def programs(venv: str) -> str:
    """Return the directory of a virtual environment's programs."""
    return os.path.join(venv, "bin")


def has_python(venv: str) -> bool:
    """Whether a virtual environment has a Python that can be started."""
    return holds_python(programs(venv))


def holds_python(folder: str) -> bool:
    """Whether a directory of programs has a Python that can be started."""
    return any(os.access(os.path.join(folder, name), os.X_OK) for name in ("python", "python3"))


def path_inside(venv: str | None, path: str) -> str:
    """Return a job's PATH, given what it is without the virtual environment."""
    return path if venv is None else programs(venv) + os.pathsep + path


def inside(venv: str | None, environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with the virtual environment activated; unchanged if `venv` is None."""
    if venv is None:
        return dict(environment)
    kept = {name: value for name, value in environment.items() if name not in ("VIRTUAL_ENV", "CONDA_PREFIX")}
    name = "CONDA_PREFIX" if os.path.isdir(os.path.join(venv, "conda-meta")) else "VIRTUAL_ENV"
    return {**kept, name: venv, "PATH": path_inside(venv, environment.get("PATH", os.defpath))}
