"""The scheduler: `handle` takes the events of one instant and answers with actions.

    1  take in the events, in order: each becomes one transition of the life cycle, a new belief, or a note of time
    2  take in what time has changed: suspensions that are over, locality that relaxes, protection that ends
    3  decide, if this is a time to decide: the driver of the policy grants claims in a draft
    4  apply the draft: the ledger checks every rule, preemptions come before the launches that they make room for
    5  clock the causes of waiting, and ask to be woken when something may change by itself

It reads no clock and does no input or output: time comes with the events, and whatever must happen is an action.
"""

from collections.abc import Iterable
from contextlib import nullcontext
from math import inf
from typing import assert_never

from poise.scheduler.core.decision import DecisionDraft
from poise.scheduler.core.defragmenter import Defragmenter
from poise.scheduler.core.delay_scheduling import LocalityWaits
from poise.scheduler.core.lifecycle import ENDED, SUSPENDED, Lifecycle
from poise.scheduler.core.plan_driver import PlanDriver, Thinking
from poise.scheduler.core.policy_driver import PolicyDriver
from poise.scheduler.core.rank_driver import RankDriver
from poise.scheduler.core.reasons import Reason, explain
from poise.scheduler.core.settings import Cadence, RetryRule, Settings
from poise.scheduler.core.state import SchedulerState
from poise.scheduler.model import event as events
from poise.scheduler.model.action import Abandon, Action, WakeAt
from poise.scheduler.model.cluster import Cluster
from poise.scheduler.model.errors import InvariantError
from poise.scheduler.model.event import Event
from poise.scheduler.model.failures import Verdict, verdict
from poise.scheduler.model.job import Status
from poise.scheduler.model.plan import Order, Planner, Policy, PreemptionRule, any_locality
from poise.scheduler.model.units import is_round_end, next_round_end
from poise.scheduler.placement.strategies import Placement

MOST_PLANS = 4
"""Decisions that a planner may ask for at one time; more are taken for an endless loop."""


