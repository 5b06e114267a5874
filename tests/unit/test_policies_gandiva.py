"""Gandiva (docs/algorithms/gandiva.md): places by affinity, turns under overload, pairs by trial, migration, growth."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders import Story, a_job, nodes, simulate

from poise.lab.traces.schema import TraceJob
from poise.scheduler.core.scheduler import Scheduler
from poise.scheduler.model.action import JournalEntry, Launch, Preempt, PreemptionCause, WakeAt
from poise.scheduler.model.cluster import Cluster, NodeGpus, gpu_count
from poise.scheduler.model.speed import Locality
from poise.scheduler.model.topology import PlacementView, Topology
from poise.scheduler.policies.gandiva.reaction import Affinities
from poise.scheduler.policies.placement_draft import PlacementDraft
from poise.scheduler.throughput.measurements import Alone, JobClass, Throughputs, Together

# Where a gang goes


def affinities(cluster: Cluster, free: Sequence[int], of: dict[int, int]) -> Affinities:
    """So many GPUs free on each node."""
    topology = Topology(cluster)
    masks = [(1 << gpus) - 1 for gpus in free]
    alive = [True] * len(masks)
    floor = PlacementView(topology, masks, alive, {}, {})
    return Affinities(PlacementDraft(floor), floor, of)


def test_a_gang_goes_to_the_least_loaded_node_that_serves_its_size() -> None:
    assert affinities(nodes(4, 4, 4, 4), [1, 3, 2, 4], {0: 1, 1: 2, 2: 1}).place(1, (0,)) == ((2, 1),)


def test_a_gang_whose_size_no_node_serves_opens_an_empty_one() -> None:
    found = affinities(nodes(4, 4, 4), [3, 4, 4], {0: 1})
    assert found.place(2, (0,)) == ((1, 2),)
    assert found.of == {0: 1, 1: 2}
    assert found.place(2, (0,)) == ((1, 2),)


def test_a_node_that_is_empty_again_serves_whoever_comes() -> None:
    assert affinities(nodes(4), [4], {0: 1}).place(4, (0,)) == ((0, 4),)


def test_a_gang_without_a_node_of_its_own_goes_to_any_node_with_room_and_else_to_the_fewest() -> None:
    found = affinities(nodes(4, 4, 4), [3, 2, 1], {0: 1, 1: 1, 2: 1})
    assert found.place(2, (0,)) == ((1, 2),)
    assert found.place(4, (0,)) == ((0, 3), (2, 1))
    assert found.place(1, (0,)) is None


def test_types_are_asked_in_the_order_of_their_speed() -> None:
    cluster = Cluster((*nodes(4, gpu_type="k80").nodes, *nodes(4, 4, gpu_type="v100").nodes[1:]))
    assert affinities(cluster, [4, 4], {}).place(2, (1, 0)) == ((1, 2),)
    assert affinities(cluster, [4, 1], {0: 1, 1: 2}).place(2, (1, 0)) == ((0, 2),)


def test_under_overload_a_gang_is_at_home_on_the_least_loaded_node_that_serves_its_size() -> None:
    found = affinities(nodes(4, 4, 4), [0, 0, 0], {0: 2, 1: 2, 2: 1})
    assert found.host(2, (0,), {0: 2}) == 1
    assert found.host(2, (0,), {0: 2, 1: 4}) == 0
    assert found.host(4, (0,), {0: 2, 1: 4}) == 2
    assert found.host(8, (0,), {}) is None


def test_a_gang_that_no_node_holds_is_at_home_on_whole_nodes() -> None:
    found = affinities(nodes(4, 4, 4), [0, 0, 0], {})
    assert found.hosts(6, (0,), {0: 4}) == (1, 2)
    assert found.parts((1, 2), 6) == (NodeGpus(1, 4), NodeGpus(2, 2))
    assert found.hosts(13, (0,), {}) is None


# Turns


def turns(story: Story, job: str) -> list[tuple[float, float]]:
    return [(run.began, run.ended) for run in story.runs_of(job)]


def test_jobs_of_an_overloaded_node_take_turns_of_a_quantum() -> None:
    story = simulate([a_job(name, seconds=120) for name in "ab"], "gandiva", "gpu:1@1")
    assert turns(story, "a") == [(0.0, 60.0), (120.0, 180.0)]
    assert turns(story, "b") == [(60.0, 120.0), (180.0, 240.0)]


def test_turns_are_shared_out_evenly_between_more_jobs_than_fit() -> None:
    story = simulate([a_job(name, seconds=600) for name in "abc"], "gandiva", "gpu:2@2", until=360.0)
    assert [sum(min(run.ended, 360.0) - run.began for run in story.runs_of(name)) for name in "abc"] == [240.0] * 3


def test_a_large_gang_has_its_turn_beside_small_ones() -> None:
    jobs = [*(a_job(f"s{n}", seconds=900) for n in range(4)), a_job("wide", at=1.0, gpus=4, seconds=120)]
    story = simulate(jobs, "gandiva", "gpu:4")
    assert turns(story, "wide") == [(60.0, 120.0), (180.0, 240.0)]


def test_a_gang_over_nodes_takes_turns_with_all_that_is_at_home_there() -> None:
    jobs = [*(a_job(f"s{n}", seconds=900) for n in range(8)), a_job("wide", at=1.0, gpus=8, seconds=120)]
    story = simulate(jobs, "gandiva", "gpu:8")
    assert turns(story, "wide") == [(60.0, 120.0), (180.0, 240.0)]
    assert all(story.finishes[f"s{n}"] == 900.0 + 120.0 for n in range(8))


def test_a_job_that_waits_for_a_turn_goes_where_gpus_come_free() -> None:
    jobs = [a_job("a", seconds=1000), a_job("b", seconds=30), a_job("c", at=1.0, seconds=40)]
    story = simulate(jobs, "gandiva", "gpu:2@1")
    assert turns(story, "c") == [(30.0, 70.0)]
    assert story.preemptions == 0


def wakes(story: Story) -> int:
    return len(story.actions(WakeAt))


def test_nobody_is_woken_while_nobody_waits_and_nothing_can_change() -> None:
    story = simulate([a_job("a", gpus=4, seconds=9000), a_job("b", gpus=3, seconds=9000)], "gandiva", "gpu:8")
    assert wakes(story) == 0


# Pairs

MEASURED = {"calm": 10.0, "busy": 10.0, "rude": 10.0}
BESIDE = {
    ("calm", "busy"): (9.0, 8.0),
    ("calm", "calm"): (9.0, 9.0),
    ("rude", "busy"): (4.0, 4.0),
    ("busy", "busy"): (5.0, 5.0),
}
"""Steps per second beside each other, of 10 when alone."""


def table(gpus: int = 1) -> Throughputs:
    alone = [
        Alone(JobClass(model), "v100", count, Locality.PACKED, rate)
        for model, rate in MEASURED.items()
        for count in (1, gpus)
    ]
    pairs = [Together(JobClass(a), JobClass(b), "v100", gpus, rates) for (a, b), rates in BESIDE.items()]
    return Throughputs.of("test", "v100", list(dict.fromkeys(alone)), pairs)


class Company:
    """Who shares GPUs, at every instant."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, set[frozenset[str]], bool]] = []

    def __call__(self, scheduler: Scheduler, entry: JournalEntry) -> None:
        state = scheduler.state
        ids, partner = state.columns.ids, state.ledger.partner
        demand = sum(state.columns.gang[row] for row in state.active)
        pairs = {frozenset((ids[row], ids[other])) for row, other in partner.items()}
        self.seen.append((entry.now, pairs, demand <= sum(state.live_gpus())))

    def spans(self, *jobs: str) -> list[float]:
        """Moments at which these share."""
        return [now for now, pairs, _ in self.seen if frozenset(jobs) in pairs]


