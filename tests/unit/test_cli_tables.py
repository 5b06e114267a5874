"""Tables on terminals of any width: nothing that names a row or holds a number is cut off or broken."""

import io

import pytest
from rich.cells import cell_len
from rich.console import Console
from tests.fake_desk import ROW

from poise.cli.nodes import nodes_table
from poise.cli.output import show_table
from poise.cli.queue import queue_table, wide_table
from poise.cli.shares import shares_table
from poise.lab.report.page import HtmlTable
from poise.service.wire.views import JobRow, NodeList, Shares

CELLS = ("policy", "load", "average JCT", "÷ fifo", "worst ρ", "finished")
TABLE = HtmlTable(
    CELLS,
    (("max-min+agnostic", "0.5", "16h28m ±6d15h", "≈ 0.35 (0.31–40,690)", "7,388 ±88,813", "40"), ("漢字", *"12345")),
    frozenset({(0, 2)}),
    names=2,
)


def shown(monkeypatch: pytest.MonkeyPatch, table: HtmlTable, width: int, *, terminal: bool = True) -> list[str]:
    stream = io.StringIO()
    screen = Console(file=stream, width=width, force_terminal=terminal, no_color=True, highlight=False, _environ={})
    monkeypatch.setattr("poise.cli.output.console", lambda: screen)
    show_table(table, "title")
    return [line.replace("\x1b[1m", "").replace("\x1b[0m", "").rstrip() for line in stream.getvalue().splitlines()]


@pytest.mark.parametrize("width", [1, 30, 45, 60, 80, 100, 200])
def test_every_cell_is_there_whole_beside_the_names_of_its_row(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(monkeypatch, TABLE, width)
    for row in TABLE.rows:
        mine = [line for line in lines if line.split()[:2] == list(row[:2])]
        assert all(sum(cell in line for line in mine) >= 1 for cell in row)
    assert "…" not in "".join(lines)


@pytest.mark.parametrize("width", [60, 80, 100])
def test_parts_are_no_wider_than_the_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert max(map(len, shown(monkeypatch, TABLE, width))) <= width


def test_a_table_that_fits_is_one_and_so_is_one_that_goes_to_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    for lines in (shown(monkeypatch, TABLE, 120), shown(monkeypatch, TABLE, 50, terminal=False)):
        assert sum("policy" in line for line in lines) == 1


def test_prose_is_broken_into_lines_and_numbers_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    table = HtmlTable(("name", "number", "why"), (("a", "12,345 ±6,789", "one word after another " * 9),))
    lines = shown(monkeypatch, table, 80)
    assert max(map(len, lines)) <= 80
    assert sum("one word" in line or "another" in line for line in lines) > 3
    assert any("12,345 ±6,789" in line for line in lines)


def a_row(**changes: object) -> JobRow:
    return JobRow.model_validate(ROW | changes)


NUMBERED = ("7", "123456", "x")
"""Names that look like numbers are names all the same."""
QUEUED = tuple(a_row(id=name, name=name, tenant=name, app=name) for name in NUMBERED)
NODES = NodeList.model_validate(
    {
        "nodes": [
            {"name": f"n{name}", "gpu_type": "v100", "gpus": 2, "free": 1, "rack": name, "alive": True, "jobs": [name, None]}
            for name in NUMBERED
        ]
    }
)
TENANTS = Shares.model_validate(
    {
        "tenants": [
            dict.fromkeys(("weight", "entitled", "held", "gpus", "running", "waiting", "gpu_seconds", "preemptions"), 0)
            | {"tenant": name}
            for name in NUMBERED
        ]
    }
)
LEFT = {
    "queue": (queue_table(QUEUED), {"ID", "NAME", "TENANT", "TYPE", "STATE", "REASON"}),
    "wide": (
        wide_table(QUEUED),
        {"ID", "NAME", "TENANT", "TYPE", "STATE", "REASON", "APP", "ASKED", "SUBMITTED", "FINISHED", "WHY"},
    ),
    "nodes": (nodes_table(NODES), {"NODE", "TYPE", "RACK", "STATE", "JOBS"}),
    "shares": (shares_table(TENANTS), {"TENANT"}),
    "any": (TABLE, {"policy"}),
    "words": (HtmlTable(("a", "b", "c"), (("1", "2", "3"), ("11", "x", "33"))), {"a", "b"}),
}


@pytest.mark.parametrize("what", LEFT)
def test_words_are_set_to_the_left_and_numbers_to_the_right(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table, left = LEFT[what]
    blank, heading, rule, *rows = shown(monkeypatch, table, 400, terminal=False)
    assert (blank, set(rule.strip())) == ("", {"─"})
    begin = 0
    for column, name in enumerate(table.columns):
        texts = [name, *(row[column] for row in table.rows)]
        width = max(map(cell_len, texts))
        begin += 2 if column == 0 else 3
        for line, text in zip((heading, *rows), texts, strict=False):
            cell = _between(line, begin, begin + width)
            assert cell == (text.ljust if name in left else text.rjust)(width - cell_len(text) + len(text)), name
        begin += width


def _between(line: str, begin: int, end: int) -> str:
    """What stands between two places of a line, of which some letters take two."""
    place, found = 0, ""
    for letter in line.ljust(end):
        if begin <= place < end:
            found += letter
        place += cell_len(letter)
    return found


@pytest.mark.parametrize(
    ("held", "wanted", "said"), [(0, 1, "1"), (1, 1, "1"), (2, 1, "2 (asked 1)"), (1, 4, "1 (asked 4)"), (0, 4000, "4,000")]
)
def test_gpus_are_what_is_asked_for_and_where_another_number_is_held_both(held: int, wanted: int, said: str) -> None:
    table = queue_table((a_row(gpus=held, wanted=wanted),))
    assert table.rows[0][table.columns.index("GPUS")] == said
