"""`poise compare --loads … --seeds …`: what is swept over, and means with intervals."""

from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from tests.shell import EVENTS, FOUR, a_row, a_trace, poise, poise_apart
from tests.sweeping import GRID, SMALL, lines_in, swept, without_effort

from poise.cli.sweep import parse_loads
from poise.lab.analysis.statistics import mean_of
from poise.lab.sweep.cells import reseeded
from poise.scheduler.model.errors import RequestError

pytestmark = pytest.mark.usefixtures("cache", "one_core")

LOADS: dict[str, tuple[float, ...]] = {"1": (1,), "0.5,1,2": (0.5, 1, 2), " 2 , 1e-1": (2, 0.1)}


@pytest.mark.parametrize("text", LOADS)
def test_loads_are_numbers_separated_by_commas(text: str) -> None:
    assert parse_loads(text) == LOADS[text]


@pytest.mark.parametrize("text", ["", ",", "1,", "x", "0", "-1", "nan", "inf", "1e999", "1,1", "1,1.0", "1;2"])
def test_loads_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(RequestError, match=r"^loads: expected"):
        parse_loads(text)


def test_seed_of_a_synthetic_trace_moves_along() -> None:
    assert reseeded("synthetic:jobs=5,seed=3,rate=9", 2) == "synthetic:jobs=5,rate=9,seed=5"
    assert reseeded("synthetic:jobs=5", 1) == "synthetic:jobs=5,seed=1"
    assert reseeded("synthetic:", 1) == "synthetic:seed=1"
    assert reseeded("synthetic:seed=3", 0) == "synthetic:seed=3"
    assert reseeded("trace.jsonl", 4) == "trace.jsonl"


def test_rows_are_means_of_what_simulate_says_of_each_run() -> None:
    rows = swept(*SMALL, "--policies", "fifo,srtf", "--loads", "0.5,2", "--seeds", "3", "--seed", "5")
    assert [(row["load"], row["policy"]) for row in rows] == [(0.5, "fifo"), (0.5, "srtf"), (2, "fifo"), (2, "srtf")]
    for row in rows:
        runs = [
            poise(
                *("simulate", f"synthetic:jobs=30,seed={7 + later}", "--cluster", "gpu:8@8", "--policy", row["policy"]),
                *("--load", row["load"], "--seed", 5 + later, "--json"),
            ).json
            for later in range(3)
        ]
        assert (row["seed"], row["seeds"], row["runs"], row["trace"]) == (5, [5, 6, 7], 3, SMALL[0])
        for key in ("avg_jct", "p99_jct", "makespan", "utilisation", "worst_rho", "preemptions", "jobs"):
            want = mean_of([run[key] for run in runs])
            assert row[key] == want.value
            assert row["intervals"][key] == (None if want.interval is None else [*want.interval])


def test_policies_are_compared_with_the_first_run_by_run() -> None:
    first, second = swept(*SMALL, "--policies", "fifo,srtf", "--seeds", "3")
    assert first["against"] is None
    against = second["against"]
    assert against["policy"] == "fifo"
    assert against["avg_jct"]["difference"] == pytest.approx(second["avg_jct"] - first["avg_jct"])
    low, high = against["avg_jct"]["ratio_interval"]
    assert low < against["avg_jct"]["ratio"] < high


def test_one_process_gives_the_same_numbers_as_several() -> None:
    alone = swept(*SMALL, *GRID)
    assert alone == without_effort(poise_apart("compare", *SMALL, *GRID, "--json").json)


def test_load_alone_is_the_one_load_of_a_sweep_of_seeds() -> None:
    (row,) = swept(*SMALL, "--policies", "fifo", "--load", "2", "--seeds", "2")
    (same,) = swept(*SMALL, "--policies", "fifo", "--loads", "2", "--seeds", "2")
    assert row == same
    assert row["load"] == 2


def test_one_seed_has_no_intervals() -> None:
    words = (*SMALL, "--policies", "fifo,srtf", "--loads", "1")
    row = swept(*words)[1]
    assert set(row["intervals"].values()) == {None}
    assert (row["runs"], row["against"]["avg_jct"]["interval"]) == (1, None)
    assert "±" not in poise("compare", *words).out


def test_seeds_that_change_nothing_are_said_to(tmp_path: Path) -> None:
    words = ("compare", a_trace(tmp_path, *FOUR), "--policies", "fifo,srtf", "--cluster", "gpu:4", *EVENTS, "--seeds", "3")
    said = poise(*words)
    note = "seeds changed nothing under any policy: runs with different seeds came out the same, and have no intervals"
    assert said.err == f"note: {note}\n"
    assert "±" not in said.out
    assert poise(*words, "--quiet").err == ""
    assert set(poise(*words, "--json").json[0]["intervals"].values()) == {None}


def test_seeds_draw_other_outages_for_a_trace_in_a_file(tmp_path: Path) -> None:
    trace = a_trace(tmp_path, *(a_row(f"j{at}", at=at * 600.0, gpus=4, seconds=3000) for at in range(30)))
    (row,) = swept(trace, "--policies", "fifo", "--cluster", "gpu:8", "--faults", "mtbf=5h,repair=1h", "--seeds", "3")
    assert row["intervals"]["avg_jct"] is not None