def shared(jobs: list[TraceJob], cluster: str, policy: str = "gandiva") -> tuple[Story, Company]:
    company = Company()
    return simulate(jobs, policy, cluster, believed=table(), watch=company), company


def test_two_jobs_that_gain_by_it_share_gpus_under_overload() -> None:
    story, company = shared([a_job("a", seconds=3000, model="calm"), a_job("b", seconds=3000, model="busy")], "v100:1")
    assert company.spans("a", "b")
    assert max(story.finishes.values()) < 5000.0  # 6000 s one after the other


def test_a_pair_that_loses_is_parted_within_a_period_and_never_tried_again() -> None:
    story, company = shared([a_job("a", seconds=3000, model="rude"), a_job("b", seconds=3000, model="busy")], "v100:1")
    together = company.spans("a", "b")
    assert together
    assert max(together) - min(together) < 300.0
    assert set(story.finishes) == {"a", "b"}


def test_a_pair_that_neither_gains_nor_loses_is_parted() -> None:
    _, company = shared([a_job(name, seconds=3000, model="busy") for name in "ab"], "v100:1")
    together = company.spans("a", "b")
    assert max(together) - min(together) < 300.0


def test_jobs_that_do_not_fit_together_are_not_tried() -> None:
    _, company = shared([a_job("a", seconds=3000, model="rude"), a_job("b", seconds=3000, model="calm")], "v100:1")
    assert not any(pairs for _, pairs, _ in company.seen)


