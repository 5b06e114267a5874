"""Standard streams that nobody reads, that are closed, or full: exit code 141, or one line and 1; never a traceback."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tests.e2e.service import Service
from tests.shell import COMMAND, poise

from poise.cli import UNREAD
from poise.cli.app import VERBS

pytestmark = pytest.mark.slow
Started = Callable[..., Service]
Case = tuple[Sequence[str], str, str]
ROOT = Path(__file__).parents[2]
ON_FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
COMPLAINTS = {"gone": "", "closed": "poise: standard output is closed\n", "full": "poise: No space left on device\n"}
LIVE = (
    "queue", "queue -o wide", "queue --json", "queue -o csv", "queue --state all", "show 1", "show 1 --json", "why 1",
    "logs 1", "logs -f 1", "events", "events --json", "nodes", "shares", "tokens", "top", "top --json", "wait 1",
    "wait 1 --json", "hold 2", "hold 2 --json", "release 2", "cancel 2", "use fifo", "submit --hold -- true",
    "submit -q --hold -- true", "submit --dry-run -- true", "submit --wait -- true", "submit --follow -- echo x",
    "run -- echo x", "drain gpu-0 --no-wait", "return gpu-0",
)  # fmt: skip
ALONE = (
    "simulate synthetic:jobs=5", "simulate synthetic:jobs=5 --json", "compare synthetic:jobs=5 --policies fifo,las",
    "analyze synthetic:jobs=20", "policies", "policies fifo", "policies --json", "completion bash", "completion zsh --json",
    "--version", "--help",
)  # fmt: skip


def outcomes(cases: Sequence[Case], **environment: str) -> list[tuple[int, str]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.broken_streams"], input=json.dumps(cases), capture_output=True, text=True, check=True,
        cwd=ROOT, env={**os.environ, **environment},
    )  # fmt: skip
    return [(code, said) for code, said in json.loads(done.stdout)]


def check(commands: Sequence[str]) -> None:
    """Every command ends as it should, whatever its standard output is."""
    cases = [(command.split(), how, "held") for command in commands for how in COMPLAINTS]
    for (words, how, _), (code, said) in zip(cases, outcomes(cases), strict=True):
        told = "".join(line for line in said.splitlines(keepends=True) if line.startswith(("poise: ", "Traceback")))
        assert (code, told) == (UNREAD if how == "gone" else 1, COMPLAINTS[how]), f"poise {' '.join(words)}, {how}: {said}"


@ON_FULL
def test_verbs_of_a_service_say_in_one_line_that_nothing_can_be_printed(a_service: Started) -> None:
    a_service("--cluster", "gpu:2").up()
    assert poise("submit", "--wait", "--", "echo", "x").code == 0
    assert poise("submit", "--hold", "--", "sleep", "600").code == 0
    check(LIVE)


@ON_FULL
def test_verbs_without_a_service_and_every_help_do_so_too() -> None:
    check([*ALONE, *(f"{verb} --help" for verb in VERBS), "bench solve --help", "ray release --help"])


@ON_FULL
def test_complaints_that_cannot_be_printed_leave_the_exit_code() -> None:
    wrong = (["policis"], ["simulate", "absent.jsonl"], ["cancel"], ["submit"], ["policies", "--nosuch"])
    cases = [(words, "nowhere", how) for words in wrong for how in ("closed", "full")]
    assert outcomes(cases) == [(2, "")] * len(cases)
    assert outcomes([(words, "nowhere", "gone") for words in wrong]) == [(UNREAD, "")] * len(wrong)


@pytest.mark.parametrize("closing", [">&-", "2>&-", "<&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_streams_that_a_shell_has_closed_are_no_files_of_others(closing: str, tmp_path: Path) -> None:
    script = f'"{COMMAND}" policies fifo {closing}'
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False, cwd=tmp_path)
    prints = not closing.startswith(">&-") and " >&-" not in closing
    assert done.returncode == (0 if prints else 1)
    assert done.stderr == ("" if prints or "2>&-" in closing else COMPLAINTS["closed"])
    assert done.stdout.startswith("fifo") == prints
    assert [*tmp_path.iterdir()] == []
