"""The study on jobs whose figures are worked out by hand: logs, stated failures, delays, causes, starts out of order."""

from collections.abc import Sequence

import numpy as np
import pytest
from tests.builders import Story, a_job, nodes, simulate

from poise.lab.analysis.overtaking import out_of_order
from poise.lab.analysis.records import Covers, Records
from poise.lab.analysis.sources import RecordReader, trace_subject
from poise.lab.analysis.study import KEYS, inferred, study
from poise.lab.analysis.tables import StudyPart, Value, by_size, lower, nearest
from poise.lab.traces.schema import FailedAttempt, JobOutcome, RunAttempt, Trace, TraceJob
from poise.scheduler.core.settings import Cadence, Settings
from poise.scheduler.model.cluster import Cluster
from poise.scheduler.model.job import Job
from poise.scheduler.throughput.table import shipped

HOUR = 3600.0


def logged(*jobs: TraceJob) -> Records:
    return trace_subject(Trace("log", tuple(sorted(jobs, key=lambda each: each.job.submitted))), shipped()).records


def ran(
    name: str,
    at: float,
    *attempts: RunAttempt,
    gpus: int = 1,
    tenant: str = "ada",
    outcome: JobOutcome = JobOutcome.PASSED,
) -> TraceJob:
    """A job of a log that tells when it ran."""
    seconds = sum((each.end or each.start) - each.start for each in attempts)
    return TraceJob(Job(name, at, gpus, seconds, tenant=tenant), outcome, observed=attempts)


def journalled(jobs: Sequence[TraceJob], policy: str = "fifo", cluster: str | Cluster = "gpu:4", **how: object) -> Records:
    story = simulate(jobs, policy, cluster, **how)  # type: ignore[arg-type]
    return read(story)


def read(story: Story, validation_gpus: int = 0) -> Records:
    reading = RecordReader(story.cluster, validation_gpus)
    for entry in story.entries:
        reading.take(entry)
    return reading.records()


def part(records: Records, key: str) -> StudyPart:
    return next(each for each in study(records) if each.key == key)


def rows(records: Records, key: str) -> dict[Value, dict[str, Value]]:
    """The rows of a part by their first column."""
    found = part(records, key)
    assert not found.missing
    return {row[0]: dict(zip((each.key for each in found.columns), row, strict=True)) for row in found.rows}


def test_parts_have_the_keys_that_are_promised() -> None:
    assert tuple(each.key for each in study(logged(a_job()))) == KEYS


def test_quantile_of_run_times_is_the_published_one_and_that_of_delays_goes_by_rank() -> None:
    ten = np.arange(1.0, 11.0)
    assert [lower(ten, share) for share in (0.0, 0.5, 0.9, 0.99, 1.0)] == [1, 5, 9, 9, 10]
    assert [nearest(ten, share) for share in (0.0, 0.5, 0.9, 0.99, 1.0)] == [1, 5, 9, 10, 10]
    thirty = np.arange(1.0, 31.0)
    assert nearest(thirty, 0.1) == 3
    assert lower(np.empty(0), 0.5) is nearest(np.empty(0), 0.5) is None


def test_buckets_are_those_of_the_philly_study() -> None:
    found = {each.label: each.members.tolist() for each in by_size(np.array([1, 2, 4, 5, 8, 9, 128]))}
    assert found == {"1": [0], "2-4": [1, 2], "5-8": [3, 4], ">8": [5, 6]}


def test_jobs_and_gpu_time_are_counted_by_size_status_and_tenant() -> None:
    jobs = [
        TraceJob(Job("a", 0.0, 1, HOUR, tenant="ada")),
        TraceJob(Job("b", 1.0, 4, HOUR, tenant="bob"), JobOutcome.KILLED),
        TraceJob(Job("c", 2.0, 5, HOUR, tenant="bob"), JobOutcome.FAILED),
    ]
    records = logged(*jobs)
    sizes = rows(records, "sizes")
    assert [sizes[size]["gpu_hours"] for size in ("1", "2-4", "5-8", ">8", "all")] == [1, 4, 5, 0, 10]
    assert [sizes[size]["jobs_share"] for size in ("1", ">8", "all")] == [pytest.approx(1 / 3), 0, 1]
    assert {status: row["gpu_time_share"] for status, row in rows(records, "statuses").items()} == {
        "passed": 0.1, "killed": 0.4, "failed": 0.5
    }  # fmt: skip
    assert [(tenant, row["jobs"]) for tenant, row in rows(records, "tenants").items()] == [("bob", 2), ("ada", 1)]


