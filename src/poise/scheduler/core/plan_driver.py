"""How a planner's plans are asked for and carried out, each as a whole; `driver.py` says what the scheduler expects."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import islice
from math import inf
from typing import Any, Protocol, runtime_checkable

from poise.scheduler.core.claim_shapes import ClaimShape
from poise.scheduler.core.decision import Clearing, DecisionDraft, PlannedClaims, grant
from poise.scheduler.core.rank_index import Tie
from poise.scheduler.core.state import SchedulerState
from poise.scheduler.model.plan import Claim, Grain, Plan, Planner, PreemptionRule, StopMode

Thinking = Callable[[], AbstractContextManager[object]]
"""Entered while a plan is made: nothing of the state changes meanwhile, so that others may look at it."""


@runtime_checkable
class PlanPause(Protocol):
    """A planner that may know without a picture of all jobs, which costs time where there are many, that nothing changes."""

    def rest(self, now: float, origin: float, memory: Any, *, may_fill: bool) -> Plan | None:  # noqa: ANN401
        """The plan that changes nothing; None: a whole one has to be made. `may_fill`: GPUs are free and somebody waits."""


class PlanDriver:
    """Freezes a snapshot and asks for a whole plan at each decision."""

    drifts = False

    def __init__(self, planner: Planner, state: SchedulerState, clear: Clearing | None, thinking: Thinking) -> None:
        self._thinking = thinking
        self._planner = planner
        self._clear = clear
        self._state = state
        self._resting = planner if isinstance(planner, PlanPause) else None
        self._memory: Any = planner.start()
        self._wake = inf
        self._plan: Plan | None = None
        self._held: tuple[int, ...] = ()

    def arrived(self, row: int, now: float) -> None:
        """The next snapshot will show it."""

    started = preempted = interrupted = reported = reshaped = ended = arrived

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

    def decide(self, now: float, draft: DecisionDraft, allowed: PreemptionRule) -> None:
        """Plan, stop what the plan leaves out, then grant its claims in order."""
        state = self._state
        plan = self._plan = self._planned(now)
        self._wake = plan.wake
        draft.notes = plan.notes
        tasks = [claim for claim in plan.claims if claim.grain is Grain.TASK]
        if tasks:
            plan = replace(plan, claims=tuple(claim for claim in plan.claims if claim.grain is Grain.LEASE))
        draft.sites = {claim.row: claim.site for claim in plan.claims if claim.site is not None}
        draft.mixes = {claim.row: claim.mix for claim in plan.claims if claim.mix is not None}
        self._give_up(plan, draft)
        evicted: set[int] = set()
        kept: set[int] = set()
        if allowed is PreemptionRule.BY_RANK:
            for row in self._to_stop(plan):
                if draft.may_preempt(row):
                    draft.evict(row, state.of(row), state.ledger.partner.get(row))
                    evicted.add(row)
                else:
                    kept.add(row)
        preemption = plan.preemption if allowed is PreemptionRule.BY_RANK else allowed
        holds = state.ledger.rows() - evicted
        shape = partial(self._shape, now)
        grant(PlannedClaims(plan, preemption, holds.union(row for row, _ in draft.ends), shape), draft, state, self._clear)
        for claim in plan.claims:
            if claim.beside is not None:
                self._join(claim.beside, claim.row, draft)
        for claim in tasks:
            self._start_tasks(claim, draft)
        if plan.stopping is StopMode.FOR_OTHERS:
            draft.settle_stops(evicted, state.ledger.partner, kept)
        if any(state.free.idle) and (more := plan.more(tuple(state.free.idle))):
            further = replace(plan, claims=more)
            draft.sites |= {claim.row: claim.site for claim in more if claim.site is not None}
            draft.mixes |= {claim.row: claim.mix for claim in more if claim.mix is not None}
            holds = draft.holders(state.ledger.rows())
            grant(PlannedClaims(further, PreemptionRule.NEVER, holds, shape), draft, state)

    def _planned(self, now: float) -> Plan:
        plan = self._at_rest(now)
        if plan is None:
            snapshot = self._state.snapshot(now)
            with self._thinking():
                plan, self._memory = self._planner.plan(snapshot, self._memory)
        return plan

    def _at_rest(self, now: float) -> Plan | None:
        """A plan that changes nothing, if the planner can tell that there is no other."""
        state = self._state
        if self._resting is None or state.origin is None:
            return None
        may_fill = bool(state.waiting_shapes) and any(state.free.idle)
        return self._resting.rest(now, state.origin, self._memory, may_fill=may_fill)

    @staticmethod
    def _start_tasks(claim: Claim, draft: DecisionDraft) -> None:
        if claim.site is not None:
            draft.start_tasks_at(claim.row, claim.site)
        elif claim.mix is not None:
            draft.start_tasks(claim.row, claim.mix)

    def _shape(self, now: float, claim: Claim) -> ClaimShape:
        """What a claim is for; a job that waits for locality insists on it whatever the plan says."""
        locality = self._state.required_locality(claim.row, now, claim.locality)
        return self._state.shape(claim.row, locality, claim.types, claim.gpus)

    def _say_why(self, plan: Plan, now: float) -> None:
        """Jobs that wait now wait for what their claims ask for, or for their tenant's share."""
        state = self._state
        for claim in plan.claims:
            if claim.site is None and state.waits(claim.row):
                state.clocks.change(claim.row, self._shape(now, claim), now)
        for row in set(self._held).difference(plan.held) if plan.held is not self._held else ():
            if state.waits(row) and state.shape_of[row].is_held:
                state.clocks.change(row, state.default_shape(row, now), now)
        self._held = plan.held
        for row in plan.held:
            if state.waits(row):
                state.clocks.change(row, state.held_back(state.shape_of[row]), now)

    def _give_up(self, plan: Plan, draft: DecisionDraft) -> None:
        """Jobs that their app wants no more make room first."""
        draft.ends = tuple(ending for ending in plan.ends if ending.row in self._state.active)
        for row, _ in draft.ends:
            if self._state.running(row):
                draft.evict(row, self._state.of(row), self._state.ledger.partner.get(row))

    def _join(self, row: int, other: int, draft: DecisionDraft) -> None:
        """Put a job beside another one, if that one has GPUs for itself now and the job has none."""
        state = self._state
        holding = draft.after[other] if other in draft.after else state.ledger.held_by(other)
        holds = draft.after[row] if row in draft.after else state.ledger.held_by(row)
        partner = state.ledger.partner.get(other)
        is_alone = partner is None or (partner in draft.before and draft.after[partner] is None)
        if holding is not None and holds is None and is_alone:
            draft.join(row, other, holding)

    def _to_stop(self, plan: Plan) -> list[int]:
        """Running jobs that are not to go on, or not where they are; ascending."""
        state = self._state
        holds = state.ledger.rows()
        moved = (claim.row for claim in plan.claims if claim.row in holds and _may_move(claim) and not state.allows(claim))
        stops = (
            holds.difference(claim.row for claim in plan.claims) if plan.stops is None else holds.intersection(plan.stops)
        )
        return sorted({*moved, *stops}.difference(row for row, _ in plan.ends))

    def settle(self, now: float) -> bool:
        """Say why others wait. Some planners look a second time, at who runs now."""
        if self._plan is not None:
            self._say_why(self._plan, now)
            self._plan = None
        return self._wake <= now

    def line(self, most: int) -> list[int]:
        """By submission: a plan is made anew each time."""
        return list(islice(filter(self._state.waits, self._state.active), most))

    def place(self, row: int) -> tuple[float | Tie, ...]:
        """By submission."""
        return (row,)

    def next_change(self) -> float:
        """The moment that the last plan named, if anybody is there to plan for."""
        return self._wake if self._state.active else inf


def _may_move(claim: Claim) -> bool:
    """The claim says more than that the job is to have its gang somewhere."""
    return claim.types is not None or claim.gpus is not None or claim.site is not None or claim.mix is not None
