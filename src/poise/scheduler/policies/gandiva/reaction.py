"""What Gandiva does as things happen (OSDI'18 §4.1): find places by affinity, and call in GPUs that were lent.

`seat`, below, is what the planner calls. `GandivaMemory` is what is remembered from plan to plan, `GandivaPlan` a plan in
the making, and `Affinities` the rule by which nodes serve gangs of one size.
"""

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
from poise.scheduler.model.topology import PlacementView
from poise.scheduler.policies.placement_draft import PlacementDraft

Home = tuple[int, ...]
"""The nodes on which a job takes turns with others; several only for a gang that no node holds."""


class Affinities:
    """Which node serves gangs of which size (OSDI'18 §4), as planned so far.

    An empty node has no affinity; the first gang that comes gives it its own size. A node's load is what the jobs there
    need, those included that wait for a turn, over what it has.

    of     the size of the gangs that a node serves
    kept   GPUs of nodes that pinned jobs hold, by node: as if they were not there
    """

    def __init__(
        self, draft: PlacementDraft, floor: PlacementView, of: Mapping[int, int], kept: Mapping[int, int] | None = None
    ) -> None:
        self.of = dict(of)
        self._draft, self._alive, kept = draft, floor.alive, kept or {}
        self._size = [size - kept.get(node, 0) for node, size in enumerate(floor.sizes())]

    def place(self, gang: int, types: Sequence[int]) -> Site | None:
        """Take free GPUs for a gang by the first three rules, types in order of preference; None if they do not do.

        1 the least loaded node that serves such gangs · 2 an empty node, which serves them from now on · 3 any node, or
        the fewest nodes
        """
        free, size, type_of = self._draft.free, self._size, self._draft.topology.type_of
        room = [node for node, gpus in enumerate(free) if gpus >= gang]
        serving = [node for node in room if free[node] < size[node] and self.of.get(node) == gang]
        empty = [node for node in room if free[node] == size[node]]
        for candidates in (serving, empty):
            for kind in types:
                able = [node for node in candidates if type_of[node] == kind]
                if able:
                    node = min(able, key=lambda node: (-free[node] / size[node], size[node], node))
                    return self.take((NodeGpus(node, gang),), gang)
        site = next((found for each in types if (found := self._draft.tightest(each, gang))), None)
        return None if site is None else self.take(site, gang)

    def take(self, site: Site, gang: int) -> Site:
        """Put a gang here; nodes that were empty serve such gangs from now on. Returns the site."""
        for node, _ in site:
            if self._draft.free[node] == self._size[node]:
                self.of[node] = gang
        self._draft.take(site)
        return site

    def host(self, gang: int, types: Sequence[int], crowd: Mapping[int, int]) -> int | None:
        """The fourth rule: the least loaded node that serves such gangs, full as it is; else the least loaded of all.

        None if no node holds the gang. `crowd` is what jobs that wait for a turn need, by node.
        """
        type_of, size = self._draft.topology.type_of, self._size
        able = [node for node, kind in enumerate(type_of) if size[node] >= gang and self._alive[node] and kind in types]
        serving = [node for node in able if self.of.get(node) == gang]
        rank = {node: (self._load(node, crowd), types.index(type_of[node]), node) for node in serving or able}
        return min(rank, key=rank.__getitem__, default=None)

    def hosts(self, gang: int, types: Sequence[int], crowd: Mapping[int, int]) -> Home | None:
        """Whole nodes of one type for a gang that no node holds: few of them, of those the least loaded. None: too few."""
        type_of = self._draft.topology.type_of
        for kind in types:
            able = [node for node, alive in enumerate(self._alive) if alive and type_of[node] == kind and self._size[node]]
            able.sort(key=lambda node: (-self._size[node], self._load(node, crowd), node))
            reach = list(accumulate(self._size[node] for node in able))
            needed = bisect_left(reach, gang) + 1
            if needed <= len(able):
                return tuple(sorted(able[:needed]))
        return None

    def holds(self, home: Home, gang: int) -> bool:
        """Whether a gang fits there once all jobs that can be stopped make way."""
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
        return (size - self._draft.free[node] + crowd.get(node, 0)) / size


class Combination(NamedTuple):
    """Two kinds of jobs on the same GPUs of a type; the smaller kind first."""

    kind: int
    other: int
    gpu_type: int


class NodeMark(NamedTuple):
    """Whether anything has happened shows in these: jobs ever seen, jobs here, GPUs free."""

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


