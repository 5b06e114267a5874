"""A table bound to a cluster: kinds, estimates, work."""

from dataclasses import replace
from typing import Any

import pytest

from poise.scheduler.model.cluster import Cluster, Node, parse_cluster
from poise.scheduler.model.errors import ThroughputError, UnknownNameError
from poise.scheduler.model.job import Job
from poise.scheduler.model.speed import Locality
from poise.scheduler.throughput.measurements import Alone, Throughputs
from poise.scheduler.throughput.speeds import Speeds
from poise.scheduler.throughput.table import JobClass, shipped

PACKED, RACK = Locality.PACKED, Locality.RACK
TABLE = Throughputs.of(
    "t",
    "v100",
    [
        Alone(JobClass("lm", 5), "v100", 1, PACKED, 10.0),
        Alone(JobClass("lm", 5), "v100", 4, PACKED, 32.0),
        Alone(JobClass("lm", 5), "v100", 4, RACK, 24.0),
        Alone(JobClass("lm", 5), "k80", 1, PACKED, 2.5),
        Alone(JobClass("vgg19", 1), "k80", 4, PACKED, 8.0),
        Alone(JobClass("vgg19", 1), "k80", 4, RACK, 6.0),
        Alone(JobClass("only new"), "b200", 1, PACKED, 7.0),
        Alone(JobClass("too big"), "v100", 1, PACKED, 0.0),
        Alone(JobClass("too big"), "k80", 1, PACKED, 3.0),
        Alone(JobClass("nowhere"), "v100", 1, PACKED, 0.0),
    ],
    skews={"VGG-19": 0.7},
)


def a_job(**fields: Any) -> Job:
    return Job(**{"id": "j", "submitted": 0.0, "gpus": 1, **fields})


def on(spec: str, table: Throughputs = TABLE) -> Speeds:
    return Speeds(table, parse_cluster(spec))


def test_estimate_of_a_known_model_has_the_tables_rates_in_the_clusters_order() -> None:
    job = a_job(model="LM", batch_size=5, gpus=4, steps=100.0)
    assert on("k80:4,v100:4").estimate(job).rates == ((10.0, 10.0, 10.0), (32.0, 24.0, 24.0))
    assert on("k80:4,v100:4").steps(job) == 100.0


def test_estimate_on_a_type_not_measured_for_the_model_goes_by_relative_speed() -> None:
    cluster = Cluster((Node("a", "P40", 4), Node("b", "v100", 4)), speeds={"p40": 0.5})
    assert Speeds(TABLE, cluster).estimate(a_job(model="lm", gpus=4)).rates == ((16.0, 12.0, 12.0), (32.0, 24.0, 24.0))


def test_estimate_on_a_type_that_nothing_relates_to_the_reference_is_zero() -> None:
    rates = on("b200:4,v100:4").estimate(a_job(model="lm", gpus=1)).rates
    assert rates == ((0.0, 0.0, 0.0), (10.0, 10.0, 10.0))
    assert on("b200:4").estimate(a_job(duration=1.0)).rates == ((0.0, 0.0, 0.0),)


def test_estimate_is_zero_on_types_that_the_job_rules_out() -> None:
    job = a_job(model="lm", gpu_types=("V100",), duration=5.0)
    speeds = on("k80:4,v100:4")
    assert speeds.estimate(replace(job, steps=1.0)).rates == ((0.0, 0.0, 0.0), (10.0, 10.0, 10.0))
    assert speeds.estimate(job).rates == ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    assert speeds.estimate(a_job(gpu_types=("k80",), duration=5.0)).rates == ((0.25, 0.25, 0.25), (0.0, 0.0, 0.0))
    assert on("k80:4").steps(job) == 5.0


@pytest.mark.parametrize("model", [None, "tacotron"])
def test_estimate_of_an_unknown_model_with_a_duration_is_the_relative_speed(model: str | None) -> None:
    job = a_job(model=model, gpus=8, duration=600.0)
    speeds = on("v100:8,k80:8,gpu:8")
    assert speeds.estimate(job).rates == ((1.0, 1.0, 1.0), (0.25, 0.25, 0.25), (1.0, 1.0, 1.0))
    assert speeds.steps(job) == 600.0


