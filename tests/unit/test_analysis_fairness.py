"""ρ and Jain's index, against numbers worked out by hand.

T = steps ÷ (mean speed of the cluster's mix) · max(1, gang · N ÷ GPUs), ρ = JCT ÷ T; N the mean number of active jobs, or
tenants, over the job's life.
"""

from dataclasses import replace
from functools import partial
from math import inf, isnan
from pathlib import Path

import numpy as np
import pytest
from tests.builders import EVENTS, Story, a_job, a_table, simulate

from poise.engine.journal import JournalReader
from poise.lab.analysis.fairness import Fairness, jain, rho
from poise.lab.analysis.history import History
from poise.lab.analysis.sources import records_of
from poise.lab.analysis.study import losses
from poise.lab.analysis.summary import measure
from poise.lab.audit.instance_run import Lie, MisreportedSpeeds
from poise.lab.experiment import Experiment
from poise.lab.experiment import simulate as run
from poise.lab.simulator.world import Truth
from poise.lab.traces.schema import LossCurve, Trace, TraceJob
from poise.scheduler.core.scheduler import Scheduler
from poise.scheduler.model.action import JournalEntry
from poise.scheduler.model.cluster import parse_cluster
from poise.scheduler.model.event import Estimated, Finished, Revealed, Submitted
from poise.scheduler.model.job import Job
from poise.scheduler.model.speed import Estimate, Locality
from poise.scheduler.placement.strategies import placement_named
from poise.scheduler.policies.catalogue import policy_named
from poise.scheduler.throughput.measurements import Alone, JobClass, Throughputs


def rhos(story: Story, fairness: Fairness = Fairness.JOB) -> dict[str, float]:
    history = History.of(story.entries, story.cluster)
    jobs = history.ended_jobs()
    return {job.id: value for job, value in zip(jobs, rho(history, jobs, fairness).tolist(), strict=True)}


JAIN = {
    (1, 1, 1, 1): 1.0,
    (1.2, 1, 0.9, 0.8): 0.9775,
    (3, 1, 1, 1): 0.75,
    (5,): 1.0,
    (1, 0, 0, 0): 0.25,
    (): 1.0,
    (0, 0): 1.0,
}


@pytest.mark.parametrize("values", JAIN)
def test_jains_index_has_its_closed_forms(values: tuple[float, ...]) -> None:
    assert jain(np.array(values, dtype=np.float64)) == pytest.approx(JAIN[values], abs=1e-4)


def test_a_job_alone_has_rho_one() -> None:
    assert rhos(simulate([a_job("a", at=7, gpus=3, seconds=50)])) == {"a": 1}


def test_jobs_with_a_gpu_each_have_rho_one() -> None:
    assert rhos(simulate([a_job(f"{n}") for n in range(4)], cluster="gpu:4")) == {"0": 1, "1": 1, "2": 1, "3": 1}


def test_rho_of_two_jobs_on_one_gpu() -> None:
    """a: N = 2, alone 200 s, took 100. b: N = 2 for 100 s and 1 for 100 s, alone 150 s, took 200."""
    story = simulate([a_job("a", seconds=100), a_job("b", seconds=100)], cluster="gpu:1")
    assert rhos(story) == pytest.approx({"a": 1 / 2, "b": 4 / 3})


def test_a_gang_larger_than_its_slice_is_served_for_a_part_of_the_time() -> None:
    """big: N = 2 for 50 s and 1 for 100 s, mean 4/3; 4·(4/3) ÷ 4 = 4/3; alone 100·4/3, took 150. small: 1·2 ÷ 4 < 1."""
    story = simulate([a_job("small", seconds=50), a_job("big", gpus=4, seconds=100)], cluster="gpu:4")
    assert rhos(story) == pytest.approx({"small": 1, "big": 150 / (100 * 4 / 3)})


def test_n_is_the_mean_over_the_life_of_the_job_not_of_the_trace() -> None:
    """late is active from 100 on, when nobody else is."""
    story = simulate([a_job("a", seconds=40), a_job("b", seconds=40), a_job("late", at=100)], cluster="gpu:1")
    assert rhos(story)["late"] == 1


TYPES = Throughputs.of(
    "two types",
    "v100",
    [
        Alone(JobClass("m"), "v100", 1, Locality.PACKED, 10.0),
        Alone(JobClass("m"), "k80", 1, Locality.PACKED, 2.0),
    ],
)


