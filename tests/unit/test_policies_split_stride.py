"""One quantum of split stride, and homes by ticket load: small instances by hand."""

from collections.abc import Iterable
from itertools import combinations
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poise.scheduler.model.cluster import NodeGpus, Site
from poise.scheduler.policies.gandiva_fair.load_balance import Homes, Lodger, retyped, type_for
from poise.scheduler.policies.gandiva_fair.split_stride import (
    Contender,
    Quantum,
    StrideGang,
    aggregate_lags,
    best_gangs,
    decide,
    imbalance,
)


def at(*nodes: int, gpus: int) -> Site:
    return tuple(NodeGpus(node, gpus // len(nodes)) for node in nodes)


def wants(
    row: int, home: Site, *, lag: float = 0.0, tenant: int = 0, runs: bool = False, may_move: bool = False
) -> Contender:
    gang = sum(part.gpus for part in home)
    return Contender(row, tenant, gang, float(gang), lag, home, -inf if runs else 0.0, may_move)


def a_quantum(sizes: dict[int, int], **budgets: float) -> Quantum:
    """Tenants a, b, ... are 0, 1, ...; their budgets are their shares."""
    shares = {ord(name) - ord("a"): gpus for name, gpus in budgets.items()}
    return Quantum(sizes, sizes, shares=shares, budgets=shares)


def test_the_furthest_behind_runs_and_one_that_does_not_fit_is_passed_over() -> None:
    quantum = a_quantum({0: 4}, a=4)
    quantum.settle([wants(0, at(0, gpus=2)), wants(1, at(0, gpus=4), lag=0.5), wants(2, at(0, gpus=2), lag=1.0)])
    assert set(quantum.chosen) == {0, 2}


def test_of_equals_those_that_run_go_on() -> None:
    quantum = a_quantum({0: 4}, a=4)
    quantum.settle([wants(0, at(0, gpus=4)), wants(1, at(0, gpus=4), runs=True)])
    assert set(quantum.chosen) == {1}


def test_a_large_gang_needs_to_be_further_behind_than_the_mean_of_the_nodes_it_spans() -> None:
    small = [wants(node, at(node, gpus=4), lag=lag, tenant=1) for node, lag in ((0, 0.9), (1, -0.3))]
    assert aggregate_lags(small) == {0: pytest.approx(0.9), 1: pytest.approx(-0.3)}
    for lag, runs in ((0.4, {2}), (0.2, {0, 1})):
        quantum = a_quantum({0: 4, 1: 4}, a=8, b=8)
        quantum.settle([*small, wants(2, at(0, 1, gpus=8), lag=lag)])
        assert set(quantum.chosen) == runs


def test_a_tenant_without_budget_waits_though_its_jobs_are_further_behind() -> None:
    quantum = a_quantum({0: 4}, a=0, b=4)
    quantum.settle([wants(0, at(0, gpus=4), lag=3.0), wants(1, at(0, gpus=4), tenant=1)])
    assert set(quantum.chosen) == {1}


def test_gpus_that_no_budget_covers_are_used_all_the_same() -> None:
    quantum = a_quantum({0: 4}, a=0)
    quantum.settle([wants(0, at(0, gpus=4))])
    assert set(quantum.chosen) == {0}


def test_a_tenant_with_budget_left_has_a_job_moved_to_where_others_are_over_theirs() -> None:
    jobs = [wants(0, at(0, gpus=4), lag=1.0), wants(1, at(0, gpus=4), may_move=True), wants(2, at(1, gpus=4), tenant=1)]
    budgets = {0: 8.0, 1: 0.0}
    quantum = decide({0: 4, 1: 4}, jobs, shares={0: 4.0, 1: 4.0}, budgets=budgets)
    assert quantum.chosen == {0: at(0, gpus=4), 1: at(1, gpus=4)}


def test_small_jobs_make_way_for_a_larger_gang_where_there_is_room_for_them() -> None:
    quantum = a_quantum({0: 4, 1: 4}, a=8)
    quantum.settle([wants(0, at(0, gpus=1)), wants(1, at(1, gpus=3)), wants(2, at(0, gpus=4))])
    assert quantum.chosen == {0: at(1, gpus=1), 1: at(1, gpus=3), 2: at(0, gpus=4)}


def test_a_larger_gang_takes_the_turn_of_a_smaller_one_that_would_leave_gpus_idle() -> None:
    jobs = [wants(0, at(0, gpus=3), lag=0.5), wants(1, at(0, gpus=4))]
    assert set(decide({0: 4}, jobs, shares={0: 4.0}, budgets={0: 4.0}).chosen) == {1}


def test_a_chosen_gang_that_finds_no_place_is_passed_over() -> None:
    """Three gangs of 3 are 9 of 10 GPUs, but only two nodes of 5 hold one each; 3 + 2 and 3 + 2 do fill them."""
    jobs = [wants(row, at(row % 2, gpus=3)) for row in range(3)] + [wants(row, at(0, gpus=2), lag=-1.0) for row in (3, 4)]
    quantum = decide({0: 5, 1: 5}, jobs, shares={0: 10.0}, budgets={0: 10.0})
    assert quantum.idle == 0
    assert {3, 4} < set(quantum.chosen)


def test_running_jobs_stay_where_they_are_if_all_find_a_place_then() -> None:
    jobs = [wants(0, at(1, gpus=2), runs=True, may_move=True), wants(1, at(1, gpus=4), tenant=1), wants(2, at(0, gpus=2))]
    quantum = decide({0: 4, 1: 4, 2: 4}, jobs, shares={0: 4.0, 1: 4.0}, budgets={0: 4.0, 1: 4.0})
    assert quantum.chosen[0] == at(1, gpus=2)
    assert set(quantum.chosen) == {0, 1, 2}


def value(rows: Iterable[int], gangs: dict[int, list[StrideGang]], gpus: int, budgets: dict[int, float]) -> float:
    """What a choice is worth, as `best_gangs` counts it; shares are 3 GPUs each."""
    chosen = {tenant: [each for each in own if each.row in rows] for tenant, own in gangs.items()}
    left = {tenant: budgets[tenant] - sum(each.gpus for each in own) for tenant, own in chosen.items()}
    idle = gpus - sum(each.gpus for own in chosen.values() for each in own)
    gain = sum(each.gain for own in chosen.values() for each in own)
    return gain - imbalance(left, dict.fromkeys(gangs, 3.0), idle) if idle >= 0 else -inf


@given(st.data())
def test_the_chosen_gangs_are_the_best_of_all_sets(data: st.DataObject) -> None:
    owners = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=7))
    gangs: dict[int, list[StrideGang]] = {tenant: [] for tenant in sorted(set(owners))}
    for row, tenant in enumerate(owners):
        gangs[tenant].append(StrideGang(row, data.draw(st.integers(1, 6)), data.draw(st.integers(-20, 20)) / 2))
    budgets = {tenant: data.draw(st.integers(-8, 24)) / 2 for tenant in gangs}
    found = best_gangs(gangs, 9, shares=dict.fromkeys(gangs, 3.0), budgets=budgets)
    best = max(
        value(rows, gangs, 9, budgets) for size in range(len(owners) + 1) for rows in combinations(range(len(owners)), size)
    )
    assert value(found, gangs, 9, budgets) == pytest.approx(best)


