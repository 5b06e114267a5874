"""Runs what the documents show, and compares: a page that says something else than Poise does is a failing test.

A page is run from top to bottom in a folder of its own.

- ```console   lines that begin with `$ ` are run, and what they print must be what the page shows. A line `...` stands for
               any lines, and `…` for anything within a line. A command that fails must be followed by `$ echo $?`. Verbs
               of make are not run, but for the demonstration, which is run as make would run it.
               `$ poise serve ... &` starts a real service (tests/docs_service.py), which is gone after the page. From then
               on moments, spans of time, ports and widths of columns may differ from what is shown, and a command that
               only looks is given again until it prints what is shown.
- ```python    is run; the blocks of a page share their names.
- <!-- file: NAME -->        before a block: the block is a file that the page asks the reader to save.
  <!-- file: NAME (OLD is NEW in tests) -->   the same, with OLD replaced by NEW: for readers things take longer.
- <!-- needs: FOLDER/NAME --> before a block: the block needs a public data file (or several, with commas between them), and
  is left out where that is not there.
- <!-- cluster: kubernetes -->  anywhere: the commands of the page need a cluster; tests/kube_page.py runs them on one.
- <!-- generated: NAME --> ... <!-- end -->   is what `tests.docs_tables` makes of the code.

`python -m tests.docs_runner [PAGE.md ...]` writes what Poise really prints into the pages, all of them if none is
named; what it changed is to be read, not trusted.
"""

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from time import monotonic, sleep
from unittest import mock

from tests.docs_service import PageService, environment
from tests.docs_tables import generated

from poise.cli import main as poise

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT.parent / "shared" / "data"
ANY, SOMETHING = "...", "…"
PATIENCE = 180.0
"""Seconds after which a service is taken never to say what a page shows."""
REWRITING_PATIENCE = 10.0
"""The same where what it says is written into the page."""
_DIRECTIVE = re.compile(r"<!-- (?P<what>file|needs): (?P<name>\S+)(?: \((?P<old>\S+) is (?P<new>\S+) in tests\))? -->")
ON_CLUSTER = "<!-- cluster: kubernetes -->"
_GENERATED = re.compile(r"(?P<head><!-- generated: (?P<name>[^>]+?) -->\n)(?P<body>.*?)(?P<tail><!-- end -->)", re.DOTALL)
_RUN_FOR = {"make demo": "poise demo"}
_SHELL = re.compile(r"[|<>&;$`*]")
_LOOKS = re.compile(r"poise (queue|show|why|logs|events|nodes|shares(?! --set))\b|(cat|tail|grep|ls) ")
"""Commands that change nothing, and whose answers may change by themselves."""
_VARIES = (
    re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(\.\d+)?Z"),
    re.compile(r"\b\d+(\.\d+)?s\b|\b\d+m\d\ds\b"),
    re.compile(r"(?<=127\.0\.0\.1:|localhost:)\d+"),
)


def pages() -> list[Path]:
    """Every document, by path."""
    top = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")]
    return [*top, *sorted((ROOT / "docs").rglob("*.md"))]


@dataclass
class Block:
    """A fenced block: its language, its lines, the line of the page that it begins on, and what a comment says of it."""

    language: str
    at: int
    lines: list[str] = field(default_factory=list)
    file: str | None = None
    needs: str | None = None
    hurry: tuple[str, str] | None = None

    @property
    def text(self) -> str:
        """Its lines as a file."""
        return "".join(f"{line}\n" for line in self.lines)

    @property
    def hurried(self) -> str:
        """The same, as tests have it."""
        assert self.hurry is None or self.hurry[0] in self.text, f"line {self.at}: there is no {self.hurry[0]}"
        return self.text if self.hurry is None else self.text.replace(*self.hurry)


@dataclass
class Step:
    """A command of a console block and the lines that the page shows for it."""

    command: str
    typed: list[str]
    shown: list[str] = field(default_factory=list)


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found: list[Block] = []
    inside: Block | None = None
    said = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if inside is not None:
            if line == "```":
                inside = None
            else:
                inside.lines.append(line)
        elif line.startswith("```"):
            inside = _with_directive(Block(line[3:].strip(), number), said)
            found.append(inside)
            said = ""
        elif line.strip():
            said = line
    return found


def _with_directive(block: Block, said: str) -> Block:
    match = _DIRECTIVE.fullmatch(said.strip())
    if match:
        setattr(block, match["what"], match["name"])
        if match["old"]:
            block.hurry = (match["old"], match["new"])
    return block


