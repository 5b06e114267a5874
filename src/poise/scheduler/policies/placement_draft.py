"""Where the jobs of a plan could go, in the making: GPUs are counted by node, and which of them is left to the core.

For policies that care where their jobs are (auctions, load balance, affinity). Bins of nodes by free GPUs make finding the
tightest place a matter of node sizes, not of the number of nodes.
"""

from collections.abc import Iterable, Iterator
from heapq import heappop, heappush

from poise.scheduler.model.cluster import Holding, NodeGpus, Site, site_of
from poise.scheduler.model.speed import Locality
from poise.scheduler.model.topology import PlacementView, Topology


class PlacementDraft:
    """Free GPUs of live nodes, as if some jobs had gone and others had come.

    free[n]   free GPUs of node n;  idle[t]: free GPUs of type t
    """

    def __init__(self, floor: PlacementView) -> None:
        self.topology: Topology = floor.topology
        self._alive = floor.alive
        self.free = floor.free()
        self.idle = [0] * len(self.topology.types)
        largest = [self.topology.largest_node(gpu_type) for gpu_type in range(len(self.topology.types))]
        self._bins: list[list[list[int]]] = [[[] for _ in range(size + 1)] for size in largest]
        for node, free in enumerate(self.free):
            gpu_type = self.topology.type_of[node]
            self.idle[gpu_type] += free
            self._bins[gpu_type][free].append(node)  # ascending, and so a heap

    def copy(self) -> "PlacementDraft":
        """A copy that changes on its own."""
        other = object.__new__(PlacementDraft)
        other.topology, other._alive = self.topology, self._alive
        other.free, other.idle = self.free.copy(), self.idle.copy()
        other._bins = [[nodes.copy() for nodes in bins] for bins in self._bins]
        return other

    def take(self, site: Site) -> None:
        """Count these GPUs as taken."""
        for node, gpus in site:
            self._change(node, -gpus)

    def give(self, site: Site) -> None:
        """Count these GPUs as free again; those of lost nodes stay lost."""
        for node, gpus in site:
            if self._alive[node]:
                self._change(node, gpus)

    def release(self, holdings: Iterable[Holding]) -> None:
        """Count the GPUs of these jobs as free."""
        for holding in holdings:
            self.give(site_of(holding))

    def _change(self, node: int, gpus: int) -> None:
        """Bins are heaps that may name a node that is no longer there; it is recognised when it comes up."""
        gpu_type = self.topology.type_of[node]
        self.free[node] += gpus
        self.idle[gpu_type] += gpus
        heappush(self._bins[gpu_type][self.free[node]], node)

    def tightest(self, gpu_type: int, gpus: int) -> Site | None:
        """The node with the fewest free GPUs that has enough; else the fewest nodes, of one rack if as few do.

        None if there are not enough GPUs of the type.
        """
        if self.idle[gpu_type] < gpus:
            return None
        for size in range(gpus, len(self._bins[gpu_type])):
            node = self._first(gpu_type, size)
            if node is not None:
                return (NodeGpus(node, gpus),)
        nodes = self._free_nodes(gpu_type)
        anywhere = self._fewest(nodes, gpus)
        in_racks = self._in_racks(nodes, gpus) if len(self.topology.racks) > 1 else ()
        return next((site for site in in_racks if len(site) <= len(anywhere)), anywhere)

    def at(self, gpu_type: int, gpus: int, locality: Locality) -> Site | None:
        """The tightest place at this locality or closer; None exactly if there is none."""
        site = self.tightest(gpu_type, gpus)
        if site is None or self.locality(site) <= locality:
            return site
        if locality is not Locality.RACK:
            return None
        # The fewest nodes inside one rack; the first of the racks that do with as few.
        return min(self._in_racks(self._free_nodes(gpu_type), gpus), key=len, default=None)

    def roomiest(self, gpu_type: int, gpus: int) -> Site | None:
        """The node with the most free GPUs, if it has enough."""
        for size in range(len(self._bins[gpu_type]) - 1, gpus - 1, -1):
            node = self._first(gpu_type, size)
            if node is not None:
                return (NodeGpus(node, gpus),)
        return None

    def _first(self, gpu_type: int, size: int) -> int | None:
        """The first node with exactly `size` free GPUs."""
        nodes = self._bins[gpu_type][size]
        while nodes and self.free[nodes[0]] != size:
            heappop(nodes)
        return nodes[0] if nodes else None

    def _free_nodes(self, gpu_type: int) -> list[int]:
        return [node for node, kind in enumerate(self.topology.type_of) if kind == gpu_type and self.free[node]]

    def _in_racks(self, nodes: list[int], gpus: int) -> Iterator[Site]:
        """The fewest of these nodes inside each rack that has enough free GPUs on them."""
        for rack in self.topology.racks:
            within = [node for node in nodes if rack >> node & 1]
            if sum(self.free[node] for node in within) >= gpus:
                yield self._fewest(within, gpus)

    def _fewest(self, nodes: list[int], gpus: int) -> Site:
        """The emptiest of these nodes, and for the rest the tightest that holds it."""
        parts: list[NodeGpus] = []
        ordered = sorted(nodes, key=lambda node: (-self.free[node], node))
        for place, node in enumerate(ordered):
            if self.free[node] >= gpus:
                rest = min(ordered[place:], key=lambda each: (self.free[each] < gpus, self.free[each], each))
                parts.append(NodeGpus(rest, gpus))
                break
            parts.append(NodeGpus(node, self.free[node]))
            gpus -= self.free[node]
        return tuple(sorted(parts))

    def locality(self, site: Site) -> Locality:
        """How far apart the GPUs of a gang are here."""
        if len(site) == 1:
            return Locality.PACKED
        if len({self.topology.rack_of[node] for node, _ in site}) > 1:
            return Locality.CLUSTER
        fewest = self.topology.fewest_nodes(self.topology.type_of[site[0].node], sum(part.gpus for part in site))
        return Locality.PACKED if len(site) <= fewest else Locality.RACK
