"""`import poise`: the library gives what the command line gives, in scripts and threads, and leaves nothing behind."""

import inspect
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pandas as pd
import pytest
from tests.shell import FOUR, PATIENCE, a_trace, wait_until
from tests.shell import poise as said

import poise
from poise.cli.experiment import experiment_options
from poise.lab.library.keywords import ExperimentKeywords
from poise.lab.options import NAMES, ExperimentOptions
from poise.policies import JobView, Order, PreemptionRule, Rank, Unfitting

TRACE = "synthetic:jobs=60,seed=5,rate=60,durations=lognormal:1500:1,models=resnet50/lstm/vae,sizes=1:0.7/2:0.2/4:0.1"
ON: dict[str, Any] = {"cluster": "v100:4,k80:8"}
EFFORT = ("cpu_seconds", "policy_seconds")

EQUAL: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "nothing": ({}, ()),
    "a cluster and a policy": (ON | {"policy": "max-min"}, ("--cluster", "v100:4,k80:8", "--policy", "max-min")),
    "a preset": ({"preset": "tiresias", "policy": "srtf"}, ("--preset", "tiresias", "--policy", "srtf")),
    "rounds": (
        {"round": "5m", "cadence": "rounds", "backfill": False},
        ("--round", "5m", "--cadence", "rounds", "--no-backfill"),
    ),
    "load and a part": ({"load": 2, "jobs": 30}, ("--load", "2", "--jobs", "30")),
    "outages": (
        ON | {"faults": "mtbf=3h,repair=1h", "seed": 4, "drain": ["v100-0@1h..2h", "k80-1@2h..3h"]},
        ("--cluster", "v100:4,k80:8", "--faults", "mtbf=3h,repair=1h", "--seed", "4", "--drain", "v100-0@1h..2h",
         "--drain", "k80-1@2h..3h"),
    ),
    "failures": ({"failures": 0.3, "retries": 2, "seed": 1}, ("--failures", "0.3", "--retries", "2", "--seed", "1")),
    "tasks": (
        ON | {"micro_batches": 2, "switching": "free"},
        ("--cluster", "v100:4,k80:8", "--micro-batches", "2", "--switching", "free"),
    ),
    "estimates": (
        ON | {"estimate": "profiled:types=1", "policy": "max-min", "placement": "count"},
        ("--cluster", "v100:4,k80:8", "--estimate", "profiled:types=1", "--policy", "max-min", "--placement", "count"),
    ),
    "elastic jobs, cut short": (
        {"elastic": True, "until": 7200, "fairness": "tenant", "restart_overhead": 30, "policy": "las"},
        ("--elastic", "--until", "2h", "--fairness", "tenant", "--restart-overhead", "30", "--policy", "las"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", EQUAL)
def test_a_run_is_the_same_to_the_byte_as_on_the_command_line(what: str, tmp_path: Path) -> None:
    options, words = EQUAL[what]
    result = poise.simulate(TRACE, out=tmp_path / "library", **options)
    summary = said("simulate", TRACE, *words, "--out", tmp_path / "cli", "--json", "--quiet").json
    mine = result.summary.document()
    assert {key: mine[key] for key in mine if key not in EFFORT} == {
        key: summary[key] for key in summary if key not in EFFORT
    }
    for name in ("journal.jsonl", "summary.json", "jobs.csv"):
        assert (tmp_path / "library" / name).read_bytes() == (tmp_path / "cli" / name).read_bytes()
    assert poise.simulate(TRACE, journal=tmp_path / "alone.jsonl", **options).jobs == result.jobs
    assert (tmp_path / "alone.jsonl").read_bytes() == (tmp_path / "cli" / "journal.jsonl").read_bytes()


@pytest.mark.parametrize("processes", [1, 2])
def test_a_comparison_is_the_same_as_on_the_command_line(processes: int, tmp_path: Path) -> None:
    names = ["fifo", "tiresias:limits=300/900,promote=8", "max-min"]
    comparison = poise.compare(TRACE, policies=names, processes=processes, out=tmp_path / "library", **ON)
    files = ("--out", tmp_path / "cli", "--per-job", tmp_path / "jobs.json", "--html", tmp_path / "cli.html")
    rows = said(
        "compare", TRACE, "--cluster", ON["cluster"], "--policies", ",".join(names), *files, "--json", "--quiet"
    ).json
    assert [{key: row[key] for key in row if key not in EFFORT} for row in comparison.summaries] == [
        {key: row[key] for key in row if key not in EFFORT} for row in rows
    ]
    written = {path.relative_to(tmp_path / "cli") for path in (tmp_path / "cli").rglob("*") if path.is_file()}
    assert len(written) == 10
    for path in written:
        assert (tmp_path / "library" / path).read_bytes() == (tmp_path / "cli" / path).read_bytes()
    jobs = json.loads((tmp_path / "jobs.json").read_text())
    assert comparison.jobs.select(*jobs[0]).rows() == jobs
    comparison.html(tmp_path / "library.html")
    assert (tmp_path / "library.html").read_bytes() == (tmp_path / "cli.html").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_sweep_is_the_same_as_on_the_command_line(processes: int, cache: Path, tmp_path: Path) -> None:
    result = poise.sweep(TRACE, policies="fifo,srtf", loads=[0.5, 2], seeds=3, seed=2, processes=processes)
    words = ("--policies", "fifo,srtf", "--loads", "0.5,2", "--seeds", "3", "--seed", "2", "--html", tmp_path / "cli.html")
    rows = said("compare", TRACE, *words, "--json", "--quiet").json
    for mine, row in zip(result.averages, rows, strict=True):
        document = mine.document()
        assert {key: row[key] for key in row if key not in EFFORT} == json.loads(
            json.dumps({key: document[key] for key in row if key not in EFFORT})
        )
    result.html(tmp_path / "library.html")
    assert (tmp_path / "library.html").read_bytes() == (tmp_path / "cli.html").read_bytes()
    means = {(row["policy"], row["load"]): row for row in result.means}
    against = {(row["policy"], row["load"]): row for row in result.against("fifo", "p99_jct")}
    for row in rows:
        mean = means[row["policy"], row["load"]]
        assert mean["avg_jct"] == row["avg_jct"]
        assert [mean["avg_jct_low"], mean["avg_jct_high"]] == row["intervals"]["avg_jct"]
        if row["against"]:
            other, want = against[row["policy"], row["load"]], row["against"]["p99_jct"]
            assert (other["ratio"], other["difference"]) == (want["ratio"], want["difference"])
            assert [other["ratio_low"], other["ratio_high"]] == (want["ratio_interval"] or [None, None])
            assert [other["difference_low"], other["difference_high"]] == (want["interval"] or [None, None])


def test_the_library_has_every_option_of_the_command_line() -> None:
    @experiment_options
    def command() -> None: ...

    options = {each.name for each in command.__click_params__}  # type: ignore[attr-defined]
    assert options - {"as_json", "quiet"} == set(NAMES)
    assert set(get_type_hints(ExperimentKeywords)) == set(NAMES)
    for function in (poise.simulate, poise.compare, poise.sweep):
        shown = inspect.signature(function).parameters
        assert set(NAMES) <= set(shown)
        defaults = {each.name: each.default for each in fields(ExperimentOptions)}
        assert all(shown[name].default == defaults[name] for name in NAMES)
        assert [each.kind for each in shown.values()][1:] == [inspect.Parameter.KEYWORD_ONLY] * (len(shown) - 1)


def test_a_trace_and_a_cluster_may_be_values(tmp_path: Path) -> None:
    path = a_trace(tmp_path, *FOUR)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    by_name = poise.simulate(path, cluster="v100:4,k80:8")
    (tmp_path / "c.yaml").write_text("nodes: [{type: v100, gpus: 4}, {type: k80, gpus: 4, count: 2}]")
    nodes = [poise.Node("v100-0", "v100", 4), poise.Node("k80-1", "k80", 4), poise.Node("k80-2", "k80", 4)]
    document = {"nodes": [{"type": "v100", "gpus": 4}, {"type": "k80", "gpus": 4, "count": 2}]}
    clusters = (tmp_path / "c.yaml", document, nodes, poise.Cluster(tuple(nodes)), poise.cluster("v100:4,k80:8"))
    for cluster in clusters:
        for trace in (str(path), poise.read_trace(path), rows, pd.DataFrame(rows), poise.Trace.of(rows)):
            assert poise.simulate(trace, cluster=cluster).jobs == by_name.jobs


def test_a_synthetic_trace_is_drawn_anew_for_each_seed_and_one_that_was_changed_is_not() -> None:
    trace = poise.synthetic(jobs=20, seed=1)
    drawn = poise.sweep(trace, policies=["fifo"], seeds=3, cluster="gpu:4")
    named = poise.sweep("synthetic:jobs=20,seed=1", policies=["fifo"], seeds=3, cluster="gpu:4")
    assert drawn.means.select("avg_jct", "avg_jct_low") == named.means.select("avg_jct", "avg_jct_low")
    assert len({row["avg_jct"] for row in drawn.runs}) == 3
    fixed = poise.sweep(trace.head(10), policies=["fifo"], seeds=3, cluster="gpu:4")
    assert len({row["avg_jct"] for row in fixed.runs}) == 1
    assert any("seeds changed nothing" in note for note in fixed.notes)


def test_a_sweep_takes_a_function_of_the_seed_and_seeds_themselves() -> None:
    asked: list[int] = []

    def trace(seed: int) -> poise.Trace:
        asked.append(seed)
        return poise.synthetic(jobs=10, seed=seed + 100)

    result = poise.sweep(trace, policies=["fifo"], seeds=[3, 8], cluster="gpu:4", processes=1)
    assert set(asked) == {3, 8}
    assert [row["seed"] for row in result.runs] == [3, 8]
    want = [poise.simulate(trace(seed), cluster="gpu:4", seed=seed).summary.avg_jct for seed in (3, 8)]
    assert [row["avg_jct"] for row in result.runs] == want


def test_a_sweep_goes_on_from_what_a_file_keeps(tmp_path: Path) -> None:
    done: list[int] = []

    def asked(**more: Any) -> poise.SweepResult:
        done.clear()
        options: dict[str, Any] = {"seeds": 2, "cluster": "gpu:8", "state": tmp_path / "s.jsonl", "processes": 1} | more
        return poise.sweep(TRACE, policies=["fifo", "srtf"], progress=lambda now, _total: done.append(now), **options)

    def numbers(result: poise.SweepResult) -> list[dict[str, Any]]:
        return [{key: row[key] for key in row if key not in EFFORT} for row in result.runs]

    first = asked()
    assert done
    assert numbers(asked()) == numbers(first)
    assert not done
    assert numbers(asked(seeds=3)) == numbers(asked(seeds=3, state=None))
    with pytest.raises(poise.RequestError, match=r"holds another sweep, .*; name another file, or pass fresh=True$"):
        asked(cluster="gpu:16")
    assert len(asked(cluster="gpu:16", fresh=True).runs) == 4
    assert done


def test_a_kept_sweep_is_another_one_once_its_policy_was_rewritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "rewritten_policy.py"
    module.write_text(
        "from poise.policies import Order, PreemptionRule, Rank, Unfitting\n\n\ndef mine() -> Order:\n"
        "    return Order(lambda job, _p, _m: Rank(job.submitted), PreemptionRule.NEVER, Unfitting.SKIPPED)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    options: dict[str, Any] = {"policies": ["rewritten_policy:mine"], "state": tmp_path / "s.jsonl", "processes": 1}
    poise.sweep("synthetic:jobs=5", **options)
    poise.sweep("synthetic:jobs=5", **options)
    module.write_text(module.read_text() + "# changed\n")
    with pytest.raises(poise.RequestError, match="holds another sweep"):
        poise.sweep("synthetic:jobs=5", **options)


def youngest() -> Order:
    """The job that was submitted last comes first."""

    def rank(job: JobView, _previous: Rank | None, _memory: None) -> Rank:
        return Rank(-job.submitted)

    return Order(rank=rank, preemption=PreemptionRule.NEVER, unfitting=Unfitting.SKIPPED)


def test_policies_may_be_objects_and_lambdas_in_several_processes() -> None:
    eldest = Order(
        rank=lambda job, _previous, _memory: Rank(job.submitted),
        preemption=PreemptionRule.NEVER,
        unfitting=Unfitting.SKIPPED,
    )
    comparison = poise.compare(TRACE, policies=["fifo-skip", youngest, eldest], cluster="gpu:8", processes=2)
    first, second, third = comparison
    assert comparison[youngest] is second
    assert comparison[eldest] is third
    assert second.policy == "youngest"
    assert third.summary.avg_jct == first.summary.avg_jct != second.summary.avg_jct
    swept = poise.sweep(TRACE, policies=[youngest, eldest], seeds=2, cluster="gpu:8", processes=2)
    assert swept.policies == (second.policy, third.policy)


def test_what_a_policy_raises_is_one_line_in_several_processes() -> None:
    def broken(_job: JobView, _previous: Rank | None, _memory: None) -> Rank:
        raise ZeroDivisionError("too much")

    order = Order(rank=broken, preemption=PreemptionRule.NEVER, unfitting=Unfitting.SKIPPED)
    with pytest.raises(poise.PoiseError, match=r"^policy 'broken': .*ZeroDivisionError: too much$"):
        poise.compare(TRACE, policies=["fifo", order], processes=2)


def test_results_say_themselves(tmp_path: Path) -> None:
    result = poise.simulate(TRACE, policy="srtf", **ON)
    comparison = poise.compare(TRACE, policies=["fifo", "srtf"], **ON)
    swept = poise.sweep(TRACE, policies=["fifo", "srtf"], loads=[1, 2], seeds=2, **ON)
    for shown, title in ((result, f"srtf on {ON['cluster']}: {TRACE}"), (comparison, f"{TRACE} on {ON['cluster']}")):
        assert repr(shown).splitlines()[0] == title
        assert "<table>" in shown._repr_html_()
    assert "÷ fifo" in repr(swept)
    assert "95 % confidence intervals" in repr(swept)
    assert "<table>" in swept._repr_html_()
    assert result.summary["avg_jct"] == result.summary.avg_jct == dict(result.summary)["avg_jct"]
    assert comparison["srtf"].jobs == result.jobs
    assert [each.policy for each in comparison] == ["fifo", "srtf"] == list(comparison.policies)
    best = min(comparison.summaries, key=lambda row: row["avg_jct"])["policy"]
    assert comparison.best("avg_jct") == best
    assert comparison.best("utilisation") == max(comparison.summaries, key=lambda row: row["utilisation"])["policy"]
    assert swept.best("avg_jct", load=2) in ("fifo", "srtf")
    assert [row["preemptions"] for row in swept.means.where(lambda row: row["policy"] == "fifo")] == [0, 0]
    assert swept.best("preemptions", load=2) == "fifo"
    assert (len(swept.runs), len(swept.means), len(swept.against()), swept.loads) == (8, 4, 2, (1.0, 2.0))
    result.html(tmp_path / "run.html")
    said("simulate", TRACE, "--policy", "srtf", "--cluster", ON["cluster"], "--html", tmp_path / "cli.html")
    assert (tmp_path / "run.html").read_bytes() == (tmp_path / "cli.html").read_bytes()


def test_rejected_and_unfinished_jobs_are_noted() -> None:
    trace = [poise.Job("a", 0, 1, duration=10), poise.Job("huge", 0, 99, duration=10), poise.Job("late", 0, 1, duration=1e6)]
    notes = poise.simulate(trace, cluster="gpu:4", until=100).notes
    assert notes[0].startswith("job 'huge' was rejected: it ")
    assert notes[1] == "1 job had not ended when the run did; means leave them out"
    assert "note: job 'huge'" in repr(poise.simulate(trace, cluster="gpu:4"))
    assert poise.compare(trace, policies=["fifo"], cluster="gpu:4").notes


def test_a_run_that_replaces_an_earlier_one_says_so(tmp_path: Path) -> None:
    out, journal = tmp_path / "out", tmp_path / "journal"
    for notes in ((), (f"out {out}: replaces what an earlier run wrote",)):
        assert poise.simulate(TRACE, out=out, **ON).notes == notes
    for notes in ((), (f"journal {journal}: replaces what an earlier run wrote",)):
        assert poise.simulate(TRACE, journal=journal, **ON).notes == notes
    compared = [poise.compare(TRACE, policies=["fifo"], out=tmp_path / "all", **ON).notes for _ in range(2)]
    assert compared == [(), (f"out {tmp_path / 'all'}: replaces what an earlier run wrote",)]


def test_progress_is_told_and_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    told: list[tuple[int, int]] = []
    poise.compare(TRACE, policies=["fifo", "srtf"], progress=lambda done, total: told.append((done, total)), processes=1)
    assert told == [(1, 2), (2, 2)]
    told.clear()
    poise.compare(TRACE, policies=["fifo", "srtf"], progress=lambda done, total: told.append((done, total)), processes=2)
    assert told[-1] == (2, 2)
    assert len(told) <= 2
    poise.simulate(TRACE, progress="bar")
    assert capfd.readouterr() == ("", "")


def test_several_threads_may_compare_at_once() -> None:
    want = poise.compare(TRACE, policies=["fifo", "srtf"], **ON)
    found: dict[int, Any] = {}

    def work(place: int) -> None:
        found[place] = poise.compare(TRACE, policies=["fifo", "srtf"], processes=1 + place % 2, **ON)

    threads = [threading.Thread(target=work, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[place].jobs == want.jobs for place in range(4)] == [True] * 4


SCRIPT = """
import poise
from poise.policies import Order, PreemptionRule, Rank, Unfitting

mine = Order(rank=lambda job, _p, _m: Rank(-job.submitted), preemption=PreemptionRule.NEVER, unfitting=Unfitting.SKIPPED)
comparison = poise.compare("{trace}", policies=["las", "srtf", mine], processes=2)
print(len(comparison.jobs))
"""


def run_apart(folder: Path, trace: str) -> subprocess.Popen[str]:
    (folder / "study.py").write_text(SCRIPT.format(trace=trace))
    return subprocess.Popen(
        [sys.executable, "study.py"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_a_script_needs_no_guard_around_its_main_part(tmp_path: Path) -> None:
    process = run_apart(tmp_path, "synthetic:jobs=20")
    assert process.communicate(timeout=PATIENCE) == ("60\n", "")
    assert process.returncode == 0


def _children(pid: int) -> list[int]:
    try:
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


@pytest.mark.parametrize("ending", ["to the process", "to its group"])
def test_ctrl_c_is_keyboard_interrupt_and_leaves_no_process(ending: str, tmp_path: Path) -> None:
    process = run_apart(tmp_path, "synthetic:jobs=20000,rate=200")
    wait_until(lambda: len(_children(process.pid)) >= 2, process)
    children = _children(process.pid)
    kill: Callable[[int, int], None] = os.kill if ending == "to the process" else os.killpg
    kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert (out, process.returncode) == ("", -signal.SIGINT)
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert err.count("Traceback") == 1
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)


def test_numbers_of_numpy_and_pandas_are_numbers() -> None:
    frame = pd.DataFrame(
        {"job": [1, 2], "submitted": [0, 5], "gpus": [1, 2], "duration": [10.0, 20.0], "model": [None, "vae"]}
    )
    given: dict[str, Any] = {"seed": np.int64(3), "load": np.float64(2.0), "jobs": np.int64(2)}
    result = poise.simulate(frame, cluster="v100:4", **given)
    assert (result.summary.seed, result.summary.jobs) == (3, 2)
    assert poise.simulate(frame[frame["gpus"] == 2], cluster="v100:4").summary.jobs == 1
