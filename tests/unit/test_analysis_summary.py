"""One run in a few numbers, against numbers worked out by hand."""

import json
from dataclasses import asdict, fields
from math import inf, isfinite

import pytest
from tests.builders import Story, a_job, simulate

from poise.lab.analysis.fairness import Fairness
from poise.lab.analysis.history import History
from poise.lab.analysis.summary import UNFAIR, Effort, Summary, SummaryLabels, measure, summarise, utilisation
from poise.lab.simulator.outages import Outage
from poise.lab.traces.schema import JobOutcome
from poise.scheduler.core.settings import Cadence, Settings

EFFORT = Effort(decisions=7, cpu_seconds=1.5, policy_seconds=0.5)


def summary(
    story: Story, *, round_seconds: float | None = None, partial: bool = False, fairness: Fairness = Fairness.JOB
) -> Summary:
    history = History.of(story.entries, story.cluster)
    measured = measure(history, fairness)
    labels = SummaryLabels("fifo", "t", "gpu:4", 3, len(history.jobs))
    return summarise(history, measured, labels, EFFORT, round_seconds=round_seconds, partial=partial)


def test_utilisation_counts_an_idle_gap_as_idle() -> None:
    story = simulate([a_job("a", seconds=600), a_job("b", at=36_000, seconds=600)], cluster="gpu:1")
    assert summary(story).utilisation == pytest.approx(0.033, abs=5e-4)
    assert summary(story).utilisation == pytest.approx(1200 / 36_600)


def test_utilisation_is_over_gpus_that_were_there() -> None:
    """One of two nodes is away for half of the time; the other is always busy."""
    jobs = [a_job("a", gpus=4, seconds=100)]
    story = simulate(jobs, cluster="gpu:8", placement="consolidate", outages=[Outage(20.0, 1, 50.0)])
    assert summary(story).utilisation == pytest.approx(400 / (800 - 4 * 50))


def test_utilisation_between_two_moments_is_that_of_those_moments() -> None:
    story = simulate([a_job("a", at=10, seconds=10), a_job("b", at=40, seconds=10)], cluster="gpu:1")
    history = History.of(story.entries, story.cluster)
    assert utilisation(history, 10, 50) == 0.5
    assert utilisation(history, 10, 20) == 1
    assert utilisation(history, 20, 40) == 0
    assert utilisation(history, 15, 45) == pytest.approx(10 / 30)
    assert utilisation(history, 20, 20) == 0


def test_times_are_of_all_jobs_that_came_to_an_end_whatever_the_end() -> None:
    jobs = [
        a_job("finishes", at=5, seconds=10),
        a_job("fails", at=5, seconds=20, outcome=JobOutcome.FAILED),
        a_job("killed", at=5, seconds=60, outcome=JobOutcome.KILLED),
        a_job("huge", at=0, gpus=99),
    ]
    found = summary(simulate(jobs, cluster="gpu:4"))
    assert (found.jobs, found.finished, found.failed, found.cancelled, found.rejected, found.unfinished) == (
        4,
        1,
        1,
        1,
        1,
        0,
    )
    assert (found.avg_jct, found.median_jct, found.makespan) == (30, 20, 65)
    assert found.p99_jct == pytest.approx(20 + 0.98 * 40)
    assert found.weighted_jct == 90
    assert found.gpu_hours == pytest.approx(90 / 3600)


def test_a_lone_rejection_does_not_stretch_time() -> None:
    found = summary(simulate([a_job("huge", at=9, gpus=99)]))
    assert (found.makespan, found.utilisation, found.rounds) == (0, 0, 0)
    assert (found.avg_jct, found.worst_rho, found.jain, found.unfair_fraction) == (None, None, None, None)


def test_no_jobs_at_all_are_summed_up_too() -> None:
    found = summary(simulate([]))
    assert (found.jobs, found.makespan, found.avg_jct) == (0, 0, None)


