"""The driver of a policy that plans: at each decision it freezes a snapshot, asks for a whole plan and grants its claims."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import islice
from math import inf
from typing import Any, Protocol, runtime_checkable

from poise.scheduler.core.claim_shapes import ClaimShape
from poise.scheduler.core.decision import DecisionDraft, Defragmenting, PlannedClaims, grant
from poise.scheduler.core.rank_index import Tie
from poise.scheduler.core.state import SchedulerState
from poise.scheduler.model.cluster import is_whole
from poise.scheduler.model.plan import Claim, Grain, Plan, Planner, PreemptionRule, StopMode, Unfitting

Thinking = Callable[[], AbstractContextManager[object]]
"""A context that is entered while a plan is made. The state does not change in it, so that other threads may read it."""


@runtime_checkable
class PlanPause(Protocol):
    """A planner that can often tell without a snapshot, which costs time where there are many jobs, that nothing changes."""

    def unchanged_plan(self, now: float, origin: float, memory: Any, *, may_fill: bool) -> Plan | None:  # noqa: ANN401
        """A plan that changes nothing; None if a whole one has to be made. `may_fill`: GPUs are free and a job waits."""


class PlanDriver:
    """Asks for a whole plan at each decision; what happened since the last one shows in the snapshot.

    _plan         the plan of the decision under way
    _wake         when the last plan wants to be replaced
    _over_share   jobs that would exceed their tenant's share under the last plan
    """

    drifts = False

    def __init__(
        self, planner: Planner, state: SchedulerState, defragment: Defragmenting | None, thinking: Thinking
    ) -> None:
        self._thinking = thinking
        self._planner = planner
        self._defragment = defragment
        self._state = state
        self._pausing = planner if isinstance(planner, PlanPause) else None
        self._memory: Any = planner.start()
        self._wake = inf
        self._plan: Plan | None = None
        self._over_share: tuple[int, ...] = ()

    def arrived(self, row: int, now: float) -> None:
        """Do nothing: the next snapshot shows it."""

    started = preempted = interrupted = reported = reshaped = ended = arrived

    def catch_up(self, now: float) -> None:
        """Do nothing: nothing is put off."""

    def opened(self) -> None:
        """Do nothing: every plan looks at all jobs."""

    def refresh(self, now: float) -> bool:
        """There are no ranks that could change."""
        return False

    def is_due(self, now: float) -> bool:
        """Say whether the time has come that the last plan named."""
        return self._wake <= now

    def is_idle(self) -> bool:
        """Say whether there is no job to plan for."""
        return not self._state.active

    def decide(self, now: float, draft: DecisionDraft, allowed: PreemptionRule) -> None:
        """Plan, stop what the plan leaves out, then grant its claims in order.

        1  free the GPUs of jobs that their app gives up
        2  stop running jobs that the plan leaves out or wants elsewhere, unless they are protected
        3  grant the claims in order, then put jobs beside others, then start tasks; a gang whose GPUs come in units may
           find a place only if others move (`_place_units`)
        4  let stopped jobs go on whose GPUs no claim took, if the plan stops jobs only for others
        5  offer what is still idle to the claims that the plan makes for that case
        """
        state = self._state
        plan = self._plan = self._next_plan(now)
        self._wake = plan.wake
        draft.notes = plan.notes
        tasks = [claim for claim in plan.claims if claim.grain is Grain.TASK]
        if tasks:
            plan = replace(plan, claims=tuple(claim for claim in plan.claims if claim.grain is Grain.LEASE))
        draft.sites = {claim.row: claim.site for claim in plan.claims if claim.site is not None}
        draft.mixes = {claim.row: claim.mix for claim in plan.claims if claim.mix is not None}
        evicted, kept = self._stop(plan, draft, allowed)
        preemption = plan.preemption if allowed is PreemptionRule.BY_RANK else allowed
        holds = (state.ledger.rows() - evicted).union(row for row, _ in draft.ends)
        shape = partial(self._shape, now)
        grant(PlannedClaims(plan, preemption, holds, shape), draft, state, self._defragment)
        self._place_units(plan, draft, shape, allowed)
        for claim in plan.claims:
            if claim.beside is not None:
                self._join(claim.beside, claim.row, draft)
        for claim in tasks:
            if claim.site is not None:
                draft.start_tasks_at(claim.row, claim.site)
            elif claim.mix is not None:
                draft.start_tasks(claim.row, claim.mix)
        if plan.stopping is StopMode.FOR_OTHERS:
            draft.settle_stops(evicted, state.ledger.partner, kept)
        if any(state.free.idle) and (more := plan.more(tuple(state.free.idle))):
            draft.sites |= {claim.row: claim.site for claim in more if claim.site is not None}
            draft.mixes |= {claim.row: claim.mix for claim in more if claim.mix is not None}
            lost = (row for row, after in draft.after.items() if after is None)
            holds = state.ledger.rows().union(draft.after).difference(lost)
            grant(PlannedClaims(replace(plan, claims=more), PreemptionRule.NEVER, holds, shape), draft, state)

    def _next_plan(self, now: float) -> Plan:
        state = self._state
        if self._pausing is not None and state.origin is not None:
            may_fill = bool(state.waiting_shapes) and any(state.free.idle)
            plan = self._pausing.unchanged_plan(now, state.origin, self._memory, may_fill=may_fill)
            if plan is not None:
                return plan
        placeless = state.placeless()
        if placeless and self._pausing is None:
            if len(placeless) == len(state.active):
                return Plan.changing()
            snapshot = state.snapshot(now, hidden=placeless)
        else:  # a policy by shares sees in the workload that it has no speed
            snapshot = state.snapshot(now, placeless)
        with self._thinking():
            plan, self._memory = self._planner.plan(snapshot, self._memory)
        if not state.in_units:
            return plan
        more = plan.more
        return replace(
            plan, claims=tuple(map(self._whole, plan.claims)), more=lambda idle: tuple(map(self._whole, more(idle)))
        )

    def _shape(self, now: float, claim: Claim) -> ClaimShape:
        """The shape of a claim. A waiting job requires locality as long as delay scheduling says, whatever the plan asks."""
        locality = self._state.required_locality(claim.row, now, claim.locality)
        return self._state.shape(claim.row, locality, claim.types, claim.gpus)

    def _whole(self, claim: Claim) -> Claim:
        """The claim in whole units of its job. A site that divides one gives way to any place, of its own type first."""
        columns = self._state.columns
        unit, gpus, site = columns.unit[claim.row], claim.gpus, claim.site
        if unit == 1:
            return claim
        if site is not None and any(part.gpus % unit for part in site):
            named = self._state.topology.type_of[site[0].node]
            others = (each for each in self._state.profile_of[claim.row].types if each != named)
            claim = claim._replace(site=None, types=(named, *others))
            gpus = sum(part.gpus for part in site)
        if gpus is not None and gpus % unit:
            gpus = max(gpus - gpus % unit, columns.least[claim.row])
        return claim._replace(gpus=gpus)

    def _place_units(
        self, plan: Plan, draft: DecisionDraft, shape: Callable[[Claim], ClaimShape], allowed: PreemptionRule
    ) -> None:
        """Serve claims that planners, which count GPUs, took to fit, and that do not fit because units cannot be divided.

        A gang in units gets what it asks for, or fewer units if it can do with fewer. Running jobs move for it under a plan
        that stops jobs to make room for others. A claim whose site was given to such a gang is placed anywhere on the same
        type.
        """
        state = self._state
        if not state.in_units or plan.unfitting is Unfitting.BLOCKS:
            return
        ended = {row for row, _ in draft.ends}
        may_move = allowed is PreemptionRule.BY_RANK and plan.stopping is StopMode.FOR_OTHERS
        for claim in plan.claims:
            row, unit = claim.row, state.columns.unit[claim.row]
            holds = draft.after[row] if row in draft.after else state.ledger.held_by(row)
            if holds is not None or row in ended or claim.mix is not None or (unit == 1 and claim.site is None):
                continue
            if claim.site is not None:
                draft.sites.pop(row, None)
                named = state.topology.type_of[claim.site[0].node]
                gpus = sum(part.gpus for part in claim.site)
                claim = claim._replace(site=None, types=(named,), gpus=gpus)
            if unit == 1:
                draft.seat(row, shape(claim))
            elif not self._finds_place(claim, draft, shape) and may_move:
                self._moves_others(claim, draft, shape)

    def _finds_place(self, claim: Claim, draft: DecisionDraft, shape: Callable[[Claim], ClaimShape]) -> bool:
        """Give a gang in units free GPUs, fewer than it asks for if it can do with fewer, of another type if need be."""
        row, columns = claim.row, self._state.columns
        numbers = range(claim.gpus or columns.gang[row], columns.least[row] - 1, -columns.unit[row])
        claims = (each._replace(gpus=gpus) for each in (claim, claim._replace(types=None)) for gpus in numbers)
        return any(draft.seat(row, shape(each)) for each in claims)

    def _moves_others(self, claim: Claim, draft: DecisionDraft, shape: Callable[[Claim], ClaimShape]) -> bool:
        """Give a gang in units the fewest GPUs that it can do with, by moving running jobs."""
        least = claim._replace(gpus=self._state.columns.least[claim.row])
        return any(draft.move_for(claim.row, shape(each), self._state) for each in (least, least._replace(types=None)))

    def _join(self, row: int, other: int, draft: DecisionDraft) -> None:
        """Put a job beside another one, if that one holds GPUs alone now, none of them closed, and the job holds none."""
        state = self._state
        holding = draft.after[other] if other in draft.after else state.ledger.held_by(other)
        holds = draft.after[row] if row in draft.after else state.ledger.held_by(row)
        partner = state.ledger.partner.get(other)
        is_alone = partner is None or (partner in draft.before and draft.after[partner] is None)
        if holding is None or holds is not None or not is_alone:
            return
        if state.free.is_open(holding) and is_whole(holding, state.columns.unit[row]):
            draft.join(row, other, holding)

    def _stop(self, plan: Plan, draft: DecisionDraft, allowed: PreemptionRule) -> tuple[set[int], set[int]]:
        """Take the GPUs of jobs that are given up, and of those that the plan stops; return the latter, and those spared."""
        state = self._state
        draft.ends = tuple(ending for ending in plan.ends if ending.row in state.active)
        for row, _ in draft.ends:
            if state.running(row):
                draft.evict(row, state.of(row), state.ledger.partner.get(row))
        evicted: set[int] = set()
        kept: set[int] = set()
        if allowed is not PreemptionRule.BY_RANK:
            return evicted, kept
        holds = state.ledger.rows()
        named = (claim.row for claim in plan.claims)
        stops = holds.difference(named) if plan.stops is None else holds.intersection(plan.stops)
        for claim in plan.claims:
            # A claim for its gang anywhere moves no running job.
            names_gpus = not (claim.types is None and claim.gpus is None and claim.site is None and claim.mix is None)
            if names_gpus and claim.row in holds and not state.allows(claim):
                stops.add(claim.row)
        for row in sorted(stops.difference(row for row, _ in plan.ends)):
            if draft.may_preempt(row):
                draft.evict(row, state.of(row), state.ledger.partner.get(row))
                evicted.add(row)
            else:
                kept.add(row)
        return evicted, kept

    def settle(self, now: float) -> bool:
        """Let waiting jobs wait with the shapes of their claims; say whether the planner wants a second look now."""
        state = self._state
        if self._plan is not None:
            plan, self._plan = self._plan, None
            for claim in plan.claims:
                if claim.site is None and state.waits(claim.row):
                    state.clocks.change(claim.row, self._shape(now, claim), now)
            for row in set(self._over_share).difference(plan.over_share) if plan.over_share is not self._over_share else ():
                if state.waits(row) and state.shape_of[row].is_over_share:
                    state.clocks.change(row, state.default_shape(row, now), now)
            self._over_share = plan.over_share
            for row in plan.over_share:
                if state.waits(row):
                    state.clocks.change(row, state.over_share(state.shape_of[row]), now)
        return self._wake <= now

    def line(self, most: int) -> list[int]:
        """Rows of the first waiting jobs by submission: a plan has no lasting order."""
        return list(islice(filter(self._state.waits, self._state.active), most))

    def place(self, row: int) -> tuple[float | Tie, ...]:
        """Where a waiting job stands: by submission."""
        return (row,)

    def next_change(self) -> float:
        """The time that the last plan named, if there are jobs to plan for."""
        return self._wake if self._state.active else inf
