"""The runner of the documents notices what it is there to notice."""

from pathlib import Path

import pytest
from tests.docs_runner import Block, Fit, Workshop, blocks, matches, play, rewrite, steps, verbs
from tests.e2e.service import Kind, Service, until

pytestmark = pytest.mark.docs


def _page(tmp_path: Path, *lines: str) -> Path:
    page = tmp_path / "page.md"
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return page


@pytest.mark.parametrize(
    ("shown", "got", "want"),
    [
        (["a", "b"], ["a", "b"], True),
        (["a"], ["a", "b"], False),
        (["a", "..."], ["a", "b", "c"], True),
        (["..."], [], True),
        (["...", "c"], ["a", "b", "c"], True),
        (["a", "...", "c"], ["a", "b"], False),
        (["a.c"], ["abc"], False),
        ([], ["a"], False),
        (["a … c"], ["a b c"], True),
        (["a …"], ["a b", "c"], False),
    ],
)
def test_output_matches_line_by_line_and_dots_stand_for_any_lines(shown: list[str], got: list[str], want: bool) -> None:
    assert matches(shown, got) is want


@pytest.mark.parametrize(
    ("shown", "got", "want"),
    [
        ("[2026-01-01 00:00:00Z] [admin] submitted", "[2027-12-31 23:59:59Z] [admin] submitted", True),
        ("  1   RUNNING   0.5s  ", "  1    RUNNING   1m02s", True),
        ("at http://127.0.0.1:8642", "at http://127.0.0.1:35321", True),
        ("  1   RUNNING   0.5s", "  1   PAUSED   0.5s", False),
        ("ran 5s in 2 runs", "ran 5s in 3 runs", False),
    ],
)
def test_where_a_service_runs_only_what_depends_on_time_may_differ(shown: str, got: str, want: bool) -> None:
    assert matches([shown], [got], Fit.TIMELESS) is want


def test_a_command_may_go_on_in_the_next_line() -> None:
    [step] = steps(Block("console", 1, ["$ echo a \\", "    b", "a b", ""]))
    assert (step.command, step.shown) == ("echo a b", ["a b"])


def test_a_comment_before_a_block_says_what_it_is_for() -> None:
    first, second = blocks("<!-- file: a.csv -->\n```csv\nx\n```\n\n```text\ny\n```\n")
    assert (first.file, first.text, second.file) == ("a.csv", "x\n", None)


def test_a_file_may_be_quicker_in_tests_than_in_the_page(tmp_path: Path) -> None:
    page = _page(tmp_path, "<!-- file: a.py (PACE=9 is PACE=1 in tests) -->", "```text", "PACE=9", "```")
    folder = tmp_path / "folder"
    folder.mkdir()
    assert list(play(page, folder)) == []
    assert (folder / "a.py").read_text() == "PACE=1\n"


def test_a_failing_command_is_an_error_unless_its_code_is_shown(tmp_path: Path) -> None:
    workshop = Workshop(tmp_path)
    workshop.run("poise simulate nowhere.csv")
    with pytest.raises(AssertionError, match="exit code 2"):
        workshop.run("poise --version")
    assert workshop.run("echo $?") == ["2"]
    assert workshop.run("poise --version")


def test_a_python_block_that_fails_fails_with_its_place(tmp_path: Path) -> None:
    page = _page(tmp_path, "text", "", "```python", "assert 1 == 2", "```")
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(AssertionError) as caught:
        list(play(page, folder))
    assert caught.traceback[-1].lineno == 3


def test_a_block_that_needs_data_that_is_not_there_is_left_out(tmp_path: Path) -> None:
    page = _page(tmp_path, "<!-- needs: nowhere/none.csv -->", "```console", "$ cat none.csv", "```")
    folder = tmp_path / "folder"
    folder.mkdir()
    assert list(play(page, folder)) == []


def test_verbs_of_make_are_found_in_prose_and_in_blocks() -> None:
    assert verbs("run `make fix`\n```console\n$ make demo\n```\nthey make nothing") == {"fix", "demo"}


def test_a_page_is_rewritten_with_what_is_printed_now_and_keeps_its_dots(tmp_path: Path) -> None:
    page = _page(tmp_path, "```console", "$ printf 'a\\nb\\nc\\n'", "x", "...", "$ echo new", "old", "```")
    assert rewrite(page) == ["$ printf 'a\\nb\\nc\\n'", "$ echo new"]
    assert blocks(page.read_text(encoding="utf-8"))[0].lines == ["$ printf 'a\\nb\\nc\\n'", "a", "...", "$ echo new", "new"]


def test_a_page_has_a_service_of_its_own_that_is_gone_afterwards_with_all_its_jobs(tmp_path: Path) -> None:
    page = _page(
        tmp_path,
        "```console",
        "$ poise serve --cluster gpu:1 &",
        "$ poise submit -n long -- sleep 1000",
        "submitted 1 long: …",
        "...",
        "$ poise queue",
        "1 running",
        "...",
        "$ kill -9 %1",
        "$ poise serve --cluster gpu:1 &",
        "$ poise nodes",
        "1 node, 1 GPU, 0 free",
        "...",
        "```",
    )
    folder = tmp_path / "folder"
    folder.mkdir()
    played = play(page, folder)
    for each in played:
        assert each.fits, each.got
        if each.step.command == "poise nodes":
            break
    (tmp_path / "other").mkdir()
    service = Service(tmp_path / "other")
    service.state = folder / "state"
    assert {each.kind for each in service.processes()} >= {Kind.RUNNER, Kind.REPLICA}
    played.close()
    until(lambda: not service.processes(), "something of the page's service is left")