def test_estimate_of_an_unknown_batch_size_with_a_duration_is_the_relative_speed() -> None:
    assert on("k80:4").estimate(a_job(model="lm", batch_size=6, duration=1.0)).rates == ((0.25, 0.25, 0.25),)


def test_estimate_of_an_unknown_model_with_steps_and_duration_is_their_ratio() -> None:
    job = a_job(model="gpt", steps=500.0, duration=100.0)
    speeds = on("v100:4,k80:4")
    assert speeds.estimate(job).rates == ((5.0, 5.0, 5.0), (1.25, 1.25, 1.25))
    assert speeds.steps(job) == 500.0
    assert speeds.kind(job) != speeds.kind(a_job(model="gpt", steps=600.0, duration=100.0))


@pytest.mark.parametrize(
    ("fields", "want"),
    [
        ({"duration": 0.0}, 0.0),
        ({"duration": 0.0, "model": "lm"}, 0.0),
        ({"steps": 0.0, "model": "lm"}, 0.0),
        ({"steps": 0.0, "duration": 10.0}, 0.0),
        ({"steps": 10.0, "duration": 0.0}, 0.0),
        ({"steps": 0.0, "duration": 0.0}, 0.0),
    ],
)
def test_no_work_is_no_steps_at_a_rate_above_zero(fields: dict[str, Any], want: float) -> None:
    speeds, job = on("v100:4"), a_job(**fields)
    assert speeds.steps(job) == want
    assert speeds.estimate(job).best() > 0


def test_work_of_a_model_never_measured_on_the_reference_is_derived_from_its_fastest_type() -> None:
    speeds, job = on("v100:4,k80:4,gpu:4"), a_job(model="vgg19", gpus=4, duration=100.0)
    v100, k80, gpu = speeds.estimate(replace(job, steps=1.0)).rates
    assert (v100, k80, gpu) == ((32.0, 24.0, 24.0), (8.0, 6.0, 6.0), (32.0, 24.0, 24.0))
    assert speeds.estimate(job).rates == ((1.0, 0.75, 0.75), (0.25, 0.1875, 0.1875), (1.0, 0.75, 0.75))
    assert speeds.steps(job) == 100.0
    assert speeds.estimate(job).skew == 0.7
    assert speeds.estimate(a_job(model="vgg19", steps=1.0)).rates[1] == (2.0, 2.0, 2.0)


def test_work_of_a_model_that_cannot_run_on_the_reference_is_stated_on_its_fastest_type() -> None:
    speeds, job = on("v100:4,k80:4,gpu:4"), a_job(model="too big", duration=100.0)
    assert speeds.estimate(replace(job, steps=1.0)).rates == ((0.0, 0.0, 0.0), (3.0, 3.0, 3.0), (3.0, 3.0, 3.0))
    assert speeds.estimate(job).rates == ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0), (1.0, 1.0, 1.0))


def test_work_of_a_model_that_nothing_relates_to_the_reference_is_stated_on_its_fastest_type() -> None:
    speeds, job = on("v100:4,b200:4,gpu:4"), a_job(model="only new", duration=100.0)
    assert speeds.estimate(replace(job, steps=1.0)).rates == ((0.0, 0.0, 0.0), (7.0, 7.0, 7.0), (7.0, 7.0, 7.0))
    assert speeds.estimate(job).rates == ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0), (1.0, 1.0, 1.0))


def test_model_that_runs_nowhere_has_no_rate_and_raises_nothing() -> None:
    speeds, job = on("v100:4,k80:4,gpu:4"), a_job(model="nowhere", duration=100.0)
    assert speeds.estimate(job).best() == 0.0
    assert speeds.steps(job) == 100.0