def test_jobs_under_way_are_unfinished() -> None:
    found = summary(simulate([a_job("a"), a_job("b", seconds=99), a_job("c")], cluster="gpu:1", until=50), partial=True)
    assert (found.finished, found.unfinished, found.partial) == (1, 2, True)
    assert (found.avg_jct, found.makespan, found.utilisation) == (10, 10, 1)


def test_unfair_is_a_rho_above_eleven_tenths() -> None:
    """ρ of the n-th of five equal jobs on one GPU: n ÷ the mean number of jobs, 5, 4.5, 4, 3.5, 3 over their lives."""
    found = summary(simulate([a_job(f"{n}") for n in range(5)], cluster="gpu:1"))
    want = [n / mean for n, mean in zip((1, 2, 3, 4, 5), (5, 4.5, 4, 3.5, 3), strict=True)]
    assert found.worst_rho == pytest.approx(5 / 3)
    assert found.mean_rho == pytest.approx(sum(want) / 5)
    assert found.unfair_fraction == sum(each > UNFAIR for each in want) / 5 == 2 / 5
    paces = [1 / each for each in want]
    assert found.jain == pytest.approx(sum(paces) ** 2 / (5 * sum(pace**2 for pace in paces)))


def test_a_rho_of_just_eleven_tenths_is_fair() -> None:
    """One job alone, whose every start costs a tenth of its work."""
    for overhead, want in ((10.0, 0.0), (10.5, 1.0)):
        story = simulate([a_job("a", seconds=100)], settings=Settings(Cadence.EVENTS, restart_overhead=overhead))
        found = summary(story)
        assert found.worst_rho == pytest.approx(1 + overhead / 100)
        assert found.unfair_fraction == want


def test_fairness_between_tenants_is_passed_on() -> None:
    story = simulate([a_job("a"), a_job("b"), a_job("c")], cluster="gpu:1")
    assert summary(story, fairness=Fairness.TENANT).worst_rho == pytest.approx(3)
    assert summary(story, fairness=Fairness.JOB).worst_rho == pytest.approx(3 / 2)


@pytest.mark.parametrize(("seconds", "want"), [(None, 0), (100.0, 1), (40.0, 2), (30.0, 2), (20.0, 3), (25.0, 3)])
def test_rounds_are_those_that_began_before_the_last_finish(seconds: float | None, want: int) -> None:
    assert summary(simulate([a_job("a", seconds=60)]), round_seconds=seconds).rounds == want


def test_preemptions_migrations_and_restarts_are_sums_over_jobs() -> None:
    jobs = [a_job("long", seconds=100), a_job("short", at=10, seconds=5), a_job("dies", at=200, seconds=9, dies=(3.0, 4.0))]
    found = summary(simulate(jobs, "srtf", "gpu:1"))
    assert (found.preemptions, found.migrations, found.restarts) == (1, 0, 2)


def test_document_is_json_with_the_labels_and_the_effort() -> None:
    found = summary(simulate([a_job("a")]))
    document = json.loads(json.dumps(found.document(), allow_nan=False))
    assert document == asdict(found)
    assert list(document) == [each.name for each in fields(Summary)]
    assert (document["policy"], document["trace"], document["cluster"], document["seed"]) == ("fifo", "t", "gpu:4", 3)
    assert (document["decisions"], document["cpu_seconds"], document["policy_seconds"]) == (7, 1.5, 0.5)


def test_document_has_none_where_a_number_is_beyond_all_floats() -> None:
    found = summary(simulate([a_job("a", seconds=1e300), a_job("b", seconds=1e300)]))
    assert isfinite(found.gpu_hours)
    beyond = Summary(**(asdict(found) | {"gpu_hours": inf, "makespan": -inf}))
    assert (beyond.document()["gpu_hours"], beyond.document()["makespan"]) == (None, None)
    json.dumps(beyond.repeatable(), allow_nan=False)


def test_repeatable_leaves_out_cpu_times_and_nothing_else() -> None:
    found = summary(simulate([a_job("a")]))
    assert set(found.document()) - set(found.repeatable()) == {"cpu_seconds", "policy_seconds"}
