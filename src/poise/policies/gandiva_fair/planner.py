"""Gandiva_fair (Chaudhary et al., EuroSys'20): fair GPU time for tenants, gangs whole, and trade between GPU types.

    tickets        t_u of tenant u, water-filled over demand into GPUs of each type, divided over its jobs (`tickets.py`)
    trade          tenants exchange fast GPUs for slow ones at a second price, by speed-ups seen in their own jobs
                   (`entitling.py`, `trading.py`)
    homes          each job lives on one node, or a few if its gang spans them, by ticket load; few moves (`balancing.py`)
    split stride   every quantum each pool of GPUs of one type decides who runs, whole gangs at home, the furthest behind
                   first within the budgets of their tenants (`split_stride.py`, `accounts.py`); where that leaves tenants
                   uneven or GPUs idle, the gangs that do so least (`choosing.py`)

While nobody waits there are no quanta: a job that fits goes to the tightest free place, and may move to a faster type that
stands idle (`upgrading.py`). Inside a quantum free GPUs go to those who wait and nobody is stopped. A quantum costs
O(J log J) for J jobs (`slicing.py`), and more where gangs are chosen.
"""

from dataclasses import dataclass, replace
from types import MappingProxyType

from poise.model.columns import Snapshot
from poise.model.plan import Claim, Plan
from poise.policies.gandiva_fair.entitling import Profiling, Trading, with_running
from poise.policies.gandiva_fair.slicing import Rules, Slices, Slicing
from poise.policies.gandiva_fair.tickets import Division
from poise.policies.sketch import Sketch
from poise.policies.upgrading import upgrades


def gandiva_fair(
    tickets: tuple[tuple[str, float], ...] = (),
    quantum: float = 60.0,
    division: Division = Division.GANG,
    trade: Trading = Trading.ON,
    profile: Profiling = Profiling.RUNNING,
    rest: float = 300.0,
    cost: float = 60.0,
) -> "GandivaFair":
    """The policy with these parameters; `Rules` says what they mean."""
    return GandivaFair(Rules(tickets, quantum, division, trade, profile, rest, cost))


@dataclass(frozen=True, slots=True)
class GandivaFair:
    """Time slices in proportion to tenants' tickets, by type of GPU as traded."""

    rules: Rules

    def start(self) -> Slices:
        """Nobody has run."""
        return Slices()

    def plan(self, snapshot: Snapshot, memory: Slices) -> tuple[Plan, Slices]:
        """Nothing while nobody waits; free places at once; time slices where there are not enough."""
        if not snapshot.is_contended:
            return self._calm(snapshot, memory)
        if memory.accounts is None and len(snapshot.idle) == 1:
            claims = _at_once(snapshot)
            if claims is not None:
                return Plan.changing(claims), memory
        return Slicing(self.rules, snapshot, memory).plan()

    def _calm(self, snapshot: Snapshot, memory: Slices) -> tuple[Plan, Slices]:
        """Nobody waits: nobody is behind. Where there are several types, jobs may get onto faster ones that stand idle."""
        if memory.accounts is not None:
            memory = Slices(moved=memory.moved, seen=memory.seen, told=memory.told)
        if len(snapshot.idle) == 1 or not any(snapshot.idle):
            return Plan.changing(), memory
        seen = with_running(snapshot, memory.seen)
        known = seen if self.rules.profile is Profiling.RUNNING else None
        rules = self.rules
        claims, later = upgrades(snapshot, rest=rules.rest, cost=rules.cost, seen=known, moved=memory.moved)
        moved = {row: moment for row, moment in memory.moved.items() if row in snapshot.floor.holdings}
        moved |= {claim.row: snapshot.now for claim in claims}
        return Plan.changing(claims, wake=later), replace(memory, seen=seen, moved=MappingProxyType(moved))


def _at_once(snapshot: Snapshot) -> tuple[Claim, ...] | None:
    """Everybody who waits on the tightest free node, or nodes if none could ever hold the gang; None if they do not fit."""
    waiting = snapshot.rows[~snapshot.running].tolist()
    if sum(snapshot.columns.gang[row] for row in waiting) > snapshot.idle[0]:
        return None
    sketch = Sketch(snapshot.floor)
    largest = sketch.topology.largest_node(0)
    claims = []
    for row in waiting:
        gang = snapshot.columns.gang[row]
        site = sketch.tightest(0, gang)
        if site is None or (len(site) > 1 and gang <= largest):
            return None
        sketch.take(site)
        claims.append(Claim(row, site=site))
    return tuple(claims)
