"""Jobs that a policy does not see for a while: on trial, waiting for a trial, backing off after a failure, or held."""

from heapq import heappop, heappush
from math import inf

from poise.core.answering import Answering
from poise.core.settings import Settings
from poise.core.state import State
from poise.core.waiting import NO_WAIT
from poise.model.action import Action, Launch, Preempt, Why
from poise.model.job import Status

MOST_DOUBLINGS = 10
"""Of the back-off of one job."""


class Absence:
    """Takes jobs out of the policy's sight and brings them back."""

    def __init__(self, state: State, answering: Answering, settings: Settings) -> None:
        self._state = state
        self._answering = answering
        self._settings = settings
        self._returning: list[tuple[float, int]] = []
        self._until: dict[int, float] = {}
        """When a job that backs off comes back; whatever else stands in the list above is out of date."""

    def admit(self, row: int, now: float) -> bool:
        """A job has arrived; says whether it is to be tried out first."""
        state = self._state
        if not state.pool.suits(state.columns.gang[row], state.shape_of[row].types):
            return False
        state.end_waiting(row, now)
        state.leave(row, now)
        state.pool.add(row, state.shape_of[row].types)
        return True

    def back_off(self, row: int, now: float) -> None:
        """A run has failed; the job is tried again later, twice as late each time."""
        delay = self._settings.backoff * 2 ** min(self._state.columns.failures[row] - 1, MOST_DOUBLINGS)
        self.back_off_until(row, now + delay, now)

    def back_off_until(self, row: int, moment: float, now: float) -> None:
        """The job is not tried before that moment."""
        self._take_out(row, now)
        self._until[row] = moment
        heappush(self._returning, (moment, row))

    def until(self, row: int) -> float | None:
        """The moment before which a job that backs off is not tried again; None: it does not back off."""
        return self._until.get(row)

    def hold(self, row: int, now: float) -> list[Action]:
        """The owner wants the job not to run; it is preempted if it does."""
        state, columns = self._state, self._state.columns
        ran = state.running(row)
        if row in state.away:
            self.end(row, now)
        else:
            self._take_out(row, now)
        state.on_hold.add(row)
        if ran:
            state.leaving.add(row, columns.epoch[row])
        return [Preempt(columns.ids[row], columns.epoch[row], Why.HELD, None)] if ran else []

    def release(self, row: int, now: float) -> None:
        """The owner wants the job to run again."""
        self._state.on_hold.discard(row)
        self._state.come_back(row, now)
        self._answering.arrived(row, now)

    def try_again(self, row: int, now: float) -> None:
        """A trial was cut short; the job is tried once more."""
        state = self._state
        state.end_trial(row, now)
        state.pool.drop(row)
        state.pool.add(row, state.shape_of[row].types)

    def end(self, row: int, now: float) -> None:
        """What a job is away for is over: it comes to its end, or is held."""
        self._until.pop(row, None)
        if self._state.pool.tries(row):
            self._state.end_trial(row, now)
        self._state.pool.drop(row)

    def settle(self, now: float) -> tuple[list[Action], bool]:
        """End trials and back-offs that are over, begin trials where the pool has room; says whether anybody came back."""
        state, actions = self._state, list[Action]()
        back = []
        while self._returning and self._returning[0][0] <= now:
            moment, row = heappop(self._returning)
            if self._until.get(row) == moment:
                del self._until[row]
                back.append(row)
        for row in state.pool.passed(now):
            state.end_trial(row, now)
            state.leaving.add(row, state.columns.epoch[row])
            actions.append(Preempt(state.columns.ids[row], state.columns.epoch[row], Why.VALIDATED, None))
            back.append(row)
        back += state.pool.waived(state.free.alive)
        back = [row for row in back if row in state.away and row not in state.on_hold]
        for row in back:
            state.come_back(row, now)
            self._answering.arrived(row, now)
        for row, holding in state.pool.begin(now, state.free.alive):
            waited = state.try_out(row, holding, now)
            actions.append(Launch(state.columns.ids[row], state.columns.epoch[row], holding, waited))
        return actions, bool(back)

    def _take_out(self, row: int, now: float) -> None:
        """The policy does not see the job any more; what it held is free."""
        state = self._state
        self._answering.catch_up(now)
        waited = NO_WAIT
        if state.running(row):
            state.free.give(state.stop(row, now, Status.WAITING))
        else:
            waited = state.end_waiting(row, now)
        state.leave(row, now, waited)
        self._answering.ended(row, now)

    def next_change(self) -> float:
        """When somebody comes back."""
        return min(self._returning[0][0] if self._returning else inf, self._state.pool.next_change())
