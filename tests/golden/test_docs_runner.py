"""The runner of the documents notices what it is there to notice."""

from pathlib import Path

import pytest
from tests.docs_runner import Block, Workshop, blocks, matches, play, rewrite, steps, verbs


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
    ],
)
def test_output_matches_line_by_line_and_dots_stand_for_any_lines(shown: list[str], got: list[str], want: bool) -> None:
    assert matches(shown, got) is want


def test_a_command_may_go_on_in_the_next_line() -> None:
    [step] = steps(Block("console", 1, ["$ echo a \\", "    b", "a b", ""]))
    assert (step.command, step.shown) == ("echo a b", ["a b"])


def test_a_comment_before_a_block_says_what_it_is_for() -> None:
    first, second = blocks("<!-- file: a.csv -->\n```csv\nx\n```\n\n```text\ny\n```\n")
    assert (first.file, first.text, second.file) == ("a.csv", "x\n", None)


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
