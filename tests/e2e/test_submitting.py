"""Submitting to a real service from a real shell: whose Python runs, how to wait, what a terminal is shown, restarts."""

import os
import pty
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.e2e.service import Service, until
from tests.shell import COMMAND, PATIENCE, ended, poise, poise_apart, started, wait_until

pytestmark = pytest.mark.slow
Started = Callable[..., Service]
WHICH = "import os, sys; print(sys.prefix, os.environ.get('VIRTUAL_ENV'), os.environ.get('PYTHONHOME'))"
LATER = 4e9
"""A moment in the far future."""
TWO_GPUS = ("--cluster", "v100:2", "--round", "3")


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """A virtual environment with a program of its own."""
    folder = tmp_path / "project" / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    tool = folder / "bin" / "mytool"
    tool.write_text(f"#!{folder}/bin/python\nimport sys; print('tool of', sys.prefix)\n")
    tool.chmod(0o755)
    return folder


@pytest.fixture
def _shell(monkeypatch: pytest.MonkeyPatch, no_venv: None) -> None:
    """A shell in which nothing is active."""
    monkeypatch.delenv("PYTHONPATH", raising=False)


def lines(job: str) -> list[str]:
    """What a job has printed, without what Poise says in its log."""
    return [line for line in poise("logs", job).out.splitlines() if not line.startswith(("---", "poise:"))]


