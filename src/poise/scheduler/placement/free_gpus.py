"""Which GPUs are free, indexed so that a place is found without looking at every node.

FreeGpus      all free GPUs
FreeUnits     those that a gang can use whose GPUs come in units that no two nodes can share
OfferedGpus   either: what a placement looks at
"""

from collections.abc import Sequence
from typing import Protocol, TypeVar

from poise.scheduler.model.cluster import Holding
from poise.scheduler.model.errors import InvariantError
from poise.scheduler.model.topology import Topology

Item = TypeVar("Item", covariant=True)


class ByIndex(Protocol[Item]):
    """Anything that has an item for an index, be it computed on demand."""

    def __getitem__(self, index: int, /) -> Item:
        """The item at this index."""


class OfferedGpus(Protocol):
    """Free GPUs to choose from, by type and by node, as `FreeGpus` describes them."""

    @property
    def topology(self) -> Topology:
        """The cluster that they are of."""

    @property
    def masks(self) -> ByIndex[int]:
        """By node: free slots."""

    @property
    def idle(self) -> ByIndex[int]:
        """By type: number of free GPUs."""

    @property
    def levels(self) -> ByIndex[list[int]]:
        """By type and number of free GPUs: nodes with as many."""


class FreeGpus:
    """Free GPUs of live nodes. `idle`, `masks` and `levels` are kept consistent with each other by `_change`.

    idle[t]        number of free GPUs of type t
    masks[n]       free slots of node n as a bit mask; 0 for a lost node
    alive[n]       False while node n is lost
    levels[t][f]   live nodes of type t with exactly f free GPUs, as a bit mask of node indices
    closed         by node, for those that have any: slots that are not given out, as a bit mask; kept while it is lost
    withheld[n]    closed slots of node n that no run holds: as if they were not there; 0 for a lost node
    """

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.masks = [0] * len(topology.full)
        self.alive = [False] * len(topology.full)
        self.closed: dict[int, int] = {}
        self.withheld = [0] * len(topology.full)
        self.idle = [0] * len(topology.types)
        self.levels = [[0] * (topology.largest_node(kind) + 1) for kind in range(len(topology.types))]
        for node in range(len(topology.full)):
            self.restore(node)

    def take(self, holding: Holding) -> None:
        """Mark these GPUs as held."""
        for node, mask in holding:
            free = self.masks[node]
            if free & mask != mask:
                raise InvariantError(f"node {node}: slots {mask:b} taken while only {free:b} are free")
            self._change(node, free ^ mask)

    def give(self, holding: Holding) -> None:
        """Mark these GPUs as free again; those of lost nodes stay lost, and closed ones are withheld."""
        for node, mask in holding:
            if self.alive[node]:
                if (self.masks[node] | self.withheld[node]) & mask:
                    raise InvariantError(f"node {node}: slots {mask:b} given back while {self.masks[node]:b} are free")
                if node in self.closed:
                    self.withheld[node] |= mask & self.closed[node]
                    self._change(node, self.masks[node] | mask & ~self.closed[node])
                else:
                    self._change(node, self.masks[node] | mask)

    def in_units(self, gpu_type: int, unit: int) -> OfferedGpus:
        """The free GPUs of a type as far as they are whole units of this many GPUs on one node."""
        return self if unit == 1 else FreeUnits(self, gpu_type, unit)

    def are_free(self, holding: Holding) -> bool:
        """Whether all of these GPUs are free, on live nodes."""
        return all(self.masks[node] & mask == mask for node, mask in holding)

    def are_unheld(self, holding: Holding) -> bool:
        """Whether no run holds any of these GPUs and their nodes live, be they closed or not."""
        return all((self.masks[node] | self.withheld[node]) & mask == mask for node, mask in holding)

    def take_unheld(self, holding: Holding) -> None:
        """Mark GPUs as held by a run that has had them all along: it may go on though they are closed by now."""
        for node, mask in holding:
            if (self.masks[node] | self.withheld[node]) & mask != mask:
                raise InvariantError(f"node {node}: slots {mask:b} taken while some of them are held, or lost")
            self.withheld[node] &= ~mask
            self._change(node, self.masks[node] & ~mask)

    def is_open(self, holding: Holding) -> bool:
        """Whether these GPUs may be given out: their nodes live, and none is closed."""
        return all(self.alive[node] and not self.closed.get(node, 0) & mask for node, mask in holding)

    def restrict(self, node: int, closed: int) -> None:
        """Close these slots of a node, and open all others. Runs keep what they hold until they give it back."""
        if closed:
            self.closed[node] = closed
        else:
            self.closed.pop(node, None)
        if self.alive[node]:
            unheld = self.masks[node] | self.withheld[node]
            self.withheld[node] = unheld & closed
            self._change(node, unheld & ~closed)

    def lose(self, node: int) -> None:
        """Take the node out with all its GPUs. Losing a lost node changes nothing."""
        if self.alive[node]:
            self._change(node, 0)
            self.withheld[node] = 0
            self.levels[self.topology.type_of[node]][0] ^= 1 << node
            self.alive[node] = False

    def restore(self, node: int, but: int = 0) -> None:
        """Bring the node back with all its GPUs free, except closed ones and those of the mask `but`.

        Restoring a live node changes nothing.
        """
        if not self.alive[node]:
            self.alive[node] = True
            self.levels[self.topology.type_of[node]][0] ^= 1 << node
            unheld, closed = self.topology.full[node] & ~but, self.closed.get(node, 0)
            self.withheld[node] = unheld & closed
            self._change(node, unheld & ~closed)

    def _change(self, node: int, mask: int) -> None:
        """Set the free slots of a live node."""
        before, after = self.masks[node].bit_count(), mask.bit_count()
        gpu_type = self.topology.type_of[node]
        levels = self.levels[gpu_type]
        bit = 1 << node
        levels[before] ^= bit
        levels[after] ^= bit
        self.masks[node] = mask
        self.idle[gpu_type] += after - before


