"""Jobs that insist on being close together, and when each of them will be content with less."""

from heapq import heappop, heappush
from math import inf

from poise.scheduler.core.delay_scheduling import DelayScheduling
from poise.scheduler.core.rank_driver import PolicyDriver
from poise.scheduler.core.state import SchedulerState


class LocalityWaits:
    """Keeps the moments at which waiting jobs insist on less."""

    def __init__(self, insistence: DelayScheduling, state: SchedulerState, answering: PolicyDriver) -> None:
        self._insistence = insistence
        self._state = state
        self._answering = answering
        self._moments: list[tuple[float, int]] = []

    def relax(self, now: float) -> bool:
        """Jobs that have waited long enough insist on less; says whether any does."""
        anybody = False
        while self._moments and self._moments[0][0] <= now:
            _, row = heappop(self._moments)
            if self._state.waits(row):
                before = self._state.shape_of[row]
                self._state.relax(row, now)
                if self._state.shape_of[row] is not before:
                    self._answering.reshaped(row, now)
                    anybody = True
        return anybody

    def note(self, now: float) -> None:
        """At the end of a moment: note when those who began to wait in it will insist on less."""
        for row in self._state.new_waits():
            for moment in self._insistence.moments(self._state.columns.waiting_since[row]):
                if moment > now:
                    heappush(self._moments, (moment, row))

    def next_change(self) -> float:
        """When the next waiting job will insist on less."""
        while self._moments and not self._state.waits(self._moments[0][1]):
            heappop(self._moments)
        return self._moments[0][0] if self._moments else inf