def test_a_combination_is_tried_by_one_pair_before_others() -> None:
    jobs = [a_job(f"r{n}", seconds=3000, model="rude") for n in range(2)]
    jobs += [a_job(f"b{n}", at=1.0, seconds=3000, model="busy") for n in range(2)]
    _, company = shared(jobs, "v100:2@2")
    assert max(len(pairs) for _, pairs, _ in company.seen) == 1


def test_who_shares_gets_gpus_of_its_own_as_soon_as_there_are_some() -> None:
    jobs = [
        a_job("short", seconds=650, model="rude"),
        a_job("a", seconds=9000, model="calm"),
        a_job("b", seconds=9000, model="calm"),
    ]
    _, company = shared(jobs, "v100:2@2")
    assert any(pairs for _, pairs, _ in company.seen)
    assert all(fits <= (not pairs) for _, pairs, fits in company.seen)


models = st.sampled_from(("calm", "busy", "rude"))


@given(
    st.lists(
        st.tuples(models, st.sampled_from((0.0, 5.0, 200.0, 900.0)), st.sampled_from((50.0, 400.0, 2000.0))), max_size=7
    )
)
def test_nobody_shares_while_there_are_gpus_for_all(drawn: list[tuple[str, float, float]]) -> None:
    jobs = [a_job(f"j{n}", at=at, seconds=seconds, model=model) for n, (model, at, seconds) in enumerate(drawn)]
    _, company = shared(jobs, "v100:3@2")
    assert all(not pairs for _, pairs, fits in company.seen if fits)


# Migration


def moves(story: Story) -> list[tuple[float, str]]:
    return [(now, action.job) for now, action in story.actions(Preempt) if action.why is PreemptionCause.MOVED]


def test_a_gang_that_had_to_be_spread_is_drawn_together_when_there_is_room() -> None:
    jobs = [a_job("a", gpus=3, seconds=2000), a_job("b", gpus=3, seconds=400), a_job("wide", at=1.0, gpus=2, seconds=2000)]
    story = simulate(jobs, "gandiva", "gpu:8")
    assert [len(run.gpus) for run in story.runs_of("wide")] == [2, 1]
    assert moves(story) == [(600.0, "wide")]


