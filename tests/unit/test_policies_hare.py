"""`hare` in a world: its timetable where tasks are long, GPUs by middle completion time where they are short."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.builders import a_cluster

from poise.lab.experiment import Experiment, FinishedSimulation, simulate
from poise.lab.simulator.tasks import FREE, Switching
from poise.lab.simulator.world import Truth
from poise.lab.traces.schema import FailedAttempt, Trace, TraceJob
from poise.lab.traces.schema import JobOutcome as Killed
from poise.scheduler.core.settings import Cadence, Settings
from poise.scheduler.model.job import Job
from poise.scheduler.model.speed import Locality
from poise.scheduler.policies.hare import offline
from poise.scheduler.throughput.measurements import Alone, JobClass, Throughputs

SYNC = 0.5
ROUNDS = {"one": (1.0, 3.0), "two": (2.0, 2.5), "fast": (0.001, 0.003)}
"""Seconds of a task on V100 and K80, by model."""
PAIR = a_cluster("v100:1,k80:1")


def _table() -> Throughputs:
    rows = [
        Alone(JobClass(model), kind, 2, Locality.PACKED, 1.0 / (seconds + (SYNC if model != "fast" else 0.0)))
        for model, times in ROUNDS.items()
        for kind, seconds in zip(("v100", "k80"), times, strict=True)
    ]
    return Throughputs.of("example", "v100", rows)


def _job(name: str, model: str, rounds: float, at: float = 0.0, weight: float = 1.0) -> TraceJob:
    sync = 0.0 if model == "fast" else SYNC
    return TraceJob(Job(name, at, 2, steps=rounds, model=model, weight=weight, micro_batches=2, sync=sync))


def _simulated(
    *jobs: TraceJob, policy: str = "hare:long=0.5", switching: Switching | None = FREE, faults: str | None = None
) -> FinishedSimulation:
    truth = Truth(switching=switching)
    experiment = Experiment(PAIR, policy, throughputs=_table(), truth=truth, faults=faults)
    return simulate(Trace("t", jobs), experiment)


def _ends(outcome: FinishedSimulation) -> dict[str, float]:
    return {name: life.ended for name, life in outcome.history.jobs.items()}


def test_worked_example_ends_at_6_and_at_4_and_a_half() -> None:
    """The worked example of docs/algorithms/hare.md."""
    outcome = _simulated(_job("J1", "one", 2), _job("J2", "two", 1))
    assert _ends(outcome) == {"J1": 6.0, "J2": 4.5}
    assert outcome.summary.weighted_jct == 10.5
    assert outcome.summary.preemptions == 0


def test_gangs_of_the_worked_example_end_at_7_and_10() -> None:
    """Both GPUs at once, the slower one being waited for."""
    gangs = Throughputs.of(
        "gangs",
        "pair",
        [
            Alone(JobClass("one"), "pair", 2, Locality.PACKED, 1 / 3.5),
            Alone(JobClass("two"), "pair", 2, Locality.PACKED, 1 / 3.0),
        ],
    )
    jobs = tuple(
        TraceJob(Job(name, 0.0, 2, steps=steps, model=model)) for name, model, steps in (("J1", "one", 2), ("J2", "two", 1))
    )
    outcome = simulate(Trace("t", jobs), Experiment(a_cluster("pair:2"), "fifo", throughputs=gangs))
    assert _ends(outcome) == pytest.approx({"J1": 7.0, "J2": 10.0})


def test_remark_says_value_bound_and_guarantee() -> None:
    outcome = _simulated(_job("J1", "one", 2), _job("J2", "two", 1))
    ((moment, text),) = outcome.history.remarks
    assert moment == 0.0
    assert "10.5 s planned" in text
    assert "none below 7.2" in text
    assert "at most 15 times the optimum (alpha 3)" in text


def test_newcomer_makes_a_new_timetable_around_tasks_that_are_under_way() -> None:
    outcome = _simulated(_job("J1", "one", 4), _job("J2", "two", 1, at=0.25, weight=9.0))
    assert [moment for moment, _ in outcome.history.remarks] == [0.0, 0.25]
    ends = _ends(outcome)
    assert ends["J2"] < 6.0 < ends["J1"]
    assert outcome.summary.preemptions == 0


def test_weight_brings_a_job_forward() -> None:
    light = _ends(_simulated(_job("J1", "one", 3), _job("J2", "two", 2)))
    heavy = _ends(_simulated(_job("J1", "one", 3), _job("J2", "two", 2, weight=100.0)))
    assert heavy["J2"] <= light["J2"]
    assert heavy["J2"] < heavy["J1"]


def test_loading_models_makes_a_timetable_late_and_loses_nothing() -> None:
    exact = _ends(_simulated(_job("J1", "one", 3), _job("J2", "two", 2)))
    slow = _simulated(_job("J1", "one", 3), _job("J2", "two", 2), switching=Switching(resident=0.1, bandwidth=1e9))
    late = _ends(slow)
    assert slow.summary.finished == 2
    assert all(exact[name] < late[name] < exact[name] + 5.0 for name in exact)


def test_lost_node_makes_a_timetable_for_what_is_left(tmp_path: Path) -> None:
    faults = tmp_path / "faults.jsonl"
    faults.write_text('{"time": 1.5, "node": "v100-0", "duration": 3}\n')
    outcome = _simulated(_job("J1", "one", 2), _job("J2", "two", 1), faults=str(faults))
    assert outcome.summary.finished == 2
    assert [moment for moment, _ in outcome.history.remarks] == [0.0, 1.5, 4.5]


def test_short_tasks_are_dealt_out_under_leases_and_the_short_job_is_first() -> None:
    outcome = _simulated(_job("long", "fast", 3_000_000), _job("short", "fast", 1000), policy="hare")
    ends = _ends(outcome)
    assert ends["short"] == pytest.approx(2.0, rel=0.51)  # two tasks a round on one V100, or one on each GPU
    assert ends["long"] > 1000.0


def test_jobs_of_both_grains_run_side_by_side() -> None:
    outcome = _simulated(_job("J1", "one", 3), _job("J2", "two", 2), _job("short", "fast", 2000))
    assert outcome.summary.finished == 3


def test_job_of_more_tasks_than_a_timetable_has_is_dealt_with_until_few_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline, "MOST_TASKS", 30)
    outcome = _simulated(_job("J1", "one", 50), _job("J2", "two", 2))
    assert outcome.summary.finished == 2
    assert ["planned" in text for _, text in outcome.history.remarks] == [False, True]


def test_failed_and_cancelled_jobs_leave_the_timetable() -> None:
    dies = replace(_job("J1", "one", 4), failures=(FailedAttempt(1.2, "x"),))
    killed = replace(_job("J2", "two", 1), outcome=Killed.KILLED)
    outcome = _simulated(dies, killed, _job("J3", "one", 2))
    assert (outcome.summary.finished, outcome.summary.cancelled, outcome.summary.restarts) == (2, 1, 1)


def test_job_that_fails_for_good_leaves_no_gaps_in_the_timetable() -> None:
    """J2 alone takes 3 s a round: it does not keep to moments that were meant to be behind the tasks of J1."""
    dies = replace(_job("J1", "one", 40, weight=100.0), failures=(FailedAttempt(3.0, "x"),))
    experiment = Experiment(
        PAIR, "hare:long=0.5", throughputs=_table(), truth=Truth(switching=FREE), settings=Settings(retries=0)
    )
    outcome = simulate(Trace("t", (dies, _job("J2", "two", 20))), experiment)
    assert _ends(outcome)["J2"] <= 3.0 + 20 * 3.0
    assert [moment for moment, _ in outcome.history.remarks] == [0.0, 3.0]


def test_relaxation_is_remarked_on_once() -> None:
    """However often it is asked for a plan while no GPU is free."""
    experiment = Experiment(
        PAIR,
        "hare",
        throughputs=_table(),
        truth=Truth(switching=FREE),
        settings=Settings(round=100.0, cadence=Cadence.ROUNDS),
    )
    jobs = _job("a", "fast", 1e6), _job("b", "fast", 1e6)
    assert [moment for moment, _ in simulate(Trace("t", jobs), experiment).history.remarks] == [0.0]


@pytest.mark.slow
def test_same_run_twice_is_the_same_run() -> None:
    jobs = [_job(str(index), ("one", "two", "fast")[index % 3], 3 + index, at=index * 0.7) for index in range(6)]
    first, again = _simulated(*jobs), _simulated(*jobs)
    assert replace(first.summary, cpu_seconds=0.0, policy_seconds=0.0) == replace(
        again.summary, cpu_seconds=0.0, policy_seconds=0.0
    )
