"""Optimus (docs/algorithms/optimus.md): the published rule on parameter servers and workers, and the policy on GPUs."""

from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders import a_job, nodes, simulate

from poise.lab.traces.schema import LossCurve, TraceJob
from poise.scheduler.core.scheduler import Scheduler
from poise.scheduler.core.settings import Cadence, Settings
from poise.scheduler.model.action import Launch, Preempt, PreemptionCause
from poise.scheduler.model.cluster import Cluster, gpu_count
from poise.scheduler.model.event import Submitted
from poise.scheduler.model.topology import PlacementView, Topology
from poise.scheduler.placement.strategies import placement_named
from poise.scheduler.policies.catalogue import policy_named
from poise.scheduler.policies.optimus import FreeNodes, Granted, MarginalOffer, greedily, site_for
from poise.scheduler.policies.placement_draft import PlacementDraft
from poise.scheduler.solve.curve_fitting import SpeedCurve, Training


def a_floor(cluster: Cluster) -> PlacementView:
    """Nobody is there."""
    topology = Topology(cluster)
    return PlacementView(topology, list(topology.full), [True] * len(topology.full), {}, {})


Team = tuple[int, int]
"""Parameter servers and workers."""

WORK = {0: 1000.0, 1: 3000.0}
SPEED = {
    0: SpeedCurve(Training.SYNCHRONOUS, (0.05, 0.1, 0.4, 0.01, 0.01), batch=32.0),
    1: SpeedCurve(Training.SYNCHRONOUS, (0.02, 0.05, 0.1, 0.01, 0.01), batch=32.0),
}


def team_offers(work: dict[int, float], speed: dict[int, SpeedCurve], key: int, team: Team) -> list[MarginalOffer[Team]]:
    """One more server or one more worker; a slot each."""
    servers, workers = team
    now = work[key] / speed[key].at(servers, workers)
    larger = [(servers + 1, workers), (servers, workers + 1)]
    return [MarginalOffer(now - work[key] / speed[key].at(*after), 1, after) for after in larger]


def test_marginal_gain_comes_to_the_published_example() -> None:
    granted: Granted[Team] = greedily({0: (1, 1), 1: (1, 1)}, partial(team_offers, WORK, SPEED), capacity=10 - 4)
    assert [round(grant.gain, 2) for grant in granted.grants] == [630.0, 390.0, 390.0, 270.0, 140.0, 123.33]
    assert [(grant.to, grant.state) for grant in granted.grants] == [
        (1, (1, 2)),
        (0, (1, 2)),
        (0, (2, 2)),
        (1, (2, 2)),
        (1, (2, 3)),
        (0, (3, 2)),
    ]
    assert granted.states == {0: (3, 2), 1: (2, 3)}
    assert granted.left == 0


def test_a_job_that_is_done_gets_nothing_beyond_its_first_pair() -> None:
    granted: Granted[Team] = greedily({0: (1, 1), 1: (1, 1)}, partial(team_offers, {0: 0.0, 1: 3000.0}, SPEED), capacity=6)
    assert granted.states[0] == (1, 1)
    assert granted.states[1] != (1, 1)


def gpu_offers(seconds: list[list[float]], key: int, gpus: int) -> list[MarginalOffer[int]]:
    """One more GPU, if the job has a use for it."""
    ladder = seconds[key]
    return [MarginalOffer(ladder[gpus - 1] - ladder[gpus], 1, gpus + 1)] if gpus < len(ladder) else []


convex = st.lists(st.integers(0, 100), min_size=1, max_size=6).map(
    lambda drops: [float(sum(sorted(drops)[: len(drops) - have])) for have in range(len(drops) + 1)]
)
"""Seconds with 1, 2, ... GPUs, each GPU saving no more than the one before."""


@given(st.lists(convex, min_size=1, max_size=5), st.integers(0, 12))
def test_gains_never_rise_where_every_unit_saves_less_than_the_one_before(seconds: list[list[float]], gpus: int) -> None:
    granted: Granted[int] = greedily(dict.fromkeys(range(len(seconds)), 1), partial(gpu_offers, seconds), gpus)
    assert all(later.gain <= earlier.gain for earlier, later in pairwise(granted.grants))
    assert granted.left + len(granted.grants) == gpus


