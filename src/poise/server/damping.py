"""Bounds on lines that others can cause at will: so many a minute for each who does, then one that says how many more."""

from collections import Counter
from threading import Lock

LINES = 10
"""Of one peer or token, in each span."""
SPAN = 60.0
"""Seconds."""
MOST = 100
"""Peers and tokens that are told apart in each span; all further ones count as one."""
OTHERS = "others"


class Damper:
    """Says which lines are written, and what has to be said of the others. Any thread may ask."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._said: Counter[str] = Counter()
        self._ends = 0.0

    def passes(self, who: str, now: float) -> bool:
        """A line that `who` causes is written. Those that are not are counted."""
        with self._lock:
            if not self._said:
                self._ends = now + SPAN
            if who not in self._said and len(self._said) >= MOST:
                who = OTHERS
            self._said[who] += 1
            return self._said[who] <= LINES

    def over(self, now: float) -> dict[str, int]:
        """How many lines were left out of whom, once a span is over; it is told once, and another span begins."""
        if not self._said or now < self._ends:
            return {}
        with self._lock:
            said, self._said = self._said, Counter()
        return {who: count - LINES for who, count in sorted(said.items()) if count > LINES}
