"""Presets, experiments, checks before a run, scaled traces, runs that can be stopped."""

import gc
import json
from math import inf
from pathlib import Path

import pytest
from tests.builders import a_cluster, a_job, a_table

from poise.engine.assembly import PRESETS, build_scheduler, preset_named, replay_journal
from poise.lab.experiment import MOST_SECONDS, Experiment, check, header_of, scaled, simulate, speeds_of
from poise.lab.simulator.world import Truth
from poise.lab.traces.schema import Trace, TraceJob
from poise.scheduler.core.settings import Cadence, Settings
from poise.scheduler.model.cluster import Cluster, Node
from poise.scheduler.model.errors import RequestError, ThroughputError, TraceError, UnknownNameError
from poise.scheduler.model.job import Job, Status


def a_trace(*jobs: TraceJob, name: str = "t") -> Trace:
    return Trace(name, jobs)


FIVE = a_trace(*(a_job(f"j{n}", at=10.0 * n, seconds=15) for n in range(5)))
ONE_GPU = Experiment(a_cluster("gpu:1"))


def test_presets_are_those_of_the_published_systems() -> None:
    assert set(PRESETS) == {"none", "gavel", "tiresias", "themis", "gandiva-fair", "gandiva", "optimus", "ffdl", "philly"}
    for preset in PRESETS.values():
        assert preset.summary
        assert "\n" not in preset.summary


def test_an_unknown_preset_gets_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="unknown preset 'gandiva-far'; did you mean gandiva-fair"):
        preset_named("gandiva-far")


def test_preset_combinators_apply_to_orders_and_leave_other_policies_alone() -> None:
    def effective(policy: str) -> str:
        return Experiment(a_cluster(), policy, combinators=PRESETS["tiresias"].combinators).effective_policy()

    assert effective("srtf") == "srtf+stable+ticks"
    assert effective("tiresias:limits=3/9") == "tiresias:limits=3/9+stable+ticks"
    assert effective("stride") == "stride"


def test_a_header_describes_the_core_that_ran() -> None:
    experiment = Experiment(a_cluster("v100:4"), "srtf", "best-fit", "+stable", Settings(Cadence.ROUNDS), seed=5)
    header = header_of(FIVE, experiment)
    assert (header.trace, header.policy, header.placement, header.seed) == ("t", "srtf+stable", "best-fit", 5)
    core = build_scheduler(header)
    assert core.policy.name == "srtf+stable"
    assert core.settings == experiment.settings


def test_placement_count_knows_no_distances_in_believed_and_true_speeds() -> None:
    cluster = Cluster((Node("a", "p100", 4), Node("b", "p100", 2), Node("c", "p100", 2)))
    job = Job("a", 0.0, 4, steps=1.0, model="VGG16", batch_size=1)
    assert speeds_of(Experiment(cluster))[1].estimate(job).rates == ((103.6, 80.4, 80.4),)
    assert speeds_of(Experiment(cluster, placement="count"))[1].estimate(job).rates == ((103.6, 103.6, 103.6),)


def test_believed_speeds_are_true_unless_true_ones_are_given() -> None:
    believed, true = speeds_of(Experiment(a_cluster("v100:1")))
    assert believed is true
    apart = Experiment(a_cluster("v100:1"), throughputs=a_table(m=2.0), truths=a_table(m=1.0))
    believed, true = speeds_of(apart)
    job = Job("a", 0.0, 1, steps=10.0, model="m")
    assert (believed.estimate(job).best(), true.estimate(job).best()) == (2, 1)


def test_a_run_gives_summary_history_and_measures() -> None:
    outcome = simulate(FIVE, ONE_GPU)
    assert (outcome.summary.jobs, outcome.summary.finished, outcome.summary.partial) == (5, 5, False)
    assert list(outcome.history.jobs) == ["j0", "j1", "j2", "j3", "j4"]
    assert outcome.measured.jcts.tolist() == [15, 20, 25, 30, 35]
    assert outcome.summary.avg_jct == 25
    assert outcome.summary.policy_seconds > 0
    assert outcome.summary.decisions > 0


def test_watch_gets_the_number_of_ended_jobs_and_can_stop_the_run(tmp_path: Path) -> None:
    heard: list[int] = []

    def watch(ended: int) -> bool:
        heard.append(ended)
        return ended < 2

    outcome = simulate(FIVE, ONE_GPU, journal=tmp_path / "journal.jsonl", watch=watch)  # not told of the second end
    assert heard == sorted(heard)
    assert heard[-1] == 2
    assert outcome.summary.partial
    assert outcome.summary.finished == 1
    assert json.loads((tmp_path / "journal.jsonl").read_text().splitlines()[-1]) == {"end": "interrupted"}
    header, replayed = replay_journal(tmp_path)
    assert header.trace == "t"
    assert replayed.instants == len(heard) - 1


