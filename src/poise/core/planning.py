"""How a planner's plans are asked for and carried out, each as a whole; `answering.py` says what the scheduler expects."""

from dataclasses import replace
from math import inf
from typing import Any

from poise.core.candidates import PlanCandidates
from poise.core.granting import Desk, grant
from poise.core.state import State
from poise.model.plan import Plan, Planner, Preemption, Stops


class PlannerAnswering:
    """Freezes a snapshot and asks for a whole plan at each decision."""

    drifts = False

    def __init__(self, planner: Planner, state: State) -> None:
        self._planner = planner
        self._state = state
        self._memory: Any = planner.start()
        self._wake = inf

    def arrived(self, row: int, now: float) -> None:
        """The next snapshot will show it."""

    started = preempted = interrupted = reported = ended = arrived

    def catch_up(self, now: float) -> None:
        """Nothing is put off."""

    def opened(self) -> None:
        """Every plan looks at everybody."""

    def refresh(self, now: float) -> bool:
        """There are no ranks."""
        return False

    def is_due(self, now: float) -> bool:
        """The moment has come that the last plan named."""
        return self._wake <= now

    def is_idle(self) -> bool:
        """Nobody is there to plan for."""
        return not self._state.active

    def decide(self, now: float, desk: Desk, allowed: Preemption) -> None:
        """Plan, stop what the plan leaves out, then grant its claims in order."""
        state = self._state
        plan, self._memory = self._planner.plan(state.snapshot(now), self._memory)
        self._wake = plan.wake
        desk.remarks = plan.remarks
        evicted: set[int] = set()
        if allowed is Preemption.BY_RANK:
            for row in self._to_stop(plan):
                if desk.may_preempt(row):
                    desk.evict(row, state.of(row), state.ledger.partner.get(row))
                    evicted.add(row)
        preemption = plan.preemption if allowed is Preemption.BY_RANK else allowed
        grant(PlanCandidates(plan, preemption, state.ledger.rows() - evicted, state.shape), desk, state)
        for claim in plan.claims:
            if claim.beside is not None:
                self._join(claim.beside, claim.row, desk)
        if plan.stopping is Stops.FOR_OTHERS:
            desk.settle_stops(evicted, state.ledger.partner)
        if any(state.free.idle) and (more := plan.more(tuple(state.free.idle))):
            further = replace(plan, claims=more)
            holds = desk.holders(state.ledger.rows())
            grant(PlanCandidates(further, Preemption.NEVER, holds, state.shape), desk, state)

    def _join(self, row: int, other: int, desk: Desk) -> None:
        """Put a job beside another one, if that one has GPUs for itself now and the job has none."""
        state = self._state
        holding = desk.after[other] if other in desk.after else state.ledger.held_by(other)
        holds = desk.after[row] if row in desk.after else state.ledger.held_by(row)
        partner = state.ledger.partner.get(other)
        is_alone = partner is None or (partner in desk.before and desk.after[partner] is None)
        if holding is not None and holds is None and is_alone:
            desk.join(row, other, holding)

    def _to_stop(self, plan: Plan) -> list[int]:
        """Running jobs that are not to go on, or not where they are; ascending."""
        state = self._state
        holds = state.ledger.rows()
        moved = (claim.row for claim in plan.claims if claim.types and claim.row in holds and not state.allows(claim))
        stops = holds.difference(claim.row for claim in plan.claims) if plan.stops is None else plan.stops
        return sorted({*moved, *stops})

    def settle(self, now: float) -> bool:
        """Some planners look a second time, at who runs now."""
        return self._wake <= now

    def next_change(self) -> float:
        """The moment that the last plan named, if anybody is there to plan for."""
        return self._wake if self._state.active else inf
