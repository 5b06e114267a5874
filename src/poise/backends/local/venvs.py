"""Virtual environments of jobs: their programs come first in PATH, as after `activate`."""

import os
from collections.abc import Mapping

GONE = "virtual-environment-gone"
"""Why a run could not be begun whose virtual environment was deleted after the job was submitted."""
_PYTHONS = ("python", "python3")
_CONDA = "conda-meta"


def programs(venv: str) -> str:
    """The directory of its programs."""
    return os.path.join(venv, "bin")


def has_python(venv: str) -> bool:
    """It has a Python that can be started."""
    return holds_python(programs(venv))


def holds_python(folder: str) -> bool:
    """One of the programs in a directory is Python."""
    return any(os.access(os.path.join(folder, name), os.X_OK) for name in _PYTHONS)


def path_inside(venv: str | None, path: str) -> str:
    """PATH of a job, given what it would be without a virtual environment."""
    return path if venv is None else programs(venv) + os.pathsep + path


def inside(venv: str | None, environment: Mapping[str, str]) -> dict[str, str]:
    """An environment with a virtual environment in force; as it was if there is none."""
    if venv is None:
        return dict(environment)
    kept = {name: value for name, value in environment.items() if name not in ("VIRTUAL_ENV", "CONDA_PREFIX")}
    name = "CONDA_PREFIX" if os.path.isdir(os.path.join(venv, _CONDA)) else "VIRTUAL_ENV"
    return {**kept, name: venv, "PATH": path_inside(venv, environment.get("PATH", os.defpath))}
