"""Wrong calls of the library: each one raises an error of Poise's tree that reads as one clear line."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest

import poise
from poise.policies import Order, PreemptionRule, Rank, Unfitting, check_policy
from poise.scheduler.model.errors import ClusterError, OptionError, ThroughputError, TraceError, UnknownNameError

TRACE = poise.synthetic(jobs=3, seed=1)
CLIENT = poise.Client("http://127.0.0.1:1", "none", patience=0.0)
JOB = {"job": "a", "submitted": 0, "gpus": 1, "duration": 10}


def simulated(**options: Any) -> Callable[[], object]:
    return lambda: poise.simulate(TRACE, **options)


def swept(**options: Any) -> Callable[[], object]:
    return lambda: poise.sweep(TRACE, **{"policies": ["fifo"], **options})


def compared(**options: Any) -> Callable[[], object]:
    return lambda: poise.compare(TRACE, **options)


def eldest() -> Order:
    """The job that was submitted first comes first."""
    return Order(lambda job, _previous, _memory: Rank(job.submitted), PreemptionRule.NEVER, Unfitting.SKIPPED)


nothing: Any = lambda _seed: None  # noqa: E731 - a function of any type


def traced(*rows: object) -> Callable[[], object]:
    return lambda: poise.simulate(list(rows))


def of(**changed: object) -> Callable[[], object]:
    return lambda: poise.Trace.of([{**JOB, **changed}])


WRONG: dict[str, tuple[Callable[[], object], type[poise.PoiseError], str]] = {
    # options
    "a placement misspelt": (simulated(placement="concolidate"), UnknownNameError, "did you mean consolidate"),
    "a preset misspelt": (simulated(preset="tiresia"), UnknownNameError, "unknown preset 'tiresia'; did you mean tiresias"),
    "a cadence misspelt": (simulated(cadence="round"), UnknownNameError, "unknown cadence 'round'; did you mean rounds"),
    "a fairness misspelt": (simulated(fairness="tenants"), UnknownNameError, "unknown fairness 'tenants'; did you mean"),
    "a retry rule misspelt": (simulated(retry="causes"), UnknownNameError, "unknown retry 'causes'; did you mean cause"),
    "a preset that is none": (simulated(preset=None), OptionError, "preset: expected text, got None"),
    "a placement that is a number": (simulated(placement=3), OptionError, "placement: expected text, got 3"),
    "a negative seed": (simulated(seed=-1), OptionError, "seed: expected a whole number of at least 0, got -1"),
    "half a seed": (simulated(seed=1.5), OptionError, "seed: expected a whole number of at least 0, got 1.5"),
    "a seed of text": (simulated(seed="1"), OptionError, "seed: expected a whole number of at least 0, got '1'"),
    "a seed of None": (simulated(seed=None), OptionError, "seed: expected a whole number of at least 0, got None"),
    "a true number of jobs": (simulated(jobs=True), OptionError, "jobs: expected a whole number of at least 1, got True"),
    "no jobs": (simulated(jobs=0), OptionError, "jobs: expected a whole number of at least 1, got 0"),
    "a load of 0": (simulated(load=0), OptionError, "load: expected a finite number above 0, got 0"),
    "a load of NaN": (simulated(load=float("nan")), OptionError, "load: expected a finite number above 0, got nan"),
    "a load of text": (simulated(load="2"), OptionError, "load: expected a finite number above 0, got '2'"),
    "a round of no length": (simulated(round=0), OptionError, "round: expected at least 0.001 seconds, got 0"),
    "a round of words": (simulated(round="an hour"), OptionError, "round: not a duration: 'an hour'"),
    "a negative time": (simulated(restart_overhead=-5), OptionError, "restart_overhead: expected seconds, at least 0, or"),
    "an end that never comes": (simulated(until=float("inf")), OptionError, "until: expected seconds, at least 0, or text"),
    "a list as a time": (simulated(backoff=[60]), OptionError, "backoff: expected seconds, at least 0, or text"),
    "a flag of text": (simulated(elastic="yes"), OptionError, "elastic: expected True or False, got 'yes'"),
    "a flag of 1": (simulated(backfill=1), OptionError, "backfill: expected True or False, got 1"),
    "negative patience": (simulated(patience=-1), OptionError, "patience: expected a number of at least 0, got -1"),
    "negative retries": (simulated(retries=-1), OptionError, "retries: expected a whole number of at least 0, got -1"),
    "no micro-batches": (simulated(micro_batches=0), OptionError, "micro_batches: expected a whole number of at least 1"),
    "elastic jobs with micro-batches": (
        simulated(elastic=True, micro_batches=2),
        OptionError,
        "elastic and micro_batches say different things of the same jobs; give one of the two",
    ),
    "failures beyond all": (simulated(failures=2), OptionError, "failures: expected philly, or a fraction from 0 to 1"),
    "failures of another kind": (simulated(failures="phily"), UnknownNameError, "did you mean philly"),
    "negative failures": (simulated(failures=-0.1), OptionError, "failures: expected a number of at least 0"),
    "a switching cost misspelt": (simulated(switching="residnt=1"), UnknownNameError, "did you mean resident"),
    "a switching cost of words": (simulated(switching="keep=x"), OptionError, "switching: keep: expected a number"),
    "faults that are no file": (simulated(faults="no/such.jsonl"), TraceError, "no/such.jsonl: No such file"),
    "faults as a number": (simulated(faults=3), OptionError, "faults: expected a path, got 3"),
    "a drain of no node": (simulated(drain="node@1h..2h"), poise.RequestError, "node"),
    "a drain that is a number": (simulated(drain=5), OptionError, "drain: expected text such as p100-0@1h..3h, or several"),
    "throughputs that are no file": (simulated(throughputs="no.csv"), ThroughputError, "no.csv: cannot read"),
    "throughputs as a number": (simulated(throughputs=3), OptionError, "throughputs: expected a path, got 3"),
    "true throughputs as a list": (simulated(true_throughputs=[]), OptionError, "true_throughputs: expected a path, got []"),
    "an estimate of another kind": (simulated(estimate="guess"), ThroughputError, "estimate 'guess': expected profiled:"),
    "an estimate as a number": (simulated(estimate=1), OptionError, "estimate: expected text, got 1"),
    "a format misspelt": (
        lambda: poise.simulate("synthetic.csv", format="gavl"), UnknownNameError, "unknown trace format 'gavl'; did you",
    ),
    "a journal in no folder": (simulated(journal="no/such/journal"), poise.RequestError, "there is no folder no/such"),
    "a journal and a folder": (simulated(journal="a", out="b"), OptionError, "out and journal both name a place"),
    "a folder as a number": (simulated(out=3), OptionError, "out: expected a path, got 3"),
    "progress of another kind": (simulated(progress="line"), OptionError, 'progress: expected "bar", or a function'),
    # policies
    "a policy misspelt": (simulated(policy="tiresas"), UnknownNameError, "unknown policy 'tiresas'; did you mean tiresias"),
    "a parameter misspelt": (simulated(policy="tiresias:limit=3"), UnknownNameError, "did you mean limits"),
    "a combinator misspelt": (simulated(policy="max-min+agnstic"), UnknownNameError, "did you mean agnostic"),
    "a policy that is a number": (simulated(policy=5), poise.RequestError, "expected a Listing, an Order, a Planner"),
    "no policy": (simulated(policy=None), poise.RequestError, "expected a Listing, an Order, a Planner"),
    "a policy of no module": (simulated(policy="no_such_module:POLICY"), poise.RequestError, "there is no module"),
    "no policies": (lambda: poise.compare(TRACE, policies=[]), OptionError, "policies: expected at least one"),
    "policies of blanks": (lambda: poise.compare(TRACE, policies=" , "), OptionError, "policies: expected at least one"),
    "policies as None": (compared(policies=None), OptionError, "policies: expected policies, e.g."),
    "a policy twice": (
        lambda: poise.compare(TRACE, policies=["fifo", "fifo"]), OptionError, "policies: expected different policies, got",
    ),
    "a combinator that does not apply": (
        lambda: poise.compare(TRACE, policies=["fifo", "srtf+packed"]), poise.RequestError, "+packed applies to",
    ),
    "no processes": (
        lambda: poise.compare(TRACE, policies="fifo", processes=0), OptionError, "processes: expected a whole number of at",
    ),
    # clusters
    "a cluster as a number": (simulated(cluster=5), ClusterError, "cluster: expected text such as v100:8,k80:16, a path,"),
    "no cluster": (simulated(cluster=None), ClusterError, "cluster: expected text such as"),
    "a cluster of no GPUs": (simulated(cluster="v100:0"), ClusterError, "needs at least 1 GPU"),
    "a cluster of words": (simulated(cluster="ten gpus"), ClusterError, "is not TYPE:GPUS"),
    "a cluster in no file": (simulated(cluster=Path("no.yaml")), ClusterError, "no.yaml: No such file"),
    "a cluster of no nodes": (simulated(cluster=[]), ClusterError, "the cluster has no node"),
    "nodes that are numbers": (simulated(cluster=[4, 4]), ClusterError, "cluster: node 1: expected {type: NAME, gpus:"),
    "a node of no GPUs": (lambda: poise.Cluster((poise.Node("a", "v100", 0),)), ClusterError, "node 'a' has 0 GPUs"),
    "two nodes of a name": (
        lambda: poise.cluster([poise.Node("a", "v100", 1), poise.Node("a", "v100", 1)]), ClusterError, "have the same name",
    ),
    "half a GPU": (
        simulated(cluster=[poise.Node("a", "v100", 1.5)]),  # type: ignore[arg-type]
        ClusterError, "node 'a': expected a whole number of GPUs",
    ),
    "a node without a type": (simulated(cluster=[{"gpus": 4}]), ClusterError, "cluster: node 1: expected {type: NAME"),
    "a node with an unknown key": (simulated(cluster=[{"type": "v100", "gpu": 4}]), ClusterError, "unknown key 'gpu'"),
    "a cluster of other keys": (simulated(cluster={"v100": 8}), ClusterError, "cluster: expected a list `nodes`"),
    # traces
    "a trace as a number": (lambda: poise.simulate(5), poise.RequestError, "trace: expected jobs, rows, a data frame"),
    "no trace": (lambda: poise.simulate(None), poise.RequestError, "trace: expected jobs, rows, a data frame"),
    "a trace in no file": (lambda: poise.simulate("no.jsonl"), TraceError, "no.jsonl: no such file"),
    "a number to be read": (lambda: poise.read_trace(5), OptionError, "path: expected a path,"),  # type: ignore[arg-type]
    "an empty trace": (lambda: poise.simulate(TRACE.head(0)), OptionError, "trace: expected at least one job, got none"),
    "an empty list": (lambda: poise.simulate([]), TraceError, "trace: expected at least one job, got none"),
    "an empty trace of a sweep": (lambda: poise.sweep(TRACE.head(0), policies="fifo"), OptionError, "expected at least"),
    "a row that is a number": (traced(5), TraceError, "trace:1: expected a Job, or a mapping"),
    "a row without a duration": (traced({"job": "a", "submitted": 0, "gpus": 1}), TraceError, "trace:1: duration: expected"),
    "the second row": (traced(JOB, {"job": "b"}), TraceError, "trace:2: submitted: expected a value, got nothing"),
    "two jobs of a name": (traced(JOB, JOB), TraceError, "trace:2: expected a new job id, got 'a'"),
    "a column misspelt": (of(duraton=3), TraceError, "did you mean duration"),
    "negative GPUs": (of(gpus=-1), TraceError, "trace:1: gpus: expected a whole number from 1 to 1,000,000, got -1"),
    "half a GPU asked for": (of(gpus=0.5), TraceError, "trace:1: gpus: expected a whole number"),
    "GPUs of text": (of(gpus="two"), TraceError, "trace:1: gpus: expected a number, got 'two'"),
    "a duration of NaN": (of(duration=float("nan")), TraceError, "trace:1: duration: expected a finite number, got nan"),
    "a duration without end": (of(duration=float("inf")), TraceError, "trace:1: duration: expected a finite number"),
    "a negative submission": (of(submitted=-1), TraceError, "trace:1: submitted: expected a number of at least 0, got -1"),
    "a time stamp": (of(submitted=pd.Timestamp(0)), TraceError, "trace:1: submitted: expected a number, got Timestamp"),
    "a weight of 0": (of(weight=0), TraceError, "trace:1: weight: expected a number above 0, got 0"),
    "a job of NaN": (
        lambda: poise.simulate([poise.Job("a", 0, 1, duration=float("nan"))]), TraceError, "duration: expected a finite",
    ),
    "a job of no work": (lambda: poise.simulate([poise.Job("a", 0, 1)]), TraceError, "trace:1: duration: expected seconds"),
    "a data frame without columns": (
        lambda: poise.simulate(pd.DataFrame({"job": ["a"], "gpus": [1]})), TraceError, "trace:1: submitted: expected a",
    ),
    "a data frame with a gap": (
        lambda: poise.simulate(pd.DataFrame([JOB, {**JOB, "job": "b", "duration": None}])), TraceError, "trace:2:",
    ),
    "a data frame of other columns": (
        lambda: poise.simulate(pl.DataFrame({"id": [1], "runtime": [2]})), TraceError, "expected a column of a Poise",
    ),
    "a model that no table knows": (
        traced({"job": "a", "submitted": 0, "gpus": 1, "steps": 5, "model": "x"}), ThroughputError, "does not know model",
    ),
    "jobs without a Trace around them": (
        lambda: poise.Trace("t", (poise.Job("a", 0, 1, duration=1),)),  # type: ignore[arg-type]
        poise.RequestError, "Trace.of makes one of jobs, rows or a data frame",
    ),
    "a load below 0 of a trace": (lambda: TRACE.scaled(load=-1), OptionError, "load: expected a number above 0,"),
    "a trace written as text": (lambda: TRACE.write("t.txt"), poise.RequestError, "t.txt: expected a file that ends in"),
    "a negative head": (lambda: TRACE.head(-1), OptionError, "jobs: expected a whole number of at least 0, got -1"),
    "a knob misspelt": (lambda: poise.synthetic(job=3), UnknownNameError, "unknown knob of a synthetic trace 'job'; did"),
    "a knob out of range": (lambda: poise.synthetic(jobs=0), poise.RequestError, "synthetic:jobs: expected"),
    "a knob with a comma": (lambda: poise.synthetic(models="a,b"), OptionError, "models: expected no comma, got 'a,b'"),
    "a format that is a list": (
        lambda: poise.read_trace("synthetic:", format=[1]), OptionError, "format: expected text, got [1]",  # type: ignore[arg-type]
    ),
    "a span of words": (
        lambda: TRACE.between("a", 3), OptionError, "start: expected seconds, got 'a'",  # type: ignore[arg-type]
    ),
    "GPUs of a node as a list": (
        lambda: poise.cluster([poise.Node("a", "v100", [1])]), ClusterError, "expected a whole number of GPUs",  # type: ignore[arg-type]
    ),
    "a name of a node as a list": (
        lambda: poise.cluster([poise.Node([1], "v100", 1)]), ClusterError, "expected nodes with name",  # type: ignore[arg-type]
    ),
    "a trace written to a number": (lambda: TRACE.write(3), OptionError, "path: expected a path, got 3"),  # type: ignore[arg-type]
    "a duration of ten thousand letters": (simulated(until="a" * 10_000), OptionError, "until: not a duration: 'aaa"),
    "a placement of ten thousand letters": (simulated(placement="a" * 10_000), UnknownNameError, "unknown placement 'aaa"),
    # sweeps
    "loads of text": (swept(loads="a"), OptionError, "loads: expected numbers above 0, e.g. [0.5, 1, 2], got 'a'"),
    "loads of texts": (swept(loads=["1"]), OptionError, "loads: expected a number, got '1'"),
    "a load twice": (swept(loads=[1, 1.0]), OptionError, "loads: expected different numbers, got 1 twice"),
    "a load of 0 among others": (swept(loads=[1, 0]), OptionError, "loads: expected finite numbers above 0"),
    "no loads": (swept(loads=[]), OptionError, "loads: expected finite numbers above 0, e.g. 0.5,1,2, got none"),
    "loads of None": (swept(loads=None), OptionError, "loads: expected numbers above 0"),
    "load and loads": (swept(loads=[1, 2], load=3), OptionError, "load and loads say different things of the same trace"),
    "no seeds": (swept(seeds=0), OptionError, "seeds: expected a whole number from 1 to 10,000, got 0"),
    "seeds of text": (swept(seeds="3"), OptionError, "seeds: expected a whole number from 1 to 10,000, got '3'"),
    "a seed twice": (swept(seeds=[1, 1]), OptionError, "seeds: expected a number of runs, or different seeds"),
    "a seed before the first": (swept(seeds=[1, 2], seed=2), OptionError, "seeds: expected a whole number of at least 2,"),
    "too many cells": (swept(seeds=10_000, loads=range(1, 200)), poise.RequestError, "expected at most 1,000,000 cells"),
    "a function that returns no trace": (
        lambda: poise.sweep(nothing, policies="fifo"), poise.RequestError, "trace: expected jobs, rows, a data",
    ),
    "a state in no folder": (swept(state="no/such/s.jsonl"), poise.RequestError, "state no/such/s.jsonl: there is no"),
    "a state as a number": (swept(state=3), OptionError, "state: expected a path, got 3"),
    "a state of policies that are objects": (
        swept(state="s.jsonl", policies=[eldest]), OptionError, "state: runs are kept by the names of policies",
    ),
    "a state of a function": (
        lambda: poise.sweep(lambda seed: TRACE, policies="fifo", state="s.jsonl"), OptionError, "state: runs are kept by",
    ),
    "times beyond reason": (swept(loads=[1e-300]), poise.RequestError, "expected at most 1e+15 seconds"),
    # values of other libraries, of many lines, and of no file
    "a value of several lines": (simulated(round=pd.DataFrame({"a": [1, 2]})), OptionError, "round: expected seconds, at"),
    "a name of several lines": (lambda: poise.read_trace("a\nb"), TraceError, "a b: no such file"),
    "a name with a zero byte": (simulated(faults="a\0b"), OptionError, r"faults: 'a\x00b': embedded null byte"),
    "a name of half a character": (simulated(out="\ud800"), OptionError, "out: '\\ud800': 'utf-8' codec can't encode"),
    "a name that is too long": (simulated(journal="9" * 5000), OptionError, "File name too long"),
    "a policy of ten thousand digits": (simulated(policy="9" * 10_000), UnknownNameError, "unknown policy '999"),
    "a journal that is a folder": (simulated(journal="."), poise.RequestError, "journal .: is a folder; name a file"),
    "no placement": (simulated(placement=""), UnknownNameError, "unknown placement ''; known: best-fit"),
    "an array without a dimension": (swept(loads=np.array(2)), OptionError, "loads: expected numbers above 0, e.g."),
    "policies in an array without a dimension": (compared(policies=np.array("fifo")), OptionError, "policies: expected"),
    "a drain without a dimension": (simulated(drain=np.array("x")), OptionError, "drain: expected text such as"),
    "a cluster without a dimension": (simulated(cluster=np.array(4)), ClusterError, "cluster: expected text such as"),
    "progress of several values": (simulated(progress=np.arange(3)), OptionError, 'progress: expected "bar", or a function'),
    "freshness of text": (swept(fresh="yes"), OptionError, "fresh: expected True or False, got 'yes'"),
    "a column as a trace": (lambda: poise.simulate(pd.Series([1])), TraceError, "trace:1: expected a Job, or a mapping"),
    "a column of Polars as a trace": (lambda: poise.simulate(pl.Series([1])), TraceError, "trace:1: expected a Job, or"),
    "a value that pandas does not have": (of(gpus=pd.NA), TraceError, "trace:1: gpus: expected a number, got <NA>"),
    "a data frame as a model": (of(model=pd.DataFrame({"a": [1]})), TraceError, "trace:1: model: expected a name, got"),
    "an array as a duration": (traced(poise.Job("a", 0, 1, duration=np.arange(3))), TraceError, "trace:1: duration: "),  # type: ignore[arg-type]
    "a TraceJob of nothing": (traced(poise.TraceJob(None)), TraceError, "trace:1: job: expected a value of"),  # type: ignore[arg-type]
    "failures of None": (
        traced(poise.TraceJob(poise.Job("a", 0, 1, duration=1), failures=None)), TraceError, "failures: expected a value of",  # type: ignore[arg-type]
    ),
    "notes of None": (lambda: poise.Trace("t", (), None), OptionError, "notes: expected a tuple of text, got None"),  # type: ignore[arg-type]
    "a name of a trace that is none": (lambda: poise.Trace(None, ()), OptionError, "name: expected text, got None"),  # type: ignore[arg-type]
    "a load beyond number": (lambda: TRACE.scaled(10**400), OptionError, "load: expected a number above 0, got 1000"),
    "a filter that is none": (lambda: TRACE.where(5), OptionError, "keep: expected a function of a job, got 5"),  # type: ignore[arg-type]
    "a trace written to a folder": (lambda: TRACE.write("."), OptionError, "path: .: is a folder; name a file"),
    "a Cluster of a number": (lambda: poise.Cluster(5), ClusterError, "nodes: expected Nodes, got 5"),  # type: ignore[arg-type]
    "a Cluster of text": (lambda: poise.Cluster(("v100:4",)), ClusterError, "nodes: expected Nodes, got ('v100:4',)"),  # type: ignore[arg-type]
    "speeds of None": (
        simulated(cluster=poise.Cluster((poise.Node("a", "v100", 1),), speeds=None)),  # type: ignore[arg-type]
        ClusterError, "cluster: speeds: expected a number for each GPU type, got None",
    ),
    "a price of text": (
        simulated(cluster=poise.Cluster((poise.Node("a", "v100", 1),), prices={"v100": "3"})),  # type: ignore[dict-item]
        ClusterError, "cluster: type 'v100': price: expected a number above 0",
    ),
    "a rack that is a list": (simulated(cluster=[{"type": "v100", "gpus": 1, "rack": [1]}]), ClusterError, "rack: "),
    "types that are a number": (simulated(cluster={"nodes": [{"type": "a", "gpus": 1}], "types": 0}), ClusterError, "types"),
    "no worlds of None": (lambda: check_policy("fifo", seeds=None), OptionError, "seeds: expected a whole"),  # type: ignore[arg-type]
    "a first world of text": (lambda: check_policy("fifo", seed="1"), OptionError, "seed: expected a whole number of at"),  # type: ignore[arg-type]
    "an order that preempts by a word": (
        lambda: Order(lambda *_: Rank(0.0), "never", Unfitting.SKIPPED),  # type: ignore[arg-type]
        poise.RequestError, "preemption: expected one of PreemptionRule.",
    ),
    "an order of a number": (
        lambda: Order(3, PreemptionRule.NEVER, Unfitting.SKIPPED),  # type: ignore[arg-type]
        poise.RequestError, "rank: expected a function of (job, previous, memory), got 3",
    ),
    # a service
    "a server of None": (lambda: poise.Client(None, "t"), poise.RequestError, "url: expected text, got NoneType"),  # type: ignore[arg-type]
    "a token of None": (lambda: poise.Client("http://a", None), poise.RequestError, "token: expected text, got NoneType"),  # type: ignore[arg-type]
    "a node of None": (lambda: CLIENT.drain(None), poise.RequestError, "node: None is no name of a node"),  # type: ignore[arg-type]
    "a tenant of a number": (lambda: CLIENT.set_weight(3, 1.0), poise.RequestError, "tenant: 3 is no name of a tenant"),  # type: ignore[arg-type]
    "no jobs to wait for": (lambda: CLIENT.wait(None), poise.RequestError, "jobs: expected a list, got None"),  # type: ignore[arg-type]
    "jobs to wait for as text": (lambda: CLIENT.wait("12"), poise.RequestError, "jobs: expected a list, got '12'"),
    "jobs to submit of None": (lambda: CLIENT.submit_all(None), poise.RequestError, "requests: expected a list, got None"),  # type: ignore[arg-type]
    "states of a number": (lambda: CLIENT.queue(states=3), poise.RequestError, "states: expected a list, got 3"),  # type: ignore[arg-type]
    "weights of a number": (lambda: CLIENT.set_weights(3), poise.RequestError, "weights: expected a list, got 3"),  # type: ignore[arg-type]
    "a table of a number": (lambda: poise.Table(5), OptionError, "columns: expected a mapping of names to columns"),  # type: ignore[arg-type]
    "a column of a number": (lambda: poise.Table({"a": 5}), OptionError, "columns: expected several values in 'a'"),  # type: ignore[dict-item]
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_call_is_one_line_of_the_tree(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call, kind, want = WRONG[what]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(poise.RequestError) as caught:
        call()
    message = str(caught.value)
    assert isinstance(caught.value, kind)
    assert want in message
    assert "\n" not in message
    assert len(message) < 600
    assert "--" not in message
    assert list(tmp_path.iterdir()) == []


@cache
def result() -> poise.SimulationResult:
    return poise.simulate(TRACE)


@cache
def of_two() -> poise.ComparisonResult:
    return poise.compare(TRACE, policies=["fifo", "srtf"], processes=1)


@cache
def of_loads() -> poise.SweepResult:
    return poise.sweep(TRACE, policies=["fifo", "srtf"], loads=[1, 2], processes=1)


ASKED: dict[str, tuple[Callable[[], object], str]] = {
    "a key of a summary": (lambda: result().summary["avg_jtc"], "unknown key of a summary 'avg_jtc'; did you mean avg_jct"),
    "a column": (lambda: result().jobs["job_id"], "unknown column 'job_id'; did you mean job"),
    "a policy of a comparison": (lambda: of_two()["fif"], "unknown policy"),
    "a policy that was not compared": (lambda: of_two()["las"], "unknown policy of this comparison 'las'"),
    "a number that is none": (lambda: of_two().best("policy"), "unknown number of a summary 'policy'"),
    "a number misspelt": (lambda: of_two().plot("avgjct"), "did you mean avg_jct"),
    "a baseline": (lambda: of_loads().against("las"), "unknown policy of this sweep 'las'"),
    "a load": (lambda: of_loads().best("avg_jct", load=3), "load: expected one of 1, 2, got 3"),
    "no load of several": (lambda: of_loads().best("avg_jct"), "load: expected one of 1, 2, got None"),
    "a page that is a number": (lambda: of_two().html(3), "path: expected a path, got 3"),  # type: ignore[arg-type]
    "a file that is a list": (lambda: result().jobs.write([]), "path: expected a path, got []"),  # type: ignore[arg-type]
    "a number of several": (lambda: of_two().best(pd.Series([1, 2])), "unknown number of a summary"),
    "a load of several": (
        lambda: of_loads().best("avg_jct", load=np.arange(2)),  # type: ignore[arg-type]
        "load: expected one of 1, 2, got array([0, 1])",
    ),
    "a page that is a folder": (lambda: result().html("."), "path: .: is a folder; name a file"),
    "a table as a folder": (lambda: result().jobs.write("."), "path: .: is a folder; name a file"),
    "a filter of rows that is none": (lambda: result().jobs.where(3), "keep: expected a function of a row, got 3"),  # type: ignore[arg-type]
    "what to draw of several": (lambda: result().plot_timeline(what=pd.Series([1])), "what: expected gpus or jobs,"),
    "what to draw": (lambda: result().plot_timeline(what="gpu"), "what: expected gpus or jobs,"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("what", ASKED)
def test_a_wrong_question_to_a_result_is_one_line_of_the_tree(what: str) -> None:
    ask, want = ASKED[what]
    with pytest.raises(poise.RequestError) as caught:
        ask()
    assert want in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("function", "keywords", "want"),
    [
        (poise.simulate, {"polcy": "fifo"}, "simulate() got an unexpected keyword argument 'polcy'; did you mean policy?"),
        (
            poise.simulate,
            {"policies": ["fifo"]},
            "simulate() got an unexpected keyword argument 'policies'; did you mean policy?",
        ),
        (poise.compare, {"policies": ["fifo"], "clustr": "v100:4"}, "did you mean cluster?"),
        (poise.sweep, {"policies": ["fifo"], "load_s": [1]}, "did you mean loads?"),
    ],
)
def test_a_keyword_that_is_not_there_is_a_type_error_with_the_nearest(
    function: Callable[..., object], keywords: dict[str, Any], want: str
) -> None:
    with pytest.raises(TypeError) as caught:
        function(TRACE, **keywords)
    assert want in str(caught.value)


def test_a_folder_that_holds_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    for call in (lambda: poise.simulate(TRACE, out=tmp_path), lambda: poise.compare(TRACE, policies="fifo", out=tmp_path)):
        with pytest.raises(poise.RequestError, match=r"^out /.*: holds thesis\.txt and no run; name a new folder$"):
            call()
    with pytest.raises(poise.RequestError, match=r"there is a file of another kind; name another one$"):
        poise.simulate(TRACE, journal=tmp_path / "thesis.txt")
    assert (tmp_path / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize(("raised", "want"), [(SystemExit(3), "SystemExit: 3"), (FileNotFoundError("no.csv"), "no.csv")])
def test_a_policy_that_exits_or_reads_no_file_is_blamed_with_its_line(raised: BaseException, want: str) -> None:
    def rank(*_: object) -> Rank:
        raise raised

    def fleeing() -> Order:
        return Order(rank, PreemptionRule.NEVER, Unfitting.SKIPPED)

    with pytest.raises(poise.PoiseError) as caught:
        poise.simulate(TRACE, policy=fleeing)
    assert "test_library_refusals.py" in str(caught.value)
    assert want in str(caught.value)
    assert "\n" not in str(caught.value)
