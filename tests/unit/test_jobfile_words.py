"""Commands in one line: split as a shell would, and whatever only a shell understands is refused."""

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poise.service.wire.draft import fill, literal_words, parse_words


def words(text: str, **env: str) -> tuple[str, ...]:
    return fill(parse_words(text), env)


def refusal(text: str, **env: str) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        words(text, **env)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("python  train.py\t-x", ("python", "train.py", "-x")),
        ("a 'b c' \"d 'e'\" f\\ g", ("a", "b c", "d 'e'", "f g")),
        ("a '' \"\"", ("a", "", "")),
        ("a 'x'\"y\"z", ("a", "xyz")),
        ("a \\\n  b", ("a", "b")),
        ('a "\\$x \\\\ \\n"', ("a", "$x \\ \\n")),
        ("a '|' '*' \"&& > <\" \\;", ("a", "|", "*", "&& > <", ";")),
        ("a '${LR}' \\${LR}", ("a", "${LR}", "${LR}")),
        ("a ${LR} --lr=${LR}x \"${LR} ${LR}\"", ("a", "0 1", "--lr=0 1x", "0 1 0 1")),
        ("a layers=[1,2] x={a:1} k=v b#c ~d".replace(" ~d", " d~"), ("a", "layers=[1,2]", "x={a:1}", "k=v", "b#c", "d~")),
    ],
)  # fmt: skip
def test_words_are_split_and_quoted_as_in_a_shell(text: str, want: tuple[str, ...]) -> None:
    assert words(text, LR="0 1") == want


@pytest.mark.parametrize("syntax", ["|", "&&", "||", ">", ">>", "<", ";", "&", "$(", "`", "*", "?", "(", ")"])
def test_what_only_a_shell_understands_is_refused_unless_it_is_quoted(syntax: str) -> None:
    assert refusal(f"a {syntax} b").startswith(
        f"{syntax!r} is for a shell, and no shell sees a command; put it into a script"
    )
    assert words(f"a '{syntax}' b") == ("a", syntax, "b")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a\nb", "it has several lines"),
        ("A=1 python x", "`A=` before the program is for a shell; put A into `env`"),
        ("a ~/data", "'~' is for a shell"),
        ("a #b", "'#' is for a shell"),
        ("a $HOME", "only ${NAME} is understood"),
        ("a ${HOME:-x}", "only ${NAME} is understood"),
        ('a "$(b)"', "'$(' is for a shell"),
        ('a "`b`"', "'`' is for a shell"),
        ("a 'b", "a single quote is not closed"),
        ('a "b', "a double quote is not closed"),
        ("a \\", "it ends with a backslash"),
        ("a ${LR}", "${LR} is not set; give it in `env`"),
        ("a ${RANK}", "${RANK} is set where the job runs"),
        ("a ${POISE_CHECKPOINT_DIR}", "is set where the job runs"),
    ],
)
def test_a_line_that_cannot_be_run_says_what_to_do(text: str, said: str) -> None:
    assert said in refusal(text)


def test_a_value_is_neither_split_nor_looked_at_again() -> None:
    assert words("a ${X} ${Y}", X="1 | ${Y}", Y="2") == ("a", "1 | ${Y}", "2")


def test_in_a_list_only_variables_that_are_set_are_replaced() -> None:
    found = literal_words(["bash", "-c", "echo ${LR} ${RANK} $LR | tee *"])
    assert fill(found, {"LR": "0.1"}) == ("bash", "-c", "echo 0.1 ${RANK} $LR | tee *")


@given(
    st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8), min_size=1, max_size=5)
)
def test_what_is_quoted_comes_out_as_it_was(arguments: list[str]) -> None:
    line = shlex.join(["program", *arguments])
    assert words(line) == ("program", *arguments)