def test_a_node_that_is_all_but_empty_is_emptied() -> None:
    jobs = [a_job("a", gpus=1, seconds=5000), a_job("fill", gpus=3, seconds=500), a_job("b", gpus=1, seconds=5000)]
    jobs += [a_job("pair", gpus=2, seconds=5000)]
    story = simulate(jobs, "gandiva", nodes(4, 4, 4))
    assert not moves(story) or all(now >= 300.0 for now, _ in moves(story))
    last = [run.gpus[0].node for name in ("a", "b", "pair") for run in story.runs_of(name)[-1:]]
    assert len(set(last)) < 3


def test_a_job_that_has_just_come_is_not_moved() -> None:
    jobs = [a_job("a", gpus=2, seconds=5000), a_job("b", at=299.0, gpus=1, seconds=5000)]
    story = simulate(jobs, "gandiva", nodes(4, 4))
    assert [now for now, _ in moves(story)] == [600.0]
    assert len({run.gpus[0].node for name in "ab" for run in story.runs_of(name)[-1:]}) == 1


# Growth


def elastic(job: TraceJob, most: int) -> TraceJob:
    return replace(job, job=replace(job.job, max_gpus=most))


def sizes(story: Story, job: str) -> list[tuple[float, int]]:
    return [(run.began, gpu_count(run.gpus)) for run in story.runs_of(job)]


def test_an_elastic_job_grows_onto_idle_gpus_of_its_node() -> None:
    story = simulate([elastic(a_job("a", gpus=2, seconds=3000), 8)], "gandiva", "gpu:8@4")
    assert sizes(story, "a") == [(0.0, 2), (300.0, 4)]
    assert story.finishes["a"] == 300.0 + (3000.0 - 300.0) / 2


def test_a_shrink_restores_the_gang_before_an_arrival_waits() -> None:
    jobs = [elastic(a_job("a", gpus=2, seconds=3000), 8), a_job("late", at=500.0, gpus=2, seconds=100)]
    story = simulate(jobs, "gandiva", "gpu:4")
    assert story.starts["late"] == 500.0
    assert sizes(story, "a") == [(0.0, 2), (300.0, 4), (500.0, 2), (900.0, 4)]


def test_lent_gpus_of_several_nodes_are_called_in_for_a_large_gang() -> None:
    jobs = [elastic(a_job(name, gpus=1, seconds=9000), 4) for name in "ab"]
    jobs = [*jobs, a_job("fill", gpus=3, seconds=10), a_job("late", at=700.0, gpus=5, seconds=100)]
    story = simulate(jobs, "gandiva", "gpu:8")
    assert story.starts["late"] == 700.0


def test_nobody_grows_while_anybody_waits() -> None:
    jobs = [
        elastic(a_job("a", gpus=1, seconds=900), 4),
        a_job("b", gpus=3, seconds=900),
        a_job("c", at=1.0, gpus=4, seconds=900),
    ]
    story = simulate(jobs, "gandiva", "gpu:4", until=1000.0)
    assert {count for _, count in sizes(story, "a")} == {1}


def test_a_job_does_not_grow_where_that_would_not_make_it_faster() -> None:
    flat = [Alone(JobClass("flat"), "v100", gpus, Locality.PACKED, 5.0) for gpus in range(1, 5)]
    jobs = [elastic(a_job("a", gpus=1, seconds=3000, model="flat"), 4)]
    story = simulate(jobs, "gandiva", "v100:4", believed=Throughputs.of("test", "v100", flat))
    assert sizes(story, "a") == [(0.0, 1)]


@pytest.mark.parametrize("overhead", [0.0, 5.0])
def test_every_launch_of_a_turn_comes_with_the_stops_it_needs(overhead: float) -> None:
    jobs = [a_job(f"j{n}", at=7.0 * n, gpus=1 + n % 4, seconds=200.0) for n in range(12)]
    story = simulate(jobs, "gandiva", "gpu:8")
    assert len(story.finishes) == 12
    assert all(gpu_count(action.gpus) == 1 + int(action.job[1:]) % 4 for _, action in story.actions(Launch))
