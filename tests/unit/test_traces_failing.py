"""Drawn failures: as published of Philly, the same for the same seed, and nothing where none are asked for."""

from collections import Counter
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from tests.builders import a_job

from poise.lab.traces import philly_shape
from poise.lab.traces.failure_model import (
    DrawnFailures,
    FailureModel,
    draw_failures,
    parse_failure_model,
    with_failures,
)
from poise.lab.traces.formats.poise import write_trace
from poise.lab.traces.parsing import FieldError
from poise.lab.traces.philly_shape import CAUSES, FAILURE_PROBABILITIES, MOST_ATTEMPTS, FailureCause
from poise.lab.traces.reader import read_trace
from poise.lab.traces.schema import FailedAttempt, JobOutcome, Trace, TraceJob
from poise.scheduler.model.errors import TraceError, UnknownNameError
from poise.scheduler.model.failures import Verdict, verdict
from poise.scheduler.model.job import Job

PLACES = {cause.name: place for place, cause in enumerate(CAUSES)}
EVEN = (np.arange(100_000) + 0.5) / 100_000


def seconds(job: Job) -> float:
    return job.duration or 0.0


def a_trace(*jobs: TraceJob) -> Trace:
    return Trace("test", jobs)


def drawn(failing: FailureModel, jobs: int, seed: int = 0) -> dict[int, DrawnFailures]:
    chance, lengths = (np.random.default_rng(each) for each in np.random.SeedSequence(seed).spawn(2))
    return draw_failures(failing, jobs, chance, lengths)


@pytest.fixture(scope="module")
def many() -> list[DrawnFailures]:
    """What is drawn for 40,000 jobs, all of which fail."""
    return list(drawn(FailureModel(rate=1.0), 40_000).values())


@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: cause.name)
def test_run_time_to_failure_has_the_published_quantiles(cause: FailureCause) -> None:
    minutes = philly_shape.seconds_to_failure(PLACES[cause.name], EVEN) / 60
    assert np.quantile(minutes, FAILURE_PROBABILITIES) == pytest.approx(cause.minutes, rel=2e-3)
    assert (np.diff(minutes) >= 0).all()
    assert minutes[0] >= 1 / 60
    assert minutes[-1] < 75 * 24 * 60, "no attempt lasts longer than the study"


def test_every_cause_has_its_published_share_of_all_run_time_to_failure() -> None:
    """To the hundredth of a percent that is published."""
    minutes = [cause.trials * philly_shape.seconds_to_failure(i, EVEN).mean() / 60 for i, cause in enumerate(CAUSES)]
    got = [100 * each / sum(minutes) for each in minutes]
    assert got == pytest.approx([cause.share for cause in CAUSES], abs=0.01)
    assert sum(minutes) == pytest.approx(philly_shape.FAILED_MINUTES, rel=1e-3)


@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: cause.name)
def test_attempts_a_job_have_the_published_mean(cause: FailureCause) -> None:
    shares = philly_shape.attempt_shares(PLACES[cause.name])
    assert len(shares) == MOST_ATTEMPTS
    assert shares.sum() == pytest.approx(1)
    assert (shares * np.arange(1, MOST_ATTEMPTS + 1)).sum() == pytest.approx(cause.trials / cause.jobs, rel=1e-9)


@pytest.mark.slow
def test_drawn_run_times_to_failure_have_the_published_quantiles(many: list[DrawnFailures]) -> None:
    """Of each cause, the part of attempts below a published quantile is off by no more than 4 standard deviations."""
    minutes: dict[str, list[float]] = {}
    for each in many:
        for attempt in each.failures:
            minutes.setdefault(attempt.cause, []).append(attempt.after / 60)
    for place, cause in enumerate(CAUSES):
        longest = philly_shape.seconds_to_failure(place, EVEN)[-1] / 60
        for want, quantile in zip(FAILURE_PROBABILITIES, cause.minutes, strict=True):
            if quantile < 0.999 * longest:  # else there is nothing above it
                got = np.mean(np.array(minutes[cause.name]) <= quantile)
                off = 4 * (want * (1 - want) / len(minutes[cause.name])) ** 0.5
                assert got == pytest.approx(want, abs=off), cause.name
    assert np.median(minutes["cpu-out-of-memory"]) == pytest.approx(13.45, rel=0.05)
    assert np.quantile(minutes["incorrect-inputs"], 0.9) == pytest.approx(404.83, rel=0.1)


@pytest.mark.slow
def test_drawn_causes_are_in_the_published_proportion(many: list[DrawnFailures]) -> None:
    """By jobs, chi-square over 21 causes is below its 99.9 % point of 45.3; by attempts within 3 %, of the frequent ones."""
    jobs = Counter(each.failures[0].cause for each in many)
    want = {cause.name: cause.jobs / sum(each.jobs for each in CAUSES) * len(many) for cause in CAUSES}
    assert sum((jobs[name] - expected) ** 2 / expected for name, expected in want.items()) < 45.3
    attempts = Counter(attempt.cause for each in many for attempt in each.failures)
    for cause in CAUSES[:5]:
        share = cause.trials / sum(each.trials for each in CAUSES)
        assert attempts[cause.name] / attempts.total() == pytest.approx(share, rel=0.03), cause.name


