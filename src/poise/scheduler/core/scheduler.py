"""The scheduler: `handle` takes the facts of one instant and answers with wishes.

One instant: take the facts in · take in what time has changed · decide, if this is a moment to decide · verify the decision
and carry it into the tables · say what changed, preemptions before the launches they make room for · ask to be woken.
"""

from collections.abc import Iterable
from contextlib import nullcontext
from functools import partial
from math import inf
from typing import assert_never

from poise.scheduler.core.decision import DecisionDraft
from poise.scheduler.core.defragmenter import clearing_of
from poise.scheduler.core.lifecycle import Absence, Carrying, Enacting, computed
from poise.scheduler.core.locality_waits import LocalityWaits
from poise.scheduler.core.plan_driver import PlanDriver, Thinking
from poise.scheduler.core.rank_driver import PolicyDriver, RankDriver
from poise.scheduler.core.reasons import Reason, explain
from poise.scheduler.core.settings import Cadence, RetryRule, Settings
from poise.scheduler.core.state import SchedulerState
from poise.scheduler.model.action import Abandon, Action, Reject, WakeAt
from poise.scheduler.model.cluster import Cluster
from poise.scheduler.model.errors import InvariantError
from poise.scheduler.model.event import (
    Attached,
    Belated,
    Cancelled,
    Carried,
    Colocated,
    Computed,
    Estimated,
    Event,
    Failed,
    Finished,
    Held,
    NodeLost,
    NodeReturned,
    Progressed,
    Released,
    Revealed,
    Stopped,
    Submitted,
    Synchronised,
    Woke,
)
from poise.scheduler.model.failures import Verdict, verdict
from poise.scheduler.model.job import Status
from poise.scheduler.model.plan import Order, Planner, Policy, PreemptionRule, any_locality
from poise.scheduler.model.units import is_round_end, next_round_end
from poise.scheduler.placement.strategies import Placement

MOST_PLANS = 4
"""Decisions that a planner may ask for at one moment before it is taken for a bug."""


