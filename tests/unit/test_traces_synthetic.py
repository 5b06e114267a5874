"""The generator: the published shape, one knob one column, and clear words for a wrong knob."""

from collections import Counter
from dataclasses import replace
from importlib.resources import files
from io import StringIO

import numpy as np
import pytest

from poise.lab.traces import philly_shape
from poise.lab.traces.formats.poise import write_trace
from poise.lab.traces.schema import JobOutcome, Trace, TraceJob
from poise.lab.traces.synthetic import DEMO_SPEC, KNOBS, demo_trace, generate
from poise.scheduler.model.errors import RequestError, UnknownNameError


def column(trace: Trace, name: str) -> list[object]:
    return [getattr(each.job, name) for each in trace.jobs]


def seconds(trace: Trace) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array([each.job.duration for each in trace.jobs], float)


def times(spec: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array([each.job.submitted for each in generate(spec).jobs])


def test_default_is_what_the_knobs_say() -> None:
    spelt_out = generate(",".join(f"{knob.name}={knob.default}" for knob in KNOBS))
    assert generate("synthetic:").jobs == spelt_out.jobs
    assert len(spelt_out.jobs) == 1000


def test_name_is_the_specification() -> None:
    assert generate("jobs=2").name == generate("synthetic:jobs=2").name == "synthetic:jobs=2"


def test_longer_trace_begins_with_the_shorter_one() -> None:
    assert generate("jobs=500,failures=philly").jobs[:100] == generate("jobs=100,failures=philly").jobs


def test_default_sizes_and_tenants_are_in_the_published_proportion() -> None:
    trace = generate("jobs=50000")
    gpus = Counter(each.job.gpus for each in trace.jobs)
    buckets = [sum(gpus[size] for size in gpus if low <= size <= high) for low, high in ((1, 1), (2, 4), (5, 8), (9, 999))]
    want = (93.17, 4.48, 2.00, 0.35)
    assert [100 * each / 50_000 for each in buckets] == pytest.approx(want, abs=0.3)
    assert set(gpus) <= set(philly_shape.GPUS)
    tenants = Counter(each.job.tenant for each in trace.jobs)
    assert tenants["vc-01"] / 50_000 == pytest.approx(philly_shape.TENANTS[0] / philly_shape.JOBS, abs=0.01)


@pytest.mark.parametrize(("gpus", "bucket"), list(zip((1, 4, 8, 64), philly_shape.BUCKETS, strict=True)))
def test_philly_durations_have_the_published_quantiles_and_mean(gpus: int, bucket: philly_shape.Bucket) -> None:
    even = (np.arange(100_000) + 0.5) / 100_000
    minutes = philly_shape.durations(np.full(len(even), gpus), even) / 60
    assert np.quantile(minutes, philly_shape.PROBABILITIES) == pytest.approx(bucket.quantiles, rel=2e-3)
    assert minutes.mean() == pytest.approx(bucket.mean, rel=1e-3)
    assert minutes.min() >= 1 / 60
    assert (np.diff(minutes) >= 0).all()


@pytest.mark.slow
def test_drawn_philly_durations_have_the_published_median_and_mean() -> None:
    minutes = seconds(generate("jobs=100000,sizes=1")) / 60
    assert np.median(minutes) == pytest.approx(18.6, rel=0.03)
    assert minutes.mean() == pytest.approx(138.4, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("arrivals", ["poisson", "uniform", "daily", "bursty"])
def test_arrivals_come_at_the_rate_and_in_order(arrivals: str) -> None:
    got = times(f"jobs=40000,rate=60,arrivals={arrivals}")
    assert got[-1] / 3600 == pytest.approx(40_000 / 60, rel=0.05)
    assert (np.diff(got) >= 0).all()
    assert got[0] >= 0


@pytest.mark.slow
def test_default_rate_is_the_published_one() -> None:
    assert times("jobs=82247")[-1] == pytest.approx(philly_shape.SPAN, rel=0.02)


@pytest.mark.slow
def test_daily_arrivals_are_fewest_at_night() -> None:
    hours = (times("jobs=40000,rate=60,arrivals=daily") / 3600 % 24).astype(int)
    counts = np.bincount(hours, minlength=24)
    assert counts[2] < 0.4 * counts.mean()
    assert counts[14] > 1.6 * counts.mean()


@pytest.mark.slow
def test_bursty_gaps_vary_more_than_poisson_gaps() -> None:
    gaps = {kind: np.diff(times(f"jobs=20000,arrivals={kind}")) for kind in ("poisson", "bursty")}
    spread = {kind: each.std() / each.mean() for kind, each in gaps.items()}
    assert spread["poisson"] == pytest.approx(1, abs=0.05)
    assert spread["bursty"] > 3


def test_at_once_arrivals_are_all_at_the_start() -> None:
    assert set(times("arrivals=at-once")) == {0.0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("durations", "median", "mean"),
    [
        ("lognormal:900:1", 900, 900 * np.exp(0.5)),
        ("exponential:600", 600 * np.log(2), 600),
        ("fixed:42", 42, 42),
        ("gavel", 60 * 10 ** (1.5 + 1.5 * 0.625), None),
    ],
)
def test_durations_are_of_the_kind_asked_for(durations: str, median: float, mean: float | None) -> None:
    got = seconds(generate(f"jobs=50000,durations={durations}"))
    assert np.median(got) == pytest.approx(median, rel=0.03)
    assert mean is None or got.mean() == pytest.approx(mean, rel=0.03)


def test_sizes_weights_tenants_and_models_are_in_the_shares_asked_for() -> None:
    trace = generate("jobs=20000,sizes=1:3/16:1,weights=1:0.8/5:0.2,tenants=2,models=a/b")
    for name, value, want in (
        ("gpus", 16, 1 / 4),
        ("weight", 5.0, 1 / 5),
        ("tenant", "tenant-2", 1 / 3),
        ("model", "b", 1 / 2),
    ):
        assert column(trace, name).count(value) / 20_000 == pytest.approx(want, abs=0.02), name


def test_gavel_sizes_are_as_published() -> None:
    gpus = Counter(column(generate("jobs=20000,sizes=gavel"), "gpus"))
    assert [gpus[size] / 20_000 for size in (1, 2, 4, 8)] == pytest.approx([0.7, 0.1, 0.15, 0.05], abs=0.015)


@pytest.mark.parametrize(
    ("knob", "changed"),
    [
        ("arrivals=bursty", {"submitted"}),
        ("rate=5", {"submitted"}),
        ("sizes=gavel", {"gpus", "duration"}),
        ("durations=gavel", {"duration"}),
        ("tenants=3", {"tenant"}),
        ("models=a/b", {"model"}),
        ("weights=1/2", {"weight"}),
        ("failures=0.5", {"failures", "duration"}),
        ("failures=philly", {"failures", "outcome", "duration"}),
    ],
)
def test_one_knob_changes_its_own_column_alone(knob: str, changed: set[str]) -> None:
    before, after = generate("jobs=300"), generate(f"jobs=300,{knob}")
    names = ("submitted", "gpus", "duration", "tenant", "model", "weight")
    got = {name for name in names if column(before, name) != column(after, name)}
    got |= {name for name in ("outcome", "failures") if [getattr(each, name) for each in before.jobs] != [getattr(each, name) for each in after.jobs]}  # fmt: skip  # noqa: E501
    assert got == changed


def test_without_sweeps_no_job_has_an_app_or_a_loss() -> None:
    assert {(each.job.app, each.loss) for each in generate("jobs=50").jobs} == {(None, None)}


def test_jobs_of_a_sweep_come_together_and_are_alike_but_for_their_losses() -> None:
    jobs = generate("jobs=800,apps=0.2:5,models=a/b,weights=1/2").jobs
    sweeps: dict[str, list[TraceJob]] = {}
    for each in jobs:
        if each.job.app is not None:
            sweeps.setdefault(each.job.app, []).append(each)
    *whole, last = sweeps.values()
    assert {len(sweep) for sweep in whole} == {5}
    assert len(last) <= 5
    assert 5 * len(sweeps) / 800 == pytest.approx(5 * 0.2 / (5 * 0.2 + 0.8), abs=0.1)
    for sweep in whole:
        alike = {replace(each.job, id="") for each in sweep}
        assert len(alike) == 1
        assert len({each.loss for each in sweep}) == 5


def test_losses_fall_from_1_to_5_above_their_floors_to_within_a_third() -> None:
    for each in generate("jobs=64,apps=1").jobs:
        assert each.loss is not None
        assert 1 <= each.loss.loss(0) - each.loss.floor <= 5
        assert 0 < each.loss.loss(each.job.duration or 0.0) - each.loss.floor < 1 / 3


def test_failing_fraction_fails_at_least_once_and_passes_in_the_end() -> None:
    trace = generate("jobs=20000,failures=0.25")
    assert sum(bool(each.failures) for each in trace.jobs) / 20_000 == pytest.approx(0.25, abs=0.01)
    assert {each.outcome for each in trace.jobs} == {JobOutcome.PASSED}


@pytest.mark.slow
def test_philly_failures_have_the_published_statuses_and_causes() -> None:
    trace = generate("jobs=60000,failures=philly")
    statuses = Counter(each.outcome for each in trace.jobs)
    got = [100 * statuses[kind] / 60_000 for kind in (JobOutcome.PASSED, JobOutcome.KILLED, JobOutcome.FAILED)]
    assert got == pytest.approx([69.3, 13.5, 17.2], abs=0.5)
    causes = Counter(failure.cause for each in trace.jobs for failure in each.failures)
    trials = sum(cause.trials for cause in philly_shape.CAUSES)
    for cause in philly_shape.CAUSES[:6]:
        assert causes[cause.name] / causes.total() == pytest.approx(cause.trials / trials, rel=0.1)


def test_failed_attempts_are_of_one_cause_and_shorter_than_the_job_in_all() -> None:
    for each in generate("jobs=3000,failures=0.5").jobs:
        assert sum(failure.after for failure in each.failures) <= (each.job.duration or 0) + 1e-9
        assert len({failure.cause for failure in each.failures}) <= 1
        assert all(failure.after >= 0 for failure in each.failures)


@pytest.mark.parametrize(
    ("spec", "want"),
    [
        ("apps=2", "synthetic:apps: expected a fraction from 0 to 1, got '2'"),
        ("apps=0.5:1", "synthetic:apps: expected a whole number from 2 to 10,000"),
        ("job=5", "unknown knob of a synthetic trace 'job'; did you mean jobs"),
        ("arrivals=posson", "unknown kind of arrivals 'posson'; did you mean poisson"),
        ("jobs", "synthetic: expected knob=value, got 'jobs'; the knobs are jobs, seed, arrivals"),
        ("jobs=1,jobs=2", "synthetic:jobs: expected it once, got it twice"),
        ("jobs=0", "synthetic:jobs: expected a whole number from 1 to 10,000,000, got '0'"),
        ("jobs=many", "synthetic:jobs: expected a whole number from 1 to 10,000,000, got 'many'"),
        ("jobs=11000000", "synthetic:jobs: expected a whole number from 1 to 10,000,000, got '11000000'"),
        ("seed=-1", "synthetic:seed: expected a whole number from 0 to 9,223,372,036,854,775,807, got '-1'"),
        ("rate=0", "synthetic:rate: expected a number above 0, got '0'"),
        ("rate=1e-310", "synthetic:rate: expected jobs an hour that give finite times, got '1e-310'"),
        ("sizes=1.5", "synthetic:sizes: expected whole numbers of GPUs from 1 to 1,000,000, got '1.5'"),
        ("sizes=1:0", "synthetic:sizes: expected shares with a sum above 0, got '1:0'"),
        ("sizes=big", "synthetic:sizes: expected a number, got 'big'"),
        ("durations=long", "synthetic:durations: expected one of philly, gavel, lognormal:MEDIAN:SIGMA"),
        ("durations=fixed:0", "synthetic:durations: expected a number above 0, got '0'"),
        ("durations=fixed", "synthetic:durations: expected one of philly"),
        ("durations=lognormal:1:1e9", "synthetic:durations: expected numbers that give finite durations"),
        ("tenants=0", "synthetic:tenants: expected a whole number from 1 to 10,000, got '0'"),
        ("models=a//b", "synthetic:models: expected a name of printable characters, got nothing"),
        ("weights=0", "synthetic:weights: expected a number above 0, got '0'"),
        ("failures=2", "synthetic:failures: expected philly, or a fraction from 0 to 1, got '2'"),
    ],
)
def test_wrong_knob_or_value_is_refused_in_words(spec: str, want: str) -> None:
    with pytest.raises(RequestError) as caught:
        generate(spec)
    assert str(caught.value).startswith(want)
    assert isinstance(caught.value, UnknownNameError) == want.startswith("unknown")


def test_demo_trace_is_what_its_specification_generates() -> None:
    assert demo_trace().jobs == generate(DEMO_SPEC).jobs


def test_demo_file_is_what_is_written_of_it() -> None:
    again = StringIO()
    write_trace(generate(DEMO_SPEC), again)
    assert files("poise.lab.traces").joinpath("data", "demo.jsonl").read_text() == again.getvalue()


def test_demo_trace_asks_for_a_third_more_than_24_gpus_can_do() -> None:
    trace = demo_trace()
    assert len(trace.jobs) == 240
    assert {each.job.gpus for each in trace.jobs} == {1, 2, 4, 8}
    assert len({each.job.tenant for each in trace.jobs}) == 4
    assert len({each.job.model for each in trace.jobs}) == 7
    span = trace.jobs[-1].job.submitted
    demand = sum(each.job.gpus * (each.job.duration or 0) for each in trace.jobs)
    assert span / 3600 == pytest.approx(8.5, abs=0.1)
    assert demand / (24 * span) == pytest.approx(1.3, abs=0.05)
