"""The Tab key in real shells, and the words that it is offered."""

import io
import os
import pty
import select
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

import click
import pytest
from tests.fake_engine import Kept, an_api
from tests.integration.test_live_commands import Bridge
from tests.shell import as_json, poise

from poise.cli import words
from poise.cli.app import COMPLETION, VERBS
from poise.cli.app import poise as program
from poise.cli.words import COMPLETERS, answer
from poise.scheduler.policies.catalogue import POLICIES
from poise.service.client import Client
from poise.service.server.http.guard import ApiOptions
from poise.service.server.logs import Logbook
from poise.service.wire.request import JobRequest

PATIENCE = 60.0
WHERE = sysconfig.get_path("scripts")


def offered(line: str) -> list[str]:
    """The words that bash is offered at the end of a line."""
    out, err = io.StringIO(), io.StringIO()
    asked = {COMPLETION: "bash_complete", "POISE_LINE": line, "POISE_BREAKS": " \t\n\"'><=;|&(:"}
    with patch.dict(os.environ, asked), redirect_stdout(out), redirect_stderr(err):
        assert answer() == 0
    assert err.getvalue() == ""
    return [each.partition("\t")[2] for each in out.getvalue().splitlines()]


class FakeClient:
    """Makes clients of a service with job-0 of tenant mine, and job-1 of theirs, which is called fit and of an app."""

    def __init__(self, folder: Path) -> None:
        self._api = an_api(folder, ApiOptions(log=Logbook(io.StringIO())))
        request = JobRequest(command=("x",), name="fit", app="sweep")
        self._api.engine.jobs["job-1"] = Kept("theirs", request)

    def made(self) -> Client:
        return Client("http://localhost", self._api.tokens["admin"], transport=Bridge(self._api), patience=0.0)


@pytest.fixture
def _no_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("POISE_URL", "POISE_TOKEN", "POISE_CA"):
        monkeypatch.delenv(name, raising=False)
    for name in ("POISE_STATE", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "HOME"):
        monkeypatch.setenv(name, str(tmp_path))


OFFERED = {
    "poise su": ["submit"],
    "poise simulate --polic": ["--policy"],
    "poise simulate --policy tiresias-": ["tiresias-gittins"],
    "poise simulate --policy tiresias:pro": ["promote="],
    "poise simulate --policy tiresias:limits=3/9,pro": ["3/9,promote="],
    "poise simulate --policy las+a": ["las+agnostic"],
    "poise compare x --policies fifo,srt": ["fifo,srtf"],
    "poise queue --state running,pau": ["running,paused"],
    "poise cancel --state succ": [],
    "poise simulate --preset tir": ["tiresias"],
    "poise simulate --placement con": ["consolidate"],
    "poise simulate --format shock": ["shockwave"],
    "poise submit --replicas g": ["gpu"],
    "poise simulate syn": ["synthetic:", "file"],
    "poise bench fid": ["fidelity"],
    "poise completion z": ["zsh"],
    "poise cancel ": [],
    "poise drain ": [],
    "poise submit --tenant ": [],
    "poise nosuch --x": [],
    "poise 'unclosed": [],
}


@pytest.mark.usefixtures("_no_service")
@pytest.mark.parametrize("line", OFFERED)
def test_words_are_offered_and_without_a_service_nothing_is_said(line: str) -> None:
    found = offered(line)
    expected = [*OFFERED[line]]
    if "file" in expected:
        assert found == ["synthetic:", "syn"]
    else:
        assert found == expected


@pytest.mark.slow
@pytest.mark.usefixtures("_no_service")
def test_a_service_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("POISE_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("POISE_TOKEN", "secret")
        began = time.monotonic()
        assert offered("poise cancel ") == []
        assert time.monotonic() - began < 3 * words.PATIENCE


@pytest.mark.usefixtures("_no_service")
def test_words_of_a_service_are_its_jobs_tenants_nodes_and_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeClient(tmp_path)
    monkeypatch.setattr("poise.service.client.Client.from_config", lambda **_: client.made())
    assert offered("poise cancel ") == ["job-0", "job-1", "fit"]
    assert offered("poise show jo") == ["job-0", "job-1"]
    assert offered("poise wait job-0 f") == ["fit"]
    assert offered("poise events --job f") == ["fit"]
    assert offered("poise queue --tenant th") == ["theirs"]
    assert offered("poise drain ") == ["gpu-0"]
    assert offered("poise submit --type ") == ["gpu"]
    assert offered("poise cancel --app ") == ["sweep"]


@pytest.mark.usefixtures("_no_service")
def test_every_verb_is_offered_without_importing_one() -> None:
    assert sorted(offered("poise ")) == sorted(VERBS)
    code = """
import os, sys
from poise.cli.words import answer
assert answer() == 0
assert not {"pydantic", "httpx", "yaml"} & sys.modules.keys()
"""
    environment = {**os.environ, COMPLETION: "bash_complete", "POISE_LINE": "poise s", "POISE_BREAKS": ""}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True)