def test_a_trace_without_starts_says_so_in_every_part_that_needs_them() -> None:
    found = {each.key: each for each in study(logged(a_job()))}
    for key in ("delays_by_size", "delays_by_tenant", "waits", "causes", "order"):
        assert "not when they started" in found[key].missing
        assert not found[key].rows
    assert "All jobs count as passed" in found["statuses"].caveat


def test_a_log_has_delays_to_the_first_start_and_all_intervals_of_waiting() -> None:
    records = logged(
        ran("a", 0.0, RunAttempt(10.0, 20.0), RunAttempt(50.0, 60.0)),
        ran("b", 5.0, RunAttempt(5.0, 7.0), gpus=2),
    )
    assert rows(records, "delays_by_size")["all"]["mean"] == 5.0
    waits = part(records, "waits").records()
    assert [(row["by"], row["group"], row["intervals"], row["mean"]) for row in waits] == [
        ("all", "all", 2, 20.0),  # 10 and 30 seconds; the job that did not wait is left out
        ("size", "1", 2, 20.0),
        ("size", "2-4", 0, None),
        ("size", "5-8", 0, None),
        ("size", ">8", 0, None),
        ("tenant", "ada", 2, 20.0),
    ]


def test_an_interval_next_to_an_attempt_without_an_end_is_not_known() -> None:
    records = logged(ran("a", 0.0, RunAttempt(10.0, None), RunAttempt(50.0, 60.0), RunAttempt(61.0, 70.0)))
    assert part(records, "waits").records()[0]["intervals"] == 2  # 10 s and 1 s
    assert rows(records, "delays_by_size")["all"]["mean"] == 10.0
    assert rows(records, "attempts")[3]["jobs"] == 1


def test_attempts_before_the_last_failed_and_their_run_time_is_counted() -> None:
    records = logged(
        ran("a", 0.0, RunAttempt(0.0, 100.0), RunAttempt(200.0, 500.0), gpus=2),
        ran("b", 0.0, RunAttempt(0.0, HOUR), gpus=4, outcome=JobOutcome.FAILED, tenant="bob"),
        ran("c", 0.0, RunAttempt(0.0, HOUR), outcome=JobOutcome.KILLED),
    )
    (everything, untold) = part(records, "failures").records()
    assert everything["category"] == "all"
    assert untold["category"] == "not told"
    assert (untold["trials"], untold["jobs"], untold["tenants"], untold["retried"]) == (2, 2, 2, 1)
    assert (untold["rtf_p50"], untold["rtf_p90"], untold["rtf_share"]) == (100.0, HOUR, 1.0)
    assert untold["gpu_hours"] == pytest.approx(4 + 200 / HOUR)


def test_stated_failures_are_attempts_and_a_broken_job_has_no_other() -> None:
    healing = TraceJob(Job("a", 0.0, 1, 100.0), failures=(FailedAttempt(30.0, "CUDA ver. mismatch"),))
    dies = (FailedAttempt(10.0, "mpi error"), FailedAttempt(20.0, "mpi error"))
    broken = TraceJob(Job("b", 0.0, 1, 500.0), JobOutcome.FAILED, dies, broken=True)
    records = logged(healing, broken)
    assert records.run_seconds.tolist() == [100.0, 30.0]
    assert records.attempts.tolist() == [2, 2]
    found = rows(records, "failures")
    assert (found["mpi-error"]["trials"], found["mpi-error"]["verdict"], found["mpi-error"]["retried"]) == (
        2,
        "transient",
        1,
    )
    assert (found["cuda-version-mismatch"]["trials"], found["cuda-version-mismatch"]["verdict"]) == (1, "hopeless")
    assert Covers.STARTS not in records.covers


def test_steps_become_seconds_on_the_reference_type_where_the_model_is_known() -> None:
    known = TraceJob(Job("a", 0.0, 1, steps=1000.0, model="ResNet50"))
    unknown = TraceJob(Job("b", 0.0, 1, steps=1000.0, model="nobody's"))
    subject = trace_subject(Trace("log", (known, unknown)), shipped())
    assert subject.records.run_seconds[0] > 0
    assert np.isnan(subject.records.run_seconds[1])
    assert any("does not know" in note for note in subject.notes)
    assert part(subject.records, "overview").caveat.endswith("their length is not known: 1.")


