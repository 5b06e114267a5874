"""The environment of a job that runs in a virtual environment."""

import os
from pathlib import Path

import pytest

from poise.scheduler.model.errors import RequestError
from poise.service.backends.local.orders import check_request
from poise.service.backends.local.venvs import inside
from poise.service.wire.request import JobRequest

SERVICE = {"PATH": "/usr/bin", "VIRTUAL_ENV": "/opt/poise", "HOME": "/home/poise"}


def an_environment(folder: Path, mark: str) -> str:
    (folder / "bin").mkdir(parents=True)
    (folder / mark).mkdir()
    for name in ("python", "torchrun"):
        (folder / "bin" / name).touch(mode=0o755)
    return str(folder)


def test_without_one_a_job_has_what_the_service_has() -> None:
    assert inside(None, SERVICE) == SERVICE


@pytest.mark.parametrize(("mark", "name"), [("conda-meta", "CONDA_PREFIX"), ("lib", "VIRTUAL_ENV")])
def test_its_programs_come_first_and_the_service_s_own_is_not_seen(mark: str, name: str, tmp_path: Path) -> None:
    venv = an_environment(tmp_path / "env", mark)
    found = inside(venv, SERVICE)
    assert found == {"PATH": f"{venv}/bin:/usr/bin", name: venv, "HOME": "/home/poise"}
    assert inside(venv, {})["PATH"] == f"{venv}/bin:{os.defpath}"


def test_programs_are_looked_for_in_it_at_submission(tmp_path: Path) -> None:
    venv = an_environment(tmp_path / "env", "lib")
    check_request(JobRequest(command=("torchrun",), venv=venv), SERVICE)
    check_request(JobRequest(command=("torchrun",), venv=venv, env={"PATH": "/bin"}), SERVICE)
    with pytest.raises(RequestError, match="no program 'torchrun' in the PATH of the job"):
        check_request(JobRequest(command=("torchrun",)), SERVICE)
    with pytest.raises(RequestError, match=r"^venv: '/nowhere' is no virtual environment of the machine"):
        check_request(JobRequest(command=("torchrun",), venv="/nowhere"), SERVICE)