def test_generic_type_has_the_reference_rate_unless_it_is_stated() -> None:
    job = a_job(model="lm", gpus=4)
    assert on("gpu:4").estimate(job).rates == ((32.0, 24.0, 24.0),)
    stated = Cluster((Node("a", "gpu", 4),), speeds={"gpu": 2.0})
    assert Speeds(TABLE, stated).estimate(job).rates == ((64.0, 48.0, 48.0),)


def test_kind_is_shared_by_jobs_that_are_alike_and_by_no_others() -> None:
    speeds = on("v100:4,k80:4")
    base: dict[str, Any] = {"model": "LM", "batch_size": 5, "gpus": 4, "duration": 10.0}
    kind = speeds.kind(a_job(**base))
    assert kind == "lm/b5/x4~"
    assert speeds.kind(a_job(**base, steps=7.0)) == "lm/b5/x4"
    assert kind == speeds.kind(a_job(**{**base, "id": "other", "model": "l-m", "duration": 99.0, "tenant": "x"}))
    others: list[dict[str, Any]] = [
        {"model": None},
        {"batch_size": 6},
        {"gpus": 2},
        {"gpu_types": ("v100",)},
        {"gpu_types": ("k80",)},
    ]
    assert len({speeds.kind(a_job(**{**base, **change})) for change in others} | {kind}) == 6


def test_kind_does_not_confuse_names_that_look_like_its_own_form() -> None:
    speeds = on("v100:4")
    jobs = [
        a_job(model="a/b1", duration=1.0), a_job(model="a", batch_size=1, duration=1.0), a_job(duration=1.0),
        a_job(model="-", duration=1.0), a_job(model="a/b1/x1", duration=1.0), a_job(model="a*2.0", duration=1.0),
    ]  # fmt: skip
    assert len({speeds.kind(job) for job in jobs}) == len(jobs)


def test_estimate_is_made_once_a_kind() -> None:
    speeds = on("v100:4")
    assert speeds.estimate(a_job(model="lm", steps=1.0)) is speeds.estimate(a_job(model="LM", steps=2.0))


def test_steps_of_an_unknown_model_are_refused_with_the_nearest_known() -> None:
    speeds = on("v100:4")
    speeds.estimate(a_job(model="vgg-18", duration=1.0))
    for ask in (speeds.kind, speeds.estimate, speeds.steps):
        with pytest.raises(
            ThroughputError, match=r"job 'j'.*'t' does not know model 'vgg-18'.*nearest: vgg19.*give a throughput table"
        ):
            ask(a_job(model="vgg-18", steps=1.0))
    with pytest.raises(ThroughputError, match=r"model 'LM' at batch size 7 \(known batch sizes: 5\)"):
        speeds.kind(a_job(model="LM", batch_size=7, steps=1.0))
    with pytest.raises(ThroughputError, match=r"'only new' at batch size 7 \(known batch sizes: not stated\)"):
        speeds.kind(a_job(model="only new", batch_size=7, steps=1.0))
    with pytest.raises(ThroughputError, match="names no model"):
        speeds.kind(a_job(steps=1.0))
    with pytest.raises(ThroughputError, match="does not know model 'zzz'; give a throughput table"):
        speeds.kind(a_job(model="zzz", steps=1.0))


def test_job_with_neither_steps_nor_duration_has_an_estimate_but_no_work() -> None:
    assert on("v100:4").estimate(a_job(model="lm")).best() == 10.0
    assert on("v100:4").estimate(a_job()).best() == 1.0
    with pytest.raises(ThroughputError, match="states neither steps nor a duration"):
        on("v100:4").steps(a_job())


def test_cluster_type_that_nobody_knows_is_refused_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="unknown GPU type 'v10'; did you mean v100"):
        on("v10:4")
    with pytest.raises(ThroughputError, match=r"speed of GPU type 'x': expected a finite number above 0, got -1\.0"):
        Speeds(TABLE, Cluster((Node("a", "x", 4),), speeds={"x": -1.0}))


