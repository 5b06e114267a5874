"""`--failures`: for any trace, the same for every policy, and together with the rules of retrying."""

from pathlib import Path

import pytest
from tests.shell import a_row, a_trace, poise

from poise.engine.journal import JournalReader
from poise.lab.traces.failure_model import FORMS
from poise.scheduler.model.event import Failed

PLAIN = "synthetic:jobs=200,seed=3,sizes=1:2/4:1,durations=lognormal:600:1"
CLUSTER = ("--cluster", "gpu:256@8")


def deaths(folder: Path) -> list[tuple[str, str, bool]]:
    """Who failed of what, and whether for good, by job."""
    entries = JournalReader(folder / "journal.jsonl").entries()
    found = [(fact.job, fact.cause, fact.final) for entry in entries for fact in entry.events if isinstance(fact, Failed)]
    return sorted(found)


def simulated(folder: Path, *words: object, trace: object = PLAIN) -> list[tuple[str, str, bool]]:
    said = poise("simulate", trace, *CLUSTER, "--quiet", "--out", folder, *words)
    assert said.code == 0, said.err
    return deaths(folder)


def test_none_is_the_default_and_leaves_every_byte_as_it_is(tmp_path: Path) -> None:
    assert simulated(tmp_path / "plain") == simulated(tmp_path / "none", "--failures", "none") == []
    for name in ("journal.jsonl", "summary.json", "jobs.csv"):
        assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "none" / name).read_bytes()


def test_every_policy_sees_the_same_failures_and_another_seed_gives_others(tmp_path: Path) -> None:
    fifo, srtf, tiresias = (
        simulated(tmp_path / policy, "--failures", "0.5", "--policy", policy) for policy in ("fifo", "srtf", "tiresias")
    )
    assert len(fifo) > 100
    assert fifo == srtf == tiresias
    assert fifo != simulated(tmp_path / "other", "--failures", "0.5", "--seed", "1")


def test_a_job_ends_with_the_cause_that_it_failed_of(tmp_path: Path) -> None:
    found = simulated(tmp_path, "--failures", "philly:rate=0.5,heal=0")
    assert not [cause for _, cause, _ in found if cause.startswith("unsuccessful")]
    last = [job for job, _, final in found if final]
    assert sorted({job for job, _, _ in found}) == sorted(last)


def test_a_note_says_what_was_drawn(tmp_path: Path) -> None:
    said = poise("simulate", PLAIN, *CLUSTER, "--failures", "philly", "--json")
    assert said.json["failed"] + said.json["finished"] + said.json["cancelled"] == 200
    assert said.err.startswith("note: failures: of 200 jobs ")
    assert f" {said.json['cancelled']} are killed" in said.err


def test_a_trace_keeps_its_own_failures(tmp_path: Path) -> None:
    trace = a_trace(tmp_path, a_row("a", seconds=100, failures=[[10, "x"]]), a_row("b", seconds=100))
    said = poise("simulate", trace, "--failures", "1", "--json")
    assert said.json["finished"] == 2
    assert "failures: the trace has its own, of 1 jobs" in said.err


def test_work_in_steps_fails_as_well(tmp_path: Path) -> None:
    rows = [a_row(str(i), seconds=None, steps=1000, model="ResNet-18", batch_size=128) for i in range(40)]
    found = simulated(tmp_path / "out", "--failures", "1", "--retries", "9", trace=a_trace(tmp_path, *rows))
    assert len({job for job, _, _ in found}) == 40


def test_retrying_by_cause_fails_less_often(tmp_path: Path) -> None:
    counted = simulated(tmp_path / "count", "--failures", "0.5")
    by_cause = simulated(tmp_path / "cause", "--failures", "0.5", "--retry", "cause", "--backoff", "1m")
    tried = simulated(tmp_path / "pool", "--failures", "0.5", "--retry", "cause", "--validation-pool", "4")
    assert len(by_cause) < len(counted)
    assert {(job, cause) for job, cause, _ in by_cause} == {(job, cause) for job, cause, _ in counted}
    assert [(job, cause) for job, cause, _ in tried] == [(job, cause) for job, cause, _ in by_cause]


@pytest.mark.parametrize(
    ("spec", "want"),
    [
        ("phily", "unknown kind of failures 'phily'; did you mean philly?"),
        ("philly:rte=0.1", "unknown knob of failures 'rte'; did you mean rate?"),
        ("philly:rate=2", "--failures: rate: expected a fraction from 0 to 1, got '2'"),
        ("-1", "--failures: expected philly, or a fraction from 0 to 1, got '-1'"),
        ("", f"--failures: expected {FORMS}, got nothing"),
    ],
)
def test_wrong_specification_is_refused_before_anything_is_read(spec: str, want: str) -> None:
    assert poise("simulate", "no such file", "--failures", spec).refusal == want
    assert poise("compare", "no such file", "--policies", "fifo", "--failures", spec).refusal == want
