"""The command as its users meet it: in this process where speed matters, in another where processes do."""

import io
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any
from unittest.mock import patch

import click
import pytest

from poise.cli.app import poise as program
from poise.cli.app import run

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
"""Public traces; tests that want one skip where it is absent."""

COMMAND = str(Path(sysconfig.get_path("scripts")) / "poise")
PATIENCE = 180.0
"""Seconds after which a process that was waited for is taken to hang; the machine may have other things to do."""


def program_context() -> click.Context:
    """What a verb is called under. Without it click would remember for all later calls that the verb has no `-h`."""
    return click.Context(program, **program.context_settings)


def _no_number(name: str) -> float:
    raise AssertionError(f"{name} is not JSON")


def as_json(text: str) -> Any:
    """One JSON document and nothing else; NaN and Infinity are none."""
    return json.loads(text, parse_constant=_no_number)


@dataclass(frozen=True)
class Said:
    """What came of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        assert self.code == 0, self.err
        return as_json(self.out)

    @property
    def refusal(self) -> str:
        """The one line that a wrong request gets, and nothing else."""
        assert self.code == 2, self
        return self._complaint

    @property
    def failure(self) -> str:
        """The one line that work which failed ends with."""
        assert self.code == 1, self
        return self._complaint

    @property
    def _complaint(self) -> str:
        assert self.out == ""
        assert self.err.endswith("\n")
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("poise: ")
        return lines[0].removeprefix("poise: ")


def poise(*words: object, stdin: bytes = b"") -> Said:
    """Run a command in this process. An exception that a user would see as a traceback comes out."""
    out, err = io.StringIO(), io.StringIO()
    given = io.TextIOWrapper(io.BytesIO(stdin))
    argv = ["poise", *map(str, words)]
    with patch.object(sys, "argv", argv), patch.object(sys, "stdin", given), redirect_stdout(out), redirect_stderr(err):
        code = run()
    return Said(code, out.getvalue(), err.getvalue())


def started(*words: object, folder: Path | None = None, **environment: str) -> subprocess.Popen[str]:
    """Start a command in a process, and a process group, of its own."""
    return subprocess.Popen(
        [COMMAND, *map(str, words)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, **environment},
        start_new_session=True,
    )


def ended(process: subprocess.Popen[str]) -> Said:
    """What a started command came to."""
    try:
        out, err = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    return Said(process.returncode, out, err)


def poise_apart(*words: object, folder: Path | None = None, **environment: str) -> Said:
    """Run a command in a process of its own."""
    return ended(started(*words, folder=folder, **environment))


def unread(
    *words: object, folder: Path | None = None, complaints: int = subprocess.PIPE, **environment: str
) -> tuple[int, str | None]:
    """Run a command whose output is read by none; its exit code and its complaints."""
    out, into = os.pipe()
    os.close(out)
    process = subprocess.Popen(
        [COMMAND, *map(str, words)],
        stdin=subprocess.DEVNULL,
        stdout=into,
        stderr=complaints,
        text=True,
        cwd=folder,
        env={**os.environ, **environment},
    )
    os.close(into)
    try:
        _, err = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    return process.returncode, err


def a_row(job: str, at: float = 0, gpus: int = 1, seconds: float | None = 10, **more: object) -> dict[str, object]:
    """A line of a trace."""
    length = {} if seconds is None else {"duration": seconds}
    return {"job": job, "submitted": at, "gpus": gpus, **length, **more}


def a_trace(folder: Path, *rows: dict[str, object], name: str = "trace.jsonl") -> Path:
    """A trace of these rows in a file."""
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


EVENTS = ("--cadence", "events", "--placement", "count")
"""Decide at every change and count GPUs: the setting in which results are worked out by hand."""

FOUR = (
    a_row("A", at=0, gpus=3, seconds=100),
    a_row("B", at=10, gpus=4, seconds=20),
    a_row("C", at=20, gpus=2, seconds=30),
    a_row("D", at=30, gpus=1, seconds=60),
)
"""A trace on which every policy decides differently on 4 GPUs."""


def simulated(trace: Path | str, *options: object) -> dict[str, Any]:
    document = poise("simulate", trace, *options, "--json").json
    assert isinstance(document, dict)
    return document


def per_job(trace: Path | str, folder: Path, *options: object) -> dict[str, dict[str, Any]]:
    assert poise("simulate", trace, *options, "--per-job", folder / "rows.json").code == 0
    return {row["job"]: row for row in json.loads((folder / "rows.json").read_text())}


def jcts(trace: Path | str, folder: Path, *options: object) -> dict[str, float]:
    return {job: row["jct"] for job, row in per_job(trace, folder, *options).items()}


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Return once the condition holds, which it must before the process ends."""
    deadline = monotonic() + PATIENCE
    while not condition():
        if process.poll() is not None or monotonic() > deadline:
            process.kill()
            pytest.fail(f"it did not come so far: {process.communicate()}")
        sleep(0.01)
