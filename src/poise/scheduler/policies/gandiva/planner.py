"""Introspective scheduling (`gandiva`; Gandiva, OSDI'18): early feedback for everybody, without knowing how long they take.

As things happen (`reacting.py`), for a job of gang g:

    1   the least loaded node that serves gangs of g and has room
    2   an empty node; from now on it serves gangs of g
    3   any node with room, or else the fewest nodes
    4   overload: turns of `quantum` seconds on the least loaded node that serves gangs of g, or else on the least loaded

Every `period` (`introspecting.py`):

    packing     while more GPUs are asked for than there are: a waiting job joins a running one on its GPUs, for a trial.
                They stay together if Σ throughput beside the other ÷ throughput alone > 1; what was found is remembered
    migration   a gang spread over nodes is drawn together; nodes that are all but empty are emptied
    growth      elastic jobs take in idle GPUs of their node; they give them back before anybody waits for them

Nothing is done, and nobody is woken, while nobody waits and looking around would change nothing. O(J + N) when something is.
"""

from dataclasses import dataclass, replace
from functools import partial
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
from poise.scheduler.policies.gandiva.reaction import GandivaMemory, GandivaMoment, NodeMark, PlacedUnit, seat
from poise.scheduler.policies.listing import Capability, Family, Listing, Parameter, PolicyClaim, Traits, fraction, positive

# Turns on nodes where more jobs are at home than fit (Gandiva, OSDI'18 §3.1: suspend and resume).
#
# Who has waited longest comes first. Then those who run go on, the last to start first, as far as there is room; the others
# wait for the next turn. Gangs that no node holds take turns with all that is at home on their nodes.


def take_turns(moment: GandivaMoment) -> None:
    """The turns that begin now, on every node where somebody waits for one."""
    Turns(moment).take()


class Turns:
    """Turns in the making.

    guests   who waits at home on a node, longest first;  taken: nodes whose turn is settled
    """

    def __init__(self, moment: GandivaMoment) -> None:
        self._moment = moment
        self._claimed = moment.claimed().union(moment.stops, moment.snapshot.pinned)
        self._guests: dict[int, list[int]] = {}
        self._wide: list[int] = []
        self._taken: set[int] = set()
        for row in moment.waiting:
            home = moment.homes.get(row)
            if home is None or row in self._claimed:
                continue
            if len(home) > 1:
                self._wide.append(row)
            else:
                self._guests.setdefault(home[0], []).append(row)

    def take(self) -> None:
        """Wide gangs make room first, so that everybody at home there can be chosen from."""
        self._yield_nodes()
        for row in self._wide:
            self._seat_wide(row)
        for node, rows in self._guests.items():
            if node not in self._taken:
                self._rotate(node, rows)

    def _yield_nodes(self) -> None:
        """Running gangs on several nodes stop where somebody waits for one of these."""
        moment, floor = self._moment, self._moment.snapshot.placement
        awaited = {*self._guests, *(node for row in self._wide for node in moment.homes[row])}
        for row, holding in sorted(floor.holdings.items()):
            if len(holding) > 1 and row not in self._claimed and moment.columns.started[row] < moment.snapshot.now:
                other = floor.partner.get(row)
                is_paired = other is not None and (row > other or other in moment.snapshot.pinned)
                if awaited.intersection(slots.node for slots in holding) and not is_paired:
                    moment.stop((row,) if other is None else (row, other), tuple(slots.node for slots in holding))
                    moment.sketch.give(site_of(holding))

    def _seat_wide(self, row: int) -> None:
        """A gang takes its nodes, if nobody there has waited longer."""
        moment = self._moment
        site = moment.affinities.parts(moment.homes[row], moment.columns.gang[row])
        since = moment.columns.waiting_since
        first = min((since[rows[0]] for node, _ in site if (rows := self._guests.get(node))), default=since[row])
        if since[row] <= first and all(self._room(node) >= gpus for node, gpus in site):
            for node, gpus in site:
                self._clear(node, gpus)
            self._settle(row, site)

    def _units(self, node: int) -> list[PlacedUnit]:
        """Who runs there, and may be stopped; the last to start first."""
        units = self._moment.residents.get(node, ())
        able = [unit for unit in units if not self._claimed.intersection(unit.rows)]
        return sorted(able, key=lambda unit: (-unit.since, unit.rows))

    def _room(self, node: int) -> int:
        """GPUs of a node that can be given to others; none once its turn is settled."""
        if node in self._taken:
            return 0
        return self._moment.sketch.free[node] + sum(unit.gpus for unit in self._units(node))

    def _clear(self, node: int, gpus: int) -> None:
        """Stop who has run longest until so many GPUs are free."""
        units = self._units(node)
        while self._moment.sketch.free[node] < gpus:
            self._stop(units.pop(), node)

    def _stop(self, unit: PlacedUnit, node: int) -> None:
        self._moment.stop(unit.rows, (node,))
        self._moment.sketch.give((NodeGpus(node, unit.gpus),))

    def _settle(self, row: int, site: Site) -> None:
        gang = self._moment.columns.gang[row]
        self._moment.affinities.take(site, gang)
        self._moment.move(row, gang, site)
        self._taken.update(node for node, _ in site)

    def _rotate(self, node: int, guests: list[int]) -> None:
        """The turn of a node."""
        room = self._room(node)
        chosen: list[int] = []
        for row in guests:
            gang = self._moment.columns.gang[row]
            if gang <= room:
                room -= gang
                chosen.append(row)
        for unit in self._units(node) if chosen else ():
            if unit.gpus <= room:
                room -= unit.gpus
            else:
                self._stop(unit, node)
        for row in chosen:
            self._settle(row, (NodeGpus(node, self._moment.columns.gang[row]),))


