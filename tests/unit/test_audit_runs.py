"""Lies, starvation and what was held, on runs whose answers are known: a check that sees nothing fails here."""

from dataclasses import replace

import pytest
from tests.audits import a_mixed_instance, a_mixed_table, an_instance, by_agent
from tests.builders import a_job

from poise.lab.analysis.history import RunInterval
from poise.lab.audit import envy, misreporting, pareto, sharing_incentive, starvation
from poise.lab.audit.instance_run import GpuHold, InstanceRun, Lie, MisreportedSpeeds, run_instance
from poise.lab.traces.schema import TraceJob
from poise.scheduler.model.cluster import parse_cluster
from poise.scheduler.model.job import Job
from poise.scheduler.model.speed import Locality
from poise.scheduler.throughput.measurements import Alone, JobClass, Throughputs
from poise.scheduler.throughput.speeds import Speeds

# Lies


def test_owners_are_believed_and_the_world_stays_true() -> None:
    table, cluster = a_mixed_table(m=4.0), parse_cluster("v100:1,k80:1")
    job = Job("j", 0.0, 1, steps=100.0, model="m")
    kind, estimate, steps = MisreportedSpeeds(table, cluster, {"j": Lie((("v100", 2.0), ("k80", 0.0)), 0.5)}).resolve(job)
    true_kind, true_estimate, _ = Speeds(table, cluster).resolve(job)
    assert kind != true_kind
    assert ([row[0] for row in estimate.rates], steps) == ([8.0, 0.0], 50.0)
    assert [row[0] for row in true_estimate.rates] == [4.0, 1.0]
    assert MisreportedSpeeds(table, cluster, {}).resolve(job) == Speeds(table, cluster).resolve(job)


def test_a_lie_about_size_moves_a_job_to_the_front_and_takes_none_of_its_work() -> None:
    """12 s and 10 s on one GPU: honest, the longer one is done after 22 s; as one of 6 s after 12."""
    honest = run_instance(an_instance(a_job("long", seconds=12), a_job("short", seconds=10), policy="srtf"))
    liar = misreporting.Liar.of(honest, "long", [honest.instance.trace.jobs[0].job])
    found = {each.case.data["lie"]: each.case for each in misreporting.by_completion(honest, liar, liar.about_sizes())}
    half = found["says that it has 0.5 times its work"]
    assert (half.data["honest_seconds"], half.data["lying_seconds"]) == (22.0, 12.0)
    assert half.measured == pytest.approx(10 / 22)
    assert half.bound == pytest.approx(2 / 22)
    assert found["says that it has 2 times its work"].measured == 0.0


def test_nothing_is_said_of_jobs_that_live_for_fewer_than_four_turns() -> None:
    """Two turns would be more than half of their lives, and no gain could be more than what is allowed."""
    honest = run_instance(an_instance(a_job("short", seconds=3)))
    (liar,) = misreporting.liars(honest)
    assert list(misreporting.by_completion(honest, liar, liar.about_sizes())) == []
    assert list(pareto.cases_at_moments(honest)) == []


def test_a_lie_for_which_a_job_is_turned_away_is_no_gain() -> None:
    """Two V100s and one K80: a gang of two that hides the V100s cannot run at all. It does not count as done at once."""
    gang = TraceJob(Job("gang", 0.0, 2, steps=100.0, model="m"))
    drawn = an_instance(gang, cluster="v100:2,k80:1")
    honest = run_instance(replace(drawn, experiment=replace(drawn.experiment, throughputs=a_mixed_table(m=4.0))))
    (liar,) = misreporting.liars(honest)
    assert list(misreporting.by_completion(honest, liar, [(misreporting.LieKind.BIDS, Lie((("v100", 0.0),)))])) == []
    assert len(list(misreporting.by_completion(honest, liar, liar.about_sizes()))) == len(misreporting.FACTORS)


@pytest.mark.parametrize(("policy", "gains"), [("fifo", False), ("srtf", True)])
def test_a_lie_about_speed_is_measured_by_true_progress(policy: str, gains: bool) -> None:
    """Three jobs for two GPUs: the third gets none, unless it may say that it will be done soon."""
    steps = {"a": 1000.0, "b": 1100.0, "c": 1300.0}
    honest = run_instance(a_mixed_instance(policy, steps, {"a": 2.0, "b": 2.0, "c": 2.0}, until=100.0))
    liar = misreporting.Liar.of(honest, "c", [honest.instance.trace.jobs[2].job])
    worst = max(
        (each.case for each in misreporting.by_progress(honest, liar, liar.about_speeds())), key=lambda case: case.excess
    )
    assert worst.data["honest_steps"] == 0.0
    assert worst.holds is not gains
    if gains:  # with the V100 for 100 s, 200 steps; an equal slice is a GPU of the mix for 2/3 of the time
        assert worst.measured == pytest.approx(200 / (1.5 * 100 * 2 / 3))


def test_liars_are_those_with_the_largest_the_middle_and_the_smallest_speedup() -> None:
    speedups = {"a": 2.0, "b": 5.0, "c": 1.5, "d": 3.0}
    honest = run_instance(a_mixed_instance("fifo", dict.fromkeys(speedups, 10.0), speedups))
    assert [liar.agent for liar in misreporting.liars(honest)] == ["b", "a", "c"]


# Starvation


def test_equal_shares_are_processor_sharing() -> None:
    instance = an_instance(a_job("first", seconds=10), a_job("second", at=5, seconds=10))
    taken = starvation.equal_shares(instance, run_instance(instance).truths)
    assert taken == pytest.approx({"first": 15.0, "second": 15.0})


