"""Placement strategies: which of the free GPUs a claim gets. Each returns None where the claim does not fit.

count         GPUs are only counted; nodes and racks do not matter (speeds must then be taken without locality)
consolidate   fewest nodes, then fewest racks, then the tightest nodes
pack          FfDL's name for the same: the node with the fewest free GPUs that has enough
best-fit      the tightest node; a gang that no node holds takes whole nodes and then the fullest ones, so that large
              holes stay open for others
spread        the node with the most free GPUs (FfDL); a gang that no node holds is placed as by `consolidate`

All but the first honour the locality that a claim requires. `consolidate` is exact in the number of nodes, and in racks
whenever one rack is enough; across racks it takes the racks with most free GPUs first. Ties go to the lowest index, so the
same free GPUs always give the same place.

A gang whose GPUs come in units is placed on `FreeGpus.in_units`: then all of this holds in units, and none is divided.
"""

from collections.abc import Callable

from poise.scheduler.model.cluster import Holding, Slots
from poise.scheduler.model.errors import UnknownNameError
from poise.scheduler.model.speed import Locality
from poise.scheduler.placement.free_gpus import OfferedGpus, lowest_node, lowest_slots

Placement = Callable[[OfferedGpus, int, int, Locality], Holding | None]
"""(free GPUs, index of the GPU type, gang, locality required) -> the GPUs to take, or None."""

ALL_NODES = -1
"""As a bit mask: every node."""


def count(free: OfferedGpus, gpu_type: int, gang: int, _asked: Locality) -> Holding | None:
    """The first free GPUs by node and slot."""
    if free.idle[gpu_type] < gang:
        return None
    nodes = 0
    for level in free.levels[gpu_type][1:]:
        nodes |= level
    return _fill(free, gang, nodes)


def consolidate(free: OfferedGpus, gpu_type: int, gang: int, asked: Locality) -> Holding | None:
    """Fewest nodes, then fewest racks, then the tightest nodes, then the lowest indices."""
    if free.idle[gpu_type] < gang:
        return None
    levels = free.levels[gpu_type]
    for nodes in levels[gang:]:
        if nodes:
            node = lowest_node(nodes)
            return (Slots(node, lowest_slots(free.masks[node], gang)),)
    return _over_nodes(free, gpu_type, gang, asked)


def best_fit(free: OfferedGpus, gpu_type: int, gang: int, asked: Locality) -> Holding | None:
    """The tightest node; otherwise whole nodes, then the fullest ones."""
    if asked is not Locality.CLUSTER or any(free.levels[gpu_type][gang:]):
        return consolidate(free, gpu_type, gang, asked)
    if free.idle[gpu_type] < gang:
        return None
    levels = free.levels[gpu_type]
    whole: list[Slots] = []
    size, left = len(levels) - 1, gang
    unused = levels[size]
    while left >= size and unused:
        node = lowest_node(unused)
        unused ^= 1 << node
        whole.append(Slots(node, free.masks[node]))
        left -= size
    taken = sum(1 << slots.node for slots in whole)
    return tuple(sorted([*whole, *_fullest(free, gpu_type, left, taken)]))


def _fullest(free: OfferedGpus, gpu_type: int, gang: int, taken: int) -> Holding:
    """GPUs for the rest of a gang: on one node if one holds it, else on the nodes with fewest free GPUs."""
    levels = [nodes & ~taken for nodes in free.levels[gpu_type]]
    if gang == 0:
        return ()
    for nodes in levels[gang:]:
        if nodes:
            return _fill(free, gang, nodes & -nodes)
    parts: list[Slots] = []
    for size, nodes in enumerate(levels):
        left = nodes
        while size and left and gang:
            node = lowest_node(left)
            left ^= 1 << node
            used = min(size, gang)
            parts.append(Slots(node, lowest_slots(free.masks[node], used)))
            gang -= used
    return tuple(parts)


