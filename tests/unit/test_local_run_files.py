"""Files that a job writes: nothing in them reaches the service unless it makes sense."""

import json
import os
from math import inf, isfinite, nan
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.machine import Service, a_request

from poise.service.backends.api import RunEnding
from poise.service.backends.local.event_loop import EventLoop
from poise.service.backends.local.lease_files import LONGEST_CAUSE, PROGRESS, get
from poise.service.backends.local.run_files import cause_line, read_progress
from poise.service.server.records import JobRecord
from poise.service.wire.request import MOST_STEPS

anything = st.none() | st.booleans() | st.text(max_size=3) | st.integers(-(10**400), 10**400) | st.floats()
reports = st.fixed_dictionaries(dict.fromkeys(("steps", "total", "checkpoint", "throughput", "loss", "at"), anything))


@given(reports)
def test_report_is_taken_only_with_numbers_that_make_sense(fields: dict[str, object]) -> None:
    report = read_progress("1", 1, fields)
    if report is None:
        return
    assert isfinite(report.at)
    assert report.loss is None or isfinite(report.loss)
    assert report.total is None or 0 < report.total <= MOST_STEPS
    assert all(each is None or 0 <= each <= MOST_STEPS for each in (report.steps, report.checkpoint, report.throughput))


@given(st.text(st.characters(categories=["L", "N", "Z", "C"])))
def test_cause_is_one_line_that_can_be_written_and_printed(text: str) -> None:
    told = cause_line(text)
    assert told is not None
    assert told.isprintable()
    assert len(told.encode()) <= 4 * LONGEST_CAUSE


@pytest.mark.parametrize("number", [MOST_STEPS, 1e308, inf, nan, -1.0, 5e-324])
@pytest.mark.parametrize("field", ["steps", "total", "checkpoint", "throughput", "loss"])
def test_no_report_stops_the_service_or_what_it_keeps(tmp_path: Path, field: str, number: float) -> None:
    service = Service(tmp_path)
    [job] = service.submit(a_request(gpus=2, duration=100, retry={"on_errors": 0}))
    fields = {"steps": 1e15, "total": 1e-300, "checkpoint": 1.0, "throughput": 1.0, "loss": 1.0, "at": service.machine.wall}
    report = read_progress(job, 1, fields | {field: number})
    if report is not None:
        service.machine.tell(report)
    service.pass_time(5)
    service.machine.end(job, RunEnding.FAILED, cause="import-error", code=1)
    service.settle()
    service.restart()
    assert service.engine.show(job).job.state == "FAILED"
    row = service.loop.store.reader().job(job)
    assert row is not None
    json.loads(row.record, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert isfinite(JobRecord.read(service.engine._record(job)[0].job, row.record).lost or 0.0)


def test_what_is_no_regular_file_says_nothing(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    path = tmp_path / PROGRESS
    path.mkdir()
    assert get(folder, PROGRESS) is None
    path.rmdir()
    os.mkfifo(path)
    assert get(folder, PROGRESS) is None
    writer = os.open(path, os.O_RDWR)
    assert get(folder, PROGRESS) is None
    os.write(writer, b'{"version": 1}')
    assert get(folder, PROGRESS) is None
    os.close(writer)
    path.unlink()
    path.symlink_to("/dev/zero")
    assert get(folder, PROGRESS) is None
    path.unlink()
    path.write_text('{"version": 1, "steps": 3}')
    assert get(folder, PROGRESS) == {"version": 1, "steps": 3}
    os.close(folder)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_event_loop_says_what_it_dies_of() -> None:
    words: list[BaseException] = []
    loop = EventLoop("test", words.append)

    def fail() -> None:
        raise ValueError("odd")

    loop.post(fail)
    loop.close()
    assert [repr(each) for each in words] == ["ValueError('odd')"]
