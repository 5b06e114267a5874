"""`poise shares`: what tenants were entitled to, traded and got."""

import json
from pathlib import Path

import pytest
from tests.shell import FOUR, a_trace, poise


def a_run(folder: Path, *options: str) -> Path:
    """Two tenants with six jobs each on two types, one of which gains much from the fast one."""
    jobs = [
        {"job": f"{tenant}{place}", "submitted": 0, "gpus": 1, "duration": 86400, "tenant": tenant, "model": model}
        for tenant, model in (("vera", "VAE"), ("rex", "ResNeXt50"))
        for place in range(6)
    ]
    trace = folder / "jobs.jsonl"
    trace.write_text("".join(json.dumps(job) + "\n" for job in jobs))
    said = poise("simulate", trace, "--cluster", "v100:4,k80:4", "--until", "2h", "--out", folder / "run", *options)
    assert said.code == 0
    return folder / "run"


def test_shares_shows_entitlements_receipts_and_trades(tmp_path: Path) -> None:
    said = poise("shares", a_run(tmp_path, "--policy", "gandiva-fair"))
    assert (said.code, said.err) == (0, "")
    assert "gandiva-fair on v100:4,k80:4: GPU-hours" in said.out
    assert "vera" in said.out
    rex = next(line for line in said.out.splitlines() if line.split()[:2] == ["rex", "vera"])
    assert rex.split()[2:6] == ["v100", "k80", "1.6", "1.25"]


def test_json_has_it_by_type_and_what_was_received_is_what_was_due(tmp_path: Path) -> None:
    found = poise("shares", a_run(tmp_path, "--policy", "gandiva-fair"), "--json").json
    assert found["gpu_types"] == ["v100", "k80"]
    assert [each["tenant"] for each in found["tenants"]] == ["vera", "rex"]
    assert [each["entitled_gpus"] for each in found["tenants"]] == [pytest.approx([0.4, 4]), pytest.approx([3.6, 0])]
    for each in found["tenants"]:
        assert each["received_gpu_hours"] == pytest.approx(each["entitled_gpu_hours"], rel=0.03, abs=0.05)
    (trade,) = found["trades"]
    assert (trade["buyer"], trade["seller"], trade["since"], trade["until"]) == ("rex", "vera", 60.0, 7200.0)


def test_a_run_with_trades_is_replayed_exactly(tmp_path: Path) -> None:
    said = poise("replay", a_run(tmp_path, "--policy", "gandiva-fair"))
    assert (said.code, said.err) == (0, "")


def test_a_policy_without_entitlements_is_said_to_have_none(tmp_path: Path) -> None:
    assert poise("simulate", a_trace(tmp_path, *FOUR), "--cluster", "gpu:4", "--out", tmp_path / "run").code == 0
    said = poise("shares", tmp_path / "run")
    assert said.code == 0
    assert "says nothing of entitlements" in said.out
    assert poise("shares", tmp_path / "run", "--json").json["trades"] == []


def test_something_that_is_no_journal_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing\n")
    assert "not a journal" in poise("shares", tmp_path / "notes.txt").refusal


def test_of_a_journal_that_is_cut_off_what_could_be_read_is_shown(tmp_path: Path) -> None:
    whole = (a_run(tmp_path, "--policy", "gandiva-fair") / "journal.jsonl").read_text().splitlines(keepends=True)
    cut = tmp_path / "cut.jsonl"
    cut.write_text("".join(whole[: len(whole) // 2]))
    said = poise("shares", cut, "--json")
    assert said.code == 1
    assert said.err.startswith("poise: ")
    assert said.err.count("\n") == 1
    assert "cut off" in said.err
    assert [each["tenant"] for each in json.loads(said.out)["tenants"]] == ["vera", "rex"]


def test_a_fact_about_a_job_that_never_was_ends_the_reading_there(tmp_path: Path) -> None:
    whole = (a_run(tmp_path, "--policy", "gandiva-fair") / "journal.jsonl").read_text().splitlines(keepends=True)
    strange = tmp_path / "strange.jsonl"
    strange.write_text("".join([*whole[:3], '[1e9,[],[["launch","nobody",1,[[0,1]],[0,0,0]]]]\n']))
    said = poise("shares", strange)
    assert said.code == 1
    assert said.err == f"poise: {strange}:4: names a job or a node that is not there: 'nobody'\n"
    assert "vera" in said.out
