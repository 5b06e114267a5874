"""`poise compare`: several policies over one trace, as a table, as JSON, as a report."""

import csv
import json
import os
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from tests.shell import EVENTS, FOUR, a_row, a_trace, poise, poise_apart, simulated

from poise.cli import compare
from poise.lab.comparison import split_policies
from poise.scheduler.model.errors import RequestError

SPLIT = {
    "fifo": ["fifo"],
    "fifo,srtf": ["fifo", "srtf"],
    " fifo , srtf ,": ["fifo", "srtf"],
    "tiresias:limits=300/900,promote=8,srtf": ["tiresias:limits=300/900,promote=8", "srtf"],
    "fifo,tiresias:limits=3/9,promote=8+stable": ["fifo", "tiresias:limits=3/9,promote=8+stable"],
    "stride:quantum=5,clamp=off,stride:quantum=6": ["stride:quantum=5,clamp=off", "stride:quantum=6"],
    "fifo,fifo": ["fifo", "fifo"],
}


@pytest.mark.parametrize("text", SPLIT)
def test_policies_are_split_at_commas_that_do_not_continue_parameters(text: str) -> None:
    assert split_policies(text) == SPLIT[text]


@pytest.mark.parametrize("text", ["", ",", " , "])
def test_at_least_one_policy_is_needed(text: str) -> None:
    with pytest.raises(RequestError, match="expected at least one name"):
        split_policies(text)


@pytest.fixture
def one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)


@pytest.mark.usefixtures("one_core")
def test_json_is_the_list_of_what_simulate_says_of_each(tmp_path: Path) -> None:
    trace = a_trace(tmp_path, *FOUR)
    options = ("--cluster", "gpu:4", *EVENTS)
    names = ["fifo", "tiresias:limits=100/200,promote=2", "srtf"]
    rows = poise("compare", trace, "--policies", ",".join(names), *options, "--json").json
    effort = ("cpu_seconds", "policy_seconds")
    for name, row in zip(names, rows, strict=True):
        want = simulated(trace, "--policy", name, *options)
        assert list(row) == list(want)
        assert {key: row[key] for key in row if key not in effort} == {key: want[key] for key in want if key not in effort}


@pytest.mark.usefixtures("one_core")
def test_table_has_a_row_a_policy_in_the_order_asked_for(tmp_path: Path) -> None:
    said = poise("compare", a_trace(tmp_path, *FOUR), "--policies", "srtf,fifo,las", "--cluster", "gpu:4", *EVENTS)
    lines = said.out.splitlines()
    assert (said.code, said.err) == (0, "")
    assert lines[0].strip() == "trace.jsonl on gpu:4"
    assert [line.split()[0] for line in lines[4:7]] == ["srtf", "fifo", "las"]


def test_processes_give_the_same_answer_as_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("compare", a_trace(tmp_path, *FOUR), "--policies", "las,fifo,srtf,lrtf", "--cluster", "gpu:4", "--json")
    several = poise_apart(*words).json
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    alone = poise(*words).json
    for row in (*several, *alone):
        del row["cpu_seconds"], row["policy_seconds"]
    assert several == alone
    assert [row["policy"] for row in several] == ["las", "fifo", "srtf", "lrtf"]


def parsed(html: Path) -> ET.Element:
    text = html.read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>\n")
    return ET.fromstring(text.removeprefix("<!DOCTYPE html>\n"))


@pytest.mark.usefixtures("one_core")
def test_html_is_one_file_with_figures_and_the_table(tmp_path: Path) -> None:
    html = tmp_path / "report.html"
    words = ("compare", a_trace(tmp_path, *FOUR), "--policies", "fifo,srtf", "--cluster", "gpu:4", "--html", html)
    said = poise(*words)
    assert said.out.endswith(f"report: {html}\n")
    root = parsed(html)
    assert len(list(root.iter("figure"))) >= 5
    assert [cell.text for cell in root.iterfind(".//tbody/tr/th")] == ["fifo", "srtf"]
    assert poise(*words, "--json").json[0]["policy"] == "fifo"


@pytest.mark.usefixtures("one_core")
def test_html_takes_names_as_text_not_as_markup(tmp_path: Path) -> None:
    trace = a_trace(tmp_path, a_row("a"), name="<b>&.jsonl")
    html = tmp_path / "report.html"
    assert poise("compare", trace, "--policies", "fifo", "--html", html).code == 0
    title = parsed(html).find("head/title")
    assert title is not None
    assert title.text == "<b>&.jsonl on gpu:64"


@pytest.mark.usefixtures("one_core")
def test_a_trace_of_which_nothing_runs_makes_a_table_and_a_report(tmp_path: Path) -> None:
    trace = a_trace(tmp_path, a_row("huge", gpus=99))
    said = poise("compare", trace, "--policies", "fifo,srtf", "--cluster", "gpu:4", "--html", tmp_path / "report.html")
    assert said.code == 0
    assert len(list(parsed(tmp_path / "report.html").iter("figure"))) >= 5


