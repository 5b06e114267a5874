"""What each format's reader makes of a row, and what it says of a row that is wrong."""

import re
from importlib import import_module
from pathlib import Path

import pytest

from poise.lab.traces.formats.poise import write_trace
from poise.lab.traces.reader import read_trace
from poise.lab.traces.registry import FORMATS, recognise
from poise.lab.traces.schema import FailedAttempt, JobOutcome, LossCurve, Trace, TraceJob
from poise.scheduler.model.job import Job

GAVEL = "ResNet-18 (batch size 128)\tpython3 main.py\tcifar10\t--num_steps\t1\t925982\t4\t1\t-1.000000\t7.5\n"
GAVEL_OLD = "ResNet-18 (batch size 128)\tpython3 main.py\t--num_steps\t1\t925982\t7.5\t4\n"
SHOCKWAVE = "LM (batch size 10)\tpython3 main.py\tlm\t--steps\t1\t134583\t2\tgns\t1\t-1.000000\t1418\t55\n"
TIRESIAS = "job_id,num_gpu,submit_time,iterations,model_name,duration,interval\n0,8,30,606,vgg19,164,30\n"
ITP = "job_id,submission_time,duration,num_gpu\n965d744f,1932025,2429,64\n"
PHILLY_CSV = "timestamp,duration,num_gpus,gpu_time,cluster\n2017-10-09 07:01:55,66.0,2,132.0,11cb48\n"
HELIOS = (
    "job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue\n"
    "1425512,uVMrF,vchbv,4,16,1,FAILED,2020-06-09 18:41:27,2020-06-09 18:41:27,2020-06-09 18:45:36,249,0\n"
)
HELIOS_CUT = (
    "job_id,user,vc,jobname,gpu_num,cpu_num,state,submit_time,start_time,end_time,duration\n"
    "0,u,103959,job0,1,4,Pass,2017-10-01 07:16:28,2017-10-01 07:16:28,2017-10-01 07:16:28,348\n"
)
ALIBABA = (
    "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time\n"
    "pod-1,6000,12288,1,460,V100M16|V100M32,LS,Failed,100,1000,300\n"
)
PHILLY = """[
  {"status": "Killed", "vc": "ee9e8c", "jobid": "a1", "user": "u", "submitted_time": "2017-10-07 01:11:39",
   "attempts": [
     {"start_time": "2017-10-07 01:12:09", "end_time": "2017-10-07 01:13:23",
      "detail": [{"ip": "m1", "gpus": ["gpu0", "gpu1"]}, {"ip": "m2", "gpus": ["gpu0"]}]},
     {"start_time": "2017-10-07 01:13:30", "end_time": "2017-10-07 01:15:30",
      "detail": [{"ip": "m3", "gpus": ["gpu0"]}]}]}
]"""
PHILLY_FLAT = """[{"status": "Failed", "vc": "v", "jobid": "a1", "submitted_time": "2017-10-07 01:11:39", "user": "u",
  "runtime_min": 1.0, "start_time": "2017-10-07 01:13:30", "end_time": "2017-10-07 01:14:30",
  "detail": [{"ip": "m1", "gpus": ["gpu0", "gpu1", "gpu2", "gpu3"]}]}]"""
PHILLY_ATTEMPTS = """[{"id": "a1", "num_gpus": 8, "runtime": 1.0, "submitted_time": "2017-10-07 01:11:39",
  "attempts": [{"start_time": "2017-10-07 01:12:00", "end_time": "2017-10-07 01:12:10"},
               {"start_time": "2017-10-07 01:13:00", "end_time": "2017-10-07 01:14:00"}]}]"""
