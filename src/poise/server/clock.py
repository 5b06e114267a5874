"""The service's time: seconds since 1970 as the machine's clock had it at the start, and from then on without a jump.

The machine's clock may be set back or forward while the service runs; durations are measured by one that cannot be. After
a restart time goes on from the last moment of the journal if the machine's clock is behind that.
"""

from collections.abc import Callable
from time import monotonic, time  # noqa: TID251 - the one place where the service looks at a clock


class Clock:
    """Never goes backwards, not even over restarts. `last` is the last moment that the journal knows."""

    def __init__(self, last: float, *, wall: Callable[[], float] = time, steady: Callable[[], float] = monotonic) -> None:
        self._wall, self._steady = wall, steady
        self._began = steady()
        self._base = max(wall(), last)

    def now(self) -> float:
        """This moment."""
        return self._base + self._steady() - self._began

    def moment(self, at: float, *, earliest: float) -> float:
        """When something happened that the machine's clock dates: not before `earliest`, not in the future.

        What counts is how long ago that is by the same clock: it may have been set since the service was started.
        """
        return min(max(self.now() - (self._wall() - at), earliest), self.now())
