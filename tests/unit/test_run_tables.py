"""Runs as tables: jobs, who held which GPUs, and levels over time."""

import numpy as np
import pytest
from tests.builders import a_cluster, a_job

from poise.lab.analysis.history import cumulated
from poise.lab.analysis.run_tables import interval_table, job_table, per_job_table, timeline_table
from poise.lab.experiment import Experiment, FinishedSimulation, simulate
from poise.lab.options import ExperimentOptions, read_experiment
from poise.lab.traces.schema import Trace

RUNS = {
    "a queue": ("fifo", ExperimentOptions(cluster="v100:4,k80:8")),
    "shares": ("max-min", ExperimentOptions(cluster="v100:4,k80:8")),
    "jobs that share GPUs": ("max-min+packed", ExperimentOptions(cluster="v100:4,p100:4")),
    "tasks": ("srtf", ExperimentOptions(cluster="v100:4,k80:8", micro_batches=2)),
    "outages": ("srtf", ExperimentOptions(cluster="v100:4,k80:8", faults="mtbf=2h,repair=1h")),
    "failures": ("tiresias", ExperimentOptions(cluster="v100:4,k80:8", failures="philly")),
    "cut short": ("fifo", ExperimentOptions(cluster="v100:4", until=3600)),
}
TRACE = "synthetic:jobs=40,seed=2,rate=60,durations=lognormal:1500:1,models=resnet50/lstm/vae,sizes=1:0.7/2:0.2/4:0.1"


def ran(what: str) -> tuple[FinishedSimulation, Trace]:
    policy, options = RUNS[what]
    request = read_experiment(TRACE, options, policy)
    return simulate(request.trace, request.experiment), request.trace


def test_jobs_one_after_another_read_as_they_ran() -> None:
    trace = Trace("t", (a_job("a", at=0, seconds=10), a_job("b", at=5, seconds=10)))
    done = simulate(trace, Experiment(a_cluster("gpu:1")))
    jobs = job_table(done.history, done.measured, trace)
    assert [(row["job"], row["started"], row["finished"], row["jct"]) for row in jobs] == [
        ("a", 0, 10, 10),
        ("b", 10, 20, 15),
    ]
    assert interval_table(done.history).rows() == [
        {
            **{"job": job, "node": "gpu-0", "gpu_type": "gpu", "gpus": 1, "slots": "0"},
            **{"start": start, "end": start + 10.0, "ended": "finished", "cause": None},
        }
        for job, start in (("a", 0.0), ("b", 10.0))
    ]
    assert timeline_table(done.history).rows() == [
        {"time": time, "running": running, "waiting": waiting, "gpus": 1, "in_use": running, "in_use_gpu": running}
        for time, running, waiting in ((0.0, 1, 0), (5.0, 1, 1), (10.0, 1, 0), (20.0, 0, 0))
    ]


@pytest.mark.parametrize("what", RUNS)
def test_levels_over_time_are_those_of_the_journal(what: str) -> None:
    done, _ = ran(what)
    table = timeline_table(done.history)
    times = np.asarray(table["time"])
    assert np.all(np.diff(times) > 0)
    held_at, held = cumulated(done.history.held)
    want = np.append(0, held)[np.searchsorted(held_at, times, side="right")]
    inside = times < done.history.end  # what is open at the end is closed there
    assert np.asarray(table["in_use"])[inside].tolist() == want[inside].tolist()
    by_type = sum(np.asarray(table[name]) for name in table.columns if name.startswith("in_use_"))
    assert np.asarray(by_type).tolist() == np.asarray(table["in_use"]).tolist()
    assert np.all(np.asarray(table["in_use"]) <= np.asarray(table["gpus"]))


@pytest.mark.parametrize("what", RUNS)
def test_what_intervals_hold_adds_up_to_the_gpu_seconds_of_jobs(what: str) -> None:
    done, trace = ran(what)
    jobs, intervals = job_table(done.history, done.measured, trace), interval_table(done.history)
    held: dict[str, float] = {}
    for row in intervals:
        held[row["job"]] = held.get(row["job"], 0.0) + row["gpus"] * (row["end"] - row["start"])
        assert len(row["slots"].split("/")) == row["gpus"]
    for row in jobs:
        assert held.get(row["job"], 0.0) == pytest.approx(row["gpu_seconds"])


def test_jobs_have_the_columns_of_per_job_first() -> None:
    done, trace = ran("outages")
    plain, more = per_job_table(done.history, done.measured), job_table(done.history, done.measured, trace)
    assert more.columns[: len(plain.columns)] == plain.columns
    assert more.select(*plain.columns) == plain
    assert set(more["model"]) == {"resnet50", "lstm", "vae"}
    assert sum(row["restarts"] for row in more) == done.summary.restarts
    assert sum(row["migrations"] for row in more) == done.summary.migrations
