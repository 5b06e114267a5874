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
from typing import ClassVar

from poise.model.columns import Snapshot
from poise.model.grid import end_after
from poise.model.plan import Claim, Plan
from poise.policies.gandiva.introspecting import (
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
from poise.policies.gandiva.reacting import Habits, Mark, Moment, seat
from poise.policies.gandiva.turns import take_turns


@dataclass(frozen=True, slots=True)
class Gandiva:
    """Seconds: `quantum` of a turn, `period` between looks around; a node is fragmented if this part of it is free."""

    shares_gpus: ClassVar[bool] = True

    quantum: float = 60.0
    period: float = 300.0
    fragmented: float = 0.75

    def start(self) -> Habits:
        """Nobody has come yet."""
        return Habits(turn=-inf, look=-inf)

    def plan(self, snapshot: Snapshot, memory: Habits) -> tuple[Plan, Habits]:
        """What is to be changed now, and when to look again."""
        memory = _having_seen(memory, snapshot)
        mark = Mark(memory.seen, len(snapshot.active), snapshot.idle)
        looks = memory.look <= snapshot.now and mark != memory.settled
        if not (snapshot.is_contended or looks or snapshot.floor.partner):
            return Plan.changing((), (), self._next_look(snapshot, memory, mark)), memory
        moment = Moment(snapshot, memory)
        pairing = known_pairs(moment) if looks and (snapshot.is_contended or snapshot.floor.partner) else None
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

    def _look(self, moment: Moment) -> None:
        """Nobody waits: draw together what is spread, and use what is idle."""
        since = moment.snapshot.now - self.period
        draw_together(moment, since)
        defragment(moment, self.fragmented, since)
        if moment.habits.is_elastic:
            grow(moment, since)

    def _answered(self, moment: Moment, pairing: Pairing | None, mark: Mark, *, looks: bool) -> tuple[Plan, Habits]:
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
        return due if due > snapshot.now else end_after(snapshot.origin, snapshot.now, length)

    def _next_look(self, snapshot: Snapshot, memory: Habits, mark: Mark, moment: Moment | None = None) -> float:
        """When to look around, if that may change anything: somebody waits, shares, is spread or may grow, or there are
        fragments.
        """
        if mark == memory.settled:
            return inf
        free = snapshot.floor.free() if moment is None else moment.sketch.free
        may_help = memory.homes or snapshot.floor.partner or memory.spread or memory.is_elastic
        return memory.look if may_help or fragments(free, snapshot.floor, self.fragmented) else inf


def _having_seen(memory: Habits, snapshot: Snapshot) -> Habits:
    """The same, with the jobs that have come since."""
    columns = snapshot.columns
    arrived = range(memory.seen, len(columns.ids))
    if not arrived:
        return memory
    elastic = memory.is_elastic or any(columns.most[row] > columns.gang[row] for row in arrived)
    return replace(memory, seen=arrived.stop, is_elastic=elastic)


def _rest(moment: Moment, _idle: tuple[int, ...]) -> tuple[Claim, ...]:
    """What is left over after all goes to whoever waits longest, and then to those who had to make room."""
    return tuple(map(Claim, (*moment.waiting, *moment.stops)))
