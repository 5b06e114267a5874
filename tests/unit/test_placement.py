"""Placement by hand: what each strategy takes, and what it leaves for others."""

import pytest
from tests.builders import a_cluster, nodes

from poise.scheduler.model.cluster import Cluster, Holding, Slots
from poise.scheduler.model.errors import InvariantError, UnknownNameError
from poise.scheduler.model.speed import Locality
from poise.scheduler.model.topology import Topology
from poise.scheduler.placement.free_gpus import FreeGpus
from poise.scheduler.placement.strategies import (
    PLACEMENTS,
    Placement,
    best_fit,
    consolidate,
    count,
    placement_named,
    spread,
)

ANYWHERE = Locality.CLUSTER


def free_of(cluster: Cluster, *free: int) -> FreeGpus:
    """So many GPUs of each node are free, the lowest slots."""
    gpus = FreeGpus(Topology(cluster))
    for node, left in enumerate(free):
        taken = gpus.topology.full[node] & ~((1 << left) - 1)
        gpus.take((Slots(node, taken),) if taken else ())
    return gpus


def counts(holding: Holding | None) -> dict[int, int]:
    """GPUs taken by node."""
    return {} if holding is None else {slots.node: slots.mask.bit_count() for slots in holding}


@pytest.mark.parametrize(
    ("free", "gang", "want"),
    [
        ((4, 4, 4), 2, {0: 2}),
        ((1, 4, 4), 2, {0: 1, 1: 1}),
        ((1, 0, 3), 4, {0: 1, 2: 3}),
        ((4, 4, 4), 12, {0: 4, 1: 4, 2: 4}),
        ((1, 2, 3), 7, {}),
    ],
)
def test_count_takes_the_first_free_gpus_by_node(free: tuple[int, ...], gang: int, want: dict[int, int]) -> None:
    assert counts(count(free_of(nodes(4, 4, 4), *free), 0, gang, ANYWHERE)) == want


@pytest.mark.parametrize(
    ("free", "gang", "want"),
    [
        ((4, 3, 2), 2, {2: 2}),
        ((4, 3, 2), 3, {1: 3}),
        ((4, 3, 2), 5, {0: 4, 2: 1}),
        ((4, 3, 2), 7, {0: 4, 1: 3}),
        ((4, 3, 2), 8, {0: 4, 1: 3, 2: 1}),
        ((4, 3, 2), 9, {0: 4, 1: 3, 2: 2}),
        ((4, 3, 2), 10, {}),
        ((3, 3, 3), 4, {0: 3, 1: 1}),
    ],
)
def test_consolidate_takes_the_fewest_and_then_the_tightest_nodes(
    free: tuple[int, ...], gang: int, want: dict[int, int]
) -> None:
    assert counts(consolidate(free_of(nodes(4, 4, 4), *free), 0, gang, ANYWHERE)) == want


@pytest.mark.parametrize(
    ("free", "gang", "want"),
    [
        ((4, 3, 2, 1), 2, {2: 2}),
        ((3, 3, 2, 1), 4, {3: 1, 2: 2, 0: 1}),
        ((4, 4, 2, 1), 5, {0: 4, 3: 1}),
        ((4, 4, 2, 1), 6, {0: 4, 2: 2}),
        ((4, 4, 2, 1), 7, {0: 4, 1: 3}),
        ((4, 2, 2, 1), 7, {0: 4, 3: 1, 1: 2}),
        ((4, 2, 2, 1), 10, {}),
    ],
)
def test_best_fit_fills_whole_nodes_and_then_the_fullest(free: tuple[int, ...], gang: int, want: dict[int, int]) -> None:
    assert counts(best_fit(free_of(nodes(4, 4, 4, 4), *free), 0, gang, ANYWHERE)) == want


def test_consolidate_and_best_fit_differ_in_what_they_leave() -> None:
    free = free_of(nodes(4, 4, 4, 4), 3, 2, 1, 1)
    assert counts(consolidate(free, 0, 4, ANYWHERE)) == {0: 3, 2: 1}
    assert counts(best_fit(free, 0, 4, ANYWHERE)) == {1: 2, 2: 1, 3: 1}


@pytest.mark.parametrize(
    ("free", "gang", "want"),
    [
        ((2, 3, 4), 1, {2: 1}),
        ((2, 3, 4), 4, {2: 4}),
        ((2, 3, 3), 2, {1: 2}),
        ((2, 3, 2), 4, {0: 1, 1: 3}),
        ((2, 3, 2), 7, {0: 2, 1: 3, 2: 2}),
        ((2, 3, 2), 8, {}),
    ],
)
def test_spread_takes_the_node_with_the_most_free_gpus(free: tuple[int, ...], gang: int, want: dict[int, int]) -> None:
    assert counts(spread(free_of(nodes(4, 4, 4), *free), 0, gang, ANYWHERE)) == want


def test_pack_is_another_name_of_consolidate() -> None:
    assert placement_named("pack") is consolidate


