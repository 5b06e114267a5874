"""The cluster laid out for fast questions: `Topology`, which never changes, and `PlacementView`, who holds what now."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from poise.scheduler.model.cluster import Cluster, Holding, gpu_count
from poise.scheduler.model.micro_batches import Mix
from poise.scheduler.model.speed import Locality


class Topology:
    """Nodes, GPU types and racks by index. Immutable once built; it knows nothing of lost nodes.

    types     names of GPU types, in the cluster's order
    type_of   by node: index of its type
    rack_of   by node: index of its rack
    full      by node: all its slots as a bit mask
    racks     by rack: its nodes as a bit mask of node indices; every node is in exactly one
    totals    by type: number of GPUs, lost ones included
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.types = cluster.gpu_types
        type_index = {name: index for index, name in enumerate(self.types)}
        rack_index = {name: index for index, name in enumerate(dict.fromkeys(node.rack for node in cluster.nodes))}
        self.type_of = [type_index[node.gpu_type] for node in cluster.nodes]
        self.rack_of = [rack_index[node.rack] for node in cluster.nodes]
        self.full = [(1 << node.gpus) - 1 for node in cluster.nodes]
        self.racks = [0] * len(rack_index)
        for index, rack in enumerate(self.rack_of):
            self.racks[rack] |= 1 << index
        self.totals = [cluster.gpus_of(name) for name in self.types]
        # By type: GPUs of its largest node, of its two largest nodes, and so on.
        sizes = [[node.gpus for node in cluster.nodes if node.gpu_type == name] for name in self.types]
        self._reach = [list(accumulate(sorted(each, reverse=True))) for each in sizes]

    def largest_node(self, gpu_type: int) -> int:
        """GPUs of the largest node of a type."""
        return self._reach[gpu_type][0]

    def fewest_nodes(self, gpu_type: int, gpus: int) -> int:
        """Nodes that a gang needs in an empty cluster."""
        return bisect_left(self._reach[gpu_type], gpus) + 1

    def locality(self, holding: Holding) -> Locality:
        """How far apart the GPUs of a gang are. Packed means: on as few nodes as an empty cluster would allow."""
        if len(holding) == 1:
            return Locality.PACKED
        first = self.rack_of[holding[0].node]
        if any(self.rack_of[slots.node] != first for slots in holding):
            return Locality.CLUSTER
        kind = self.type_of[holding[0].node]
        if all(self.type_of[slots.node] == kind for slots in holding):
            fewest = self.fewest_nodes(kind, gpu_count(holding))
        else:
            fewest = sum(self.fewest_nodes(each, gpus) for each, gpus in enumerate(self.mix(holding)) if gpus)
        return Locality.PACKED if len(holding) <= fewest else Locality.RACK

    def mix(self, holding: Holding) -> Mix:
        """Number of GPUs of each type."""
        mix = [0] * len(self.types)
        for node, mask in holding:
            mix[self.type_of[node]] += mask.bit_count()
        return tuple(mix)

    def main_type(self, holding: Holding) -> int:
        """The type of most of these GPUs; the first of equals."""
        mix = self.mix(holding)
        return mix.index(max(mix))


@dataclass(frozen=True, slots=True)
class PlacementView:
    """Which GPUs are free, and which jobs hold which, as a view of the core's own tables.

    A planner reads it and must not change it. It is not a copy, so it is valid only until the plan is returned.

    masks      by node: free slots as a bit mask; 0 for a lost node
    alive      by node: False while it is lost
    holdings   by row: GPUs of each running job
    partner    by row: the job that shares its GPUs; symmetric, and only for jobs that share
    withheld   by node: slots that are closed, and that no run holds, as a bit mask: as if they were not there; (): none
    """

    topology: Topology
    masks: Sequence[int]
    alive: Sequence[bool]
    holdings: Mapping[int, Holding]
    partner: Mapping[int, int]
    withheld: Sequence[int] = ()

    def free(self) -> list[int]:
        """Number of free GPUs of each node."""
        return [mask.bit_count() for mask in self.masks]

    def sizes(self) -> list[int]:
        """Number of GPUs of each node that are not withheld, of lost nodes too."""
        withheld = self.withheld or [0] * len(self.topology.full)
        return [(full ^ mask).bit_count() for full, mask in zip(self.topology.full, withheld, strict=True)]