def steps(block: Block) -> list[Step]:
    """The commands of a console block; one that ends in a backslash goes on in the next line."""
    found: list[Step] = []
    for line in block.lines:
        if found and found[-1].command.endswith("\\") and not found[-1].shown:
            found[-1].command = found[-1].command[:-1] + line.strip()
            found[-1].typed.append(line)
        elif line.startswith("$ "):
            found.append(Step(line[2:], [line]))
        elif found:
            found[-1].shown.append(line.rstrip())
        else:
            raise AssertionError(f"a console block begins with {line!r}, not with a command")
    for step in found:
        while step.shown and not step.shown[-1]:
            step.shown.pop()
    return found


def is_make(block: Block) -> bool:
    """It shows a verb of make."""
    return block.language == "console" and bool(block.lines) and block.lines[0].startswith("$ make")


def verbs(text: str) -> set[str]:
    """Every verb of make that a page speaks of."""
    return set(re.findall(r"(?:`|^\$ )make ([a-z][a-z0-9-]*)", text, re.MULTILINE))


class Fit(Enum):
    """How much of what is printed has to be as it is shown: every letter, or all but what depends on the time it takes."""

    EXACT = "exact"
    TIMELESS = "timeless"


def matches(shown: list[str], got: list[str], fit: Fit = Fit.EXACT) -> bool:
    """What was printed is what is shown, where a line `...` stands for any lines and `…` for anything in a line."""
    if fit is Fit.TIMELESS:
        shown, got = list(map(_timeless, shown)), list(map(_timeless, got))
    pattern = "".join(r"(?:.*\n)*" if line == ANY else _pattern(line) + "\n" for line in shown)
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in got)) is not None


def _pattern(line: str) -> str:
    return ".*".join(map(re.escape, line.split(SOMETHING)))


def _timeless(line: str) -> str:
    for varying in _VARIES:
        line = varying.sub("#", line)
    return re.sub(r"[ ─]+", " ", line).strip()


@dataclass
class Workshop:
    """The folder that a page is run in, the names of its Python blocks, the exit code of the last command, the service."""

    folder: Path
    patience: float = PATIENCE
    names: dict[str, object] = field(default_factory=lambda: {"__name__": "__page__"})
    code: int = 0
    service: PageService | None = None

    def play(self, block: Block, step: Step) -> "Played":
        """Run a command; where a service runs, one that only looks is repeated until it sees what is shown."""
        deadline = monotonic() + self.patience
        while True:
            fit = Fit.EXACT if self.service is None else Fit.TIMELESS
            played = Played(block, step, self.run(step.command), fit)
            if played.fits or fit is Fit.EXACT or not _LOOKS.match(step.command) or monotonic() > deadline:
                return played
            self.code = 0
            sleep(0.1)

    def close(self) -> None:
        """End what was started."""
        if self.service is not None:
            self.service.close()

    def _serves(self, command: str) -> bool:
        """The command starts or ends the service."""
        if self.service is None and command.startswith("poise serve ") and command.endswith("&"):
            self.service = PageService(self.folder)
        return self.service is not None and self.service.takes(command)

    def run(self, command: str) -> list[str]:
        """What a command prints, on either stream."""
        if command == "echo $?":
            code, self.code = self.code, 0
            return [str(code)]
        if self.code:
            raise AssertionError(f"a command failed with exit code {self.code}; show it with `$ echo $?`")
        if self._serves(command):
            return []
        first, _, rest = command.partition(" | ")
        if not first.startswith("poise ") or _SHELL.search(first):
            text = self._run_shell(command)
        elif rest:
            text = self._run_shell(rest, self._run_poise(shlex.split(first), notes=io.StringIO()))
        else:
            text = self._run_poise(shlex.split(first))
        return [line.rstrip() for line in text.rstrip().splitlines()]

    def _run_poise(self, arguments: list[str], notes: io.StringIO | None = None) -> str:
        """In this process: starting an interpreter takes longer than most examples. One core, so that nothing forks."""
        printed = io.StringIO()
        with (
            contextlib.chdir(self.folder),
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(printed if notes is None else notes),
            mock.patch.object(sys, "argv", arguments),
            mock.patch.object(os, "cpu_count", return_value=1),
            mock.patch.dict(os.environ, environment(self.folder), clear=True),
        ):
            try:
                poise()
            except SystemExit as stop:
                self.code = int(stop.code or 0)
        return printed.getvalue()

    def _run_shell(self, command: str, given: str = "") -> str:
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", command],
            cwd=self.folder,
            env=environment(self.folder),
            input=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        self.code = self.code or done.returncode
        return done.stdout

    def execute(self, block: Block, page: Path) -> None:
        """Run a Python block; what it prints is not compared, so it had better assert."""
        code = compile("\n" * block.at + block.text, str(page), "exec")
        seen = mock.patch.dict(os.environ, environment(self.folder), clear=True)
        with contextlib.chdir(self.folder), contextlib.redirect_stdout(io.StringIO()), seen:
            exec(code, self.names)


