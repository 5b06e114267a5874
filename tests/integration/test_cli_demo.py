"""`poise demo`: the tour works out of the box, and what it leaves behind fetches nothing."""

import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from tests.shell import Said, poise, poise_apart

from poise.cli.compare import POLICIES

OUTSIDE = re.compile(r"""https?://|["'=(]//[a-z]|@import|url\(|<script[^>]*\ssrc|<link|<iframe|<img""")
ALLOWED = "http://www.w3.org/2000/svg"
"""The name of a language, which nobody fetches."""


@pytest.fixture(scope="module")
def toured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Said, Path]:
    folder = tmp_path_factory.mktemp("demo")
    return poise_apart("demo", folder=folder), folder / "poise-demo.html"


def test_demo_ends_well_and_says_where_the_report_is(toured: tuple[Said, Path]) -> None:
    said, html = toured
    assert (said.code, said.err) == (0, "")
    assert f"report: {html}" in said.out
    assert all(name in said.out for name in POLICIES)


def test_report_parses_and_has_figures_and_a_row_a_policy(toured: tuple[Said, Path]) -> None:
    _, html = toured
    root = ET.fromstring(html.read_text(encoding="utf-8").removeprefix("<!DOCTYPE html>\n"))
    figures = list(root.iter("figure"))
    assert len(figures) >= 5
    assert all(any(child.tag.endswith("svg") for child in figure) for figure in figures)
    assert [cell.text for cell in root.iterfind(".//tbody/tr/th")] == list(POLICIES)


def test_report_refers_to_nothing_outside_itself(toured: tuple[Said, Path]) -> None:
    _, html = toured
    assert OUTSIDE.findall(html.read_text(encoding="utf-8").replace(ALLOWED, "")) == []
    root = ET.fromstring(html.read_text(encoding="utf-8").removeprefix("<!DOCTYPE html>\n"))
    targets = [each.attrib[key] for each in root.iter() for key in each.attrib if key.endswith(("href", "src"))]
    assert all(target.startswith("#") for target in targets)


def test_json_has_a_summary_a_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poise.cli.compare.POLICIES", ("fifo", "srtf"))
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    rows = poise("demo", "--json", "--html", tmp_path / "report.html").json
    assert [(row["policy"], row["jobs"], row["finished"]) for row in rows] == [("fifo", 240, 240), ("srtf", 240, 240)]
    assert (tmp_path / "report.html").exists()


def test_a_report_that_cannot_be_written_is_refused_before_the_tour(tmp_path: Path) -> None:
    assert "there is no folder" in poise("demo", "--html", tmp_path / "no" / "report.html").refusal