SACCT = (
    "JobID|Account|Submit|Start|End|ElapsedRaw|State|AllocTRES\n"
    "7|vision|2026-01-02T03:04:05|2026-01-02T03:05:05|2026-01-02T03:05:15|10|COMPLETED|gres/gpu=4\n"
)
POD = """{"apiVersion": "v1", "items": [{"apiVersion": "v1", "kind": "Pod",
  "metadata": {"creationTimestamp": "2026-01-02T03:04:05Z", "name": "a", "namespace": "vision", "uid": "u1"},
  "spec": {"containers": [{"resources": {"limits": {"nvidia.com/gpu": "4"}}}]},
  "status": {"phase": "Succeeded", "startTime": "2026-01-02T03:05:05Z",
    "containerStatuses": [{"state": {"terminated": {"finishedAt": "2026-01-02T03:05:15Z"}}}]}}], "kind": "List"}"""
POISE = '{"job": "a", "submitted": 5, "gpus": 4, "duration": 60}\n'
SUBMITTED = 1507338699.0

SAMPLES = {
    "poise": POISE,
    "gavel": GAVEL,
    "shockwave": SHOCKWAVE,
    "tiresias": TIRESIAS,
    "philly": PHILLY,
    "philly-csv": PHILLY_CSV,
    "itp": ITP,
    "helios": HELIOS,
    "alibaba": ALIBABA,
    "sacct": SACCT,
    "kubernetes": POD,
}


def read(folder: Path, text: str, format: str = "auto") -> Trace:
    path = folder / "t"
    path.write_text(text)
    return read_trace(str(path), format=format)


def only(folder: Path, text: str) -> TraceJob:
    (job,) = read(folder, text).jobs
    return job


def test_formats_are_those_of_the_interface() -> None:
    assert [known.name for known in FORMATS] == list(SAMPLES)


@pytest.mark.parametrize("name", SAMPLES)
def test_every_format_is_recognised_by_itself_alone(name: str) -> None:
    head = SAMPLES[name]
    assert [known.name for known in FORMATS if known.sniff(head)] == [name]


@pytest.mark.parametrize("name", SAMPLES)
def test_every_format_reads_the_same_by_name_as_by_detection(name: str, tmp_path: Path) -> None:
    assert read(tmp_path, SAMPLES[name], name) == read(tmp_path, SAMPLES[name])


@pytest.mark.parametrize("name", SAMPLES)
def test_every_format_is_documented_by_a_table_of_columns(name: str) -> None:
    known = next(each for each in FORMATS if each.name == name)
    document = import_module(known.job_of.__module__).__doc__ or ""
    assert "| becomes |" in document
    assert "gpus" in document


@pytest.mark.parametrize("head", [b"", b"\n\n", b"\0" * 600, b"MIT License\n", b"a,b,c\n1,2,3\n", b'{"k80": {}}', b"[1, 2]"])
def test_other_content_is_not_recognised(head: bytes) -> None:
    assert recognise(head) is None


def test_itp_row_becomes_a_job(tmp_path: Path) -> None:
    assert only(tmp_path, ITP) == TraceJob(Job("965d744f", 1932025.0, 64, 2429.0))


def test_tiresias_row_has_a_duration_and_no_steps(tmp_path: Path) -> None:
    assert only(tmp_path, TIRESIAS) == TraceJob(Job("0", 30.0, 8, 164.0, model="vgg19"))


def test_columns_may_stand_in_any_order_with_others_between(tmp_path: Path) -> None:
    text = "duration,extra,num_gpu,job_id,submission_time\n2429,x,64,965d744f,1932025\n"
    assert only(tmp_path, text) == only(tmp_path, ITP)


def test_philly_csv_time_is_utc_and_cluster_is_tenant(tmp_path: Path) -> None:
    assert only(tmp_path, PHILLY_CSV) == TraceJob(Job("0", 1507532515.0, 2, 66.0, tenant="11cb48"))


def test_durations_and_sizes_alone_are_jobs_submitted_at_0(tmp_path: Path) -> None:
    assert only(tmp_path, "duration_s,num_gpus\n860662,2\n") == TraceJob(Job("0", 0.0, 2, 860662.0))


def test_helios_published_columns_become_a_job(tmp_path: Path) -> None:
    want = TraceJob(Job("1425512", 1591728087.0, 4, 249.0, tenant="vchbv"), JobOutcome.FAILED)
    assert only(tmp_path, HELIOS) == want