@dataclass(frozen=True)
class Played:
    """A command as shown, and what it printed now."""

    block: Block
    step: Step
    got: list[str]
    fit: Fit = Fit.EXACT

    @property
    def fits(self) -> bool:
        """It printed what the page shows."""
        return matches(self.step.shown, self.got, self.fit)


def play(page: Path, folder: Path, patience: float = PATIENCE) -> Generator[Played, None, None]:
    """Run a page from top to bottom; yields every command with what it printed. Raises what a Python block raises.

    Whoever does not go through to the end closes it: a service of the page runs until then.
    """
    if ON_CLUSTER in page.read_text(encoding="utf-8"):
        return
    (folder / "examples").symlink_to(ROOT / "examples")
    with contextlib.closing(Workshop(folder, patience)) as workshop:
        for block in blocks(page.read_text(encoding="utf-8")):
            if block.needs:
                if missing(block):
                    continue
                _fetch(block.needs, folder)
            yield from _played(block, workshop, page)


def _played(block: Block, workshop: Workshop, page: Path) -> Iterator[Played]:
    if block.file:
        (workshop.folder / block.file).write_text(block.hurried, encoding="utf-8")
    elif block.language == "python":
        workshop.execute(block, page)
    elif block.language == "console":
        for step in steps(block):
            if not is_make(block):
                yield workshop.play(block, step)
            elif recipe := _RUN_FOR.get(step.command):
                yield Played(block, step, [f".venv/bin/{recipe}", *workshop.run(recipe)])


def _fetch(names: str, folder: Path) -> None:
    for name in names.split(","):
        shutil.copyfile(DATA / name, folder / Path(name).name)


def missing(block: Block) -> bool:
    """The block needs public data that is not there."""
    return block.needs is not None and not all((DATA / name).exists() for name in block.needs.split(","))


def regenerated(text: str) -> str:
    """The page with its generated parts as they should be."""
    return _GENERATED.sub(lambda part: part["head"] + generated(part["name"]) + part["tail"], text)


def _replaced(step: Step, got: list[str]) -> list[str]:
    """What the page should show: all of it, or as many lines before and after `...` as it shows now."""
    if ANY not in step.shown:
        return got
    first, last = step.shown.index(ANY), len(step.shown) - 1 - step.shown[::-1].index(ANY)
    after = len(step.shown) - 1 - last
    if first != last or first + after > len(got):
        return step.shown
    return [*got[:first], ANY, *got[len(got) - after :]]


def rewrite(page: Path) -> list[str]:
    """Write what is printed now into a page; returns the commands that printed something else than was shown."""
    page.write_text(regenerated(page.read_text(encoding="utf-8")), encoding="utf-8")
    lines = page.read_text(encoding="utf-8").splitlines()
    with tempfile.TemporaryDirectory() as folder:
        played = list(play(page, Path(folder), patience=REWRITING_PATIENCE))
    for block in reversed({each.block.at: each.block for each in played}.values()):
        new: list[str] = []
        for each in (each for each in played if each.block is block):
            new += [*each.step.typed, *(each.step.shown if each.fits else _replaced(each.step, each.got))]
        lines[block.at : block.at + len(block.lines)] = new
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return [f"$ {each.step.command}" for each in played if not each.fits]


def main(named: list[str]) -> int:
    """Rewrite the pages that are named, or all; anything that is no page is refused."""
    chosen = [Path(name).resolve() for name in named] or pages()
    if not set(chosen) <= set(pages()):
        sys.stderr.write("usage: python -m tests.docs_runner [PAGE.md ...]\n")
        return 2
    for page in chosen:
        for changed in rewrite(page):
            sys.stdout.write(f"{page.relative_to(ROOT)}: {changed}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