def test_every_entry_of_the_table_is_a_parameter_of_some_verb() -> None:
    def names(path: str, command: click.Command) -> Iterator[str]:
        for each in command.params:
            yield each.name or ""
            yield f"{path} {each.name}"
        for below in getattr(command, "commands", {}).values():
            yield from names(f"{path} {below.name}", below)

    known: set[str] = set()
    for verb in VERBS:
        command = program.get_command(click.Context(program), verb)
        assert command is not None
        known |= {*names(verb, command)}
    assert COMPLETERS.keys() <= known


def test_parameters_of_every_policy_are_offered() -> None:
    for name, listing in POLICIES.items():
        words = [item.value for item in COMPLETERS["policy"](f"{name}:")]
        assert words == [f"{name}:{each.name}=" for each in listing.parameters]


def test_the_script_of_a_shell_is_printed_and_other_shells_are_refused() -> None:
    for shell in ("bash", "zsh", "fish"):
        said = poise("completion", shell)
        assert (said.code, said.err) == (0, "")
        assert as_json(poise("completion", shell, "--json").out) == {"shell": shell, "script": said.out.strip()}
    assert "'tcsh' is not one of 'bash', 'zsh', 'fish'" in poise("completion", "tcsh").refusal
    assert "Missing argument" in poise("completion").refusal


# Real shells, on a terminal of their own


@contextmanager
def typing(words: list[str], folder: Path, prepare: str) -> Iterator[Callable[[str, str], str]]:
    """An interactive shell that has read its completion; a function that types, and returns the screen once it has this."""
    pid, master = pty.fork()
    if pid == 0:
        path = f"{WHERE}{os.pathsep}{os.environ['PATH']}"
        os.execvpe(
            words[0], words, {"PATH": path, "HOME": str(folder), "PS1": "", "TERM": "dumb", "POISE_STATE": str(folder)}
        )
    shown = ""

    def expect(keys: str, until: str) -> str:
        nonlocal shown
        before = len(shown)
        os.write(master, keys.encode())
        deadline = time.monotonic() + PATIENCE
        while until not in shown[before:]:
            assert time.monotonic() < deadline, f"{until!r} is not in {shown[before:]!r}"
            if select.select([master], [], [], 0.1)[0]:
                shown += os.read(master, 65_536).decode(errors="replace")
        return shown[before:]

    try:
        expect(f"{prepare}; echo re''ady\n", "ready\r\n")
        yield expect
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        os.close(master)


SHELL_LINES = {
    "bash": (["bash", "--norc", "-i"], 'eval "$(poise completion bash)"'),
    "zsh": (["zsh", "-f", "-i"], 'autoload -U compinit; compinit -D; eval "$(poise completion zsh)"'),
}


@pytest.mark.slow
@pytest.mark.parametrize("shell", SHELL_LINES)
def test_the_tab_key_completes_verbs_options_policies_and_files(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed here")
    (tmp_path / "mytrace.jsonl").touch()
    words, prepare = SHELL_LINES[shell]
    with typing(words, tmp_path, f"cd {tmp_path}; {prepare}") as expect:
        expect("poise simu\t", "simulate ")
        expect("--polic\t", "--policy ")
        expect("tiresias-g\t", "tiresias-gittins ")
        expect("mytr\t", "mytrace.jsonl ")


@pytest.mark.slow
def test_fish_offers_words_with_what_they_mean(tmp_path: Path) -> None:
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed here")
    script = tmp_path / "poise.fish"
    script.write_text(poise("completion", "fish").out)
    lines = ("poise subm", "poise compare x --policies fifo,srt", f"poise simulate {tmp_path}/poise.f")
    asked = "; ".join(f"complete -C '{line}'" for line in lines)
    environment = {"PATH": f"{WHERE}{os.pathsep}{os.environ['PATH']}", "HOME": str(tmp_path), "POISE_STATE": str(tmp_path)}
    done = subprocess.run(
        ["fish", "--no-config", "-c", f"source {script}; {asked}"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [
        f"submit\t{VERBS['submit'].summary}",
        f"fifo,srtf\t{POLICIES['srtf'].summary}",
        f"{script}",
    ]
