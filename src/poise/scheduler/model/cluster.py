"""Clusters: racks of nodes with GPUs, how sets of GPUs are written, and the `v100:12,p100:12@8` notation.

A GPU is named by its node's index and its slot on that node. A set of GPUs of one node is a bit mask of slots, so taking,
releasing and comparing are integer operations whatever the size of the gang.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from poise.scheduler.model.errors import ClusterError
from poise.scheduler.model.units import counted

GPUS_PER_NODE = 4
MOST_GPUS = 1_000_000
LONGEST_SHOWN = 100
"""Characters of a specification that an error message repeats."""
_PART = re.compile(r"(?P<type>[A-Za-z][\w.-]*):(?P<count>[0-9]+)(?:@(?P<per_node>[0-9]+))?")


class Slots(NamedTuple):
    """Some GPUs of one node: bit s of `mask` is the GPU in slot s."""

    node: int
    mask: int


Holding = tuple[Slots, ...]
"""The GPUs of one gang, by ascending node."""


class NodeGpus(NamedTuple):
    """A number of GPUs of one node, whichever they are."""

    node: int
    gpus: int


Site = tuple[NodeGpus, ...]
"""How many GPUs on which nodes, by ascending node."""


def site_of(holding: Holding) -> Site:
    """The nodes of a holding, with the number of GPUs on each."""
    if len(holding) == 1:  # most gangs are on one node
        node, mask = holding[0]
        return (NodeGpus(node, mask.bit_count()),)
    return tuple(NodeGpus(slots.node, slots.mask.bit_count()) for slots in holding)


def bits(mask: int) -> Iterator[int]:
    """The set bits of a mask, each as a mask, lowest first."""
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit


def merged(parts: Iterable[tuple[int, int]]) -> Holding:
    """The union of these (node, mask) parts, by ascending node."""
    masks: dict[int, int] = {}
    for node, mask in parts:
        masks[node] = masks.get(node, 0) | mask
    return tuple(Slots(node, mask) for node, mask in sorted(masks.items()))


def gpu_count(holding: Holding) -> int:
    """Number of GPUs in a holding."""
    if len(holding) == 1:  # most gangs are on one node
        return holding[0].mask.bit_count()
    return sum(slots.mask.bit_count() for slots in holding)


def is_whole(holding: Holding, unit: int) -> bool:
    """Say whether the GPUs of each node are a multiple of `unit`, so that no unit is divided over nodes."""
    return unit == 1 or not any(slots.mask.bit_count() % unit for slots in holding)


@dataclass(frozen=True, slots=True)
class Node:
    """One machine with GPUs of one type."""

    name: str
    gpu_type: str
    gpus: int
    rack: str = "rack-0"


@dataclass(frozen=True, repr=False)
class Cluster:
    """Nodes in a fixed order; GPU types in order of first appearance. Only a live service may have none yet (`populated`).

    speeds   speed of a type relative to the reference type, for types that no throughput table knows
    prices   per GPU-hour
    """

    nodes: tuple[Node, ...]
    speeds: dict[str, float] = field(default_factory=dict)
    prices: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.nodes, list | tuple) or not all(isinstance(node, Node) for node in self.nodes):
            raise ClusterError(f"nodes: expected Nodes, got {self.nodes!r:.60}; poise.cluster takes other things")
        object.__setattr__(self, "nodes", tuple(self.nodes))  # a list does as well
        if len({node.name for node in self.nodes}) < len(self.nodes):
            raise ClusterError("two nodes of the cluster have the same name")
        for node in self.nodes:
            if not isinstance(node.gpus, int) or node.gpus < 1:
                raise ClusterError(f"node {node.name!r} has {node.gpus!r:.50} GPUs; a node has a whole number of at least 1")

    @property
    def gpu_types(self) -> tuple[str, ...]:
        """Names of the types, in order of first appearance."""
        return tuple(dict.fromkeys(node.gpu_type for node in self.nodes))

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return sum(node.gpus for node in self.nodes)

    def gpus_of(self, gpu_type: str) -> int:
        """Number of GPUs of one type."""
        return sum(node.gpus for node in self.nodes if node.gpu_type == gpu_type)

    def __repr__(self) -> str:
        nodes, racks = len(self.nodes), len({node.rack for node in self.nodes})
        return f"Cluster({self}: {counted(self.gpus, 'GPU')} on {counted(nodes, 'node')} in {counted(racks, 'rack')})"

    def __str__(self) -> str:
        sizes: dict[str, list[int]] = {}
        for node in self.nodes:
            sizes.setdefault(node.gpu_type, []).append(node.gpus)
        per_node = {name: "" if max(each) == GPUS_PER_NODE else f"@{max(each)}" for name, each in sizes.items()}
        return ",".join(f"{name}:{sum(each)}{per_node[name]}" for name, each in sizes.items())


def populated(cluster: Cluster) -> Cluster:
    """Return the cluster; raise ClusterError if it has no node, as only that of a live service may, which waits for some."""
    if not cluster.nodes:
        raise ClusterError("the cluster has no node; give at least one, e.g. v100:4")
    return cluster


def parse_cluster(spec: str) -> Cluster:
    """Read `v100:12,p100:12@8`: GPUs of each type, 4 per node unless `@n` says otherwise; all nodes are in one rack.

    The last node of a type may be smaller.
    """
    shown = spec if len(spec) <= LONGEST_SHOWN else spec[:LONGEST_SHOWN] + "…"
    nodes: list[Node] = []
    seen: set[str] = set()
    gpus = 0
    for part in spec.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None:
            problem = f"{part[:LONGEST_SHOWN]!r} is not TYPE:GPUS or TYPE:GPUS@PER_NODE, e.g. v100:12@8"
            raise ClusterError(f"cluster {shown!r}: {problem}")
        gpu_type, count, per_node = match["type"].lower(), _count(match["count"]), _count(match["per_node"])
        if count < 1 or per_node < 1:
            raise ClusterError(f"cluster {shown!r}: {part!r} needs at least 1 GPU and at least 1 a node")
        gpus += count
        if gpus > MOST_GPUS or per_node > MOST_GPUS:
            problem = f"{part[:LONGEST_SHOWN]!r} makes it more than {MOST_GPUS:,} GPUs; ask for fewer"
            raise ClusterError(f"cluster {shown!r}: {problem}")
        if gpu_type in seen:
            raise ClusterError(f"cluster {shown!r}: type {gpu_type!r} stands there twice; add the two up")
        seen.add(gpu_type)
        sizes = [per_node] * (count // per_node) + ([count % per_node] if count % per_node else [])
        nodes += [Node(f"{gpu_type}-{index}", gpu_type, size) for index, size in enumerate(sizes)]
    return Cluster(tuple(nodes))


def _count(digits: str | None) -> int:
    """A number of GPUs. Digits beyond any possible cluster are not converted: Python is slow at, and limits, such input."""
    if digits is None:
        return GPUS_PER_NODE
    digits = digits.lstrip("0") or "0"
    return int(digits) if len(digits) <= len(str(MOST_GPUS)) else MOST_GPUS + 1
