"""Slurm's accounting as a trace: what a real slurmctld logged, what rows become, and what is said of wrong ones."""

import csv
import json
from pathlib import Path

import pytest

from poise.lab.analysis.sources import trace_subject
from poise.lab.experiment import Experiment, simulate
from poise.lab.traces.reader import read_trace
from poise.lab.traces.schema import FailedAttempt, JobOutcome, RunAttempt, Trace, TraceJob
from poise.scheduler.model.cluster import parse_cluster
from poise.scheduler.model.errors import TraceError
from poise.scheduler.throughput.table import read_throughputs, shipped

DATA = Path(__file__).parents[1] / "data" / "slurm"
HEADER = "JobID|Account|Submit|Start|End|ElapsedRaw|State|AllocTRES|ReqTRES|NNodes"
ROW = "7|vision|2026-01-02T03:04:05|2026-01-02T03:05:05|2026-01-02T03:05:15|10|COMPLETED|gres/gpu=4|gres/gpu=4|2"
SUBMITTED = 1767323045.0


def read(folder: Path, *rows: str, header: str = HEADER, format: str = "auto") -> Trace:
    path = folder / "log"
    path.write_text("\n".join((header, *rows)) + "\n")
    return read_trace(str(path), format=format)


def only(folder: Path, *rows: str, header: str = HEADER) -> TraceJob:
    (found,) = read(folder, *rows, header=header).jobs
    return found


def refused(folder: Path, *rows: str, header: str = HEADER, format: str = "sacct") -> str:
    with pytest.raises(TraceError) as caught:
        read(folder, *rows, header=header, format=format)
    message = str(caught.value)
    assert "\n" not in message
    return message.removeprefix(f"{folder / 'log'}")


# The log of a real slurmctld.


def logged() -> list[dict[str, str]]:
    """The rows of allocations that have GPUs and have ended, as the standard library reads them."""
    with (DATA / "sacct.txt").open(newline="") as stream:
        rows = list(csv.DictReader(stream, delimiter="|"))
    return [row for row in rows if "." not in row["JobID"] and "gres/gpu=" in row["AllocTRES"] and row["End"] != "Unknown"]


def gpus(row: dict[str, str]) -> int:
    counts = dict(part.split("=") for part in row["AllocTRES"].split(","))
    return int(counts["gres/gpu"])


def test_gpu_time_of_a_real_log_is_what_slurm_accounted() -> None:
    trace = read_trace(str(DATA / "sacct.txt"))
    records = trace_subject(trace, shipped()).records
    want = sum(gpus(row) * int(row["ElapsedRaw"]) for row in logged())
    assert want == 853
    assert records.gpu_hours * 3600 == pytest.approx(want)
    assert len(trace.jobs) == len({row["JobID"] for row in logged()}) == 34


def test_average_wait_of_a_real_log_is_from_eligibility_to_the_first_start() -> None:
    firsts: dict[str, dict[str, str]] = {}
    for row in logged():
        firsts.setdefault(row["JobID"], row)
    seconds = {key: int(text[11:13]) * 3600 + int(text[14:16]) * 60 + int(text[17:19]) for row in firsts.values()
               for key, text in (((row["JobID"], name), row[name]) for name in ("Eligible", "Start"))}  # fmt: skip
    want = sum(seconds[job, "Start"] - seconds[job, "Eligible"] for job in firsts) / len(firsts)
    got = trace_subject(read_trace(str(DATA / "sacct.txt")), shipped()).records.delays
    assert got.mean() == pytest.approx(want)
    assert round(want, 1) == 12.3


def test_both_formats_of_a_real_log_give_the_same_trace() -> None:
    text, document = (read_trace(str(DATA / f"sacct.{ending}")) for ending in ("txt", "json"))
    by_id = [sorted(trace.jobs, key=lambda each: each.job.id) for trace in (text, document)]
    assert by_id[0] == by_id[1]
    assert [each.observed for each in by_id[0]] == [each.observed for each in by_id[1]]
    assert text.notes == document.notes


