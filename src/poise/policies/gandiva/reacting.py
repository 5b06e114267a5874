"""What Gandiva does as things happen (OSDI'18 §4.1): find places by affinity, and call in GPUs that were lent."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from poise.model.cluster import Part, Site, site_of
from poise.model.columns import Snapshot
from poise.model.plan import Claim
from poise.model.speed import Locality
from poise.policies.gandiva.affinity import Affinities, Home
from poise.policies.sketch import Sketch


class Combination(NamedTuple):
    """Two kinds of jobs on the same GPUs of a type; the smaller kind first."""

    kind: int
    other: int
    gpu_type: int


class Mark(NamedTuple):
    """What tells whether anything has happened: jobs ever seen, jobs here, GPUs free."""

    seen: int
    active: int
    idle: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Habits:
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
    settled: Mark | None = None
    seen: int = 0
    is_elastic: bool = False


class Unit(NamedTuple):
    """One job, or two that share GPUs, all on one node: since when, and how many GPUs."""

    rows: tuple[int, ...]
    gpus: int
    since: float


class Moment:
    """A plan in the making.

    claims, stops   so far;  homes: where waiting jobs take turns;  spread: as in `Habits`
    is_early        something was left for later, because a run has only just begun
    """

    def __init__(self, snapshot: Snapshot, habits: Habits) -> None:
        self.snapshot = snapshot
        self.columns = snapshot.columns
        self.habits = habits
        self.claims: list[Claim] = []
        self.stops: dict[int, None] = {}
        self.spread = set(habits.spread)
        self.is_early = False
        holdings = snapshot.floor.holdings
        is_here = set(snapshot.active).difference(holdings) if habits.homes else set()
        alive = snapshot.floor.alive
        self.homes = {
            row: home for row, home in habits.homes.items() if row in is_here and all(alive[node] for node in home)
        }
        if snapshot.pinned:  # one of them may be in the way for good
            gang = self.columns.gang
            self.homes = {row: home for row, home in self.homes.items() if self.affinities.holds(home, gang[row])}
        self._types: dict[int, tuple[int, ...]] = {}

    @cached_property
    def sketch(self) -> Sketch:
        """Free GPUs as planned so far."""
        return Sketch(self.snapshot.floor)

    @cached_property
    def affinities(self) -> Affinities:
        """Affinities as planned so far."""
        kept: dict[int, int] = {}
        for holding in self.snapshot.kept().values():
            for node, gpus in site_of(holding):
                kept[node] = kept.get(node, 0) + gpus
        return Affinities(self.sketch, self.snapshot.floor.alive, self.habits.affinity, kept)

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
    def residents(self) -> dict[int, list[Unit]]:
        """Units by the node that they are on; who is on several is left out, and who may not be stopped."""
        found: dict[int, list[Unit]] = {}
        partner, columns = self.snapshot.floor.partner, self.columns
        pinned = self.snapshot.pinned
        for row, holding in self.snapshot.floor.holdings.items():
            if len(holding) == 1 and row not in pinned and partner.get(row) not in pinned:
                other = partner.get(row)
                if other is None:
                    found.setdefault(holding[0].node, []).append(Unit((row,), columns.gpus[row], columns.started[row]))
                elif row < other:
                    since = min(columns.started[row], columns.started[other])
                    found.setdefault(holding[0].node, []).append(Unit((row, other), columns.gpus[row], since))
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
        floor = self.snapshot.floor
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


def seat(moment: Moment) -> None:
    """Whoever waits gets GPUs that are free, or were lent; the others are given a place where they take turns."""
    gang = moment.columns.gang
    lent = _Lent(moment) if moment.habits.is_elastic else None
    for row in moment.waiting:
        is_placed = _placed(moment, row, lent) if any(moment.sketch.idle) or lent else False
        if not is_placed and row not in moment.homes:
            home = _host(moment, row, gang[row])
            if home is not None:
                moment.settle(row, home)


def _placed(moment: Moment, row: int, lent: "_Lent | None") -> bool:
    gang, types = moment.columns.gang[row], moment.types_of(row)
    if lent is not None and not _has_room(moment.sketch, gang, types):
        lent.call_in(gang, types)
    found = moment.affinities.place(gang, types) if moment.has_idle(gang, types) else None
    if found is not None:
        moment.move(row, gang, found)
    return found is not None


def _has_room(sketch: Sketch, gang: int, types: Sequence[int]) -> bool:
    """Some node holds the gang."""
    return any(free >= gang and sketch.topology.type_of[node] in types for node, free in enumerate(sketch.free))


def _host(moment: Moment, row: int, gang: int) -> Home | None:
    """Where a job takes turns: on a node, or, if none holds its gang, on whole nodes. None: it can only wait."""
    types = moment.types_of(row)
    node = moment.affinities.host(gang, types, moment.crowd)
    return (node,) if node is not None else moment.affinities.hosts(gang, types, moment.crowd)


class _Lent:
    """GPUs that jobs hold beyond their gangs: they are given back before anybody waits."""

    def __init__(self, moment: Moment) -> None:
        self._moment = moment
        gpus, gang = moment.columns.gpus, moment.columns.gang
        self._grown: dict[int, list[int]] = {}
        holdings = moment.snapshot.floor.holdings
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
            sketch.give((Part(node, columns.gpus[row] - columns.gang[row]),))
            self._moment.move(row, columns.gang[row], (Part(node, columns.gang[row]),))
        if not rows:
            del self._grown[node]