def test_helios_cut_columns_become_a_job(tmp_path: Path) -> None:
    assert only(tmp_path, HELIOS_CUT) == TraceJob(Job("0", 1506842188.0, 1, 348.0, tenant="103959"))


@pytest.mark.parametrize(
    ("state", "outcome"),
    [
        ("COMPLETED", JobOutcome.PASSED),
        ("Pass", JobOutcome.PASSED),
        ("CANCELLED", JobOutcome.KILLED),
        ("CANCELLED by 17", JobOutcome.KILLED),
        ("TIMEOUT", JobOutcome.FAILED),
        ("NODE_FAIL", JobOutcome.FAILED),
    ],
)
def test_helios_state_is_the_outcome(state: str, outcome: JobOutcome, tmp_path: Path) -> None:
    assert only(tmp_path, HELIOS.replace("FAILED", state)).outcome is outcome


def test_helios_jobs_without_gpu_or_end_are_left_out_and_counted(tmp_path: Path) -> None:
    row = HELIOS.splitlines()[1]
    cpu_only = row.replace("1425512", "2").replace(",4,16,", ",0,16,")
    suspended = row.replace("1425512", "3").replace("FAILED", "SUSPENDED")
    trace = read(tmp_path, HELIOS + cpu_only + "\n" + suspended + "\n")
    assert len(trace.jobs) == 1
    assert trace.notes == (
        "jobs left out because they are suspended where the log ends: 1",
        "jobs left out because they ask for no GPU: 1",
    )


def test_alibaba_pod_becomes_a_job_with_a_whole_gpu(tmp_path: Path) -> None:
    trace = read(tmp_path, ALIBABA)
    want = Job("pod-1", 100.0, 1, 700.0, tenant="LS", gpu_types=("v100m16", "v100m32"))
    assert trace.jobs == (TraceJob(want, JobOutcome.FAILED),)
    assert trace.notes == ("pods that ask for a part of a GPU and get a whole one: 1",)


def test_alibaba_pod_never_scheduled_lasts_from_its_creation(tmp_path: Path) -> None:
    assert only(tmp_path, ALIBABA.replace("1000,300", "1000,")).job.duration == 900.0


def test_alibaba_pods_without_gpu_or_end_are_left_out_and_counted(tmp_path: Path) -> None:
    rest = "p2,1,1,0,0,,LS,Running,0,9,0\np3,1,1,1,1000,,LS,Running,0,,0\n"
    trace = read(tmp_path, ALIBABA + rest)
    assert len(trace.jobs) == 1
    assert "pods left out because they ask for no GPU: 1" in trace.notes
    assert "pods left out because they have no deletion time: 1" in trace.notes


def test_gavel_row_has_steps_model_and_batch_size_and_no_duration(tmp_path: Path) -> None:
    want = Job("0", 7.5, 4, steps=925982.0, model="ResNet-18", batch_size=128)
    assert only(tmp_path, GAVEL) == TraceJob(want)


def test_gavel_older_form_reads_the_same(tmp_path: Path) -> None:
    assert only(tmp_path, GAVEL_OLD) == only(tmp_path, GAVEL)


def test_gavel_job_type_without_batch_size_is_the_model(tmp_path: Path) -> None:
    job = only(tmp_path, GAVEL.replace("ResNet-18 (batch size 128)", "A3C")).job
    assert (job.model, job.batch_size) == ("A3C", None)


def test_gavel_slo_is_counted_and_weight_is_kept(tmp_path: Path) -> None:
    trace = read(tmp_path, GAVEL.replace("\t1\t-1.000000", "\t5\t1.2"))
    assert (trace.jobs[0].job.weight, trace.jobs[0].job.deadline) == (5.0, None)
    assert trace.notes == ("SLOs left out because the format has no duration to multiply: 1",)