class FreeUnits:
    """The free GPUs of one type with those of each node rounded down to a multiple of `unit`: the lowest slots.

    What a placement takes of them for a gang of whole units is whole units on each node, because it takes all that a node
    offers, or else what is missing, which is whole units too. It costs a few operations on bit masks of nodes, and is valid
    as long as the free GPUs do not change.
    """

    def __init__(self, free: FreeGpus, gpu_type: int, unit: int) -> None:
        self.topology = free.topology
        self.masks = _WholeUnits(free.masks, unit)
        exact = free.levels[gpu_type]
        most = len(exact) - 1
        levels = [0] * (most - most % unit + 1)
        for gpus, nodes in enumerate(exact):
            levels[gpus - gpus % unit] |= nodes
        self.levels = {gpu_type: levels}
        self.idle = {gpu_type: sum(gpus * nodes.bit_count() for gpus, nodes in enumerate(levels) if gpus)}


class _WholeUnits:
    """Free slots by node, as far as they are whole units."""

    def __init__(self, masks: Sequence[int], unit: int) -> None:
        self._masks, self._unit = masks, unit

    def __getitem__(self, node: int) -> int:
        mask = self._masks[node]
        gpus = mask.bit_count()
        return lowest_slots(mask, gpus - gpus % self._unit)


def lowest_slots(mask: int, count: int) -> int:
    """The `count` lowest set bits of a mask that has at least as many."""
    surplus = mask.bit_count() - count
    if surplus <= count:
        for _ in range(surplus):
            mask ^= 1 << (mask.bit_length() - 1)
        return mask
    taken = 0
    for _ in range(count):
        low = mask & -mask
        taken |= low
        mask ^= low
    return taken


def lowest_node(nodes: int) -> int:
    """The lowest index in a bit mask of nodes."""
    return (nodes & -nodes).bit_length() - 1