def test_statuses_are_as_published() -> None:
    found = drawn(FailureModel(), 100_000)
    outcomes = Counter(each.outcome for each in found.values())
    assert 100 * outcomes[JobOutcome.FAILED] / 100_000 == pytest.approx(17.2, abs=0.5)
    assert 100 * outcomes[JobOutcome.KILLED] / 100_000 == pytest.approx(13.5, abs=0.5)
    assert 100 * sum(bool(each.failures) for each in found.values()) / 100_000 == pytest.approx(18.26, abs=0.5)


@pytest.mark.slow
def test_a_job_fails_of_one_cause_and_only_what_passes_heals(many: list[DrawnFailures]) -> None:
    healed = 0
    for each in many:
        assert len({attempt.cause for attempt in each.failures}) == 1
        assert 1 <= len(each.failures) <= MOST_ATTEMPTS
        assert all(attempt.after >= 0.001 for attempt in each.failures)
        passes = verdict(each.failures[0].cause) is Verdict.TRANSIENT
        assert each.outcome is JobOutcome.FAILED or (passes and each.outcome is JobOutcome.PASSED)
        healed += each.outcome is JobOutcome.PASSED
    assert healed / len(many) == pytest.approx(1_012 / 17_580, rel=0.1)


def test_knobs_say_how_many_fail_heal_and_are_killed() -> None:
    everything = drawn(FailureModel(rate=1.0, heal=1.0), 2_000)
    assert {verdict(each.failures[0].cause) is Verdict.TRANSIENT for each in everything.values()} == {True, False}
    assert all(
        (each.outcome is JobOutcome.PASSED) == (verdict(each.failures[0].cause) is Verdict.TRANSIENT)
        for each in everything.values()
    )
    assert {each.outcome for each in drawn(FailureModel(rate=1.0, heal=0.0), 2_000).values()} == {JobOutcome.FAILED}
    killed = drawn(FailureModel(rate=0.0, killed=1.0), 50)
    assert killed == dict.fromkeys(range(50), DrawnFailures(JobOutcome.KILLED))
    assert drawn(FailureModel(rate=0.0, killed=0.0), 50) == {}


def test_the_first_jobs_fare_the_same_in_a_longer_trace_and_who_fails_fails_at_a_higher_rate() -> None:
    few, more = drawn(FailureModel(), 300), drawn(FailureModel(), 900)
    assert few == {place: each for place, each in more.items() if place < 300}
    seldom, often = drawn(FailureModel(rate=0.1, killed=0.0), 300), drawn(FailureModel(rate=0.5, killed=0.0), 300)
    assert set(seldom) < set(often)


def test_the_same_seed_gives_the_same_failures_and_another_gives_others() -> None:
    trace = a_trace(*(a_job(str(i), seconds=600) for i in range(100)))
    assert with_failures(trace, FailureModel(), 3, seconds) == with_failures(trace, FailureModel(), 3, seconds)
    assert with_failures(trace, FailureModel(), 3, seconds).jobs != with_failures(trace, FailureModel(), 4, seconds).jobs


def test_a_job_that_fails_lasts_longer_than_its_failed_attempts_and_no_other_changes_its_length() -> None:
    trace = a_trace(*(a_job(str(i), seconds=600) for i in range(500)))
    failing = with_failures(trace, FailureModel(rate=0.5), 0, seconds)
    lengthened = 0
    for before, after in zip(trace.jobs, failing.jobs, strict=True):
        together = sum(attempt.after for attempt in after.failures)
        assert after.job.duration == pytest.approx(max(600, together + 0.001 if after.failures else 0), abs=1e-6)
        lengthened += after.job != before.job
        assert replace(after.job, duration=600) == before.job
    assert f"; {lengthened} were lengthened" in failing.notes[-1]


def test_work_in_steps_is_lengthened_in_proportion_and_a_job_of_no_work_cannot_fail() -> None:
    steps = TraceJob(Job("a", 0, 1, steps=10.0))
    [[after]] = [with_failures(a_trace(steps), FailureModel(rate=1.0), 0, lambda job: (job.steps or 0) / 100).jobs]
    assert after.job.steps == pytest.approx(100 * (sum(attempt.after for attempt in after.failures) + 0.001))
    nothing = a_trace(a_job("a", seconds=0))
    assert with_failures(nothing, FailureModel(rate=1.0), 0, seconds).jobs == nothing.jobs


def test_none_changes_nothing_at_all() -> None:
    trace = a_trace(a_job("a"))
    assert with_failures(trace, parse_failure_model("none"), 0, seconds) is trace
    assert with_failures(trace, parse_failure_model("0"), 0, seconds) is trace


@pytest.mark.parametrize("own", [a_job("a", dies=(5.0,)), a_job("a", outcome=JobOutcome.KILLED)])
def test_a_trace_that_has_failures_keeps_its_own_and_says_so(own: TraceJob) -> None:
    trace = a_trace(own, *(a_job(str(i)) for i in range(100)))
    kept = with_failures(trace, FailureModel(), 0, seconds)
    assert kept.jobs == trace.jobs
    assert kept.notes == ("failures: the trace has its own, of 1 jobs that fail or are killed; none are drawn",)