def test_equal_shares_serve_a_gang_for_as_much_of_the_time_as_its_slice_allows() -> None:
    instance = an_instance(a_job("wide", gpus=2, seconds=10), a_job("narrow", seconds=10), cluster="gpu:2")
    assert starvation.equal_shares(instance, run_instance(instance).truths) == pytest.approx({"wide": 15.0, "narrow": 10.0})


def test_time_passed_over_is_what_others_who_came_later_had() -> None:
    jobs = (a_job("long", seconds=10), a_job("short", at=2, seconds=5), a_job("last", at=3, seconds=20))
    srtf = by_agent(list(starvation.cases(run_instance(an_instance(*jobs, policy="srtf")))))
    assert srtf["long"].data["passed_over_seconds"] == 5.0
    assert srtf["last"].data["passed_over_seconds"] == 0.0
    fifo = starvation.cases(run_instance(an_instance(*jobs, policy="fifo")))
    assert [case.measured for case in fifo] == [0.0, 0.0, 0.0]


def test_nobody_is_passed_over_by_who_holds_what_it_cannot_use() -> None:
    """The second K80 job waits for the first; the V100, which a later job has, is of no use to it."""
    jobs = [
        TraceJob(Job(name, at, 1, steps=100.0, model="m", gpu_types=(gpu_type,)))
        for name, at, gpu_type in (("first", 0.0, "k80"), ("second", 1.0, "k80"), ("later", 2.0, "v100"))
    ]
    drawn = an_instance(*jobs, policy="fifo-skip", cluster="v100:1,k80:1")
    run = run_instance(replace(drawn, experiment=replace(drawn.experiment, throughputs=a_mixed_table(m=4.0))))
    assert [case.measured for case in starvation.cases(run)] == [0.0, 0.0, 0.0]


def test_a_job_that_a_stream_keeps_out_is_starved() -> None:
    """A gang of two, and single jobs that leave one GPU at a time: it has none when the window closes."""
    stream = [a_job(f"s{place}", at=float(place), seconds=2) for place in range(60)]
    jobs = sorted((a_job("gang", at=0.5, gpus=2, seconds=4), *stream), key=lambda each: each.job.submitted)
    run = run_instance(replace(an_instance(*jobs, policy="fifo-skip", cluster="gpu:2", until=60.0), marked=("gang",)))
    (case,) = starvation.cases(run)
    assert case.data["finished"] is False
    assert case.data["passed_over_seconds"] == pytest.approx(59.0, abs=1.0)
    assert not case.holds


# What was held


def test_a_type_with_fewer_gpus_than_a_gang_needs_is_of_no_use_to_it() -> None:
    jobs = [TraceJob(Job(name, 0.0, gang, steps=100.0, model="m")) for name, gang in (("one", 1), ("two", 2))]
    drawn = an_instance(*jobs, cluster="v100:2,k80:1")
    run = run_instance(replace(drawn, experiment=replace(drawn.experiment, throughputs=a_mixed_table(m=4.0))))
    assert [run.rates(each.job) for each in jobs] == [(4.0, 1.0), (8.0, 0.0)]


def test_a_job_that_truly_runs_nowhere_is_nobodys() -> None:
    """It is believed that it can; it holds GPUs until the window closes, and nothing is measured of it."""
    jobs = [
        TraceJob(Job(name, 0.0, 1, steps=100.0, model="m", gpu_types=(gpu_type,)))
        for name, gpu_type in (("a", "v100"), ("b", "k80"))
    ]
    drawn = an_instance(*jobs, cluster="v100:1,k80:1", until=1000.0)
    truths = Throughputs.of(
        "by hand",
        "v100",
        [Alone(JobClass("m"), "v100", 1, Locality.PACKED, 4.0), Alone(JobClass("m"), "k80", 1, Locality.PACKED, 0.0)],
    )
    run = run_instance(replace(drawn, experiment=replace(drawn.experiment, throughputs=a_mixed_table(m=4.0), truths=truths)))
    assert list(run.agents) == ["a"]
    assert [case.data["agent"] for case in sharing_incentive.cases_on_slices(run)] == ["a"]
    assert [liar.agent for liar in misreporting.liars(run)] == ["a"]
    assert list(envy.cases(run)) == []


def test_gpus_that_two_jobs_share_count_half_for_each() -> None:
    jobs = [a_job(name, seconds=100, model="ResNet18") for name in ("a", "b")]
    run = run_instance(an_instance(*jobs, policy="fifo", cluster="v100:1", until=50.0))
    intervals = run.history.runs
    beside = RunInterval("b", 10.0, intervals[0].end, intervals[0].gpus, intervals[0].ended)
    together = replace(run, history=replace(run.history, runs=[*intervals, beside]))
    assert [(hold.job, hold.start, hold.end, hold.gpus) for hold in together.holds] == [
        ("a", 0.0, 10.0, 1.0),
        ("a", 10.0, 50.0, 0.5),
        ("b", 10.0, 50.0, 0.5),
    ]


def test_progress_is_true_speed_times_time_less_what_starts_cost() -> None:
    drawn = a_mixed_instance("fifo", {"a": 1e6, "b": 1e6}, {"a": 4.0, "b": 2.0}, until=100.0)
    truth = replace(drawn.experiment.truth, restart_overhead=10.0)
    run = run_instance(replace(drawn, experiment=replace(drawn.experiment, truth=truth)))
    jobs = [each.job for each in drawn.trace.jobs]
    assert [run.progress(job) for job in jobs] == [360.0, 90.0]
    assert isinstance(run, InstanceRun)
    assert run.held_by("a") == [GpuHold("a", 0.0, 100.0, 0, 1.0)]