def test_fair_share_is_inferred_from_the_most_that_a_tenant_ever_used() -> None:
    records = logged(
        ran("a", 0.0, RunAttempt(0.0, 100.0), gpus=4),
        ran("b", 10.0, RunAttempt(150.0, 160.0), gpus=2),  # 4 + 2 > 4 until 100, then something else for 50 s
        ran("c", 20.0, RunAttempt(30.0, 40.0), gpus=8, tenant="bob"),  # nobody of its tenant runs
    )
    assert inferred(records).tolist() == [[0.0, 0.0], [90.0, 50.0], [0.0, 10.0]]
    found = part(records, "causes")
    assert "no quotas" in found.caveat
    everything = {row["cause"]: row for row in found.records() if row["size"] == "all"}
    assert [everything[cause]["jobs"] for cause in ("fair share", "fragmentation or capacity")] == [1, 1]
    assert everything["fair share"]["hours"] == pytest.approx(90 / HOUR)
    assert everything["fair share"]["time_share"] == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("submitted", "started", "left", "want"),
    [
        ([0, 1, 2], [5, 3, 4], [5, 3, 4], [False, True, True]),
        ([0, 0], [5, 3], [5, 3], [False, False]),  # submitted together: neither is earlier
        ([0, 1], [5, 5], [5, 5], [False, False]),  # started together
        ([0, 1], [np.nan, 3], [np.inf, 3], [False, True]),  # it waits still
        ([0, 1], [np.nan, 3], [2, 3], [False, False]),  # it was cancelled before
        ([], [], [], []),
    ],
)
def test_a_start_is_out_of_order_while_an_earlier_job_waits(
    submitted: list[float], started: list[float], left: list[float], want: list[bool]
) -> None:
    columns = (np.array(each, dtype=np.float64) for each in (submitted, started, left))
    assert out_of_order(*columns).tolist() == want


def test_overtaking_hurts_only_if_the_gpus_taken_would_have_let_the_head_start() -> None:
    jobs = [
        a_job("running", at=0, gpus=3, seconds=100),
        a_job("head", at=1, gpus=4, seconds=10),
        a_job("short", at=2, gpus=1, seconds=50),  # takes the idle GPU; the head could not start with it either
        a_job("late", at=60, gpus=1, seconds=80),  # from 100 on it alone keeps the head waiting, until 140
    ]
    records = journalled(jobs, "fifo-skip")
    row = rows(records, "order")["all jobs"]
    assert (row["starts"], row["out_of_order"], row["harmful"]) == (4, 2, 1)
    assert (row["hurt_jobs"], row["hurt_seconds"]) == (1, 40.0)
    assert row["harmful_share"] == 0.5


def test_overtaking_on_another_type_than_the_head_can_use_does_not_hurt() -> None:
    jobs = [
        a_job("running", at=0, gpus=4, seconds=100, gpu_types=("v100",)),
        a_job("head", at=1, gpus=4, seconds=10, gpu_types=("v100",)),
        a_job("other", at=2, gpus=4, seconds=300, gpu_types=("k80",)),
    ]
    row = rows(journalled(jobs, "fifo-skip", "v100:4,k80:4"), "order")["all jobs"]
    assert (row["out_of_order"], row["harmful"], row["hurt_seconds"]) == (1, 0, 0.0)


def test_preempted_runs_belong_to_one_attempt_and_failures_end_it() -> None:
    jobs = [
        a_job("long", at=0, gpus=4, seconds=100, dies=(50.0,)),
        a_job("short", at=10, gpus=4, seconds=5),
    ]
    records = journalled(jobs, "srtf")
    assert records.attempts.tolist() == [2, 1]
    assert records.runs.attempts.seconds[0] == 50.0
    losses = rows(records, "losses")
    assert {end: row["runs"] for end, row in losses.items()} == {"finished": 2, "failed": 1, "preempted": 1}
    assert rows(records, "failures")["cpu-out-of-memory"]["retried"] == 1


