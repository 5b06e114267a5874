"""Shares into rounds on examples worked by hand. A step takes a second, so that time is counted whole."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np
import pytest
from tests.builders import Story, a_job, a_table, simulate
from tests.workloads import a_workload

from poise.lab.analysis.history import History
from poise.lab.analysis.summary import utilisation
from poise.lab.traces.schema import TraceJob
from poise.scheduler.core.settings import Cadence, Settings
from poise.scheduler.mechanism.rounds import shuffled
from poise.scheduler.model.action import Launch, Preempt, Remark
from poise.scheduler.model.errors import GaveUpError
from poise.scheduler.model.plan import Policy
from poise.scheduler.model.speed import Locality
from poise.scheduler.model.topology import Topology
from poise.scheduler.model.workload import Allocation, Awareness, Leftover, Workload
from poise.scheduler.policies.gavel import FinishTime
from poise.scheduler.throughput.measurements import Alone, JobClass, Throughputs, Together

ENDLESS = 1e9
GAVEL = Settings(cadence=Cadence.ROUNDS, round=360.0, backfill=False, patience=0.0, credit=0.5)

M = JobClass("m")
EVEN = Throughputs.of("even", "v100", [Alone(M, t, 1, Locality.PACKED, 1.0) for t in ("v100", "p100", "k80")])
SHARING = Throughputs.of(
    "sharing",
    "v100",
    [Alone(M, "v100", gang, Locality.PACKED, float(gang)) for gang in (1, 2)],
    [Together(M, M, "v100", gang, (0.7 * gang, 0.7 * gang)) for gang in (1, 2)],
)


@dataclass(frozen=True)
class Fixed:
    """Shares by row that never change. Notes when it was asked, and cannot answer for so many jobs as `fails` lists."""

    shares: Sequence[Sequence[float]]
    leftover: Leftover = Leftover.FILLED
    awareness: Awareness = Awareness.AWARE
    fails: tuple[int, ...] = ()
    asked: list[float] = field(default_factory=list, compare=False)

    def start(self) -> int:
        return 0

    def allocate(self, workload: Workload, memory: int) -> tuple[Allocation, int]:
        self.asked.append(workload.now)
        if workload.jobs in self.fails:
            raise GaveUpError("the program is too hard")
        share = np.array(self.shares, dtype=float)[workload.rows]
        return Allocation(share, leftover=self.leftover, awareness=self.awareness), memory + 1


def jobs(*moments: float, seconds: float = ENDLESS, gpus: int = 1) -> list[TraceJob]:
    """Named a, b, c by the moment they come."""
    return [a_job("abcdefgh"[i], at=at, seconds=seconds, gpus=gpus, model="m") for i, at in enumerate(moments)]


def played(
    trace: list[TraceJob], shares: Fixed, cluster: str = "v100:1", *, settings: Settings = GAVEL, until: float = inf
) -> Story:
    return simulate(trace, Policy("fixed", shares), cluster, settings=settings, believed=EVEN, until=until)


def shared(trace: list[TraceJob], policy: str, cluster: str, settings: Settings) -> Story:
    return simulate(trace, policy, cluster, settings=settings, believed=SHARING, placement="consolidate")


def fractions(story: Story, until: float) -> list[list[float]]:
    """Of the time until then, by job and GPU type."""
    types = Topology(story.cluster).type_of
    got = np.zeros((len(story.jobs), max(types) + 1))
    names = [each.job.id for each in story.jobs]
    for run in story.runs:
        got[names.index(run.job), types[run.gpus[0].node]] += min(run.ended, until) - run.began
    fractions: list[list[float]] = (got / until).tolist()
    return fractions


def remarks(story: Story) -> list[tuple[float, str]]:
    return [(now, action.text) for now, action in story.actions(Remark)]


# The worked table

EXAMPLE = ((0.6, 0.4, 0.0), (0.2, 0.6, 0.2), (0.2, 0.0, 0.8))
"""X^example of the paper."""

TABLE = ("abc", "abc", "bac", "cab", "abc", "abc", "abc", "bac", "cab", "abc")
"""Jobs on V100, P100 and K80 in rounds 1 to 10."""


def example(rounds: int) -> Story:
    return played(jobs(0, 0, 0), Fixed(EXAMPLE), "v100:1,p100:1,k80:1", until=rounds * 360.0)


def test_the_worked_example_serves_the_ten_triples() -> None:
    story = example(10)
    types = Topology(story.cluster).type_of
    found = []
    for middle in (360.0 * i + 180.0 for i in range(10)):
        who = {types[run.gpus[0].node]: run.job for run in story.runs if run.began <= middle < run.ended}
        found.append("".join(who[gpu_type] for gpu_type in range(3)))
    assert tuple(found) == TABLE


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [10, 1000])
def test_the_worked_example_receives_just_its_shares(rounds: int) -> None:
    assert np.array(fractions(example(rounds), rounds * 360.0)) == pytest.approx(np.array(EXAMPLE), abs=1e-12)


def test_the_worked_example_starts_a_job_only_where_it_did_not_run_in_the_round_before() -> None:
    before = ["---", *TABLE]
    changes = sum(now != was for one, other in zip(before, TABLE, strict=False) for was, now in zip(one, other, strict=True))
    story = example(10)
    # The end of the tenth round belongs to the eleventh.
    assert len([now for now, _ in story.actions(Launch) if now < 3600]) == changes


def test_a_job_that_is_always_served_where_it_is_starts_once() -> None:
    story = played(jobs(0, 0, seconds=5000), Fixed([[1.0], [1.0]]), "v100:2")
    assert len(story.actions(Launch)) == 2
    assert story.actions(Preempt) == []
    assert story.finishes == {"a": 5000.0, "b": 5000.0}


def test_equal_shares_of_one_gpu_take_turns_of_a_round() -> None:
    story = played(jobs(0, 0, seconds=720), Fixed([[0.5], [0.5]]))
    assert [(run.job, run.began) for run in story.runs] == [("a", 0.0), ("b", 360.0), ("a", 720.0), ("b", 1080.0)]
    assert story.finishes == {"a": 1080.0, "b": 1440.0}


def test_a_gang_that_is_first_is_not_passed_for_ever_by_small_jobs() -> None:
    trace = [*jobs(0, 0), a_job("gang", gpus=2, seconds=ENDLESS, model="m")]
    story = played(trace, Fixed([[0.5], [0.5], [0.5]]), "v100:2", until=36_000.0)
    assert np.array(fractions(story, 36_000.0)) == pytest.approx(np.full((3, 1), 0.5), abs=0.02)


def test_gpus_without_a_share_are_filled() -> None:
    story = played(jobs(0, seconds=1000), Fixed([[0.0]]))
    assert story.finishes == {"a": 1000.0}


def test_gpus_without_a_share_stay_idle_where_the_allocation_wants_it() -> None:
    story = played(jobs(0, 0, seconds=1000), Fixed([[1.0], [0.0]], Leftover.IDLE), "v100:2", until=5000.0)
    assert story.finishes == {"a": 1000.0}
    assert story.runs_of("b") == []


def test_types_are_served_in_an_order_drawn_for_each_round_where_shares_do_not_tell_them_apart() -> None:
    orders = {shuffled((0, 1, 2), 36, i) for i in range(100)}
    assert len(orders) == 6
    assert shuffled((0, 1, 2), 36, 5) == shuffled((0, 1, 2), 36, 5)
    assert [shuffled((0, 1, 2), 1, i) for i in range(20)] != [shuffled((0, 1, 2), 2, i) for i in range(20)]


@pytest.mark.slow
def test_blind_shares_are_received_on_average() -> None:
    shares = Fixed([[0.5, 0.5], [0.5, 0.5]], awareness=Awareness.BLIND)
    story = played(jobs(0, 0), shares, "v100:1,p100:1", until=360_000.0)
    assert np.array(fractions(story, 360_000.0)) == pytest.approx(np.full((2, 2), 0.5), abs=0.05)


# When shares are computed, and who has to wait for them

HUNDRED = replace(GAVEL, round=100.0)


def test_shares_are_computed_at_the_end_of_a_round_in_which_jobs_came_or_went() -> None:
    shares = Fixed([[0.5]] * 3)
    played([*jobs(0, 150), a_job("short", at=250.0, seconds=10, model="m")], shares, "v100:3", settings=HUNDRED, until=900.0)
    assert shares.asked == [0.0, 200.0, 300.0, 400.0]


def test_shares_are_not_computed_again_before_the_least_time_but_for_the_first_ones() -> None:
    shares = Fixed([[1.0]] * 3)
    played(jobs(0, 150, 250), shares, "v100:4", settings=replace(HUNDRED, recompute=1000.0), until=5000.0)
    assert shares.asked == [0.0, 200.0, 1200.0]


@pytest.mark.parametrize(("backfill", "start"), [(False, 1100.0), (True, 150.0)])
def test_newcomers_wait_for_shares_or_fill_idle_gpus(backfill: bool, start: float) -> None:
    settings = replace(HUNDRED, recompute=1000.0, backfill=backfill)
    story = played(jobs(0, 50, 150), Fixed([[1.0]] * 3), "v100:4", settings=settings, until=5000.0)
    assert story.starts["c"] == start


def test_gpus_freed_inside_a_round_go_to_who_is_furthest_behind_only_with_backfill() -> None:
    trace = [a_job("short", seconds=30, model="m"), *jobs(0, seconds=100)]
    waits = played(trace, Fixed([[0.9], [0.1]]), settings=HUNDRED)
    fills = played(trace, Fixed([[0.9], [0.1]]), settings=replace(HUNDRED, backfill=True))
    assert (waits.starts["a"], fills.starts["a"]) == (100.0, 30.0)


# Solvers that give up


def test_without_new_shares_the_old_ones_stay_and_the_journal_says_so() -> None:
    story = played(jobs(0, 0, 150, seconds=1000), Fixed([[0.5]] * 3, fails=(3,)), settings=HUNDRED)
    said = remarks(story)
    assert said[0][0] == 200.0
    assert said[0][1].startswith("no new shares: the program is too hard")
    turns = [run.job for run in story.runs if run.began < 800]
    assert turns == ["a", "b"] * 4
    assert set(story.finishes) == {"a", "b", "c"}


def test_a_solver_that_gave_up_is_asked_again_a_round_later() -> None:
    shares = Fixed([[0.5]] * 3, fails=(3,))
    played(jobs(0, 0, 150), shares, settings=HUNDRED, until=550.0)
    assert shares.asked == [0.0, 200.0, 300.0, 400.0, 500.0]


@pytest.mark.parametrize("backfill", [False, True])
def test_a_solver_that_gives_up_at_first_keeps_nobody_from_running_in_the_end(backfill: bool) -> None:
    trace = [*jobs(0, 0, seconds=200), a_job("c", at=150.0, seconds=200, model="m")]
    story = played(trace, Fixed([[0.5]] * 3, fails=(2,)), "v100:2", settings=replace(HUNDRED, backfill=backfill))
    assert remarks(story)[0][0] == 0.0
    assert set(story.finishes) == {"a", "b", "c"}


def test_a_deadline_that_cannot_be_met_is_remarked() -> None:
    hasty = a_job("hasty", seconds=1000, model="m")
    hasty = replace(hasty, job=replace(hasty.job, deadline=500.0))
    story = simulate([hasty], "min-cost", "v100:1", settings=Settings(), believed=a_table(m=1.0))
    now, text = remarks(story)[0]
    assert now == 0.0
    assert "cannot meet their deadlines on any GPU type" in text
    assert story.finishes == {"hasty": 1000.0}


# Two jobs on the same GPUs: 0.7 of their speed each


@pytest.mark.parametrize("gang", [1, 2])
@pytest.mark.parametrize("shorter", ["a", "b"])
def test_of_a_pair_one_finishes_and_the_other_goes_on_alone_at_its_own_speed(shorter: str, gang: int) -> None:
    trace = [a_job(name, gpus=gang, seconds=7.0 if name == shorter else 14.0, model="m") for name in "ab"]
    story = shared(trace, "max-min+packed", f"v100:{gang}", Settings(round=100.0))
    longer = "b" if shorter == "a" else "a"
    assert story.finishes[shorter] == pytest.approx(10.0)  # 7 / 0.7
    assert story.finishes[longer] == pytest.approx(17.0)  # 7 done by then, 7 left at full speed
    assert len(story.actions(Launch)) == 2
    assert story.preemptions == 0


def test_gpus_that_two_jobs_share_are_used_once() -> None:
    trace = [a_job("a", seconds=7.0, model="m"), a_job("b", seconds=14.0, model="m")]
    story = shared(trace, "max-min+packed", "v100:2@1", Settings(round=100.0))
    assert story.finishes == {"a": 7.0, "b": 14.0}  # there is a GPU for each
    assert utilisation(History.of(story.entries, story.cluster), 0.0, 14.0) == pytest.approx(21 / 28)
    story = shared(trace, "max-min+packed", "v100:1", Settings(round=100.0))
    assert utilisation(History.of(story.entries, story.cluster), 0.0, 17.0) == pytest.approx(1.0)
    assert utilisation(History.of(story.entries, story.cluster), 0.0, 34.0) == pytest.approx(0.5)


def test_what_was_not_measured_together_does_not_share() -> None:
    trace = [a_job("a", seconds=100.0, model="m"), a_job("b", seconds=100.0, model="m")]
    story = simulate(trace, "max-min+packed", "v100:1", settings=Settings(round=100.0), believed=a_table(m=1.0))
    assert story.finishes == {"a": 100.0, "b": 200.0}


@pytest.mark.parametrize("patience", [0.0, 1.0])
@pytest.mark.parametrize("cluster", ["v100:2", "v100:2@1"])
def test_a_gang_makes_way_for_a_pair_and_nothing_is_held_twice(cluster: str, patience: float) -> None:
    trace = [
        a_job("a", gpus=2, seconds=40.0, model="m"),
        a_job("b", at=5.0, seconds=40.0, model="m"),
        a_job("c", at=5.0, seconds=25.0, model="m"),
    ]
    story = shared(trace, "max-min+packed", cluster, Settings(round=10.0, patience=patience))
    assert set(story.finishes) == {"a", "b", "c"}


# Finish-time fairness where somebody has waited for very long


def test_a_job_that_has_waited_for_very_long_gets_nearly_everything() -> None:
    workload = a_workload([[1.0], [1.0]], [1], steps=[1.0, 50.0], submitted=[-1e5, 0.0])
    got, _ = FinishTime().allocate(workload, FinishTime().start())
    assert got.objective == pytest.approx(50_000.5, abs=0.01)
    assert got.share[:, 0] == pytest.approx([1.0, 0.0], abs=1e-3)


# Jobs whose rounds divide


def test_a_share_is_met_by_a_mix_and_time_is_received_in_proportion() -> None:
    """A task takes 1 s on a V100 and 3 s on a K80; a round of 4 takes 3 s on one of each, and 2 s on the gang of two V100s.

    6 s of that are two thirds of 6 s.
    """
    rates = (("v100", 1.0), ("k80", 1 / 3))
    thirds = Throughputs.of("thirds", "v100", [Alone(M, name, 1, Locality.PACKED, rate) for name, rate in rates])
    trace = [
        a_job("v", seconds=ENDLESS, gpu_types=("v100",)), a_job("k", seconds=ENDLESS, gpu_types=("k80",)),
        a_job("a", gpus=4, seconds=ENDLESS, batches=4),
    ]  # fmt: skip
    policy = Policy("fixed", Fixed(((1.0, 0.0), (0.0, 1.0), (0.5, 0.0))))
    how = replace(GAVEL, round=6.0)
    story = simulate(trace, policy, "v100:2,k80:2", settings=how, believed=thirds, until=6.0, placement="consolidate")
    assert [Topology(story.cluster).mix(run.gpus) for run in story.runs_of("a")] == [(1, 1)]
    workload = story.scheduler.state.snapshot(6.0).workload
    assert workload.part is not None
    assert workload.part[2] == pytest.approx(2 / 3)
    accounts = story.scheduler._driver._memory  # type: ignore[attr-defined]
    assert (accounts.received - accounts.begun)[2].tolist() == pytest.approx([4.0, 0.0])
