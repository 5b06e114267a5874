"""The documents are true: what they show is run, what is generated is current, what they link to is there."""

import contextlib
import io
import re
import runpy
import sys
from dataclasses import fields
from pathlib import Path
from unittest import mock

import pytest
from tests.docs_runner import ROOT, blocks, missing, pages, play, regenerated, steps, verbs

from poise.cli.app import VERBS
from poise.lab.analysis.run_tables import PER_JOB_COLUMNS
from poise.lab.analysis.summary import Summary
from poise.lab.simulator.world import Truth
from poise.lab.traces.registry import FORMATS
from poise.scheduler.core.reasons import Code
from poise.scheduler.core.settings import Settings
from poise.scheduler.model.action import Action, PreemptionCause
from poise.scheduler.model.event import Event
from poise.scheduler.policies.catalogue import POLICIES
from poise.service.backends.kubernetes.reasons import MENDED_BY_NODES, PROBLEMS, UNSCHEDULABLE, WAITS, WORDS, reason_word
from poise.service.server.explain import LiveCode
from poise.service.server.start_conditions import StartCode

pytestmark = pytest.mark.docs

_LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)\s]+)\)")
_NOT_A_PROGRAM = {"text", "mermaid", "json", "csv", "yaml", "toml", "make", "console", "python", "nginx", "caddyfile"}
EACH_PAGE = pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))


def _text(*parts: str) -> str:
    return ROOT.joinpath(*parts).read_text(encoding="utf-8")


