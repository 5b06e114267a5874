"""A damaged journal under real jobs: the service goes on without what cannot be read, or says what to do."""

import os
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.backends import PATIENCE, until
from tests.integration.test_live_state import ANN, Served
from tests.shell import COMMAND, poise

from poise.scheduler.model.errors import JournalError
from poise.service.server.service_api import JobFilter, Verb
from poise.service.server.storage.schema import FILE
from poise.service.server.storage.sidecar import MARK, JournalEnd, JournalMark
from poise.service.wire.views import JobState


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path / "state")
    yield made
    for job in list(made.engine._engine.state.records):
        made.engine.change(ANN, job, Verb.CANCEL).result(PATIENCE)
    until(lambda: not made.engine._engine.state.records)
    made.engine.close()


def changed(served: Served, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(served.state / FILE, isolation_level=None)) as db:
        assert db.execute(statement, values).rowcount == 1


def processes(served: Served, job: str) -> list[int]:
    """Everything alive that carries the mark of a job."""
    mark, found = b"POISE_RUN_DIR=" + os.fsencode(served.state / "jobs" / job) + b"/", []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            environment, stat = Path(f"/proc/{pid}/environ").read_bytes(), Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            continue
        if mark in environment and stat.rpartition(")")[2].split()[0] not in "ZX":
            found.append(int(pid))
    return found


def put_back(served: Served, before: Path) -> None:
    """The journal as it was, and the mark as it is: what came between is lost."""
    for name in (FILE, f"{FILE}-wal", f"{FILE}-shm"):
        (served.state / name).unlink(missing_ok=True)
    shutil.copy2(before / FILE, served.state)
    if (before / f"{FILE}-wal").exists():
        shutil.copy2(before / f"{FILE}-wal", served.state)


@pytest.mark.parametrize("column", ["record", "job", "request"])
def test_a_damaged_job_is_set_aside_and_what_it_ran_is_ended_before_others_get_its_gpus(served: Served, column: str) -> None:
    alone = served.submit(command=("sleep", "1000"), gpus=2, name="alone")
    others = served.submit(command=("sleep", "1000"), gpus=2, name="others")
    until(lambda: served.engine.show(alone).job.state is JobState.RUNNING)
    assert processes(served, alone)
    served.engine.close()
    changed(served, f"UPDATE jobs SET {column} = substr({column}, 1, length({column}) - 3) || 'x}}' WHERE id = ?", alone)
    served.start()
    assert f"job-damaged job={alone} tenant=ann" in served.log.getvalue()
    shown = served.engine.show(alone)
    assert shown.job.state is JobState.FAILED
    assert shown.cause == f"set aside: its {column} in the journal is damaged"
    told = served.engine.events(after=0, job=alone, tenant=None, limit=100).events[-1]
    assert (told.kind, told.text) == ("set-aside", shown.cause)
    until(lambda: served.engine.show(others).job.state is JobState.RUNNING)
    assert not processes(served, alone)
    assert processes(served, others)
    rows = served.engine.queue(JobFilter(frozenset(JobState)), limit=10, offset=0).jobs
    assert {row.id: row.state for row in rows} == {others: JobState.RUNNING, alone: JobState.FAILED}
    served.restart()
    assert served.log.getvalue().count("job-damaged") == 1
    assert served.engine.show(alone) == shown
    assert served.submit(command=("true",)) == "3"


def test_a_journal_that_lost_its_end_is_refused_until_it_is_repaired_and_no_number_is_given_again(
    served: Served, tmp_path: Path
) -> None:
    first = served.submit(command=("sleep", "1000"), gpus=2)
    until(lambda: served.engine.show(first).job.state is JobState.RUNNING)
    shutil.copytree(served.state, tmp_path / "before", ignore=shutil.ignore_patterns("jobs", MARK))
    assert [served.submit(command=("true",)) for _ in range(3)] == ["2", "3", "4"]
    last = served.engine._engine.store.last
    served.engine.close()
    with closing(sqlite3.connect(tmp_path / "before" / FILE)) as db:
        had = db.execute("SELECT max(number) FROM entries").fetchone()[0]
    put_back(served, tmp_path / "before")
    missing = f"it has lost its end: entries {had + 1}–{last} and jobs 2–4 were answered and are missing"
    for _ in range(2):
        with pytest.raises(JournalError, match=f"journal.db: {missing}; run poise repair {served.state}"):
            served.start()
    assert missing in poise("replay", served.state).failure
    said = poise("repair", "-y", served.state)
    assert missing in said.out
    assert "repaired: the next job is number 5" in said.out
    [kept] = (served.state / "backups").iterdir()
    assert {FILE, MARK} <= {each.name for each in kept.iterdir()}
    served.start()
    assert served.engine.show(first).job.state is JobState.RUNNING  # the same processes go on
    assert len(served.engine.show(first).runs) == 1
    assert served.submit(command=("true",)) == "5"
    assert served.engine._engine.store.last > last
    assert poise("replay", "--json", served.state).json["missing"] == []


def test_a_run_that_the_journal_has_lost_is_ended_and_its_number_not_used_again(served: Served, tmp_path: Path) -> None:
    job = served.submit(command=("sleep", "1000"), gpus=2, hold=True)
    shutil.copytree(served.state, tmp_path / "before", ignore=shutil.ignore_patterns("jobs", MARK))
    served.engine.change(ANN, job, Verb.RELEASE).result(PATIENCE)
    until(lambda: served.engine.show(job).job.state is JobState.RUNNING)
    assert processes(served, job)
    served.engine.close()
    put_back(served, tmp_path / "before")
    assert poise("repair", "-y", served.state).code == 0
    served.start()
    until(lambda: not processes(served, job))
    served.engine.change(ANN, job, Verb.RELEASE).result(PATIENCE)
    until(lambda: served.engine.show(job).job.state is JobState.RUNNING)
    assert [run.epoch for run in served.engine.show(job).runs] == [2]


def test_a_service_that_runs_is_not_repaired(tmp_path: Path) -> None:
    state = tmp_path / "state"
    words = [COMMAND, "serve", "--state", str(state), "--listen", "127.0.0.1:0", "--cluster", "v100:1", "--json", "--quiet"]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        server.stdout.readline()
        assert "another server holds it" in poise("repair", "-y", state).refusal
        server.terminate()
    assert poise("repair", state).out.startswith("nothing to repair: 1 instant of the journal, 0 jobs")


def test_what_is_no_state_directory_is_refused_in_one_line(tmp_path: Path) -> None:
    assert "there is no such directory" in poise("repair", tmp_path / "none").refusal
    tmp_path.chmod(0o700)
    assert "there is no journal of a service here" in poise("repair", tmp_path).refusal


def test_a_mark_says_how_far_the_journal_has_come(tmp_path: Path) -> None:
    mark = JournalMark(tmp_path)
    assert mark.read() is None
    mark.write(JournalEnd(1_000_000, 99))
    mark.write(JournalEnd(1_000_001, 99))
    assert mark.read() == JournalEnd(1_000_001, 99)
    mark.close()
    text = (tmp_path / MARK).read_bytes()
    (tmp_path / MARK).write_bytes(text.replace(b"99", b"98"))
    mark = JournalMark(tmp_path)
    assert mark.read() is None
    mark.close()
    assert JournalEnd(8, 3).missing(JournalEnd(7, 3)) == "it has lost its end: entry 8 was answered and is missing"
