"""Speeds of jobs whose steps divide into micro-batches: from what a gang does to what any GPUs do."""

from dataclasses import replace
from typing import Any

import pytest

from poise.lab.experiment import divided
from poise.lab.traces.schema import Trace, TraceJob
from poise.scheduler.model.cluster import parse_cluster
from poise.scheduler.model.errors import RequestError, ThroughputError
from poise.scheduler.model.job import Job
from poise.scheduler.model.plan import Policy
from poise.scheduler.model.speed import Estimate, Locality
from poise.scheduler.policies.catalogue import policy_named
from poise.scheduler.policies.combinators import agnostic
from poise.scheduler.throughput.measurements import Alone, JobClass, Throughputs, Together
from poise.scheduler.throughput.speeds import Speeds, _worthwhile
from poise.scheduler.throughput.table import shipped

PACKED, RACK, CLUSTER = Locality
LM = JobClass("lm", 5)
TABLE = Throughputs.of(
    "t",
    "v100",
    [
        Alone(LM, "v100", 1, PACKED, 8.0),
        Alone(LM, "v100", 4, PACKED, 32.0),
        Alone(LM, "v100", 4, RACK, 16.0),
        Alone(LM, "k80", 1, PACKED, 2.0),
        Alone(LM, "k80", 4, PACKED, 8.0),
        Alone(LM, "k80", 4, CLUSTER, 4.0),
        Alone(JobClass("narrow"), "v100", 2, PACKED, 2.0),
        Alone(JobClass("narrow"), "v100", 2, RACK, 0.0),
        Alone(JobClass("wide"), "v100", 2, PACKED, 2.0),
        Alone(JobClass("wide"), "v100", 2, RACK, 4.0),
        Alone(JobClass("too big"), "v100", 1, PACKED, 1.0),
        Alone(JobClass("too big"), "k80", 1, PACKED, 0.0),
    ],
    [Together(LM, LM, "v100", 4, (10.0, 10.0))],
)


def a_job(**fields: Any) -> Job:
    return Job(**{"id": "j", "submitted": 0.0, "gpus": 4, "micro_batches": 8, **fields})


def lm(**fields: Any) -> Job:
    return a_job(**{"model": "lm", "batch_size": 5, "steps": 100.0, **fields})


def on(spec: str = "v100:8,k80:8", table: Throughputs = TABLE) -> Speeds:
    return Speeds(table, parse_cluster(spec))


def test_tasks_share_the_gangs_step_but_for_its_synchronisation() -> None:
    """On 4 V100s a step takes 1/32 s, on 4 K80s 1/8 s; each computes two of the eight tasks in turn."""
    tasks = on().estimate(lm(sync=1 / 64)).tasks
    assert tasks is not None
    assert (tasks.count, tasks.gang) == (8, 4)
    assert tasks.seconds == (1 / 128, 7 / 128)


def test_what_distance_costs_is_synchronisation() -> None:
    tasks = on().estimate(lm(sync=1 / 64)).tasks
    assert tasks is not None
    assert tasks.sync == ((1 / 64, 3 / 64, 3 / 64), (1 / 64, 1 / 64, 9 / 64))


def test_rates_of_the_gang_are_the_tables() -> None:
    rigid = on().estimate(lm(micro_batches=None)).rates
    for sync in (0.0, 1 / 64, 0.01):
        for count in (2, 3, 4, 7, 8, 1000):
            rates = on().estimate(lm(micro_batches=count, sync=sync)).rates
            assert rates == tuple(pytest.approx(row) for row in rigid)


def test_rates_are_those_of_the_tasks_on_gpus_of_one_type_to_the_last_bit() -> None:
    for job in (lm(sync=0.01), lm(micro_batches=13, gpus=3), a_job(duration=7.0, micro_batches=30, gpus=7, sync=0.1)):
        estimate = on("v100:6,k80:9").estimate(job)
        assert estimate.tasks is not None
        for gpus in (estimate.tasks.gang, *(gpus for gpus, _ in estimate.others)):
            for kind, mix in enumerate(((gpus, 0), (0, gpus))):
                for locality in Locality:
                    where = PACKED if gpus == 1 else locality
                    assert estimate.at(gpus)[kind][locality] == estimate.on(mix, where)


def test_two_types_together_are_faster_than_either() -> None:
    estimate = on().estimate(lm(micro_batches=20))
    assert estimate.on((4, 4), PACKED) > estimate.on((4, 0), PACKED) == 32.0
    assert estimate.on((0, 4), PACKED) == 8.0
    assert estimate.on((0, 0), PACKED) == 0.0


