"""`poise simulate`: numbers that were worked out by hand or published, and what each option changes."""

import csv
import json
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from tests.shell import DATA, EVENTS, FOUR, a_row, a_trace, jcts, per_job, poise, poise_apart, simulated

from poise.lab.analysis.run_tables import PER_JOB_COLUMNS

SIXTY = DATA / "tiresias" / "60_job.csv"
sixty = pytest.mark.skipif(not SIXTY.exists(), reason="the 60-job trace of Tiresias is not there")

KEYS: dict[str, type | tuple[type, ...]] = {
    "policy": str,
    "trace": str,
    "cluster": str,
    **dict.fromkeys(("seed", "jobs", "finished", "failed", "preemptions", "migrations", "rounds", "decisions"), int),
    **dict.fromkeys(("avg_jct", "median_jct", "p99_jct", "weighted_jct", "makespan", "utilisation", "gpu_hours"), float),
    **dict.fromkeys(("worst_rho", "mean_rho", "unfair_fraction", "jain", "cpu_seconds", "policy_seconds"), float),
}
"""docs/reference/metrics.md, and the sum that Hare makes small."""

PER_JOB = (
    "job", "tenant", "gpus", "submitted", "started", "finished", "jct", "rho", "preemptions", "gpu_seconds",
    "wait_fair_share", "wait_fragmentation", "wait_capacity",
)  # fmt: skip


# Published numbers ----------------------------------------------------------------------------------------------------

PUBLISHED = {
    "fifo": (200.817, 3335, 0),
    "fifo-skip": (190.683, 3271, 0),
    "smallest-first": (198.200, 3271, 8),
    "srtf": (192.117, 3271, 4),
    "srsf": (195.900, 3315, 7),
    "tiresias": (190.683, 3271, 0),
    "tiresias:service=seconds": (190.683, 3271, 0),
}
"""Average JCT, makespan and preemptions of the authors' simulator on 4 nodes of 4 GPUs."""


@sixty
@pytest.mark.parametrize("policy", PUBLISHED)
def test_simulate_reproduces_the_tiresias_simulator_on_its_sixty_jobs(policy: str) -> None:
    got = simulated(SIXTY, "--preset", "tiresias", "--cluster", "gpu:16", "--policy", policy)
    assert (round(got["avg_jct"], 3), got["makespan"], got["preemptions"]) == PUBLISHED[policy]
    assert got["jobs"] == got["finished"] == 60
    assert got["gpu_hours"] == pytest.approx(26_624 / 3600)


# By hand --------------------------------------------------------------------------------------------------------------

BY_HAND = {
    "fifo": ((100, 110, 130, 150), 0),
    "fifo-skip": ((100, 110, 130, 60), 0),
    "smallest-first": ((130, 140, 30, 60), 1),
    "srtf": ((150, 20, 40, 60), 1),
    "srsf": ((150, 20, 40, 60), 1),
    "lrtf": ((150, 130, 100, 60), 1),
    "las": ((150, 90, 100, 60), 4),
    "tiresias:limits=150": ((150, 100, 60, 60), 2),
    "tiresias-gittins:limits=150": ((150, 100, 60, 60), 2),
}
"""Completion times of A, B, C, D on 4 GPUs, and preemptions; D alone fits beside A, and A is the only long one.

srtf       B takes over at 10; at 30 C and D start, A goes on at 60
las        attained seconds are equal at 30 (A, B, C have 10 each): D and then A, which came first
lrtf       decides at arrivals and finishes: A is passed by C at 90, when D ends
tiresias   A has 150 GPU-seconds at 50 and moves down: C starts, A goes on from 80 to 90 and, after B, from 110
gittins    too few jobs have finished for an index: as tiresias
"""


@pytest.mark.parametrize("policy", BY_HAND)
def test_simulate_agrees_with_a_calculation_by_hand(policy: str, tmp_path: Path) -> None:
    times, preemptions = BY_HAND[policy]
    options = (a_trace(tmp_path, *FOUR), "--cluster", "gpu:4", "--policy", policy, *EVENTS)
    got = simulated(*options)
    assert got["avg_jct"] == sum(times) / 4
    assert got["median_jct"] == sum(sorted(times)[1:3]) / 2
    assert got["preemptions"] == preemptions
    assert got["makespan"] == max(time + at for time, at in zip(times, (0, 10, 20, 30), strict=True))
    assert got["gpu_hours"] * 3600 == pytest.approx(300 + 80 + 60 + 60)
    assert got["utilisation"] == pytest.approx(500 / (4 * got["makespan"]))
    assert tuple(jcts(options[0], tmp_path, *options[1:]).values()) == times


def test_stride_gives_equal_jobs_equal_time(tmp_path: Path) -> None:
    """a runs from 0 to 10, b from 10 to 20; one of them goes on to 30, and the other to 40."""
    trace = a_trace(tmp_path, a_row("a", seconds=20), a_row("b", seconds=20))
    options = ("--cluster", "gpu:1", "--policy", "stride:quantum=10", *EVENTS)
    assert sorted(jcts(trace, tmp_path, *options).values()) == [30, 40]


