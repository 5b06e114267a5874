"""Delay scheduling: waiting jobs require locality at first and relax with time (Philly's first guideline)."""

from heapq import heappop, heappush
from math import inf

from poise.scheduler.core.policy_driver import PolicyDriver
from poise.scheduler.core.settings import DelayScheduling
from poise.scheduler.core.state import SchedulerState


class LocalityWaits:
    """Keeps the times at which waiting jobs require less locality."""

    def __init__(self, delays: DelayScheduling, state: SchedulerState, driver: PolicyDriver) -> None:
        self._delays = delays
        self._state = state
        self._driver = driver
        self._relaxations: list[tuple[float, int]] = []

    def relax(self, now: float) -> bool:
        """Let jobs that have waited long enough wait with a wider shape; say whether any does."""
        state, any_relaxed = self._state, False
        while self._relaxations and self._relaxations[0][0] <= now:
            _, row = heappop(self._relaxations)
            if not state.waits(row):
                continue
            before, shape = state.shape_of[row], state.default_shape(row, now)
            state.clocks.change(row, state.over_share(shape) if before.is_over_share else shape, now)
            if state.shape_of[row] is not before:
                self._driver.reshaped(row, now)
                any_relaxed = True
        return any_relaxed

    def note(self, now: float) -> None:
        """At the end of an instant, note when the jobs that began to wait in it will require less."""
        for row in filter(self._state.waits, self._state.clocks.new):
            for relaxation in self._delays.relaxations(self._state.columns.waiting_since[row]):
                if relaxation > now:
                    heappush(self._relaxations, (relaxation, row))

    def next_change(self) -> float:
        """When the next waiting job will require less."""
        while self._relaxations and not self._state.waits(self._relaxations[0][1]):
            heappop(self._relaxations)
        return self._relaxations[0][0] if self._relaxations else inf