def test_gavel_jobs_are_numbered_by_row_and_sorted_by_arrival(tmp_path: Path) -> None:
    later = GAVEL.replace("\t7.5", "\t9")
    assert [job.job.id for job in read(tmp_path, later + GAVEL).jobs] == ["1", "0"]


def test_shockwave_row_has_steps_and_duration(tmp_path: Path) -> None:
    want = Job("0", 55.0, 2, 1418.0, 134583.0, model="LM", batch_size=10)
    trace = read(tmp_path, SHOCKWAVE)
    assert trace.jobs == (TraceJob(want),)
    assert trace.notes == ("jobs whose changes of batch size are not followed: 1",)


def test_shockwave_slo_is_a_deadline(tmp_path: Path) -> None:
    assert only(tmp_path, SHOCKWAVE.replace("-1.000000", "2")).job.deadline == 55 + 2 * 1418


def test_philly_job_adds_up_its_attempts_and_fails_before_the_last(tmp_path: Path) -> None:
    trace = read(tmp_path, PHILLY)
    want = TraceJob(
        Job("a1", SUBMITTED, 3, 74.0 + 120.0, tenant="ee9e8c"), JobOutcome.KILLED, (FailedAttempt(74.0, "unknown"),)
    )
    assert trace.jobs == (want,)
    assert trace.notes == ("a job's duration is the sum of the run times of its attempts",)


def test_philly_flat_shape_is_one_attempt(tmp_path: Path) -> None:
    assert only(tmp_path, PHILLY_FLAT) == TraceJob(Job("a1", SUBMITTED, 4, 60.0, tenant="v"), JobOutcome.FAILED)


def test_philly_shape_without_status_has_passed(tmp_path: Path) -> None:
    want = TraceJob(Job("a1", SUBMITTED, 8, 70.0), JobOutcome.PASSED, (FailedAttempt(10.0, "unknown"),))
    assert only(tmp_path, PHILLY_ATTEMPTS) == want


@pytest.mark.parametrize(
    ("attempts", "note"),
    [
        ("[]", "jobs left out because they have no attempt: 1"),
        (
            '[{"start_time": "2017-10-07 01:12:09", "end_time": null, "detail": [{"gpus": ["g"]}]}]',
            "jobs left out because their last attempt has no end: 1",
        ),
        (
            '[{"start_time": "None", "end_time": "2017-10-07 01:12:09", "detail": [{"gpus": ["g"]}]}]',
            "jobs left out because no attempt of theirs has a start and an end: 1",
        ),
        (
            '[{"start_time": "2017-10-07 01:12:09", "end_time": "2017-10-07 01:12:10", "detail": []}]',
            "jobs left out because they have no GPU: 1",
        ),
        (
            '[{"start_time": "2017-10-07 02:12:09", "end_time": "2017-10-07 01:12:10", "detail": [{"gpus": ["g"]}]}]',
            "attempts left out because they end before they start: 1",
        ),
    ],
)
def test_philly_jobs_without_what_is_needed_are_left_out_and_counted(attempts: str, note: str, tmp_path: Path) -> None:
    bare = f'{{"jobid": "b", "vc": "v", "submitted_time": "2017-10-07 01:11:39", "attempts": {attempts}}}'
    trace = read(tmp_path, PHILLY.replace("\n]", f", {bare}]"))
    assert [job.job.id for job in trace.jobs] == ["a1"]
    assert note in trace.notes


def test_poise_row_keeps_every_column(tmp_path: Path) -> None:
    text = (
        '{"job": 7, "submitted": 1, "gpus": 4, "duration": 60, "steps": 9, "tenant": "t", "app": "a", "model": "m",'
        ' "batch_size": 32, "weight": 2, "priority": -1, "deadline": 99, "gpu_types": ["V100", "p100"], "min_gpus": 2,'
        ' "max_gpus": 8, "name": "n", "outcome": "killed", "failures": [[3, "x"], [4.5, "y"]],'
        ' "loss": [0.01, 1, 0.2]}\n'
    )
    want = Job(
        "7", 1.0, 4, 60.0, 9.0, "t", "a", "m", 32, 2.0, -1, 99.0, ("v100", "p100"), 2, 8, None, "n"
    )  # fmt: skip
    failures = (FailedAttempt(3.0, "x"), FailedAttempt(4.5, "y"))
    assert only(tmp_path, text) == TraceJob(want, JobOutcome.KILLED, failures, LossCurve(0.01, 1.0, 0.2))


