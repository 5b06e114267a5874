"""A decision that was taken at the desk, carried into the tables and said as wishes."""

from math import inf

from poise.core.answering import Answering
from poise.core.computing import compute
from poise.core.granting import Desk
from poise.core.state import State
from poise.model.action import Action, Cancel, Compute, Launch, Preempt, Why
from poise.model.cluster import gpu_count
from poise.model.job import Status, Yields


class Enacting:
    """Carries decisions out. `minimum_run`: seconds for which a job that has just started is not to be preempted."""

    def __init__(self, state: State, answering: Answering, minimum_run: float) -> None:
        self._state = state
        self._answering = answering
        self._minimum_run = minimum_run

    def carry_out(self, desk: Desk, actions: list[Action]) -> None:
        """Preemptions first, the furthest back first; then launches in the order in which they were granted; then tasks."""
        actions += desk.notes
        for row, reason in desk.ends:
            actions.append(self._cancel(row, reason, desk.now))
        ended = {row for row, _ in desk.ends} if desk.ends else ()
        for row, before in desk.before.items():
            if row not in ended and before is not None and (desk.after[row] != before or row in desk.joins):
                actions.append(self._preempt(row, desk))
        for row, after in desk.after.items():
            if after is not None and (after != desk.before[row] or row in desk.joins):
                actions.append(self._launch(row, desk))
        columns = self._state.columns
        for row, gpus in desk.computes.items():
            waited = compute(self._state, row, gpus, desk.now)
            actions.append(Compute(columns.ids[row], columns.epoch[row], gpus, waited))

    def _cancel(self, row: int, reason: str, now: float) -> Cancel:
        """Its app gives the job up; the desk has given its GPUs to others already."""
        state = self._state
        state.reasons[row] = reason
        if state.running(row):
            state.stop(row, now, Status.CANCELLED)
        else:
            state.end_waiting(row, now)
        state.end(row, Status.CANCELLED)
        self._answering.ended(row, now)
        return Cancel(state.columns.ids[row], reason)

    def _preempt(self, row: int, desk: Desk) -> Preempt:
        columns, after = self._state.columns, desk.after[row]
        why = Why.OUTRANKED if row in desk.beneficiary else Why.UNPLANNED
        if after is not None:
            why = Why.MOVED if gpu_count(after) == columns.gpus[row] else Why.RESIZED
        taken_for = None if after is not None else desk.beneficiary_of(row)
        return self.stop(row, desk.now, why, None if taken_for is None else columns.ids[taken_for])

    def stop(self, row: int, now: float, why: Why, beneficiary: str | None) -> Preempt:
        """A running job waits from now on; who calls has given its GPUs to others."""
        state, columns = self._state, self._state.columns
        state.stop(row, now, Status.WAITING)
        state.begin_waiting(row, now)
        state.leaving.add(row, columns.epoch[row])
        self._answering.preempted(row, now)
        return Preempt(columns.ids[row], columns.epoch[row], why, beneficiary)

    def protect(self, row: int, since: float) -> None:
        """A job that runs since then is not to be preempted for a while; or before it has attached; or at all."""
        if row in self._state.yields:
            self._state.protected[row] = inf
        elif self._minimum_run:
            self._state.protected[row] = since + self._minimum_run

    def attached(self, row: int, since: float) -> float:
        """The job's run is attached since then; returns the first moment at which it may be preempted."""
        state = self._state
        if state.yields.get(row) is Yields.ATTACHED:
            state.protected[row] = since + self._minimum_run
        return state.protected.get(row, since)

    def _launch(self, row: int, desk: Desk) -> Launch:
        state, columns, now = self._state, self._state.columns, desk.now
        holding, beside = desk.after[row] or (), desk.joins.get(row)
        waited = state.start(row, holding, now) if beside is None else state.join(row, beside, now)
        self.protect(row, now)
        self._answering.started(row, now)
        return Launch(columns.ids[row], columns.epoch[row], holding, waited)