def test_jobs_of_a_real_log_are_what_was_submitted() -> None:
    named = {f"{each.job.name} {each.job.id}": each for each in read_trace(str(DATA / "sacct.txt")).jobs}
    by_name = {each.job.name: each for each in named.values()}
    assert by_name["gang"].job.gpus == 8
    assert by_name["gang"].job.gpu_types == ("a100",)
    assert by_name["gang"].observed[0].nodes == (4, 4)
    assert by_name["any-type"].job.gpu_types == ()
    assert by_name["by-feature"].job.gpu_types == ("v100",)
    assert by_name["over-types"].job.gpus == 6
    assert {each.job.id for each in named.values() if each.job.name == "pair"} == {"9+0", "9+1"}
    assert [each.job.id for each in named.values() if each.job.app == "6"] == [f"6_{task}" for task in range(6)]
    assert by_name["overrun"].outcome is by_name["broken"].outcome is by_name["lost"].outcome is JobOutcome.FAILED
    assert by_name["stopped"].outcome is JobOutcome.KILLED
    assert {each.job.tenant for each in named.values()} == {"vision", "speech"}
    assert {"withdrawn", "running", "tail", "preprocess"}.isdisjoint(by_name)


@pytest.mark.parametrize(("name", "causes"), [("again", []), ("spare", []), ("moved", ["node-fail"])])
def test_attempts_of_a_real_requeued_job_are_one_job(name: str, causes: list[str]) -> None:
    (found,) = (each for each in read_trace(str(DATA / "sacct.txt")).jobs if each.job.name == name)
    rows = [row for row in logged() if row["JobName"] == name]
    assert len(found.observed) == len(rows) == 2
    assert found.job.duration == sum(int(row["ElapsedRaw"]) for row in rows)
    assert found.outcome is JobOutcome.PASSED
    assert [each.cause for each in found.failures] == causes
    assert [each.after for each in found.failures] == [int(row["ElapsedRaw"]) for row in rows[:-1] if causes]


def test_a_real_log_runs_as_long_in_a_simulation_where_all_types_are_as_fast(tmp_path: Path) -> None:
    """853 GPU-seconds of work are done, and once more what the attempt lost that failed without a checkpoint."""
    table = tmp_path / "as-logged.csv"
    table.write_text(
        "# reference: a100\nmodel,batch_size,gpu_type,gpus,locality,steps_per_second,source\n"
        "any,,a100,1,packed,1,as logged\nany,,v100,1,packed,1,as logged\n"
    )
    experiment = Experiment(parse_cluster("a100:8,v100:4"), throughputs=read_throughputs(table))
    trace = read_trace(str(DATA / "sacct.txt"))
    lost = sum(each.after * found.job.gpus for found in trace.jobs for each in found.failures)
    summary = simulate(trace, experiment).summary
    assert summary.jobs == 34
    assert lost == 20
    assert summary.gpu_hours * 3600 == pytest.approx(853 + lost)


# What rows become.


def test_row_becomes_a_job(tmp_path: Path) -> None:
    found = only(tmp_path, ROW)
    assert (found.job.id, found.job.submitted, found.job.gpus, found.job.duration) == ("7", SUBMITTED, 4, 10.0)
    assert (found.job.tenant, found.job.gpu_types, found.job.app) == ("vision", (), None)
    assert found.outcome is JobOutcome.PASSED
    assert found.observed == (RunAttempt(SUBMITTED + 60, SUBMITTED + 70, (2, 2)),)


@pytest.mark.parametrize("end", ["", "|"], ids=["parsable2", "parsable"])
@pytest.mark.parametrize("delimiter", ["|", ";", "^"])
def test_lines_may_end_with_the_delimiter_which_may_be_another(end: str, delimiter: str, tmp_path: Path) -> None:
    lines = [f"{line}{end}".replace("|", delimiter) for line in (HEADER, ROW)]
    assert only(tmp_path, lines[1], header=lines[0]) == only(tmp_path, ROW)


