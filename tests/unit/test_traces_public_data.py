"""The readers on the public traces themselves, against published counts; skipped where those are not at hand."""

from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from poise.lab.traces import philly_shape
from poise.lab.traces.reader import read_trace
from poise.lab.traces.schema import JobOutcome, Trace
from poise.scheduler.model.errors import TraceError

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not DATA.is_dir(), reason=f"no public traces at {DATA}")]


@cache
def load(name: str, format: str = "auto") -> Trace:
    path = DATA / name
    if not path.exists():
        pytest.skip(f"no {path}")
    trace = read_trace(str(path), format=format)
    times = [each.job.submitted for each in trace.jobs]
    assert times == sorted(times)
    return trace


def gpu_seconds(trace: Trace) -> float:
    return sum(each.job.gpus * (each.job.duration or 0.0) for each in trace.jobs)


def sizes(trace: Trace) -> Counter[int]:
    return Counter(each.job.gpus for each in trace.jobs)


def test_itp_has_its_jobs_and_gpu_hours() -> None:
    trace = load("microsoft-itp/raw-traces.tar.gz")
    assert len(trace.jobs) == 69_351
    assert gpu_seconds(trace) / 3600 == pytest.approx(1_632_719.7, abs=0.05)
    assert {each.job.id.split("/")[0] for each in trace.jobs} == {f"cluster{index:02d}" for index in range(1, 11)}
    assert all(each.job.gpus & (each.job.gpus - 1) == 0 for each in trace.jobs)
    assert trace.notes[-1] == "files left out because they are no itp trace: 1 (LICENSE)"


def test_philly_csv_has_its_jobs_sizes_tenants_and_gpu_hours() -> None:
    trace = load("philly/philly_passed_jobs.csv")
    assert len(trace.jobs) == philly_shape.JOBS
    assert sizes(trace) == philly_shape.GPUS
    assert round(gpu_seconds(trace) / 3600) == 978_078
    tenants = Counter(each.job.tenant for each in trace.jobs)
    assert tuple(sorted(tenants.values(), reverse=True)) == philly_shape.TENANTS
    first, last = trace.jobs[0].job.submitted, trace.jobs[-1].job.submitted
    assert last - first == philly_shape.SPAN


@pytest.mark.parametrize(
    ("low", "high", "bucket", "jobs"),
    [
        (1, 1, philly_shape.BUCKETS[0], 76_627),
        (2, 4, philly_shape.BUCKETS[1], 3_688),
        (5, 8, philly_shape.BUCKETS[2], 1_643),
        (9, 128, philly_shape.BUCKETS[3], 289),
    ],
)
def test_philly_csv_durations_are_the_published_quantiles(
    low: int, high: int, bucket: philly_shape.Bucket, jobs: int
) -> None:
    trace = load("philly/philly_passed_jobs.csv")
    minutes = sorted((each.job.duration or 0) / 60 for each in trace.jobs if low <= each.job.gpus <= high)
    assert len(minutes) == jobs
    got = tuple(round(minutes[int(p * (jobs - 1))], 1) for p in philly_shape.PROBABILITIES)
    assert got == bucket.quantiles
    assert round(sum(minutes) / jobs, 1) == bucket.mean


def test_philly_log_with_placement_has_its_jobs_and_outcomes() -> None:
    trace = load("philly/dre_sampled_jobs.older.json")
    assert Counter(each.outcome for each in trace.jobs) == {JobOutcome.PASSED: 3_172, JobOutcome.FAILED: 2_738}
    assert len({each.job.tenant for each in trace.jobs}) == 11
    want = {4: 2569, 8: 2361, 2: 507, 16: 336, 32: 100, 24: 20, 64: 8, 12: 6, 128: 3}
    assert sizes(trace) == want
    assert sum(want.values()) == 5_910


def test_philly_log_with_attempts_has_its_jobs_and_retries() -> None:
    trace = load("philly/marwage_jobs_attempts.json")
    assert len(trace.jobs) == 3_034
    assert Counter(len(each.failures) for each in trace.jobs) == {0: 2218, 1: 442, 2: 180, 3: 122, 4: 72}
    assert all(sum(failure.after for failure in each.failures) <= (each.job.duration or 0) for each in trace.jobs)
    first = next(each for each in trace.jobs if each.job.id == "application_1506638472019_14199")
    assert (first.job.gpus, first.job.duration) == (8, 74.0 + 193_182.0)