@given(st.lists(convex, min_size=1, max_size=3), st.integers(0, 6))
def test_no_other_distribution_saves_more_where_every_unit_saves_less(seconds: list[list[float]], gpus: int) -> None:
    granted: Granted[int] = greedily(dict.fromkeys(range(len(seconds)), 1), partial(gpu_offers, seconds), gpus)
    total = sum(seconds[key][count - 1] for key, count in granted.states.items())
    assert total == pytest.approx(least_total(seconds, gpus))


def least_total(seconds: list[list[float]], gpus: int) -> float:
    """By trying everything."""
    if not seconds:
        return 0.0
    first, *rest = seconds
    most = min(gpus, len(first) - 1)
    return min(first[more] + least_total(rest, gpus - more) for more in range(most + 1))


def test_a_unit_that_costs_more_than_is_left_is_passed_over() -> None:
    ladders = {0: [(8, 9.0)], 1: [(1, 0.5)]}

    def offers(key: int, rung: int) -> list[MarginalOffer[int]]:
        return [MarginalOffer(saves, cost, rung + 1) for cost, saves in ladders[key][rung : rung + 1]]

    granted: Granted[int] = greedily({0: 0, 1: 0}, offers, 4)
    assert granted.states == {0: 0, 1: 1}


def test_a_gang_goes_evenly_to_as_few_of_the_emptiest_nodes_as_hold_it() -> None:
    sketch = PlacementDraft(a_floor(nodes(8, 4, 8, 6)))
    assert site_for(sketch, 0, 3, FreeNodes.EMPTIEST) == ((0, 3),)
    assert site_for(sketch, 0, 12, FreeNodes.EMPTIEST) == ((0, 6), (2, 6))
    assert site_for(sketch, 0, 17, FreeNodes.EMPTIEST) == ((0, 6), (2, 6), (3, 5))


def test_a_gang_that_cannot_be_split_evenly_takes_the_fewest_nodes() -> None:
    assert site_for(PlacementDraft(a_floor(nodes(5, 1, 1))), 0, 7, FreeNodes.EMPTIEST) == ((0, 5), (1, 1), (2, 1))


def test_tightest_leaves_the_emptiest_nodes_alone() -> None:
    assert site_for(PlacementDraft(a_floor(nodes(8, 4, 6))), 0, 3, FreeNodes.TIGHTEST) == ((1, 3),)


def test_there_is_no_place_for_more_gpus_than_are_free() -> None:
    assert site_for(PlacementDraft(a_floor(nodes(2, 2))), 0, 5, FreeNodes.EMPTIEST) is None


def elastic(job: TraceJob, least: int, most: int) -> TraceJob:
    return replace(job, job=replace(job.job, min_gpus=least, max_gpus=most))


def test_rigid_jobs_get_their_gangs_in_order_of_arrival() -> None:
    story = simulate([a_job("a", gpus=3), a_job("b", at=1, gpus=2), a_job("c", at=2, gpus=1)], "optimus")
    assert story.starts == {"a": 0.0, "c": 2.0, "b": 10.0}
    assert story.preemptions == 0


def test_an_earlier_gang_gets_its_gpus_at_the_end_of_the_interval() -> None:
    jobs = [a_job("first", gpus=2, seconds=300), a_job("wide", at=1, gpus=4, seconds=100)]
    jobs += [a_job(f"small-{n}", at=2 + n, gpus=2, seconds=5000) for n in range(2)]
    story = simulate(jobs, "optimus")
    assert story.starts["small-0"] == 2.0
    assert story.starts["wide"] == 600.0
    assert {action.job: action.beneficiary for _, action in story.actions(Preempt)} == {"small-0": "wide", "small-1": "wide"}