def test_shipped_table_serves_a_trace_that_names_models_and_durations() -> None:
    """The model names of the Tiresias and Muri traces, on typed and untyped clusters."""
    names = (
        "alexnet",
        "googlenet",
        "inception3",
        "inception4",
        "resnet101",
        "resnet152",
        "resnet50",
        "vgg11",
        "vgg16",
        "vgg19",
    )
    for spec in ("gpu:16", "v100:16", "k80:8,h100:8"):
        speeds = on(spec, shipped())
        for name in names:
            for gpus in (1, 2, 4, 8):
                job = a_job(model=name, gpus=gpus, duration=1000.0)
                estimate = speeds.estimate(job)
                assert estimate.skew is not None
                assert min(row[PACKED] for row in estimate.rates) > 0
                if spec in ("gpu:16", "v100:16"):
                    assert speeds.steps(job) / estimate.best() == pytest.approx(1000.0, rel=1e-12)


def test_estimate_of_an_elastic_job_has_the_rates_of_every_number_that_it_can_do_with() -> None:
    job = a_job(model="lm", batch_size=5, gpus=4, steps=100.0, min_gpus=1, max_gpus=5)
    estimate = on("v100:8").estimate(job)
    assert [gpus for gpus, _ in estimate.others] == [1, 2, 3, 5]
    for gpus in (1, 2, 3, 5):
        alone = on("v100:8").estimate(replace(job, gpus=gpus, min_gpus=None, max_gpus=None))
        assert estimate.at(gpus) == alone.rates
    assert estimate.at(4) == estimate.rates == ((32.0, 24.0, 24.0),)


def test_estimate_of_an_elastic_job_counts_its_work_as_with_the_gang_that_it_asks_for() -> None:
    """1 GPU does 10 steps a second where 4 do 32, so a second of the gang takes it 3.2 s."""
    job = a_job(model="lm", batch_size=5, gpus=4, duration=100.0, min_gpus=1)
    estimate = on("v100:8").estimate(job)
    assert estimate.rates[0][PACKED] == 1.0
    assert estimate.at(1)[0][PACKED] == pytest.approx(1 / 3.2)


def test_estimate_of_an_elastic_job_that_the_table_does_not_know_is_in_proportion() -> None:
    estimate = on("v100:8,k80:8").estimate(a_job(gpus=4, duration=100.0, min_gpus=2, max_gpus=8))
    assert estimate.at(2) == ((0.5, 0.5, 0.5), (0.125, 0.125, 0.125))
    assert estimate.at(8) == ((2.0, 2.0, 2.0), (0.5, 0.5, 0.5))


def test_estimate_of_an_elastic_job_goes_no_further_than_the_cluster() -> None:
    job = a_job(gpus=4, duration=100.0, max_gpus=1_000_000)
    assert [gpus for gpus, _ in on("v100:8,k80:2").estimate(job).others] == [5, 6, 7, 8]


def test_estimate_of_an_elastic_job_is_zero_on_types_that_it_rules_out() -> None:
    job = a_job(gpus=2, duration=1.0, min_gpus=1, gpu_types=("k80",))
    assert on("k80:4,v100:4").estimate(job).at(1) == ((0.125, 0.125, 0.125), (0.0, 0.0, 0.0))


def test_kinds_differ_by_bounds_and_bounds_that_say_nothing_make_no_other_kind() -> None:
    speeds, job = on("v100:8"), a_job(gpus=4, duration=1.0)
    bounds = [(None, None), (1, None), (2, None), (None, 8), (1, 8)]
    kinds = [speeds.kind(replace(job, min_gpus=least, max_gpus=most)) for least, most in bounds]
    assert kinds == ["-/x4", "-/x4[1-4]", "-/x4[2-4]", "-/x4[4-8]", "-/x4[1-8]"]
    assert speeds.kind(replace(job, min_gpus=4, max_gpus=4)) == "-/x4"
    assert speeds.resolve(replace(job, min_gpus=1)) == ("-/x4[1-4]", speeds.estimate(replace(job, min_gpus=1)), 1.0)
