"""Laws of placement, against brute force over tiny clusters."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st
from tests.strategies import clusters

from poise.scheduler.model.cluster import Cluster, Holding, Slots, gpu_count
from poise.scheduler.model.speed import Locality
from poise.scheduler.model.topology import PlacementView, Topology
from poise.scheduler.placement.free_gpus import FreeGpus, lowest_node, lowest_slots
from poise.scheduler.placement.strategies import PLACEMENTS, best_fit, consolidate, count, spread
from poise.scheduler.policies.placement_draft import PlacementDraft

localities = st.sampled_from(Locality)
by_nodes = st.sampled_from(("consolidate", "best-fit", "spread"))
tight = st.sampled_from(("consolidate", "pack", "best-fit"))


@st.composite
def free_gpus(draw: st.DrawFn) -> FreeGpus:
    """A tiny cluster in which somebody holds a random part, and some nodes are lost."""
    free = FreeGpus(Topology(draw(clusters(most_types=2))))
    for node, full in enumerate(free.topology.full):
        taken = draw(st.integers(0, full) | st.sampled_from((0, full)))
        free.take((Slots(node, taken),) if taken else ())
        if draw(st.integers(0, 7)) == 0:
            free.lose(node)
    return free


def subsets(free: FreeGpus, gpu_type: int, gang: int) -> list[tuple[int, ...]]:
    """Every set of nodes of a type whose free GPUs are enough for the gang, the smallest sets first."""
    mine = [node for node, kind in enumerate(free.topology.type_of) if kind == gpu_type and free.masks[node]]
    return [
        each
        for size in range(1, len(mine) + 1)
        for each in combinations(mine, size)
        if sum(free.masks[node].bit_count() for node in each) >= gang
    ]


def racks_of(free: FreeGpus, nodes: tuple[int, ...]) -> int:
    return len({free.topology.rack_of[node] for node in nodes})


def allows(free: FreeGpus, gpu_type: int, gang: int, asked: Locality, nodes: tuple[int, ...]) -> bool:
    """The nodes are as close together as asked, by the definition of `Locality`."""
    match asked:
        case Locality.CLUSTER:
            return True
        case Locality.RACK:
            return racks_of(free, nodes) == 1
        case Locality.PACKED:
            return racks_of(free, nodes) == 1 and len(nodes) <= free.topology.fewest_nodes(gpu_type, gang)


@st.composite
def questions(draw: st.DrawFn) -> tuple[FreeGpus, int, int]:
    free = draw(free_gpus())
    gpu_type = draw(st.integers(0, len(free.topology.types) - 1))
    return free, gpu_type, draw(st.integers(1, free.topology.totals[gpu_type] + 1))


def nodes_of(holding: Holding) -> tuple[int, ...]:
    return tuple(slots.node for slots in holding)


@given(questions(), st.sampled_from(sorted(PLACEMENTS)), localities)
def test_an_answer_is_free_gpus_of_the_right_type_and_number(
    question: tuple[FreeGpus, int, int], name: str, asked: Locality
) -> None:
    free, gpu_type, gang = question
    holding = PLACEMENTS[name](free, gpu_type, gang, asked)
    if holding is None:
        return
    assert gpu_count(holding) == gang
    assert list(holding) == sorted(holding)
    assert len(set(nodes_of(holding))) == len(holding)
    for node, mask in holding:
        assert free.alive[node]
        assert mask > 0
        assert free.masks[node] & mask == mask
        assert free.topology.type_of[node] == gpu_type


@given(questions(), localities)
def test_count_fits_whenever_there_are_enough_gpus_wherever_they_are(
    question: tuple[FreeGpus, int, int], asked: Locality
) -> None:
    free, gpu_type, gang = question
    assert (count(free, gpu_type, gang, asked) is None) == (free.idle[gpu_type] < gang)


@given(questions())
def test_count_takes_the_first_free_gpus(question: tuple[FreeGpus, int, int]) -> None:
    free, gpu_type, gang = question
    mine = [
        (node, slot)
        for node, mask in enumerate(free.masks)
        for slot in range(mask.bit_length())
        if mask >> slot & 1 and free.topology.type_of[node] == gpu_type
    ]
    holding = count(free, gpu_type, gang, Locality.CLUSTER)
    got = [(node, slot) for node, mask in holding or () for slot in range(mask.bit_length()) if mask >> slot & 1]
    assert got == (mine[:gang] if len(mine) >= gang else [])


@given(questions(), by_nodes, localities)
def test_a_claim_is_refused_exactly_when_no_set_of_nodes_meets_the_locality(
    question: tuple[FreeGpus, int, int], name: str, asked: Locality
) -> None:
    free, gpu_type, gang = question
    possible = any(allows(free, gpu_type, gang, asked, nodes) for nodes in subsets(free, gpu_type, gang))
    holding = PLACEMENTS[name](free, gpu_type, gang, asked)
    assert (holding is not None) == possible
    if holding is not None:
        assert allows(free, gpu_type, gang, asked, nodes_of(holding))
        assert free.topology.locality(holding) <= asked


@given(questions(), localities)
def test_consolidate_takes_the_fewest_nodes_and_one_rack_where_that_costs_none(
    question: tuple[FreeGpus, int, int], asked: Locality
) -> None:
    free, gpu_type, gang = question
    allowed = [nodes for nodes in subsets(free, gpu_type, gang) if allows(free, gpu_type, gang, asked, nodes)]
    holding = consolidate(free, gpu_type, gang, asked)
    if holding is None:
        return
    fewest = min(map(len, allowed))
    assert len(holding) == fewest
    if any(racks_of(free, nodes) == 1 for nodes in allowed if len(nodes) == fewest):
        assert racks_of(free, nodes_of(holding)) == 1


@given(questions(), localities)
def test_spread_sends_a_gang_that_some_node_holds_to_the_emptiest_node(
    question: tuple[FreeGpus, int, int], asked: Locality
) -> None:
    free, gpu_type, gang = question
    sizes = [(mask.bit_count(), -node) for node, mask in enumerate(free.masks) if free.topology.type_of[node] == gpu_type]
    holding = spread(free, gpu_type, gang, asked)
    if max(sizes)[0] >= gang:
        assert holding is not None
        assert nodes_of(holding) == (-max(sizes)[1],)
    else:
        assert holding == consolidate(free, gpu_type, gang, asked)


@given(questions(), tight, localities)
def test_a_gang_that_some_node_holds_goes_to_the_tightest_such_node(
    question: tuple[FreeGpus, int, int], name: str, asked: Locality
) -> None:
    free, gpu_type, gang = question
    sizes = [
        (mask.bit_count(), node)
        for node, mask in enumerate(free.masks)
        if free.topology.type_of[node] == gpu_type and mask.bit_count() >= gang
    ]
    if sizes:
        holding = PLACEMENTS[name](free, gpu_type, gang, asked)
        assert holding is not None
        assert nodes_of(holding) == (min(sizes)[1],)


@given(questions())
def test_best_fit_breaks_into_no_empty_node_that_it_could_leave_whole(question: tuple[FreeGpus, int, int]) -> None:
    """Of the whole nodes all but those that the gang fills stay whole, unless the broken ones are not enough."""
    free, gpu_type, gang = question
    holding = best_fit(free, gpu_type, gang, Locality.CLUSTER)
    size = free.topology.largest_node(gpu_type)
    if holding is None or len(holding) == 1:
        return
    whole = sum(1 for node, mask in holding if mask.bit_count() == size)
    empty = free.levels[gpu_type][size].bit_count()
    assert whole >= min(gang // size, empty)


@given(questions(), localities)
def test_a_sketch_finds_a_place_exactly_where_consolidate_does(question: tuple[FreeGpus, int, int], asked: Locality) -> None:
    free, gpu_type, gang = question
    sketch = PlacementDraft(PlacementView(free.topology, free.masks, free.alive, {}, {}))
    site = sketch.at(gpu_type, gang, asked)
    assert (site is None) == (consolidate(free, gpu_type, gang, asked) is None)
    if site is not None:
        assert sum(part.gpus for part in site) == gang
        assert all(part.gpus <= free.masks[part.node].bit_count() for part in site)
        assert sketch.locality(site) <= asked


@st.composite
def changes(draw: st.DrawFn) -> tuple[Cluster, list[tuple[str, int]]]:
    kinds = st.sampled_from(("take", "give", "lose", "restore"))
    return draw(clusters()), draw(st.lists(st.tuples(kinds, st.integers(0, 10**6)), max_size=30))


@given(changes())
def test_free_gpus_is_what_a_plain_list_of_slots_says(case: tuple[Cluster, list[tuple[str, int]]]) -> None:
    cluster, steps = case
    topology = Topology(cluster)
    free = FreeGpus(topology)
    holdings: list[Holding] = []
    alive = [True] * len(cluster.nodes)
    model = list(topology.full)
    for kind, number in steps:
        node = number % len(model)
        match kind:
            case "take" if model[node]:
                part = lowest_slots(model[node], 1 + number % model[node].bit_count())
                free.take((Slots(node, part),))
                model[node] &= ~part
                holdings.append((Slots(node, part),))
            case "give" if holdings:
                [(where, part)] = holding = holdings.pop(number % len(holdings))
                free.give(holding)
                model[where] |= part if alive[where] else 0
            case "lose":
                free.lose(node)
                alive[node], model[node] = False, 0
            case "restore" if not alive[node]:
                holdings = [each for each in holdings if each[0].node != node]
                free.restore(node)
                alive[node], model[node] = True, topology.full[node]
            case _:
                free.restore(node) if alive[node] else free.lose(node)
        assert (free.masks, free.alive) == (model, alive)
        check_counts(free, model, alive)


def check_counts(free: FreeGpus, model: list[int], alive: list[bool]) -> None:
    topology = free.topology
    for kind in range(len(topology.types)):
        mine = [node for node, each in enumerate(topology.type_of) if each == kind]
        assert free.idle[kind] == sum(model[node].bit_count() for node in mine)
        for level, nodes in enumerate(free.levels[kind]):
            assert nodes == sum(1 << node for node in mine if alive[node] and model[node].bit_count() == level)


@given(st.integers(1, 2**12 - 1), st.data())
def test_lowest_slots_are_the_lowest(mask: int, data: st.DataObject) -> None:
    wanted = data.draw(st.integers(0, mask.bit_count()))
    bits = [bit for bit in range(12) if mask >> bit & 1]
    assert lowest_slots(mask, wanted) == sum(1 << bit for bit in bits[:wanted])
    assert lowest_node(mask) == bits[0]