def test_jobs_that_a_run_leaves_behind_are_told(tmp_path: Path) -> None:
    said = poise(
        "compare", a_trace(tmp_path, *FOUR), "--cluster", "gpu:4", "--policies", "fifo,srtf", "--until", "70", "--json"
    )
    left = max(row["unfinished"] for row in said.json)
    assert left > 0
    assert said.err == f"note: jobs had not ended when their run did, up to {left} in a run; means leave them out\n"


def test_a_wrong_policy_among_right_ones_is_refused_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "run_all", None)
    said = poise("compare", a_trace(tmp_path, *FOUR), "--policies", "fifo,srt")
    assert "unknown policy 'srt'; did you mean srtf" in said.refusal


WRONG = {
    "faults that are not there": (("--faults", "nowhere"), "nowhere: No such file or directory"),
    "a fault parameter": (("--faults", "mtbx=3"), "unknown fault parameter 'mtbx'; did you mean mtbf?"),
    "a report in no folder": (("--html", "no/such/report.html"), "--html no/such/report.html: there is no folder no/such"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_found_before_processes_are_started(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, want = WRONG[what]
    monkeypatch.setattr(compare, "run_all", None)
    assert poise("compare", a_trace(tmp_path, *FOUR), "--policies", "fifo,srtf", *words).refusal == want


@pytest.mark.usefixtures("one_core")
def test_json_of_a_model_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    trace = a_trace(tmp_path, a_row("a", seconds=None, steps=5, model="resnet51"))
    assert "nearest: ResNet50" in poise("compare", trace, "--policies", "fifo,srtf", "--json").refusal


@pytest.mark.parametrize("cores", [1, 2])
def test_every_job_and_every_run_is_written(cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    trace = a_trace(tmp_path, *FOUR, a_row("huge", gpus=99))
    names = ["fifo", "tiresias:limits=100/200,promote=2"]
    words = ("compare", trace, "--cluster", "gpu:4", *EVENTS, "--policies", ",".join(names), "--quiet")
    assert poise(*words, "--per-job", tmp_path / "jobs.csv", "--out", tmp_path / "runs").code == 0
    assert poise(*words, "--per-job", tmp_path / "jobs.json").code == 0
    rows = json.loads((tmp_path / "jobs.json").read_text())
    cells = list(csv.DictReader((tmp_path / "jobs.csv").read_text().splitlines()))
    assert [(row["policy"], row["job"]) for row in rows] == [(name, job) for name in names for job in ["A", "huge", *"BCD"]]
    for row, cell in zip(rows, cells, strict=True):
        assert {key: "" if value is None else str(value) for key, value in row.items()} == cell
    summaries = json.loads((tmp_path / "runs" / "comparison.json").read_text())
    assert [each["policy"] for each in summaries] == names
    for name, folder, summary in zip(names, ("fifo", "tiresias-limits=100-200,promote=2"), summaries, strict=True):
        alone = tmp_path / f"alone-{folder}"
        assert poise("simulate", trace, "--cluster", "gpu:4", *EVENTS, "--policy", name, "--out", alone, "--quiet").code == 0
        assert sorted(path.name for path in alone.iterdir()) == ["jobs.csv", "journal.jsonl", "summary.json"]
        for path in alone.iterdir():
            assert path.read_bytes() == (tmp_path / "runs" / folder / path.name).read_bytes()
        assert json.loads((alone / "summary.json").read_text()) == summary
        assert poise("replay", tmp_path / "runs" / folder, "--json").json["exact"] is True


def test_what_an_earlier_comparison_wrote_is_replaced_and_nothing_else_is(tmp_path: Path) -> None:
    words = ("compare", a_trace(tmp_path, *FOUR), "--cluster", "gpu:4", "--policies", "fifo")
    where = ("--out", tmp_path / "runs", "--per-job", tmp_path / "jobs.json")
    assert poise(*words, *where).err == ""
    assert poise(*words, *where).err.splitlines() == [
        f"note: --out {tmp_path}/runs: replaces what an earlier run wrote",
        f"note: --per-job {tmp_path}/jobs.json: replaces what an earlier run wrote",
    ]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("mine")
    assert "holds thesis.txt and no run" in poise(*words, "--out", tmp_path / "mine").refusal
    assert "there is a file of another kind" in poise(*words, "--per-job", a_trace(tmp_path, *FOUR, name="t.csv")).refusal


REFUSED_FILES = {
    "rows of no kind": (("--per-job", "rows.txt"), "--per-job rows.txt: expected a file that ends in .csv or .json"),
    "rows in no folder": (("--per-job", "no/rows.csv"), "--per-job no/rows.csv: there is no folder no"),
    "rows of a sweep": (
        ("--per-job", "rows.csv", "--seeds", "2"),
        "--per-job is not for sweeps; leave out --loads",
    ),
    "folders of a sweep": (("--out", "runs", "--loads", "1,2"), "--out is not for sweeps; leave out --loads"),
}


@pytest.mark.parametrize("what", REFUSED_FILES)
def test_files_that_cannot_be_are_refused_before_any_work(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, want = REFUSED_FILES[what]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compare, "run_all", None)
    assert want in poise("compare", a_trace(tmp_path, *FOUR), "--policies", "fifo,srtf", *words).refusal
    assert [path.name for path in tmp_path.iterdir()] == ["trace.jsonl"]
