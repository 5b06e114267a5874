"""Introspective scheduling (`gandiva`; Xiao et al., Gandiva, OSDI'18): early feedback for all jobs, with no durations known.

As things happen (`reaction.py`), for a job of gang g:

    1   the least loaded node that serves gangs of g and has room
    2   an empty node; from now on it serves gangs of g
    3   any node with room, or else the fewest nodes
    4   overload: turns of `quantum` seconds on the least loaded node that serves gangs of g, or else on the least loaded

Every `period` (`introspection.py`):

    packing     while more GPUs are asked for than there are: a waiting job joins a running one on its GPUs, for a trial.
                They stay together if Σ throughput beside the other ÷ throughput alone > 1; what was found is remembered
    migration   a gang spread over nodes is drawn together; nodes that are all but empty are emptied
    growth      elastic jobs take in idle GPUs of their node; they give them back before a job waits for them

Nothing is done, and no wake-up is asked for, while no job waits and looking around would change nothing. O(J + N) otherwise.
docs/algorithms/gandiva.md states it all.
"""

from dataclasses import dataclass, replace
from math import inf
from types import MappingProxyType

from poise.scheduler.model.cluster import NodeGpus, Site, site_of
from poise.scheduler.model.job_table import Snapshot
from poise.scheduler.model.plan import Claim, Plan
from poise.scheduler.model.units import next_round_end
from poise.scheduler.policies.gandiva.introspection import (
    Pairing,
    defragment,
    draw_together,
    fragments,
    grow,
    judge,
    known_pairs,
    pack,
    part,
)
from poise.scheduler.policies.gandiva.reaction import GandivaMemory, GandivaPlan, NodeMark, PlacedUnit, seat
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
            return Plan.changing((), (), self._next_look(snapshot, memory, mark)), memory
        plan = GandivaPlan(snapshot, memory)
        pairing = known_pairs(plan) if looks and (snapshot.is_contended or snapshot.placement.partner) else None
        if pairing is not None:
            judge(plan, pairing)
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
        self, plan: GandivaPlan, pairing: Pairing | None, mark: NodeMark, *, looks: bool
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
        wake = min(after.turn if plan.homes else inf, self._next_look(snapshot, after, mark, plan))
        answer = Plan.changing(tuple(plan.claims), tuple(plan.stops), wake)
        if plan.stops:
            # What is left over after all goes to the job that waits longest, and then to those that had to make room.
            rest = tuple(map(Claim, (*plan.waiting, *plan.stops)))
            answer = replace(answer, more=lambda _idle: rest)
        return answer, after

    @staticmethod
    def _next(snapshot: Snapshot, due: float, length: float) -> float:
        return due if due > snapshot.now else next_round_end(snapshot.origin, snapshot.now, length)

    def _next_look(
        self, snapshot: Snapshot, memory: GandivaMemory, mark: NodeMark, plan: GandivaPlan | None = None
    ) -> float:
        """When to look around, if that may change anything: a job waits, shares, is spread or may grow, or a node is
        fragmented.
        """
        if mark == memory.settled:
            return inf
        free = snapshot.placement.free() if plan is None else plan.draft.free
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
        elasticity="grows onto idle GPUs of the node, gives them back before anybody waits",
        verified="no pair while demand fits; a pair that loses is parted within a period; a shrink comes before a wait",
    ),
)