def test_a_trace_on_standard_input_serves_all_seeds(tmp_path: Path) -> None:
    path = a_trace(tmp_path, *FOUR)
    words = (
        "--policies",
        "fifo,srtf",
        "--cluster",
        "gpu:4",
        "--loads",
        "1,2",
        "--seeds",
        "2",
        "--faults",
        "mtbf=1h",
        "--json",
    )
    piped = without_effort(poise("compare", "-", *words, stdin=path.read_bytes()).json)
    assert {row["trace"] for row in piped} == {"stdin"}
    assert [{**row, "trace": "trace.jsonl"} for row in piped] == swept(path, *words[:-1])


def test_rejected_and_unfinished_jobs_and_runs_that_do_not_count_are_told(tmp_path: Path) -> None:
    trace = a_trace(tmp_path, *FOUR, a_row("huge", gpus=99))
    words = ("compare", trace, "--policies", "fifo", "--cluster", "gpu:4", "--until", "70", "--loads", "1", *EVENTS)
    said = poise(*words)
    assert "note: jobs that can never run here were rejected, up to 1 in a run; `poise simulate` says why\n" in said.err
    assert "note: jobs had not ended when their run did, up to 4 in a run; means leave them out\n" in said.err
    assert "note: fifo at load 1: no run has avg_jct, median_jct, " in said.err


def test_a_report_that_cannot_be_written_costs_neither_the_table_nor_the_runs(cache: Path, tmp_path: Path) -> None:
    words = ("compare", *SMALL, "--policies", "fifo,srtf", "--html", "/dev/full")
    for more in ((), ("--seeds", "2")):
        said = poise(*words, *more)
        assert (said.code, said.err) == (1, "poise: No space left on device\n")
        assert "average JCT" in said.out
    assert lines_in(next(cache.iterdir())) == 5


def test_table_and_report_are_written(tmp_path: Path) -> None:
    html = tmp_path / "report.html"
    said = poise("compare", *SMALL, "--policies", "fifo,srtf", "--loads", "1,2", "--seeds", "2", "--html", html)
    lines = said.out.splitlines()
    assert lines[0] == f"{SMALL[0]} on gpu:8@8, 2 seeds"
    assert [line.split()[:2] for line in lines[4:8]] == [["fifo", "1"], ["srtf", "1"], ["fifo", "2"], ["srtf", "2"]]
    assert lines[-1] == f"report: {html}"
    root = ET.fromstring(html.read_text(encoding="utf-8").removeprefix("<!DOCTYPE html>\n"))
    assert len(list(root.iter("figure"))) == 4


WRONG = {
    "no load": (("--loads", ""), "--loads: expected finite numbers above 0, e.g. 0.5,1,2, got ''"),
    "a load of 0": (("--loads", "1,0"), "--loads: expected finite numbers above 0, e.g. 0.5,1,2, got '0'"),
    "a load twice": (("--loads", "1,2,1"), "--loads: expected different numbers, got 1 twice"),
    "a load so low that times are beyond reason": (("--loads", "1,1e-300"), "expected at most 1e+15 seconds"),
    "a load that is none": (
        ("--load", "nan", "--seeds", "2"),
        "--load: expected finite numbers above 0, e.g. 0.5,1,2, got 'nan'",
    ),
    "load and loads": (("--loads", "1", "--load", "2"), "--load and --loads say different things"),
    "no seed": (("--seeds", "0"), "Invalid value for '--seeds': 0 is not in the range 1<=x<=10000"),
    "half a seed": (("--seeds", "1.5"), "Invalid value for '--seeds'"),
    "a state of no sweep": (("--state", "x.jsonl"), "--state is for sweeps; give --loads or --seeds too"),
    "a fresh start of no sweep": (("--fresh",), "--fresh is for sweeps; give --loads or --seeds too"),
    "a state in no folder": (("--seeds", "2", "--state", "no/such/x"), "--state no/such/x: there is no folder no/such"),
    "too many cells": (("--seeds", "10000", "--loads", ",".join(map(str, range(1, 62)))), "at most 1,000,000 cells"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_sweep_is_refused_in_one_line(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words, want = WRONG[what]
    monkeypatch.setattr("poise.cli.sweep.run_cells", None)
    assert want in poise("compare", *SMALL, "--policies", "fifo,srtf", *words).refusal


REFUSED = {
    "a policy twice": ("--policies", "fifo,fifo", "--seeds", "2"),
    "an unknown policy behind a known one": ("--policies", "fifo,srt", "--seeds", "2"),
    "seeds beyond the last": ("--policies", "fifo", "--seeds", "2"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_no_cell_could_run_is_refused_before_any_does(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poise.cli.sweep.run_cells", None)
    trace = f"synthetic:jobs=3,seed={2**63 - 1}" if "beyond" in what else SMALL[0]
    assert poise("compare", trace, *REFUSED[what]).refusal


def test_a_seed_that_is_none_is_refused_as_everywhere() -> None:
    assert "seed" in poise("compare", "synthetic:jobs=3,seed=x", "--policies", "fifo", "--seeds", "2").refusal


def test_a_pipe_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poise.lab.sweep.cells._MOST_PIPED", 1 << 20)
    for source, stdin in (("/dev/zero", b""), ("-", bytes((1 << 20) + 1))):
        said = poise("compare", source, "--policies", "fifo", "--seeds", "2", stdin=stdin)
        assert "expected at most 1 MiB from a pipe, got more; save it as a file" in said.refusal
