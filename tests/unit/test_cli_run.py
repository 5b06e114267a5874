"""`poise run` without a service: what is output of the job and what a heading, exit codes, options that make no sense."""

import signal
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fake_desk import DETAIL, ROW
from tests.shell import poise

from poise.cli.run import Headings, exit_code
from poise.service.wire.views import JobDetail, JobState

PIECES = ["--- run 1 on gpu-0 [0] ---\n", "--- ru", "--- run 2 on", "x\n", "\n", "\r50%", "--- run of luck\n"]
LINES = st.lists(st.sampled_from(PIECES))


def told_apart(parts: list[str]) -> tuple[str, list[str]]:
    found = Headings()
    printed, headings = "", list[str]()
    for part in parts:
        more, new = found.told_apart(part)
        printed, headings = printed + more, headings + new
    return printed + found.rest(), headings


@given(lines=LINES, cuts=st.lists(st.integers(0, 200)))
def test_headings_are_told_from_output_wherever_a_log_is_cut_into_parts(lines: list[str], cuts: list[int]) -> None:
    text = "".join(lines)
    at = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    parts = [text[first:last] for first, last in pairwise(at)]
    printed, headings = told_apart(parts)
    assert (printed, headings) == told_apart([text])
    assert printed.count("\n") + len(headings) == text.count("\n")
    assert len(printed) + sum(len(each) + 1 for each in headings) == len(text)


def test_headings_are_lines_of_their_own() -> None:
    heading = "--- run 1 on gpu-0 [0] ---\n"
    assert told_apart([heading + "a" + heading + heading]) == ("a" + heading, [heading[:-1]] * 2)
    assert told_apart(["--- run"]) == ("--- run", [])


def ended_as(state: JobState, *codes: int | None) -> JobDetail:
    run = {"epoch": 1, "started": 0.0, "ended": 1.0, "gpus": {}, "how": "failed", "cause": None, "codes": codes}
    return JobDetail.model_validate({**DETAIL, "job": {**ROW, "state": state}, "runs": [run]}, strict=False)


@pytest.mark.parametrize(
    ("state", "codes", "code"),
    [
        (JobState.SUCCEEDED, (0,), 0),
        (JobState.SUCCEEDED, (0, 7), 0),
        (JobState.FAILED, (3, 0), 3),
        (JobState.FAILED, (-9,), 128 + signal.SIGKILL),
        (JobState.FAILED, (0, 7), 1),
        (JobState.FAILED, (None,), 1),
        (JobState.FAILED, (), 1),
        (JobState.CANCELLED, (-15,), 1),
    ],
)
def test_the_exit_code_is_that_of_rank_0_of_a_job_that_failed(state: JobState, codes: tuple[int, ...], code: int) -> None:
    assert exit_code(ended_as(state, *codes)) == code


def test_the_exit_code_of_a_job_that_never_ran_is_1() -> None:
    never = JobDetail.model_validate({**DETAIL, "job": {**ROW, "state": "FAILED"}})
    assert exit_code(never) == 1


WRONG = {
    "": "the command goes after --: poise run -- python train.py",
    "python x.py": "the command goes after --: poise run -- python x.py",
    "python x.py -- more": "the command goes after --: poise run -- python x.py",
    "--lr 3": "No such option '--lr'.",
    "x.py --lr 3": "A command goes after --: poise run -- python train.py",
    "--array 3 -- x": "No such option '--array'.",
    "--sweep A=1 -- x": "No such option '--sweep'.",
    "--hold -- x": "No such option '--hold'.",
    "--dry-run -- x": "No such option '--dry-run'.",
    "--wait -- x": "No such option '--wait'.",
    "--follow -- x": "No such option '--follow'.",
    "--gpus 0 -- x": "gpus: ",
    "--gpus many -- x": "--gpus: ",
    "--retries -1 -- x": "retry.on_errors: ",
    "--deadline soon -- x": "--deadline: ",
    "--env 1=2 -- x": "--env: expected NAME=VALUE",
    "--env-file absent -- x": "absent: ",
    "--venv /v --no-venv -- x": "--venv and --no-venv do not go together",
    "--ship=/nonexistent -- x": "/nonexistent",
    "--": "the command goes after --: poise run -- python train.py",
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_calls_get_one_line_and_no_server_is_asked(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert WRONG[words] in poise("run", *words.split()).refusal