def test_pack_and_spread_place_four_small_jobs_differently() -> None:
    """FfDL's example: four jobs of one GPU on two nodes of four, and then one of four."""
    left = {}
    for name in ("pack", "spread"):
        free = FreeGpus(Topology(nodes(4, 4)))
        for _ in range(4):
            holding = PLACEMENTS[name](free, 0, 1, ANYWHERE)
            assert holding is not None
            free.take(holding)
        left[name] = [mask.bit_count() for mask in free.masks]
    assert left == {"pack": [0, 4], "spread": [2, 2]}


@pytest.mark.parametrize("place", [consolidate, best_fit, spread])
def test_a_packed_claim_waits_for_its_fewest_nodes(place: Placement) -> None:
    free = free_of(nodes(4, 4), 2, 2)
    assert place(free, 0, 4, Locality.PACKED) is None
    assert counts(place(free, 0, 4, Locality.RACK)) == {0: 2, 1: 2}
    assert counts(place(free, 0, 2, Locality.PACKED)) == {0: 2}


def test_a_rack_claim_stays_in_one_rack_at_the_price_of_nodes() -> None:
    cluster = nodes(4, 4, 4, 4, 4, racks=(0, 1, 1, 0, 1))
    free = free_of(cluster, 4, 2, 2, 1, 2)
    assert counts(consolidate(free, 0, 6, ANYWHERE)) == {0: 4, 1: 2}
    assert counts(consolidate(free, 0, 6, Locality.RACK)) == {1: 2, 2: 2, 4: 2}
    assert consolidate(free, 0, 7, Locality.RACK) is None
    assert consolidate(free, 0, 6, Locality.PACKED) is None


def test_consolidate_prefers_one_rack_among_equal_numbers_of_nodes() -> None:
    free = free_of(nodes(4, 4, 4, 4, racks=(0, 1, 1, 0)), 4, 3, 3, 0)
    assert counts(consolidate(free, 0, 6, ANYWHERE)) == {1: 3, 2: 3}


def test_consolidate_does_not_leave_a_rack_for_a_tighter_node_of_another() -> None:
    """A 4 and a 3 would fit tightly, but stand in two racks; rack 0 has more free GPUs, but needs three nodes."""
    free = free_of(nodes(4, 4, 4, 4, 4, racks=(0, 0, 0, 1, 1)), 3, 3, 3, 4, 4)
    assert counts(consolidate(free, 0, 7, ANYWHERE)) == {3: 4, 4: 3}


def test_across_racks_consolidate_still_takes_the_fewest_nodes() -> None:
    free = free_of(nodes(4, 4, 4, racks=(0, 1, 2)), 4, 1, 4)
    assert counts(consolidate(free, 0, 8, ANYWHERE)) == {0: 4, 2: 4}


@pytest.mark.parametrize("name", sorted(PLACEMENTS))
def test_a_gang_gets_gpus_of_the_type_asked_for_only(name: str) -> None:
    free = FreeGpus(Topology(a_cluster("v100:4,k80:4")))
    place = placement_named(name)
    assert counts(place(free, 1, 3, ANYWHERE)) == {1: 3}
    assert place(free, 1, 5, ANYWHERE) is None


@pytest.mark.parametrize("name", sorted(PLACEMENTS))
def test_lost_nodes_are_not_offered(name: str) -> None:
    free = FreeGpus(Topology(nodes(4, 4)))
    free.lose(0)
    place = placement_named(name)
    assert counts(place(free, 0, 4, ANYWHERE)) == {1: 4}
    assert place(free, 0, 5, ANYWHERE) is None
    free.restore(0)
    assert counts(place(free, 0, 8, ANYWHERE)) == {0: 4, 1: 4}


def test_slots_are_taken_from_the_lowest() -> None:
    free = FreeGpus(Topology(nodes(4)))
    free.take((Slots(0, 0b0010),))
    assert count(free, 0, 2, ANYWHERE) == (Slots(0, 0b0101),)


def test_gpus_that_are_held_cannot_be_taken() -> None:
    free = FreeGpus(Topology(nodes(4)))
    free.take((Slots(0, 0b0011),))
    with pytest.raises(InvariantError, match="node 0: slots 110 taken while only 1100 are free"):
        free.take((Slots(0, 0b0110),))


def test_gpus_that_are_free_cannot_be_given_back() -> None:
    free = FreeGpus(Topology(nodes(4)))
    with pytest.raises(InvariantError, match="node 0: slots 1 given back"):
        free.give((Slots(0, 0b0001),))


def test_gpus_of_a_lost_node_stay_lost_when_given_back() -> None:
    free = FreeGpus(Topology(nodes(4, 4)))
    holding = (Slots(0, 0b0011), Slots(1, 0b0001))
    free.take(holding)
    free.lose(0)
    assert not free.are_free(holding)
    free.give(holding)
    assert free.masks == [0, 0b1111]
    assert free.idle == [4]
    free.restore(0)
    assert free.masks == [0b1111, 0b1111]


def test_losing_or_restoring_twice_is_the_same_as_once() -> None:
    free = FreeGpus(Topology(nodes(4, 4)))
    free.restore(0)
    free.lose(0)
    free.lose(0)
    assert free.idle == [4]
    free.restore(0)
    free.restore(0)
    assert free.idle == [8]


def test_an_unknown_placement_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown placement 'bestfit'; did you mean best-fit\?"):
        placement_named("bestfit")