@dataclass(frozen=True, slots=True)
class Gandiva:
    """Seconds: `quantum` of a turn, `period` between looks around; a node is fragmented if this part of it is free."""

    quantum: float = 60.0
    period: float = 300.0
    fragmented: float = 0.75

    def start(self) -> GandivaMemory:
        """Nobody has come yet."""
        return GandivaMemory(turn=-inf, look=-inf)

    def plan(self, snapshot: Snapshot, memory: GandivaMemory) -> tuple[Plan, GandivaMemory]:
        """What is to be changed now, and when to look again."""
        memory = _having_seen(memory, snapshot)
        mark = NodeMark(memory.seen, len(snapshot.active), snapshot.idle)
        looks = memory.look <= snapshot.now and mark != memory.settled
        if not (snapshot.is_contended or looks or snapshot.placement.partner):
            return Plan.changing((), (), self._next_look(snapshot, memory, mark)), memory
        moment = GandivaMoment(snapshot, memory)
        pairing = known_pairs(moment) if looks and (snapshot.is_contended or snapshot.placement.partner) else None
        if pairing is not None:
            judge(moment, pairing)
        if snapshot.is_contended:
            seat(moment)
            if pairing is not None and moment.demand > snapshot.gpus:
                pack(moment, pairing)
            if memory.homes and memory.turn <= snapshot.now:
                take_turns(moment)
        elif looks:
            self._look(moment)
        if moment.demand <= snapshot.gpus:
            part(moment)
        return self._answered(moment, pairing, mark, looks=looks)

    def _look(self, moment: GandivaMoment) -> None:
        """Nobody waits: draw together what is spread, and use what is idle."""
        since = moment.snapshot.now - self.period
        draw_together(moment, since)
        defragment(moment, self.fragmented, since)
        if moment.habits.is_elastic:
            grow(moment, since)

    def _answered(
        self, moment: GandivaMoment, pairing: Pairing | None, mark: NodeMark, *, looks: bool
    ) -> tuple[Plan, GandivaMemory]:
        """The plan, and what is to be remembered of it."""
        memory, snapshot = moment.habits, moment.snapshot
        is_still = not (moment.claims or moment.stops or moment.is_early or pairing)
        after = replace(
            memory,
            affinity=moment.affinity(),
            homes=MappingProxyType(moment.homes),
            spread=frozenset(moment.spread),
            verdicts=memory.verdicts if pairing is None else MappingProxyType(pairing.verdicts),
            turn=self._next(snapshot, memory.turn, self.quantum),
            look=self._next(snapshot, memory.look, self.period),
            settled=memory.settled if not looks else mark if is_still else None,
        )
        wake = min(after.turn if moment.homes else inf, self._next_look(snapshot, after, mark, moment))
        plan = Plan.changing(tuple(moment.claims), tuple(moment.stops), wake)
        return (replace(plan, more=partial(_rest, moment)) if moment.stops else plan), after

    @staticmethod
    def _next(snapshot: Snapshot, due: float, length: float) -> float:
        return due if due > snapshot.now else next_round_end(snapshot.origin, snapshot.now, length)

    def _next_look(
        self, snapshot: Snapshot, memory: GandivaMemory, mark: NodeMark, moment: GandivaMoment | None = None
    ) -> float:
        """When to look around, if that may change anything: somebody waits, shares, is spread or may grow, or there are
        fragments.
        """
        if mark == memory.settled:
            return inf
        free = snapshot.placement.free() if moment is None else moment.sketch.free
        may_help = memory.homes or snapshot.placement.partner or memory.spread or memory.is_elastic
        return memory.look if may_help or fragments(free, snapshot.placement, self.fragmented) else inf


LISTING = Listing(
    "gandiva",
    Family.MARKET,
    "nodes serve gangs of one size; turns of a minute under overload; pairs by trial, migration, growth",
    "Xiao et al., Gandiva, OSDI'18",
    (PolicyClaim.NO_DURATIONS, PolicyClaim.WORK_CONSERVING),
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


def _having_seen(memory: GandivaMemory, snapshot: Snapshot) -> GandivaMemory:
    """The same, with the jobs that have come since."""
    columns = snapshot.columns
    arrived = range(memory.seen, len(columns.ids))
    if not arrived:
        return memory
    elastic = memory.is_elastic or any(columns.most[row] > columns.gang[row] for row in arrived)
    return replace(memory, seen=arrived.stop, is_elastic=elastic)


def _rest(moment: GandivaMoment, _idle: tuple[int, ...]) -> tuple[Claim, ...]:
    """What is left over after all goes to whoever waits longest, and then to those who had to make room."""
    return tuple(map(Claim, (*moment.waiting, *moment.stops)))
