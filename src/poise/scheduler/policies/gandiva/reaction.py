"""What Gandiva does as things happen (OSDI'18 §4.1): find places by affinity, and call in GPUs that were lent."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from poise.scheduler.model.cluster import NodeGpus, Site, site_of
from poise.scheduler.model.job_table import Snapshot
from poise.scheduler.model.plan import Claim
from poise.scheduler.model.speed import Locality
from poise.scheduler.policies.placement_draft import PlacementDraft

# Where a gang goes by affinity (Gandiva, OSDI'18 §4): nodes serve gangs of one size, as far as that is possible.
#
# An empty node has no affinity; the first gang that comes gives it its own size. A node's load is what the jobs there need,
# those included that wait for a turn, over what it has.

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
        self, sketch: PlacementDraft, alive: Sequence[bool], of: Mapping[int, int], kept: Mapping[int, int] = NOTHING_KEPT
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
        site: Site | None = None if node is None else (NodeGpus(node, gang),)
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
            parts.append(NodeGpus(node, min(gang, self._size[node])))
            gang -= parts[-1].gpus
        return tuple(part for part in parts if part.gpus)

    def _load(self, node: int, crowd: Mapping[int, int]) -> float:
        size = self._size[node]
        return (size - self._sketch.free[node] + crowd.get(node, 0)) / size


class Combination(NamedTuple):
    """Two kinds of jobs on the same GPUs of a type; the smaller kind first."""

    kind: int
    other: int
    gpu_type: int


class NodeMark(NamedTuple):
    """What tells whether anything has happened: jobs ever seen, jobs here, GPUs free."""

    seen: int
    active: int
    idle: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GandivaMemory:
    """What is remembered.

    affinity    the size of gangs that a node serves
    homes       where jobs that wait take their turns
    spread      jobs that were put on more nodes than they need
    verdicts    sum of normalised throughputs of combinations that were tried
    turn, look  when the next turns begin, and when to look around next
    settled     how things stood when looking around changed nothing; None: it did
    seen, is_elastic   rows looked at so far, and whether any of those jobs can use more than its gang
    """

    affinity: MappingProxyType[int, int] = field(default_factory=lambda: MappingProxyType({}))
    homes: MappingProxyType[int, Home] = field(default_factory=lambda: MappingProxyType({}))
    spread: frozenset[int] = frozenset()
    verdicts: MappingProxyType[Combination, float] = field(default_factory=lambda: MappingProxyType({}))
    turn: float = 0.0
    look: float = 0.0
    settled: NodeMark | None = None
    seen: int = 0
    is_elastic: bool = False


class PlacedUnit(NamedTuple):
    """One job, or two that share GPUs, all on one node: since when, and how many GPUs."""

    rows: tuple[int, ...]
    gpus: int
    since: float


class GandivaMoment:
    """A plan in the making.

    claims, stops   so far;  homes: where waiting jobs take turns;  spread: as in `GandivaMemory`
    is_early        something was left for later, because a run has only just begun
    """

    def __init__(self, snapshot: Snapshot, habits: GandivaMemory) -> None:
        self.snapshot = snapshot
        self.columns = snapshot.columns
        self.habits = habits
        self.claims: list[Claim] = []
        self.stops: dict[int, None] = {}
        self.spread = set(habits.spread)
        self.is_early = False
        holdings = snapshot.placement.holdings
        is_here = set(snapshot.active).difference(holdings) if habits.homes else set()
        alive = snapshot.placement.alive
        self.homes = {
            row: home for row, home in habits.homes.items() if row in is_here and all(alive[node] for node in home)
        }
        if snapshot.pinned:  # one of them may be in the way for good
            gang = self.columns.gang
            self.homes = {row: home for row, home in self.homes.items() if self.affinities.holds(home, gang[row])}
        self._types: dict[int, tuple[int, ...]] = {}

    @cached_property
    def sketch(self) -> PlacementDraft:
        """Free GPUs as planned so far."""
        return PlacementDraft(self.snapshot.placement)

    @cached_property
    def affinities(self) -> Affinities:
        """Affinities as planned so far."""
        kept: dict[int, int] = {}
        for holding in self.snapshot.kept().values():
            for node, gpus in site_of(holding):
                kept[node] = kept.get(node, 0) + gpus
        return Affinities(self.sketch, self.snapshot.placement.alive, self.habits.affinity, kept)

    def affinity(self) -> MappingProxyType[int, int]:
        """Affinities to be remembered."""
        return MappingProxyType(self.affinities.of) if "affinities" in vars(self) else self.habits.affinity

    @cached_property
    def waiting(self) -> list[int]:
        """Who waits, longest first."""
        snapshot = self.snapshot
        rows = snapshot.rows[~snapshot.running]
        since = snapshot.floats(self.columns.waiting_since)[~snapshot.running]
        order: list[int] = rows[np.lexsort((rows, since))].tolist()
        return order

    @cached_property
    def demand(self) -> int:
        """GPUs that all jobs ask for."""
        return int(self.snapshot.gang.sum())

    @cached_property
    def crowd(self) -> dict[int, int]:
        """GPUs that those who wait for a turn need, by node."""
        crowd: dict[int, int] = {}
        for row, home in self.homes.items():
            for node, gpus in self.affinities.parts(home, self.columns.gang[row]):
                crowd[node] = crowd.get(node, 0) + gpus
        return crowd

    def settle(self, row: int, home: Home) -> None:
        """A job that waits takes its turns here."""
        for node, gpus in self.affinities.parts(home, self.columns.gang[row]):
            self.crowd[node] = self.crowd.get(node, 0) + gpus
        self.homes[row] = home

    @cached_property
    def residents(self) -> dict[int, list[PlacedUnit]]:
        """Units by the node that they are on; who is on several is left out, and who may not be stopped."""
        found: dict[int, list[PlacedUnit]] = {}
        partner, columns = self.snapshot.placement.partner, self.columns
        pinned = self.snapshot.pinned
        for row, holding in self.snapshot.placement.holdings.items():
            if len(holding) == 1 and row not in pinned and partner.get(row) not in pinned:
                other = partner.get(row)
                if other is None:
                    found.setdefault(holding[0].node, []).append(PlacedUnit((row,), columns.gpus[row], columns.started[row]))
                elif row < other:
                    since = min(columns.started[row], columns.started[other])
                    found.setdefault(holding[0].node, []).append(PlacedUnit((row, other), columns.gpus[row], since))
        return found

    def types_of(self, row: int) -> tuple[int, ...]:
        """GPU types on which the job runs, the fastest first."""
        kind = self.columns.kind[row]
        types = self._types.get(kind)
        if types is None:
            speeds = [rates[Locality.PACKED] for rates in self.snapshot.estimate(row).rates]
            able = [gpu_type for gpu_type, speed in enumerate(speeds) if speed > 0]
            types = self._types[kind] = tuple(sorted(able, key=lambda gpu_type: -speeds[gpu_type]))
        return types

    def type_of(self, row: int) -> int:
        """The GPU type that a running job holds."""
        floor = self.snapshot.placement
        return floor.topology.type_of[floor.holdings[row][0].node]

    def stop(self, rows: Iterable[int], home: Home) -> None:
        """Running jobs make room, and take their turns here from now on."""
        for row in rows:
            self.stops[row] = None
            self.homes[row] = home

    def move(self, row: int, gpus: int, site: Site) -> None:
        """A job is to be here; the sketch knows already."""
        self.claims.append(Claim(row, gpus=gpus, site=site))
        self.homes.pop(row, None)
        self.spread.discard(row)
        if len(site) > 1 and self.sketch.locality(site) is not Locality.PACKED:
            self.spread.add(row)

    def is_young(self, row: int, since: float) -> bool:
        """A run that began later than this is left in peace, for now."""
        if self.columns.started[row] <= since:
            return False
        self.is_early = True
        return True

    def claimed(self) -> set[int]:
        """Who is to be somewhere, or to share GPUs, by this plan."""
        return {claim.row for claim in self.claims}.union(claim.beside for claim in self.claims if claim.beside is not None)

    def has_idle(self, gpus: int, types: Iterable[int]) -> bool:
        """So many GPUs of one of these types are free."""
        return any(self.sketch.idle[gpu_type] >= gpus for gpu_type in types)


def seat(moment: GandivaMoment) -> None:
    """Whoever waits gets GPUs that are free, or were lent; the others are given a place where they take turns."""
    gang = moment.columns.gang
    lent = _Lent(moment) if moment.habits.is_elastic else None
    for row in moment.waiting:
        is_placed = _placed(moment, row, lent) if any(moment.sketch.idle) or lent else False
        if not is_placed and row not in moment.homes:
            home = _host(moment, row, gang[row])
            if home is not None:
                moment.settle(row, home)


def _placed(moment: GandivaMoment, row: int, lent: "_Lent | None") -> bool:
    gang, types = moment.columns.gang[row], moment.types_of(row)
    if lent is not None and not _has_room(moment.sketch, gang, types):
        lent.call_in(gang, types)
    found = moment.affinities.place(gang, types) if moment.has_idle(gang, types) else None
    if found is not None:
        moment.move(row, gang, found)
    return found is not None


def _has_room(sketch: PlacementDraft, gang: int, types: Sequence[int]) -> bool:
    """Some node holds the gang."""
    return any(free >= gang and sketch.topology.type_of[node] in types for node, free in enumerate(sketch.free))


def _host(moment: GandivaMoment, row: int, gang: int) -> Home | None:
    """Where a job takes turns: on a node, or, if none holds its gang, on whole nodes. None: it can only wait."""
    types = moment.types_of(row)
    node = moment.affinities.host(gang, types, moment.crowd)
    return (node,) if node is not None else moment.affinities.hosts(gang, types, moment.crowd)


class _Lent:
    """GPUs that jobs hold beyond their gangs: they are given back before anybody waits."""

    def __init__(self, moment: GandivaMoment) -> None:
        self._moment = moment
        gpus, gang = moment.columns.gpus, moment.columns.gang
        self._grown: dict[int, list[int]] = {}
        holdings = moment.snapshot.placement.holdings
        for row in sorted(row for row in holdings if gpus[row] > gang[row] and row not in moment.snapshot.pinned):
            self._grown.setdefault(holdings[row][0].node, []).append(row)

    def __bool__(self) -> bool:
        return bool(self._grown)

    def _surplus(self, node: int) -> int:
        columns = self._moment.columns
        return sum(columns.gpus[row] - columns.gang[row] for row in self._grown.get(node, ()))

    def call_in(self, gang: int, types: Sequence[int]) -> None:
        """Shrink jobs until the gang fits: on one node, if that is possible, or else on several."""
        free, type_of = self._moment.sketch.free, self._moment.sketch.topology.type_of
        able = [node for node in sorted(self._grown) if type_of[node] in types]
        alone = [node for node in able if free[node] + self._surplus(node) >= gang]
        if alone:
            self._shrink(min(alone, key=lambda node: (self._surplus(node), node)), gang)
            return
        for node in able:
            gpu_type = type_of[node]
            total = self._moment.sketch.idle[gpu_type] + sum(
                self._surplus(each) for each in able if type_of[each] == gpu_type
            )
            if self._moment.sketch.idle[gpu_type] < gang <= total:
                self._shrink(node, free[node] + gang - self._moment.sketch.idle[gpu_type])

    def _shrink(self, node: int, room: int) -> None:
        """Until the node has so much room, the last to arrive first."""
        columns, sketch = self._moment.columns, self._moment.sketch
        rows = self._grown[node]
        while rows and sketch.free[node] < room:
            row = rows.pop()
            sketch.give((NodeGpus(node, columns.gpus[row] - columns.gang[row]),))
            self._moment.move(row, columns.gang[row], (NodeGpus(node, columns.gang[row]),))
        if not rows:
            del self._grown[node]