class GandivaPlan:
    """A plan in the making.

    claims, stops   so far;  homes: where waiting jobs take turns;  spread: as in `GandivaMemory`
    is_early        something was left for later, because a run has only just begun
    """

    def __init__(self, snapshot: Snapshot, memory: GandivaMemory) -> None:
        self.snapshot, self.columns, self.memory = snapshot, snapshot.columns, memory
        self.claims: list[Claim] = []
        self.stops: dict[int, None] = {}
        self.spread = set(memory.spread)
        self.is_early = False
        waiting = set(snapshot.active).difference(snapshot.placement.holdings) if memory.homes else set()
        alive, homes = snapshot.placement.alive, memory.homes.items()
        self.homes = {row: home for row, home in homes if row in waiting and all(alive[node] for node in home)}
        if snapshot.pinned or any(snapshot.placement.withheld):  # something may be in the way for good
            gang = self.columns.gang
            self.homes = {row: home for row, home in self.homes.items() if self.affinities.holds(home, gang[row])}
        self._types: dict[int, tuple[int, ...]] = {}

    @cached_property
    def draft(self) -> PlacementDraft:
        """Free GPUs as planned so far."""
        return PlacementDraft(self.snapshot.placement)

    @cached_property
    def affinities(self) -> Affinities:
        """Affinities as planned so far."""
        kept: dict[int, int] = {}
        for holding in self.snapshot.kept().values():
            for node, gpus in site_of(holding):
                kept[node] = kept.get(node, 0) + gpus
        return Affinities(self.draft, self.snapshot.placement, self.memory.affinity, kept)

    def affinity(self) -> MappingProxyType[int, int]:
        """Affinities to be remembered."""
        return MappingProxyType(self.affinities.of) if "affinities" in vars(self) else self.memory.affinity

    @cached_property
    def waiting(self) -> list[int]:
        """Waiting jobs, the longest first."""
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
        """GPUs that jobs that wait for a turn need, by node."""
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
        """Units by the node that they are on, without those on several nodes and those that may not be stopped."""
        found: dict[int, list[PlacedUnit]] = {}
        columns, pinned = self.columns, self.snapshot.pinned
        for row, holding in self.snapshot.placement.holdings.items():
            other = self.snapshot.placement.partner.get(row)
            rows = (row,) if other is None else (row, other)
            if len(holding) == 1 and pinned.isdisjoint(rows) and row == min(rows):  # a pair once
                since = min(columns.started[each] for each in rows)
                found.setdefault(holding[0].node, []).append(PlacedUnit(rows, columns.gpus[row], since))
        return found

    def types_of(self, row: int) -> tuple[int, ...]:
        """GPU types on which the job runs, the fastest first."""
        kind = self.columns.kind[row]
        types = self._types.get(kind)
        if types is None:
            speeds = self.snapshot.estimate(row).packed
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
        """Claim a site for a job; its GPUs are taken already."""
        self.claims.append(Claim(row, gpus=gpus, site=site))
        self.homes.pop(row, None)
        self.spread.discard(row)
        if len(site) > 1 and self.draft.locality(site) is not Locality.PACKED:
            self.spread.add(row)

    def is_young(self, row: int, since: float) -> bool:
        """Whether a run began later than `since`: it is left in peace, for now."""
        if self.columns.started[row] <= since:
            return False
        self.is_early = True
        return True

    def claimed(self) -> set[int]:
        """Jobs that this plan has claims for, or lets join another."""
        return {claim.row for claim in self.claims}.union(claim.beside for claim in self.claims if claim.beside is not None)

    def has_idle(self, gpus: int, types: Iterable[int]) -> bool:
        """Whether as many GPUs of one of these types are free."""
        return any(self.draft.idle[gpu_type] >= gpus for gpu_type in types)


def seat(plan: GandivaPlan) -> None:
    """Give waiting jobs GPUs that are free, or were lent; the others get a home where they take turns."""
    draft, affinities = plan.draft, plan.affinities
    lent = _Lent(plan) if plan.memory.is_elastic else None
    for row in plan.waiting:
        gang, types = plan.columns.gang[row], plan.types_of(row)
        site = None
        if any(draft.idle) or lent:
            has_room = any(free >= gang and draft.topology.type_of[node] in types for node, free in enumerate(draft.free))
            if lent is not None and not has_room:
                lent.call_in(gang, types)
            site = affinities.place(gang, types) if plan.has_idle(gang, types) else None
        if site is not None:
            plan.move(row, gang, site)
        elif row not in plan.homes:
            # On one node, or, if none holds the gang, on whole nodes; if there are too few, the job can only wait.
            node = affinities.host(gang, types, plan.crowd)
            home = (node,) if node is not None else affinities.hosts(gang, types, plan.crowd)
            if home is not None:
                plan.settle(row, home)


class _Lent:
    """GPUs that jobs hold beyond their gangs: they are given back before a job waits."""

    def __init__(self, plan: GandivaPlan) -> None:
        self._plan = plan
        gpus, gang = plan.columns.gpus, plan.columns.gang
        self._grown: dict[int, list[int]] = {}
        holdings = plan.snapshot.placement.holdings
        for row in sorted(row for row in holdings if gpus[row] > gang[row] and row not in plan.snapshot.pinned):
            self._grown.setdefault(holdings[row][0].node, []).append(row)

    def __bool__(self) -> bool:
        return bool(self._grown)

    def _surplus(self, node: int) -> int:
        columns = self._plan.columns
        return sum(columns.gpus[row] - columns.gang[row] for row in self._grown.get(node, ()))

    def call_in(self, gang: int, types: Sequence[int]) -> None:
        """Shrink jobs until the gang fits: on one node, if that is possible, or else on several."""
        free, type_of = self._plan.draft.free, self._plan.draft.topology.type_of
        able = [node for node in sorted(self._grown) if type_of[node] in types]
        alone = [node for node in able if free[node] + self._surplus(node) >= gang]
        if alone:
            self._shrink(min(alone, key=lambda node: (self._surplus(node), node)), gang)
            return
        for node in able:
            gpu_type = type_of[node]
            total = self._plan.draft.idle[gpu_type] + sum(self._surplus(each) for each in able if type_of[each] == gpu_type)
            if self._plan.draft.idle[gpu_type] < gang <= total:
                self._shrink(node, free[node] + gang - self._plan.draft.idle[gpu_type])

    def _shrink(self, node: int, room: int) -> None:
        """Shrink jobs until the node has this much room, the last to arrive first."""
        columns, draft = self._plan.columns, self._plan.draft
        rows = self._grown[node]
        while rows and draft.free[node] < room:
            row = rows.pop()
            draft.give((NodeGpus(node, columns.gpus[row] - columns.gang[row]),))
            self._plan.move(row, columns.gang[row], (NodeGpus(node, columns.gang[row]),))
        if not rows:
            del self._grown[node]
