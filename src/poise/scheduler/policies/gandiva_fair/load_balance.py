"""Where jobs live: the GPU type by the tenant's entitlement, the node by ticket load; and moves that pay.

    ticket load of a node = Σ tickets of the jobs that live there ÷ its GPUs

A new job goes to the type on which its tenant asks for least of what it is entitled to, and there to the node (or nodes)
of lowest load that can hold it. A waiting job is given another home if what it gains until it may move again is more than
the move costs: it does not run now, so nothing is interrupted for that.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from poise.scheduler.model.arithmetic import Floats
from poise.scheduler.model.cluster import NodeGpus, Site

CRUMBS = 0.01
"""GPUs that are too few for a tenant to care about."""


@dataclass(frozen=True, slots=True)
class Lodger:
    """A job that needs a home: its GPUs and tickets (the GPUs that it gets in the long run)."""

    row: int
    gang: int
    tickets: float


class Homes:
    """Homes of the jobs of all pools, as planned so far.

    of      where each job lives;  load: tickets per GPU, by node
    size    GPUs of each node that is there
    """

    def __init__(self, sizes: Sequence[int], types: Sequence[int], racks: Sequence[int]) -> None:
        self.of: dict[int, Site] = {}
        self.size = np.array(sizes, dtype=np.float64)
        self.load: Floats = np.zeros(len(sizes))
        self._types, self._racks = np.array(types), np.array(racks)

    def nodes(self, gpu_type: int) -> list[int]:
        """The nodes of a type that are there."""
        found: list[int] = np.flatnonzero((self._types == gpu_type) & (self.size > 0)).tolist()
        return found

    def settle(self, lodger: Lodger, site: Site) -> None:
        """Let a job live here."""
        self.of[lodger.row] = site
        self._count(lodger, site, 1.0)

    def leave(self, lodger: Lodger) -> None:
        """Take a job's home away."""
        self._count(lodger, self.of.pop(lodger.row), -1.0)

    def _count(self, lodger: Lodger, site: Site, sign: float) -> None:
        for node, gpus in site:
            if self.size[node]:
                self.load[node] += sign * lodger.tickets * gpus / (lodger.gang * self.size[node])

    def free_place(self, gang: int, gpu_type: int, free: Sequence[int]) -> Site | None:
        """The node with fewest free GPUs that has enough of them now."""
        fitting = [(free[node], node) for node in self.nodes(gpu_type) if free[node] >= gang]
        return (NodeGpus(min(fitting)[1], gang),) if fitting else None

    def lowest(self, gang: int, gpu_type: int) -> Site | None:
        """The node of lowest load that can hold a gang; else the fewest such nodes, of one rack if one can hold it."""
        load = np.where(self._types == gpu_type, self.load, inf)
        node = int(np.argmin(np.where(self.size >= gang, load, inf)))
        if self.size[node] >= gang and load[node] < inf:
            return (NodeGpus(node, gang),)
        # Across nodes: of equal size by load, smaller ones only if there are no others.
        best: tuple[tuple[int, int, float], Site] | None = None
        for rack in (*sorted(set(self._racks.tolist())), None):
            within = (self._types == gpu_type) & (self.size > 0) & ((self._racks == rack) if rack is not None else True)
            nodes = np.flatnonzero(within)
            ordered = nodes[np.lexsort((nodes, self.load[nodes], -self.size[nodes]))].tolist()
            site = self._parts(ordered, gang)
            if site is not None:
                rank = (int(rack is None), len(site), float(sum(self.load[node] for node, _ in site)))
                best = min(best, (rank, site)) if best else (rank, site)
        return None if best is None else best[1]

    def _parts(self, nodes: Iterable[int], gang: int) -> Site | None:
        parts = []
        for node in nodes:
            parts.append(NodeGpus(node, min(int(self.size[node]), gang)))
            gang -= parts[-1].gpus
            if not gang:
                return tuple(sorted(parts))
        return None

    def better(self, lodger: Lodger, *, cost: float, rest: float) -> Site | None:
        """A home of the same type for a job of one node where it gets on so much faster that the move pays.

        cost   seconds that a move costs;  rest: seconds until the job may move again
        """
        here = self.of[lodger.row][0].node
        site = self.lowest(lodger.gang, int(self._types[here]))
        if site is None or len(site) > 1:
            return None
        there = site[0].node
        entitled = lodger.tickets / lodger.gang
        load = self.load[there] + lodger.tickets / self.size[there]
        gain = min(1.0, entitled / load) - min(1.0, entitled / self.load[here]) if load < self.load[here] else 0.0
        return site if gain * rest > cost else None


def type_for(
    gang: int, able: Iterable[int], entitled: Sequence[float], asked: Sequence[float], speeds: Sequence[float]
) -> int | None:
    """A type of which a tenant asks for less than its due, else the one of which it asks least; of equals the fastest."""

    def rank(each: int) -> tuple[bool, float, float]:
        return not _lacks(asked[each], entitled[each]), _ratio(asked[each] + gang, entitled[each]), -speeds[each]

    return min(able, key=rank, default=None)


def retyped(gang: int, here: int, able: Iterable[int], entitled: Sequence[float], asked: Sequence[float]) -> int | None:
    """Another type for a waiting job, if the tenant does not need it here.

    A type on which the tenant asks for less than it is entitled to, or one of which it then asks a smaller multiple.
    """
    if _lacks(asked[here] - gang, entitled[here]):
        return None
    others = [each for each in able if each != here]
    there = type_for(gang, others, entitled, asked, [0.0] * len(asked))
    if there is None:
        return None
    less = _ratio(asked[there] + gang, entitled[there]) < _ratio(asked[here], entitled[here])
    return there if less or _lacks(asked[there], entitled[there]) else None


def _lacks(asked: float, entitled: float) -> bool:
    return asked < entitled - CRUMBS


def _ratio(asked: float, entitled: float) -> float:
    return asked / entitled if entitled > CRUMBS else inf
