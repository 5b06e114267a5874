"""Requests are checked at submission, so that no job waits for hours only to fail."""

from pathlib import Path
from typing import Any

import pytest
from tests.backends import a_request

from poise.scheduler.model.errors import RequestError
from poise.service.backends.local.orders import check_request

PATH = {"PATH": "/usr/bin:/bin"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.sh").write_text("#!/bin/sh\n")
    (tmp_path / "train.sh").chmod(0o755)
    (tmp_path / "data").write_text("1")
    return tmp_path


@pytest.mark.parametrize("command", [("sh",), ("/bin/sh", "-c", "true"), ("./train.sh",), ("{}/train.sh",)])
def test_program_that_is_there_is_taken(folder: Path, command: tuple[str, ...]) -> None:
    check_request(a_request(tuple(word.format(folder) for word in command), cwd=str(folder)), PATH)


def test_program_is_looked_for_in_the_path_of_the_job(folder: Path) -> None:
    check_request(a_request(("train.sh",), env={"PATH": str(folder)}), PATH)
    with pytest.raises(RequestError, match=r"no program 'train\.sh' in the PATH"):
        check_request(a_request(("train.sh",)), PATH)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a name that is nowhere": ({"command": ("no-such-program",)}, "command: no program 'no-such-program' in the PATH"),
    "a path to nothing": ({"command": ("/no/such",)}, "command: no program at '/no/such'"),
    "a file that is no program": ({"command": ("{}/data",)}, "data' is not executable; run chmod"),
    "a directory": ({"command": ("{}",)}, "command: no program at"),
    "a relative path to nothing": ({"command": ("./nothing",), "cwd": "{}"}, "nothing'"),
    "a relative path without a directory": ({"command": ("./train.sh",)}, "relative path; give an absolute one, or a cwd"),
    "a directory that is not there": ({"command": ("sh",), "cwd": "/no/such"}, "cwd: '/no/such' does not exist"),
    "a directory that is a file": ({"command": ("sh",), "cwd": "{}/data"}, "data' is not a directory"),
    "a variable that is too long": (
        {"command": ("sh",), "env": {"A": "€" * 43_690}},
        "env: A has 131,072 bytes as UTF-8; at most 131,071 can be handed over: put it into a file",
    ),
    "an argument that is too long": (
        {"command": ("sh", "-c", "true", "😀" * 32_768)},
        "command: argument 3 has 131,072 bytes as UTF-8; at most 131,071",
    ),
    "a setup that is too long": (
        {"command": ("sh",), "setup": ("sh", "😀" * 32_768)},
        "setup: argument 1 has 131,072 bytes as UTF-8",
    ),
    "a setup that is nowhere": ({"command": ("sh",), "setup": ("nope",)}, "setup: no program 'nope'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_on_this_machine_is_refused_in_one_line(folder: Path, name: str) -> None:
    fields, want = WRONG[name]

    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            return value
        return value.format(folder) if isinstance(value, str) else tuple(word.format(folder) for word in value)

    with pytest.raises(RequestError) as refused:
        check_request(a_request(**{key: filled(value) for key, value in fields.items()}), PATH)
    assert want in str(refused.value)
    assert "\n" not in str(refused.value)
