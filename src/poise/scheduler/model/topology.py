"""What never changes about a cluster, laid out for fast questions: types, racks, and how close together GPUs are."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from poise.scheduler.model.cluster import Cluster, Holding, gpu_count
from poise.scheduler.model.micro_batches import Mix
from poise.scheduler.model.speed import Locality


class Topology:
    """Nodes and types by index. A set of nodes is a bit mask of node indices."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.types = cluster.gpu_types
        type_index = {name: index for index, name in enumerate(self.types)}
        rack_index = {name: index for index, name in enumerate(dict.fromkeys(node.rack for node in cluster.nodes))}
        self.type_of = [type_index[node.gpu_type] for node in cluster.nodes]
        self.rack_of = [rack_index[node.rack] for node in cluster.nodes]
        self.full = [(1 << node.gpus) - 1 for node in cluster.nodes]
        self.racks = [0] * len(rack_index)
        for node, rack in enumerate(self.rack_of):
            self.racks[rack] |= 1 << node
        self.totals = [cluster.gpus_of(name) for name in self.types]
        self._reach = [self._cumulated(self._sizes(gpu_type)) for gpu_type in range(len(self.types))]

    def _sizes(self, gpu_type: int) -> list[int]:
        return [node.gpus for node, kind in zip(self.cluster.nodes, self.type_of, strict=True) if kind == gpu_type]

    @staticmethod
    def _cumulated(sizes: list[int]) -> list[int]:
        return list(accumulate(sorted(sizes, reverse=True)))

    def largest_node(self, gpu_type: int) -> int:
        """GPUs on the largest node of a type."""
        return self._reach[gpu_type][0]

    def fewest_nodes(self, gpu_type: int, gpus: int) -> int:
        """Nodes that a gang needs if the whole cluster were free."""
        return bisect_left(self._reach[gpu_type], gpus) + 1

    def locality(self, holding: Holding) -> Locality:
        """How far apart the GPUs of a gang are."""
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
        """How many GPUs of each type these are."""
        mix = [0] * len(self.types)
        for node, mask in holding:
            mix[self.type_of[node]] += mask.bit_count()
        return tuple(mix)

    def main_type(self, holding: Holding) -> int:
        """The type of most of these GPUs; the first of equals."""
        mix = self.mix(holding)
        return mix.index(max(mix))


# Where things are at one moment: which GPUs are free, and who holds which.


@dataclass(frozen=True, slots=True)
class PlacementView:
    """A view of the core's own tables: not to be changed, and true only until the plan is handed in.

    masks      free slots by node; none of a lost node
    alive      whether a node is there
    holdings   the GPUs of each running job, by row
    partner    jobs that share their GPUs, both ways
    """

    topology: Topology
    masks: Sequence[int]
    alive: Sequence[bool]
    holdings: Mapping[int, Holding]
    partner: Mapping[int, int]

    def free(self) -> list[int]:
        """How many GPUs are free on each node."""
        return [mask.bit_count() for mask in self.masks]
