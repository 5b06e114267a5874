"""What is done by hand to the state directory of a live service on this machine: a journal restored, directories deleted."""

import shutil
import sqlite3
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest
from tests.backends import PATIENCE, until

from poise.scheduler.core.settings import Settings
from poise.scheduler.model.cluster import parse_cluster
from poise.scheduler.model.errors import JournalError
from poise.service.server.logs import Logbook
from poise.service.server.service import LiveService
from poise.service.server.service_api import JobFilter, Verb
from poise.service.server.startup import BackendKind, Setup, open_service
from poise.service.server.storage.schema import FILE
from poise.service.wire.request import JobRequest, Submission
from poise.service.wire.views import Account, JobState, Role

ANN = Account(name="ann", tenant="ann", role=Role.USER)
SAVES = """
import os
folder = os.environ["POISE_CHECKPOINT_DIR"]
print(sorted(os.listdir(folder)))
open(os.path.join(folder, "step-7"), "w").close()
"""


class Served:
    """A service without its door, with real processes; `engine` is another one after each start."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.log = StringIO()
        state.mkdir(0o700)
        self.start()

    def start(self) -> None:
        cluster, log = parse_cluster("v100:2"), Logbook(self.log)
        setup = Setup(self.state, cluster, "fifo", "consolidate", Settings(round=1.0), BackendKind.LOCAL, log)
        self.engine: LiveService = open_service(setup)
        self.engine.start()

    def restart(self) -> None:
        self.engine.close()
        self.start()

    def submit(self, **given: object) -> str:
        request = JobRequest.model_validate({"command": (sys.executable, "-c", SAVES), "cwd": "/"} | given)
        return self.engine.submit(ANN, Submission(jobs=(request,))).result(PATIENCE).jobs[0]

    def run(self) -> str:
        """A job that has come to its end."""
        job = self.submit()
        until(lambda: not self.is_listed(job))
        assert self.engine.show(job).job.state is JobState.SUCCEEDED
        return job

    def is_listed(self, job: str) -> bool:
        """It is in the queue: it has not ended, or processes of it are still there."""
        rows = self.engine.queue(JobFilter(), limit=100, offset=0).jobs
        return job in {row.id for row in rows}

    def said(self, job: str) -> str:
        return self.engine.log(job, replica=0, offset=0, limit=1000).text


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path / "state")
    yield made
    made.engine.close()


def test_a_journal_that_is_restored_beside_newer_directories_gives_none_of_their_ids_out_again(
    served: Served, tmp_path: Path
) -> None:
    """A job with such an id would go on from the checkpoint of somebody else."""
    assert served.run() == "1"
    with sqlite3.connect(served.state / FILE) as journal:
        journal.execute("VACUUM INTO ?", (str(tmp_path / FILE),))
    journal.close()
    assert [served.run(), served.run()] == ["2", "3"]
    served.engine.close()
    for left in served.state.glob(f"{FILE}*"):
        left.unlink()
    shutil.copy(tmp_path / FILE, served.state / FILE)
    (served.state / FILE).chmod(0o600)  # otherwise it would be refused
    (served.state / "jobs" / "notes-99").mkdir()
    assert "jobs-not-in-journal" not in served.log.getvalue()
    served.start()
    assert "jobs-not-in-journal last=1 highest=3 next=4" in served.log.getvalue()
    assert [served.run(), served.run()] == ["4", "5"]
    assert served.said("4").endswith("---\n[]\n")
    served.restart()
    assert served.run() == "6"


def test_an_empty_journal_beside_jobs_is_refused_and_no_process_is_touched(served: Served) -> None:
    assert served.run() == "1"
    served.engine.close()
    for left in served.state.glob(f"{FILE}*"):
        left.unlink()
    with pytest.raises(JournalError, match=r"empty, but .* has jobs up to number 1, which may run; put the journal back"):
        served.start()
    (served.state / "jobs").rename(served.state / "jobs-before")
    served.start()
    assert served.run() == "1"


def test_the_directory_of_a_job_that_has_ended_may_be_deleted_at_any_time(served: Served) -> None:
    """It has ended once the queue does not list it any more. All but its log stays known, and nobody gets its id."""
    gone, cancelled = served.run(), served.submit(command=("sleep", "1000"))
    until(lambda: served.engine.show(cancelled).job.state is JobState.RUNNING)
    served.engine.change(ANN, cancelled, Verb.CANCEL).result(PATIENCE)
    until(lambda: not served.is_listed(cancelled))
    before = [served.engine.show(job) for job in (gone, cancelled)]
    for job in (gone, cancelled):
        shutil.rmtree(served.state / "jobs" / job)
    for _ in range(2):
        assert [served.engine.show(job) for job in (gone, cancelled)] == before
        assert served.said(gone) == ""
        assert served.engine.why(gone).state is JobState.SUCCEEDED
        assert served.engine.change(ANN, cancelled, Verb.CANCEL).result(PATIENCE).state is JobState.CANCELLED
        served.restart()
    assert served.run() == "3"
    assert served.said("3").endswith("---\n[]\n")
