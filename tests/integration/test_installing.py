"""Poise as it is installed into a system: what it asks for, the wheel, and the unit of systemd."""

import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from ctypes.util import find_library
from pathlib import Path

import pytest
from tests.shell import COMMAND, PATIENCE, poise, program_context

from poise import __version__
from poise.cli.serve import serve

ROOT = Path(__file__).resolve().parents[2]
UNIT = ROOT / "examples" / "systemd" / "poise.service"


def asked_for() -> dict[str, object]:
    project: dict[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project


def names(requirements: object) -> set[str]:
    assert isinstance(requirements, list)
    return {re.split(r"[^a-z0-9-]", each, maxsplit=1)[0] for each in requirements}


def test_what_finds_real_gpus_is_installed_with_the_rest_and_pinned() -> None:
    project = asked_for()
    assert "nvidia-ml-py" in names(project["dependencies"])
    extras = project["optional-dependencies"]
    assert isinstance(extras, dict)
    assert extras["nvidia"] == []  # `poise[nvidia]` was how to ask for it
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in (ROOT / "constraints.txt").read_text().split()}
    assert names(project["dependencies"]) | names(extras["dev"]) <= pinned


@pytest.mark.skipif(find_library("nvidia-ml") is not None, reason="this machine has a driver")
def test_a_machine_without_a_driver_is_told_so_in_one_line(tmp_path: Path) -> None:
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    said = poise("serve", "--listen", "127.0.0.1:0", "--state", tmp_path / "state").refusal
    assert said.startswith("no GPU driver answers on this machine (")
    assert said.endswith("; declare GPUs instead, e.g. --cluster v100:4,k80:8")


def _settings(section: str) -> list[tuple[str, str]]:
    body = UNIT.read_text().partition(f"[{section}]\n")[2].partition("\n[")[0]
    lines = (line.partition("=") for line in body.splitlines() if line and not line.startswith("#"))
    return [(name, value) for name, _, value in lines]


def test_the_unit_starts_a_command_that_there_is_with_options_that_there_are() -> None:
    program, verb, *options = shlex.split(dict(_settings("Service"))["ExecStart"])
    assert (program, verb) == ("/opt/poise/bin/poise", "serve")
    context = serve.make_context("serve", options, parent=program_context())
    assert str(context.params["state"]) == "/var/lib/poise/state"
    assert context.params["log_format"] == "json"


def test_the_unit_lets_jobs_outlive_the_server_and_takes_nothing_from_them() -> None:
    said = dict(_settings("Service"))
    assert len(said) == len(_settings("Service"))
    wanted = {"KillMode": "process", "Restart": "on-failure", "OOMPolicy": "continue", "TasksMax": "infinity"}
    assert wanted.items() <= said.items()
    assert int(said["LimitNOFILE"]) >= 65_536
    # Each hides devices, homes, temporary files or executable memory from jobs, which live in the unit too.
    harmful = {"PrivateDevices", "PrivateTmp", "ProtectHome", "ProtectClock", "MemoryDenyWriteExecute", "DynamicUser"}
    assert not harmful & said.keys()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_has_nothing_to_say_of_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/poise/bin/poise serve", f"{COMMAND} serve"))
    words = ["systemd-analyze", "verify", "--man=no", str(unit)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built without a network by what builds it everywhere."""
    pytest.importorskip("hatchling", reason="hatchling is not installed")
    folder = tmp_path_factory.mktemp("wheel")
    build = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", build, str(folder)], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    return folder / done.stdout.splitlines()[-1]


def test_the_wheel_holds_every_file_of_the_package_and_says_what_it_needs(wheel: Path) -> None:
    package = ROOT / "src" / "poise"
    there = {
        str(path.relative_to(package.parent))
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as file:
        held = set(file.namelist())
        (about,) = (name for name in held if name.endswith(".dist-info/METADATA"))
        said = file.read(about).decode().partition("\n\n")[0]
    assert there <= held
    assert not {name for name in held if not name.startswith(("poise/", f"poise-{__version__}.dist-info/"))}
    assert "Requires-Dist: nvidia-ml-py>=12.535\n" in said
    assert "Provides-Extra: nvidia\n" in said
    assert any(name.endswith("/LICENSE") for name in held)


@pytest.mark.slow
def test_the_wheel_works_in_a_fresh_environment(wheel: Path, tmp_path: Path) -> None:
    """What it depends on is borrowed from this environment, as there may be no network; the package itself is not."""
    pytest.importorskip("pip", reason="pip is not installed")
    home = tmp_path / "venv"
    venv.create(home, symlinks=True)
    python = home / "bin" / "python"
    words = ["--python", python, "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps", wheel]
    subprocess.run([sys.executable, "-m", "pip", *map(str, words)], check=True, timeout=PATIENCE)
    (site,) = (home / "lib").glob("python*/site-packages")
    (site / "borrowed.pth").write_text("".join(f"{each}\n" for each in _borrowed()))

    def said(*words: str) -> str:
        done = subprocess.run(
            [home / "bin" / "poise", *words], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE, check=True
        )
        return done.stdout

    where = subprocess.run([python, "-c", "import poise; print(poise.__file__)"], capture_output=True, text=True, check=True)
    assert Path(where.stdout.strip()).is_relative_to(site)
    assert said("--version") == f"poise, version {__version__}\n"
    assert "--html" in said("demo", "--help")
    assert "report:" in said(
        "demo", "--quiet", "--html", "tour.html"
    )  # its trace, speeds and scripts are files of the wheel
    assert "const STROKES" in (tmp_path / "tour.html").read_text()


def _borrowed() -> list[str]:
    """Where this environment has its packages, also those that it borrows itself."""
    own = sysconfig.get_path("purelib")
    return [own, *(each for each in sys.path if each.endswith("site-packages") and each != own)]
