"""`poise submit --ship` to a real service: uploaded once, run from there, bounded, and gone when no job needs it."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.e2e.service import Service
from tests.shell import poise

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_venv")]
Started = Callable[..., Service]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text("import data; print('trains on', data.WHAT)")
    (folder / "data.py").write_text("WHAT = 'numbers'")
    (folder / ".gitignore").write_text("__pycache__\n*.ckpt\n")
    (folder / "large.ckpt").write_bytes(b"x" * (2 << 20))
    monkeypatch.chdir(folder)
    return folder


def archives(service: Service) -> list[Path]:
    return sorted((service.state / "files").glob("*/*.tar"))


def lines(job: str) -> list[str]:
    return [line for line in poise("logs", job).out.splitlines() if not line.startswith(("---", "poise:"))]


def test_job_runs_in_the_files_as_they_were_when_it_was_submitted(a_service: Started, project: Path) -> None:
    service = a_service("--cluster", "v100:2")
    service.up()
    held = poise("submit", "-q", "--ship", "--hold", "--", "python3", "train.py")
    assert held.code == 0, held
    (project / "data.py").write_text("WHAT = 'letters'")
    later = poise("submit", "-q", "--ship", "--wait", "--", "python3", "train.py")
    assert (later.code, lines(later.out.strip())) == (0, ["trains on letters"])
    assert poise("release", held.out.strip()).code == 0
    assert poise("wait", held.out.strip()).code == 0
    assert lines(held.out.strip()) == ["trains on numbers"]
    assert len(archives(service)) == 2
    again = poise("submit", "-q", "--ship=.", "--ship-mib", "1", "--wait", "--", "python3", "train.py")
    assert again.code == 0, again
    assert len(archives(service)) == 2


def test_what_is_not_there_or_too_much_is_refused(a_service: Started, project: Path) -> None:
    service = a_service("--cluster", "v100:2", "--ship-mib", "1")
    client = service.up()
    (project / ".gitignore").unlink()
    said = poise("submit", "--ship", "--", "python3", "train.py")
    assert said.code == 2, said
    assert "of at most 1 (serve --ship-mib)" in said.err
    said = poise("submit", "--ship", "--ship-mib", "1", "--", "python3", "train.py")
    assert said.code == 2
    assert "large.ckpt (2.0 MiB)" in said.err
    with pytest.raises(Exception, match="has uploaded none"):
        client.submit(command=("python3", "train.py"), files="0" * 64)
    assert not archives(service)


def test_archives_go_when_no_unfinished_job_names_them(a_service: Started, project: Path) -> None:
    service = a_service("--cluster", "v100:2")
    service.up()
    needed = poise("submit", "-q", "--ship", "--hold", "--", "python3", "train.py").out.strip()
    [first] = archives(service)
    (project / "data.py").write_text("WHAT = 'letters'")
    poise("submit", "-q", "--ship", "--wait", "--", "python3", "train.py")
    [second] = [each for each in archives(service) if each != first]
    for each in (first, second):
        os.utime(each, (1, 1))
    (project / "data.py").write_text("WHAT = 'words'")
    assert poise("submit", "-q", "--ship", "--wait", "--", "python3", "train.py").code == 0
    assert first in archives(service)
    assert second not in archives(service)
    assert poise("cancel", needed).code == 0