def test_gpu_time_that_left_no_progress_is_counted_as_not_kept() -> None:
    jobs = [a_job("a", gpus=2, seconds=100, dies=(50.0,))]
    records = journalled(jobs, settings=Settings(cadence=Cadence.EVENTS, restart_overhead=10.0))
    found = rows(records, "losses")
    # No checkpoint for 600 s: all of the first 60 s is lost, 10 s of them at the start, and 10 s at the second start.
    assert found["failed"]["unkept_gpu_hours"] == pytest.approx(2 * 60 / HOUR)
    assert found["finished"]["unkept_gpu_hours"] == pytest.approx(2 * 10 / HOUR)


def test_what_failures_cost_is_what_the_runs_that_failed_did_not_keep() -> None:
    jobs = [a_job("long", at=0, gpus=4, seconds=100, dies=(50.0,)), a_job("short", at=10, gpus=4, seconds=5)]
    records = journalled(jobs, "srtf", settings=Settings(cadence=Cadence.EVENTS, restart_overhead=3.0))
    found, ended = rows(records, "failures")["all"], rows(records, "losses")
    # The attempt is two runs, of 10 s and of 46 s; of the first one the preemption left 7 s of work in a checkpoint.
    assert found["gpu_hours"] == pytest.approx(4 * 56 / HOUR)
    assert found["unkept_gpu_hours"] == ended["failed"]["unkept_gpu_hours"] == pytest.approx(4 * 46 / HOUR)


def test_a_job_rejected_after_the_last_end_does_not_lengthen_the_time_in_which_gpus_could_be_used() -> None:
    records = journalled([a_job("a", seconds=10), a_job("huge", at=100.0, gpus=5)])
    assert rows(records, "overview")[2]["utilisation"] == pytest.approx(0.25)


def test_a_run_that_moved_at_once_is_separate_from_the_next() -> None:
    moved = Settings(cadence=Cadence.EVENTS, defragment=1.0, packed_wait=1e6)
    jobs = [
        a_job("a", at=0, gpus=1, seconds=10),
        a_job("b", at=0, gpus=2, seconds=100),
        a_job("c", at=0, gpus=2, seconds=10),
        a_job("d", at=1, gpus=1, seconds=100),
        a_job("e", at=20, gpus=3, seconds=50),
    ]
    records = journalled(jobs, "fifo-skip", nodes(3, 3), placement="consolidate", settings=moved)
    assert np.sum(records.runs.gaps == 0) == 1
    told = ~np.isnan(records.runs.ideal)
    assert np.allclose(records.runs.ideal[told], records.runs.seconds[told])


def test_speed_is_shown_by_size_and_nodes_as_a_share_of_that_of_a_packed_gang() -> None:
    spread = journalled([a_job("a", gpus=4, model="VGG16", seconds=100)], "fifo", nodes(2, 2, 4, gpu_type="v100"))
    (row,) = part(spread, "speed_by_nodes").records()
    assert (row["gpus"], row["runs"]) == (4, 1)
    assert 0 < float(row["speed"] or 0) <= 1
    assert rows(spread, "nodes")[row["nodes"]]["jobs"] == 1


def test_a_trial_is_no_start() -> None:
    how = Settings(cadence=Cadence.EVENTS, validation_gpus=1, validation_time=5.0)
    story = simulate([a_job("a", gpus=2, seconds=100), a_job("b", at=1.0, seconds=10)], "fifo", "gpu:4", settings=how)
    records = read(story, how.validation_gpus)
    assert records.started.tolist() == [5.0, 1.0]
    assert records.first_nodes.tolist() == [1, 1]
    assert rows(records, "losses")["trial over"]["gpu_hours"] == pytest.approx(5 / HOUR)


def test_a_trial_that_fails_keeps_nothing() -> None:
    how = Settings(cadence=Cadence.EVENTS, validation_gpus=1, validation_time=5.0)
    story = simulate([a_job("a", gpus=2, seconds=100, dies=(2.0,))], "fifo", "gpu:4", settings=how)
    found = rows(read(story, how.validation_gpus), "losses")
    assert found["failed"]["gpu_hours"] == found["failed"]["unkept_gpu_hours"] == pytest.approx(2 / HOUR)


def test_an_empty_journal_has_a_study_too() -> None:
    records = RecordReader(nodes(4)).records()
    assert rows(records, "overview")[0]["jobs"] == 0
    assert [each.key for each in study(records)] == list(KEYS)
