"""Themis: agents' bids, who is asked, payments in whole gangs, leases, leftovers, sweeps, elastic jobs and GPU types."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders import Story, a_job, nodes, simulate

from poise.lab.traces.schema import TraceJob
from poise.scheduler.model.action import Launch, Preempt, WakeAt
from poise.scheduler.model.cluster import gpu_count
from poise.scheduler.model.job import Job
from poise.scheduler.model.plan import Policy
from poise.scheduler.model.speed import Estimate
from poise.scheduler.model.topology import PlacementView, Topology
from poise.scheduler.policies.placement_draft import PlacementDraft
from poise.scheduler.policies.themis.auction import AuctionRules, Payment, Sale, invited, kept
from poise.scheduler.policies.themis.bidders import (
    NOTHING,
    App,
    AppRegistry,
    Bid,
    Bidders,
    Erring,
    GpuOffer,
    Honest,
    Member,
    Use,
)
from poise.scheduler.policies.themis.planner import Leases, Themis
from poise.scheduler.solve.auction import clear


def an_offer(*free: int) -> GpuOffer:
    """As many free GPUs on nodes of one type."""
    topology = Topology(nodes(*free))
    return GpuOffer(0, PlacementDraft(PlacementView(topology, topology.full, [True] * len(free), {}, {})))


def a_member(row: int, rates: dict[int, float], left: float, held: int = 0) -> Member:
    """A job that does so many steps a second with so many GPUs, wherever they are."""
    counts = sorted(rates)
    others = tuple((gpus, ((rate, rate, rate),)) for gpus, rate in rates.items())
    gang, estimate = counts[0], Estimate(((rates[counts[0]],) * 3,), None, others)
    speed, kind = (rates[held], 0) if held else (0.0, -1)
    return Member(row, gang, counts, held, speed, left, rates[gang], estimate.at, kind)


def a_sweep(gangs: Sequence[int], left: float = 10.0) -> App:
    return App(0.0, 10.0, tuple(a_member(row, {gang: 1.0}, left) for row, gang in enumerate(gangs)))


# Agents


X = App(0.0, 20.0, (a_member(0, {1: 1.0, 2: 2.0, 3: 2.0, 4: 4 / 1.5}, 40.0),))
Y = App(0.0, 20.0, (a_member(1, {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}, 40.0),))


def test_agents_bid_the_tables_of_the_example_and_the_floors_leave_two_gpus_over() -> None:
    """docs/algorithms/themis.md."""
    bids = [Honest(app).bid(an_offer(2, 2)) for app in (X, Y)]
    assert bids[0].rho == pytest.approx([NOTHING, 2, 1, 1, 0.75])
    assert bids[1].rho == pytest.approx([NOTHING, 2, 1, 2 / 3, 0.5])
    cleared = clear([bid.table() for bid in bids], 4)
    grants = zip(bids, cleared.units.tolist(), cleared.share.tolist(), strict=True)
    assert [kept(bid, units, share, 0) for bid, units, share in grants] == [1, 1]


def test_the_floors_of_three_apps_leave_most_of_eight_gpus_over() -> None:
    """docs/algorithms/themis.md: won (3, 3, 2), kept one each."""
    bid = Bid(tuple(range(9)), (NOTHING, *(1.0,) * 8), tuple(Use(0, gpus) for gpus in range(1, 9)))
    assert [kept(bid, *each, 0) for each in ((3, 0.5368), (3, 0.4857), (2, 0.5921))] == [1, 1, 1]


def test_whole_gangs_are_kept_and_the_first_one_in_any_case_by_who_holds_nothing() -> None:
    bid = Honest(a_sweep([4, 4, 4])).bid(an_offer(16))
    assert (bid.units, len(bid.uses)) == ((0, 4, 8, 12), 3)
    assert [kept(bid, 12, share, 0) for share in (1.0, 0.9, 2 / 3, 0.5, 1e-6)] == [3, 2, 2, 1, 1]
    assert [kept(bid, 12, share, 4) for share in (0.5, 1e-6)] == [1, 0]
    assert kept(bid, 0, 1.0, 0) == 0


@given(st.floats(0.0, 1e5), st.floats(1.0, 1e6), st.integers(2, 12))
def test_rho_falls_with_gpus_where_speed_is_linear(elapsed: float, work: float, most: int) -> None:
    app = App(elapsed, 100.0, (a_member(0, {gpus: float(gpus) for gpus in range(1, most + 1)}, work),))
    rho = Honest(app).bid(an_offer(8, 8)).rho
    assert all(after < before for before, after in pairwise(rho))


def test_a_bid_says_how_close_together_the_offer_is() -> None:
    """Rates by locality: with 2 + 1 free a gang of 2 is packed, a second one nowhere; with 1 + 1 it is spread."""
    estimate = Estimate(((2.0, 1.0, 1.0),))
    member = Member(0, 2, (2,), 0, 0.0, 10.0, 2.0, estimate.at)
    packed, spread = (
        Honest(App(0.0, 1.0, (member,))).bid(GpuOffer(0, sketch)).rho[1]
        for sketch in (_left_of((2, 2), 0), _left_of((2, 2), 1))
    )
    assert (packed, spread) == (5.0, 10.0)


def _left_of(sizes: tuple[int, ...], taken: int) -> PlacementDraft:
    topology = Topology(nodes(*sizes))
    return PlacementDraft(PlacementView(topology, [mask >> taken for mask in topology.full], [True] * len(sizes), {}, {}))


def test_an_app_that_holds_gpus_bids_from_what_it_has() -> None:
    app = App(0.0, 10.0, (a_member(0, {1: 1.0}, 10.0, held=1), a_member(1, {1: 1.0}, 10.0)))
    bid = Honest(app).bid(an_offer(4))
    assert (bid.units, bid.rho, bid.uses) == ((0, 1), (2.0, 1.0), (Use(1, 1),))
    assert app.rho_now() == 2.0


@given(st.integers(0, 2**31), st.floats(0.0, 0.5))
def test_wrong_bids_are_off_by_no_more_than_the_error(stream: int, error: float) -> None:
    right, wrong = Honest(Y).bid(an_offer(4)), Erring(Honest(Y), error, stream).bid(an_offer(4))
    assert np.allclose(np.array(wrong.rho) / np.array(right.rho), 1.0, atol=error + 1e-12)
    assert (wrong.units, wrong.uses) == (right.units, right.uses)


# Who is asked


@pytest.mark.parametrize(("f", "bidders"), [(0.0, 10), (0.4, 6), (0.8, 2), (0.9, 1), (1.0, 1)])
def test_of_ten_apps_the_worst_off_are_asked(f: float, bidders: int) -> None:
    """docs/algorithms/themis.md."""
    assert invited(10, f) == bidders


def test_with_one_asked_the_worst_off_of_all_is_served() -> None:
    """Three jobs, one GPU, f = 1 − 1/n: the oldest short job has the worst ρ by the time the first lease ends."""
    jobs = [a_job("long", seconds=5000), a_job("short", at=1, seconds=300), a_job("new", at=550, seconds=5000)]
    story = simulate(jobs, Policy("themis", Themis(f=2 / 3)), "gpu:1")
    assert story.starts["short"] == 600
    assert story.starts["new"] > 600


# Leases


@given(st.floats(0, 1e7), st.floats(1, 1e5))
def test_leases_end_together_after_half_to_one_and_a_half_of_their_length(granted: float, length: float) -> None:
    end = float(Leases.of(length).end(0.0, np.array([granted]))[0])
    assert 0.5 * length <= end - granted + 1e-6 * (granted + 1)
    assert end - granted <= 1.5 * length + 1e-6 * (granted + 1)
    assert end / length == pytest.approx(round(end / length))


def test_without_contention_nobody_is_stopped_and_no_moment_is_waited_for() -> None:
    story = simulate([a_job(f"{n}", at=700.0 * n, seconds=3000) for n in range(5)], "themis", "gpu:8")
    assert not story.preemptions
    assert not [action for _, action in story.actions(WakeAt) if action.time < inf]


def test_jobs_are_stopped_only_when_their_leases_end() -> None:
    jobs = [a_job(f"{n}", at=10.0 * n, seconds=4000) for n in range(4)]
    story = simulate(jobs, "themis:lease=500", "gpu:2")
    moments = {now for now, _ in story.actions(Preempt)}
    assert moments
    assert all(now % 500 == 0 for now in moments)
    assert len(story.finishes) == 4


def test_what_comes_back_is_just_what_was_leased_and_goes_to_who_waits() -> None:
    """b waits for a's lease to end, and takes its GPUs; c keeps its own and never restarts."""
    jobs = [a_job("a", gpus=2, seconds=5000), a_job("c", gpus=2, seconds=1200), a_job("b", at=5, gpus=2, seconds=100)]
    story = simulate(jobs, Policy("themis", Themis(f=0.9)), "gpu:4")
    taken = next(run for run in story.runs if run.job == "b")
    gave = [run for run in story.runs if run.ended == taken.began]
    assert taken.began == 600
    assert [run.gpus for run in gave] == [taken.gpus]
    assert story.preemptions == 1