@pytest.mark.usefixtures("_shell")
def test_a_job_runs_in_the_virtual_environment_of_the_shell_that_submits_it(
    a_service: Started, venv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_service(*TWO_GPUS).up()
    outside = poise("submit", "-q", "--wait", "--", "python3", "-c", WHICH)
    assert lines(outside.out.strip())[0].split()[0] != str(venv)
    monkeypatch.setenv("VIRTUAL_ENV", str(venv))
    monkeypatch.setenv("PYTHONHOME", "/nonsense")
    for words in (("python", "-c", WHICH), ("python3", "-c", WHICH)):
        said = poise("submit", "-q", "--wait", "--", *words)
        assert (said.code, lines(said.out.strip())) == (0, [f"{venv} {venv} None"]), said
    said = poise("submit", "-q", "--wait", "--", "mytool")
    assert (said.code, lines(said.out.strip())) == (0, [f"tool of {venv}"])
    said = poise("submit", "-q", "--wait", "--no-venv", "--", "python3", "-c", WHICH)
    assert lines(said.out.strip()) == lines(outside.out.strip())


@pytest.mark.usefixtures("_shell")
def test_a_job_gets_the_environment_of_the_shell_that_submits_it_below_what_it_is_given(
    a_service: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = a_service(*TWO_GPUS)
    service.up()
    tools = tmp_path / "tools"
    tools.mkdir()
    tool = tools / "mytool"
    tool.write_text("#!/bin/sh\necho $0 $SEED $LR ${CUDA_VISIBLE_DEVICES} ${RANK} ${TERM:-no} ${POISE_STATE:-no} $HOME\n")
    tool.chmod(0o755)
    for name, value in {
        "PATH": f"{tools}:/usr/bin:/bin",
        "SEED": "1",
        "LR": "of-the-shell",
        "RANK": "7",
        "TERM": "xterm",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    said = poise("submit", "-q", "--wait", "--env", "LR=given", "--", "mytool")
    assert (said.code, lines(said.out.strip())) == (0, [f"{tool} 1 given 0 0 no no {os.environ['HOME']}"])
    said = poise("submit", "-q", "--wait", "--export", "none", "--", "sh", "-c", "echo ${SEED:-no}")
    assert (said.code, lines(said.out.strip())) == (0, ["no"])
    assert poise("submit", "--export", "none", "--", "mytool").refusal.startswith("command: no program 'mytool' in the PATH")
    held = poise("submit", "-q", "--hold", "--", "sh", "-c", "echo $SEED").out.strip()
    service.kill()  # what was submitted with a job survives
    service.up()
    assert poise("release", held).code == 0
    assert poise("wait", held).code == 0
    assert lines(held) == ["1"]


@pytest.mark.usefixtures("_shell")
def test_a_virtual_environment_that_is_gone_when_the_job_starts_is_what_it_fails_of(
    a_service: Started, venv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_service(*TWO_GPUS).up()
    monkeypatch.setenv("VIRTUAL_ENV", str(venv))
    job = poise("submit", "-q", "--hold", "--", "python3", "-c", WHICH).out.strip()
    shutil.rmtree(venv)
    assert poise("release", job).code == 0
    assert poise("wait", "-q", job).code == 1
    shown = poise("show", job, "--json").json
    assert (shown["failures"], shown["cause"]) == (1, "run 1 failed: virtual-environment-gone, which no retry heals")
    assert f"cannot start: the virtual environment {venv} is gone: it has no bin/python" in poise("logs", job).out
    said = poise("submit", "--venv", venv, "--", "python3").refusal
    assert said.startswith(f"venv: '{venv}' is no virtual environment of the machine that the service runs on")
    assert said.endswith("or submit with --no-venv")


def test_a_poise_called_by_its_path_brings_its_environment_unless_another_is_active(a_service: Started, venv: Path) -> None:
    a_service(*TWO_GPUS).up()
    for active, found in (("", sys.prefix), (str(venv), str(venv))):
        said = poise_apart("submit", "--dry-run", "--json", "--", "x", PATH=os.defpath, VIRTUAL_ENV=active, CONDA_PREFIX="")
        assert said.json["venv"] == found


def test_waiting_and_following_end_as_the_job_does_and_survive_a_crash_of_the_server(
    a_service: Started, tmp_path: Path
) -> None:
    service = a_service(*TWO_GPUS)
    service.up()
    said = poise("submit", "--follow", "--", "sh", "-c", "echo out; exit 3")
    assert said.code == 1
    assert said.out.splitlines()[-1] == "out"
    assert "FAILED" in said.err
    go = tmp_path / "go"
    script = f"echo begun; while [ ! -e {go} ]; do sleep 0.05; done; echo done"
    job = poise("submit", "-q", "-n", "patient", "--", "sh", "-c", script).out.strip()
    waiting = started("wait", "patient")
    following = started("logs", "-f", "patient")
    until(lambda: "begun" in poise("logs", job).out, "the job does not run")
    service.kill()
    service.start()
    service.ready()
    go.touch()
    first, second = ended(waiting), ended(following)
    assert (first.code, first.out) == (0, f"{job} SUCCEEDED\n")
    assert second.out.splitlines()[-1] == "done"


@pytest.mark.parametrize("manner", ["--wait", "--follow"])
def test_ctrl_c_leaves_the_job_running_and_says_what_to_type(a_service: Started, manner: str) -> None:
    client = a_service(*TWO_GPUS).up()
    watching = started("submit", manner, "--", "sh", "-c", "echo begun; sleep 1000")
    wait_until(lambda: any(row.state == "RUNNING" for row in client.queue().jobs), watching)
    wait_until(lambda: "begun" in client.log("1"), watching)
    watching.send_signal(signal.SIGINT)
    said = ended(watching)
    assert said.code == 130
    assert said.err.endswith("poise: the job goes on; poise wait 1 · poise logs -f 1 · poise cancel 1\n")
    assert client.show("1").job.state == "RUNNING"


def on_a_terminal(*words: str) -> bytes:
    """What a terminal is sent by a command."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(COMMAND, [COMMAND, *words])
    shown = b""
    try:
        while part := os.read(terminal, 65536):
            shown += part
    except OSError:  # the other end is closed
        pass
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    return shown


HOSTILE = r"a\033]0;owned\007b\033[2Jc\033[31mred\033[0m\033[6nd\n"


def test_a_log_changes_no_terminal_and_a_pipe_gets_it_as_it_is(a_service: Started) -> None:
    a_service(*TWO_GPUS).up()
    job = poise("submit", "-q", "--wait", "--", "printf", HOSTILE).out.strip()
    for words in (("logs", job), ("logs", "-f", job), ("logs", "--tail", "1", job)):
        shown = on_a_terminal(*words)
        assert b"abc\x1b[31mred\x1b[0md" in shown, shown
        assert set(shown.split(b"\x1b")[1:]) == {b"[31mred", b"[0md\r\n", b"[0m"}
    raw = HOSTILE.encode().decode("unicode_escape")
    assert raw in poise_apart("logs", job).out
    assert raw.replace("\n", "\r\n").encode() in on_a_terminal("logs", "--raw", job)


def test_a_failure_text_is_no_command_to_a_terminal_either(a_service: Started) -> None:
    a_service(*TWO_GPUS).up()
    hostile = (
        "import os, json; file = open(os.environ['POISE_RUN_DIR'] + '/failure.json', 'w');"
        "json.dump({'version': 1, 'cause': 'a\\x1b[2Jb'}, file); file.close(); exit(3)"
    )
    job = poise("submit", "-q", "--wait", "--retries", "0", "--", sys.executable, "-c", hostile).out.strip()
    of_all = ("queue", "--state", "all", "-o")
    for words in (("show", job), ("why", job), (*of_all, "wide"), (*of_all, "csv"), ("events",)):
        shown = on_a_terminal(*words)
        assert b"[2Jb" in shown, words
        assert b"\x1b[2J" not in shown, words


def test_a_command_waits_for_a_server_that_restarts(a_service: Started, tmp_path: Path) -> None:
    """Killed, its server.json is left; stopped, that is removed. Either way the next one is waited for."""
    service = a_service(*TWO_GPUS)
    service.up()
    for end in (service.kill, service.stop):
        end()
        os.utime(service.state, (LATER, LATER))  # it stopped just now, however long the machine takes to start another
        asking = started("queue", "--json")
        line = asking.stderr.readline() if asking.stderr else ""
        assert "waiting for it, Ctrl-C ends that" in line
        service.start()
        service.ready()
        said = ended(asking)
        assert said.code == 0, said
    service.stop()
    os.utime(service.state, (1, 1))  # long ago
    assert poise("queue").refusal.startswith("no server is known; start one with `poise serve`")


def test_a_user_without_a_home_or_a_name_gets_a_line(tmp_path: Path) -> None:
    if (
        shutil.which("unshare") is None
        or subprocess.run(["unshare", "--user", "--map-user=54321", "true"], check=False).returncode
    ):
        pytest.skip("a user without a name cannot be had here")
    bare = {name: value for name, value in os.environ.items() if not name.startswith(("POISE_", "XDG_")) and name != "HOME"}

    def run(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
        command = ["unshare", "--user", "--map-user=54321", COMMAND, *words]
        return subprocess.run(command, env=bare | more, capture_output=True, text=True, timeout=PATIENCE, check=False)

    for words in (("queue",), ("submit", "--", "true"), ("serve", "--cluster", "gpu:1")):
        said = run(*words)
        assert (said.returncode, said.stderr) == (
            2,
            "poise: HOME is not set, and user 54321 has no name here; set HOME, or POISE_STATE to a directory\n",
        )
    state = {"POISE_STATE": str(tmp_path / "state")}
    assert run("queue", **state).stderr.startswith("poise: no server is known")
    assert run("submit", "--cwd", "~", "--dry-run", "--", "true").stderr == "poise: --cwd: there is no home folder '~'\n"