def test_stride_gives_time_in_proportion_to_weight(tmp_path: Path) -> None:
    trace = a_trace(tmp_path, a_row("heavy", seconds=60, weight=3), a_row("light", seconds=60))
    options = ("--cluster", "gpu:1", "--policy", "stride:quantum=10", *EVENTS)
    assert jcts(trace, tmp_path, *options) == {"heavy": 80, "light": 120}


def test_agnostic_takes_the_first_type_where_the_policy_would_take_the_fastest(tmp_path: Path) -> None:
    trace = a_trace(tmp_path, a_row("a", seconds=100))
    aware = simulated(trace, "--cluster", "k80:1,v100:1", "--policy", "fifo")
    blind = simulated(trace, "--cluster", "k80:1,v100:1", "--policy", "fifo+agnostic")
    assert aware["avg_jct"] == pytest.approx(100)
    assert blind["avg_jct"] == pytest.approx(100 / 0.26930874588146336)


# What is answered -----------------------------------------------------------------------------------------------------


def test_json_has_every_key_with_its_type(tmp_path: Path) -> None:
    got = simulated(a_trace(tmp_path, *FOUR), "--cluster", "gpu:4", "--policy", "srtf")
    assert set(KEYS) <= set(got)
    for key, kind in KEYS.items():
        assert isinstance(got[key], kind), key
        assert not isinstance(got[key], bool), key
    assert (got["policy"], got["trace"], got["cluster"], got["seed"]) == ("srtf", "trace.jsonl", "gpu:4", 0)
    assert got["partial"] is False


def test_json_is_null_where_there_is_nothing_to_take_a_mean_of(tmp_path: Path) -> None:
    got = simulated(a_trace(tmp_path, a_row("huge", gpus=99)), "--cluster", "gpu:4")
    assert (got["jobs"], got["rejected"], got["finished"]) == (1, 1, 0)
    means = ("avg_jct", "median_jct", "p99_jct", "worst_rho", "mean_rho", "unfair_fraction", "jain")
    assert {key: got[key] for key in means} == dict.fromkeys(means)


def test_counts_of_endings_add_up_to_the_jobs(tmp_path: Path) -> None:
    rows = (
        a_row("finishes"),
        a_row("fails", outcome="failed"),
        a_row("killed", outcome="killed"),
        a_row("dies", failures=[[1, "x"]] * 5),
        a_row("huge", gpus=9),
    )
    got = simulated(a_trace(tmp_path, *rows), "--cluster", "gpu:4")
    assert (got["finished"], got["failed"], got["cancelled"], got["rejected"], got["unfinished"]) == (1, 2, 1, 1, 0)
    assert got["jobs"] == 5


def test_table_says_what_the_json_says(tmp_path: Path) -> None:
    said = poise("simulate", a_trace(tmp_path, *FOUR), "--cluster", "gpu:4", "--policy", "fifo-skip")
    assert said.code == 0
    rows = [line.rsplit(maxsplit=1) for line in said.out.splitlines() if line.strip()]
    shown = {row[0].strip(): row[1] for row in rows if len(row) == 2}
    assert (shown["jobs"], shown["average JCT"], shown["makespan"], shown["preemptions"]) == ("4", "1m40s", "2m30s", "0")
    assert said.err == ""


def test_a_gang_larger_than_the_cluster_is_rejected_with_a_reason_and_the_rest_goes_on(tmp_path: Path) -> None:
    trace = a_trace(tmp_path, a_row("huge", gpus=9), a_row("small", at=1))
    said = poise("simulate", trace, "--cluster", "gpu:4", "--json")
    assert (said.json["finished"], said.json["rejected"], said.json["avg_jct"]) == (1, 1, 10)
    assert said.err == "note: job 'huge' was rejected: it needs 9 GPUs of one type; the cluster has at most 4 (gpu)\n"
    assert per_job(trace, tmp_path, "--cluster", "gpu:4")["huge"]["status"] == "rejected"


def test_many_rejections_are_counted_not_listed(tmp_path: Path) -> None:
    trace = a_trace(tmp_path, *(a_row(f"huge{n}", gpus=9) for n in range(10)), a_row("small"))
    said = poise("simulate", trace, "--cluster", "gpu:4")
    assert "7 more rejections" in said.err
    assert len(said.err.splitlines()) == 4
    assert poise("simulate", trace, "--cluster", "gpu:4", "--quiet").err == ""


# One row a job --------------------------------------------------------------------------------------------------------