def test_rounds_are_counted_only_where_there_are_rounds() -> None:
    for cadence, want in ((Cadence.EVENTS, 0), (Cadence.ROUNDS, 5), (Cadence.BOTH, 2)):
        settings = Settings(cadence, 60.0, backfill=False)
        assert simulate(FIVE, Experiment(a_cluster("gpu:1"), settings=settings)).summary.rounds == want


def test_until_counts_from_the_first_submission() -> None:
    late = a_trace(a_job("a", at=1000, seconds=5), a_job("b", at=1000, seconds=50))
    outcome = simulate(late, Experiment(a_cluster("gpu:2"), until=10))
    assert {job.id: job.status for job in outcome.history.jobs.values()} == {"a": Status.FINISHED, "b": Status.RUNNING}


def test_true_and_believed_overhead_are_separate() -> None:
    unaware = Experiment(a_cluster("gpu:1"), truth=Truth(restart_overhead=7))
    assert simulate(a_trace(a_job("a", seconds=10)), unaware).summary.avg_jct == 17


def test_the_collector_is_as_it_was_after_a_run() -> None:
    def broken(_ended: int) -> bool:
        raise RuntimeError

    assert gc.isenabled()
    simulate(FIVE, ONE_GPU)
    assert gc.isenabled()
    with pytest.raises(RuntimeError):
        simulate(FIVE, ONE_GPU, watch=broken)
    assert gc.isenabled()


def test_a_trace_of_no_jobs_is_a_run() -> None:
    outcome = simulate(a_trace(), Experiment(a_cluster(), faults="mtbf=1h"))
    assert (outcome.summary.jobs, outcome.summary.avg_jct, outcome.summary.partial) == (0, None, False)


def test_load_moves_submissions_towards_the_first() -> None:
    moved = scaled(a_trace(a_job("a", at=100), a_job("b", at=160), a_job("c", at=220)), load=2.0, most=None)
    assert [each.job.submitted for each in moved.jobs] == [100, 130, 160]
    assert [each.job.duration for each in moved.jobs] == [10, 10, 10]


def test_most_jobs_are_the_first_ones_and_load_one_changes_nothing() -> None:
    assert scaled(FIVE, load=1.0, most=None) == FIVE
    assert [each.job.id for each in scaled(FIVE, load=1.0, most=2).jobs] == ["j0", "j1"]
    assert scaled(FIVE, load=3.0, most=99).jobs[0] == FIVE.jobs[0]
    assert scaled(a_trace(), load=2.0, most=1) == a_trace()


def test_check_takes_what_can_run() -> None:
    check(FIVE, ONE_GPU)
    check(a_trace(), ONE_GPU)
    check(a_trace(a_job("huge", gpus=999)), ONE_GPU)


def unknown(name: str) -> TraceJob:
    return TraceJob(Job("a", 0.0, 1, steps=5.0, model=name))


def test_check_refuses_work_that_believed_or_true_speeds_do_not_know() -> None:
    with pytest.raises(ThroughputError, match="does not know model 'nobody'"):
        check(a_trace(unknown("nobody")), Experiment(a_cluster("v100:1")))
    apart = Experiment(a_cluster("v100:1"), throughputs=a_table(m=1.0), truths=a_table(n=1.0))
    with pytest.raises(ThroughputError, match="does not know model 'm'"):
        check(a_trace(unknown("m")), apart)


@pytest.mark.parametrize(
    "job", [a_job(seconds=2 * MOST_SECONDS), a_job(at=2 * MOST_SECONDS), a_job(seconds=1e308, gpus=8), a_job(at=1e308)]
)
def test_check_refuses_times_beyond_reason(job: TraceJob) -> None:
    with pytest.raises(RequestError, match=r"^t: expected at most 1e\+15 seconds, got "):
        check(a_trace(job), ONE_GPU)


def test_check_refuses_outages_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="nowhere: No such file"):
        check(FIVE, Experiment(a_cluster("gpu:1"), faults=str(tmp_path / "nowhere")))


def test_faults_are_drawn_from_the_seed_over_the_time_that_the_work_may_take() -> None:
    trace = a_trace(*(a_job(f"j{n}", seconds=50_000, gpus=4) for n in range(4)))

    def finishes(seed: int) -> list[float]:
        outcome = simulate(trace, Experiment(a_cluster("gpu:8"), faults="mtbf=8h,repair=1h", seed=seed))
        return [job.ended for job in outcome.history.ended_jobs()]

    assert finishes(1) == finishes(1) != finishes(2)
    assert all(each < inf for each in finishes(1))