def test_columns_may_stand_in_any_order_among_others(tmp_path: Path) -> None:
    header = "Comment|State|ReqTRES|AllocTRES|Submit|Start|JobID|NNodes|Account|End|Elapsed"
    row = "x|COMPLETED|gres/gpu=4|gres/gpu=4|2026-01-02T03:04:05|2026-01-02T03:05:05|7|2|vision|2026-01-02T03:05:15|00:00:10"
    assert only(tmp_path, row, header=header) == only(tmp_path, ROW)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("00:00:10", 10), ("01:02:03", 3723), ("2-01:02:03", 176523), ("02:03", 123), ("00:10.250", 10), ("", 10)],
)
def test_elapsed_is_read_in_all_its_forms(text: str, seconds: int, tmp_path: Path) -> None:
    found = only(tmp_path, ROW.replace("|10|", f"|{text}|"), header=HEADER.replace("ElapsedRaw", "Elapsed"))
    assert found.job.duration == seconds


@pytest.mark.parametrize(
    ("state", "outcome"),
    [
        ("COMPLETED", JobOutcome.PASSED),
        ("CANCELLED by 1000", JobOutcome.KILLED),
        ("PREEMPTED", JobOutcome.KILLED),
        ("FAILED", JobOutcome.FAILED),
        ("TIMEOUT", JobOutcome.FAILED),
        ("OUT_OF_MEMORY", JobOutcome.FAILED),
        ("NODE_FAIL", JobOutcome.FAILED),
        ("DEADLINE", JobOutcome.FAILED),
    ],
)
def test_final_state_is_an_outcome(state: str, outcome: JobOutcome, tmp_path: Path) -> None:
    assert only(tmp_path, ROW.replace("COMPLETED", state)).outcome is outcome


OUT = [
    ("runs", ROW.replace("2026-01-02T03:05:15|10|COMPLETED", "Unknown|10|RUNNING"), "they ran when the log was taken"),
    ("is suspended", ROW.replace("COMPLETED", "SUSPENDED"), "they ran when the log was taken"),
    (
        "waits",
        "7_[5-9%2]|v|2026-01-02T03:04:05|Unknown|Unknown|0|PENDING||gres/gpu=1|1",
        "they waited when the log was taken",
    ),
    ("has no GPU", ROW.replace("gres/gpu=4", "cpu=4"), "they have no GPU"),
    (
        "was cancelled while it waited",
        "7|v|2026-01-02T03:04:05|None|2026-01-02T03:04:09|0|CANCELLED by 0||gres/gpu=1|1",
        "they never started",
    ),
    (
        "was cancelled while it waited, with a start",
        "7|v|2026-01-02T03:04:05|2026-01-02T03:04:09|2026-01-02T03:04:09|0|CANCELLED by 0||gres/gpu=1|1",
        "they never started",
    ),
]


@pytest.mark.parametrize(("row", "why"), [case[1:] for case in OUT], ids=[case[0] for case in OUT])
def test_job_that_says_nothing_of_work_is_left_out_and_counted(row: str, why: str, tmp_path: Path) -> None:
    trace = read(tmp_path, ROW.replace("7|", "8|", 1), row)
    assert [each.job.id for each in trace.jobs] == ["8"]
    assert f"jobs left out because {why}: 1" in trace.notes


def test_log_of_which_no_job_is_left_is_refused_with_the_reasons(tmp_path: Path) -> None:
    rows = [ROW.replace("gres/gpu=4", "cpu=4").replace("7|", f"{job}|", 1) for job in (7, 8)]
    want = ": expected at least one job, got none; jobs left out because they have no GPU: 2"
    assert refused(tmp_path, *rows) == want


