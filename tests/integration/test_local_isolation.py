"""Sandboxes of runs by themselves; those of a whole service are in tests/e2e/test_isolation.py."""

from pathlib import Path

import pytest
from tests.backends import LocalStage, python, require

from poise.scheduler.model.failures import Verdict, verdict
from poise.service.backends.api import RunEnded, RunEnding
from poise.service.backends.local import orders
from poise.service.backends.local.orders import Isolation

SHOWS = """
import os, sys
state = os.environ["POISE_RUN_DIR"].rpartition("/jobs/")[0]
print("sees", os.listdir(state), os.listdir(state + "/jobs"), "parent", os.getppid(),
      "others", sorted(int(each) for each in os.listdir("/proc") if each.isdigit()) != [1, os.getpid()])
"""


@pytest.fixture
def trial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trial")


def test_where_only_files_can_be_hidden_processes_are_as_ever(tmp_path: Path, trial: Path) -> None:
    require(Isolation.FILES, trial)
    stage = LocalStage(tmp_path, isolation=Isolation.FILES)
    (stage.folder / "journal.db").touch()
    stage.run("1", python(SHOWS))
    assert stage.wait(RunEnded, "1").how is RunEnding.FINISHED
    runner = stage.said("1", "runner.json")["pid"]
    assert f"sees ['jobs'] ['1'] parent {runner} others True" in stage.text("1")
    stage.close()


def test_what_setup_leaves_behind_is_gone_before_the_replicas_begin(tmp_path: Path, trial: Path) -> None:
    require(Isolation.FULL, trial)
    stage = LocalStage(tmp_path, isolation=Isolation.FULL)
    escapes = "import subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True, env={})"
    stage.run("1", python(SHOWS), setup=python(escapes))
    assert stage.wait(RunEnded, "1").how is RunEnding.FINISHED
    assert "sees ['jobs'] ['1'] parent 0 others False" in stage.text("1")
    stage.close()


def test_run_that_cannot_be_enclosed_does_not_begin_and_that_is_no_fault_of_its_job(
    tmp_path: Path, trial: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require(Isolation.FULL, trial)
    stage = LocalStage(tmp_path, isolation=Isolation.FULL)
    elsewhere = {"state": str(trial / "nowhere"), "job": str(trial / "nowhere" / "1"), "processes": True}
    original = orders.order_fields
    monkeypatch.setattr(orders, "order_fields", lambda *args, **more: {**original(*args, **more), "isolation": elsewhere})
    stage.run("1", "print('begun')")
    ended = stage.wait(RunEnded, "1")
    assert (ended.how, ended.codes) == (RunEnding.FAILED, (None,))
    assert ended.cause is not None
    assert verdict(ended.cause) is Verdict.TRANSIENT
    assert "cannot start: isolation (" in stage.text("1")
    assert "begun" not in stage.text("1").splitlines()
    stage.close()
