"""What a terminal is shown of a log: colours, and nothing else that it would obey."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poise.cli.logs import Screen, harmless

SGR = re.compile(r"\x1b\[[0-9;]*m")
pieces = st.sampled_from(
    ["a", "é", "\n", "\r", "\t", " ", "[", "]", "0;", "m", "2J", "\x1b", "\x1b[", "\x1b]0;t", "\x07", "\x1b\\", "\x9b",
     "\x1b[1;31m", "\x1bP", "\u202e", "\x08", "\x1b[?25l", "\x00", "x" * 70]
)  # fmt: skip
logs = st.lists(pieces, max_size=30).map("".join)


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("plain é\tb\r\nc\n", "plain é\tb\r\nc\n"),
        ("\x1b[1;31mred\x1b[0m", "\x1b[1;31mred\x1b[0m"),
        ("a\x1b[2Jb\x1b[10;10Hc\x1b[?1049hd", "abcd"),
        ("a\x1b]0;title\x07b\x1b]52;c;ZXZpbA==\x1b\\c", "abc"),
        ("a\x1bP$q\x1b\\b\x1b[5nc\x1bcd", "abcd"),
        ("a\x1b]0;never closed\nb", "a]0;never closed\nb"),
        ("a\x9b2Jb\x08\x00\x7f\u202ec", "a2Jbc"),
        ("a\x1b[38:2::1:2:3mb", "ab"),
    ],
)
def test_colours_pass_and_no_other_command(said: str, shown: str) -> None:
    assert harmless(said) == shown


@given(logs)
def test_nothing_that_a_terminal_obeys_is_left(log: str) -> None:
    left = SGR.sub("", harmless(log))
    assert all(letter in "\n\r\t" or letter.isprintable() for letter in left)


@given(st.lists(logs, max_size=6))
def test_parts_are_shown_as_the_whole_is_however_it_was_cut(parts: list[str]) -> None:
    """But for sequences longer than are waited for: of those, too, no command is left."""
    screen = Screen()
    shown = "".join(map(screen.filtered, parts)) + harmless(screen._held)
    left = SGR.sub("", shown)
    assert all(letter in "\n\r\t" or letter.isprintable() for letter in left)
    if max(map(len, "".join(parts).split("\x1b")), default=0) < 60:
        assert shown == harmless("".join(parts))
