"""Laws of the readers: what is written is read, garbage is refused and never worse, order does not matter."""

import gzip
import io
import json
import lzma
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poise.lab.traces.formats.poise import write_trace
from poise.lab.traces.reader import read_trace
from poise.lab.traces.registry import FORMATS, format_names
from poise.lab.traces.schema import FailedAttempt, JobOutcome, LossCurve, Trace, TraceJob
from poise.lab.traces.synthetic import KNOBS, generate
from poise.scheduler.model.errors import RequestError
from poise.scheduler.model.job import Job

names = st.text(st.characters(exclude_categories=("C", "Z"), include_characters=" "), min_size=1, max_size=8)
amounts = st.floats(0, 1e12) | st.integers(0, 10**12).map(float)
gangs = st.integers(1, 1_000_000)


def maybe(strategy: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    return st.none() | strategy


@st.composite
def trace_jobs(draw: st.DrawFn) -> TraceJob:
    least, gpus, most = sorted(draw(st.tuples(gangs, gangs, gangs)))
    duration = draw(maybe(amounts))
    micro_batches = draw(maybe(gangs))
    job = Job(
        draw(names),
        draw(amounts),
        gpus,
        duration,  # type: ignore[arg-type]
        draw(amounts if duration is None else maybe(amounts)),  # type: ignore[arg-type]
        draw(names),
        draw(maybe(names)),  # type: ignore[arg-type]
        draw(maybe(names)),  # type: ignore[arg-type]
        draw(maybe(gangs)),  # type: ignore[arg-type]
        draw(st.floats(1e-9, 1e9)),
        draw(st.integers(-(10**15), 10**15)),
        draw(maybe(amounts)),  # type: ignore[arg-type]
        tuple(name.lower() for name in draw(st.lists(st.from_regex(r"[a-z0-9]{1,5}", fullmatch=True), max_size=3))),
        draw(maybe(st.just(least))) if micro_batches is None else None,  # type: ignore[arg-type]
        draw(maybe(st.just(most))) if micro_batches is None else None,  # type: ignore[arg-type]
        micro_batches,  # type: ignore[arg-type]
        draw(maybe(names)),  # type: ignore[arg-type]
        0.0 if micro_batches is None else draw(amounts),
    )
    failures = draw(st.lists(st.builds(FailedAttempt, amounts, names), max_size=2))
    loss = draw(st.none() | st.builds(LossCurve, amounts, st.floats(1e-9, 1e9), amounts))
    return TraceJob(job, draw(st.sampled_from(JobOutcome)), tuple(failures), loss)


traces = st.lists(trace_jobs(), min_size=1, max_size=5, unique_by=lambda each: each.job.id).map(
    lambda jobs: Trace("t", tuple(sorted(jobs, key=lambda each: each.job.submitted)))
)


def read_bytes(data: bytes, format: str = "auto") -> Trace:
    stdin = SimpleNamespace(buffer=io.BytesIO(data))
    with patch.object(sys, "stdin", stdin):
        return read_trace("-", format=format)


def written(trace: Trace) -> bytes:
    stream = io.StringIO()
    write_trace(trace, stream)
    return stream.getvalue().encode()


def check_refused_or_read(data: bytes, format: str) -> None:
    """Anything but a trace with jobs or a RequestError on one line is a bug of ours."""
    message = refusal_of(lambda: read_bytes(data, format))
    assert "\n" not in message


def refusal_of(make: Callable[[], Trace]) -> str:
    """What a RequestError says; nothing if there is a trace. Any other error goes through."""
    try:
        trace = make()
    except RequestError as refused:
        return str(refused)
    assert trace.jobs
    return ""


SAMPLES = (
    b'{"job": "a", "submitted": 0, "gpus": 1, "duration": 5, "failures": [[1, "x"]]}\n',
    b"job,submitted,gpus,duration,gpu_types\na,0,1,5,k80/p100\n",
    b"A3C (batch size 4)\tc\td\t-n\t1\t10\t1\t1\t-1\t0\n",
    b"A3C\tc\td\t-n\t1\t10\t1\tgns\t1\t-1\t60\t0\n",
    b"job_id,num_gpu,submit_time,iterations,model_name,duration,interval\n0,1,0,606,vgg19,164,30\n",
    b'[{"jobid": "a", "vc": "v", "status": "Pass", "submitted_time": "2017-10-07 01:11:39", "attempts": [{"start_time":'
    b' "2017-10-07 01:12:09", "end_time": "2017-10-07 01:13:23", "detail": [{"ip": "m", "gpus": ["gpu0"]}]}]}]',
    b"timestamp,duration,num_gpus,gpu_time,cluster\n2017-10-09 07:01:55,66.0,2,132.0,11cb48\n",
    b"job_id,submission_time,duration,num_gpu\na,1,2,3\n",
    b"job_id,user,vc,gpu_num,cpu_num,state,submit_time,duration\n1,u,v,1,4,Pass,2017-10-01 07:16:28,348\n",
    b"name,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time\np,1,460,A|B,LS,Failed,1,9,3\n",
    b"JobID|Cluster|Submit|Eligible|Start|Elapsed|End|State|AllocTRES|ReqTRES|NNodes\n7_1|c|2026-01-02T03:04:05|Unknown|"
    b"2026-01-02T03:05:05|1-00:00:10|2026-01-03T03:05:15|CANCELLED by 0|gres/gpu:a100=2,gres/gpu=2|gres/gpu=2|1\n",
    b'{"jobs": [{"association": {}, "allocation_nodes": 1, "job_id": 7, "state": {"current": ["FAILED"]}, "time": {"end": 9,'
    b' "submission": {"set": true, "number": 5}, "start": 6}, "tres": {"allocated": [{"type": "gres", "name": "gpu",'
    b' "count": 2}]}}]}',
    b'{"apiVersion": "v1", "items": [{"apiVersion": "v1", "kind": "Pod", "metadata": {"creationTimestamp":'
    b' "2026-01-02T03:04:05Z", "name": "a", "uid": "u"}, "spec": {"containers": [{"resources": {"limits": {"nvidia.com/gpu":'
    b' "4"}}}]}, "status": {"phase": "Failed", "startTime": "2026-01-02T03:05:05Z", "containerStatuses": [{"state":'
    b' {"terminated": {"finishedAt": "2026-01-02T03:05:15Z"}}}]}}]}',
)


def archived(data: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in ("a", "b"):
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


PACKED = tuple(
    pack(sample)
    for sample in (SAMPLES[0], SAMPLES[7])
    for pack in (gzip.compress, lzma.compress, archived, lambda data: gzip.compress(archived(data)))
)


@pytest.mark.slow
@given(traces)
@settings(max_examples=2 * settings().max_examples)
def test_what_is_written_is_read_again(trace: Trace) -> None:
    assert read_bytes(written(trace)).jobs == trace.jobs


@given(traces)
@settings(max_examples=settings().max_examples * 5 // 8)
def test_packing_does_not_change_a_trace(trace: Trace) -> None:
    data = written(trace)
    assert read_bytes(gzip.compress(data)) == read_bytes(lzma.compress(data)) == read_bytes(data)


@given(st.binary(max_size=300), st.sampled_from(format_names()))
@settings(max_examples=4 * settings().max_examples)
def test_random_bytes_are_refused_or_read(data: bytes, format: str) -> None:
    check_refused_or_read(data, format)


@given(st.text(max_size=200), st.sampled_from(format_names()))
def test_random_text_is_refused_or_read(text: str, format: str) -> None:
    check_refused_or_read(text.encode(errors="surrogatepass"), format)


@given(st.sampled_from(SAMPLES), st.data())
@settings(max_examples=5 * settings().max_examples)
def test_spoilt_traces_are_refused_or_read(sample: bytes, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(sample)))
    spoilt = sample[:at] + data.draw(st.binary(max_size=4)) + sample[at + data.draw(st.integers(0, 4)) :]
    check_refused_or_read(spoilt, data.draw(st.sampled_from(format_names())))


@given(st.sampled_from(PACKED), st.data())
@settings(max_examples=5 * settings().max_examples)
def test_spoilt_packing_is_refused_or_read(sample: bytes, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(sample) - 1))
    spoilt = sample[:at] + data.draw(st.binary(max_size=3)) + sample[at + data.draw(st.integers(0, 3)) :]
    check_refused_or_read(spoilt, "auto")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
KEYS = ("job", "submitted", "gpus", "duration", "gpu_types", "failures", "loss", "outcome", "weight", "min_gpus", "jobid",
        "submitted_time", "attempts", "start_time", "end_time", "detail", "num_gpus", "vc", "status", "id")  # fmt: skip


@given(st.dictionaries(st.sampled_from(KEYS), json_values, max_size=6), st.sampled_from(("auto", "poise", "philly")))
@settings(max_examples=4 * settings().max_examples)
def test_any_json_is_refused_or_read(record: dict[str, object], format: str) -> None:
    good = {"job": "a", "submitted": 0, "gpus": 1, "duration": 5} if format == "poise" else {}
    check_refused_or_read(json.dumps(good | record).encode(), format)


@given(st.text(max_size=300))
def test_no_text_is_of_two_formats(text: str) -> None:
    assert sum(known.sniff(text) for known in FORMATS) <= 1


@given(st.lists(st.lists(st.integers(0, 5), max_size=4), min_size=2, max_size=4), st.randoms())
@settings(max_examples=settings().max_examples * 5 // 4)
def test_merging_does_not_depend_on_the_order_of_files_in_an_archive(files: list[list[int]], shuffle: object) -> None:
    header = "job_id,submission_time,duration,num_gpu\n"
    rows = ["".join(f"{index},{time},1,1\n" for index, time in enumerate(file)) for file in files]
    members = [(f"f{index}.csv", (header + body + "x,0,1,1\n").encode()) for index, body in enumerate(rows)]
    with TemporaryDirectory() as folder:
        for name, data in members:
            (Path(folder) / name).write_bytes(data)
        want = read_trace(folder).jobs
    shuffle.shuffle(members)  # type: ignore[attr-defined]
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in members:
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    assert read_bytes(buffer.getvalue()).jobs == want
    assert list(want) == sorted(want, key=lambda each: each.job.submitted)


specs = st.fixed_dictionaries(
    {"jobs": st.integers(1, 50).map(str), "seed": st.integers(0, 2**63 - 1).map(str)},
    optional={
        "arrivals": st.sampled_from(("poisson", "uniform", "daily", "bursty", "at-once")),
        "rate": st.sampled_from(("philly", "0.5", "1000")),
        "sizes": st.sampled_from(("philly", "gavel", "1:0.5/32:2", "3")),
        "durations": st.sampled_from(("philly", "gavel", "lognormal:60:2", "exponential:9", "fixed:1")),
        "tenants": st.sampled_from(("philly", "1", "7")),
        "models": st.sampled_from(("none", "a", "a/b/c")),
        "failures": st.sampled_from(("0", "1", "0.3", "philly")),
    },
).map(lambda knobs: ",".join(f"{name}={value}" for name, value in knobs.items()))


@given(specs)
def test_same_specification_gives_the_same_sound_trace(spec: str) -> None:
    trace = generate(spec)
    assert generate(spec) == trace
    assert read_bytes(written(trace)).jobs == trace.jobs
    times = [each.job.submitted for each in trace.jobs]
    assert times == sorted(times)


@given(st.text("abcjobsed=,:/.-0123456789philygavel", max_size=40))
@settings(max_examples=4 * settings().max_examples)
def test_any_specification_is_refused_or_generated(body: str) -> None:
    knobs = [knob.name for knob in KNOBS if knob.name != "jobs"]
    for spec in (f"jobs=5,{body}", *(f"jobs=5,{knob}={body}" for knob in knobs)):
        assert "\n" not in refusal_of(lambda spec=spec: generate(spec))  # type: ignore[misc]