def test_attempt_that_ends_before_it_starts_is_left_out_and_counted(tmp_path: Path) -> None:
    trace = read(tmp_path, ROW.replace("7|", "8|", 1), ROW.replace("03:05:15", "03:05:04"))
    assert len(trace.jobs) == 1
    assert "attempts left out because they end before they start: 1" in trace.notes


def test_steps_are_no_jobs_and_tell_the_gpus_only_where_the_job_does_not(tmp_path: Path) -> None:
    steps = [ROW.replace("7|", f"7.{step}|", 1).replace("gpu=4", f"gpu={count}") for step, count in (("batch", 1), ("0", 8))]
    assert only(tmp_path, ROW, *steps).job.gpus == 4
    assert only(tmp_path, ROW.replace("gres/gpu=4", "cpu=1"), *steps).job.gpus == 8


def test_step_of_a_job_that_is_not_there_is_counted(tmp_path: Path) -> None:
    trace = read(tmp_path, ROW, ROW.replace("7|", "6.batch|", 1))
    assert "steps left out because the log does not have their job: 1" in trace.notes


@pytest.mark.parametrize(
    ("count", "gpus"),
    [("gpu:4", 4), ("gpu:tesla:2", 2), ("gpu", 1), ("gpu:tesla:2(S:0-1)", 2), ("craynetwork:1,gpu:3", 3), ("7696487:4", 4)],
)
def test_old_versions_tell_the_gpus_as_generic_resources(count: str, gpus: int, tmp_path: Path) -> None:
    header = "JobID|Submit|Start|End|State|AllocGRES"
    row = f"7|2026-01-02T03:04:05|2026-01-02T03:05:05|2026-01-02T03:05:15|COMPLETED|{count}"
    found = only(tmp_path, row, header=header)
    assert (found.job.gpus, found.job.tenant) == (gpus, "default")


TYPES = [
    ("one", "gres/gpu:a100=4,gres/gpu=4", "", ("a100",)),
    ("as a driver calls it", "gres/gpu:nvidia_a100-sxm4-80gb=4", "", ("a100",)),
    ("not in the table", "gres/gpu:2080ti=4", "", ("gpu-2080ti",)),
    ("two", "gres/gpu:a100=2,gres/gpu:v100=2,gres/gpu=4", "", ("a100", "v100")),
    ("not all are told", "gres/gpu:a100=2,gres/gpu=4", "", ()),
    ("of a constraint", "gres/gpu=4", "a100|v100", ("a100", "v100")),
    ("of a constraint in brackets", "gres/gpu=4", "[a100|v100]", ("a100", "v100")),
    ("of a constraint that has more", "gres/gpu=4", "a100&ib", ("a100",)),
    ("a constraint of something else", "gres/gpu=4", "a100|ib", ()),
    ("neither", "gres/gpu=4", "", ()),
]


@pytest.mark.parametrize(("tres", "constraint", "types"), [case[1:] for case in TYPES], ids=[case[0] for case in TYPES])
def test_types_are_those_of_the_request(tres: str, constraint: str, types: tuple[str, ...], tmp_path: Path) -> None:
    row = (
        ROW.replace("|gres/gpu=4|2", f"|{tres}|2").replace("|", ";") + f";{constraint}"
    )  # which may hold the usual delimiter
    found = only(tmp_path, row, header=HEADER.replace("|", ";") + ";Constraints")
    assert (found.job.gpus, found.job.gpu_types) == (4, types)


def test_type_of_the_allocation_alone_binds_no_job(tmp_path: Path) -> None:
    assert only(tmp_path, ROW.replace("gres/gpu=4", "gres/gpu:a100=4,gres/gpu=4", 1)).job.gpu_types == ()


def test_slice_of_a_gpu_counts_as_a_whole_one(tmp_path: Path) -> None:
    trace = read(tmp_path, ROW.replace("gres/gpu=4", "gres/gpu:a100_1g.5gb=4"))
    assert trace.jobs[0].job.gpus == 4
    assert "jobs on slices of GPUs that get whole ones: 1" in trace.notes