def test_rho_of_two_types_measures_with_the_mean_speed_of_the_mix() -> None:
    """1 V100 of 10 steps/s and 3 K80 of 2: 4 steps/s on the mix. 120 steps take 30 s alone, 12 on the V100, 60 on a K80."""
    jobs = [a_job("fast", seconds=12, model="m"), a_job("slow", seconds=12, model="m")]
    story = simulate(jobs, cluster="v100:1,k80:3@3", believed=TYPES)
    assert story.finishes == {"fast": 12, "slow": 60}
    assert rhos(story) == pytest.approx({"fast": 12 / 30, "slow": 60 / 30})


def test_rho_of_two_types_counts_the_slice_in_gpus_of_all_types() -> None:
    """Two jobs on 2 GPUs: a slice is one GPU, half of each; 120 steps at 6 steps/s take 20 s."""
    jobs = [a_job("fast", seconds=12, model="m"), a_job("slow", seconds=12, model="m")]
    assert rhos(simulate(jobs, cluster="v100:1,k80:1", believed=TYPES)) == pytest.approx({"fast": 12 / 20, "slow": 60 / 20})


def owned(job: TraceJob, tenant: str) -> TraceJob:
    return replace(job, job=replace(job.job, tenant=tenant))


def test_tenants_share_in_place_of_jobs() -> None:
    """A has two jobs, B one, of 100 s each on one GPU. By tenant: N = 2 until A is done at 200, then 1."""
    jobs = [a_job(name, seconds=100) for name in ("a1", "a2", "b")]
    story = simulate([owned(each, each.job.id[0]) for each in jobs], cluster="gpu:1")
    assert rhos(story) == pytest.approx({"a1": 100 / 300, "a2": 200 / 250, "b": 300 / 200})
    want = {"a1": 100 / 200, "a2": 200 / 200, "b": 300 / (100 * 5 / 3)}
    assert rhos(story, Fairness.TENANT) == pytest.approx(want)


def test_a_tenant_that_comes_back_counts_only_while_it_has_jobs() -> None:
    """B is active from 0 to 100; A from 0 to 10 and from 50 to 60: N = 1.2 over the life of B on one of two GPUs."""
    jobs = [owned(a_job("b", gpus=2, seconds=80), "B"), owned(a_job("a", seconds=10), "A")]
    jobs += [owned(a_job("a2", at=85, seconds=10), "A")]
    story = simulate(jobs, "smallest-first", "gpu:2")
    assert story.finishes == {"a": 10, "b": 100, "a2": 95}
    assert rhos(story, Fairness.TENANT)["b"] == pytest.approx(100 / (80 * 1.2))


def test_jobs_that_never_end_are_active_to_the_end() -> None:
    story = simulate([a_job("a", seconds=100), a_job("b", seconds=999)], cluster="gpu:1", until=150)
    assert rhos(story) == pytest.approx({"a": 1 / 2})


def test_a_job_without_work_has_no_rho() -> None:
    found = rhos(simulate([a_job("nothing", seconds=0), a_job("something")]))
    assert isnan(found["nothing"])
    assert found["something"] == 1


def test_a_job_of_unknown_work_has_no_rho() -> None:
    entries = [
        JournalEntry(0.0, (Estimated("k", Estimate(((1.0, 1.0, 1.0),))), Submitted(Job("a", 0.0, 1), "k", inf)), ()),
        JournalEntry(5.0, (Finished("a", 1),), ()),
    ]
    history = History.of(entries, parse_cluster("gpu:1"))
    assert np.isnan(rho(history, history.ended_jobs())).all()


# What is true, and what is believed


def in_steps(steps: float, name: str = "a") -> TraceJob:
    return TraceJob(Job(name, 0.0, 1, steps=steps, model="m"))


def test_rho_measures_with_true_speeds_whatever_is_believed() -> None:
    """1,000 steps believed at 10 steps a second, truly 5: alone on its GPU it takes 200 s, and would in no better world."""
    story = simulate([in_steps(1000)], cluster="v100:1", believed=a_table(m=10.0), true=a_table(m=5.0))
    assert story.finishes == {"a": 200}
    assert rhos(story) == {"a": 1}
    assert rhos(story, Fairness.APP) == {"a": 1}


def test_rho_measures_with_true_work_whatever_owners_say() -> None:
    cluster = parse_cluster("v100:1")
    trace = Trace("t", (in_steps(1000),))
    lies = partial(MisreportedSpeeds, lies={"a": Lie(size=4.0)})
    experiment = Experiment(cluster, throughputs=a_table(m=10.0), estimates=lies)
    outcome = run(trace, experiment)
    assert outcome.summary.worst_rho == 1
    assert outcome.history.jobs["a"].steps == 1000