def test_the_gpus_go_where_they_save_the_most_time() -> None:
    """Speed in proportion to GPUs: Q/w − Q/(w+1) is 50, 16.7, 8.3 for a and 200, 66.7, 33.3, 20 for b."""
    jobs = [elastic(a_job("a", gpus=1, seconds=100), 1, 6), elastic(a_job("b", gpus=1, seconds=400), 1, 6)]
    story = simulate(jobs, "optimus", "gpu:6@6")
    first = {action.job: gpu_count(action.gpus) for now, action in story.actions(Launch) if now == 0.0}
    assert first == {"a": 2, "b": 4}


def test_a_job_grows_onto_gpus_that_come_free_at_the_end_of_the_interval() -> None:
    jobs = [a_job("short", gpus=2, seconds=100), elastic(a_job("long", gpus=1, seconds=10_000), 1, 4)]
    story = simulate(jobs, "optimus")
    assert [(run.began, gpu_count(run.gpus)) for run in story.runs_of("long")] == [(0.0, 2), (600.0, 4)]
    assert [action.why for _, action in story.actions(Preempt)] == [PreemptionCause.RESIZED]
    assert story.finishes["long"] == pytest.approx(600 + (10_000 - 2 * 600) / 4)


def test_a_job_shrinks_at_the_end_of_the_interval_for_one_that_waits() -> None:
    jobs = [elastic(a_job("long", gpus=1, seconds=10_000), 1, 4), a_job("late", at=100, gpus=2, seconds=50)]
    story = simulate(jobs, "optimus")
    assert story.starts["late"] == 600.0
    assert [gpu_count(run.gpus) for run in story.runs_of("long")] == [4, 2, 4]


def test_nobody_is_resized_while_the_same_distribution_is_best() -> None:
    jobs = [elastic(a_job(name, gpus=1, seconds=20_000), 1, 2) for name in "abcd"]
    story = simulate(jobs, "optimus", "gpu:8@8")
    assert story.preemptions == 0


def test_nobody_is_woken_while_all_have_what_they_can_use() -> None:
    jobs = [elastic(a_job("a", gpus=1, seconds=20_000), 1, 2), a_job("b", gpus=2, seconds=90_000)]
    assert len(simulate(jobs, "optimus", "gpu:8@8").entries) == 3


def test_keep_leaves_gpus_where_they_are_unless_others_save_much_more() -> None:
    jobs = [elastic(a_job("a", gpus=1, seconds=6000), 1, 4), elastic(a_job("b", gpus=1, seconds=5000), 1, 4)]
    restless = simulate(jobs, "optimus:interval=60", "gpu:5@5")
    calm = simulate(jobs, "optimus:interval=60,keep=3", "gpu:5@5")
    assert calm.preemptions < restless.preemptions


def test_a_waiting_job_takes_its_fastest_type_with_room() -> None:
    jobs = [a_job(name, gpus=4, model="ResNet50", seconds=1000) for name in "ab"]
    story = simulate(jobs, "optimus", "k80:4,v100:4")
    assert [run.gpus[0].node for name in "ab" for run in story.runs_of(name)] == [1, 0]


def test_a_job_of_unknown_length_has_its_least_number_of_gpus() -> None:
    story = simulate([elastic(a_job("a", gpus=2, seconds=100), 1, 4)], "optimus")
    blind = Scheduler(story.cluster, policy_named("optimus"), placement_named("count"), Settings(cadence=Cadence.EVENTS))
    facts = [replace(fact, steps=inf) if isinstance(fact, Submitted) else fact for fact in story.entries[0].events]
    assert [gpu_count(action.gpus) for action in blind.handle(0.0, facts) if isinstance(action, Launch)] == [1]
    assert [gpu_count(run.gpus) for run in story.runs] == [4]


def test_a_job_whose_loss_no_longer_falls_keeps_its_least_number_of_gpus() -> None:
    flat = replace(elastic(a_job("flat", gpus=1, seconds=20_000), 1, 5), loss=LossCurve(1.0, 1.0, 0.1))
    story = simulate([flat, elastic(a_job("steep", gpus=1, seconds=20_000), 1, 5)], "optimus", "gpu:6@6", until=5000.0)
    assert [gpu_count(run.gpus) for run in story.runs_of("flat")] == [3, 1]
    assert [gpu_count(run.gpus) for run in story.runs_of("steep")] == [3, 5]
