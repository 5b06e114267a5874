"""Introspective scheduling (`gandiva`; Xiao et al., Gandiva, OSDI'18): early feedback for all jobs, with no durations known.

As things happen (`reaction.py`), for a job of gang g:

    1   the least loaded node that serves gangs of g and has room
    2   an empty node; from now on it serves gangs of g
    3   any node with room, or else the fewest nodes
    4   overload: turns of `quantum` seconds on the least loaded node that serves gangs of g, or else on the least loaded

Every `period`:

    packing     while more GPUs are asked for than there are: a waiting job joins a running one on its GPUs, for a trial.
                They stay together if Σ throughput beside the other ÷ throughput alone > 1; what was found is remembered
    migration   a gang spread over nodes is drawn together; nodes that are all but empty are emptied
    growth      elastic jobs take in idle GPUs of their node; they give them back before a job waits for them

Nothing is done, and no wake-up is asked for, while no job waits and looking around would change nothing. O(J + N) otherwise.
docs/algorithms/gandiva.md states it all. Below: the policy, turns under overload, and what is done every period.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf, nextafter
from types import MappingProxyType

from poise.scheduler.model.arithmetic import Floats
from poise.scheduler.model.cluster import NodeGpus, Site, site_of
from poise.scheduler.model.job_table import Snapshot
from poise.scheduler.model.plan import Claim, Plan
from poise.scheduler.model.speed import Locality
from poise.scheduler.model.topology import PlacementView
from poise.scheduler.model.units import next_round_end
from poise.scheduler.policies import papers
from poise.scheduler.policies.gandiva.reaction import Combination, GandivaMemory, GandivaPlan, NodeMark, PlacedUnit, seat
from poise.scheduler.policies.listing import (
    Capability,
    Family,
    Listing,
    Parameter,
    PolicyProperty,
    Traits,
    fraction,
    positive,
)


@dataclass(frozen=True, slots=True)
class Gandiva:
    """The policy. `quantum` and `period` are seconds; a node is fragmented if the part `fragmented` of it is free."""

    quantum: float = 60.0
    period: float = 300.0
    fragmented: float = 0.75

    def start(self) -> GandivaMemory:
        """The memory before the first plan."""
        return GandivaMemory(turn=-inf, look=-inf)

    def plan(self, snapshot: Snapshot, memory: GandivaMemory) -> tuple[Plan, GandivaMemory]:
        """What changes now, and when to look again."""
        columns = snapshot.columns
        arrived = range(memory.seen, len(columns.ids))
        if arrived:
            elastic = memory.is_elastic or any(columns.most[row] > columns.gang[row] for row in arrived)
            memory = replace(memory, seen=arrived.stop, is_elastic=elastic)
        # Looking around is pointless until something has happened since it last changed nothing.
        mark = NodeMark(memory.seen, len(snapshot.active), snapshot.idle)
        looks = memory.look <= snapshot.now and mark != memory.settled
        if not (snapshot.is_contended or looks or snapshot.placement.partner):
            return Plan.changing((), (), self._next_look(snapshot, memory, mark, snapshot.placement.free())), memory
        plan = GandivaPlan(snapshot, memory)
        pairing = judged(plan) if looks and (snapshot.is_contended or snapshot.placement.partner) else None
        if snapshot.is_contended:
            seat(plan)
            if pairing is not None and plan.demand > snapshot.gpus:
                pack(plan, pairing)
            if memory.homes and memory.turn <= snapshot.now:
                Turns(plan).take()
        elif looks:
            since = snapshot.now - self.period
            draw_together(plan, since)
            defragment(plan, self.fragmented, since)
            if memory.is_elastic:
                grow(plan, since)
        if plan.demand <= snapshot.gpus:
            part(plan)
        return self._answered(plan, pairing, mark, looks=looks)

    def _answered(
        self, plan: GandivaPlan, pairing: "Pairing | None", mark: NodeMark, *, looks: bool
    ) -> tuple[Plan, GandivaMemory]:
        """The plan, and what to remember of it."""
        memory, snapshot = plan.memory, plan.snapshot
        is_still = not (plan.claims or plan.stops or plan.is_early or pairing)
        after = replace(
            memory,
            affinity=plan.affinity(),
            homes=MappingProxyType(plan.homes),
            spread=frozenset(plan.spread),
            verdicts=memory.verdicts if pairing is None else MappingProxyType(pairing.verdicts),
            turn=self._next(snapshot, memory.turn, self.quantum),
            look=self._next(snapshot, memory.look, self.period),
            settled=memory.settled if not looks else mark if is_still else None,
        )
        wake = min(after.turn if plan.homes else inf, self._next_look(snapshot, after, mark, plan.draft.free))
        answer = Plan.changing(tuple(plan.claims), tuple(plan.stops), wake)
        if plan.stops:
            # What is left over after all goes to the job that waits longest, and then to those that had to make room.
            rest = tuple(map(Claim, (*plan.waiting, *plan.stops)))
            answer = replace(answer, more=lambda _idle: rest)
        return answer, after

    @staticmethod
    def _next(snapshot: Snapshot, due: float, length: float) -> float:
        return due if due > snapshot.now else next_round_end(snapshot.origin, snapshot.now, length)

    def _next_look(self, snapshot: Snapshot, memory: GandivaMemory, mark: NodeMark, free: Sequence[int]) -> float:
        """When to look around. Never if no job waits, shares, is spread or may grow, and no node is fragmented."""
        if mark == memory.settled:
            return inf
        may_help = memory.homes or snapshot.placement.partner or memory.spread or memory.is_elastic
        return memory.look if may_help or fragments(free, snapshot.placement, self.fragmented) else inf


LISTING = Listing(
    "gandiva",
    Family.MARKET,
    "nodes serve gangs of one size; turns of a minute under overload; pairs by trial, migration, growth",
    "Xiao et al., Gandiva, OSDI'18",
    (PolicyProperty.NO_DURATIONS, PolicyProperty.WORK_CONSERVING),
    Gandiva,
    (
        Parameter("quantum", "60", "length of a turn in seconds, where more jobs share a node than fit on it", positive),
        Parameter("period", "300", "seconds between two looks around: pairs, migration, growth", positive),
        Parameter("fragmented", "0.75", "a node in use with this part of its GPUs free is emptied, if possible", fraction),
    ),
    can=frozenset({Capability.PAIRS}),
    traits=Traits(
        optimises="early feedback and GPU use",
        fairness="none: jobs of a node take turns",
        heterogeneity="blind: the fastest type with room",
        gang="whole gangs; turns together",
        elasticity="grows onto idle GPUs of the node, gives them back before a job has to wait",
        verified="no pair while demand fits; a pair that loses is parted within a period; a shrink comes before a wait",
    ),
    url=papers.GANDIVA,
)


class Turns:
    """Turns that begin now on nodes where more jobs are at home than fit (OSDI'18 §3.1: suspend and resume).

    The job that has waited longest comes first. Then running jobs go on, the last to start first, as far as there is room;
    the others wait for the next turn. Gangs that no node holds take turns with all that is at home on their nodes.

    guests   jobs that wait at home on a node, longest first;  wide: waiting gangs whose home is several nodes
    taken    nodes whose turn is settled
    """

    def __init__(self, plan: GandivaPlan) -> None:
        self._plan = plan
        self._claimed = plan.claimed().union(plan.stops, plan.snapshot.pinned)
        self._guests: dict[int, list[int]] = {}
        self._wide: list[int] = []
        self._taken: set[int] = set()
        for row in plan.waiting:
            home = plan.homes.get(row)
            if home is None or row in self._claimed:
                continue
            if len(home) > 1:
                self._wide.append(row)
            else:
                self._guests.setdefault(home[0], []).append(row)

    def take(self) -> None:
        """Settle the turn of every node on which a job waits. Wide gangs stop first, so that all at home can be chosen."""
        plan, floor = self._plan, self._plan.snapshot.placement
        awaited = {*self._guests, *(node for row in self._wide for node in plan.homes[row])}
        for row, holding in sorted(floor.holdings.items()):
            if len(holding) > 1 and row not in self._claimed and plan.columns.started[row] < plan.snapshot.now:
                other = floor.partner.get(row)
                is_paired = other is not None and (row > other or other in plan.snapshot.pinned)
                if awaited.intersection(slots.node for slots in holding) and not is_paired:
                    plan.stop((row,) if other is None else (row, other), tuple(slots.node for slots in holding))
                    plan.draft.give(site_of(holding))
        for row in self._wide:
            self._seat_wide(row)
        for node, rows in self._guests.items():
            if node not in self._taken:
                self._rotate(node, rows)

    def _seat_wide(self, row: int) -> None:
        """A gang takes its nodes, if no job there has waited longer; those that have run longest are stopped."""
        plan = self._plan
        site = plan.affinities.parts(plan.homes[row], plan.columns.gang[row])
        since = plan.columns.waiting_since
        first = min((since[rows[0]] for node, _ in site if (rows := self._guests.get(node))), default=since[row])
        if since[row] <= first and all(self._room(node) >= gpus for node, gpus in site):
            for node, gpus in site:
                units = self._units(node)
                while plan.draft.free[node] < gpus:
                    self._stop(units.pop(), node)
            self._settle(row, site)

    def _units(self, node: int) -> list[PlacedUnit]:
        """Units that run on a node and may be stopped, the last to start first."""
        units = self._plan.residents.get(node, ())
        able = [unit for unit in units if not self._claimed.intersection(unit.rows)]
        return sorted(able, key=lambda unit: (-unit.since, unit.rows))

    def _room(self, node: int) -> int:
        """GPUs of a node that can be given to others; none once its turn is settled."""
        if node in self._taken:
            return 0
        return self._plan.draft.free[node] + sum(unit.gpus for unit in self._units(node))

    def _stop(self, unit: PlacedUnit, node: int) -> None:
        self._plan.stop(unit.rows, (node,))
        self._plan.draft.give((NodeGpus(node, unit.gpus),))

    def _settle(self, row: int, site: Site) -> None:
        gang = self._plan.columns.gang[row]
        self._plan.affinities.take(site, gang)
        self._plan.move(row, gang, site)
        self._taken.update(node for node, _ in site)

    def _rotate(self, node: int, guests: list[int]) -> None:
        """Settle the turn of a node: waiting jobs first, then as many running ones as still fit."""
        room = self._room(node)
        chosen: list[int] = []
        for row in guests:
            gang = self._plan.columns.gang[row]
            if gang <= room:
                room -= gang
                chosen.append(row)
        for unit in self._units(node) if chosen else ():
            if unit.gpus <= room:
                room -= unit.gpus
            else:
                self._stop(unit, node)
        for row in chosen:
            self._settle(row, (NodeGpus(node, self._plan.columns.gang[row]),))


# What is done every period (OSDI'18 §4.2): judge pairs, make new ones, draw jobs together, grow them. Packing is by trial:
# two jobs share GPUs for a period, and stay together if together they get more done than one at a time would, i.e. if the
# sum of their throughputs, each over its own when alone, is above 1. What was found is remembered.

WORTH = 1.0
"""Sum of normalised throughputs above which two jobs do more together than in turns."""
UNTRIED = nextafter(WORTH, inf)
"""Worth of a combination that has not been tried yet: worth a trial, after all that have proved themselves."""


class Pairing:
    """What is known of pairs: what they did where they were tried, and what they would do.

    verdicts   sums of normalised throughputs that were found, by combination
    """

    def __init__(self, plan: GandivaPlan, beside: Floats) -> None:
        self.verdicts = dict(plan.memory.verdicts)
        self._plan, self._beside = plan, beside
        self._worth: dict[Combination, float] = {}

    def combination(self, row: int, other: int, gpu_type: int) -> Combination:
        """What two jobs are an instance of."""
        kind = self._plan.columns.kind
        low, high = sorted((kind[row], kind[other]))
        return Combination(low, high, gpu_type)

    def worth(self, row: int, other: int, gpu_type: int) -> float:
        """Sum of the normalised throughputs of two jobs on the same GPUs; 0 if they do not fit there together."""
        combination = self.combination(row, other, gpu_type)
        worth = self._worth.get(combination)
        if worth is None:
            kind, estimate = self._plan.columns.kind, self._plan.snapshot.estimate
            mine = float(self._beside[kind[row], kind[other], gpu_type])
            others = float(self._beside[kind[other], kind[row], gpu_type])
            alone = [estimate(each).rates[gpu_type][Locality.PACKED] for each in (row, other)]
            fits = mine > 0 and others > 0 and min(alone) > 0
            worth = self._worth[combination] = mine / alone[0] + others / alone[1] if fits else 0.0
        return worth

    def promise(self, row: int, other: int, gpu_type: int) -> float:
        """What was found; just above the worthwhile if nothing was yet; 0 if they do not fit together."""
        if self.worth(row, other, gpu_type) == 0:
            return 0.0
        return self.verdicts.get(self.combination(row, other, gpu_type), UNTRIED)


def judged(plan: GandivaPlan) -> Pairing | None:
    """Part pairs that do not get more done together: the later job goes. None if nothing is known of any pair."""
    if (beside := plan.snapshot.workload.known_beside) is None:
        return None
    pairing = Pairing(plan, beside)
    for row, other in _pairs(plan):
        gpu_type = plan.type_of(row)
        worth = pairing.worth(row, other, gpu_type)
        pairing.verdicts[pairing.combination(row, other, gpu_type)] = worth
        leaver = _later(plan, row, other)
        if worth <= WORTH and leaver is not None:
            plan.stop((leaver,), tuple(slots.node for slots in plan.snapshot.placement.holdings[row]))
    return pairing


def _pairs(plan: GandivaPlan) -> list[tuple[int, int]]:
    return sorted((row, other) for row, other in plan.snapshot.placement.partner.items() if row < other)


def _later(plan: GandivaPlan, row: int, other: int) -> int | None:
    """The job of a pair that joined the other, of those that can be stopped at all."""
    able = [each for each in (row, other) if each not in plan.snapshot.pinned]
    return max(able, key=lambda each: (plan.columns.started[each], each), default=None)


def part(plan: GandivaPlan) -> None:
    """There is room for all jobs: those that joined another get GPUs of their own."""
    for row, other in _pairs(plan):
        joined = _later(plan, row, other)
        if joined is None:
            continue
        gang, types = plan.columns.gang[joined], plan.types_of(joined)
        found = plan.affinities.place(gang, types) if plan.has_idle(gang, types) else None
        if found is not None:
            plan.stops[joined] = None  # it may stay on its node, but not on these GPUs
            plan.move(joined, gang, found)


def pack(plan: GandivaPlan, pairing: Pairing) -> None:
    """Waiting jobs join running ones, the best combination known first; of those not tried yet, one trial each at a time."""
    tried: set[Combination] = set()
    claimed = plan.claimed()
    # Hosts: running jobs that have their GPUs to themselves, packed; by gang, by kind and type, in order of arrival.
    floor, columns = plan.snapshot.placement, plan.columns
    changed = claimed.union(plan.stops, floor.partner)
    hosts: dict[int, dict[tuple[int, int], list[int]]] = {}
    for row in sorted(floor.holdings):
        is_alone = row not in changed and columns.gpus[row] == columns.gang[row]
        if is_alone and floor.topology.locality(floor.holdings[row]) is Locality.PACKED:
            alike = (columns.kind[row], plan.type_of(row))
            hosts.setdefault(columns.gang[row], {}).setdefault(alike, []).append(row)
    for row in plan.waiting:
        if row in claimed:
            continue
        able: list[tuple[float, int, list[int]]] = []
        for (_, gpu_type), rows in hosts.get(plan.columns.gang[row], {}).items():
            if rows and pairing.combination(row, rows[0], gpu_type) not in tried:
                able.append((-pairing.promise(row, rows[0], gpu_type), rows[0], rows))
        promise, host, rows = min(able, default=(0.0, 0, []))
        if -promise > WORTH:
            rows.pop(0)
            combination = pairing.combination(row, host, plan.type_of(host))
            if combination not in pairing.verdicts:
                tried.add(combination)
            plan.claims.append(Claim(host, beside=row))
            plan.homes.pop(row, None)


def draw_together(plan: GandivaPlan, since: float) -> None:
    """Gangs on more nodes than they need go where they fit, if that is anywhere now. Runs younger than `since` stay."""
    floor, draft = plan.snapshot.placement, plan.draft
    plan.spread.intersection_update(floor.holdings)
    for row in sorted(plan.spread):
        if row in floor.partner or row in plan.snapshot.pinned or plan.is_young(row, since):
            continue
        site, gang = site_of(floor.holdings[row]), plan.columns.gpus[row]
        draft.give(site)
        better = draft.tightest(plan.type_of(row), gang)
        if better is not None and len(better) < len(site):
            plan.affinities.take(better, gang)
            plan.move(row, gang, better)
        else:
            draft.take(site)


def fragments(free: Sequence[int], floor: PlacementView, fragmented: float) -> list[int]:
    """Nodes that are not empty, but have at least this part of their GPUs free."""
    sizes = floor.sizes()
    return [node for node, gpus in enumerate(free) if sizes[node] > gpus >= fragmented * sizes[node] and gpus]


def defragment(plan: GandivaPlan, fragmented: float, since: float) -> None:
    """Empty nodes that are all but empty, the emptiest first: their jobs go to nodes that are no emptier.

    A node is emptied as a whole or left as it is. Jobs that came later than `since` stay where they are.
    """
    claimed, free, sizes = plan.claimed(), plan.draft.free, plan.snapshot.placement.sizes()
    for node in sorted(fragments(free, plan.snapshot.placement, fragmented), key=lambda node: (-free[node], node)):
        units = plan.residents.get(node, [])
        used = sizes[node] - free[node]
        may_move = all(len(unit.rows) == 1 and unit.rows[0] not in claimed for unit in units)
        if not (may_move and units and sum(unit.gpus for unit in units) == used):
            continue
        if not any(plan.is_young(unit.rows[0], since) for unit in units):
            claimed.update(_emptied(plan, node, units))


def _emptied(plan: GandivaPlan, node: int, units: Iterable[PlacedUnit]) -> list[int]:
    """Move all units off a node, the largest first; nothing changes if one of them finds no place.

    Each goes to a node in use of the same type that is no emptier: one that serves such gangs, if there is one; of those
    the fullest.
    """
    free, topology, serves, sizes = plan.draft.free, plan.draft.topology, plan.affinities.of, plan.snapshot.placement.sizes()
    moves, most = list[tuple[int, int, int]](), free[node]
    for unit in sorted(units, key=lambda unit: (-unit.gpus, unit.rows)):
        gpus = unit.gpus
        roomy = [each for each, room in enumerate(free) if gpus <= room <= most and each != node]
        alike = [each for each in roomy if topology.type_of[each] == topology.type_of[node]]
        in_use = [each for each in alike if free[each] < sizes[each]]
        able = [(serves.get(each) != gpus, free[each], each) for each in in_use]
        if not able:
            for _, other, taken in moves:
                plan.draft.give((NodeGpus(other, taken),))
            return []
        target = min(able)[2]
        plan.draft.take((NodeGpus(target, gpus),))
        moves.append((unit.rows[0], target, gpus))
    for row, target, gpus in moves:
        plan.draft.give((NodeGpus(node, gpus),))
        plan.move(row, gpus, (NodeGpus(target, gpus),))
    return [row for row, _, _ in moves]


def grow(plan: GandivaPlan, since: float) -> None:
    """Elastic jobs take in idle GPUs of their node, as far as that makes them faster, in order of arrival."""
    columns, floor, draft = plan.columns, plan.snapshot.placement, plan.draft
    claimed = plan.claimed()
    for row in sorted(floor.holdings):
        holding = floor.holdings[row]
        most, held = columns.most[row], columns.gpus[row]
        node, is_alone = holding[0].node, len(holding) == 1 and row not in floor.partner
        may_grow = most > held and most > columns.gang[row] and is_alone and row not in plan.snapshot.pinned
        if not may_grow or row in claimed or not draft.free[node] or plan.is_young(row, since):
            continue
        estimate, gpu_type = plan.snapshot.estimate(row), plan.type_of(row)
        counts = range(held, min(most, held + draft.free[node]) + 1, columns.unit[row])
        speeds = {each: estimate.at(each)[gpu_type][Locality.PACKED] for each in counts}
        gpus = max(speeds, key=lambda each: (speeds[each], -each))  # the fewest of those with which it is fastest
        if gpus > held:
            draft.take((NodeGpus(node, gpus - held),))
            plan.move(row, gpus, (NodeGpus(node, gpus),))