def test_tenant_is_the_user_where_the_log_has_no_accounts(tmp_path: Path) -> None:
    assert only(tmp_path, ROW, header=HEADER.replace("Account", "User")).job.tenant == "vision"


def test_waiting_for_something_else_is_no_waiting(tmp_path: Path) -> None:
    header = f"{HEADER}|Eligible"
    trace = read(tmp_path, f"{ROW}|2026-01-02T03:05:00", header=header)
    assert trace.jobs[0].job.submitted == SUBMITTED + 55
    assert "jobs that count as submitted when they became eligible to run: 1" in trace.notes
    for other in ("2026-01-02T03:04:05", "Unknown", "2026-01-02T03:05:06"):
        assert only(tmp_path, f"{ROW}|{other}", header=header).job.submitted == SUBMITTED


def test_attempts_are_told_apart_by_what_ended_them(tmp_path: Path) -> None:
    def attempt(minute: int, state: str) -> str:
        times = "|".join(f"2026-01-02T03:{minute:02}:{second:02}" for second in (5, 10, 20))
        return f"7|v|{times}|10|{state}|gres/gpu=1|gres/gpu=1|1"

    found = only(
        tmp_path, attempt(9, "COMPLETED"), *map(attempt, (1, 3, 5, 7), ("PREEMPTED", "FAILED", "REQUEUED", "NODE_FAIL"))
    )
    assert found.job.duration == 50
    assert found.failures == (FailedAttempt(20.0, "failed"), FailedAttempt(20.0, "node-fail"))
    assert [each.start for each in found.observed] == sorted(each.start for each in found.observed)
    assert found.job.submitted == found.observed[0].start - 5


def test_exports_may_stand_one_after_another_and_the_last_counts(tmp_path: Path) -> None:
    running = ROW.replace("2026-01-02T03:05:15|10|COMPLETED", "Unknown|5|RUNNING")
    waiting = ROW.replace("2026-01-02T03:05:05|2026-01-02T03:05:15|10|COMPLETED", "Unknown|Unknown|0|PENDING")
    assert only(tmp_path, waiting, HEADER, running, HEADER, ROW, ROW) == only(tmp_path, ROW)


def test_ids_name_their_cluster_only_where_there_are_several(tmp_path: Path) -> None:
    header = f"{HEADER}|Cluster"
    assert only(tmp_path, f"{ROW}|one", header=header).job.id == "7"
    trace = read(tmp_path, f"{ROW}|one", f"{ROW}|two", header=header)
    assert [each.job.id for each in trace.jobs] == ["one/7", "two/7"]


@pytest.mark.parametrize("text", ["1767323045", "2026-01-02T04:04:05+01:00", "2026-01-02T03:04:05"])
def test_times_are_utc_unless_they_say_otherwise(text: str, tmp_path: Path) -> None:
    assert only(tmp_path, ROW.replace("2026-01-02T03:04:05", text)).job.submitted == SUBMITTED


# What is said of wrong rows.

