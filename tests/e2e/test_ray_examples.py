"""The examples for users of Ray against a real service: what is preempted in them ends as if it had been left alone.

Each starts a Ray of its own, which takes most of the time: some ten seconds if nothing else runs, and a minute if much does.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.e2e.service import ROOT, Service, ended, until

from poise.service.client import Client
from poise.service.wire.views import JobDetail, JobState

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("ray.train", reason="ray[train] is not installed")
pytest.importorskip("ray.tune", reason="ray[tune] is not installed")
pytestmark = [pytest.mark.frameworks, pytest.mark.ray, pytest.mark.slow, pytest.mark.xdist_group("ray")]

EXAMPLES = ROOT / "examples" / "ray"
PATIENCE = 400.0
Started = Callable[..., Service]


@pytest.fixture(autouse=True)
def _ray_of_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in os.environ if each.startswith("RAY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")


def hold_and_release(client: Client, job: str) -> None:
    """Have a job preempted while it trains, and resumed."""
    until(lambda: client.show(job).steps > 0, f"job {job} does not train", PATIENCE)
    client.hold(job)
    until(lambda: client.show(job).runs[-1].ended is not None, f"job {job} does not leave", PATIENCE)
    client.release(job)


def require_resumed(detail: JobDetail) -> None:
    """The job was preempted in the middle, and went on at the same step."""
    first, *_, last = detail.runs
    assert first.how == "yielded", detail
    assert detail.total_steps is not None
    assert first.kept is not None
    assert 0 < first.kept < detail.total_steps
    assert last.begun > 0
    assert not any(run.lost for run in detail.runs)


def digest_in(log: str) -> str:
    """The one digest in what a training has printed."""
    [found] = re.findall(r"^[0-9a-f]{64}$", log, re.MULTILINE)
    assert isinstance(found, str)
    return found


def test_ray_train_that_is_preempted_ends_with_the_weights_of_an_undisturbed_one(a_service: Started) -> None:
    service = a_service("--cluster", "v100:2")
    client = service.up()
    command = (sys.executable, str(EXAMPLES / "train_ray.py"), "--steps", "40")
    job = client.submit(command=(*command, "--seconds-per-step", "0.4"), gpus=2, env={"RAY_USAGE_STATS_ENABLED": "0"}).id
    hold_and_release(client, job)
    alone = subprocess.run([*command, "--workers", "2"], check=True, capture_output=True, text=True, timeout=PATIENCE)
    require_resumed(ended(client, job, PATIENCE))
    assert digest_in(client.logs(job)) == digest_in(alone.stdout)
    until(lambda: not service.processes(), "a Ray is left behind")


def sweep(folder: Path, app: str, pause: float) -> "subprocess.Popen[str]":
    """Start the sweep, as its user does."""
    words = ("--trials", 3, "--steps", 60, "--seconds-per-step", pause, "--app", app)
    command = [sys.executable, str(EXAMPLES / "tune_sweep.py"), *map(str, words)]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def result_of(running: "subprocess.Popen[str]") -> str:
    """What a sweep has found, once it has ended; Tune prints before that what it was asked."""
    said, problems = running.communicate(timeout=PATIENCE)
    assert running.returncode == 0, problems
    assert "Trials did not complete" not in problems, problems
    return said.splitlines()[-1]


def trials(client: Client, app: str) -> dict[str, str]:
    """The jobs of a sweep, by name."""
    rows = client.queue(app=app, states=[*JobState]).jobs
    return {row.name: row.id for row in rows if row.name is not None}


def test_tune_sweep_with_a_preempted_trial_finds_what_an_undisturbed_one_finds(a_service: Started, tmp_path: Path) -> None:
    service = a_service("--cluster", "v100:3")
    client = service.up()
    disturbed = sweep(tmp_path, "disturbed", 0.25)
    until(lambda: len(trials(client, "disturbed")) == 3 or disturbed.poll() is not None, "no trials", PATIENCE)
    jobs = trials(client, "disturbed")
    hold_and_release(client, jobs["rate-0.1"])
    found = result_of(disturbed)
    require_resumed(ended(client, jobs["rate-0.1"]))

    assert result_of(sweep(tmp_path, "undisturbed", 0.0)) == found
    others = trials(client, "undisturbed")
    assert others.keys() == jobs.keys()
    for name, job in jobs.items():
        assert digest_in(client.logs(job)) == digest_in(client.logs(others[name]))
