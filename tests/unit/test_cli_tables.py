"""Tables on terminals of any width: nothing that names a row or holds a number is cut off or broken."""

import io

import pytest
from rich.console import Console

from poise.cli.tables import show_table
from poise.report.page import Table

CELLS = ("policy", "load", "average JCT", "÷ fifo", "worst ρ", "finished")
TABLE = Table(
    CELLS,
    (("max-min+agnostic", "0.5", "16h28m ±6d15h", "≈ 0.35 (0.31–40,690)", "7,388 ±88,813", "40"), ("漢字", *"12345")),
    frozenset({(0, 2)}),
    names=2,
)


def shown(monkeypatch: pytest.MonkeyPatch, table: Table, width: int, *, terminal: bool = True) -> list[str]:
    stream = io.StringIO()
    screen = Console(file=stream, width=width, force_terminal=terminal, no_color=True, highlight=False, _environ={})
    monkeypatch.setattr("poise.cli.tables.console", lambda: screen)
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
    table = Table(("name", "number", "why"), (("a", "12,345 ±6,789", "one word after another " * 9),))
    lines = shown(monkeypatch, table, 80)
    assert max(map(len, lines)) <= 80
    assert sum("one word" in line or "another" in line for line in lines) > 3
    assert any("12,345 ±6,789" in line for line in lines)