def test_philly_folder_reads_the_chosen_format_only() -> None:
    trace = load("philly", "philly")
    assert len(trace.jobs) == 5_910 + 3_034
    assert any(each.job.id.startswith("dre_sampled_jobs.older/") for each in trace.jobs)


def test_tiresias_has_its_jobs_and_gpu_seconds() -> None:
    trace = load("tiresias/60_job.csv")
    assert sizes(trace) == {1: 30, 2: 10, 4: 10, 8: 10}
    assert gpu_seconds(trace) == 26_624
    assert trace.jobs[-1].job.submitted == 1779
    assert all(each.job.model and each.job.steps is None for each in trace.jobs)


@pytest.mark.parametrize(("number", "jobs"), [(1, 1_494), (2, 5_755), (3, 992), (4, 2_638)])
def test_muri_has_its_jobs(number: int, jobs: int) -> None:
    assert len(load(f"muri/muri_trace{number}_job.csv").jobs) == jobs


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("max_min_fairness", {1: 59, 2: 19, 4: 18}),
        ("minimize_makespan", {1: 71, 2: 6, 4: 23}),
        ("small_test", None),
        ("philly_multi_120_lam4500_s0", None),
        ("philly_multi_300_lam1500_s0", None),
        ("philly_single_120_lam2700_s0", {1: 120}),
        ("philly_single_300_lam800_s0", {1: 300}),
        ("philly_single_500_lam600_s0", {1: 500}),
        ("static_multi_100_s0", None),
        ("static_single_100_s0", {1: 100}),
    ],
)
def test_gavel_has_its_jobs(name: str, want: dict[int, int] | None) -> None:
    trace = load(f"gavel/{name}.trace")
    assert all(each.job.model and each.job.steps and each.job.duration is None for each in trace.jobs)
    assert all(each.job.batch_size or each.job.model in ("A3C", "CycleGAN") for each in trace.jobs)
    assert want is None or sizes(trace) == want
    if name == "max_min_fairness":
        assert sum(each.job.submitted == 0 for each in trace.jobs) == 36
        assert trace.jobs[-1].job.submitted == 46_317


def test_gavel_folder_is_merged_without_what_is_no_trace() -> None:
    trace = load("gavel")
    assert len(trace.jobs) == 1_756
    left_out = "LICENSE, physical_cluster_throughputs.json, simulation_throughputs.json"
    assert trace.notes[-1] == f"files left out because they are no gavel trace: 3 ({left_out})"


def test_shockwave_has_its_jobs() -> None:
    trace = load("shockwave/120_0.2_5_100_40_25.multigpu_dynamic.trace")
    assert len(trace.jobs) == 120
    assert all(each.job.steps and each.job.duration for each in trace.jobs)


def test_helios_has_its_jobs() -> None:
    trace = load("helios/philly_cut_cluster_log.csv")
    assert sizes(trace) == {1: 526, 2: 5, 4: 59}
    assert Counter(each.job.tenant for each in trace.jobs) == {"103959": 349, "ed69ec": 241}


def test_alibaba_has_its_pods() -> None:
    trace = load("alibaba-gpu-v2023/openb_pod_list_default.csv")
    assert sizes(trace) == {1: 6_989, 2: 16, 4: 15, 8: 44}
    assert trace.notes == (
        "pods left out because they ask for no GPU: 1,088",
        "pods never scheduled, whose duration is counted from their creation: 861",
        "pods that ask for a part of a GPU and get a whole one: 3,078",
    )


@pytest.mark.parametrize("name", ["acme", "lambda-benchmark", "gavel/simulation_throughputs.json", "gavel/LICENSE"])
def test_data_that_is_no_trace_is_refused(name: str) -> None:
    if not (DATA / name).exists():
        pytest.skip(f"no {DATA / name}")
    with pytest.raises(TraceError, match=r"expected .*trace in a known format"):
        read_trace(str(DATA / name))