def test_who_keeps_as_many_gpus_keeps_the_same_ones() -> None:
    jobs = [a_job(f"{n}", gpus=1 + n % 3, seconds=3000 + 100 * n) for n in range(7)]
    story = simulate(jobs, "themis:lease=300", "gpu:8")
    launches = {(now, action.job): action.gpus for now, action in story.actions(Launch)}
    for run in story.runs:
        again = launches.get((run.ended, run.job))
        assert again is None or again != run.gpus


def test_an_arrival_finds_leases_that_have_long_ended_and_takes_over_at_once() -> None:
    jobs = [a_job("old", seconds=10_000), a_job("short", at=2000.5, seconds=50)]
    story = simulate(jobs, Policy("themis", Themis(f=0.0)), "gpu:1")
    assert story.starts["short"] == 2000.5


def test_payment_with_time_shortens_leases_of_who_stands_in_others_way() -> None:
    """Whoever has the one GPU takes all that it is worth from the others: a tenth of a lease is the least there is."""
    jobs = [a_job(f"{n}", seconds=2000) for n in range(3)]
    story = simulate(jobs, Policy("themis", Themis(f=0.0, payment=Payment.LEASE)), "gpu:1")
    assert next(action.time for _, action in story.actions(WakeAt)) == 60
    assert len(story.finishes) == 3