def spread(free: OfferedGpus, gpu_type: int, gang: int, asked: Locality) -> Holding | None:
    """The node with the most free GPUs; otherwise the fewest nodes."""
    if free.idle[gpu_type] < gang:
        return None
    for nodes in reversed(free.levels[gpu_type][gang:]):
        if nodes:
            return _fill(free, gang, nodes & -nodes)
    return _over_nodes(free, gpu_type, gang, asked)


def _over_nodes(free: OfferedGpus, gpu_type: int, gang: int, asked: Locality) -> Holding | None:
    """GPUs on several nodes: as few as possible, in one rack if that takes no further node."""
    one_rack = len(free.topology.racks) == 1
    chosen = _fewest(free, gpu_type, gang, ALL_NODES) if one_rack else _over_racks(free, gpu_type, gang, asked)
    if chosen is None:
        return None
    if asked is Locality.PACKED and len(chosen) > free.topology.fewest_nodes(gpu_type, gang):
        return None
    return _fill_nodes(free, gang, chosen)


def _over_racks(free: OfferedGpus, gpu_type: int, gang: int, asked: Locality) -> list[int] | None:
    """The fewest nodes in a cluster of several racks; None if the gang does not fit as close together as required."""
    racks, levels = free.topology.racks, free.levels[gpu_type]
    within = [nodes for rack in racks if (nodes := _fewest(free, gpu_type, gang, rack)) is not None]
    best = min(within, key=len, default=None)
    if asked is not Locality.CLUSTER:
        return best
    anywhere = _fewest(free, gpu_type, gang, ALL_NODES)
    if anywhere is None or (best is not None and len(best) == len(anywhere)):
        return best
    union = 0
    free_in = {rack: sum(size * (level & rack).bit_count() for size, level in enumerate(levels)) for rack in racks}
    for rack in sorted(racks, key=lambda rack: -free_in[rack]):
        union |= rack
        nodes = _fewest(free, gpu_type, gang, union)
        if nodes is not None and len(nodes) == len(anywhere):
            return nodes
    return anywhere


def _fewest(free: OfferedGpus, gpu_type: int, gang: int, within: int) -> list[int] | None:
    """The fewest of these nodes that hold the gang: the emptiest ones, and for the rest the tightest that holds it."""
    levels = free.levels[gpu_type]
    chosen: list[int] = []
    left, taken = gang, 0
    for size in range(len(levels) - 1, 0, -1):
        nodes = levels[size] & within
        while nodes:
            if left <= size:
                tightest = next(level for each in levels[left:] if (level := each & within & ~taken))
                return [*chosen, lowest_node(tightest)]
            node = lowest_node(nodes)
            nodes ^= 1 << node
            taken |= 1 << node
            chosen.append(node)
            left -= size
    return None


def _fill(free: OfferedGpus, gang: int, nodes: int) -> Holding:
    """The first free GPUs of these nodes (a bit mask), by node and slot."""
    chosen: list[int] = []
    left = gang
    while left > 0:
        node = lowest_node(nodes)
        nodes ^= 1 << node
        chosen.append(node)
        left -= free.masks[node].bit_count()
    return _fill_nodes(free, gang, chosen)


def _fill_nodes(free: OfferedGpus, gang: int, nodes: list[int]) -> Holding:
    """Free GPUs of these nodes in the order given, as many as the gang needs."""
    parts: list[Slots] = []
    for node in nodes:
        used = min(gang, free.masks[node].bit_count())
        parts.append(Slots(node, lowest_slots(free.masks[node], used)))
        gang -= used
    return tuple(sorted(parts))


PLACEMENTS: dict[str, Placement] = {
    "count": count,
    "consolidate": consolidate,
    "pack": consolidate,
    "best-fit": best_fit,
    "spread": spread,
}


def placement_named(name: str) -> Placement:
    """The placement of this name."""
    if name not in PLACEMENTS:
        raise UnknownNameError("placement", name, PLACEMENTS)
    return PLACEMENTS[name]