def homes(*sizes: int, racks: tuple[int, ...] = ()) -> Homes:
    return Homes(sizes, [0] * len(sizes), racks or [0] * len(sizes))


def test_a_job_goes_to_the_node_of_lowest_ticket_load_that_holds_it() -> None:
    found = homes(8, 8, 2)
    found.settle(Lodger(0, 4, 3.0), at(0, gpus=4))
    found.settle(Lodger(1, 8, 2.0), at(1, gpus=8))
    assert found.load.tolist() == [3 / 8, 2 / 8, 0]
    assert found.lowest(4, 0) == at(1, gpus=4)
    assert found.lowest(2, 0) == at(2, gpus=2)


def test_a_gang_that_spans_nodes_takes_the_fewest_in_one_rack() -> None:
    found = homes(4, 4, 4, 4, racks=(0, 1, 0, 1))
    found.settle(Lodger(0, 4, 1.0), at(0, gpus=4))
    assert found.lowest(8, 0) == (NodeGpus(1, 4), NodeGpus(3, 4))
    assert found.lowest(12, 0) == (NodeGpus(1, 4), NodeGpus(2, 4), NodeGpus(3, 4))
    assert found.lowest(17, 0) is None


def test_a_move_has_to_gain_more_than_it_costs() -> None:
    found = homes(1, 1)
    for row in range(3):
        found.settle(Lodger(row, 1, 0.5), at(0, gpus=1))
    one = Lodger(0, 1, 0.5)  # a third of a GPU here, a whole one there
    assert found.better(one, cost=199, rest=300) == at(1, gpus=1)
    assert found.better(one, cost=201, rest=300) is None


def test_a_tenant_lives_on_the_types_that_it_is_entitled_to() -> None:
    assert type_for(1, (0, 1), (3.0, 12.0), (3.0, 11.0), (6.0, 1.0)) == 1
    assert type_for(1, (0, 1), (0.4, 4.0), (0.0, 5.0), (6.0, 1.0)) == 0, "a part of a GPU is not to be forgotten"
    assert type_for(1, (0, 1), (0.0, 4.0), (0.0, 9.0), (6.0, 1.0)) == 1, "it has sold the others"
    assert type_for(1, (), (1.0,), (0.0,), (1.0,)) is None


def test_a_waiting_job_changes_type_where_its_tenant_asks_for_too_much() -> None:
    assert retyped(1, 0, (0, 1), (0.0, 4.0), (1.0, 9.0)) == 1
    assert retyped(1, 0, (0, 1), (2.0, 2.0), (3.0, 3.0)) is None
    assert retyped(1, 1, (0, 1), (0.4, 4.0), (0.0, 6.0)) == 0
    assert retyped(1, 0, (0, 1), (0.4, 4.0), (1.0, 5.0)) is None, "nor does it go back"