# What is left over


def _crowded(story: Story) -> None:
    busy = sum(gpu_count(run.gpus) for run in story.runs if run.began <= 1000 < run.ended)
    assert busy == sum(node.gpus for node in story.cluster.nodes)


@pytest.mark.parametrize("f", [0.0, 0.5, 0.8, 1.0])
def test_no_gpu_idles_while_a_gang_that_fits_waits(f: float) -> None:
    jobs = [a_job(f"{n}", gpus=1 + n % 2, seconds=5000) for n in range(20)]
    story = simulate(jobs, Policy("themis", Themis(f=f)), "gpu:8")
    _crowded(story)
    assert len(story.finishes) == 20


def test_leftovers_are_drawn_by_the_seed() -> None:
    jobs = [a_job(f"{n}", seconds=4000) for n in range(12)]
    runs = [simulate(jobs, f"themis:seed={seed}", "gpu:4") for seed in (0, 0, 1)]
    assert runs[0].entries == runs[1].entries
    assert runs[0].entries != runs[2].entries


# Sweeps


def _sweep(name: str, many: int, *, gpus: int = 1, seconds: float = 1000.0, at: float = 0.0) -> list[TraceJob]:
    jobs = (a_job(f"{name}{n}", at=at, gpus=gpus, seconds=seconds) for n in range(many))
    return [replace(each, job=replace(each.job, app=name)) for each in jobs]


def test_a_sweep_bids_as_one() -> None:
    """Eight jobs of one app against one job: an app each, so with two GPUs the one job is not the ninth in line."""
    jobs = [*_sweep("sweep", 8, seconds=3000), a_job("one", at=1, seconds=3000)]
    story = simulate(jobs, Policy("themis", Themis(f=0.0)), "gpu:2")
    assert story.starts["one"] <= 1200