class Scheduler:
    """A deterministic machine: the same events in the same order give the same actions.

    decisions   number of decisions taken
    thinking    a context that is entered while a plan is made, which may take a while; the state does not change in it
    """

    def __init__(self, cluster: Cluster, policy: Policy, placement: Placement, settings: Settings) -> None:
        answer = policy.answer
        if not isinstance(answer, Order | Planner):
            raise InvariantError(f"policy {policy.name!r} answers with shares; a mechanism has to make plans of them")
        self.policy = policy
        self.settings = settings
        self.state = SchedulerState(cluster, placement, settings)
        self.decisions = 0
        self.thinking: Thinking = nullcontext
        defragment = Defragmenter(self.state, settings.defragment) if settings.defragment else None
        self._driver: PolicyDriver = (
            RankDriver(answer, self.state, defragment)
            if isinstance(answer, Order)
            else PlanDriver(answer, self.state, defragment, lambda: self.thinking())
        )
        asks = answer.asks if isinstance(answer, Order) else any_locality
        self.lifecycle = Lifecycle(self.state, self._driver, settings, asks)
        delays = self.state.delay_scheduling
        self._locality_waits = LocalityWaits(delays, self.state, self._driver) if delays else None
        self._pending = False
        """Something happened that calls for a decision."""
        self._is_half_done = False
        """The last decision was a back-fill; at the end of the round it is taken again, with preemption."""
        self._is_late = False
        """The events of this instant were reported late: others follow at once, and only then is there a decision."""
        self._spared_until = inf
        """When some job that a decision spared for having just started may be preempted."""
        self._to_vacate: set[int] = set()
        """Nodes that are drained, and where a run may have to leave that did not have to before."""
        self._wake = inf
        self._looked = -inf

    def handle(self, now: float, events: Iterable[Event]) -> tuple[Action, ...]:
        """Take in the events of one instant, in order; instants never go backwards."""
        state = self.state
        if state.origin is None:
            state.origin = now
        for event in events:
            self._take(event, now)
        if self._to_vacate and not self._is_late:
            self._vacate(now)
        if state.suspended and self.lifecycle.end_suspensions(now):
            self._pending = True
        if self._locality_waits and self._locality_waits.relax(now):
            self._pending = True
        if self._spared_until <= now:
            self._spared_until = inf
            self._driver.opened()
            self._pending = True
        if self._is_late:
            self._is_late, self._pending = False, True
            state.clocks.classify(state.free, state.placement, now)
        else:
            self._act(now)
        if self._locality_waits:
            self._locality_waits.note(now)
        if state.clocks.new:
            state.clocks.note_new(state.columns.status, state.active, now)
        self._ask_to_wake(now)
        actions = tuple(self.lifecycle.actions)
        self.lifecycle.actions.clear()
        return actions

    # Questions of people

    def explain(self, job: str) -> Reason:
        """Why a submitted job runs, waits or has ended."""
        return explain(self.state, self.state.rows[job])

    def backs_off_until(self, job: str) -> float | None:
        """The time before which a job is not tried again after a failure; None if it does not back off."""
        return self.lifecycle.backs_off_until(self.state.rows[job])

    def in_line(self, most: int) -> list[str]:
        """The first waiting jobs as they stand in line: by rank if the policy is an order, by submission if it plans."""
        return [self.state.columns.ids[row] for row in self._driver.line(most)]

    def lined_up(self, jobs: Iterable[str]) -> list[str]:
        """Those of these jobs that wait, in the same order."""
        rows = filter(self.state.waits, (self.state.rows.get(job, -1) for job in jobs))
        return [self.state.columns.ids[row] for row in sorted(rows, key=self._driver.place)]

    # Events

    def _take(self, event: Event, now: float) -> None:  # noqa: C901 - one case per event
        match event:
            case events.Finished():
                self._finished(event, now)
            case events.Submitted():
                if self.lifecycle.arrive(event, now) not in (SUSPENDED, ENDED):
                    self._pending = True
            case events.Carried():
                if self.lifecycle.carry_over(event, now) is not ENDED:
                    self._pending = True
                    self._to_vacate.update(slots.node for slots in event.gpus if self.state.draining)
            case events.Woke():
                self._wake = inf
            case events.Belated():
                self._is_late = True
            case events.Stopped():
                self._stopped(event, now)
            case events.Failed():
                self._failed(event, now)
            case events.Attached() | events.Computed() | events.Synchronised():
                self._advanced(event, now)
            case events.Cancelled() | events.Held() | events.Released():
                self._commanded(event, now)
            case events.Estimated() | events.Colocated() | events.Progressed() | events.Revealed():
                self._learn(event)
            case events.NodeLost() | events.NodeReturned() | events.NodeRestricted():
                self._node_changed(event, now)
            case _:
                assert_never(event)

    def _learn(self, event: events.Estimated | events.Colocated | events.Progressed | events.Revealed) -> None:
        """Take in beliefs about speed, and losses; no decision is due.

        `Revealed` is the truth about a job. The journal keeps it for analysis; the core must not use it.
        """
        if isinstance(event, events.Estimated):
            self.state.learn_speed(event.kind, self.policy.perceive(event.estimate))
        elif isinstance(event, events.Colocated):
            self.state.learn_pair(event)
        elif isinstance(event, events.Progressed) and (row := self._running_row(event.job, event.epoch)) is not None:
            self.state.losses.setdefault(row, []).append((event.steps, event.loss))

    def _finished(self, event: events.Finished, now: float) -> None:
        """End a job whose work is done, also if a run did it that was told to stop and had not left yet."""
        row = self._unended_row(event.job)
        if row is None:
            return
        is_current = self.state.running(row) and event.epoch == self.state.columns.epoch[row]
        if is_current or self.state.stopping.has(row, event.epoch):
            self._end(row, now, Status.FINISHED)

    def _failed(self, event: events.Failed, now: float) -> None:
        """Try a job again after a failed run, at once or later; or give it up."""
        row = self._running_row(event.job, event.epoch)
        if row is None:
            return
        state = self.state
        state.columns.failures[row] += 1
        failures = state.columns.failures[row]
        outlook = verdict(event.cause) if self.settings.retry is RetryRule.CAUSE else Verdict.UNKNOWN
        if event.final or failures > self.settings.retries or outlook is Verdict.HOPELESS:
            never = ", which no retry heals" if outlook is Verdict.HOPELESS and not event.final else ""
            reason = state.reasons[row] = f"run {failures} failed: {event.cause}{never}"
            self._end(row, now, Status.FAILED)
            self.lifecycle.actions.append(Abandon(event.job, reason))
            return
        if state.pool.tries(row):
            self.lifecycle.repeat_trial(row, now)
        elif outlook is Verdict.TRANSIENT:
            self.lifecycle.back_off(row, now)
            self._pending = True
        else:
            self._interrupt(row, now)
        state.columns.report(row, event.steps)
        if row in state.active:
            self._driver.reported(row, now)

    def _stopped(self, event: events.Stopped, now: float) -> None:
        """Take the progress of a run that left after it was told to; runs launched since then may be under way."""
        row = self._unended_row(event.job)
        if row is None:
            return
        running, last = self.state.running(row), self.state.columns.epoch[row]
        if event.epoch == last - running or self.state.stopping.has(row, event.epoch):
            self.state.stopping.drop(row, event.epoch)
            self.state.columns.report(row, event.steps)
            if row in self.state.active:
                self._driver.reported(row, now)
        elif running and event.epoch == last:
            raise InvariantError(f"job {event.job!r} stopped by itself; that is a failure, or a lost node")

    def _advanced(self, event: events.Attached | events.Computed | events.Synchronised, now: float) -> None:
        """A run attached and can be preempted; or tasks are done; or a step is complete and the next one can begin."""
        row = self._running_row(event.job, event.epoch)
        if row is None:
            return
        if isinstance(event, events.Attached):
            self._spared_until = min(self._spared_until, self.lifecycle.attached(row, now))
            self._to_vacate.update(slots.node for slots in self.state.of(row) if self.state.draining)
            return
        if isinstance(event, events.Computed):
            self.lifecycle.computed(row, event.gpus, now)
        else:
            self._interrupt(row, now)
            self.state.columns.report(row, event.steps)
        self._pending = True

    def _commanded(self, event: events.Cancelled | events.Held | events.Released, now: float) -> None:
        """Do what the owner of a job wants; nothing if the job has ended or is as wanted."""
        row = self._unended_row(event.job)
        if row is None:
            return
        on_hold = row in self.state.on_hold
        if isinstance(event, events.Cancelled):
            self.state.reasons[row] = "cancelled by its owner"
            self._end(row, now, Status.CANCELLED)
        elif isinstance(event, events.Released) and on_hold:
            self.lifecycle.release(row, now)
        elif isinstance(event, events.Held) and not on_hold:
            self.lifecycle.hold(row, now)
        self._pending = True

    def _node_changed(self, event: events.NodeEvent, now: float) -> None:
        """A decision is due even if nothing ran there: causes of waiting may differ, and plans count live GPUs."""
        state = self.state
        self._pending = True
        if isinstance(event, events.NodeRestricted):
            self._restrict(event)
            return
        if isinstance(event, events.NodeReturned):
            state.free.restore(event.node, state.pool.on(event.node))
            state.ledger.restore(event.node)
            self._driver.opened()
            return
        state.free.lose(event.node)
        for row in state.ledger.lose(event.node):
            state.stopping.add(row, state.columns.epoch[row])  # it may have finished before; that report may still come
            if state.pool.tries(row):
                self.lifecycle.repeat_trial(row, now)
            else:
                self._interrupt(row, now)

    def _restrict(self, event: events.NodeRestricted) -> None:
        state, node = self.state, event.node
        if event.closed and event.closed[-1] >= state.topology.cluster.nodes[node].gpus:
            raise IndexError(f"node {node} has no slot {event.closed[-1]}")
        closed = sum(1 << slot for slot in event.closed)
        state.free.restrict(node, closed)
        state.ledger.restrict(node, closed)
        state.draining.discard(node)
        if event.drained:
            state.draining.add(node)
            self._to_vacate.add(node)
        self._driver.opened()

    def _vacate(self, now: float) -> None:
        """Preempt the runs that hold closed GPUs of drained nodes, whatever the policy and its rounds say.

        Whether a run can be preempted is a matter of its job alone. It stays for now if its job never yields, or not before
        it has attached; if it computes single tasks, because they end with their step; and if it is a trial, which is short.
        """
        state = self.state
        nodes, closed = self._to_vacate & state.draining, state.free.closed
        self._to_vacate = set()
        found = {row for node in nodes if node in closed for row in state.ledger.holders(node, closed[node])}
        for row in sorted(found):
            if row in state.ledger.holdings and state.protected.get(row) != inf:
                self.lifecycle.vacate(row, now)
                self._pending = True

    def _running_row(self, job: str, epoch: int) -> int | None:
        """The row of a run that is still under way; None if the news is of an earlier run."""
        row = self.state.rows.get(job)
        columns = self.state.columns
        if row is None or columns.epoch[row] != epoch or columns.status[row] != Status.RUNNING:
            return None
        return row

    def _unended_row(self, job: str) -> int | None:
        """The row of a job that was submitted and has not ended."""
        row = self.state.rows.get(job)
        return None if row is None or Status(self.state.columns.status[row]).is_final else row

    def _end(self, row: int, now: float, status: Status) -> None:
        if row not in self.state.suspended:  # a suspended job holds nothing that others compete for
            self._pending = True
        self.lifecycle.end(row, now, status)

    def _interrupt(self, row: int, now: float) -> None:
        self.lifecycle.interrupt(row, now)
        self._pending = True

    # Decisions

    def _act(self, now: float) -> None:
        """Decide if something happened, or if the time has come; with cadence `rounds` only at the end of a round."""
        if self.settings.cadence is not Cadence.ROUNDS or self._at_boundary(now):
            happened = self._driver.refresh(now) or self._pending or self._is_half_done
            # At the end of a round the order may differ though nothing happened; that is looked at once per round.
            may_look = self.settings.cadence is not Cadence.EVENTS and self._looked != now
            drifted = may_look and self._at_boundary(now) and self._may_drift()
            if happened or self._driver.is_due(now) or drifted:
                self._looked = now
                self._decide(now, PreemptionRule.BY_RANK, spares_unworked=not happened)
        elif self._pending and self.settings.backfill:
            self._decide(now, PreemptionRule.NEVER)
            self._is_half_done = True
        elif self._pending:
            self.state.clocks.classify(self.state.free, self.state.placement, now)

    def _may_drift(self) -> bool:
        return bool(self.state.waiting_shapes) and self._driver.drifts

    def _decide(self, now: float, allowed: PreemptionRule, *, spares_unworked: bool = False) -> None:
        """Draft a decision and apply it; some planners ask for another one, which sees who runs now.

        If nothing but time calls for a decision, runs are spared that have not worked for as long as they took to start:
        otherwise time slices that are hardly longer than the overhead would let no job make progress.
        """
        self._pending = self._is_half_done = False
        if self._driver.is_idle():
            self._driver.settle(now)
            return
        self.decisions += 1
        state = self.state
        for _ in range(MOST_PLANS):
            unworked = (lambda row: now < state.columns.repaid[row]) if spares_unworked else None
            fixed = state.on_closed() if state.free.closed else ()
            draft = DecisionDraft(
                state.free, state.placement, now=now, protected=state.protected, unworked=unworked, fixed=fixed
            )
            self._driver.decide(now, draft, allowed)
            self.lifecycle.apply(draft)
            self._spared_until = min(self._spared_until, draft.protected_until)
            if not self._driver.settle(now):
                state.clocks.classify(state.free, state.placement, now)
                return
        raise InvariantError(f"policy {self.policy.name!r} asked for more than {MOST_PLANS} plans at one time")

    def _boundary_after(self, now: float) -> float:
        return next_round_end(self.state.origin or 0.0, now, self.settings.round)

    def _at_boundary(self, now: float) -> bool:
        return is_round_end(self.state.origin or 0.0, now, self.settings.round)

    def _ask_to_wake(self, now: float) -> None:
        """Ask for the next time at which something may change by itself, unless that was asked for already."""
        wake = min(self._driver.next_change(), self._spared_until)
        if self._locality_waits:
            wake = min(wake, self._locality_waits.next_change())
        if self.settings.cadence is Cadence.ROUNDS:
            if wake < inf:
                wake = max(wake, now)
                wake = wake if wake > now and self._at_boundary(wake) else self._boundary_after(wake)
            if self._pending or self._is_half_done or self._may_drift():
                wake = min(wake, self._boundary_after(now))
        elif self.settings.cadence is Cadence.BOTH and self._may_drift():
            wake = min(wake, self._boundary_after(now))
        if self.state.suspended:
            wake = min(wake, self.lifecycle.next_return())
        if wake < inf and wake != self._wake:
            self._wake = wake
            self.lifecycle.actions.append(WakeAt(wake))
