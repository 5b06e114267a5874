"""Files of variables: what a line may be, and what is said of one that is wrong."""

import string
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poise.cli.submit import read_env_file
from poise.scheduler.model.errors import RequestError


def read(folder: Path, text: str) -> dict[str, str]:
    file = folder / "job.env"
    file.write_text(text, encoding="utf-8")
    return read_env_file(file)


def test_a_line_is_a_variable_and_comments_are_none(tmp_path: Path) -> None:
    text = """
# what the job needs
export DATA=/data/a b
LR=0.1   # the usual
URL=http://x/#part
NOTE="two words\\t\\"quoted\\" \\\\ \\$HOME"  # said
RAW='$HOME \\t # here'
EMPTY=
SPACED = yes
LR=0.2
"""
    assert read(tmp_path, text) == {
        "DATA": "/data/a b", "LR": "0.2", "URL": "http://x/#part", "NOTE": 'two words\t"quoted" \\ $HOME',
        "RAW": "$HOME \\t # here", "EMPTY": "", "SPACED": "yes",
    }  # fmt: skip
    assert read(tmp_path, "A=1\r\nB=2\r\n") == {"A": "1", "B": "2"}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("LR", "job.env:2: expected NAME=VALUE, got 'LR'"),
        ("1A=2", "job.env:2: expected a name of letters, digits and `_` before =, got '1A'"),
        ("=2", "job.env:2: expected a name of letters, digits and `_` before =, got ''"),
        ("POISE_JOB=2", "job.env:2: POISE_JOB: names that begin with POISE_ are Poise's own"),
        ('A="open', "job.env:2: A: the quote is not closed in this line; "),
        ("A='x' y", "job.env:2: A: something follows the quoted value; "),
        ("A=\x00", "job.env:2: A: a character in it cannot be passed on"),
    ],
)
def test_a_line_that_is_wrong_is_named(line: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError) as caught:
        read(tmp_path, f"GOOD=1\n{line}\n")
    assert str(caught.value).startswith(f"{tmp_path}/{said}")
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"none\.env: No such file"):
        read_env_file(tmp_path / "none.env")


names = st.text(string.ascii_letters + "_", min_size=1, max_size=8).filter(lambda name: not name.startswith("POISE_"))
values = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=40)


@given(st.dictionaries(names, values, max_size=5))
def test_whatever_is_written_in_double_quotes_comes_back(variables: dict[str, str]) -> None:
    table = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t"})
    with TemporaryDirectory() as folder:
        text = "".join(f'{name}="{value.translate(table)}"\n' for name, value in variables.items())
        (Path(folder) / "job.env").write_bytes(text.encode())
        assert read_env_file(Path(folder) / "job.env") == variables


def test_what_is_too_large_is_not_called_a_job_file(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="larger than 256 KiB; that is no file of variables") as refused:
        read(tmp_path, "A=" + "x" * (256 << 10))
    assert "job file" not in str(refused.value)
