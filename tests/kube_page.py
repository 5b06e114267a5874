"""Runs a page of the documents that uses kubectl, in one shell, against an `Installation`; see tests/docs_runner.py."""

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep

from tests.docs_runner import ROOT, Block, Fit, Played, Step, blocks, steps
from tests.kube.server import free_ports
from tests.kube_install import Installation

PATIENCE = 120.0
LOOKS = (
    "poise queue",
    "poise why",
    "poise events",
    "poise shares",
    "poise nodes",
    "kubectl poise",
    "kubectl -n poise-jobs get",
)
"""Beginnings of commands that change nothing, and are given again until they print what is shown."""


class Shell:
    """One bash for all commands of a page, so that variables and background jobs stay."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._out = tempfile.NamedTemporaryFile("r", dir=folder, suffix=".out")  # noqa: SIM115 - closed with the shell
        with open(self._out.name, "w") as out:
            self._bash = subprocess.Popen(
                ["bash"], stdin=subprocess.PIPE, stdout=out, stderr=out, cwd=folder, env=environment, text=True,
                start_new_session=True,
            )  # fmt: skip
        self._number = 0

    def run(self, command: str) -> tuple[list[str], int]:
        """Run a command, and return what it prints and its exit code."""
        self._number += 1
        mark = f"== end of command {self._number}:"
        assert self._bash.stdin is not None
        self._bash.stdin.write(f"{command}\nprintf '\\n{mark} %s\\n' $?\n")
        self._bash.stdin.flush()
        deadline, said = monotonic() + PATIENCE, ""
        while mark not in said:
            assert monotonic() < deadline, f"$ {command}: no end; so far: {said}"
            assert self._bash.poll() is None, f"$ {command}: the shell has ended: {said}"
            sleep(0.02)
            said += self._out.read()
        text, _, code = said.rpartition(mark)
        lines = [line.rstrip() for line in text.rstrip().splitlines()]
        return [line for line in lines if not line.startswith("[1]")], int(code)  # what the shell says of its jobs

    def close(self) -> None:
        """End the shell and its background jobs."""
        assert self._bash.stdin is not None
        with suppress(OSError):
            self._bash.stdin.write("kill $(jobs -p) 2>/dev/null\nexit\n")
            self._bash.stdin.close()
        self._bash.wait(30)
        self._out.close()


def play(page: Path, folder: Path, installation: Installation) -> Iterator[Played]:
    """Run a page from top to bottom; yield every command with what it printed, and raise if one fails."""
    port = free_ports(1)[0]
    overlay = folder / "deploy" / "kubernetes" / "overlays" / "first"
    for each in ("base", "components"):
        (folder / "deploy" / "kubernetes").mkdir(parents=True, exist_ok=True)
        (folder / "deploy" / "kubernetes" / each).symlink_to(ROOT / "deploy" / "kubernetes" / each)
    overlay.mkdir(parents=True)
    shell = Shell(folder, {**installation.environment(), "XDG_CONFIG_HOME": str(folder / "config"), "COLUMNS": "120"})
    try:
        for block in blocks(page.read_text(encoding="utf-8")):
            if block.file:
                where = overlay if block.file == "kustomization.yaml" else Path(shell.run("pwd")[0][0])
                (where / block.file).write_text(block.hurried, encoding="utf-8")
            elif block.language == "console":
                yield from (_step(shell, block, step, port) for step in steps(block))
    finally:
        shell.close()


def _step(shell: Shell, block: Block, step: Step, port: int) -> Played:
    command = step.command.replace("port-forward svc/poise 8642", f"port-forward svc/poise {port}:8642")
    command = command.replace("localhost:8642", f"localhost:{port}")
    deadline = monotonic() + PATIENCE
    while True:
        got, code = shell.run(command)
        played = Played(block, step, got, Fit.TIMELESS)
        if (code == 0 and played.fits) or not command.startswith(LOOKS) or monotonic() > deadline:
            assert code == 0, f"$ {command}: exit code {code}: {got}"
            return played
        sleep(0.1)
