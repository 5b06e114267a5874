"""The check of a policy finds what is wrong with it, says where, and keeps a world that shows it."""

import gc
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import pytest

from poise.lab.conformance import check, play
from poise.lab.conformance.check import SEEDS, ConformanceReport, check_policy
from poise.lab.conformance.laws import LAWS
from poise.lab.conformance.worlds import World, odd_worlds, random_world, smaller, write_world
from poise.lab.traces.reader import read_trace
from poise.policies import Order, PreemptionRule, Rank, Unfitting, spec_of
from poise.scheduler.core.settings import Settings

FAULTS = "tests.planted_faults"


def checked(attribute: str, seeds: int = 12) -> dict[str, str]:
    """The laws that a policy with a planted fault breaks, and what is wrong."""
    report = check_policy(f"{FAULTS}:{attribute}", seeds=seeds, worlds=worlds(seeds))
    return {each.law: each.problem or "" for each in report.broken}


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for smaller counterexamples for a moment only."""
    monkeypatch.setattr(check, "SHRINKING", 0.5)


def worlds(seeds: int) -> list[World]:
    return [*odd_worlds(), *map(random_world, range(seeds))]


@pytest.mark.parametrize(
    ("attribute", "law", "words"),
    [
        ("RANDOM", "pure", "planted_faults.py"),
        ("RANDOM", "repeatable", "the other time"),
        ("CLOCK", "pure", "calls time.time"),
        ("PRINTS", "pure", "calls print"),
        ("IDS", "names", "at "),
        ("RAISES", "raises nothing", "ZeroDivisionError: division by zero"),
        ("NAN", "raises nothing", "is not a number"),
        ("NO_RANK", "raises nothing", "the core cannot use its answer"),
        ("PREEMPTS", "claims no-preemption", "is preempted"),
        ("OVERTAKES", "claims in-order", "starts before job"),
        ("LOOKS", "claims no-durations", "where lengths are not known"),
        ("IDLES", "claims work-conserving", "are idle while a gang of"),
        ("DUE", "stated", "where no job has a deadline"),
        ("Starves", "ends", "is never started"),
        ("Idles", "ends", "is never started"),
        ("Circles", "raises nothing", "goes round in circles"),
        ("Ghosts", "raises nothing", "the core cannot use its answer"),
        ("Splits", "raises nothing", "GPUs and is to get 1"),
        ("COUNTS", "replay", "replayed"),
    ],
)
def test_a_planted_fault_is_found(attribute: str, law: str, words: str) -> None:
    found = checked(attribute)
    assert law in found, found
    assert words in found[law]


def test_a_policy_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(play, "LONGEST", 0.05)
    report = check_policy(f"{FAULTS}:Hangs", worlds=worlds(0)[1:2])
    assert [each.law for each in report.broken] == ["raises nothing"]
    assert "does not answer within" in (report.broken[0].problem or "")


@pytest.mark.slow
def test_an_order_that_depends_on_the_process_is_found() -> None:
    report = check_policy(f"{FAULTS}:HASHES", seeds=2)
    assert [each.law for each in report.broken] == ["processes"]


def test_a_counterexample_is_as_small_as_can_be() -> None:
    report = check_policy(f"{FAULTS}:PREEMPTS", worlds=worlds(12))
    (broken,) = report.broken
    assert broken.world is not None
    assert len(broken.world.jobs) == 2  # one that runs, and one that is shorter
    assert all(each.job.tenant == "default" and each.job.model is None for each in broken.world.jobs)


def test_a_counterexample_that_is_written_is_the_same_world(tmp_path: Path) -> None:
    """But for what a trace does not say: the names of nodes and what the settings of other worlds were."""
    for number, world in enumerate(worlds(20)):
        file = tmp_path / f"{number}.jsonl"
        options = write_world(world, file)
        assert not world.jobs or read_trace(str(file)).jobs == world.jobs
        assert options[:2] == ["--cluster", str(world.cluster)]
        assert ("--faults" in options) == bool(world.outages)


def test_smaller_worlds_are_smaller() -> None:
    """So that looking for a smaller one comes to an end."""
    for world in worlds(20):
        for candidate in smaller(world):
            assert candidate != world
            assert len(candidate.jobs) <= len(world.jobs)
            assert len(candidate.outages) <= len(world.outages)


def test_random_worlds_are_those_of_their_seeds_and_differ() -> None:
    drawn = [random_world(seed) for seed in range(30)]
    assert drawn == [random_world(seed) for seed in range(30)]
    assert len({str(world) for world in drawn}) == len(drawn)
    assert any(world.outages for world in drawn)
    assert any(each.job.micro_batches for world in drawn for each in world.jobs)
    assert any(each.job.min_gpus for world in drawn for each in world.jobs)
    assert {world.is_plain for world in drawn} == {True, False}
    assert replace(drawn[0], settings=Settings()).costs.restart_overhead == 0


def test_an_object_of_this_process_can_be_checked_and_keeps_the_laws() -> None:
    def by_weight(job: object, _previous: Rank | None, _memory: None) -> Rank:
        return Rank(-getattr(job, "weight", 0.0))

    report = check_policy(Order(by_weight, PreemptionRule.BY_RANK, Unfitting.SKIPPED), seeds=4)
    assert not report.broken, str(report)
    assert report.policy == "by-weight"
    assert str(report).startswith("by-weight keeps ")
    assert {each.law for each in report.verdicts} >= {law.name for law in LAWS}


def test_what_the_garbage_collector_calls_is_not_blamed_on_the_policy() -> None:
    def timed(_phase: str, _facts: dict[str, int]) -> None:
        perf_counter()

    before = gc.get_threshold()
    gc.callbacks.append(timed)
    gc.set_threshold(1)
    try:
        report = check_policy("srtf", worlds=worlds(0)[:3])
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(timed)
    assert not report.broken, str(report)


def test_a_report_in_words_names_what_is_broken() -> None:
    report: ConformanceReport = check_policy(f"{FAULTS}:Idles", worlds=worlds(0)[:3])
    assert "breaks ends (every job comes to its end" in str(report)


def test_claims_about_sharing_are_measured_by_the_audit() -> None:
    report = check_policy("fifo", seeds=0)
    verdicts = {each.law: each.holds for each in report.verdicts}
    assert verdicts["claims no-starvation"] is True
    assert SEEDS > 0
    assert spec_of("fifo") == "fifo"