def test_per_job_rows_have_every_column_in_csv_and_json_alike(tmp_path: Path) -> None:
    trace = a_trace(tmp_path, *FOUR, a_row("huge", gpus=99))
    rows = per_job(trace, tmp_path, "--cluster", "gpu:4", "--policy", "las", *EVENTS)
    poise("simulate", trace, "--cluster", "gpu:4", "--policy", "las", *EVENTS, "--per-job", tmp_path / "rows.csv")
    with (tmp_path / "rows.csv").open(newline="") as stream:
        reader = csv.DictReader(stream)
        cells = {row["job"]: row for row in reader}
    assert set(PER_JOB) <= set(reader.fieldnames or ())
    assert list(rows) == list(cells) == ["A", "huge", "B", "C", "D"]
    for job, row in rows.items():
        assert tuple(row) == PER_JOB_COLUMNS
        assert {key: "" if value is None else str(value) for key, value in row.items()} == cells[job]


def test_per_job_rows_are_consistent_in_themselves(tmp_path: Path) -> None:
    rows = per_job("synthetic:jobs=300,seed=3,rate=100", tmp_path, "--cluster", "gpu:32", "--policy", "las")
    for row in rows.values():
        assert row["jct"] == pytest.approx(row["finished"] - row["submitted"])
        waits = row["wait_fair_share"] + row["wait_fragmentation"] + row["wait_capacity"]
        held = row["gpu_seconds"] / row["gpus"]
        assert waits + held == pytest.approx(row["jct"])
        if row["preemptions"] == 0:
            assert waits == pytest.approx(row["started"] - row["submitted"])
    assert sum(row["preemptions"] for row in rows.values()) > 0


def test_per_job_rows_are_empty_where_nothing_came_about(tmp_path: Path) -> None:
    rows = per_job(a_trace(tmp_path, a_row("a", seconds=100), a_row("b")), tmp_path, "--cluster", "gpu:1", "--until", "50")
    assert (rows["a"]["started"], rows["a"]["finished"], rows["a"]["jct"], rows["a"]["rho"]) == (0, None, None, None)
    assert (rows["b"]["started"], rows["b"]["status"]) == (None, "waiting")


# What is left behind --------------------------------------------------------------------------------------------------


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("policy", ["srtf", "tiresias-gittins:limits=600,samples=2", "stride:quantum=900"])
def test_out_leaves_the_same_bytes_every_time(policy: str, tmp_path: Path) -> None:
    options = ("synthetic:jobs=60,failures=0.3,models=vae/resnet50", "--cluster", "v100:8,k80:8", "--policy", policy)
    for name in ("one", "two"):
        assert poise("simulate", *options, "--faults", "mtbf=1d,repair=1h", "--out", tmp_path / name).code == 0
    one = bytes_of(tmp_path / "one")
    assert sorted(one) == ["jobs.csv", "journal.jsonl", "summary.json"]
    assert one == bytes_of(tmp_path / "two")


def test_out_leaves_the_same_bytes_whatever_the_hash_seed_of_the_process(tmp_path: Path) -> None:
    options = ("synthetic:jobs=60,failures=0.3,tenants=3", "--cluster", "v100:8,k80:8", "--policy", "tiresias:limits=900")
    for seed in ("1", "4242"):
        said = poise_apart("simulate", *options, "--faults", "mtbf=1d", "--out", tmp_path / seed, PYTHONHASHSEED=seed)
        assert said.code == 0, said.err
    assert bytes_of(tmp_path / "1") == bytes_of(tmp_path / "4242")


def test_out_holds_what_was_said_apart_from_cpu_times(tmp_path: Path) -> None:
    got = simulated(a_trace(tmp_path, *FOUR), "--out", tmp_path / "a" / "b")
    kept = json.loads((tmp_path / "a" / "b" / "summary.json").read_text())
    assert kept == {key: value for key, value in got.items() if key not in ("cpu_seconds", "policy_seconds")}


def test_html_is_the_report_of_one_run(tmp_path: Path) -> None:
    html = tmp_path / "run.html"
    words = ("simulate", a_trace(tmp_path, *FOUR, name="<b>.jsonl"), "--cluster", "gpu:4", *EVENTS, "--html", html)
    said = poise(*words)
    assert said.out.endswith(f"report: {html}\n")
    text = html.read_text(encoding="utf-8")
    root = ET.fromstring(text.removeprefix("<!DOCTYPE html>\n"))
    assert [each.text for each in root.iterfind(".//h2")] == [
        "Summary", "Who held which GPU", "Completion times and fairness", "The cluster over time",
    ]  # fmt: skip
    assert len(list(root.iter("figure"))) == 5  # four, and the timeline as a picture
    assert "average JCT" in {cell.text for cell in root.iterfind(".//tbody/tr/th")}
    assert poise(*words, "--json").json["policy"] == "fifo"
    assert f"note: --html {html}: replaces what an earlier run wrote" in poise(*words).err
    assert poise(*words[:-1], tmp_path / "<b>.jsonl").refusal.startswith(f"--html {tmp_path}/<b>.jsonl: there is a file of")


def test_a_run_of_which_nothing_runs_has_a_report(tmp_path: Path) -> None:
    said = poise("simulate", a_trace(tmp_path, a_row("huge", gpus=99)), "--cluster", "gpu:4", "--html", tmp_path / "r.html")
    assert said.code == 0
    assert "No job ever held a GPU." in (tmp_path / "r.html").read_text(encoding="utf-8")