def test_a_journal_tells_what_is_true_where_that_is_not_what_is_believed(tmp_path: Path) -> None:
    trace = Trace("t", (in_steps(1000), in_steps(500, "b")))
    apart = Experiment(parse_cluster("v100:1"), throughputs=a_table(m=10.0), truths=a_table(m=5.0))
    outcome = run(trace, apart, journal=tmp_path / "journal.jsonl")
    reader = JournalReader(tmp_path / "journal.jsonl")
    history = History.of(reader.entries(), reader.header.cluster)
    assert measure(history).rhos.tolist() == outcome.measured.rhos.tolist() == pytest.approx([1 / 2, 9 / 5])
    together = replace(apart, throughputs=a_table(m=5.0))
    assert measure(history).rhos.tolist() == run(trace, together).measured.rhos.tolist()
    run(trace, together, journal=tmp_path / "true.jsonl")
    assert "revealed" not in (tmp_path / "true.jsonl").read_text()


def test_the_scheduler_does_not_look_at_what_is_true() -> None:
    trace = [in_steps(1000), in_steps(100, "b"), in_steps(300, "c")]
    story = simulate(trace, "srtf", "v100:1", believed=a_table(m=10.0), true=a_table(m=5.0))
    assert story.events(Revealed)
    scheduler = Scheduler(story.cluster, policy_named("srtf"), placement_named("count"), EVENTS)
    for now, events, actions in story.entries:
        assert scheduler.handle(now, [each for each in events if not isinstance(each, Revealed)]) == actions


def test_gpu_time_that_kept_all_its_steps_is_not_lost_whatever_was_believed_of_speed() -> None:
    story = simulate([in_steps(1000)], cluster="v100:1", believed=a_table(m=10.0), true=a_table(m=5.0))
    found = losses(records_of(History.of(story.entries, story.cluster)))
    assert [row[-1] for row in found.rows] == [0.0]


# By app


def of_app(name: str, *jobs: TraceJob) -> list[TraceJob]:
    return [replace(each, job=replace(each.job, app=name)) for each in jobs]


def test_jobs_without_an_app_have_the_same_rho_by_app_as_by_job() -> None:
    story = simulate([a_job("small", seconds=50), a_job("big", gpus=4, seconds=100), a_job("late", at=30)], cluster="gpu:4")
    assert rhos(story, Fairness.APP) == pytest.approx(rhos(story))


def test_all_jobs_of_an_app_have_its_rho_up_to_the_end_of_its_last_job() -> None:
    """Two jobs of 100 s one after the other on one GPU, alone: 200 s of work for one GPU, which is what they took."""
    story = simulate(of_app("sweep", a_job("a", seconds=100), a_job("b", seconds=100)), cluster="gpu:1")
    assert rhos(story, Fairness.APP) == {"a": 1, "b": 1}


def test_n_counts_apps_not_their_jobs() -> None:
    """The sweep has 2 GPUs from 0 to 100, other one from 0 to 100: N = 2, a slice of 2 GPUs; 200 GPU-seconds take 100 s."""
    sweep = of_app("sweep", a_job("a", seconds=100), a_job("b", seconds=100))
    story = simulate([*sweep, a_job("other", seconds=100)], cluster="gpu:4")
    assert rhos(story, Fairness.APP) == {"a": 1, "b": 1, "other": 1}


def test_apps_of_two_tenants_are_two_apps_whatever_they_are_called() -> None:
    """Two apps of 100 s on one GPU, N = 2 while both are there: the first took 100 s of 200, the second 200 s of 150."""
    jobs = of_app("sweep", a_job("a", seconds=100), a_job("b", seconds=100))
    story = simulate([owned(each, each.job.id) for each in jobs], cluster="gpu:1")
    assert rhos(story, Fairness.APP) == pytest.approx({"a": 1 / 2, "b": 4 / 3})


def test_an_app_is_not_expected_to_be_faster_than_its_longest_job() -> None:
    story = simulate(of_app("sweep", a_job("a", seconds=100), a_job("b", seconds=10)), cluster="gpu:4")
    assert rhos(story, Fairness.APP) == {"a": 1, "b": 1}


def test_of_a_job_that_was_given_up_only_what_was_spent_counts() -> None:
    """b is given up halfway through its 1,000 s: 500 GPU-seconds of it; a alone takes the 1,000 s that the app took."""
    losses = [
        replace(each, loss=LossCurve(0.01, 1.0, floor))
        for each, floor in ((a_job("a", seconds=1000), 0.1), (a_job("b", seconds=1000), 0.5))
    ]
    story = simulate(of_app("sweep", *losses), "themis", "gpu:2", truth=Truth(report_every=100.0))
    assert list(story.finishes) == ["a"]
    assert rhos(story, Fairness.APP) == {"a": 1, "b": 1}