class Scheduler:
    """A deterministic machine: the same facts in the same order give the same wishes.

    decisions   how many decisions it has taken
    thinking    entered while a plan is made, which may take a while: the state does not change meanwhile
    """

    def __init__(self, cluster: Cluster, policy: Policy, placement: Placement, settings: Settings) -> None:
        self.policy = policy
        self.settings = settings
        self.state = SchedulerState(cluster, placement, settings)
        self.decisions = 0
        self.thinking: Thinking = nullcontext
        answer, clearing = policy.answer, clearing_of(self.state, settings)
        if not isinstance(answer, Order | Planner):
            raise InvariantError(f"policy {policy.name!r} answers with shares; a mechanism has to make plans of them")
        self._asks = answer.asks if isinstance(answer, Order) else any_locality
        self._answering: PolicyDriver = (
            RankDriver(answer, self.state, clearing)
            if isinstance(answer, Order)
            else PlanDriver(answer, self.state, clearing, lambda: self.thinking())
        )
        self._enacting = Enacting(self.state, self._answering, settings.minimum_run)
        self._absence = Absence(self.state, self._answering, settings)
        self._carrying = Carrying(self.state, self._answering, self._enacting, self._absence)
        insistence = self.state.insistence
        self._patience = LocalityWaits(insistence, self.state, self._answering) if insistence else None
        self._actions: list[Action] = []
        self._pending = False
        self._is_half_done = False
        self._is_late = False
        self._spared_until = inf
        self._wake = inf
        self._looked = -inf

    def handle(self, now: float, events: Iterable[Event]) -> tuple[Action, ...]:
        """Take in the facts of one instant, in order; moments never go backwards."""
        if self.state.origin is None:
            self.state.origin = now
        for event in events:
            self._take(event, now)
        if self.state.away:
            self._bring_back(now)
        if self._patience and self._patience.relax(now):
            self._pending = True
        if self._spared_until <= now:
            self._spared_until = inf
            self._answering.opened()
            self._pending = True
        if self._is_late:
            self._is_late, self._pending = False, True
            self.state.clock_causes(now)
        else:
            self._act(now)
        if self._patience:
            self._patience.note(now)
        self.state.read_clocks(now)
        self._ask_to_wake(now)
        actions, self._actions = tuple(self._actions), []
        return actions

    def explain(self, job: str) -> Reason:
        """Why the job runs, waits or has ended; for a job that was submitted."""
        return explain(self.state, self.state.rows[job])

    def backs_off_until(self, job: str) -> float | None:
        """The moment before which a job is not tried again after a failure; None: it does not back off."""
        return self._absence.until(self.state.rows[job])

    def in_line(self, most: int) -> list[str]:
        """The first waiting jobs as they stand in line: by rank if the policy is an order, by submission if it plans."""
        return [self.state.columns.ids[row] for row in self._answering.line(most)]

    def lined_up(self, jobs: Iterable[str]) -> list[str]:
        """Those of these jobs that wait, in the same order."""
        rows = filter(self.state.waits, (self.state.rows.get(job, -1) for job in jobs))
        return [self.state.columns.ids[row] for row in sorted(rows, key=self._answering.place)]

    def _take(self, event: Event, now: float) -> None:
        match event:
            case Finished():
                self._finished(event, now)
            case Submitted() | Carried():
                self._arrived(event, now)
            case Woke() | Belated():
                self._told_of_time(event)
            case Stopped():
                self._stopped(event, now)
            case Failed():
                self._failed(event, now)
            case Attached() | Computed() | Synchronised():
                self._advanced(event, now)
            case Cancelled() | Held() | Released():
                self._wanted(event, now)
            case Estimated() | Colocated() | Progressed() | Revealed():
                self._learn(event)
            case NodeLost() | NodeReturned():
                self._node_changed(event, now)
            case _:
                assert_never(event)

    def _told_of_time(self, event: Woke | Belated) -> None:
        if isinstance(event, Woke):
            self._wake = inf
        else:
            self._is_late = True

    def _learn(self, event: Estimated | Colocated | Progressed | Revealed) -> None:
        """Take in what is believed of speeds and known of losses, but not what is true; no decision is due for it."""
        if isinstance(event, Estimated):
            self.state.believe(event.kind, self.policy.perceive(event.estimate))
        elif isinstance(event, Colocated):
            self.state.believe_pair(event)
        elif isinstance(event, Progressed) and (row := self._running_row(event.job, event.epoch)) is not None:
            self.state.losses.setdefault(row, []).append((event.steps, event.loss))

    def _arrived(self, event: Submitted | Carried, now: float) -> None:
        job, state = event.job, self.state
        if job.id in state.rows:
            raise InvariantError(f"job {job.id!r} was submitted twice")
        belief = state.belief(event.kind, job)
        if belief.impossible:
            state.refuse(job, belief.impossible, now)
            self._actions.append(Reject(job.id, belief.impossible))
            return
        since = event.since if isinstance(event, Carried) else now
        row = state.enter(job, event.steps, belief, self._asks, since)
        if isinstance(event, Carried):
            self._actions += self._carrying.carry(event, row, now)
        elif state.pool.slots and self._absence.admit(row, now):
            return
        else:
            self._answering.arrived(row, now)
        self._pending = True

    def _finished(self, event: Finished, now: float) -> None:
        """All work is done; also if that was so before the run could be stopped, or moved."""
        row = self._unended_row(event.job)
        if row is None:
            return
        is_current = self.state.running(row) and event.epoch == self.state.columns.epoch[row]
        if is_current or self.state.leaving.has(row, event.epoch):
            self._end(row, now, Status.FINISHED)

    def _failed(self, event: Failed, now: float) -> None:
        row = self._running_row(event.job, event.epoch)
        if row is None:
            return
        failures = self.state.columns.failures
        failures[row] += 1
        outlook = self._outlook(event.cause)
        if event.final or failures[row] > self.settings.retries or outlook is Verdict.HOPELESS:
            never = ", which no retry heals" if outlook is Verdict.HOPELESS and not event.final else ""
            reason = f"run {failures[row]} failed: {event.cause}{never}"
            self.state.reasons[row] = reason
            self._end(row, now, Status.FAILED)
            self._actions.append(Abandon(event.job, reason))
            return
        if self.state.pool.tries(row):
            self._absence.try_again(row, now)
        elif outlook is Verdict.TRANSIENT:
            self._absence.back_off(row, now)
            self._pending = True
        else:
            self._interrupt(row, now)
        self.state.columns.report(row, event.steps)
        if row in self.state.active:
            self._answering.reported(row, now)

    def _outlook(self, cause: str) -> Verdict:
        """What there is to hope for after a run that died of this, as far as it matters here."""
        return verdict(cause) if self.settings.retry is RetryRule.CAUSE else Verdict.UNKNOWN

    def _stopped(self, event: Stopped, now: float) -> None:
        """Progress as the world knows it, of the last run or of one before runs that have been launched since."""
        row = self._unended_row(event.job)
        if row is None:
            return
        running, last = self.state.running(row), self.state.columns.epoch[row]
        if event.epoch == last - running or self.state.leaving.has(row, event.epoch):
            self.state.leaving.drop(row, event.epoch)
            self.state.columns.report(row, event.steps)
            if row in self.state.active:
                self._answering.reported(row, now)
        elif running and event.epoch == last:
            raise InvariantError(f"job {event.job!r} stopped by itself; that is a failure, or a lost node")

    def _advanced(self, event: Attached | Computed | Synchronised, now: float) -> None:
        """A run can be preempted; or tasks are done; or a whole round is, and the tasks of the next one are ready."""
        row = self._running_row(event.job, event.epoch)
        if row is None:
            return
        if isinstance(event, Attached):
            self._spared_until = min(self._spared_until, self._enacting.attached(row, now))
            return
        if isinstance(event, Computed):
            computed(self.state, row, event.gpus, now)
        else:
            self._interrupt(row, now)
            self.state.columns.report(row, event.steps)
        self._pending = True

    def _wanted(self, event: Cancelled | Held | Released, now: float) -> None:
        """What an owner wants of a job; of one that has ended, or is as wanted, nothing."""
        row = self._unended_row(event.job)
        if row is None:
            return
        on_hold = row in self.state.on_hold
        if isinstance(event, Cancelled):
            self.state.reasons[row] = "cancelled by its owner"
            self._end(row, now, Status.CANCELLED)
        elif isinstance(event, Released) and on_hold:
            self._absence.release(row, now)
        elif isinstance(event, Held) and not on_hold:
            self._actions += self._absence.hold(row, now)
        self._pending = True

    def _unended_row(self, job: str) -> int | None:
        """The row of a job that was submitted and has not ended."""
        row = self.state.rows.get(job)
        return None if row is None or Status(self.state.columns.status[row]).is_final else row

    def _node_changed(self, event: NodeLost | NodeReturned, now: float) -> None:
        """Also if nothing ran there: what others wait for may be another thing from now on, and a plan counts live GPUs."""
        self._pending = True
        if isinstance(event, NodeReturned):
            self.state.restore(event.node)
            self._answering.opened()
            return
        self.state.free.lose(event.node)
        for row in self.state.ledger.lose(event.node):
            if self.state.pool.tries(row):
                self._absence.try_again(row, now)
            else:
                self._interrupt(row, now)

    def _running_row(self, job: str, epoch: int) -> int | None:
        """The row of a run that is still under way; None for news of an earlier run."""
        row = self.state.rows.get(job)
        columns = self.state.columns
        if row is None or columns.epoch[row] != epoch or columns.status[row] != Status.RUNNING:
            return None
        return row

    def _end(self, row: int, now: float, status: Status) -> None:
        state = self.state
        if row in state.away:
            self._absence.end(row, now)
            state.end(row, status)
            return
        if state.running(row):
            state.free.give(state.stop(row, now, status))
        else:
            state.end_waiting(row, now)
        state.end(row, status)
        self._answering.ended(row, now)
        self._pending = True

    def _interrupt(self, row: int, now: float) -> None:
        self._answering.catch_up(now)
        self.state.free.give(self.state.stop(row, now, Status.WAITING))
        self.state.begin_waiting(row, now)
        self._answering.interrupted(row, now)
        self._pending = True

    def _act(self, now: float) -> None:
        if self.settings.cadence is not Cadence.ROUNDS or self._at_boundary(now):
            happened = self._answering.refresh(now) or self._pending or self._is_half_done
            if happened or self._answering.is_due(now) or self._has_drifted(now):
                self._looked = now
                self._decide(now, PreemptionRule.BY_RANK, spares_unworked=not happened)
        elif self._pending and self.settings.backfill:
            self._decide(now, PreemptionRule.NEVER)
            self._is_half_done = True  # at the end of the round it is decided with preemption
        elif self._pending:
            self.state.clock_causes(now)

    def _bring_back(self, now: float) -> None:
        actions, anybody = self._absence.settle(now)
        self._actions += actions
        self._pending = self._pending or anybody

    def _has_drifted(self, now: float) -> bool:
        """At the end of a round, once, the order may be another one though nothing happened."""
        if self.settings.cadence is Cadence.EVENTS or self._looked == now:
            return False
        return self._at_boundary(now) and self._may_drift()

    def _may_drift(self) -> bool:
        return bool(self.state.waiting_shapes) and self._answering.drifts

    def _decide(self, now: float, allowed: PreemptionRule, *, spares_unworked: bool = False) -> None:
        """Decide. If nothing but time calls for it, runs that have not worked for as long as they took to start are spared:

        otherwise time slices that are hardly longer than the overhead would let no job make progress.
        """
        self._pending = self._is_half_done = False
        if self._answering.is_idle():
            self._answering.settle(now)
            return
        self.decisions += 1
        for _ in range(MOST_PLANS):
            desk = DecisionDraft(
                self.state.free,
                self.state.placement,
                now=now,
                protected=self.state.protected,
                unworked=partial(self._unworked, now) if spares_unworked else None,
            )
            self._answering.decide(now, desk, allowed)
            self._enacting.carry_out(desk, self._actions)
            self._spared_until = min(self._spared_until, desk.protected_until)
            if not self._answering.settle(now):
                self.state.clock_causes(now)
                return
        raise InvariantError(f"policy {self.policy.name!r} asked for more than {MOST_PLANS} plans at one moment")

    def _unworked(self, now: float, row: int) -> bool:
        return now < self.state.columns.repaid[row]

    def _boundary_after(self, now: float) -> float:
        return next_round_end(self.state.origin or 0.0, now, self.settings.round)

    def _at_boundary(self, now: float) -> bool:
        return is_round_end(self.state.origin or 0.0, now, self.settings.round)

    def _ask_to_wake(self, now: float) -> None:
        wake = min(self._answering.next_change(), self._spared_until)
        if self._patience:
            wake = min(wake, self._patience.next_change())
        if self.settings.cadence is Cadence.ROUNDS:
            if wake < inf:
                wake = max(wake, now)
                wake = wake if wake > now and self._at_boundary(wake) else self._boundary_after(wake)
            if self._pending or self._is_half_done or self._may_drift():
                wake = min(wake, self._boundary_after(now))
        elif self.settings.cadence is Cadence.BOTH and self._may_drift():
            wake = min(wake, self._boundary_after(now))
        if self.state.away:
            wake = min(wake, self._absence.next_change())
        if wake < inf and wake != self._wake:
            self._wake = wake
            self._actions.append(WakeAt(wake))