WRONG = [
    (
        "time",
        ROW.replace("2026-01-02T03:04:05", "soon"),
        ":2: Submit: expected a time such as 2017-10-09 07:01:55, got 'soon'",
    ),
    (
        "no submission",
        ROW.replace("2026-01-02T03:04:05", "Unknown"),
        ":2: Submit: expected a time such as 2026-01-02T03:04:05, got 'Unknown'",
    ),
    ("elapsed", ROW.replace("|10|", "|ten|"), ":2: ElapsedRaw: expected a number, got 'ten'"),
    ("negative", ROW.replace("|10|", "|-1|"), ":2: ElapsedRaw: expected a finite number of at least 0, got '-1'"),
    ("state", ROW.replace("COMPLETED", "DONE"), ":2: State: expected one of COMPLETED, CANCELLED, PREEMPTED, "),
    ("no state", ROW.replace("COMPLETED", ""), ":2: State: expected one of COMPLETED, CANCELLED, PREEMPTED, "),
    ("GPUs", ROW.replace("gpu=4", "gpu=four", 1), ":2: AllocTRES: expected a whole number from 0 to 1,000,000, got 'four'"),
    ("no count", ROW.replace("gpu=4", "gpu", 1), ":2: AllocTRES: expected a whole number from 0 to 1,000,000, got nothing"),
    ("nodes", ROW.removesuffix("2") + "two", ":2: NNodes: expected a whole number from 1 to 1,000,000, got 'two'"),
    ("no id", ROW.replace("7|", "|", 1), ":2: JobIDRaw: expected a name of printable characters, got nothing"),
    ("tenant", ROW.replace("vision", "a\x1b"), ":2: Account: expected a name of printable characters, got 'a\\x1b'"),
    (
        "a name with a bar",
        ROW + "|x",
        ":2: expected 10 cells, as in the header, got 11; leave out columns that may hold '|', such as JobName and "
        "Constraints, or choose a --delimiter",
    ),
    ("cut off", ROW[:30], ":2: expected 10 cells, as in the header, got 4; leave out columns that may hold '|'"),
]


