"""Traces and clusters as values: built in code, from tables, and written for `read_trace`."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest

import poise
from poise.lab.clusters import cluster
from poise.lab.traces.schema import FailedAttempt, JobOutcome, LossCurve, Trace, TraceJob
from poise.scheduler.model.cluster import Cluster, Node, parse_cluster
from poise.scheduler.model.job import Job, Yields

ROWS: list[dict[str, Any]] = [
    {"job": "late", "submitted": 50, "gpus": 2, "duration": 60.0, "tenant": "x", "model": "vae"},
    {"job": "early", "submitted": 0.5, "gpus": 1, "steps": 100, "model": "vae", "gpu_types": ["v100", "k80"], "weight": 2},
    {"job": 3, "submitted": 10, "gpus": 1, "duration": 5, "failures": [[3, "oom"], [4, "cuda-failure"]], "priority": -1},
    {"job": "d", "submitted": 20, "gpus": 4, "duration": 5, "min_gpus": 2, "max_gpus": 8, "loss": [0.1, 1, 0.5]},
    {
        "job": "e",
        "submitted": 30,
        "gpus": 1,
        "duration": 5,
        "failures": [[2, "x"]],
        "broken": True,
        "deadline": 90,
        "name": "n",
    },
]
TRACE = Trace.of(ROWS, name="five")


def test_a_trace_of_rows_is_sorted_by_submission_and_read_like_a_file() -> None:
    assert [job.id for job in TRACE] == ["early", "3", "d", "e", "late"]
    assert TRACE.jobs[0].job == Job("early", 0.5, 1, steps=100.0, model="vae", gpu_types=("v100", "k80"), weight=2.0)
    assert TRACE.jobs[1].failures == (FailedAttempt(3.0, "oom"), FailedAttempt(4.0, "cuda-failure"))
    assert TRACE.jobs[2].loss == LossCurve(0.1, 1.0, 0.5)
    assert (TRACE.jobs[3].broken, TRACE.jobs[3].outcome) == (True, JobOutcome.FAILED)


def test_ties_stay_in_the_order_of_the_rows() -> None:
    trace = Trace.of([Job(name, 0, 1, duration=1) for name in "bca"])
    assert [job.id for job in trace] == ["b", "c", "a"]


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_a_trace_that_is_written_is_read_again_as_it_was(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"five.{ending}"
    TRACE.write(path)
    assert poise.read_trace(path).jobs == TRACE.jobs
    assert poise.read_trace(str(path), format="poise").jobs == TRACE.jobs


def test_tables_of_all_libraries_make_the_same_trace() -> None:
    for table in (TRACE.table, TRACE.table.to_pandas(), TRACE.table.to_polars(), TRACE.table.to_arrow()):
        assert Trace.of(table).jobs == TRACE.jobs
    assert Trace.of(pd.DataFrame(ROWS[:1])).jobs == Trace.of(ROWS[:1]).jobs
    assert Trace.of(pl.DataFrame(ROWS[:1])).jobs == Trace.of(ROWS[:1]).jobs


def test_jobs_rows_and_jobs_of_traces_may_be_mixed() -> None:
    owned = Job("own", 1.0, 2, duration=3.0, yields=Yields.NEVER, tenant_weight=2.0)
    killed = TraceJob(Job("k", 2.0, 1, duration=1.0), JobOutcome.KILLED)
    trace = Trace.of([killed, owned, {"job": "r", "submitted": 0, "gpus": np.int32(1), "duration": np.float32(2)}])
    assert [each.job.id for each in trace.jobs] == ["r", "own", "k"]
    assert trace.jobs[1].job == owned
    assert trace.jobs[2] == killed
    assert type(trace[0].gpus) is int


def test_a_trace_is_cut_and_scaled_without_being_changed() -> None:
    assert [job.id for job in TRACE.head(2)] == [job.id for job in TRACE[:2]] == ["early", "3"]
    assert [job.id for job in TRACE.between(10, 30)] == ["3", "d"]
    assert [job.id for job in TRACE.where(lambda job: job.gpus > 1)] == ["d", "late"]
    assert [job.submitted for job in TRACE.scaled(load=2)] == [0.5, 5.25, 10.25, 15.25, 25.25]
    assert TRACE.scaled(1) is TRACE
    assert (TRACE[-1].id, len(TRACE), len(TRACE[:0])) == ("late", 5, 0)
    assert [job.id for job in TRACE[::-2]] == ["early", "d", "late"]  # by submission, whichever way it was cut


def test_a_trace_says_itself() -> None:
    assert repr(TRACE) == "Trace('five': 5 jobs of 2 tenants, submitted within 50s)"
    assert repr(TRACE[:0]) == "Trace('five': no jobs)"
    assert "<table>" in TRACE._repr_html_()


def test_synthetic_traces_take_numbers_lists_and_shares() -> None:
    trace = poise.synthetic(jobs=30, seed=2, sizes={1: 0.5, 2: 0.5}, models=["vae", "lstm"], durations="fixed:60")
    assert trace == poise.read_trace("synthetic:jobs=30,seed=2,sizes=1:0.5/2:0.5,models=vae/lstm,durations=fixed:60")
    assert {job.gpus for job in trace} == {1, 2}
    assert trace.name == "synthetic:jobs=30,seed=2,sizes=1:0.5/2:0.5,models=vae/lstm,durations=fixed:60"


def test_a_cluster_is_made_of_text_files_mappings_and_nodes(tmp_path: Path) -> None:
    want = parse_cluster("v100:8,k80:4")
    (tmp_path / "c.toml").write_text(
        'nodes = [{type = "v100", gpus = 4, count = 2}, {type = "k80", gpus = 4, name = "k80-0"}]'
    )
    entries = [{"type": "v100", "gpus": 4, "count": 2}, {"type": "k80", "gpus": 4, "name": "k80-0"}]
    nodes: list[Any] = [
        *(want, "v100:8,k80:4", tmp_path / "c.toml", str(tmp_path / "c.toml"), {"nodes": entries}, entries),
        *(list(want.nodes), [entries[0], want.nodes[2]], Cluster(list(want.nodes))),  # type: ignore[arg-type]
    ]
    for given in nodes:
        assert cluster(given) == want
    priced = cluster({"nodes": entries, "types": {"k80": {"price": 0.5}}})
    assert priced.prices == {"k80": 0.5}
    assert repr(want) == "Cluster(v100:8,k80:4: 12 GPUs on 3 nodes in 1 rack)"
    assert cluster([Node("a", "v100", 4, rack="north")]).nodes[0].rack == "north"