def test_poise_row_with_micro_batches_may_leave_the_gang_out(tmp_path: Path) -> None:
    text = '{"job": "a", "submitted": 1, "duration": 60, "micro_batches": 8, "gpus": null, "sync": 0.5}\n'
    assert only(tmp_path, text).job == Job("a", 1.0, 8, 60.0, micro_batches=8, sync=0.5)
    csv = "job,submitted,micro_batches,duration,sync\na,1,8,60,0.5\n"
    assert only(tmp_path, csv) == only(tmp_path, text)
    assert only(tmp_path, text.replace("null", "2")).job == Job("a", 1.0, 2, 60.0, micro_batches=8, sync=0.5)


def test_poise_row_with_micro_batches_is_written_as_it_was_read(tmp_path: Path) -> None:
    jobs = [
        Job("a", 1.0, 8, 60.0, micro_batches=8),
        Job("b", 1.0, 2, 60.0, micro_batches=1_000_000, sync=0.25),
        Job("c", 1.0, 1_000_000, steps=3.0, model="m", micro_batches=1, gpu_types=("k80",)),
    ]
    with (tmp_path / "t").open("w") as stream:
        write_trace(Trace("t", tuple(map(TraceJob, jobs))), stream)
    assert [each.job for each in read_trace(str(tmp_path / "t")).jobs] == jobs


def test_poise_row_with_types_that_are_null_may_run_on_any(tmp_path: Path) -> None:
    assert only(tmp_path, POISE.replace("60}", '60, "gpu_types": null}')).job.gpu_types == ()


def test_poise_csv_reads_as_json_lines_do(tmp_path: Path) -> None:
    csv = (
        "job,submitted,gpus,duration,tenant,gpu_types,failures,outcome,steps,name,loss\n"
        'a,1,4,60,t,v100/p100,3:x/4.5:y,failed,,"n, and more",0.01/1/0.2\n'
    )
    json = (
        '{"job": "a", "submitted": 1, "gpus": 4, "duration": 60, "tenant": "t", "gpu_types": ["v100", "p100"],'
        ' "failures": [[3, "x"], [4.5, "y"]], "outcome": "failed", "steps": null, "name": "n, and more",'
        ' "loss": [0.01, 1, 0.2]}\n'
    )
    assert only(tmp_path, csv) == only(tmp_path, json)


def test_text_may_have_a_byte_order_mark_and_windows_line_ends_and_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_bytes(b"\xef\xbb\xbf" + ITP.replace("\n", "\r\n\r\n").encode())
    assert read_trace(str(path)).jobs == read(tmp_path, ITP).jobs


def test_whole_number_may_be_written_with_a_point(tmp_path: Path) -> None:
    assert only(tmp_path, ITP.replace(",64", ",64.0")).job.gpus == 64


@pytest.mark.parametrize("name", [each.name for each in FORMATS if each.name != "poise"])
def test_every_format_says_where_its_data_is(name: str) -> None:
    """Published data has an address, a licence and a size; what comes from a cluster of one's own has a manual."""
    page = (Path(__file__).parents[2] / "docs" / "reference" / "traces.md").read_text(encoding="utf-8")
    section = page.partition(f"### {name}\n")[2].partition("\n### ")[0].partition("\n## ")[0]
    (data,) = re.findall(r"^\*\*Data\.\*\* (?:.+\n)+", section + "\n", re.MULTILINE)
    assert re.search(r"\]\(https://\S+\)", data)
    own = name in ("sacct", "kubernetes")
    assert own == data.startswith("**Data.** Your own")
    assert own or (re.search(r"[Ll]icence", data) and re.search(r"\d [kMG]B", data))