@pytest.mark.parametrize("count", [1, 2, 7, 8, 12, 97, 360])
def test_other_numbers_of_gpus_are_those_that_make_a_round_shorter(count: int) -> None:
    for most in (1, 5, 8, 400):
        shorter = [n for n in range(1, min(count, most) + 1) if n == 1 or -(-count // n) < -(-count // (n - 1))]
        assert [*_worthwhile(count, most)] == shorter


def test_other_numbers_of_gpus_go_no_further_than_the_types_that_the_job_can_use() -> None:
    job = a_job(duration=1.0, micro_batches=1_000_000, gpus=1_000_000)
    estimate = on("v100:6,k80:9").estimate(job)
    assert [gpus for gpus, _ in estimate.others] == [*range(1, 9)]
    assert estimate.tasks is not None
    assert estimate.tasks.gang == 9
    only = on("v100:6,k80:9").estimate(replace(job, gpu_types=("v100",)))
    assert only.tasks is not None
    assert only.tasks.gang == 6
    assert only.rates[0][PACKED] == pytest.approx(6e-6, rel=1e-5)
    assert only.rates[1] == (0.0, 0.0, 0.0)


def test_gang_has_no_gpu_that_makes_it_no_faster() -> None:
    """Of 5 GPUs for 8 tasks one is of no use, and of 16 half are."""
    for gpus, gang in ((3, 3), (4, 4), (5, 4), (7, 4), (8, 8), (16, 8)):
        tasks = on("v100:32").estimate(a_job(duration=1.0, gpus=gpus)).tasks
        assert tasks is not None
        assert tasks.gang == gang
        assert tasks.seconds == (1 / -(-8 // gpus),)


def test_gang_larger_than_the_cluster_is_slower_by_what_is_missing() -> None:
    estimate = on("v100:4").estimate(a_job(duration=1.0, gpus=8, micro_batches=8))
    assert estimate.rates == ((0.5, 0.5, 0.5),)
    assert estimate.tasks is not None
    assert estimate.tasks.gang == 4


def test_types_that_the_job_rules_out_or_cannot_run_on_are_of_no_use() -> None:
    out = on().estimate(lm(gpu_types=("K80",)))
    assert out.tasks is not None
    assert (out.tasks.seconds, out.rates[0]) == ((0.0, 1 / 16), (0.0, 0.0, 0.0))
    assert out.on((4, 0), PACKED) == 0.0
    big = on().estimate(a_job(model="too big", steps=1.0, gpus=1, micro_batches=2))
    assert big.tasks is not None
    assert big.tasks.seconds == (0.5, 0.0)
    assert big.at(2) == ((2.0, 2.0, 2.0), (0.0, 0.0, 0.0))


def test_types_that_are_all_ruled_out_leave_a_job_without_speed() -> None:
    estimate = on("v100:4").estimate(a_job(duration=1.0, gpu_types=("k80",), sync=5.0))
    assert estimate.best() == 0.0
    assert estimate.tasks is not None
    assert estimate.tasks.seconds == (0.0,)


def test_gang_that_cannot_be_spread_never_synchronises_when_it_is() -> None:
    estimate = on("v100:8").estimate(a_job(model="narrow", steps=1.0, gpus=2, micro_batches=2))
    assert estimate.rates == ((2.0, 0.0, 0.0),)
    assert estimate.on((2,), RACK) == 0.0
    assert estimate.at(1) == ((1.0, 1.0, 1.0),), "one GPU is always packed"


def test_gang_that_was_measured_faster_apart_synchronises_no_faster_for_it() -> None:
    tasks = on("v100:8").estimate(a_job(model="wide", steps=1.0, gpus=2, sync=0.125)).tasks
    assert tasks is not None
    assert tasks.sync == ((0.125, 0.125, 0.125),)


def test_speed_too_small_for_a_step_to_have_a_length_is_none() -> None:
    estimate = on("v100:4").estimate(a_job(steps=1e-200, duration=1e115))
    assert estimate.best() == 0.0
    assert estimate.on((4,), PACKED) == 0.0


def test_sync_of_a_job_with_a_duration_is_that_of_the_tables_steps() -> None:
    """In a second, 4 V100s make 32 steps, with 32 synchronisations of 1/64 s."""
    by_steps, by_duration = on().estimate(lm(sync=1 / 64)), on().estimate(lm(sync=1 / 64, steps=None, duration=10.0))
    assert by_steps.tasks is not None
    assert by_duration.tasks is not None
    assert by_duration.rates[0] == (1.0, 0.5, 0.5)
    assert by_duration.tasks.seconds == tuple(32 * each for each in by_steps.tasks.seconds)
    assert by_duration.tasks.sync == tuple(tuple(32 * each for each in row) for row in by_steps.tasks.sync)
    for mix in ((1, 0), (3, 5), (0, 8)):
        assert by_duration.on(mix, RACK) == pytest.approx(by_steps.on(mix, RACK) / 32)


@pytest.mark.parametrize("sync", [1 / 32, 0.5, 1e308])
def test_sync_as_long_as_a_step_is_refused_with_the_type_and_the_steps_length(sync: float) -> None:
    want = r"job 'j': sync: a step takes 0\.03125 s on 'v100', of which .* s of synchronisation leave none to compute"
    for job in (lm(sync=sync), lm(sync=sync, steps=None, duration=10.0)):
        with pytest.raises(ThroughputError, match=want):
            on().resolve(job)
    assert on().estimate(lm(sync=0.1, gpu_types=("k80",))).best() > 0


def test_kinds_tell_tasks_and_synchronisation_apart() -> None:
    speeds, job = on(), a_job(duration=1.0, micro_batches=None)
    assert speeds.kind(job) == "-/x4"
    assert speeds.kind(replace(job, sync=0.5)) == "-/x4", "without tasks there is nothing to synchronise"
    assert speeds.kind(replace(job, micro_batches=8)) == "-/x4/k8"
    assert speeds.kind(replace(job, micro_batches=8, sync=0.5, gpu_types=("v100",))) == "-/x4/k8/s0.5@v100"
    assert speeds.kind(lm(steps=None, duration=1.0)) == "lm/b5/x4/k8~"
    for changed in (replace(job, micro_batches=8), replace(job, micro_batches=16), replace(job, micro_batches=8, sync=0.5)):
        kind, estimate, steps = speeds.resolve(changed)
        assert (kind, estimate, steps) == (speeds.kind(changed), speeds._estimated(changed), 1.0)


def test_jobs_with_tasks_share_no_gpus() -> None:
    speeds, rigid = on(), lm(micro_batches=None)
    assert speeds.pair(rigid, rigid) == ((10.0, 10.0), (0.0, 0.0))
    for one, other in ((lm(), rigid), (rigid, lm()), (lm(), lm())):
        assert speeds.pair(one, other) == ((0.0, 0.0), (0.0, 0.0))


def perceived(policy: Policy, estimate: Estimate) -> Estimate:
    return agnostic(policy).perceive(estimate)


def test_agnostic_takes_tasks_to_be_as_fast_on_all_types_as_on_the_fastest() -> None:
    seen = perceived(policy_named("fifo"), on("k80:8,v100:8").estimate(lm(sync=1 / 64)))
    assert seen.tasks is not None
    assert (seen.tasks.seconds, seen.tasks.gang) == ((1 / 128, 1 / 128), 4)
    assert seen.tasks.sync == ((1 / 64, 3 / 64, 3 / 64),) * 2
    assert seen.on((4, 0), RACK) == seen.on((2, 2), RACK) == seen.rates[0][RACK] == seen.rates[1][RACK]


def test_agnostic_leaves_types_of_no_use_alone() -> None:
    for types in (("k80",), ("p100",)):
        job = lm(gpu_types=types)
        seen, true = perceived(policy_named("fifo"), on("k80:8,v100:8").estimate(job)), on("k80:8,v100:8").estimate(job)
        assert seen.tasks == true.tasks


def test_size_of_a_model_is_known_in_bytes_whatever_the_tables_source(tmp_path: Any) -> None:
    parameters = 138_357_544
    assert shipped().size("vgg-16") == pytest.approx(4 * parameters, rel=1e-4)
    assert shipped().size("nobody's") is None
    assert shipped().flat().size("VGG16") == shipped().size("VGG16")
    assert TABLE.size("vgg16") is None
    assert TABLE.with_sizes({"L-M": 7.0}).size("lm") == 7.0


def test_divided_gives_jobs_that_state_no_micro_batches_so_many_a_gpu() -> None:
    stated = a_job(id="a", micro_batches=3)
    bounded = a_job(id="b", micro_batches=None, min_gpus=1, max_gpus=8)
    trace = Trace("t", (TraceJob(stated), TraceJob(bounded)))
    one, other = (each.job for each in divided(trace, 2).jobs)
    assert one == stated
    assert other == a_job(id="b", micro_batches=8)
    with pytest.raises(RequestError, match="micro_batches: expected at most 1,000,000 a job, got 4,000,000 for job 'b'"):
        divided(trace, 1_000_000)