def test_gpus_of_a_job_that_ends_stay_with_its_app_until_the_lease_does() -> None:
    """At 100 one job of the sweep ends; its sibling takes over although another app waits longer for a GPU."""
    jobs = [*_sweep("sweep", 3, seconds=100), a_job("other", seconds=1000), a_job("rival", seconds=1000)]
    story = simulate(jobs, "themis", "gpu:2")
    first = [run for run in story.runs if run.job.startswith("sweep")]
    assert len(story.finishes) == 5
    handed = [run for run in first if run.began > 0 and run.began < 600]
    assert all(any(before.ended == run.began and before.gpus == run.gpus for before in first) for run in handed)


def test_a_sibling_does_not_inherit_gpus_on_which_it_cannot_run() -> None:
    """b runs on the V100 alone: it waits for that one, though a leaves a K80 behind."""
    a, c, b = (
        a_job("a", seconds=50, gpu_types=("k80",)),
        a_job("c", seconds=500),
        a_job("b", gpu_types=("v100",), seconds=100),
    )
    story = simulate([replace(each, job=replace(each.job, app="sweep")) for each in (a, c, b)], "themis", "k80:1,v100:1")
    assert story.runs_of("b")[0].gpus[0].node == 1
    assert len(story.finishes) == 3


# Elastic jobs and GPU types


def _elastic(name: str, least: int, gang: int, most: int, seconds: float, at: float = 0.0) -> TraceJob:
    return TraceJob(Job(name, at, gang, seconds, min_gpus=least, max_gpus=most))


def test_an_elastic_job_alone_has_all_it_can_use() -> None:
    story = simulate([_elastic("e", 1, 2, 4, 1000.0)], "themis", "gpu:8")
    assert [gpu_count(run.gpus) for run in story.runs] == [4]
    assert story.finishes["e"] == 500


def test_elastic_jobs_shrink_for_a_newcomer_and_grow_when_it_is_gone() -> None:
    jobs = [_elastic("e", 1, 4, 4, 4000.0), a_job("new", at=700, gpus=2, seconds=100)]
    story = simulate(jobs, "themis", "gpu:4")
    assert len(story.finishes) == 2
    sizes = [gpu_count(run.gpus) for run in story.runs_of("e")]
    assert sizes[0] == sizes[-1] == 4
    assert min(sizes) <= 2


def test_jobs_go_to_their_fastest_type_while_there_is_room() -> None:
    story = simulate([a_job("a", seconds=1000, model="resnet50"), a_job("b", at=1, seconds=1000)], "themis", "k80:1,v100:1")
    assert {run.job: run.gpus[0].node for run in story.runs if run.began < 2} == {"a": 1, "b": 0}


# The arbiter's own view


@given(st.integers(1, 12), st.integers(0, 1000))
def test_everybody_is_there_once_and_asked_or_not(apps: int, seed: int) -> None:
    from poise.lab.bench import WorkloadDraw, draw_apps

    snapshot = draw_apps(WorkloadDraw(apps, types=1, seed=seed, gpus=8, gangs="1:1"))
    roll = AppRegistry().at(snapshot)
    crowd = Bidders(snapshot, roll, np.zeros(len(snapshot.active), dtype=bool))
    assert sorted(crowd.worst_first(np.ones(crowd.apps)).tolist()) == list(range(crowd.apps))
    sale = Sale(AuctionRules(0.5, 0.0, Payment.GPUS, 0, Honest), snapshot, roll, 0)
    sale.auction(np.zeros(len(snapshot.active), dtype=bool))
    given_out = sum(part.gpus for site in sale.sites.values() for part in site)
    assert given_out + sum(sale.draft.idle) == 8
    assert given_out == min(8, len(snapshot.active))


class _Silent:
    """An agent that wants nothing."""

    def __init__(self, app: App) -> None:
        self.app = app

    def bid(self, offer: GpuOffer) -> Bid:
        assert offer.gpus
        return Bid((0,), (self.app.rho_now(),), ())


def test_an_app_may_send_its_own_agent() -> None:
    """Whoever bids nothing has what is left over, and that is everything if nobody bids."""
    jobs = [a_job(f"{n}", seconds=1000) for n in range(6)]
    story = simulate(jobs, Policy("themis", Themis(agents=_Silent)), "gpu:2")
    assert len(story.finishes) == 6
