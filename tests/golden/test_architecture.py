"""ARCHITECTURE.md is true: its walks lead through files that are there, and class names mean one thing."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "poise"
TEXT = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
WALKS = dict(re.findall(r"^### (.+?)\n\n(.+?)(?=\n\n|\Z)", TEXT, re.MULTILINE | re.DOTALL))
STOP = re.compile(r"^(\d+)\. `([\w/.]+\.py)` `([\w.]+)`: \S", re.MULTILINE)


@pytest.mark.parametrize("walk", WALKS)
def test_a_walk_has_at_most_eight_stops_each_a_definition_in_its_file(walk: str) -> None:
    stops = STOP.findall(WALKS[walk])
    assert [int(number) for number, _, _ in stops] == list(
        range(1, len(re.findall(r"^\d+\. ", WALKS[walk], re.MULTILINE)) + 1)
    )
    assert 2 <= len(stops) <= 8
    for _, path, symbol in stops:
        names = symbol.split(".")
        body = ast.parse((SOURCE / path).read_text(encoding="utf-8")).body
        for name in names:
            found = [
                each
                for each in body
                if isinstance(each, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and each.name == name
            ]
            assert found, f"{path} does not define {symbol}"
            body = found[0].body


def test_every_path_that_the_page_names_is_there() -> None:
    tree = re.search(r"## The tree\n(.*?)\n## ", TEXT, re.DOTALL)
    assert tree is not None
    named = set(re.findall(r"`((?:[\w]+/)+[\w.]*)`", TEXT.replace(tree[1], "")))
    for folder, start in re.findall(r"^\|[^|]*\| `([\w/.]+)` \|[^|]*\|(.*)\|$", tree[1], re.MULTILINE):
        named |= {folder, *(f"{folder}/{name}" for name in re.findall(r"`([\w/.]+\.py)`", start))}
    assert len(named) > 40
    assert not [path for path in sorted(named) if not (SOURCE / path).exists() and not (ROOT / path).exists()]


def test_every_class_name_means_one_thing() -> None:
    names = Counter(
        each.name
        for path in SOURCE.rglob("*.py")
        for each in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(each, ast.ClassDef)
    )
    assert not [name for name, times in names.items() if times > 1]


def test_no_comment_cites_a_document_that_is_not_in_the_repository() -> None:
    cited = re.compile(r"\b(?:ALGORITHMS|INTERFACE|DESIGN|STYLE|FIELD)(?:\.md)? ?§")
    files = (*SOURCE.rglob("*.py"), *(ROOT / "tests").rglob("*.py"), *(ROOT / "docs").rglob("*.md"))
    assert not [str(path) for path in files if cited.search(path.read_text(encoding="utf-8"))]