def test_the_generator_draws_the_same_way() -> None:
    jobs = read_trace("synthetic:jobs=400,durations=fixed:600,failures=philly:rate=0.5/heal=1/killed=0").jobs
    assert {each.broken for each in jobs if each.failures} == {True, False}
    assert all(each.broken == (each.outcome is JobOutcome.FAILED) for each in jobs)
    assert {each.outcome for each in jobs} == {JobOutcome.PASSED, JobOutcome.FAILED}
    assert read_trace("synthetic:jobs=50,failures=none").jobs == read_trace("synthetic:jobs=50").jobs


@pytest.mark.parametrize(
    ("spec", "want"),
    [
        ("none", FailureModel(0.0, 0.0, 0.0)),
        ("philly", FailureModel()),
        ("philly:rate=0.3", FailureModel(rate=0.3)),
        ("philly:heal=1,killed=0", FailureModel(heal=1.0, killed=0.0)),
        ("0.25", FailureModel(rate=0.25, heal=1.0, killed=0.0, mended=1.0)),
        ("1e-1", FailureModel(rate=0.1, heal=1.0, killed=0.0, mended=1.0)),
    ],
)
def test_specification_is_read(spec: str, want: FailureModel) -> None:
    assert parse_failure_model(spec) == want


FORMS = "expected none, philly, philly:rate=FRACTION,heal=FRACTION,killed=FRACTION, or a fraction, got "
REFUSED = {
    "": FORMS + "nothing",
    ":rate=1": FORMS + "':rate=1'",
    "none:rate=1": FORMS + "'none:rate=1'",
    "philly:": "expected knob=value with a knob of rate, heal, killed, got nothing",
    "philly:rate": "expected knob=value with a knob of rate, heal, killed, got 'rate'",
    "philly:rate=": "rate: expected a fraction from 0 to 1, got nothing",
    "philly:rate=2": "rate: expected a fraction from 0 to 1, got '2'",
    "philly:heal=-0.1": "heal: expected a fraction from 0 to 1, got '-0.1'",
    "philly:killed=many": "killed: expected a fraction from 0 to 1, got 'many'",
    "philly:rate=0.1,rate=0.2": "rate: expected it once, got it twice",
    "1.5": "expected philly, or a fraction from 0 to 1, got '1.5'",
    "nan": "expected philly, or a fraction from 0 to 1, got 'nan'",
}


@pytest.mark.parametrize("spec", REFUSED)
def test_specification_that_makes_no_sense_is_refused(spec: str) -> None:
    with pytest.raises(FieldError) as caught:
        parse_failure_model(spec)
    assert str(caught.value) == REFUSED[spec]


@pytest.mark.parametrize(
    ("spec", "want"),
    [
        ("phily", "unknown kind of failures 'phily'; did you mean philly?"),
        ("helios", "unknown kind of failures 'helios'; "),
        ("philly:rte=1", "unknown knob of failures 'rte'; did you mean rate?"),
    ],
)
def test_unknown_name_is_refused_with_the_nearest(spec: str, want: str) -> None:
    with pytest.raises(UnknownNameError) as caught:
        parse_failure_model(spec)
    assert str(caught.value).startswith(want)


def test_broken_jobs_are_written_and_read_again(tmp_path: Path) -> None:
    trace = read_trace("synthetic:jobs=200,failures=0.5")
    text = StringIO()
    write_trace(trace, text)
    (tmp_path / "t.jsonl").write_text(text.getvalue())
    assert read_trace(str(tmp_path / "t.jsonl")).jobs == trace.jobs
    (tmp_path / "t.csv").write_text("job,submitted,gpus,duration,failures,broken\na,0,1,9,3:x,true\nb,0,1,9,3:x,false\n")
    a, b = read_trace(str(tmp_path / "t.csv")).jobs
    assert (a.broken, a.outcome, b.broken, b.outcome) == (True, JobOutcome.FAILED, False, JobOutcome.PASSED)
    assert a.failures == b.failures == (FailedAttempt(3.0, "x"),)


@pytest.mark.parametrize(
    ("columns", "want"),
    [
        ('"broken": true', "broken: expected false where no failures are given, got True"),
        ('"broken": true, "failures": []', "broken: expected false where no failures are given, got True"),
        (
            '"broken": true, "failures": [[1, "x"]], "outcome": "passed"',
            "broken: expected false where the outcome is passed",
        ),
        ('"broken": "yes"', "broken: expected true or false, got 'yes'"),
        ('"broken": 1', "broken: expected true or false, got 1"),
    ],
)
def test_job_that_is_broken_without_a_failure_is_refused(columns: str, want: str, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"job": "a", "submitted": 0, "gpus": 1, "duration": 5, ' + columns + "}\n")
    with pytest.raises(TraceError, match="t.jsonl:1: " + want):
        read_trace(str(path))
