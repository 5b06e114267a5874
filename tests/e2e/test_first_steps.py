"""The first steps of a new user, with the commands of the README: start, submit more than fits, watch, finish."""

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.service import EXAMPLES, ROOT, Service, until
from tests.shell import poise

pytestmark = pytest.mark.slow
TRAINING = "examples/live/train_pytorch.py"


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user would be: in its folder, with its environment activated."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


def submitted(*words: object) -> str:
    """The id of a new job."""
    [job] = poise("submit", "--json", *words).json["jobs"]
    assert isinstance(job, str)
    return job


def shown(job: str) -> dict[str, Any]:
    document = poise("show", job, "--json").json
    assert isinstance(document, dict)
    return document


def lines(job: str) -> list[str]:
    """What the job printed, without what Poise says in its log."""
    said = poise("logs", job)
    assert said.code == 0, said
    return [line for line in said.out.splitlines() if not line.startswith(("---", "poise:"))]


def is_over(jobs: list[str]) -> bool:
    """All jobs have ended; until then no GPU is held twice."""
    rows = poise("queue", "--json").json["jobs"]
    assert sum(row["gpus"] for row in rows) <= 2
    return not {row["id"] for row in rows} & set(jobs)


@pytest.mark.frameworks
@pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed (`make frameworks`)")
def test_three_trainings_on_two_gpus_take_turns_and_end_with_the_weights_of_an_uninterrupted_run(
    a_service: Callable[..., Service],
) -> None:
    service = a_service("--cluster", "v100:2", "--round", "3")
    service.up()
    words = ("--steps", 60, "--seconds-per-step", 0.2)
    jobs = [submitted("--", "python", TRAINING, *words, "--seed", seed) for seed in (1, 2, 3)]
    assert jobs == ["1", "2", "3"]
    assert poise("why", "3").code == 0
    until(lambda: is_over(jobs), "they have not ended")
    details = [shown(job) for job in jobs]
    assert [each["job"]["state"] for each in details] == ["SUCCEEDED"] * 3
    # How often depends on how long PyTorch takes to start: nobody is preempted before it has done a step.
    assert sum(each["preemptions"] for each in details) >= 1
    assert sum(run["kept"] is not None and 0 < run["kept"] < 60 for each in details for run in each["runs"]) >= 1
    for job, seed in zip(jobs, (1, 2, 3), strict=True):
        apart = [sys.executable, TRAINING, "--steps", "60", "--seed", str(seed)]
        want = subprocess.run(apart, check=True, capture_output=True, text=True).stdout.split()
        assert [line for line in lines(job) if len(line) == 64] == want
    until(lambda: not service.processes(), "something is left behind")


def test_script_that_knows_nothing_of_poise_is_restarted_or_left_alone_as_its_owner_chose(
    a_service: Callable[..., Service],
) -> None:
    service = a_service("--cluster", "v100:1", "--round", "1")
    service.up()
    unaware = ("python", "examples/live/unaware.py")
    never = submitted("--preemption", "never", "--", *unaware, 8, 0.5)
    again = submitted("--preemption", "restart", "--", *unaware, 4, 0.5)
    other = submitted("--", *service.counting(150, 0.02, "other"))
    until(lambda: is_over([never, again, other]), "they have not ended")
    assert [shown(job)["job"]["state"] for job in (never, again, other)] == ["SUCCEEDED"] * 3
    assert lines(never) == [f"{number} of 8" for number in range(1, 9)]
    assert (shown(never)["preemptions"], len(shown(never)["runs"])) == (0, 1)
    assert shown(again)["preemptions"] > 0
    printed = lines(again)
    assert printed.count("1 of 4") == len(shown(again)["runs"])
    assert printed[-4:] == [f"{number} of 4" for number in range(1, 5)]
    assert (EXAMPLES / "unaware.py").read_text().count("poise.worker") == 0
    assert service.violations == ""
