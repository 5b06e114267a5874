"""The service's time: seconds since 1970 as the machine's clock had it at the start, and from then on without a jump.

The machine's clock may be set back or forward while the service runs; durations are measured by one that cannot be. After
a restart time goes on from the last moment of the journal if the machine's clock is behind that.
"""

from collections.abc import Callable
from time import monotonic, time  # noqa: TID251 - the one place where the service looks at a clock


class Clock:
    """Never goes backwards, not even over restarts. `last` is the last moment that the journal knows."""

    def __init__(self, last: float, *, wall: Callable[[], float] = time, steady: Callable[[], float] = monotonic) -> None:
        self._steady = steady
        self._began = steady()
        at = wall()
        self._base = max(at, last)
        self._ahead = self._base - at

    def now(self) -> float:
        """This moment."""
        return self._base + self._steady() - self._began

    def moment(self, wall: float, *, earliest: float) -> float:
        """When something happened that somebody else's clock dates: not before `earliest`, not in the future."""
        return min(max(wall + self._ahead, earliest), self.now())