@pytest.mark.parametrize(("row", "want"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_wrong_cell_is_refused_with_line_column_and_value(row: str, want: str, tmp_path: Path) -> None:
    assert refused(tmp_path, row).startswith(want)


HEADERS = [
    ("JobID|Submit|Start|End|AllocTRES", " with the column State, got 'JobID|Submit|Start|End|AllocTRES'"),
    ("JobID|State|Start|End|AllocTRES", " with the column Submit, got"),
    ("Submit|State|Start|End|AllocTRES", " with the column JobID, got"),
    ("JobID|Submit|State|Start|ElapsedRaw|AllocTRES", " with the column End, got"),
    ("JobID|Submit|State|Start|End", " with the column AllocTRES, got"),
    ("JobID|Submit|State|State|Start|End|AllocTRES", " with each column once, not State twice, got"),
    ("JobID           JobName  Partition", " with | between its columns, got 'JobID           JobName  Partition'"),
]


@pytest.mark.parametrize(("header", "want"), HEADERS)
def test_header_that_lacks_something_is_refused_with_what_it_lacks(header: str, want: str, tmp_path: Path) -> None:
    assert refused(tmp_path, header=header).startswith(f":1: expected a header that sacct --parsable2 prints{want}")


def test_log_without_a_header_is_refused(tmp_path: Path) -> None:
    assert refused(tmp_path, header=ROW).startswith(
        ":1: expected a header that sacct --parsable2 prints with the column JobID"
    )


# JSON, as later versions write it.

JOB = {
    "association": {"account": "vision", "cluster": "lab"},
    "allocation_nodes": 2,
    "cluster": "lab",
    "account": "vision",
    "user": "alice",
    "name": "train",
    "job_id": 7,
    "array": {"job_id": 0, "task_id": {"set": False, "infinite": False, "number": 0}},
    "het": {"job_id": 0, "job_offset": {"set": False, "infinite": False, "number": 0}},
    "constraints": "",
    "state": {"current": ["COMPLETED"], "reason": "None"},
    "time": {
        "submission": {"set": True, "infinite": False, "number": 1767323045},
        "eligible": 1767323045,
        "start": 1767323105,
        "end": 1767323115,
        "elapsed": 10,
    },
    "tres": {
        "allocated": [{"type": "gres", "name": "gpu", "count": 4}, {"type": "energy", "name": "", "count": None}],
        "requested": [{"type": "gres", "name": "gpu", "count": 4}],
    },
    "steps": [{"tres": {"allocated": [{"type": "gres", "name": "gpu", "count": 2}]}}],
}


def document(folder: Path, *jobs: object, head: str = '"meta": {"slurm": {}}, ') -> str:
    path = folder / "log"
    text = ",\n".join(map(json.dumps, jobs))
    path.write_text(f'{{{head}"errors": [],\n"jobs": [\n{text}\n], "warnings": []}}\n')
    return str(path)


def changed(**changes: object) -> dict[str, object]:
    return {**JOB, **changes}


def test_numbers_of_later_versions_may_be_objects_and_states_lists(tmp_path: Path) -> None:
    (found,) = read_trace(document(tmp_path, JOB)).jobs
    want = only(tmp_path, ROW)
    assert (found.job.id, found.job.submitted, found.job.gpus, found.job.duration) == ("7", SUBMITTED, 4, 10.0)
    assert (found.job.tenant, found.job.name, found.outcome) == ("vision", "train", want.outcome)
    assert found.observed == want.observed


def test_ids_of_arrays_and_heterogeneous_jobs_are_as_in_the_table(tmp_path: Path) -> None:
    array = changed(job_id=9, array={"job_id": 8, "task_id": {"set": True, "infinite": False, "number": 3}})
    part = changed(job_id=11, het={"job_id": 10, "job_offset": {"set": True, "infinite": False, "number": 1}})
    first, second = read_trace(document(tmp_path, array, part)).jobs
    assert (first.job.id, first.job.app, second.job.id, second.job.app) == ("8_3", "8", "10+1", None)


WRONG_JSON = [
    ("no submission", changed(time={"start": 5}), ":3: time.submission: expected seconds since 1970, got nothing"),
    ("time", changed(time={"submission": "soon"}), ":3: time.submission: expected a number of at least 0, got 'soon'"),
    ("negative", changed(time={"submission": -5}), ":3: time.submission: expected a number of at least 0, got -5"),
    ("state", changed(state={"current": []}), ":3: state.current: expected a state, got a list"),
    ("unknown state", changed(state={"current": ["DONE"]}), ":3: State: expected one of COMPLETED, "),
    ("TRES", changed(tres=[]), ":3: tres: expected an object, got a list"),
    ("list of TRES", changed(tres={"allocated": [4]}), ":3: allocated: expected a list of objects, got 4"),
    (
        "half a GPU",
        changed(tres={"allocated": [{"type": "gres", "name": "gpu", "count": 0.5}]}),
        ":3: count: expected a whole number from 0 to 1,000,000, got 0.5",
    ),
    ("tenant", changed(account=5), ":3: account: expected text, got 5"),
]


@pytest.mark.parametrize(("job", "want"), [case[1:] for case in WRONG_JSON], ids=[case[0] for case in WRONG_JSON])
def test_wrong_value_is_refused_with_line_field_and_value(job: object, want: str, tmp_path: Path) -> None:
    path = document(tmp_path, job)
    with pytest.raises(TraceError) as caught:
        read_trace(path, format="sacct")
    assert str(caught.value).startswith(path + want)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ('{"jobs": [5]}', ":1: expected a JSON object, got '5]}'"),
        ('{"jobs": [', ":1: expected a JSON object, got nothing"),
        ('{"jobs": [] ', ":1: expected a comma or the end of the object, got the end of the file"),
        ('{"jobs": []', ":1: expected a comma or the end of the object, got the end of the file"),
        ('{"jobs" []}', ":1: expected a colon, got '['"),
        ('{"jobs": [],}', ":1: expected a name, got '}'"),
        ('{5: []}', ":1: expected a name, got '5: []}'"),
        ('{"meta": 5, "jobs": [', ":1: expected a JSON object, got nothing"),
        ('{"meta": {"x": }', ":1: expected a whole JSON object, got a broken one (Expecting value)"),
    ],
)  # fmt: skip
def test_broken_document_is_refused_with_its_line(text: str, want: str, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(text)
    with pytest.raises(TraceError) as caught:
        read_trace(str(path), format="sacct")
    assert str(caught.value) == f"{path}{want}"
