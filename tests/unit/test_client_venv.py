"""Which virtual environment a job is submitted from: by the shell, by PATH, by the program itself."""

import os
import sys
from pathlib import Path

import pytest
from tests.fake_desk import SUBMITTED, talking

from poise.service.client import JobRequest
from poise.service.client.submission import active_environment as active

ELSEWHERE = "/usr/local/bin/poise"


def an_environment(folder: Path, mark: str = "pyvenv.cfg", python: str = "python") -> str:
    """Something that looks like a virtual environment."""
    (folder / "bin").mkdir(parents=True)
    (folder / mark).touch()
    (folder / "bin" / python).touch(mode=0o755)
    return str(folder)


def path(*folders: str) -> str:
    return os.pathsep.join([*(f"{each}/bin" for each in folders), os.defpath])


def test_the_active_environment_of_venv_or_conda_is_found(tmp_path: Path) -> None:
    venv, conda = an_environment(tmp_path / "v"), an_environment(tmp_path / "c", "conda-meta", "python3")
    assert active({"VIRTUAL_ENV": venv, "PATH": path(venv)}, ELSEWHERE) == venv
    assert active({"CONDA_PREFIX": conda, "PATH": path(conda)}, ELSEWHERE) == conda
    assert active({"VIRTUAL_ENV": venv}, ELSEWHERE) == venv


def test_of_two_the_one_whose_programs_come_first_is_active(tmp_path: Path) -> None:
    venv, conda = an_environment(tmp_path / "v"), an_environment(tmp_path / "c", "conda-meta")
    both = {"VIRTUAL_ENV": venv, "CONDA_PREFIX": conda}
    assert active({**both, "PATH": path(venv, conda)}, ELSEWHERE) == venv
    assert active({**both, "PATH": path(conda, venv)}, ELSEWHERE) == conda
    assert active({**both, "PATH": os.defpath}, ELSEWHERE) == venv


def test_without_one_the_first_python_in_path_says_it(tmp_path: Path) -> None:
    venv, other = an_environment(tmp_path / "v"), an_environment(tmp_path / "w")
    assert active({"PATH": path(venv, other)}, ELSEWHERE) == venv
    plain = tmp_path / "plain"
    (plain / "bin").mkdir(parents=True)
    (plain / "bin" / "python3").touch(mode=0o755)
    assert active({"PATH": path(str(plain), venv)}, ELSEWHERE) is None


@pytest.mark.parametrize("broken", ["", "/nowhere", "python-less", "mark-less"])
def test_what_is_no_environment_any_more_does_not_count(broken: str, tmp_path: Path) -> None:
    if broken == "python-less":
        broken = an_environment(tmp_path / "v", python="pip")
    elif broken == "mark-less":
        broken = an_environment(tmp_path / "v", mark="README")
    assert active({"VIRTUAL_ENV": broken, "PATH": "/nowhere"}, ELSEWHERE) is None


def test_a_poise_that_is_called_by_its_path_brings_its_own_environment_unless_another_is_active(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, other = an_environment(tmp_path / "own"), an_environment(tmp_path / "other")
    monkeypatch.setattr(sys, "prefix", own)
    assert active({"PATH": "/nowhere"}, f"{own}/bin/poise") == own
    assert active({"PATH": "/nowhere", "VIRTUAL_ENV": other}, f"{own}/bin/poise") == other
    assert active({"PATH": "/nowhere"}, ELSEWHERE) is None  # pipx and administrators link to it
    assert active({"PATH": "/nowhere"}, "train_many.py") == own  # a program that uses poise.Client


@pytest.mark.usefixtures("no_venv")
def test_a_request_that_says_whether_it_has_one_has_just_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    venv = an_environment(tmp_path / "v")
    monkeypatch.setenv("VIRTUAL_ENV", venv)
    client, desk = talking(SUBMITTED)
    client.submit(command=["x"])
    client.submit(command=["x"], venv=None)
    client.submit(JobRequest(command=("x",), venv="/other"))
    client.submit(command=["x"], venv="v", cwd=tmp_path)
    client.submit(command=["x"], env={"VIRTUAL_ENV": "/mine"})
    client.map(JobRequest(command=("x",)), {"A": [1]})
    here = str(Path.cwd() / "v")
    assert [body["jobs"][0].get("venv") for body in desk.bodies] == [venv, None, "/other", here, None, venv]
