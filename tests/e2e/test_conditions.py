"""Real jobs on a real service start after others, at their time, and as many of an array at once as it may have."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.e2e.service import Service
from tests.shell import poise

pytestmark = pytest.mark.slow
Started = Callable[..., Service]
NOTE = (
    "import os, sys, time; log = open(sys.argv[1], 'a', buffering=1)\nprint('begin', sys.argv[2], time.time(), file=log)\n"
)
DONE = "\nprint('end', sys.argv[2], time.time(), file=log)\n"


def test_jobs_start_after_others_at_their_time_and_one_by_one(a_service: Started, tmp_path: Path) -> None:
    service = a_service("--cluster", "v100:4", "--round", "3", "--retries", "0")
    service.up()
    script, log = tmp_path / "note.py", tmp_path / "log"
    # The first job goes on until it is told to, so that what waits for it is seen to wait over a crash of the server.
    wait = "while sys.argv[2] == 'prep' and not os.path.exists('go'): time.sleep(0.02)"
    script.write_text(f"{NOTE}{wait}{DONE}assert sys.argv[2] != 'bad'\n")

    def submit(what: str, *options: str) -> str:
        said = poise("submit", "-q", "--cwd", tmp_path, *options, "--", "python3", script, log, what)
        assert said.code == 0, said
        return said.out

    submit("prep", "-n", "prep")
    submit("grid", "-n", "grid", "--array", "0-2%1", "--after", "prep:succeeded")
    fit = submit("fit", "--after", "grid:succeeded", "--begin", "now+1").strip()
    bad = submit("bad").strip()
    never = submit("never", "--after", f"{bad}:succeeded").strip()
    assert poise("wait", "-q", bad, never).code == 1
    assert f"was to start after the success of job {bad}, which failed" in poise("why", never).out
    service.kill()
    service.up()
    why = poise("why", fit).out
    assert "waits for 3 of 3 jobs to succeed: 2 (PENDING), 3 (PENDING), 4 (PENDING)" in why
    assert [line.split()[:2] for line in log.read_text().splitlines() if "bad" not in line] == [["begin", "prep"]]
    (tmp_path / "go").touch()
    assert poise("wait", "-q", fit).code == 0
    lines = [line.split() for line in log.read_text().splitlines() if "bad" not in line]
    assert [line[:2] for line in lines] == [
        ["begin", "prep"], ["end", "prep"],
        *[["begin", "grid"], ["end", "grid"]] * 3,
        ["begin", "fit"], ["end", "fit"],
    ]  # fmt: skip
    shown = poise("show", fit, "--json").json
    assert float(lines[-2][2]) >= shown["request"]["begin"]
    assert poise("replay", "--json", service.state).json["exact"]
