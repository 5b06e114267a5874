"""How Poise changes something in Kubernetes: only while it leads, and again until it is done.

Every change is written so that doing it twice is the same as once: names and uids are given, and an answer that says that it
has been done already counts as done. So an answer that was lost, a conflict, a server that is busy or away: all of them are
tried again, and nothing happens twice.
"""

import asyncio
from collections.abc import Awaitable, Callable
from random import uniform
from typing import TypeVar

from poise.service.backends.kubernetes.client import KubeClient
from poise.service.backends.kubernetes.errors import ApiUnavailableError
from poise.service.backends.kubernetes.leadership import Leadership, LeadershipLostError

Done = TypeVar("Done")
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 10.0  # seconds between two tries


class Actions:
    """The API server as this service may change it.

    unavailable   why the last change had to be tried again; None: it was done
    """

    def __init__(self, client: KubeClient, leadership: Leadership) -> None:
        self.client, self._leadership = client, leadership
        self.unavailable: str | None = None

    @property
    def term(self) -> int:
        """The number of this leadership, which every change carries."""
        return self._leadership.term

    async def attempt(self, change: Callable[[], Awaitable[Done]]) -> Done:
        """Make a change, once; raise whatever is in the way."""
        if not self._leadership.is_leading():
            raise LeadershipLostError("this service does not lead any more")
        return await change()

    async def persist(
        self, change: Callable[[], Awaitable[Done]], is_wanted: Callable[[], bool] = lambda: True
    ) -> Done | None:
        """Make a change; wait as long as the server is away. None: it is not wanted any more.

        Raise `ApiError` if it is refused for good, and `LeadershipLostError` if this service must not act any more.
        """
        pause = FIRST_PAUSE
        while is_wanted():
            if not self._leadership.is_leading():
                raise LeadershipLostError("this service does not lead any more")
            try:
                done = await change()
            except ApiUnavailableError as error:
                self.unavailable = error.text
                await asyncio.sleep(max(uniform(0.5, 1.0) * pause, min(error.retry_after or 0.0, LONGEST_PAUSE)))
                pause = min(2 * pause, LONGEST_PAUSE)
            else:
                self.unavailable = None
                return done
        return None
