"""Where a gang goes by affinity (Gandiva, OSDI'18 §4): nodes serve gangs of one size, as far as that is possible.

An empty node has no affinity; the first gang that comes gives it its own size. A node's load is what the jobs there need,
those included that wait for a turn, over what it has.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType

from poise.model.cluster import Part, Site
from poise.policies.sketch import Sketch

Home = tuple[int, ...]
"""The nodes on which a job takes turns with others; several only for a gang that no node holds."""


NOTHING_KEPT: Mapping[int, int] = MappingProxyType({})
"""Nobody is pinned."""


class Affinities:
    """Affinities of nodes in the making.

    of     the size of the gangs that a node serves
    kept   GPUs of nodes that pinned jobs hold, by node: as if they were not there
    """

    def __init__(
        self, sketch: Sketch, alive: Sequence[bool], of: Mapping[int, int], kept: Mapping[int, int] = NOTHING_KEPT
    ) -> None:
        self.of = dict(of)
        self._sketch = sketch
        self._alive = alive
        self._size = [mask.bit_count() - kept.get(node, 0) for node, mask in enumerate(sketch.topology.full)]

    def place(self, gang: int, types: Sequence[int]) -> Site | None:
        """Free GPUs for a gang, by the first three rules; types in order of preference. The place is taken.

        1 the least loaded node that serves such gangs · 2 an empty node, which serves them from now on · 3 any node, or the
        fewest nodes
        """
        node = self._serving(gang, types)
        site: Site | None = None if node is None else (Part(node, gang),)
        if site is None:
            site = next((found for each in types if (found := self._sketch.tightest(each, gang))), None)
        if site is None:
            return None
        self.take(site, gang)
        return site

    def take(self, site: Site, gang: int) -> None:
        """A gang is to be here; nodes that were empty serve such gangs from now on."""
        for node, _ in site:
            if self._sketch.free[node] == self._size[node]:
                self.of[node] = gang
        self._sketch.take(site)

    def _serving(self, gang: int, types: Sequence[int]) -> int | None:
        """The least loaded node that serves such gangs and has room, or else an empty one."""
        free, size, of, type_of = self._sketch.free, self._size, self.of, self._sketch.topology.type_of
        room = [node for node, gpus in enumerate(free) if gpus >= gang]
        used = [node for node in room if free[node] < size[node] and of.get(node) == gang]
        empty = [node for node in room if free[node] == size[node]]
        for candidates in (used, empty):
            for kind in types:
                able = [node for node in candidates if type_of[node] == kind]
                if able:
                    return min(able, key=lambda node: (-free[node] / size[node], size[node], node))
        return None

    def host(self, gang: int, types: Sequence[int], crowd: Mapping[int, int]) -> int | None:
        """The fourth rule: the least loaded node that serves such gangs, full as it is; else the least loaded of all.

        None if no node holds the gang. `crowd` is what those who wait for a turn need, by node.
        """
        type_of = self._sketch.topology.type_of
        able = [
            node for node, size in enumerate(self._size) if size >= gang and self._alive[node] and type_of[node] in types
        ]
        serving = [node for node in able if self.of.get(node) == gang]
        candidates = serving or able
        if not candidates:
            return None
        return min(candidates, key=lambda node: (self._load(node, crowd), types.index(type_of[node]), node))

    def hosts(self, gang: int, types: Sequence[int], crowd: Mapping[int, int]) -> Home | None:
        """Whole nodes of one type for a gang that no node holds: few of them, of those the least loaded. None: too few."""
        type_of = self._sketch.topology.type_of
        for kind in types:
            able = [node for node, alive in enumerate(self._alive) if alive and type_of[node] == kind and self._size[node]]
            able.sort(key=lambda node: (-self._size[node], self._load(node, crowd), node))
            reach = list(accumulate(self._size[node] for node in able))
            needed = bisect_left(reach, gang) + 1
            if needed <= len(able):
                return tuple(sorted(able[:needed]))
        return None

    def holds(self, home: Home, gang: int) -> bool:
        """A gang fits there, if only all who can make way do."""
        return sum(self._size[node] for node in home) >= gang

    def parts(self, home: Home, gang: int) -> Site:
        """How a gang is spread over its home: whole nodes, and the last as far as needed."""
        parts = []
        for node in home:
            parts.append(Part(node, min(gang, self._size[node])))
            gang -= parts[-1].gpus
        return tuple(part for part in parts if part.gpus)

    def _load(self, node: int, crowd: Mapping[int, int]) -> float:
        size = self._size[node]
        return (size - self._sketch.free[node] + crowd.get(node, 0)) / size
