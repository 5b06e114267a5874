"""`poise analyze`: traces and journals, tables, JSON and a page; whatever is damaged is shown as far as it can be read."""

import gzip
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tests.shell import FOUR, Said, a_row, a_trace, as_json, poise

from poise.lab.analysis.study import KEYS


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The directory of a run with failures, tenants and preemptions."""
    said = poise(
        *("simulate", "synthetic:jobs=60,seed=3,tenants=3,failures=0.3", "--cluster", "gpu:8", "--policy", "srtf"),
        *("--out", tmp_path / "run", "--quiet"),
    )
    assert said.code == 0
    return tmp_path / "run"


def damaged(run: Path, text: str) -> Path:
    """The same run with another journal."""
    (run / "journal.jsonl").write_text(text, encoding="utf-8")
    return run


def lines(run: Path) -> list[str]:
    return (run / "journal.jsonl").read_text(encoding="utf-8").splitlines()


def complaint(said: Said) -> str:
    """The one line on stderr of work that failed in its middle."""
    assert said.code == 1
    (line,) = said.err.splitlines()
    return line.removeprefix("poise: ")


def test_a_trace_is_shown_with_what_it_covers_and_what_it_does_not(tmp_path: Path) -> None:
    said = poise("analyze", a_trace(tmp_path, *FOUR))
    assert (said.code, said.err) == (0, "")
    assert said.out.startswith("trace.jsonl: 4 jobs of a trace.\nIt tells run times.\nIt does not tell tenants,")
    assert "Jobs and GPU time by size" in said.out
    assert "Not covered: Queueing delay by size;" in said.out


def test_json_has_every_part_with_raw_numbers(tmp_path: Path) -> None:
    found = poise("analyze", a_trace(tmp_path, *FOUR), "--json").json
    assert found["source"] == {"kind": "trace", "name": "trace.jsonl", "jobs": 4}
    assert list(found["parts"]) == list(KEYS)
    assert (found["problem"], found["covers"]) == (None, ["run times"])
    assert found["parts"]["overview"]["rows"][0]["gpu_hours"] == pytest.approx(500 / 3600)
    assert found["parts"]["delays_by_size"]["rows"] == []
    assert "not when they started" in found["parts"]["delays_by_size"]["missing"]


def test_a_journal_covers_everything(run: Path) -> None:
    found = poise("analyze", run, "--json").json
    assert found["source"]["kind"] == "journal"
    assert found["source"]["policy"] == "srtf"
    assert [key for key, part in found["parts"].items() if part["missing"]] == []
    summary = json.loads((run / "summary.json").read_text())
    (overview,) = found["parts"]["overview"]["rows"]
    assert overview["gpu_hours"] == pytest.approx(summary["gpu_hours"])
    assert overview["utilisation"] == pytest.approx(summary["utilisation"])
    statuses = {row["status"]: row["jobs"] for row in found["parts"]["statuses"]["rows"]}
    assert statuses["passed"] == summary["finished"]
    assert statuses["failed"] == summary["failed"]


def test_a_journal_is_told_by_its_content(run: Path, tmp_path: Path) -> None:
    whole = poise("analyze", run, "--json").json
    text = (run / "journal.jsonl").read_bytes()
    (tmp_path / "what.txt").write_bytes(text)
    (tmp_path / "what.gz").write_bytes(gzip.compress(text))
    for name in ("what.txt", "what.gz"):
        found = poise("analyze", tmp_path / name, "--json").json
        assert found["parts"] == whole["parts"]


def test_standard_input_and_the_generator_do_as_well(tmp_path: Path) -> None:
    content = a_trace(tmp_path, *FOUR).read_bytes()
    assert poise("analyze", "-", "--json", stdin=content).json["source"]["name"] == "stdin"
    assert poise("analyze", "synthetic:jobs=50", "--json").json["source"]["jobs"] == 50
    assert "KNOB=VALUE" in poise("analyze", "synthetic:help").out


def test_one_part_is_shown_with_all_its_rows(tmp_path: Path) -> None:
    rows = [a_row(f"j{place}", tenant=f"tenant-{place}") for place in range(40)]
    trace = a_trace(tmp_path, *rows)
    assert "15 of 40 rows; all with --part tenants" in poise("analyze", trace).out
    said = poise("analyze", trace, "--part", "tenants")
    assert sum(line.strip().startswith("tenant-") for line in said.out.splitlines()) == 40
    assert list(poise("analyze", trace, "--part", "tenants", "--json").json["parts"]) == ["tenants"]
    assert "did you mean" in poise("analyze", trace, "--part", "tenant").refusal


def test_html_is_one_well_formed_page_that_fetches_nothing(run: Path, tmp_path: Path) -> None:
    said = poise("analyze", run, "--html", tmp_path / "study.html")
    assert (said.code, said.err) == (0, "")
    assert f"report: {tmp_path / 'study.html'}" in said.out
    page = (tmp_path / "study.html").read_text(encoding="utf-8")
    root = ElementTree.fromstring(page.partition("\n")[2])
    assert len(list(root.iter("svg"))) >= 10
    assert "http://" not in page
    assert "https://" not in page
    assert "there is no folder" in poise("analyze", run, "--html", tmp_path / "none" / "x.html").refusal


def test_notes_of_the_reader_are_shown_unless_quiet(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    header = "job_id,vc,gpu_num,state,submit_time,start_time,end_time,duration\n"
    times = "2020-01-01 00:00:00,2020-01-01 00:01:00,2020-01-01 00:02:00,60"
    log.write_text(header + f"a,v,1,COMPLETED,{times}\nb,v,0,COMPLETED,{times}\n")
    said = poise("analyze", log, "--json")
    assert said.err == "note: jobs left out because they ask for no GPU: 1\n"
    assert said.json["notes"] == ["jobs left out because they ask for no GPU: 1"]
    assert said.json["parts"]["delays_by_size"]["rows"][-1]["mean"] == 60.0
    assert poise("analyze", log, "--json", "--quiet").err == ""


def test_a_trace_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    assert "no such file" in poise("analyze", tmp_path / "none").refusal
    (tmp_path / "bad.jsonl").write_text('{"job": "a", "submitted": 0, "gpus": 0, "duration": 1}\n')
    assert ":1: gpus: expected a whole number" in poise("analyze", tmp_path / "bad.jsonl").refusal
    (tmp_path / "text").write_text("lorem ipsum\n")
    assert "expected a trace in a known format" in poise("analyze", tmp_path / "text").refusal
    assert "unknown trace format" in poise("analyze", tmp_path / "text", "--format", "exel").refusal


def test_a_truncated_journal_is_shown_as_far_as_it_goes(run: Path) -> None:
    whole = lines(run)
    said = poise("analyze", damaged(run, "\n".join(whole[: len(whole) // 2])))
    assert "cut off here" in complaint(said)
    assert "Jobs and GPU time by size" in said.out
    said = poise("analyze", damaged(run, "\n".join(whole[: len(whole) // 2]) + '\n[12, [["fini'), "--json")
    assert complaint(said) == as_json(said.out)["problem"]
    assert as_json(said.out)["source"]["jobs"] > 0


@pytest.mark.parametrize(
    ("line", "want"),
    [
        ("lorem ipsum", "not JSON"),
        ("[1e9, [], []]\n[5, [], []]", "not an entry of a journal"),
        ('[1e9, [["finished", "nobody", 1]], []]', "names a job or a node that is not there: 'nobody'"),
        ('[1e9, [["nodelost", 99]], []]', "node 99"),
        ('[1e9, [["noderestricted", 99, [0], true]], []]', "node 99"),
        ('[1e9, [["noderestricted", 0, [0, 999], true]], []]', "node 0, slot 999"),
        ('[1e9, [], [["launch", "nobody", 1, [[0, 1]], [0, 0, 0]]]]', "'nobody'"),
        ('[1e9, [["submitted", {"id": "x", "submitted": 1, "gpus": "many"}, "-/x1", 5]], []]', "got 'many'"),
        ('[1e9, [["submitted", {"id": "x", "submitted": 1, "gpus": 1}, "unheard", 5]], []]', "unheard"),
        (f'[1e9, [["submitted", {{"id": "x", "submitted": 1, "gpus": 1{"0" * 30}}}, "-/x1", 5]], []]', "a job 'x' of 1"),
        ('[1e9, [["submitted", {"id": "x", "submitted": null, "gpus": 1}, "-/x1", 5]], []]', "got None"),
        ('[1e9, [["submitted", {"id": "x", "submitted": 1, "gpus": 0}, "-/x1", 5]], []]', "a job 'x' of 0 GPUs"),
        ('[1e9, [["submitted", {"id": "0", "submitted": 1, "gpus": 1}, "-/x1", 5]], []]', "'0' is submitted a second time"),
        ('[1e9, [], [["launch", "0", 1, [[0, 1]], [0, 0, 0]]]]', "run 1 of job '0' after run 1"),
        ('[1e9, [["finished", "0", 1]], []]', "job '0' ends a second time"),
        ("{}", "not an entry of a journal"),
        ("[" * 5000, "not JSON"),
    ],
)
def test_a_malformed_journal_is_shown_up_to_what_is_wrong(run: Path, line: str, want: str) -> None:
    whole = lines(run)
    half = len(whole) // 2
    said = poise("analyze", damaged(run, "\n".join([*whole[:half], line, *whole[half:]])), "--json")
    assert want in complaint(said)
    found = as_json(said.out)
    assert found["problem"] == complaint(said)
    assert 0 < found["source"]["jobs"] <= 60


def test_a_packed_journal_that_was_cut_off_is_shown_as_far_as_it_goes(run: Path) -> None:
    packed = gzip.compress((run / "journal.jsonl").read_bytes())
    (run / "journal.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    said = poise("analyze", run / "journal.jsonl.gz", "--json")
    assert "cut off" in complaint(said)
    assert 0 < as_json(said.out)["source"]["jobs"] < 60


def test_one_job_is_one_job(tmp_path: Path) -> None:
    said = poise("analyze", a_trace(tmp_path, a_row("a", seconds=0)))
    assert said.out.startswith("trace.jsonl: 1 job of a trace.")


def test_a_newer_journal_is_shown_without_what_is_not_known_yet(run: Path) -> None:
    head, *rest, end = lines(run)
    newer = json.dumps(json.loads(head) | {"journal": 99, "mood": "fine"})
    said = poise("analyze", damaged(run, "\n".join([newer, '[0, [["dreamt", "a", 1]], []]', *rest, end]) + "\n"), "--json")
    assert "version 99" in complaint(said)
    assert as_json(said.out)["source"]["jobs"] == 60


def test_a_journal_without_a_header_is_one_line_and_nothing_else(run: Path) -> None:
    for text in ("", "lorem ipsum\n"):
        assert "not a journal" in poise("analyze", damaged(run, text)).refusal
    assert ":1: not JSON" in poise("analyze", damaged(run, '{"journal": 1, "trace":')).failure


def test_a_journal_of_no_job_has_a_study_too(run: Path) -> None:
    head = lines(run)[0]
    said = poise("analyze", damaged(run, head + '\n{"end":"complete"}\n'), "--html", run / "page.html")
    assert (said.code, said.err) == (0, "")
    assert "0 jobs of a journal" in said.out
    found = poise("analyze", run, "--json").json
    assert found["parts"]["overview"]["rows"][0]["run_time_median"] is None


def test_micro_batches_have_a_study_too(tmp_path: Path) -> None:
    said = poise(
        *(
            "simulate",
            "synthetic:jobs=10,seed=1,durations=fixed:60",
            "--cluster",
            "v100:4,k80:4",
            "--policy",
            "hare:long=0.01",
        ),
        *("--micro-batches", "4", "--out", tmp_path / "run", "--quiet"),
    )
    assert said.code == 0
    found = poise("analyze", tmp_path / "run", "--json").json
    (overview,) = found["parts"]["overview"]["rows"]
    losses = found["parts"]["losses"]["rows"]
    assert "task computed" in {row["end"] for row in losses}
    assert sum(row["gpu_hours"] for row in losses) == pytest.approx(overview["gpu_hours"])
