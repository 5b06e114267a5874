"""`poise run` against a real service: output, exit codes, signals, readers that go away, a server that comes back."""

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.e2e.service import Service, until
from tests.shell import COMMAND, Said, ended, poise, started, unread, wait_until

pytestmark = pytest.mark.slow
Started = Callable[..., Service]
TWO_GPUS = ("--cluster", "gpu:2")
UNTIL_TOLD = 'trap "echo bye; exit 0" TERM; echo ready > "$0"; echo begun; while :; do sleep 0.05; done'
"""Runs until SIGTERM, and says so; its one word is a file that it makes."""


def a_shell(script: str, *words: object) -> tuple[object, ...]:
    return "--", "sh", "-c", script, *words


def states() -> list[str]:
    return [row["state"] for row in poise("queue", "--state", "all", "--json").json["jobs"]]


def test_output_and_end_of_the_job_are_those_of_the_command(a_service: Started) -> None:
    a_service(*TWO_GPUS).up()
    said = poise("run", "-n", "fit", *a_shell("echo out; echo err >&2; printf half"))
    assert (said.code, said.out) == (0, "out\nerr\nhalf")
    first, *_, heading, last = said.err.splitlines()
    assert first.startswith("1 fit: ")
    assert heading.startswith("--- run 1 on gpu-0 [")
    assert last == "1 SUCCEEDED"
    assert poise("run", "--quiet", *a_shell("exit 3")) == Said(3, "", "")
    assert poise("run", "-q", *a_shell("kill -SEGV $$")).code == 128 + signal.SIGSEGV
    assert poise("run", "-q", *a_shell("cat; exit 4"), stdin=b"not for the job") == Said(4, "", "")
    as_json = poise("run", "--json", *a_shell("echo told; exit 5"))
    assert (as_json.code, json.loads(as_json.out)) == (5, {"job": "5", "state": "FAILED", "code": 5})
    assert "told\n" in as_json.err
    assert poise("show", "2", "--json").json["failures"] == 1, "a run that failed is not repeated"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_cancels_the_job(number: signal.Signals, a_service: Started, tmp_path: Path) -> None:
    a_service(*TWO_GPUS).up()
    process = started("run", *a_shell(UNTIL_TOLD, tmp_path / "ready"))
    wait_until((tmp_path / "ready").exists, process)
    process.send_signal(number)
    said = ended(process)
    assert said.code == 128 + number
    assert "poise: cancelling job 1\n" in said.err
    until(lambda: states() == ["CANCELLED"], "the job goes on")
    if number == signal.SIGINT:
        assert said.out.splitlines()[-1] == "bye", "what it says at its end is shown"


def test_a_second_ctrl_c_ends_the_command_at_once(a_service: Started, tmp_path: Path) -> None:
    a_service(*TWO_GPUS).up()
    stubborn = 'trap "" TERM; echo ready > "$0"; while :; do sleep 0.05; done'
    process = started("run", *a_shell(stubborn, tmp_path / "ready"))
    wait_until((tmp_path / "ready").exists, process)
    process.send_signal(signal.SIGINT)
    wait_until(lambda: "CANCELLED" in states(), process)
    process.send_signal(signal.SIGINT)
    assert ended(process).code == 130


def test_a_job_that_is_cancelled_elsewhere_is_no_success(a_service: Started, tmp_path: Path) -> None:
    a_service(*TWO_GPUS).up()
    process = started("run", *a_shell(UNTIL_TOLD, tmp_path / "ready"))
    wait_until((tmp_path / "ready").exists, process)
    assert poise("cancel", "1").code == 0
    said = ended(process)
    assert (said.code, said.err.splitlines()[-1]) == (1, "1 CANCELLED: cancelled by its owner")


def test_a_reader_that_goes_away_cancels_the_job(a_service: Started) -> None:
    a_service(*TWO_GPUS).up()
    endless = a_shell("while :; do echo x; sleep 0.05; done")
    assert unread("run", "-q", *endless) == (141, "")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [COMMAND, "run", "-q", *map(str, endless)], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (1, "poise: No space left on device\n")
    until(lambda: states() == ["CANCELLED"] * 2, "jobs go on")


def test_a_job_that_waits_says_why_and_can_be_interrupted(a_service: Started) -> None:
    a_service(*TWO_GPUS).up()
    assert poise("submit", "-g", "2", "--", "sleep", "600").code == 0
    process = started("run", "-n", "later", "--", "true")
    wait_until(lambda: any(row["name"] == "later" for row in poise("queue", "--json").json["jobs"]), process)
    assert process.stderr is not None
    assert process.stderr.readline().startswith("2 later: PENDING, ")
    process.send_signal(signal.SIGINT)
    assert ended(process).code == 130


def test_the_command_goes_on_over_a_restart_of_the_server(a_service: Started, tmp_path: Path) -> None:
    service = a_service(*TWO_GPUS)
    service.up()
    script = 'echo one; echo ready > "$0"; until [ -e "$1" ]; do sleep 0.05; done; echo two; exit 7'
    process = started("run", *a_shell(script, tmp_path / "ready", tmp_path / "go"))
    wait_until((tmp_path / "ready").exists, process)
    service.kill()
    (tmp_path / "go").touch()
    service.start()
    service.ready()
    said = ended(process)
    assert (said.code, said.out) == (7, "one\ntwo\n")
