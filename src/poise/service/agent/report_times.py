"""When a node reports progress and logs, which can wait, unlike other news: they cost the server most.

The server says how often, by the number of its nodes. What a user is looking at is reported every half second all the
same.
"""

import asyncio
from collections.abc import AsyncIterator
from time import monotonic

from poise.service.backends.run_table import Key
from poise.service.wire.agent_messages import SOONEST

WATCH_SECONDS = 30.0  # for how long a run is reported often after a user has looked at it


class ReportTimes:
    """The times at which reports are due.

    every   seconds between two reports of all runs
    """

    def __init__(self) -> None:
        self.every = SOONEST
        self._watched: dict[Key, float] = {}  # until when

    def watch(self, key: Key) -> None:
        """Note that a user looks at a run."""
        self._watched[key] = monotonic() + WATCH_SECONDS

    async def reports(self) -> AsyncIterator[set[Key] | None]:
        """Yield whenever reports are due: the runs to report, or None for all."""
        last = monotonic()
        while True:
            await asyncio.sleep(SOONEST)
            at = monotonic()
            self._watched = {key: until for key, until in self._watched.items() if until > at}
            if at - last >= self.every - SOONEST / 2:
                last = at
                yield None
            elif self._watched:
                yield set(self._watched)