def _prose(text: str) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def _anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as code hosts make them."""
    headings = re.findall(r"^#+ (.+)$", _prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _misfit(page: Path, folder: Path) -> str | None:
    """Run a page; say what it shows otherwise."""
    folder.mkdir()
    with contextlib.closing(play(page, folder)) as commands:
        for played in commands:
            if not played.fits:
                shown = "\n".join([f"$ {played.step.command}", *played.got])
                return f"{page.relative_to(ROOT)}:{played.block.at} shows something else than\n{shown}"
    return None


@EACH_PAGE
def test_a_page_shows_what_poise_prints(page: Path, tmp_path: Path) -> None:
    """Of jobs that share GPUs, a page shows one course of events; on a busy machine it may take another one at first."""
    misfit = _misfit(page, tmp_path / "first")
    if misfit is not None and "$ poise serve" in page.read_text(encoding="utf-8"):
        misfit = _misfit(page, tmp_path / "second")
    assert misfit is None, misfit
    left_out = [block.needs for block in blocks(page.read_text(encoding="utf-8")) if missing(block)]
    if left_out:
        pytest.skip(f"public data is not here: {', '.join(map(str, left_out))}; the rest of the page was run")


@EACH_PAGE
def test_the_generated_parts_of_a_page_are_current(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert regenerated(text) == text, "run `python -m tests.docs_runner`"


@EACH_PAGE
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    for target in _LINK.findall(_prose(page.read_text(encoding="utf-8"))):
        if target.startswith("https://"):
            continue  # a paper, a data set or a tool: nothing is fetched in tests
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        if anchor:
            assert anchor in _anchors(there.read_text(encoding="utf-8")), target


@EACH_PAGE
def test_every_verb_of_make_that_a_page_speaks_of_exists(page: Path) -> None:
    known = set(re.findall(r"^([a-z0-9-]+):", _text("Makefile"), re.MULTILINE))
    assert verbs(page.read_text(encoding="utf-8")) <= known


@EACH_PAGE
def test_every_block_of_a_page_is_of_a_kind_that_is_run_or_cannot_be(page: Path) -> None:
    for block in blocks(page.read_text(encoding="utf-8")):
        assert block.language in _NOT_A_PROGRAM, f"line {block.at}"


def test_every_policy_has_a_page_of_the_same_shape_with_an_example_that_is_run() -> None:
    for name in POLICIES:
        text = _text("docs", "policies", f"{name}.md")
        for part in ("**Idea.**", "**Problem in symbols.**", "## Worked example", "## When not to use it", "## Differences"):
            assert part in text, f"{name}: {part}"
        assert f"<!-- generated: policy {name} -->" in text
        commands = [step.command for block in blocks(text) if block.language == "console" for step in steps(block)]
        assert any(f"--policy {name}" in command for command in commands), name


def test_every_verb_has_its_help_in_the_reference() -> None:
    text = _text("docs", "reference", "cli.md")
    for verb in VERBS:
        assert f"<!-- generated: help {verb} -->" in text, verb


def test_every_format_of_traces_is_in_the_reference() -> None:
    text = _text("docs", "reference", "traces.md")
    for each in FORMATS:
        assert f"<!-- generated: format {each.name} -->" in text, each.name


def test_every_number_of_a_summary_and_every_column_a_job_is_in_the_reference() -> None:
    text = _text("docs", "reference", "metrics.md")
    for name in (*(each.name for each in fields(Summary)), *PER_JOB_COLUMNS):
        assert f"| `{name}` |" in text, name


def test_every_event_and_action_is_in_the_reference_of_the_journal_with_its_fields() -> None:
    text = _text("docs", "reference", "journal.md")
    for kind in (*Event.__args__, *Action.__args__):
        row = f"| `{kind.__name__.lower()}` | {' '.join(f'`{each.name}`' for each in fields(kind))} |"
        assert row.replace("|  |", "| |") in text, row


def test_every_code_of_a_reason_is_in_the_reference() -> None:
    text = _text("docs", "reference", "reasons.md")
    for code in (*Code, *LiveCode, *StartCode, *PreemptionCause):
        assert f"| `{code}` |" in text, code


def test_every_word_that_kubernetes_shows_is_in_the_reference_with_its_code() -> None:
    _, _, section = _text("docs", "reference", "reasons.md").partition("## Words that Kubernetes shows\n")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+?) \| .+ \|$", section.partition("\n## ")[0], re.MULTILINE))
    assert {UNSCHEDULABLE, WAITS} <= rows.keys()
    assert all(f"`{code}`" in rows[UNSCHEDULABLE] for code in MENDED_BY_NODES)
    codes = {word: code.strip("`") for word, code in rows.items() if word not in (UNSCHEDULABLE, WAITS)}
    assert codes == {reason_word(code): code for code in codes.values()}
    # A job that has failed waits for nothing, so its code is written nowhere.
    assert {*WORDS, *PROBLEMS} - {"failed"} <= {*codes.values()}


def test_every_setting_of_the_simulator_is_in_the_reference() -> None:
    text = _text("docs", "reference", "simulator-defaults.md")
    for each in (*fields(Settings), *fields(Truth)):
        assert f"| `{each.name}` |" in text, each.name


def test_every_word_of_the_house_is_in_the_glossary_once() -> None:
    text = _text("docs", "glossary.md")
    for word in ("gang", "tenant", "claim", "plan", "decision", "round", "lease", "attained service", "rho", "journal"):
        assert len(re.findall(rf"^\| [^|]*\b{word}\b[^|]*\|", text, re.MULTILINE)) == 1, word


def test_the_picture_of_the_demonstration_is_current(tmp_path: Path) -> None:
    _run("docs/images/make_demo_picture.py", tmp_path / "demo.svg")
    assert (tmp_path / "demo.svg").read_bytes() == (ROOT / "docs/images/demo.svg").read_bytes()
    assert (ROOT / "docs/images/report.png").stat().st_size < 300_000


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_an_example_runs_and_leaves_a_figure(example: Path, tmp_path: Path) -> None:
    _run(str(example.relative_to(ROOT)), tmp_path / "figure.svg")
    assert (tmp_path / "figure.svg").read_text(encoding="utf-8").startswith("<svg")


def _run(script: str, target: Path) -> None:
    with mock.patch.object(sys, "argv", [script, str(target)]), contextlib.redirect_stdout(io.StringIO()):
        runpy.run_path(str(ROOT / script), run_name="__main__")
